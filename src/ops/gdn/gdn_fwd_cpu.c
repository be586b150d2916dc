/* gdn forward, fast CPU version; see gdn.h and gdn_chunk_int.h. */
#include "ops/gdn/gdn_chunk_int.h"
#include "ops/gdn/gdn.h"

#include <omp.h>

struct scratch {
    struct chunk k;
    struct head h;
    float *v, *x, *o; /* [pad][v_row] */
    float *state;     /* [per_key][dk][v_row] */
};

static int64_t scratch_floats(const struct inputs *in)
{
    if (in->rows <= FEW_ROWS)
        return round_up(in->dk * in->dv, VL) + 2 * round_up(in->dk, VL) + round_up(in->dv, VL) + BLOCK;
    return chunk_floats(in) + 3 * in->c_row * in->v_row + in->per_key * in->dk * in->v_row + BLOCK;
}

int64_t CPU_NAME(gdn_fwd_work_cpu)(const struct gdn_fwd_args *a)
{
    struct inputs in = INPUTS_OF(a);
    return omp_get_max_threads() * scratch_floats(&in) * (int64_t)sizeof(float);
}

static void scratch_take(const struct inputs *in, struct scratch *s, float *at)
{
    at = align_floats(at);
    chunk_take(in, &s->k, &s->h, &at);
    s->v = take(&at, in->c_row * in->v_row);
    s->x = take(&at, in->c_row * in->v_row);
    s->o = take(&at, in->c_row * in->v_row);
    s->state = take(&at, in->per_key * in->dk * in->v_row);
}

/* o from v, then the state moves on. */
static void fwd_chunk_head(const struct inputs *in, struct scratch *s, float *state, bool incoming, bool outgoing)
{
    const struct chunk *k = &s->k;
    const struct head *h = &s->h;
    int64_t row = in->v_row, wide = in->v_pad;
    solve_values(in, k, h, incoming ? state : NULL, s->v, s->x);
    if (incoming) {
        multiply(&(struct product){.a = k->q,
                                   .a_row = in->k_row,
                                   .a_step = 1,
                                   .b = state,
                                   .b_row = row,
                                   .out = s->o,
                                   .out_row = row,
                                   .rows = k->r.pad,
                                   .cols = wide,
                                   .depth = in->dk});
        scale_rows(s->o, s->o, row, h->d.from_start, k->r.pad, wide);
    }
    for (int64_t i = 0; i < k->r.pad; i += BLOCK)
        multiply(&(struct product){.a = h->m + i,
                                   .a_row = 1,
                                   .a_step = in->c_row,
                                   .b = s->x,
                                   .b_row = row,
                                   .out = s->o + i * row,
                                   .out_row = row,
                                   .rows = BLOCK,
                                   .cols = wide,
                                   .depth = i + BLOCK,
                                   .add = incoming});
    if (!outgoing)
        return;
    scale_rows(s->x, s->x, row, h->d.to_end, k->r.pad, wide);
    for (int64_t n = 0; incoming && n < in->dk; n++)
        for (int64_t c = 0; c < wide; c += VL)
            *(vec *)(state + n * row + c) *= h->d.whole;
    multiply(&(struct product){.a = k->k,
                               .a_row = 1,
                               .a_step = in->k_row,
                               .b = s->x,
                               .b_row = row,
                               .out = state,
                               .out_row = row,
                               .rows = in->dk,
                               .cols = wide,
                               .depth = k->r.pad,
                               .add = incoming});
}

static void fwd_unit(const struct gdn_fwd_args *a, const struct inputs *in, int64_t batch, int64_t key_head, bool fresh,
                     float *memory)
{
    struct scratch s;
    scratch_take(in, &s, memory);
    int64_t from = key_head * in->per_key, to = from + in->per_key, size = in->dk * in->v_row;
    bool given = present(&a->init) && !fresh;
    memset(s.state, 0, (size_t)(in->per_key * size) * sizeof(float));
    for (int64_t h = from; given && h < to; h++)
        copy_rows(s.state + (h - from) * size, in->v_row, state_at(&a->init, batch, h), a->init.stride[2], in->dk,
                  in->dv);
    for (int64_t c = 0; c < in->n_chunks; c++) {
        chunk_load(in, &s.k, batch, key_head, c);
        for (int64_t h = from; h < to; h++) {
            float *state = s.state + (h - from) * size;
            if (present(&a->states))
                copy_rows(entering(&a->states, batch, c, h), a->states.stride[3], state, in->v_row, in->dk, in->dv);
            head_load(in, &s.k, &s.h, h);
            pack_rows(s.v, in->v_row, head_at(&a->v, batch, s.k.r.first, h), a->v.stride[1], s.k.r.n, in->dv, s.k.r.pad,
                      in->v_pad);
            fwd_chunk_head(in, &s, state, c > 0 || given, c + 1 < in->n_chunks || present(&a->final));
            copy_rows(head_at(&a->o, batch, s.k.r.first, h), a->o.stride[1], s.o, in->v_row, s.k.r.n, in->dv);
        }
    }
    for (int64_t h = from; present(&a->final) && h < to; h++)
        copy_rows(state_at(&a->final, batch, h), a->final.stride[2], s.state + (h - from) * size, in->v_row, in->dk,
                  in->dv);
}

