/* The health numbers of mixes; see mhc.h. A block for each row of the sample and each mix, so that reading streams
 * takes no longer than a few loads; then one small block sums up. */
#include "ops/mhc/portable/mhc_cuda.cuh"

enum { HEALTH_THREADS = 128, HEALTH_WARPS = HEALTH_THREADS / 32 };

struct health_args {
    struct view coef[MHC_HEALTH_LAYERS], y[MHC_HEALTH_LAYERS], before, product;
    double (*found)[MHC_HEALTH_ROWS][MHC_HEALTH_ITEMS]; /* of each layer */
    double *out[MHC_HEALTH_LAYERS][MHC_HEALTH_ITEMS];
    int64_t rows, d;
    int n, layers;
    bool profile_d, acc;
};
struct health_shared {
    float mix[MHC_HEALTH_LAYERS][MHC_MAX_STREAMS * MHC_MAX_STREAMS];
    double before[MHC_MAX_STREAMS * MHC_MAX_STREAMS], product[MHC_MAX_STREAMS * MHC_MAX_STREAMS];
    double part[HEALTH_WARPS][MHC_MAX_STREAMS * MHC_MAX_STREAMS];
};

/* The product of all mixes up to this one, layer by layer; between two it is rounded, as it is
 * from launch to launch. */
INLINE void multiply_mixes(const struct health_args &a, struct health_shared *s, int64_t row, int sample, int layer)
{
    int n = a.n, size = n * n;
    for (int k = (int)threadIdx.x; k < (layer + 1) * size; k += HEALTH_THREADS) {
        int l = k / size, i = k % size / n, j = k % n;
        s->mix[l][i * n + j] =
            row >= a.rows ? (float)(i == j) : at<float>(a.coef[l], row)[2 * n + mix_at(a.profile_d, n, i, j)];
    }
    for (int k = (int)threadIdx.x; a.before.data != NULL && k < size; k += HEALTH_THREADS)
        s->before[k] = (double)at<float>(a.before, sample)[k];
    __syncthreads();
    for (int l = 0; l <= layer; l++) {
        for (int k = (int)threadIdx.x; k < size; k += HEALTH_THREADS) {
            double sum = 0;
            for (int m = 0; m < n; m++)
                sum += (double)s->mix[l][k / n * n + m] * s->before[m * n + k % n];
            s->product[k] = l == 0 && a.before.data == NULL ? (double)s->mix[0][k] : sum;
        }
        __syncthreads();
        for (int k = (int)threadIdx.x; l < layer && k < size; k += HEALTH_THREADS)
            s->before[k] = (double)(float)s->product[k];
        __syncthreads();
    }
}

INLINE double warp_total(double v)
{
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, bit);
    return v;
}
INLINE double warp_worst(double v)
{
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2)
        v = fmax(v, __shfl_xor_sync(0xffffffffu, v, bit));
    return v;
}

/* Products of streams i and j <= i over this thread's channels. Summed in fp32 over a few channels only and then in
 * double, because the streams of a young model differ in their last digits. */
template <typename T, int N, int VEC> INLINE void stream_products(const T *y, int64_t d, double sum[N][N])
{
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < d; c += HEALTH_THREADS * VEC) {
        struct packed in[N];
        float v[N][VEC];
        UNROLLED (i, N)
            in[i] = load_packed<T, VEC>(y + i * d + c);
        UNROLLED (i, N)
            unpack_to<T>(in[i], v[i]);
        UNROLLED (i, N)
#pragma unroll
            for (int j = 0; j <= i; j++) {
                float run = 0;
                UNROLLED (e, VEC)
                    run += v[i][e] * v[j][e];
                sum[i][j] += (double)run;
            }
    }
}

/* The products of a row's streams for the whole block, [n][n] with j <= i, in shared memory. N 0: any number of
 * streams. */
template <typename T, int N, int VEC>
INLINE void sum_products(const T *y, int64_t d, int n, double part[HEALTH_WARPS][MHC_MAX_STREAMS * MHC_MAX_STREAMS])
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    if constexpr (N > 0) {
        double sum[N][N] = {};
        stream_products<T, N, VEC>(y, d, sum);
        UNROLLED (i, N)
#pragma unroll
            for (int j = 0; j <= i; j++) {
                double total = warp_total(sum[i][j]);
                if (lane == 0)
                    part[warp][i * n + j] = total;
            }
    } else {
        for (int i = 0; i < n; i++)
            for (int j = 0; j <= i; j++) {
                double sum = 0;
                for (int64_t c = threadIdx.x; c < d; c += HEALTH_THREADS)
                    sum += (double)to_float(y[i * d + c]) * (double)to_float(y[j * d + c]);
                sum = warp_total(sum);
                if (lane == 0)
                    part[warp][i * n + j] = sum;
            }
    }
    __syncthreads();
    for (int k = (int)threadIdx.x; k < n * n; k += HEALTH_THREADS)
        for (int w = 1; w < HEALTH_WARPS && k % n <= k / n; w++)
            part[0][k] += part[w][k];
    __syncthreads();
}

/* Sum of the cosines between different streams, for the whole warp: a lane for each pair. */
INLINE double sum_cosines(const double *product, int n, int lane)
{
    double cosines = 0;
    for (int k = lane; k < n * n; k += 32) {
        int i = k / n, j = k % n;
        if (j < i) {
            double length = sqrt(product[i * n + i] * product[j * n + j]);
            cosines += length > 0 ? product[k] / length : 0;
        }
    }
    return warp_total(cosines);
}

