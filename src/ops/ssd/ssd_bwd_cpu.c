/* ssd backward, fast CPU version; see ssd.h and ssd_chunk_int.h. Names as there and in ssd.h; E is
 * the gradient of the state that leaves a chunk. Inside a chunk, with L_ij = e^(s_i - s_j) and G_ij
 * = C_i . B_j: w_j  = sum_(i>=j) G_ij L_ij dy_i + e^(S-s_j) E B_j;   dx_j = delta_j w_j + D dy_j
 *   dG_ij = L_ij delta_j (dy_i . x_j), summed over the heads before it meets C and B
 *   da_k = sum_(i>=k, j<k) dG_ij G_ij + sum_(i>=k) p_i + sum_(j<k) n_j + e^S <E, H>
 * where p_i = e^(s_i) dy_i . (H C_i) and n_j = delta_j e^(S-s_j) x_j . (E B_j). No term is a
 * difference of large sums. */
#include "ops/ssd/ssd_chunk_int.h"
#include "ops/ssd/ssd.h"

#include <omp.h>

struct scratch {
    struct chunk k;
    struct head h;
    float *m;                    /* [pad][q_row]: dy_i . x_j, then G L */
    float *dg;                   /* [pad][q_row]: sum over heads of dG, [j][i] */
    float *x, *dy, *w;           /* [pad][p_row] */
    float *xt, *dyt;             /* [p][q_row]: x times delta e^(S-s), and dy, transposed */
    float *z, *dbt, *dct;        /* [n][q_row]: a head's part of dC; sums over heads, transposed */
    float *out;                  /* [pad][n_row] */
    float *sum, *da, *pass, *wx; /* [pad]: prefix sums; da inside the chunk; p_i; w_j . x_j */
    float *inject;               /* [pad]: n_j */
    float *e;                    /* [SSD_HEADS][n][p_row] */
};

static int64_t scratch_floats(const struct inputs *in)
{
    int64_t q = in->q_row;
    return chunk_floats(in) + 2 * round_up(q * q, VL) + 3 * round_up(q * in->p_row, VL) + 2 * round_up(in->p * q, VL) +
           3 * round_up(in->n * q, VL) + round_up(q * in->n_row, VL) + 5 * round_up(q, VL) +
           round_up(SSD_HEADS * in->n * in->p_row, VL) + BLOCK;
}

/* Sums of dA_log, ddt_bias and dD by batch and head. */
enum { SUM_A, SUM_BIAS, SUM_D, N_SUMS };
static int64_t sum_floats(const struct inputs *in) { return in->batch * in->heads * N_SUMS; }
/* dBm and dCm of each block of heads, when a group has several. */
static int64_t part_floats(const struct inputs *in)
{
    return in->blocks > 1 ? 2 * in->blocks * in->batch * in->rows * in->groups * in->n : 0;
}

int64_t CPU_NAME(ssd_bwd_work_cpu)(const struct ssd_bwd_args *a)
{
    struct inputs in = INPUTS_OF(a);
    return (sum_floats(&in) + part_floats(&in) + omp_get_max_threads() * scratch_floats(&in)) * (int64_t)sizeof(float);
}

static void scratch_take(const struct inputs *in, struct scratch *s, float *at)
{
    int64_t q = in->q_row;
    at = align_floats(at);
    chunk_take(in, &s->k, &s->h, &at);
    s->m = take(&at, q * q);
    s->dg = take(&at, q * q);
    s->x = take(&at, q * in->p_row);
    s->dy = take(&at, q * in->p_row);
    s->w = take(&at, q * in->p_row);
    s->xt = take(&at, in->p * q);
    s->dyt = take(&at, in->p * q);
    s->z = take(&at, in->n * q);
    s->dbt = take(&at, in->n * q);
    s->dct = take(&at, in->n * q);
    s->out = take(&at, q * in->n_row);
    s->sum = take(&at, q);
    s->da = take(&at, q);
    s->pass = take(&at, q);
    s->wx = take(&at, q);
    s->inject = take(&at, q);
    s->e = take(&at, SSD_HEADS * in->n * in->p_row);
}

/* One pass over the triangle: m from dy.x to G L, dG added to dg, and da of the pairs inside the
 * chunk. Before row j is added, sum[i] holds the T_ij' of all j' < j, so da_j is its sum over i >=
 * j; rows that lie behind are cleared. */
