/* gate, CUDA version; see gate.h. With a gate for each channel, vectors distributed flat; with one gate a row, a warp a
 * row, whose lanes sum dg in a fixed order. */
#include "ops/cuda/rows.cuh"
#include "ops/gate/gate.h"

struct gate_call {
    struct tensor x, g, y, dy, dg; /* backward: y is dx */
    int64_t rows, n;
};

template <typename T, int V, bool BACK>
static __global__ void __launch_bounds__(256) gate_flat(const __grid_constant__ struct gate_call a)
{
    unsigned vectors = (unsigned)(a.n / V);
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, total = a.rows * vectors;
    if (i >= total)
        return;
    int64_t row = total < (1ll << 32) ? (int64_t)((unsigned)i / vectors) : i / vectors, at = (i - row * vectors) * V;
    float x[V], g[V], dy[V], out[V];
    load_floats(row_ptr<T>(a.x, row) + at, x);
    load_floats(row_ptr<T>(a.g, row) + at, g);
    if (BACK)
        load_floats(row_ptr<T>(a.dy, row) + at, dy);
#pragma unroll
    for (int e = 0; e < V; e++) {
        float s = quick_sigmoid(g[e]);
        out[e] = (BACK ? dy[e] : x[e]) * s;
        g[e] = BACK ? dy[e] * x[e] * s * (1 - s) : 0.0f;
    }
    store_floats(row_ptr<T>(a.y, row) + at, out);
    if (BACK)
        store_floats(row_ptr<T>(a.dg, row) + at, g);
}

template <typename T, int V, bool BACK>
static __global__ void __launch_bounds__(256) gate_by_row(const __grid_constant__ struct gate_call a)
{
    int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= a.rows)
        return;
    const T *x = row_ptr<T>(a.x, row), *dy = BACK ? row_ptr<T>(a.dy, row) : NULL;
    T *y = row_ptr<T>(a.y, row);
    float s = quick_sigmoid(to_float(*row_ptr<T>(a.g, row))), sum = 0;
#pragma unroll 2
    for (int64_t at = threadIdx.x % 32 * V; at < a.n; at += 32 * V) {
        float v[V], up[V], out[V];
        load_floats(x + at, v);
        if (BACK)
            load_floats(dy + at, up);
#pragma unroll
        for (int e = 0; e < V; e++) {
            out[e] = (BACK ? up[e] : v[e]) * s;
            sum += BACK ? up[e] * v[e] : 0.0f;
        }
        store_floats(y + at, out);
    }
    if (BACK) {
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0)
            *row_ptr<T>(a.dg, row) = from_float<T>(sum * s * (1 - s));
    }
}

/* Channels of several heads that lie behind one another count as one row: no index needs dividing then. */
static void join_heads(struct gate_call *a)
{
    struct tensor *all[] = {&a->x, &a->g, &a->y, &a->dy, &a->dg};
    bool joins = a->x.rank > 2;
    for (int k = 0; k < countof(all); k++) {
        const struct tensor *t = all[k];
        joins = joins && (t->data == NULL || (t->dim[t->rank - 1] == a->n && t->stride[t->rank - 2] == a->n));
    }
    if (!joins)
        return;
    for (int k = 0; k < countof(all); k++) {
        struct tensor *t = all[k];
        if (t->data == NULL)
            continue;
        t->rank--;
        t->dim[t->rank - 1] *= a->n;
        t->stride[t->rank - 1] = 1;
    }
    a->n = cols_of(&a->x);
    a->rows = rows_of(&a->x);
    join_heads(a);
}

template <typename T, bool BACK> static int gate_run(struct lane *l, struct gate_call *a)
{
    constexpr int V = pack<T>::N;
    bool shared = cols_of(&a->g) == 1 && a->n != 1;
    if (!shared)
        join_heads(a);
    bool vectors = aligned16(&a->x) && aligned16(&a->y) && absent_or_aligned16(&a->dy) &&
                   (shared || (aligned16(&a->g) && absent_or_aligned16(&a->dg)));
    if (shared) {
        unsigned grid = (unsigned)ceil_div(a->rows, 8);
        if (vectors)
            LAUNCH(l, (gate_by_row<T, V, BACK>), grid, 256, 0, *a);
        else
            LAUNCH(l, (gate_by_row<T, 1, BACK>), grid, 256, 0, *a);
    } else if (vectors) {
        LAUNCH(l, (gate_flat<T, V, BACK>), (unsigned)ceil_div(a->rows * (a->n / V), 256), 256, 0, *a);
    } else {
        LAUNCH(l, (gate_flat<T, 1, BACK>), (unsigned)ceil_div(a->rows * a->n, 256), 256, 0, *a);
    }
    return ST_OK;
}

extern "C" int gate_fwd_cuda(struct lane *l, const struct gate_fwd_args *a)
{
    TRY(gate_fwd_check(a, l->err));
    struct gate_call c = {};
    c.x = a->x;
    c.g = a->g;
    c.y = a->y;
    c.rows = rows_of(&a->x);
    c.n = cols_of(&a->x);
    BY_REAL(a->x.dtype, T, return (gate_run<T, false>(l, &c)));
}

extern "C" int gate_bwd_cuda(struct lane *l, const struct gate_bwd_args *a)
{
    TRY(gate_bwd_check(a, l->err));
    struct gate_call c = {};
    c.x = a->x;
    c.g = a->g;
    c.y = a->dx;
    c.dy = a->dy;
    c.dg = a->dg;
    c.rows = rows_of(&a->x);
    c.n = cols_of(&a->x);
    BY_REAL(a->x.dtype, T, return (gate_run<T, true>(l, &c)));
}
