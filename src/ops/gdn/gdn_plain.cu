/* gdn on CUDA for every shape and type, in fp32 without tensor cores: decoding, fp32 storage, widths that do not tile.
 * Forward is the recurrence itself; backward is the chunked form of gdn_bwd_cpu.c (names and algebra as there), one
 * block of threads for a key head of a sequence, with its matrices in the work space. */
#include "ops/gdn/gdn_tile.cuh"
#include "ops/gdn/gdn.h"

enum { THREADS = 256, PLAIN_WARPS = THREADS / 32, COLUMNS = 32 };

/* ---- scalars of a row ------------------------------------------------------------------------ */

template <typename T> __device__ bool begins_document(const gdn_gates<T> &gates, int b, int t)
{
    return gates.doc_start != NULL && gates.doc_start[b * gates.doc_stride + t] == t;
}
__device__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
/* 1 / length, by one warp. */
template <typename T> __device__ float length_factor(const T *x, int n)
{
    float sum = 0;
    for (int c = threadIdx.x % 32; c < n; c += 32)
        sum += to_float(x[c]) * to_float(x[c]);
    return 1.0f / sqrtf(warp_sum(sum) + (float)GDN_EPS);
}

/* ---- forward --------------------------------------------------------------------------------- */

template <typename T> struct plain_fwd_args {
    struct gdn_geom g;
    gdn_view<const T> q, k, v;
    gdn_view<T> o;
    gdn_gates<T> gates;
    gdn_states<float> init, final;
    gdn_states<T> states;
    const int64_t *start;
    float *state; /* [B, Hv, dk, dv]: where the state lies while it does not fit in registers */
};

/* A block takes 32 columns of the state of a head, a lane one of them; warp w the rows w, w + 8, ... R: registers for
 * them, 0: they lie in memory. */