static void triangle(const struct inputs *in, struct scratch *s)
{
    const struct chunk *k = &s->k;
    memset(s->sum, 0, (size_t)k->r.pad * sizeof(float));
    for (int64_t j = 0; j < k->r.pad; j++) {
        vec total = {0};
        float delta = s->h.delta[j];
        for (int64_t i = j / BLOCK * BLOCK; i < k->r.pad; i += VL) {
            int64_t at = j * in->q_row + i;
            vec l = decay_lanes(&s->h.d, &k->r, j, i), g = *(const vec *)(k->g + at),
                dg = l * *(const vec *)(s->m + at) * delta;
            vec *sum = (vec *)(s->sum + i);
            *(vec *)(s->m + at) = g * l;
            *(vec *)(s->dg + at) += dg;
            total += *sum;
            *sum += dg * g;
        }
        s->da[j] = lanes_sum(total);
        s->sum[j] = 0;
    }
}

/* w, dx, and the row sums w.x, n_j and dy.x. */
static float input_gradients(const struct inputs *in, struct scratch *s, const float *e, float skip, bool leaving,
                             const struct tensor *dx, int64_t head)
{
    const struct chunk *k = &s->k;
    const struct head *h = &s->h;
    int64_t row = in->p_row, wide = in->p_pad;
    float d_skip = 0;
    if (leaving)
        multiply(&(struct product){.a = k->b,
                                   .a_row = in->n_row,
                                   .a_step = 1,
                                   .b = e,
                                   .b_row = row,
                                   .out = s->w,
                                   .out_row = row,
                                   .rows = k->r.pad,
                                   .cols = wide,
                                   .depth = in->n});
    else
        memset(s->w, 0, (size_t)(k->r.pad * row) * sizeof(float));
    for (int64_t j = 0; j < k->r.pad; j++) {
        for (int64_t c = 0; leaving && c < wide; c += VL)
            *(vec *)(s->w + j * row + c) *= h->d.to_end[j];
        s->inject[j] = leaving ? h->delta[j] * dot(s->w + j * row, s->x + j * row, wide) : 0.0f;
    }
    for (int64_t j = 0; j < k->r.pad; j += BLOCK)
        multiply(&(struct product){.a = s->m + j * in->q_row + j,
                                   .a_row = in->q_row,
                                   .a_step = 1,
                                   .b = s->dy + j * row,
                                   .b_row = row,
                                   .out = s->w + j * row,
                                   .out_row = row,
                                   .rows = BLOCK,
                                   .cols = wide,
                                   .depth = k->r.pad - j,
                                   .add = true});
    for (int64_t j = 0; j < k->r.n; j++) {
        const float *w = s->w + j * row, *dy = s->dy + j * row;
        float *out = head_at(dx, k->r.batch, k->r.first + j, head), delta = h->delta[j];
        s->wx[j] = dot(w, s->x + j * row, wide);
        d_skip += dot(dy, s->x + j * row, wide);
#pragma omp simd
        for (int64_t c = 0; c < in->p; c++)
            out[c] = delta * w[c] + skip * dy[c];
    }
    return d_skip;
}

/* A head's part of dC through the incoming state, and p_i. */
static void through_incoming(const struct inputs *in, struct scratch *s, const float *state, int64_t state_row)
{
    const struct chunk *k = &s->k;
    int64_t q = in->q_row;
    multiply(&(struct product){.a = state,
                               .a_row = state_row,
                               .a_step = 1,
                               .b = s->dyt,
                               .b_row = q,
                               .out = s->z,
                               .out_row = q,
                               .rows = in->n,
                               .cols = k->r.pad,
                               .depth = in->p});
    for (int64_t i = 0; i < k->r.pad; i += VL) {
        vec pass = {0}, factor = *(const vec *)(s->h.d.from_start + i);
        for (int64_t n = 0; n < in->n; n++) {
            vec z = *(const vec *)(s->z + n * q + i) * factor;
            *(vec *)(s->dct + n * q + i) += z;
            pass += z * *(const vec *)(k->ct + n * q + i);
        }
        *(vec *)(s->pass + i) = pass;
    }
}

/* e^S <E, H>, then E becomes the gradient of the state that entered. */
static float pass_gradient(const struct inputs *in, struct scratch *s, float *e, const float *state, int64_t state_row,
                           bool incoming, bool leaving, bool wanted)
{
    const struct chunk *k = &s->k;
    int64_t row = in->p_row, wide = in->p_pad;
    float through = 0;
    for (int64_t n = 0; n < in->n && incoming && leaving; n++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < in->p; c++)
            sum += e[n * row + c] * state[n * state_row + c];
        through += sum;
    }
    if (!wanted)
        return through * s->h.d.whole;
    for (int64_t n = 0; n < in->n; n++)
        for (int64_t c = 0; c < wide; c += VL)
            *(vec *)(e + n * row + c) *= s->h.d.whole;
    scale_rows(s->dy, s->dy, row, s->h.d.from_start, k->r.pad, wide);
    multiply(&(struct product){.a = k->c,
                               .a_row = 1,
                               .a_step = in->n_row,
                               .b = s->dy,
                               .b_row = row,
                               .out = e,
                               .out_row = row,
                               .rows = in->n,
                               .cols = wide,
                               .depth = k->r.pad,
                               .add = true});
    return through * s->h.d.whole;
}

