/* Streams of several sublayers recomputed in one launch; see mhc.h. A channel of a token never meets another one on its
 * way, so a thread takes VEC channels of all streams into registers and walks through the layers with them: of each
 * layer it reads f and writes y, where combine after combine would read y again. Rounding and the order of sums are
 * combine's (mhc_mix.cu).
 *
 * A block takes part of one row. The row's coefficients of all layers go to shared memory first, while the streams are
 * on their way. Only the copies for any number of streams have arrays in local memory, because they
 * are indexed by it. */
#include "ops/mhc/portable/mhc_cuda.cuh"

enum {
    REBUILD_THREADS = 128,
    REBUILD_AHEAD = 2, /* layers whose f is on its way while one is worked on */
};

struct rebuild_layer {
    struct view f, y; /* y.data NULL: not wanted */
    const float *coef, *bias;
    int64_t coef_stride;
    uint64_t key;
};
struct rebuild_args {
    struct view x;
    struct rebuild_layer layer[MHC_REBUILD_LAYERS];
    struct drop_rule drop; /* the key is the layer's */
    int64_t d;
    unsigned slices; /* blocks of a row */
    int n, layers;
    bool profile_d;
};

/* VEC channels as the real type holds them; and to memory. */
template <typename T, int VEC> INLINE struct packed stored_form(const float (&v)[VEC])
{
    struct packed h = {};
    if constexpr (VEC == 1)
        h.raw.x = __float_as_uint(to_float(from_float<T>(v[0])));
    else
        h.raw = repack<T>(v);
    return h;
}
template <typename T, int VEC> INLINE void put(T *p, const struct packed &h)
{
    if constexpr (VEC == 1)
        p[0] = from_float<T>(__uint_as_float(h.raw.x));
    else
        store_raw(p, h.raw);
}

/* Floats of a layer in shared memory: n rows of its mixing matrix, then post. */
template <int N> INLINE int coef_floats(int n) { return streams<N>::count(n) * (streams<N>::count(n) + 1); }

template <int N> INLINE void gather_coefficients(const struct rebuild_args &a, int64_t row, float *shared)
{
    int n = streams<N>::count(a.n), each = coef_floats<N>(a.n);
#pragma unroll 1
    for (int k = (int)threadIdx.x; k < a.layers * each; k += (int)blockDim.x) {
        int l = k / each, e = k - l * each;
        const float *coef = a.layer[l].coef + row * a.layer[l].coef_stride;
        shared[k] = e < n * n ? coef[2 * n + mix_at(a.profile_d, n, e / n, e % n)] : coef[n + e - n * n];
    }
}

/* Weights of the input streams in output stream i. */
template <int N> struct mix_row {
    float v[N > 0 ? N : 1];
    const float *from;
};
template <int N> INLINE mix_row<N> mix_row_of(const float *coef, int n, int i)
{
    mix_row<N> m = {};
    m.from = coef + i * n;
    if constexpr (N == 4) {
        float4 v = *(const float4 *)m.from;
        m.v[0] = v.x, m.v[1] = v.y, m.v[2] = v.z, m.v[3] = v.w;
    }
    return m;
}
template <int N> INLINE float weight_of(const struct mix_row<N> &m, int j)
{
    if constexpr (N == 4)
        return m.v[j];
    else
        return m.from[j];
}

