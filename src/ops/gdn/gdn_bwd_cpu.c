/* gdn backward, fast CPU version; see gdn.h and gdn_chunk_int.h. Names as there; E is the gradient
 * of the state that leaves a chunk, P = tril(Q K^T * D):
 *   dX = P^T dO + diag(e^(s_end - s)) K E;   (I + A)^T dR = dX;   dA = -tril(dR X^T, -1)
 *   dV = diag(w) dR
 *   d(q_i.k_j) = D_ij (dO_i . X_j);   d(k_i.k_j) = w_i D_ij dA_ij: both are summed over the value
 *     heads before they meet Q and K
 *   dQ += diag(e^s) dO S^T;   dK += diag(e^(s_end - s)) X E^T - diag(w e^s) dR S^T
 *   E of the chunk before: e^(s_end) E + Q^T diag(e^s) dO - K^T diag(w e^s) dR
 *   dw_i = dR_i . (V - diag(e^s) K S)_i + sum_j dA_ij D_ij (k_i . k_j)
 *   dg_r = sum_(i>=r, j<r) T_ij + sum_(i>=r) p_i + sum_(j<r) n_j + e^(s_end) <E, S>
 * with T the product of the gradients of P and A with P and A,
 * p_i = e^(s_i) (dO_i . S^T q_i - w_i dR_i . S^T k_i) and n_j = e^(s_end - s_j) X_j . E^T k_j.
 * Unlike dq.q - dk.k summed from the end, no term is a difference of large sums. */
#include "ops/gdn/gdn_chunk_int.h"
#include "ops/gdn/gdn.h"

#include <omp.h>

struct scratch {
    struct chunk k;
    struct head h;
    float *dqk, *dkk;         /* [pad][c_row]: sums over value heads, [j][i] */
    float *v, *x, *d_o, *dr;  /* [pad][v_row]; v: what the state does not hold; dr: dX, then dR */
    float *t, *u;             /* [dv][c_row]: transposes */
    float *z;                 /* [dk][c_row] */
    float *dqt, *dkt;         /* [dk][c_row]: sums over value heads, transposed */
    float *out;               /* [pad][k_row] */
    float *sum, *dg, *dw;     /* [pad]: prefix sums; dg and dw of the pairs inside the chunk */
    float *pass, *inject, *f; /* [pad]: p_i; n_j; row factors */
    float *state;             /* [dk][v_row]: enters the chunk */
    float *e;                 /* [per_key][dk][v_row] */
};

static int64_t scratch_floats(const struct inputs *in)
{
    int64_t c = in->c_row;
    return chunk_floats(in) + 2 * c * c + 4 * c * in->v_row + 2 * in->dv * c + 3 * in->dk * c + c * in->k_row + 6 * c +
           (in->per_key + 1) * in->dk * in->v_row + BLOCK;
}

/* Sums of dA_log and ddt_bias by batch and head. */
enum { SUM_A, SUM_BIAS, N_SUMS };
static int64_t sum_floats(const struct inputs *in) { return in->batch * in->heads * N_SUMS; }

int64_t CPU_NAME(gdn_bwd_work_cpu)(const struct gdn_bwd_args *a)
{
    struct inputs in = INPUTS_OF(a);
    return (sum_floats(&in) + omp_get_max_threads() * scratch_floats(&in)) * (int64_t)sizeof(float);
}

static void scratch_take(const struct inputs *in, struct scratch *s, float *at)
{
    int64_t c = in->c_row;
    at = align_floats(at);
    chunk_take(in, &s->k, &s->h, &at);
    s->dqk = take(&at, c * c);
    s->dkk = take(&at, c * c);
    s->v = take(&at, c * in->v_row);
    s->x = take(&at, c * in->v_row);
    s->d_o = take(&at, c * in->v_row);
    s->dr = take(&at, c * in->v_row);
    s->t = take(&at, in->dv * c);
    s->u = take(&at, in->dv * c);
    s->z = take(&at, in->dk * c);
    s->dqt = take(&at, in->dk * c);
    s->dkt = take(&at, in->dk * c);
    s->out = take(&at, c * in->k_row);
    s->sum = take(&at, c);
    s->dg = take(&at, c);
    s->dw = take(&at, c);
    s->pass = take(&at, c);
    s->inject = take(&at, c);
    s->f = take(&at, c);
    s->state = take(&at, in->dk * in->v_row);
    s->e = take(&at, in->per_key * in->dk * in->v_row);
}