/* da_k from its four parts, then the gradient of dt and of the head's scalars. */
static void step_gradients(const struct ssd_bwd_args *a, struct scratch *s, float through, int64_t head, float *sums)
{
    const struct chunk *k = &s->k;
    const struct head *h = &s->h;
    float *ddt = (float *)a->ddt.data + k->r.batch * a->ddt.stride[0] + k->r.first * a->ddt.stride[1] + head;
    double later = 0, earlier = 0, d_rate = 0, d_bias = 0;
    for (int64_t i = k->r.n - 1; i >= 0; i--) {
        later += (double)s->pass[i];
        s->da[i] += (float)later;
    }
    for (int64_t i = 0; i < k->r.n; i++) {
        float da = s->da[i] + (float)(earlier + (double)through);
        float d = (s->wx[i] + h->rate * da) * h->slope[i];
        earlier += (double)s->inject[i];
        ddt[i * a->ddt.stride[1]] = d;
        d_bias += (double)d;
        d_rate += (double)(da * h->delta[i]);
    }
    sums[SUM_A] += h->rate * (float)d_rate;
    sums[SUM_BIAS] += (float)d_bias;
}

static void bwd_chunk_head(const struct ssd_bwd_args *a, const struct inputs *in, struct scratch *s, int64_t index,
                           int64_t head, float *e, bool leaving, float *sums)
{
    struct chunk *k = &s->k;
    int64_t q = in->q_row, row = in->p_row, state_row = a->states.stride[3];
    const float *state = entering(&a->states, k->r.batch, index, head);
    bool incoming = index > 0 || !all_zero(state, state_row, in->n, in->p);
    head_load(in, k, &s->h, head);
    pack_rows(s->x, row, head_at(&a->x, k->r.batch, k->r.first, head), a->x.stride[1], k->r.n, in->p, k->r.pad,
              in->p_pad);
    pack_rows(s->dy, row, head_at(&a->dy, k->r.batch, k->r.first, head), a->dy.stride[1], k->r.n, in->p, k->r.pad,
              in->p_pad);
    transpose(s->dyt, q, s->dy, row, k->r.pad, in->p, 1.0f);
    multiply_triangle(s->m, q, k->r.pad, s->x, row, s->dyt, in->p);
    triangle(in, s);
    sums[SUM_D] +=
        input_gradients(in, s, e, present(&a->D) ? ((const float *)a->D.data)[head] : 0.0f, leaving, &a->dx, head);
    if (incoming)
        through_incoming(in, s, state, state_row);
    else
        memset(s->pass, 0, (size_t)k->r.pad * sizeof(float));
    if (leaving) {
        for (int64_t j = 0; j < k->r.pad; j++)
            s->sum[j] = s->h.delta[j] * s->h.d.to_end[j];
        scale_rows(s->x, s->x, row, s->sum, k->r.pad, in->p_pad);
        transpose(s->xt, q, s->x, row, k->r.pad, in->p, 1.0f);
        multiply(&(struct product){.a = e,
                                   .a_row = row,
                                   .a_step = 1,
                                   .b = s->xt,
                                   .b_row = q,
                                   .out = s->dbt,
                                   .out_row = q,
                                   .rows = in->n,
                                   .cols = k->r.pad,
                                   .depth = in->p,
                                   .add = true});
    }
    float through = pass_gradient(in, s, e, state, state_row, incoming, leaving, index > 0 || present(&a->dinit));
    step_gradients(a, s, through, head, sums);
}

/* Where a unit leaves row t of dBm (which 0) or dCm (which 1). */
static float *group_row(const struct ssd_bwd_args *a, const struct inputs *in, float *parts, int which, int64_t block,
                        int64_t batch, int64_t t, int64_t group)
{
    if (in->blocks == 1)
        return head_at(which == 0 ? &a->dBm : &a->dCm, batch, t, group);
    int64_t plane = which * in->blocks + block;
    return parts + (((plane * in->batch + batch) * in->rows + t) * in->groups + group) * in->n;
}