template <typename T, int R>
__global__ __launch_bounds__(THREADS) void plain_fwd_kernel(const __grid_constant__ struct plain_fwd_args<T> a)
{
    __shared__ float held_parts[PLAIN_WARPS][COLUMNS], out_parts[PLAIN_WARPS][COLUMNS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dk = a.g.dk, dv = a.g.dv;
    int h = (int)(blockIdx.x % a.g.heads), b = (int)(blockIdx.x / a.g.heads), kh = h / a.g.per_key;
    int col = (int)blockIdx.y * COLUMNS + lane;
    bool mine = col < dv, fresh = a.init.data == NULL || (a.start != NULL && *a.start == 0);
    const float *init = fresh ? NULL : state_at(a.init, b, 0, h);
    float *memory = a.state + ((int64_t)b * a.g.heads + h) * dk * dv + col, regs[R > 0 ? R : 1];
    float rate = -expf(a.gates.A_log[h]), bias = a.gates.dt_bias[h];
#define EACH_ROW(n, i)                                                                                                 \
    _Pragma("unroll") for (int i = 0, n = warp; R > 0 ? i < R : n < dk; i++, n += PLAIN_WARPS) if (n < dk && mine)
#define STATE(n, i) (*(R > 0 ? &regs[R > 0 ? i : 0] : memory + (int64_t)(n)*dv))
    EACH_ROW(n, i)
    STATE(n, i) = init != NULL ? init[n * a.init.n + col] : 0.0f;
    for (int t = 0; t < a.g.rows; t++) {
        if (a.states.data != NULL && t % a.g.chunk == 0) {
            T *to = state_at(a.states, b, t / a.g.chunk, h);
            EACH_ROW(n, i)
            to[n * a.states.n + col] = from_float<T>(STATE(n, i));
        }
        const T *q = view_at(a.q, b, t, kh), *k = view_at(a.k, b, t, kh);
        float qf = a.g.scale * length_factor(q, dk), kf = length_factor(k, dk), part = 0;
        float decay = expf(rate * softplus(to_float(*view_at(a.gates.alpha, b, t, h)) + bias));
        float w = sigmoid(to_float(*view_at(a.gates.beta, b, t, h)));
        bool begins = begins_document(a.gates, b, t);
        EACH_ROW(n, i)
        {
            float x = begins ? 0.0f : decay * STATE(n, i);
            STATE(n, i) = x;
            part += x * (to_float(k[n]) * kf);
        }
        held_parts[warp][lane] = part;
        __syncthreads();
        float held = 0;
        for (int p = 0; p < PLAIN_WARPS; p++)
            held += held_parts[p][lane];
        float u = mine ? w * (to_float(view_at(a.v, b, t, h)[col]) - held) : 0.0f;
        part = 0;
        EACH_ROW(n, i)
        {
            float x = STATE(n, i) + to_float(k[n]) * kf * u;
            STATE(n, i) = x;
            part += x * (to_float(q[n]) * qf);
        }
        out_parts[warp][lane] = part;
        __syncthreads();
        if (warp == 0 && mine) {
            float sum = 0;
            for (int p = 0; p < PLAIN_WARPS; p++)
                sum += out_parts[p][lane];
            view_at(a.o, b, t, h)[col] = from_float<T>(sum);
        }
    }
    if (a.final.data != NULL) {
        float *to = state_at(a.final, b, 0, h);
        EACH_ROW(n, i)
        to[n * a.final.n + col] = STATE(n, i);
    }
#undef EACH_ROW
#undef STATE
}

int64_t gdn_fwd_plain_work(const struct gdn_geom *g)
{
    return (int64_t)g->batch * g->heads * g->dk * g->dv * (int64_t)sizeof(float);
}

template <typename T> static int fwd_plain(struct lane *l, const struct gdn_fwd_args *a)
{
    plain_fwd_args<T> p = {};
    p.g = geom_of(&a->k, &a->v, a->chunk);
    p.q = view_of<const T>(&a->q);
    p.k = view_of<const T>(&a->k);
    p.v = view_of<const T>(&a->v);
    p.o = view_of<T>(&a->o);
    p.gates = gates_of<T>(a);
    p.init = state_of(&a->init);
    p.final = state_of(&a->final);
    p.states = chunk_states_of<T>(&a->states);
    p.start = (const int64_t *)a->start.data;
    p.state = (float *)a->work.data;
    dim3 grid((unsigned)(p.g.batch * p.g.heads), (unsigned)ceil_div(p.g.dv, COLUMNS));
    if (p.g.dk <= 16 * PLAIN_WARPS)
        LAUNCH(l, (plain_fwd_kernel<T, 16>), grid, THREADS, 0, p);
    else
        LAUNCH(l, (plain_fwd_kernel<T, 0>), grid, THREADS, 0, p);
    return ST_OK;
}

int gdn_fwd_plain(struct lane *l, const struct gdn_fwd_args *a) { BY_REAL(a->v.dtype, T, return fwd_plain<T>(l, a)); }

/* ---- backward -------------------------------------------------------------------------------- */

/* Matrices of a piece in the work space, all fp32, of one key head of one sequence. */
struct plain_work {
    float *q, *k;               /* [PIECE][dk], of unit length, q times scale */
    float *dq, *dk;             /* [PIECE][dk]: sums over value heads */
    float *qk, *kk, *dqk, *dkk; /* [PIECE][PIECE]; dqk and dkk: sums over value heads */
    float *p, *a, *pairs;       /* [PIECE][PIECE]: P and A; gradient of P times P + gradient of A times A */
    float *r, *x, *d_o, *dr;    /* [PIECE][dv]; r: what the state does not hold; dr: dX, then dR */
    float *z;                   /* [PIECE][dk] */
    float *state;               /* [per_key][per_chunk][dk][dv]: enters each piece of the chunk */
    float *e;                   /* [per_key][dk][dv] */
};

static __host__ __device__ int64_t plain_work_take(struct plain_work *w, const struct gdn_geom &g, float *at)
{
    int64_t keys = (int64_t)PIECE * g.dk, values = (int64_t)PIECE * g.dv, square = PIECE * PIECE,
            size = (int64_t)g.dk * g.dv, n = 0;
    w->q = at + n, n += keys;
    w->k = at + n, n += keys;
    w->dq = at + n, n += keys;
    w->dk = at + n, n += keys;
    w->z = at + n, n += keys;
    w->qk = at + n, n += square;
    w->kk = at + n, n += square;
    w->dqk = at + n, n += square;
    w->dkk = at + n, n += square;
    w->p = at + n, n += square;
    w->a = at + n, n += square;
    w->pairs = at + n, n += square;
    w->r = at + n, n += values;
    w->x = at + n, n += values;
    w->d_o = at + n, n += values;
    w->dr = at + n, n += values;
    w->state = at + n, n += (int64_t)g.per_key * g.per_chunk * size;
    w->e = at + n, n += (int64_t)g.per_key * size;
    return n;
}

template <typename T> struct plain_bwd_args {
    struct gdn_geom g;
    gdn_view<const T> d_o, q, k, v;
    gdn_gates<T> gates;
    gdn_states<T> states;
    gdn_states<float> dfinal, dinit;
    gdn_view<T> dq, dk, dv, dalpha, dbeta;
    float *sums; /* [B, Hv, 2]: of dA_log, ddt_bias */
    float *work;
};

struct plain_rows { /* of a head, in shared memory */
    double s[PIECE];
    float g[PIECE], slope[PIECE], w[PIECE], start[PIECE], end[PIECE], qf[PIECE], kf[PIECE], dw[PIECE], dg[PIECE],
        pass[PIECE], inject[PIECE];
    int low[PIECE];
    float decay, through, a_log, dt_bias;
    float scratch[PLAIN_WARPS];
};

#define EACH(i, n) for (int64_t i = threadIdx.x; i < (n); i += THREADS)

/* out[i][c] (+)= sum over d of a[i * a_row + d * a_step] b[d * b_row + c * b_step]; rows of out are dense. */
__device__ void product(float *out, int64_t rows, int64_t cols, int64_t depth, const float *a, int64_t a_row,
                        int64_t a_step, const float *b, int64_t b_row, int64_t b_step, bool add)
{
    EACH(at, rows * cols)
    {
        int64_t i = at / cols, c = at % cols;
        float sum = 0;
        for (int64_t d = 0; d < depth; d++)
            sum += a[i * a_row + d * a_step] * b[d * b_row + c * b_step];
        out[at] = add ? out[at] + sum : sum;
    }
}
/* The same where the depth of row i is a range: d < i + 1 - skip (earlier) or d >= i + skip (later). */
__device__ void product_earlier(float *out, int n, int64_t cols, const float *a, int64_t a_row, int64_t a_step,
                                const float *b, int skip, bool add)
{
    EACH(at, n * cols)
    {
        int64_t i = at / cols, c = at % cols;
        float sum = 0;
        for (int64_t d = 0; d < i + 1 - skip; d++)
            sum += a[i * a_row + d * a_step] * b[d * cols + c];
        out[at] = add ? out[at] + sum : sum;
    }
}
__device__ void product_later(float *out, int n, int64_t cols, const float *a, int64_t a_row, int64_t a_step,
                              const float *b, int skip, bool add)
{
    EACH(at, n * cols)
    {
        int64_t i = at / cols, c = at % cols;
        float sum = 0;
        for (int64_t d = i + skip; d < n; d++)
            sum += a[i * a_row + d * a_step] * b[d * cols + c];
        out[at] = add ? out[at] + sum : sum;
    }
}

template <typename T>
__device__ void load_unit(float *out, float *factor, const gdn_view<const T> &from, int b, struct piece p, int kh,
                          int dk, float scale)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < p.n; i += PLAIN_WARPS) {
        const T *x = view_at(from, b, p.first + i, kh);
        float f = length_factor(x, dk);
        if (lane == 0)
            factor[i] = f;
        for (int c = lane; c < dk; c += 32)
            out[(int64_t)i * dk + c] = to_float(x[c]) * (f * scale);
    }
}

