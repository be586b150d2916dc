/* act, CUDA version; see act.h. One pass, a vector of outputs at a time; with dprob a team of threads walks a row and
 * sums in a fixed order. */
#include "ops/act/act.cuh"

/* Column of the gate that makes column j; its up is a.block further. */
template <bool GATED> __device__ __forceinline__ unsigned gate_column(const struct act_call &a, unsigned j)
{
    unsigned block = (unsigned)a.block;
    return !GATED || j < block ? j : j / block * 2 * block + j % block;
}

template <typename T, int V, int CURVE, bool GATED>
__device__ __forceinline__ void forward_at(const struct act_call &a, unsigned row, unsigned j)
{
    const T *x = row2<T>(a.x, row) + gate_column<GATED>(a, j);
    float gate[V], up[V], out[V], d_gate, d_up, prob = a.prob != NULL ? a.prob[row] : 1.0f;
    load_floats(x, gate);
    if (GATED)
        load_floats(x + a.block, up);
#pragma unroll
    for (int e = 0; e < V; e++)
        out[e] = prob * one_value<CURVE, GATED>(a, gate[e], GATED ? up[e] : 0.0f, &d_gate, &d_up);
    store_floats(row2<T>(a.y, row) + j, out);
}

/* Returns this vector's share of dprob. */
template <typename T, int V, int CURVE, bool GATED>
__device__ __forceinline__ float backward_at(const struct act_call &a, unsigned row, unsigned j)
{
    unsigned at = gate_column<GATED>(a, j);
    const T *x = row2<T>(a.x, row) + at;
    T *dx = row2<T>(a.y, row) + at;
    float gate[V], up[V], dy[V], sum = 0, prob = a.prob != NULL ? a.prob[row] : 1.0f;
    load_floats(x, gate);
    if (GATED)
        load_floats(x + a.block, up);
    load_floats(row2<T>(a.dy, row) + j, dy);
#pragma unroll
    for (int e = 0; e < V; e++) {
        float d_gate, d_up;
        sum += dy[e] * one_value<CURVE, GATED>(a, gate[e], GATED ? up[e] : 0.0f, &d_gate, &d_up);
        gate[e] = prob * dy[e] * d_gate;
        up[e] = prob * dy[e] * d_up;
    }
    store_floats(dx, gate);
    if (GATED)
        store_floats(dx + a.block, up);
    return sum;
}

/* Vectors distributed flat, several to a thread so that their loads overlap. Indices fit 32 bits. */
enum { EACH = 2 };
template <typename T, int V, int CURVE, bool GATED, bool BACK>
static __global__ void __launch_bounds__(256) act_flat(const __grid_constant__ struct act_call a)
{
    unsigned vectors = (unsigned)(a.f / V), total = (unsigned)a.rows * vectors;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        unsigned i = (blockIdx.x * EACH + k) * 256u + threadIdx.x;
        if (i < total) {
            unsigned row = i / vectors, j = (i - row * vectors) * V;
            if (BACK)
                backward_at<T, V, CURVE, GATED>(a, row, j);
            else
                forward_at<T, V, CURVE, GATED>(a, row, j);
        }
    }
}

/* With dprob: a block a row. */
template <typename T, int V, int CURVE, bool GATED>
static __global__ void __launch_bounds__(128) act_rows_bwd(const __grid_constant__ struct act_call a)
{
    __shared__ float scratch[4];
    unsigned row = blockIdx.x;
    float sum = 0;
#pragma unroll 2
    for (unsigned j = threadIdx.x * V; j < (unsigned)a.f; j += 128 * V)
        sum += backward_at<T, V, CURVE, GATED>(a, row, j);
    sum = block_sum<128>(sum, scratch);
    if (threadIdx.x == 0)
        a.dprob[row] = sum;
}

template <typename T, int V, int CURVE, bool GATED>
static int launch(struct lane *lane, const struct act_call *a, bool back)
{
    if (a->rows * (a->f / V) >= (1ll << 32) - 1024 || a->f >= 1 << 30)
        return err_set(lane->err, ST_UNSUPPORTED, "act: %lld rows of %lld columns are more than one launch takes",
                       (long long)a->rows, (long long)a->f);
    unsigned grid = (unsigned)ceil_div(a->rows * (a->f / V), 256 * EACH);
    if (a->dprob != NULL)
        LAUNCH(lane, (act_rows_bwd<T, V, CURVE, GATED>), (unsigned)a->rows, 128, 0, *a);
    else if (back)
        LAUNCH(lane, (act_flat<T, V, CURVE, GATED, true>), grid, 256, 0, *a);
    else
        LAUNCH(lane, (act_flat<T, V, CURVE, GATED, false>), grid, 256, 0, *a);
    return ST_OK;
}

template <typename T, int V>
static int by_kind(struct lane *lane, const struct act_call *a, enum act_kind kind, bool back)
{
    switch (kind) {
    case ACT_SWIGLU:
    case ACT_QUICK_GEGLU: return launch<T, V, CURVE_SIGMOID, true>(lane, a, back);
    case ACT_GEGLU: return launch<T, V, CURVE_GELU, true>(lane, a, back);
    case ACT_GELU: return launch<T, V, CURVE_GELU, false>(lane, a, back);
    case ACT_RELU2: return launch<T, V, CURVE_SQUARE, false>(lane, a, back);
    default: return launch<T, V, CURVE_SIGMOID, false>(lane, a, back);
    }
}

template <typename T> static int act_run(struct lane *lane, struct act_call *a, const struct act_rule *r, bool back)
{
    constexpr int V = pack<T>::N;
    act_numbers(a, r);
    bool vectors =
        aligned16(&a->x) && aligned16(&a->y) && absent_or_aligned16(&a->dy) && a->block % V == 0 && a->f % V == 0;
    return vectors ? by_kind<T, V>(lane, a, r->kind, back) : by_kind<T, 1>(lane, a, r->kind, back);
}

extern "C" int act_fwd_cuda(struct lane *l, const struct act_fwd_args *a)
{
    TRY(act_fwd_check(a, l->err));
    struct act_call c = {};
    c.x = a->x;
    c.y = a->y;
    c.prob = (const float *)a->prob.data;
    c.rows = a->y.dim[0];
    c.f = a->y.dim[1];
    BY_REAL(a->y.dtype, T, return act_run<T>(l, &c, &a->rule, false));
}

extern "C" int act_bwd_cuda(struct lane *l, const struct act_bwd_args *a)
{
    TRY(act_bwd_check(a, l->err));
    struct act_call c = {};
    c.x = a->x;
    c.y = a->dx;
    c.dy = a->dy;
    c.prob = (const float *)a->prob.data;
    c.dprob = (float *)a->dprob.data;
    c.rows = a->dy.dim[0];
    c.f = a->dy.dim[1];
    BY_REAL(a->dy.dtype, T, return act_run<T>(l, &c, &a->rule, true));
}
