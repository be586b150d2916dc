/* ssd forward, fast CPU version; see ssd.h and ssd_chunk_int.h. */
#include "ops/ssd/ssd_chunk_int.h"
#include "ops/ssd/ssd.h"

#include <omp.h>

struct scratch {
    struct chunk k;
    struct head h;
    float *m;     /* [pad][q_row]: decayed g */
    float *x, *y; /* [pad][p_row] */
    float *state; /* [SSD_HEADS][n][p_row] */
};

static int64_t scratch_floats(const struct inputs *in)
{
    int64_t q = in->q_row;
    if (in->rows <= FEW_ROWS)
        return round_up(in->n * in->p, VL) + BLOCK;
    return chunk_floats(in) + round_up(q * q, VL) + 2 * round_up(q * in->p_row, VL) +
           round_up(SSD_HEADS * in->n * in->p_row, VL) + BLOCK;
}

int64_t CPU_NAME(ssd_fwd_work_cpu)(const struct ssd_fwd_args *a)
{
    struct inputs in = INPUTS_OF(a);
    return omp_get_max_threads() * scratch_floats(&in) * (int64_t)sizeof(float);
}

static void scratch_take(const struct inputs *in, struct scratch *s, float *at)
{
    at = align_floats(at);
    chunk_take(in, &s->k, &s->h, &at);
    s->m = take(&at, in->q_row * in->q_row);
    s->x = take(&at, in->q_row * in->p_row);
    s->y = take(&at, in->q_row * in->p_row);
    s->state = take(&at, SSD_HEADS * in->n * in->p_row);
}

static void decay_matrix(const struct inputs *in, struct scratch *s)
{
    const struct chunk *k = &s->k;
    for (int64_t j = 0; j < k->r.pad; j++)
        for (int64_t i = j / BLOCK * BLOCK; i < k->r.pad; i += VL)
            *(vec *)(s->m + j * in->q_row + i) =
                *(const vec *)(k->g + j * in->q_row + i) * decay_lanes(&s->h.d, &k->r, j, i);
}

/* y = (incoming state, decayed) + D x + (rows of the chunk); then the state moves on. x holds x on
 * entry. */
static void fwd_chunk_head(const struct inputs *in, struct scratch *s, float *state, float skip, bool incoming)
{
    const struct chunk *k = &s->k;
    const struct head *h = &s->h;
    int64_t row = in->p_row, wide = in->p_pad;
    if (incoming)
        multiply(&(struct product){.a = k->c,
                                   .a_row = in->n_row,
                                   .a_step = 1,
                                   .b = state,
                                   .b_row = row,
                                   .out = s->y,
                                   .out_row = row,
                                   .rows = k->r.pad,
                                   .cols = wide,
                                   .depth = in->n});
    for (int64_t i = 0; i < k->r.pad; i++)
        for (int64_t c = 0; c < wide; c += VL) {
            vec *y = (vec *)(s->y + i * row + c), *x = (vec *)(s->x + i * row + c), sum = *x * skip;
            if (incoming)
                sum += *y * h->d.from_start[i];
            *y = sum;
            *x *= h->delta[i];
        }
    decay_matrix(in, s);
    for (int64_t i = 0; i < k->r.pad; i += BLOCK)
        multiply(&(struct product){.a = s->m + i,
                                   .a_row = 1,
                                   .a_step = in->q_row,
                                   .b = s->x,
                                   .b_row = row,
                                   .out = s->y + i * row,
                                   .out_row = row,
                                   .rows = BLOCK,
                                   .cols = wide,
                                   .depth = i + BLOCK,
                                   .add = true});
    scale_rows(s->x, s->x, row, h->d.to_end, k->r.pad, wide);
    for (int64_t n = 0; incoming && n < in->n; n++)
        for (int64_t c = 0; c < wide; c += VL)
            *(vec *)(state + n * row + c) *= h->d.whole;
    multiply(&(struct product){.a = k->b,
                               .a_row = 1,
                               .a_step = in->n_row,
                               .b = s->x,
                               .b_row = row,
                               .out = state,
                               .out_row = row,
                               .rows = in->n,
                               .cols = wide,
                               .depth = k->r.pad,
                               .add = incoming});
}