template <typename T> __device__ void find_low(const gdn_gates<T> &gates, int b, struct piece p, int *low)
{
    if (threadIdx.x == 0)
        for (int i = 0, at = -1; i < p.n; i++) {
            at = begins_document(gates, b, p.first + i) ? i : at;
            low[i] = at;
        }
}

__device__ float decay_between(const struct plain_rows *m, int i, int j)
{
    return m->low[i] <= j ? (float)expf((float)(m->s[i] - m->s[j])) : 0.0f;
}

/* Gates of a head, P and A. All threads meet before and after. */
template <typename T>
__device__ void load_head(const struct plain_bwd_args<T> &a, const struct plain_work &w, struct plain_rows *m, int b,
                          struct piece p, int h)
{
    float rate = -expf(a.gates.A_log[h]), bias = a.gates.dt_bias[h];
    EACH(i, p.n)
    {
        float raw = to_float(*view_at(a.gates.alpha, b, p.first + i, h)) + bias;
        m->g[i] = rate * softplus(raw);
        m->slope[i] = raw > 20.0f ? rate : rate * sigmoid(raw);
        m->w[i] = sigmoid(to_float(*view_at(a.gates.beta, b, p.first + i, h)));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int i = 0; i < p.n; i++)
            m->s[i] = sum += (double)m->g[i];
        m->decay = m->low[p.n - 1] < 0 ? expf((float)sum) : 0.0f;
    }
    __syncthreads();
    EACH(i, p.n)
    {
        m->start[i] = m->low[i] < 0 ? expf((float)m->s[i]) : 0.0f;
        m->end[i] = i >= m->low[p.n - 1] ? expf((float)(m->s[p.n - 1] - m->s[i])) : 0.0f;
    }
    EACH(at, p.n * PIECE)
    {
        int i = (int)(at / PIECE), j = (int)(at % PIECE);
        float d = j <= i ? decay_between(m, i, j) : 0.0f;
        w.p[at] = j <= i ? d * w.qk[at] : 0.0f;
        w.a[at] = j < i ? m->w[i] * d * w.kk[at] : 0.0f;
    }
    __syncthreads();
}