/* dB and dC of the chunk: what the heads left, transposed back, plus dG against C and B. */
static void finish_chunk(const struct ssd_bwd_args *a, const struct inputs *in, struct scratch *s, float *parts,
                         int64_t block, int64_t group)
{
    const struct chunk *k = &s->k;
    int64_t q = in->q_row, row = in->n_row;
    for (int which = 0; which < 2; which++) {
        transpose(s->out, row, which == 0 ? s->dbt : s->dct, q, in->n, k->r.pad, 1.0f);
        for (int64_t i = 0; i < k->r.pad; i += BLOCK) {
            struct product over_i = {
                .a = s->dg + i * q + i, .a_row = q, .a_step = 1, .b = k->c + i * row, .depth = k->r.pad - i};
            struct product over_j = {.a = s->dg + i, .a_row = 1, .a_step = q, .b = k->b, .depth = i + BLOCK};
            struct product p = which == 0 ? over_i : over_j;
            p.b_row = p.out_row = row;
            p.out = s->out + i * row;
            p.rows = BLOCK;
            p.cols = in->n;
            p.add = true;
            multiply(&p);
        }
        for (int64_t i = 0; i < k->r.n; i++)
            memcpy(group_row(a, in, parts, which, block, k->r.batch, k->r.first + i, group), s->out + i * row,
                   (size_t)in->n * sizeof(float));
    }
}

static void bwd_unit(const struct ssd_bwd_args *a, const struct inputs *in, int64_t batch, int64_t group, int64_t block,
                     float *sums, float *parts, float *memory)
{
    struct scratch s;
    scratch_take(in, &s, memory);
    int64_t from = group * in->per_group + block * SSD_HEADS;
    int64_t to = min_i64(from + SSD_HEADS, (group + 1) * in->per_group), size = in->n * in->p_row;
    memset(s.e, 0, (size_t)(SSD_HEADS * size) * sizeof(float));
    for (int64_t h = from; h < to; h++) {
        if (present(&a->dfinal))
            copy_rows(s.e + (h - from) * size, in->p_row, state_at(&a->dfinal, batch, h), a->dfinal.stride[2], in->n,
                      in->p);
        memset(sums + (batch * in->heads + h) * N_SUMS, 0, N_SUMS * sizeof(float));
    }
    for (int64_t c = in->n_chunks - 1; c >= 0; c--) {
        chunk_load(in, &s.k, batch, group, c);
        memset(s.dg, 0, (size_t)(s.k.r.pad * in->q_row) * sizeof(float));
        memset(s.dbt, 0, (size_t)(in->n * in->q_row) * sizeof(float));
        memset(s.dct, 0, (size_t)(in->n * in->q_row) * sizeof(float));
        bool leaving = c + 1 < in->n_chunks || present(&a->dfinal);
        for (int64_t h = from; h < to; h++)
            bwd_chunk_head(a, in, &s, c, h, s.e + (h - from) * size, leaving, sums + (batch * in->heads + h) * N_SUMS);
        finish_chunk(a, in, &s, parts, block, group);
    }
    for (int64_t h = from; present(&a->dinit) && h < to; h++)
        copy_rows(state_at(&a->dinit, batch, h), a->dinit.stride[2], s.e + (h - from) * size, in->p_row, in->n, in->p);
}

static void add_parts(const struct ssd_bwd_args *a, const struct inputs *in, float *parts)
{
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < in->batch * in->rows * in->groups; r++) {
        int64_t group = r % in->groups, t = r / in->groups % in->rows, batch = r / in->groups / in->rows;
        for (int which = 0; which < 2; which++) {
            float *out = head_at(which == 0 ? &a->dBm : &a->dCm, batch, t, group);
            for (int64_t n = 0; n < in->n; n++)
                out[n] = 0;
            for (int64_t block = 0; block < in->blocks; block++) {
                const float *part = group_row(a, in, parts, which, block, batch, t, group);
                for (int64_t n = 0; n < in->n; n++)
                    out[n] += part[n];
            }
        }
    }
}

int CPU_NAME(ssd_bwd_cpu)(struct lane *l, const struct ssd_bwd_args *a)
{
    TRY(ssd_bwd_check(a, l->err));
    TRY(check_work("ssd_bwd", &a->work, CPU_NAME(ssd_bwd_work_cpu)(a), l->err));
    struct inputs in = INPUTS_OF(a);
    int64_t units = in.groups * in.blocks, each = scratch_floats(&in);
    float *sums = a->work.data, *parts = sums + sum_floats(&in), *memory = parts + part_floats(&in);
#pragma omp parallel for schedule(dynamic)
    for (int64_t u = 0; u < in.batch * units; u++)
        bwd_unit(a, &in, u / units, u % units / in.blocks, u % in.blocks, sums, parts,
                 memory + omp_get_thread_num() * each);
    if (in.blocks != 1)
        add_parts(a, &in, parts);
    add_batches(&a->dA_log, sums, in.batch, in.heads, N_SUMS, SUM_A, a->acc_dA_log);
    add_batches(&a->ddt_bias, sums, in.batch, in.heads, N_SUMS, SUM_BIAS, a->acc_ddt_bias);
    add_batches(&a->dD, sums, in.batch, in.heads, N_SUMS, SUM_D, a->acc_dD);
    return ST_OK;
}