/* dX into dr, and n_j. */
static void values_gradient(const struct inputs *in, struct scratch *s, const float *e, bool leaving)
{
    const struct chunk *k = &s->k;
    int64_t row = in->v_row, wide = in->v_pad;
    if (leaving) {
        multiply(&(struct product){.a = k->k,
                                   .a_row = in->k_row,
                                   .a_step = 1,
                                   .b = e,
                                   .b_row = row,
                                   .out = s->dr,
                                   .out_row = row,
                                   .rows = k->r.pad,
                                   .cols = wide,
                                   .depth = in->dk});
        scale_rows(s->dr, s->dr, row, s->h.d.to_end, k->r.pad, wide);
    }
    for (int64_t j = 0; j < k->r.pad; j++)
        s->inject[j] = leaving ? dot(s->dr + j * row, s->x + j * row, wide) : 0.0f;
    for (int64_t j = 0; j < k->r.pad; j += BLOCK)
        multiply(&(struct product){.a = s->h.m + j * in->c_row + j,
                                   .a_row = in->c_row,
                                   .a_step = 1,
                                   .b = s->d_o + j * row,
                                   .b_row = row,
                                   .out = s->dr + j * row,
                                   .out_row = row,
                                   .rows = BLOCK,
                                   .cols = wide,
                                   .depth = k->r.pad - j,
                                   .add = leaving});
}

/* dX to dR in place: (I + A)^T dR = dX, from the last block of rows to the first. */
static void solve_transposed(const struct inputs *in, struct scratch *s)
{
    int64_t row = in->v_row, pad = s->k.r.pad;
    for (int64_t j = pad - BLOCK; j >= 0; j -= BLOCK) {
        float *block = s->dr + j * row;
        const float *a = s->h.a + j * in->c_row + j;
        multiply(&(struct product){.a = a + BLOCK,
                                   .a_row = in->c_row,
                                   .a_step = 1,
                                   .b = block + BLOCK * row,
                                   .b_row = row,
                                   .out = block,
                                   .out_row = row,
                                   .rows = BLOCK,
                                   .cols = in->v_pad,
                                   .depth = pad - j - BLOCK,
                                   .add = true});
        for (int64_t c = 0; c < in->v_pad; c += VL) {
            vec r[BLOCK];
            for (int n = 0; n < BLOCK; n++)
                r[n] = *(const vec *)(block + n * row + c);
            for (int i = BLOCK - 1; i > 0; i--)
                for (int n = 0; n < i; n++)
                    r[n] += r[i] * a[n * in->c_row + i];
            for (int n = 0; n < BLOCK; n++)
                *(vec *)(block + n * row + c) = r[n];
        }
    }
}

/* One pass over the triangle. m holds X_j . dO_i and a holds X_j . dR_i = -dA_ij; their parts of
 * dqk, dkk, dw and dg. Before row j is added, sum[i] holds the T_ij' of all j' < j, so dg_j is its
 * sum over i >= j; rows that lie behind are cleared. */
static void triangle(const struct inputs *in, struct scratch *s)
{
    const struct chunk *k = &s->k;
    const struct head *h = &s->h;
    memset(s->sum, 0, (size_t)k->r.pad * sizeof(float));
    memset(s->dw, 0, (size_t)k->r.pad * sizeof(float));
    for (int64_t j = 0; j < k->r.pad; j++) {
        vec total = {0};
        h->a[j * in->c_row + j] = 0;
        for (int64_t i = j / BLOCK * BLOCK; i < k->r.pad; i += VL) {
            int64_t at = j * in->c_row + i;
            vec d = decay_lanes(&h->d, &k->r, j, i), kk = *(const vec *)(k->kk + at), w = *(const vec *)(h->w + i);
            vec dqk = *(const vec *)(h->m + at) * d, da = *(const vec *)(h->a + at) * d;
            vec *sum = (vec *)(s->sum + i);
            *(vec *)(s->dqk + at) += dqk;
            *(vec *)(s->dkk + at) -= da * w;
            *(vec *)(s->dw + i) -= da * kk;
            total += *sum;
            *sum += dqk * *(const vec *)(k->qk + at) - da * kk * w;
        }
        s->dg[j] = lanes_sum(total);
        s->sum[j] = 0;
    }
}

/* z = S t; adds z times the row factors f to sums, and to pass the products with the rows
 * themselves. */