/* r and x from the state that enters. All threads meet before and after. */
template <typename T>
__device__ void solve_values(const struct plain_bwd_args<T> &a, const struct plain_work &w, const struct plain_rows *m,
                             const float *state, int b, struct piece p, int h)
{
    int dk = a.g.dk, dv = a.g.dv;
    product(w.x, p.n, dv, dk, w.k, dk, 1, state, dv, 1, false);
    __syncthreads();
    EACH(c, dv)
    for (int i = 0; i < p.n; i++) {
        float r = to_float(view_at(a.v, b, p.first + i, h)[c]) - m->start[i] * w.x[(int64_t)i * dv + c],
              x = m->w[i] * r;
        for (int j = 0; j < i; j++)
            x -= w.a[i * PIECE + j] * w.x[(int64_t)j * dv + c];
        w.r[(int64_t)i * dv + c] = r;
        w.x[(int64_t)i * dv + c] = x;
    }
    __syncthreads();
}

/* The states that enter the pieces of a chunk of a head, the first as given. */
template <typename T>
__device__ void chunk_states(const struct plain_bwd_args<T> &a, const struct plain_work &w, struct plain_rows *m, int b,
                             int chunk, int n_pieces, int h, float *list)
{
    int dk = a.g.dk, dv = a.g.dv;
    int64_t size = (int64_t)dk * dv;
    const T *given = state_at(a.states, b, chunk, h);
    EACH(i, size)
    list[i] = to_float(given[i / dv * a.states.n + i % dv]);
    __syncthreads();
    for (int c = 0; c + 1 < n_pieces; c++) {
        struct piece p = piece_at(a.g, chunk * a.g.per_chunk + c);
        find_low(a.gates, b, p, m->low);
        load_unit(w.k, m->kf, a.k, b, p, h / a.g.per_key, dk, 1.0f);
        __syncthreads();
        product(w.kk, PIECE, PIECE, dk, w.k, dk, 1, w.k, 1, dk, false); /* all but the last piece are whole */
        __syncthreads();
        load_head(a, w, m, b, p, h);
        solve_values(a, w, m, list + c * size, b, p, h);
        EACH(at, (int64_t)p.n * dv)
        w.x[at] *= m->end[at / dv];
        __syncthreads();
        EACH(i, size)
        list[(c + 1) * size + i] = m->decay * list[c * size + i];
        product(list + (c + 1) * size, dk, dv, p.n, w.k, 1, dk, w.x, dv, 1, true);
        __syncthreads();
    }
}

/* Sum over rows of dot(a_i, b_i) f_i into out[i]. */
__device__ void row_dots(float *out, const float *a, const float *b, int n, int cols, const float *factor, bool add)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < n; i += PLAIN_WARPS) {
        float sum = 0;
        for (int c = lane; c < cols; c += 32)
            sum += a[(int64_t)i * cols + c] * b[(int64_t)i * cols + c];
        sum = warp_sum(sum) * (factor ? factor[i] : 1.0f);
        if (lane == 0)
            out[i] = add ? out[i] + sum : sum;
    }
}