static void fwd_unit(const struct ssd_fwd_args *a, const struct inputs *in, int64_t batch, int64_t group, int64_t block,
                     bool fresh, float *memory)
{
    struct scratch s;
    scratch_take(in, &s, memory);
    int64_t from = group * in->per_group + block * SSD_HEADS;
    int64_t to = min_i64(from + SSD_HEADS, (group + 1) * in->per_group), size = in->n * in->p_row;
    memset(s.state, 0, (size_t)(SSD_HEADS * size) * sizeof(float));
    for (int64_t h = from; present(&a->init) && !fresh && h < to; h++)
        copy_rows(s.state + (h - from) * size, in->p_row, state_at(&a->init, batch, h), a->init.stride[2], in->n,
                  in->p);
    for (int64_t c = 0; c < in->n_chunks; c++) {
        chunk_load(in, &s.k, batch, group, c);
        for (int64_t h = from; h < to; h++) {
            float *state = s.state + (h - from) * size, skip = present(&a->D) ? ((const float *)a->D.data)[h] : 0.0f;
            if (present(&a->states))
                copy_rows(entering(&a->states, batch, c, h), a->states.stride[3], state, in->p_row, in->n, in->p);
            head_load(in, &s.k, &s.h, h);
            pack_rows(s.x, in->p_row, head_at(&a->x, batch, s.k.r.first, h), a->x.stride[1], s.k.r.n, in->p, s.k.r.pad,
                      in->p_pad);
            fwd_chunk_head(in, &s, state, skip, c > 0 || (present(&a->init) && !fresh));
            copy_rows(head_at(&a->y, batch, s.k.r.first, h), a->y.stride[1], s.y, in->p_row, s.k.r.n, in->p);
        }
    }
    for (int64_t h = from; present(&a->final) && h < to; h++)
        copy_rows(state_at(&a->final, batch, h), a->final.stride[2], s.state + (h - from) * size, in->p_row, in->n,
                  in->p);
}

/* ---- a few rows: the recurrence -------------------------------------------------------------- */

static void few_row(const struct ssd_fwd_args *a, const struct inputs *in, int64_t b, int64_t head, int64_t t,
                    float *state, int64_t row)
{
    int64_t group = head / in->per_group;
    const float *x = head_at(&a->x, b, t, head), *bm = head_at(&a->Bm, b, t, group), *cm = head_at(&a->Cm, b, t, group);
    float *y = head_at(&a->y, b, t, head), slope, skip = present(&a->D) ? ((const float *)a->D.data)[head] : 0.0f;
    float raw = *head_at(&a->dt, b, t, head) + ((const float *)a->dt_bias.data)[head],
          delta = delta_of(in, raw, &slope);
    bool begins = present(&a->doc_start) && ((const int32_t *)a->doc_start.data)[b * a->doc_start.stride[0] + t] == t;
    float decay = begins ? 0.0f : expf(delta * -expf(((const float *)a->A_log.data)[head]));
#pragma omp simd
    for (int64_t c = 0; c < in->p; c++)
        y[c] = skip * x[c];
    for (int64_t n = 0; n < in->n; n++) {
        float *s = state + n * row, in_n = delta * bm[n], out_n = cm[n];
        if (begins)
            memset(s, 0, (size_t)in->p * sizeof(float));
#pragma omp simd
        for (int64_t c = 0; c < in->p; c++) {
            s[c] = decay * s[c] + in_n * x[c];
            y[c] += s[c] * out_n;
        }
    }
}

static void few_rows(const struct ssd_fwd_args *a, const struct inputs *in, int64_t b, int64_t head, bool fresh,
                     float *memory)
{
    bool keep = present(&a->final), use_init = present(&a->init) && !fresh;
    float *state = keep ? state_at(&a->final, b, head) : align_floats(memory);
    int64_t row = keep ? a->final.stride[2] : in->p;
    const float *init = use_init ? state_at(&a->init, b, head) : NULL;
    if (init != NULL && init != state)
        copy_rows(state, row, init, a->init.stride[2], in->n, in->p);
    for (int64_t n = 0; init == NULL && n < in->n; n++)
        memset(state + n * row, 0, (size_t)in->p * sizeof(float));
    for (int64_t t = 0; t < in->rows; t++) {
        if (present(&a->states) && t % in->chunk == 0)
            copy_rows(entering(&a->states, b, t / in->chunk, head), a->states.stride[3], state, row, in->n, in->p);
        few_row(a, in, b, head, t, state, row);
    }
}

int CPU_NAME(ssd_fwd_cpu)(struct lane *l, const struct ssd_fwd_args *a)
{
    TRY(ssd_fwd_check(a, l->err));
    TRY(check_work("ssd_fwd", &a->work, CPU_NAME(ssd_fwd_work_cpu)(a), l->err));
    struct inputs in = INPUTS_OF(a);
    bool fresh = present(&a->start) && *(const int64_t *)a->start.data == 0;
    int64_t each = scratch_floats(&in);
    if (in.rows <= FEW_ROWS) {
#pragma omp parallel for schedule(static) if (in.batch * in.heads * in.n * in.p > 8192)
        for (int64_t u = 0; u < in.batch * in.heads; u++)
            few_rows(a, &in, u / in.heads, u % in.heads, fresh, (float *)a->work.data + omp_get_thread_num() * each);
        return ST_OK;
    }
    int64_t units = in.groups * in.blocks;
#pragma omp parallel for schedule(dynamic)
    for (int64_t u = 0; u < in.batch * units; u++)
        fwd_unit(a, &in, u / units, u % units / in.blocks, u % in.blocks, fresh,
                 (float *)a->work.data + omp_get_thread_num() * each);
    return ST_OK;
}