static void through_state(const struct inputs *in, struct scratch *s, const float *state, const float *t,
                          const float *rows_t, float *sums)
{
    int64_t c = in->c_row, pad = s->k.r.pad;
    multiply(&(struct product){.a = state,
                               .a_row = in->v_row,
                               .a_step = 1,
                               .b = t,
                               .b_row = c,
                               .out = s->z,
                               .out_row = c,
                               .rows = in->dk,
                               .cols = pad,
                               .depth = in->dv});
    for (int64_t i = 0; i < pad; i += VL) {
        vec pass = {0}, factor = *(const vec *)(s->f + i);
        for (int64_t n = 0; n < in->dk; n++) {
            vec z = *(const vec *)(s->z + n * c + i) * factor;
            *(vec *)(sums + n * c + i) += z;
            if (rows_t != NULL)
                pass += z * *(const vec *)(rows_t + n * c + i);
        }
        *(vec *)(s->pass + i) += pass;
    }
}

/* dq and dk through the states at both ends of the chunk. On entry t holds
 * dO^T and u holds dR^T. */
static void key_gradients(const struct inputs *in, struct scratch *s, const float *state, const float *e, bool leaving)
{
    const struct chunk *k = &s->k;
    const struct head *h = &s->h;
    memset(s->pass, 0, (size_t)k->r.pad * sizeof(float));
    if (state != NULL) {
        memcpy(s->f, h->d.from_start, (size_t)k->r.pad * sizeof(float));
        through_state(in, s, state, s->t, k->qt, s->dqt);
        for (int64_t i = 0; i < k->r.pad; i++)
            s->f[i] *= -h->w[i];
        through_state(in, s, state, s->u, k->kt, s->dkt);
    }
    if (leaving) {
        memcpy(s->f, h->d.to_end, (size_t)k->r.pad * sizeof(float));
        transpose(s->t, in->c_row, s->x, in->v_row, k->r.pad, in->dv, 1.0f);
        through_state(in, s, e, s->t, NULL, s->dkt);
    }
}

/* e^(s_end) <E, S>, then E becomes the gradient of the state that entered. */
static float pass_gradient(const struct inputs *in, struct scratch *s, float *e, const float *state, bool leaving,
                           bool wanted)
{
    const struct chunk *k = &s->k;
    const struct head *h = &s->h;
    int64_t row = in->v_row, wide = in->v_pad;
    float through = 0;
    for (int64_t n = 0; n < in->dk && state != NULL && leaving; n++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < in->dv; c++)
            sum += e[n * row + c] * state[n * row + c];
        through += sum;
    }
    if (!wanted)
        return through * h->d.whole;
    for (int64_t n = 0; n < in->dk; n++)
        for (int64_t c = 0; c < wide; c += VL)
            *(vec *)(e + n * row + c) *= h->d.whole;
    for (int64_t i = 0; i < k->r.pad; i++)
        s->f[i] = -h->w[i] * h->d.from_start[i];
    scale_rows(s->d_o, s->d_o, row, h->d.from_start, k->r.pad, wide);
    scale_rows(s->dr, s->dr, row, s->f, k->r.pad, wide);
    struct product onto = {.a = k->q,
                           .a_row = 1,
                           .a_step = in->k_row,
                           .b = s->d_o,
                           .b_row = row,
                           .out = e,
                           .out_row = row,
                           .rows = in->dk,
                           .cols = wide,
                           .depth = k->r.pad,
                           .add = true};
    multiply(&onto);
    onto.a = k->k;
    onto.b = s->dr;
    multiply(&onto);
    return through * h->d.whole;
}

/* dv, and what it adds to dw. */
static void value_outputs(const struct gdn_bwd_args *a, const struct inputs *in, struct scratch *s, int64_t head)
{
    const struct chunk *k = &s->k;
    for (int64_t i = 0; i < k->r.n; i++) {
        const float *dr = s->dr + i * in->v_row;
        float *out = head_at(&a->dv, k->r.batch, k->r.first + i, head), w = s->h.w[i];
        s->dw[i] += dot(dr, s->v + i * in->v_row, in->v_pad);
#pragma omp simd
        for (int64_t c = 0; c < in->dv; c++)
            out[c] = w * dr[c];
    }
}