template <typename T, int N, int VEC, bool DROP>
static __global__ void __launch_bounds__(REBUILD_THREADS) rebuild_rows(const __grid_constant__ struct rebuild_args a)
{
    constexpr int MAX = streams<N>::MAX;
    static_assert(N == 0 || N == 4, "rows of coefficients are read as one vector");
    __shared__ __align__(16) float coefficients[MHC_REBUILD_LAYERS * MAX * (MAX + 1)];
    int n = streams<N>::count(a.n);
    int64_t row = blockIdx.x / a.slices, d = a.d;
    int64_t c = ((int64_t)(blockIdx.x % a.slices) * blockDim.x + threadIdx.x) * VEC;
    bool inside = c < d;
    struct packed y[MAX], ahead[REBUILD_AHEAD] = {};
    if (inside) {
        const T *x = at<T>(a.x, row) + c;
        UNROLLED (j, n)
            y[j] = load_packed<T, VEC>(x + j * d);
        UNROLLED (k, REBUILD_AHEAD)
            if (k < a.layers)
                ahead[k] = load_packed<T, VEC>(at<T>(a.layer[k].f, row) + c);
    }
    gather_coefficients<N>(a, row, coefficients);
    __syncthreads();
    if (!inside)
        return;
    struct draw_place place = {};
    if (DROP)
        place = drop_row_of(a.drop, row);
#pragma unroll 1
    for (int l = 0; l < a.layers; l++) {
        const float *mix = coefficients + l * coef_floats<N>(a.n), *post = mix + n * n;
        float in[MAX][VEC], add[VEC];
        unpack_to<T>(ahead[0], add);
#pragma unroll
        for (int k = 0; k + 1 < REBUILD_AHEAD; k++)
            ahead[k] = ahead[k + 1];
        if (l + REBUILD_AHEAD < a.layers)
            ahead[REBUILD_AHEAD - 1] = load_packed<T, VEC>(at<T>(a.layer[l + REBUILD_AHEAD].f, row) + c);
        if (a.layer[l].bias != NULL) {
            float b[VEC];
            load_floats(a.layer[l].bias + c, b);
            UNROLLED (e, VEC)
                add[e] += b[e];
        }
        UNROLLED (j, n)
            unpack_to<T>(y[j], in[j]);
        struct drop_rule drop = a.drop;
        drop.key = a.layer[l].key;
        T *out_row = a.layer[l].y.data != NULL ? at<T>(a.layer[l].y, row) + c : NULL;
        UNROLLED (i, n) {
            float out[VEC], factor[VEC];
            struct mix_row<N> m = mix_row_of<N>(mix, n, i);
            if (DROP)
                drop_factors(drop, place, i * d + c, factor);
            UNROLLED (e, VEC) {
                out[e] = __fmul_rn(weight_of(m, 0), in[0][e]);
#pragma unroll
                for (int j = 1; j < n; j++)
                    out[e] = fmaf(weight_of(m, j), in[j][e], out[e]);
                out[e] = add_dropped<DROP>(out[e], post[i], add[e], DROP ? factor[e] : 1.0f);
            }
            /* The next layer sees what is stored, whether it is or not. */
            y[i] = stored_form<T>(out);
            if (out_row != NULL)
                put<T, VEC>(out_row + i * d, y[i]);
        }
    }
}

static struct rebuild_args device_args(const struct mhc_rebuild_args *b)
{
    struct rebuild_args a = {.x = view_of(&b->x),
                             .drop = drop_rule_of(&b->drop),
                             .d = b->x.dim[1] / b->rule.streams,
                             .n = (int)b->rule.streams,
                             .layers = b->layers,
                             .profile_d = b->rule.profile == MHC_D};
    for (int l = 0; l < b->layers; l++) {
        const struct mhc_rebuild_layer *from = &b->layer[l];
        struct rebuild_layer *to = &a.layer[l];
        to->f = view_of(&from->f);
        to->y = view_of(&from->y);
        to->bias = floats(&from->bias);
        to->coef = floats(&from->coef);
        to->coef_stride = from->coef.stride[0];
        to->key = from->key;
    }
    return a;
}

static bool all_aligned(const struct mhc_rebuild_args *b)
{
    bool aligned = aligned16(&b->x);
    for (int l = 0; l < b->layers; l++)
        aligned = aligned && aligned16(&b->layer[l].f) && absent_or_aligned16(&b->layer[l].y) &&
                  pointer16(b->layer[l].bias.data);
    return aligned;
}

extern "C" int mhc_rebuild_cuda(struct lane *l, const struct mhc_rebuild_args *b)
{
    TRY(mhc_rebuild_check(b, l->err));
    struct rebuild_args a = device_args(b);
    if (a.d == 0)
        return ST_OK;
    MHC_DISPATCH(b->x.dtype, a.n, all_aligned(b) && whole_vectors(a.d, b->x.dtype), T, N, VEC, {
        unsigned threads = (unsigned)min_i64(REBUILD_THREADS, round_up(ceil_div(a.d, VEC), 32));
        a.slices = (unsigned)ceil_div(a.d, (int64_t)threads * VEC);
        int64_t blocks = b->x.dim[0] * (int64_t)a.slices;
        if (blocks > INT32_MAX)
            return err_set(l->err, ST_INVALID,
                           "mhc_rebuild: %lld rows of %lld channels take %lld blocks, more than one launch has; use a "
                           "smaller micro batch",
                           (long long)b->x.dim[0], (long long)a.d, (long long)blocks);
        if (a.drop.info == NULL)
            LAUNCH(l, (rebuild_rows<T, N, VEC, false>), (unsigned)blocks, threads, 0, a);
        else
            LAUNCH(l, (rebuild_rows<T, N, VEC, true>), (unsigned)blocks, threads, 0, a);
    });
    return ST_OK;
}