/* z = t S^T; to += f z, and pass += f z . rows. */
__device__ void through_state(const struct gdn_geom &g, const struct plain_work &w, int n, const float *t,
                              const float *state, const float *factor, float sign, float *to, float *pass,
                              const float *rows)
{
    product(w.z, n, g.dk, g.dv, t, g.dv, 1, state, 1, g.dv, false);
    __syncthreads();
    EACH(at, (int64_t)n * g.dk)
    {
        w.z[at] *= sign * factor[at / g.dk];
        to[at] += w.z[at];
    }
    __syncthreads();
    row_dots(pass, w.z, rows, n, g.dk, NULL, true);
    __syncthreads();
}

/* dg, then dalpha, dbeta and the head's sums. */
template <typename T>
__device__ void gate_gradients(const struct plain_bwd_args<T> &a, const struct plain_work &w, struct plain_rows *m,
                               int b, struct piece p, int h)
{
    EACH(r, p.n)
    {
        double sum = m->through;
        for (int i = (int)r; i < p.n; i++) {
            sum += (double)m->pass[i];
            for (int j = 0; j < r; j++)
                sum += (double)w.pairs[i * PIECE + j];
        }
        for (int j = 0; j < r; j++)
            sum += (double)m->inject[j];
        m->dg[r] = (float)sum;
        *view_at(a.dalpha, b, p.first + r, h) = from_float<T>(m->dg[r] * m->slope[r]);
        *view_at(a.dbeta, b, p.first + r, h) = from_float<T>(m->dw[r] * m->w[r] * (1.0f - m->w[r]));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double rate = 0, bias = 0;
        for (int i = 0; i < p.n; i++) {
            rate += (double)(m->dg[i] * m->g[i]);
            bias += (double)(m->dg[i] * m->slope[i]);
        }
        float *sums = a.sums + ((int64_t)b * a.g.heads + h) * 2;
        sums[0] += (float)rate;
        sums[1] += (float)bias;
    }
    __syncthreads();
}

template <typename T>
__device__ void bwd_head(const struct plain_bwd_args<T> &a, const struct plain_work &w, struct plain_rows *m, int b,
                         struct piece p, int h, const float *state, float *e)
{
    int dk = a.g.dk, dv = a.g.dv, n = p.n;
    int64_t size = (int64_t)dk * dv;
    load_head(a, w, m, b, p, h);
    EACH(at, (int64_t)n * dv)
    w.d_o[at] = to_float(view_at(a.d_o, b, p.first + at / dv, h)[at % dv]);
    solve_values(a, w, m, state, b, p, h);
    /* dX, and what the states at both ends add to dg */
    product(w.dr, n, dv, dk, w.k, dk, 1, e, dv, 1, false);
    __syncthreads();
    EACH(at, (int64_t)n * dv)
    w.dr[at] *= m->end[at / dv];
    __syncthreads();
    row_dots(m->inject, w.dr, w.x, n, dv, NULL, false);
    float part = 0;
    EACH(i, size)
    part += e[i] * state[i];
    part = block_sum<THREADS>(part, m->scratch);
    if (threadIdx.x == 0)
        m->through = part * m->decay;
    product_later(w.dr, n, dv, w.p, 1, PIECE, w.d_o, 0, true);
    __syncthreads();
    /* (I + A)^T dR = dX */
    EACH(c, dv)
    for (int j = n - 1; j >= 0; j--) {
        float sum = w.dr[(int64_t)j * dv + c];
        for (int i = n - 1; i > j; i--)
            sum -= w.a[i * PIECE + j] * w.dr[(int64_t)i * dv + c];
        w.dr[(int64_t)j * dv + c] = sum;
        view_at(a.dv, b, p.first + j, h)[c] = from_float<T>(m->w[j] * sum);
    }
    __syncthreads();
    row_dots(m->dw, w.dr, w.r, n, dv, NULL, false);
    __syncthreads();
    /* the pairs */
    EACH(at, n * PIECE)
    {
        int i = (int)(at / PIECE), j = (int)(at % PIECE);
        float d = 0, g_p = 0, g_a = 0;
        if (j <= i) {
            d = decay_between(m, i, j);
            for (int c = 0; c < dv; c++) {
                g_p += w.d_o[(int64_t)i * dv + c] * w.x[(int64_t)j * dv + c];
                g_a -= w.dr[(int64_t)i * dv + c] * w.x[(int64_t)j * dv + c];
            }
            g_a = j < i ? g_a : 0.0f;
        }
        w.dqk[at] += d * g_p;
        w.dkk[at] += m->w[i] * d * g_a;
        w.pairs[at] = w.p[at] * g_p + w.a[at] * g_a;
        w.p[at] = d * g_a; /* P is done with: its place holds what dw needs */
    }
    __syncthreads();
    EACH(i, n)
    {
        float sum = 0;
        for (int j = 0; j < i; j++)
            sum += w.p[i * PIECE + j] * w.kk[i * PIECE + j];
        m->dw[i] += sum;
        m->pass[i] = 0;
    }
    EACH(at, (int64_t)n * dv)
    w.r[at] = m->w[at / dv] * w.dr[at]; /* dV, in place of r */
    __syncthreads();
    through_state(a.g, w, n, w.d_o, state, m->start, 1.0f, w.dq, m->pass, w.q);
    through_state(a.g, w, n, w.r, state, m->start, -1.0f, w.dk, m->pass, w.k);
    product(w.z, n, dk, dv, w.x, dv, 1, e, 1, dv, false);
    __syncthreads();
    EACH(at, (int64_t)n * dk)
    w.dk[at] += m->end[at / dk] * w.z[at];
    /* the gradient of the state that entered */
    EACH(at, (int64_t)n * dv)
    {
        w.d_o[at] *= m->start[at / dv];
        w.r[at] *= -m->start[at / dv];
    }
    __syncthreads();
    EACH(i, size)
    e[i] *= m->decay;
    product(e, dk, dv, n, w.q, 1, dk, w.d_o, dv, 1, true);
    product(e, dk, dv, n, w.k, 1, dk, w.r, dv, 1, true);
    __syncthreads();
    gate_gradients(a, w, m, b, p, h);
}