/* dg from its four parts, then the gradients of alpha, beta and of the head's scalars. */
static void gate_gradients(const struct gdn_bwd_args *a, struct scratch *s, float through, int64_t head, float *sums)
{
    const struct chunk *k = &s->k;
    const struct head *h = &s->h;
    float *dalpha = head_at(&a->dalpha, k->r.batch, k->r.first, head),
          *dbeta = head_at(&a->dbeta, k->r.batch, k->r.first, head);
    double later = 0, earlier = 0, d_rate = 0, d_bias = 0;
    for (int64_t i = k->r.n - 1; i >= 0; i--) {
        later += (double)s->pass[i];
        s->dg[i] += (float)later;
    }
    for (int64_t i = 0; i < k->r.n; i++) {
        float dg = s->dg[i] + (float)(earlier + (double)through), d = dg * h->slope[i];
        earlier += (double)s->inject[i];
        dalpha[i * a->dalpha.stride[1]] = d;
        dbeta[i * a->dbeta.stride[1]] = s->dw[i] * h->w[i] * (1.0f - h->w[i]);
        d_bias += (double)d;
        d_rate += (double)(dg * h->g[i]);
    }
    sums[SUM_A] += (float)d_rate;
    sums[SUM_BIAS] += (float)d_bias;
}

/* The state that enters, with padded rows; NULL: nothing does. */
static const float *incoming_state(const struct gdn_bwd_args *a, const struct inputs *in, struct scratch *s,
                                   int64_t index, int64_t head)
{
    const float *state = entering(&a->states, s->k.r.batch, index, head);
    int64_t row = a->states.stride[3];
    if (index == 0 && all_zero(state, row, in->dk, in->dv))
        return NULL;
    pack_rows(s->state, in->v_row, state, row, in->dk, in->dv, in->dk, in->v_pad);
    return s->state;
}

static void bwd_chunk_head(const struct gdn_bwd_args *a, const struct inputs *in, struct scratch *s, int64_t index,
                           int64_t head, float *e, bool leaving, float *sums)
{
    struct chunk *k = &s->k;
    int64_t row = in->v_row;
    const float *state = incoming_state(a, in, s, index, head);
    head_load(in, k, &s->h, head);
    pack_rows(s->v, row, head_at(&a->v, k->r.batch, k->r.first, head), a->v.stride[1], k->r.n, in->dv, k->r.pad,
              in->v_pad);
    pack_rows(s->d_o, row, head_at(&a->d_o, k->r.batch, k->r.first, head), a->d_o.stride[1], k->r.n, in->dv, k->r.pad,
              in->v_pad);
    solve_values(in, k, &s->h, state, s->v, s->x);
    values_gradient(in, s, e, leaving);
    solve_transposed(in, s);
    transpose(s->t, in->c_row, s->d_o, row, k->r.pad, in->dv, 1.0f);
    transpose(s->u, in->c_row, s->dr, row, k->r.pad, in->dv, 1.0f);
    multiply_triangle(s->h.m, in->c_row, k->r.pad, s->x, row, s->t, in->dv);
    multiply_triangle(s->h.a, in->c_row, k->r.pad, s->x, row, s->u, in->dv);
    triangle(in, s);
    value_outputs(a, in, s, head);
    key_gradients(in, s, state, e, leaving);
    float through = pass_gradient(in, s, e, state, leaving, index > 0 || present(&a->dinit));
    gate_gradients(a, s, through, head, sums);
}

/* From d, the gradient of y = scale * factor * x (factor brings x to unit length), to that of x. A vector of
 * one element is its sign but for GDN_EPS: there the two terms cancel to 1 - y^2 = GDN_EPS factor^2, which no
 * difference of floats would find. */
static void through_length(float *out, const float *d, const float *y, float scale, float factor, int64_t n)
{
    if (n == 1) {
        out[0] = factor * d[0] * scale * ((float)GDN_EPS * factor * factor);
        return;
    }
    float along = dot(d, y, round_up(n, BLOCK)) / scale;
#pragma omp simd
    for (int64_t c = 0; c < n; c++)
        out[c] = factor * (d[c] * scale - y[c] * along);
}

/* dq and dk of the chunk: what the states left, transposed back, plus dqk and
 * dkk against the rows. */