/* Errors of the mix and gains of the product, a lane for each line of the matrices. */
INLINE void judge_lines(const float *mix, const double *product, int n, int lane, double worst[MHC_SIMILARITY])
{
    for (int i = lane; i < n; i += 32) {
        double sum[2] = {0, 0}, gain[2] = {0, 0};
        for (int j = 0; j < n; j++) {
            sum[0] += (double)mix[i * n + j];
            sum[1] += (double)mix[j * n + i];
            gain[0] += fabs(product[i * n + j]);
            gain[1] += fabs(product[j * n + i]);
        }
        for (int side = 0; side < 2; side++) {
            worst[MHC_ROW_ERROR + side] = fmax(worst[MHC_ROW_ERROR + side], fabs(sum[side] - 1));
            worst[MHC_GAIN_FORWARD + side] = fmax(worst[MHC_GAIN_FORWARD + side], gain[side]);
        }
    }
}

/* Block (s, layer): row s of the sample. */
template <typename T, int N, int VEC>
static __global__ void __launch_bounds__(HEALTH_THREADS) health_rows(const __grid_constant__ struct health_args a)
{
    __shared__ struct health_shared s;
    int sample = (int)blockIdx.x, layer = (int)blockIdx.y, lane = (int)threadIdx.x % 32, n = a.n;
    int64_t row = sample * (a.rows > MHC_HEALTH_ROWS ? a.rows / MHC_HEALTH_ROWS : 1);
    multiply_mixes(a, &s, row, sample, layer);
    for (int k = (int)threadIdx.x; layer == a.layers - 1 && k < n * n; k += HEALTH_THREADS)
        at<float>(a.product, sample)[k] = (float)s.product[k];
    if (row < a.rows)
        sum_products<T, N, VEC>(at<T>(a.y[layer], row), a.d, n, s.part);
    if (threadIdx.x >= 32)
        return;
    double worst[MHC_SIMILARITY] = {}, cosines = 0;
    if (row < a.rows) {
        judge_lines(s.mix[layer], s.product, n, lane, worst);
        cosines = sum_cosines(s.part[0], n, lane);
    }
    for (int k = 0; k < MHC_SIMILARITY; k++)
        a.found[layer][sample][k] = warp_worst(worst[k]);
    a.found[layer][sample][MHC_SIMILARITY] = cosines;
}

/* Block `layer`, a warp for each number. */
static __global__ void __launch_bounds__(32 * MHC_HEALTH_ITEMS)
    health_total(const __grid_constant__ struct health_args a)
{
    int item = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, l = (int)blockIdx.x;
    int64_t pairs = min((int64_t)MHC_HEALTH_ROWS, a.rows) * a.n * (a.n - 1) / 2;
    double value = 0;
    for (int s = lane; s < MHC_HEALTH_ROWS; s += 32)
        value = item < MHC_SIMILARITY ? fmax(value, a.found[l][s][item]) : value + a.found[l][s][item];
    value = item < MHC_SIMILARITY ? warp_worst(value) : warp_total(value);
    if (item == MHC_SIMILARITY)
        value = pairs > 0 ? value / (double)pairs : 0;
    if (lane == 0)
        *a.out[l][item] = value + (a.acc ? *a.out[l][item] : 0);
}

extern "C" int64_t mhc_health_work_cuda(const struct mhc_health_args *a)
{
    return (int64_t)sizeof(double) * a->layers * MHC_HEALTH_ROWS * MHC_HEALTH_ITEMS;
}

extern "C" int mhc_health_cuda(struct lane *l, const struct mhc_health_args *h)
{
    TRY(mhc_health_check(h, l->err));
    TRY(check_work("mhc_health", &h->work, mhc_health_work_cuda(h), l->err));
    struct health_args a = {};
    bool aligned = true;
    for (int l = 0; l < h->layers; l++) {
        a.coef[l] = view_of(&h->layer[l].coef);
        a.y[l] = view_of(&h->layer[l].y);
        aligned = aligned && aligned16(&h->layer[l].y);
        for (int i = 0; i < MHC_HEALTH_ITEMS; i++)
            a.out[l][i] = (double *)h->layer[l].out[i].data;
    }
    a.before = view_of(&h->comp_in);
    a.product = view_of(&h->comp);
    a.found = (double(*)[MHC_HEALTH_ROWS][MHC_HEALTH_ITEMS])h->work.data;
    const struct tensor *y = &h->layer[0].y;
    a.rows = y->dim[0];
    a.layers = h->layers;
    a.n = (int)h->rule.streams;
    a.d = y->dim[1] / a.n;
    a.profile_d = h->rule.profile == MHC_D;
    a.acc = h->layer[0].acc[0];
    MHC_DISPATCH(y->dtype, a.n, aligned && whole_vectors(a.d, y->dtype), T, N, VEC,
                 LAUNCH(l, (health_rows<T, N, VEC>), dim3(MHC_HEALTH_ROWS, (unsigned)a.layers), HEALTH_THREADS, 0, a));
    LAUNCH(l, health_total, (unsigned)a.layers, 32 * MHC_HEALTH_ITEMS, 0, a);
    return ST_OK;
}