/* From d, the gradient of y = scale f x, to that of x. One element alone: see through_length of gdn_bwd_cpu.c. */
template <typename T>
__device__ void through_length(const gdn_view<T> &to, int b, struct piece p, int kh, const float *d, const float *y,
                               const float *factor, float scale, int dk)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < p.n; i += PLAIN_WARPS) {
        float along = 0;
        for (int c = lane; c < dk; c += 32)
            along += d[(int64_t)i * dk + c] * y[(int64_t)i * dk + c];
        along = warp_sum(along) / scale;
        T *out = view_at(to, b, p.first + i, kh);
        for (int c = lane; c < dk; c += 32) {
            float x = d[(int64_t)i * dk + c] * scale;
            x = dk == 1 ? x * ((float)GDN_EPS * factor[i] * factor[i]) : x - y[(int64_t)i * dk + c] * along;
            out[c] = from_float<T>(factor[i] * x);
        }
    }
}

template <typename T>
__device__ void bwd_piece(const struct plain_bwd_args<T> &a, const struct plain_work &w, struct plain_rows *m, int b,
                          int index, int kh)
{
    int dk = a.g.dk;
    int64_t size = (int64_t)dk * a.g.dv;
    struct piece p = piece_at(a.g, index);
    find_low(a.gates, b, p, m->low);
    load_unit(w.q, m->qf, a.q, b, p, kh, dk, a.g.scale);
    load_unit(w.k, m->kf, a.k, b, p, kh, dk, 1.0f);
    __syncthreads();
    EACH(at, p.n * PIECE)
    {
        int64_t i = at / PIECE, j = at % PIECE;
        float qk = 0, kk = 0;
        for (int c = 0; j <= i && c < dk; c++) {
            qk += w.q[i * dk + c] * w.k[j * dk + c];
            kk += w.k[i * dk + c] * w.k[j * dk + c];
        }
        w.qk[at] = qk;
        w.kk[at] = kk;
        w.dqk[at] = w.dkk[at] = 0;
    }
    EACH(at, (int64_t)p.n * dk)
    w.dq[at] = w.dk[at] = 0;
    __syncthreads();
    for (int v = 0; v < a.g.per_key; v++)
        bwd_head(a, w, m, b, p, kh * a.g.per_key + v,
                 w.state + ((int64_t)v * a.g.per_chunk + index % a.g.per_chunk) * size, w.e + v * size);
    product_earlier(w.dq, p.n, dk, w.dqk, PIECE, 1, w.k, 0, true);
    product_later(w.dk, p.n, dk, w.dqk, 1, PIECE, w.q, 0, true);
    product_earlier(w.dk, p.n, dk, w.dkk, PIECE, 1, w.k, 1, true);
    product_later(w.dk, p.n, dk, w.dkk, 1, PIECE, w.k, 1, true);
    __syncthreads();
    through_length(a.dq, b, p, kh, w.dq, w.q, m->qf, a.g.scale, dk);
    through_length(a.dk, b, p, kh, w.dk, w.k, m->kf, 1.0f, dk);
    __syncthreads();
}