static void finish_chunk(const struct gdn_bwd_args *a, const struct inputs *in, struct scratch *s, int64_t key_head)
{
    const struct chunk *k = &s->k;
    int64_t c = in->c_row, row = in->k_row;
    for (int which = 0; which < 2; which++) {
        const struct tensor *to = which == 0 ? &a->dq : &a->dk;
        memset(s->out, 0, (size_t)(k->r.pad * row) * sizeof(float));
        transpose(s->out, row, which == 0 ? s->dqt : s->dkt, c, in->dk, k->r.pad, 1.0f);
        for (int64_t i = 0; i < k->r.pad; i += BLOCK) {
            struct product over_j = {.a = (which == 0 ? s->dqk : s->dkk) + i,
                                     .a_row = 1,
                                     .a_step = c,
                                     .b = k->k,
                                     .b_row = row,
                                     .out = s->out + i * row,
                                     .out_row = row,
                                     .rows = BLOCK,
                                     .cols = in->k_pad,
                                     .depth = i + BLOCK,
                                     .add = true};
            multiply(&over_j);
            struct product over_i = over_j;
            over_i.a_row = c;
            over_i.a_step = 1;
            over_i.depth = k->r.pad - i;
            over_i.a = s->dqk + i * c + i;
            over_i.b = k->q + i * row;
            if (which == 1)
                multiply(&over_i);
            over_i.a = s->dkk + i * c + i;
            over_i.b = k->k + i * row;
            if (which == 1)
                multiply(&over_i);
        }
        for (int64_t i = 0; i < k->r.n; i++)
            through_length(head_at(to, k->r.batch, k->r.first + i, key_head), s->out + i * row,
                           (which == 0 ? k->q : k->k) + i * row, which == 0 ? in->scale : 1.0f,
                           which == 0 ? k->q_factor[i] : k->k_factor[i], in->dk);
    }
}

static void bwd_unit(const struct gdn_bwd_args *a, const struct inputs *in, int64_t batch, int64_t key_head,
                     float *sums, float *memory)
{
    struct scratch s;
    scratch_take(in, &s, memory);
    int64_t from = key_head * in->per_key, to = from + in->per_key, size = in->dk * in->v_row;
    sums += (batch * in->heads + from) * N_SUMS;
    memset(sums, 0, (size_t)(in->per_key * N_SUMS) * sizeof(float));
    memset(s.e, 0, (size_t)(in->per_key * size) * sizeof(float));
    for (int64_t h = from; present(&a->dfinal) && h < to; h++)
        copy_rows(s.e + (h - from) * size, in->v_row, state_at(&a->dfinal, batch, h), a->dfinal.stride[2], in->dk,
                  in->dv);
    for (int64_t c = in->n_chunks - 1; c >= 0; c--) {
        chunk_load(in, &s.k, batch, key_head, c);
        memset(s.dqk, 0, (size_t)(s.k.r.pad * in->c_row) * sizeof(float));
        memset(s.dkk, 0, (size_t)(s.k.r.pad * in->c_row) * sizeof(float));
        memset(s.dqt, 0, (size_t)(in->dk * in->c_row) * sizeof(float));
        memset(s.dkt, 0, (size_t)(in->dk * in->c_row) * sizeof(float));
        bool leaving = c + 1 < in->n_chunks || present(&a->dfinal);
        for (int64_t h = from; h < to; h++)
            bwd_chunk_head(a, in, &s, c, h, s.e + (h - from) * size, leaving, sums + (h - from) * N_SUMS);
        finish_chunk(a, in, &s, key_head);
    }
    for (int64_t h = from; present(&a->dinit) && h < to; h++)
        copy_rows(state_at(&a->dinit, batch, h), a->dinit.stride[2], s.e + (h - from) * size, in->v_row, in->dk,
                  in->dv);
}

int CPU_NAME(gdn_bwd_cpu)(struct lane *l, const struct gdn_bwd_args *a)
{
    TRY(gdn_bwd_check(a, l->err));
    TRY(check_work("gdn_bwd", &a->work, CPU_NAME(gdn_bwd_work_cpu)(a), l->err));
    struct inputs in = INPUTS_OF(a);
    int64_t each = scratch_floats(&in);
    float *sums = a->work.data, *memory = sums + sum_floats(&in);
#pragma omp parallel for schedule(dynamic)
    for (int64_t u = 0; u < in.batch * in.key_heads; u++)
        bwd_unit(a, &in, u / in.key_heads, u % in.key_heads, sums, memory + omp_get_thread_num() * each);
    add_batches(&a->dA_log, sums, in.batch, in.heads, N_SUMS, SUM_A, a->acc_dA_log);
    add_batches(&a->ddt_bias, sums, in.batch, in.heads, N_SUMS, SUM_BIAS, a->acc_ddt_bias);
    return ST_OK;
}