/* ---- a few rows: the recurrence -------------------------------------------------------------- */

struct few {
    float *q, *k, *u; /* of unit length, q scaled; what is written */
    float *state;
    int64_t row;
};

static void few_row(const struct gdn_fwd_args *a, const struct inputs *in, int64_t b, int64_t head, int64_t t,
                    const struct few *f)
{
    int64_t key_head = head / in->per_key;
    const float *q = head_at(&a->q, b, t, key_head), *k = head_at(&a->k, b, t, key_head),
                *v = head_at(&a->v, b, t, head);
    float *o = head_at(&a->o, b, t, head), *u = f->u;
    float raw = *head_at(&a->alpha, b, t, head) + ((const float *)a->dt_bias.data)[head];
    float weight = sigmoid(*head_at(&a->beta, b, t, head));
    float decay = expf(-expf(((const float *)a->A_log.data)[head]) * softplus(raw));
    float q_factor = length_factor(q, in->dk) * in->scale, k_factor = length_factor(k, in->dk);
    bool begins = present(&a->doc_start) && ((const int32_t *)a->doc_start.data)[b * a->doc_start.stride[0] + t] == t;
    for (int64_t c = 0; c < in->dv; c++)
        u[c] = o[c] = 0;
    for (int64_t n = 0; n < in->dk; n++) {
        float *s = f->state + n * f->row;
        f->q[n] = q[n] * q_factor;
        f->k[n] = k[n] * k_factor;
        if (begins)
            memset(s, 0, (size_t)in->dv * sizeof(float));
#pragma omp simd
        for (int64_t c = 0; c < in->dv; c++) {
            s[c] *= decay;
            u[c] += s[c] * f->k[n];
        }
    }
#pragma omp simd
    for (int64_t c = 0; c < in->dv; c++)
        u[c] = weight * (v[c] - u[c]);
    for (int64_t n = 0; n < in->dk; n++) {
        float *s = f->state + n * f->row;
#pragma omp simd
        for (int64_t c = 0; c < in->dv; c++) {
            s[c] += f->k[n] * u[c];
            o[c] += s[c] * f->q[n];
        }
    }
}

static void few_rows(const struct gdn_fwd_args *a, const struct inputs *in, int64_t b, int64_t head, bool fresh,
                     float *memory)
{
    bool keep = present(&a->final);
    float *at = align_floats(memory);
    struct few f = {.q = take(&at, in->dk), .k = take(&at, in->dk), .u = take(&at, in->dv)};
    f.state = keep ? state_at(&a->final, b, head) : at;
    f.row = keep ? a->final.stride[2] : in->dv;
    const float *init = present(&a->init) && !fresh ? state_at(&a->init, b, head) : NULL;
    if (init != NULL && init != f.state)
        copy_rows(f.state, f.row, init, a->init.stride[2], in->dk, in->dv);
    for (int64_t n = 0; init == NULL && n < in->dk; n++)
        memset(f.state + n * f.row, 0, (size_t)in->dv * sizeof(float));
    for (int64_t t = 0; t < in->rows; t++) {
        if (present(&a->states) && t % in->chunk == 0)
            copy_rows(entering(&a->states, b, t / in->chunk, head), a->states.stride[3], f.state, f.row, in->dk,
                      in->dv);
        few_row(a, in, b, head, t, &f);
    }
}

int CPU_NAME(gdn_fwd_cpu)(struct lane *l, const struct gdn_fwd_args *a)
{
    TRY(gdn_fwd_check(a, l->err));
    TRY(check_work("gdn_fwd", &a->work, CPU_NAME(gdn_fwd_work_cpu)(a), l->err));
    struct inputs in = INPUTS_OF(a);
    bool fresh = present(&a->start) && *(const int64_t *)a->start.data == 0;
    int64_t each = scratch_floats(&in);
    float *memory = a->work.data;
    if (in.rows <= FEW_ROWS) {
#pragma omp parallel for schedule(static) if (in.batch * in.heads * in.dk * in.dv > 8192)
        for (int64_t u = 0; u < in.batch * in.heads; u++)
            few_rows(a, &in, u / in.heads, u % in.heads, fresh, memory + omp_get_thread_num() * each);
        return ST_OK;
    }
#pragma omp parallel for schedule(dynamic)
    for (int64_t u = 0; u < in.batch * in.key_heads; u++)
        fwd_unit(a, &in, u / in.key_heads, u % in.key_heads, fresh, memory + omp_get_thread_num() * each);
    return ST_OK;
}