template <typename T>
__global__ __launch_bounds__(THREADS) void plain_bwd_kernel(const __grid_constant__ struct plain_bwd_args<T> a)
{
    __shared__ struct plain_rows m;
    int kh = (int)(blockIdx.x % a.g.key_heads), b = (int)(blockIdx.x / a.g.key_heads), dv = a.g.dv;
    int64_t size = (int64_t)a.g.dk * dv;
    struct plain_work w;
    int64_t each = plain_work_take(&w, a.g, a.work);
    plain_work_take(&w, a.g, a.work + each * blockIdx.x);
    for (int v = 0; v < a.g.per_key; v++) {
        int h = kh * a.g.per_key + v;
        EACH(i, size)
        w.e[v * size + i] = a.dfinal.data ? state_at(a.dfinal, b, 0, h)[i / dv * a.dfinal.n + i % dv] : 0.0f;
        if (threadIdx.x < 2)
            a.sums[((int64_t)b * a.g.heads + h) * 2 + threadIdx.x] = 0;
    }
    __syncthreads();
    for (int chunk = a.g.n_chunks - 1; chunk >= 0; chunk--) {
        int from = chunk * a.g.per_chunk, n = a.g.n_pieces - from < a.g.per_chunk ? a.g.n_pieces - from : a.g.per_chunk;
        for (int v = 0; v < a.g.per_key; v++)
            chunk_states(a, w, &m, b, chunk, n, kh * a.g.per_key + v, w.state + (int64_t)v * a.g.per_chunk * size);
        for (int c = n - 1; c >= 0; c--)
            bwd_piece(a, w, &m, b, from + c, kh);
    }
    for (int v = 0; v < a.g.per_key && a.dinit.data != NULL; v++) {
        float *to = state_at(a.dinit, b, 0, kh * a.g.per_key + v);
        EACH(i, size)
        to[i / dv * a.dinit.n + i % dv] = w.e[v * size + i];
    }
}

static int64_t sums_floats(const struct gdn_geom *g) { return round_up((int64_t)g->batch * g->heads * 2, 32); }

int64_t gdn_bwd_plain_work(const struct gdn_geom *g)
{
    struct plain_work w;
    return (sums_floats(g) + plain_work_take(&w, *g, NULL) * g->batch * g->key_heads) * (int64_t)sizeof(float);
}

template <typename T> static int bwd_plain(struct lane *l, const struct gdn_bwd_args *a)
{
    plain_bwd_args<T> p = {};
    p.g = geom_of(&a->k, &a->v, a->chunk);
    p.d_o = view_of<const T>(&a->d_o);
    p.q = view_of<const T>(&a->q);
    p.k = view_of<const T>(&a->k);
    p.v = view_of<const T>(&a->v);
    p.gates = gates_of<T>(a);
    p.states = chunk_states_of<T>(&a->states);
    p.dfinal = state_of(&a->dfinal);
    p.dinit = state_of(&a->dinit);
    p.dq = view_of<T>(&a->dq);
    p.dk = view_of<T>(&a->dk);
    p.dv = view_of<T>(&a->dv);
    p.dalpha = view_of<T>(&a->dalpha);
    p.dbeta = view_of<T>(&a->dbeta);
    p.sums = (float *)a->work.data;
    p.work = p.sums + sums_floats(&p.g);
    LAUNCH(l, plain_bwd_kernel<T>, (unsigned)(p.g.batch * p.g.key_heads), THREADS, 0, p);
    return gdn_add_sums(l, a, p.sums, p.g.batch, p.g.heads);
}

int gdn_bwd_plain(struct lane *l, const struct gdn_bwd_args *a) { BY_REAL(a->v.dtype, T, return bwd_plain<T>(l, a)); }
