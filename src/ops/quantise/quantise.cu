/* quantise on the GPU; see quantise.h. Tiles of 128 x 128 (ops/cuda/f8.cuh) for blocks of 128; a plain kernel, a block
 * of values to a block of threads, for other blocks and for sizes that are no whole vectors. One scale for all takes a
 * pass before. */
#include "ops/cuda/f8.cuh"

enum { AMAX_BLOCKS = 1024, PLAIN_THREADS = 128 };

struct source {
    const void *x;
    int64_t stride;
    const int32_t *src; /* rows are taken by this map of choices, `k` to a row of `rows`; NULL: as they are */
    int64_t rows;
    int k;
};

/* The row of x that row r of the codes is made of; -1: zeros. */
static __device__ __forceinline__ int64_t source_row(const struct source &x, int64_t r)
{
    if (x.src == NULL)
        return r;
    int from = x.src[r];
    int64_t row = from < 0 ? -1 : from / x.k;
    return row < x.rows ? row : -1;
}

/* The thread's eight rows where src says: all are asked for before the first is needed. */
template <typename T>
static __device__ __forceinline__ void gather_tile(const struct source &x, int64_t r0, int64_t c0, int valid,
                                                   f8_eight<T> *tile)
{
    int64_t row[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        row[i] = i < valid ? source_row(x, r0 + threadIdx.x / 16 * 8 + i) : -1;
#pragma unroll
    for (int i = 0; i < 8; i++)
        tile[i] =
            f8_load((const T *)x.x + max(row[i], (int64_t)0) * x.stride + (valid > 0 ? c0 + threadIdx.x % 16 * 8 : 0));
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (row[i] < 0)
            tile[i] = f8_zeros<T>();
}

template <typename T, enum dtype TYPE, int BLOCKS, bool GATHER = false>
static __global__ void __launch_bounds__(F8_THREADS, sizeof(T) == 4        ? 2
                                                     : BLOCKS == F8_SQUARE ? 3
                                                                           : 4)
    quantise_tiles(const struct source x, const __grid_constant__ struct f8_out o, const uint32_t *amax)
{
    __shared__ struct f8_shared s;
    /* A token is fetched several times: all of a column of tiles come first, so that its values stay in the cache. */
    int64_t r0 = (int64_t)(GATHER ? blockIdx.x : blockIdx.y) * F8_TILE,
            c0 = (int64_t)(GATHER ? blockIdx.y : blockIdx.x) * F8_TILE;
    int valid = f8_valid(o, r0, c0);
    f8_eight<T> tile[8];
    float common = 0, inverse;
    if constexpr (GATHER) {
        gather_tile<T>(x, r0, c0, valid, tile);
    } else {
        f8_walk<T> from(x.x, x.stride, r0, c0, valid);
#pragma unroll
        for (int i = 0; i < 8; i++, from.next())
            tile[i] = from.load();
        f8_clear(tile, valid);
    }
    if (BLOCKS == F8_WHOLE)
        common = f8_factor<TYPE>(*amax, &inverse);
    f8_quantise_tile<T, TYPE, BLOCKS>(tile, o, r0, c0, common, &s);
}

/* Codes by rows of a tile of x, of which each row goes to the k places that `row` names: x is read once. */
template <typename T, enum dtype TYPE>
static __global__ void __launch_bounds__(F8_THREADS, sizeof(T) == 4 ? 2 : 4)
    spread_tiles(const struct source x, const __grid_constant__ struct f8_out o, const int32_t *row)
{
    int64_t r0 = (int64_t)blockIdx.y * F8_TILE, c0 = (int64_t)blockIdx.x * F8_TILE;
    int g = threadIdx.x / 16, c = threadIdx.x % 16;
    struct f8_out tokens = o;
    tokens.rows = x.rows;
    int valid = f8_valid(tokens, r0, c0);
    f8_walk<T> from(x.x, x.stride, r0, c0, valid);
    f8_eight<T> tile[8];
#pragma unroll
    for (int i = 0; i < 8; i++, from.next())
        tile[i] = from.load();
    f8_clear(tile, valid);
    f8_most<T> most = f8_thread_most<T>(tile);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float v[8], inverse;
        f8_floats(tile[i], v);
        uint2 word = f8_word<TYPE>(v, f8_factor<TYPE>(warp_max_u32(most.row[i], 16), &inverse));
        const int32_t *to = row + (r0 + 8 * g + i) * x.k;
        for (int j = 0; j < x.k && i < valid; j++) {
            int64_t place = to[j];
            if (place < 0 || place >= o.rows)
                continue;
            *(uint2 *)(o.q + place * o.cols + c0 + 8 * c) = word;
            if (c == 0)
                o.qs[c0 / F8_TILE * o.q_stride + place] = inverse;
        }
    }
}
/* And the places that no row has: codes 0 with scales 1, as of zeros. Scales past the last place are 0. */
static __global__ void __launch_bounds__(256)
    empty_places(const struct source x, const __grid_constant__ struct f8_out o)
{
    int64_t place = (int64_t)blockIdx.x * 8 + threadIdx.x / 32, blocks = (o.cols + F8_TILE - 1) / F8_TILE;
    int lane = threadIdx.x % 32;
    if (place >= o.q_stride || (place < o.rows && source_row(x, place) >= 0))
        return;
    for (int64_t b = lane; b < blocks; b += 32)
        o.qs[b * o.q_stride + place] = place < o.rows ? 1.0f : 0.0f;
    for (int64_t c = 8 * lane; place < o.rows && c < o.cols; c += 8 * 32)
        *(uint2 *)(o.q + place * o.cols + c) = make_uint2(0, 0);
}

/* Codes [rows, cols] of x, or with step 1 along rows of its transpose. */
struct plain {
    struct source x;
    int64_t rows, cols, height, width, stride;
    uint8_t *codes;
    float *scales;
    bool square, transposed;
};
template <typename T> static __device__ __forceinline__ float plain_value(const struct plain &p, int64_t r, int64_t c)
{
    int64_t row = source_row(p.x, p.transposed ? c : r);
    return row < 0 ? 0.0f : to_float(((const T *)p.x.x)[row * p.x.stride + (p.transposed ? r : c)]);
}

static __device__ uint32_t block_most(uint32_t most, uint32_t *scratch)
{
    most = warp_max_u32(most, 32);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = most;
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / 32; w++)
        most = max_u32(most, scratch[w]);
    return most;
}

template <typename T, enum dtype TYPE>
static __global__ void __launch_bounds__(PLAIN_THREADS)
    quantise_plain(const __grid_constant__ struct plain p, const uint32_t *amax)
{
    __shared__ uint32_t scratch[PLAIN_THREADS / 32];
    int64_t across = (p.cols + p.width - 1) / p.width, rb = (int64_t)blockIdx.x / across,
            cb = (int64_t)blockIdx.x % across;
    int64_t r0 = rb * p.height, c0 = cb * p.width;
    int64_t height = p.height < p.rows - r0 ? p.height : p.rows - r0,
            width = p.width < p.cols - c0 ? p.width : p.cols - c0;
    uint32_t most = 0;
    for (int64_t i = threadIdx.x; amax == NULL && i < height * width; i += PLAIN_THREADS)
        most = max_u32(most, magnitude(plain_value<T>(p, r0 + i / width, c0 + i % width)));
    most = amax == NULL ? block_most(most, scratch) : *amax;
    float inverse, factor = f8_factor<TYPE>(most, &inverse);
    if (threadIdx.x == 0 && amax == NULL)
        p.scales[p.square ? rb * p.stride + cb : cb * p.stride + r0] = inverse;
    for (int64_t i = threadIdx.x; i < height * width; i += PLAIN_THREADS) {
        float v = plain_value<T>(p, r0 + i / width, c0 + i % width) * factor;
        p.codes[(r0 + i / width) * p.cols + c0 + i % width] = (uint8_t)f8_pair<TYPE>(v, 0.0f);
    }
}

template <typename T>
static __global__ void __launch_bounds__(256)
    find_amax(const struct source x, int64_t rows, int64_t cols, uint32_t *partial)
{
    __shared__ uint32_t scratch[8];
    uint32_t most = 0;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x)
        for (int64_t c = threadIdx.x; c < cols; c += 256)
            most = max_u32(most, magnitude(to_float(((const T *)x.x)[r * x.stride + c])));
    most = block_most(most, scratch);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = most;
}

/* The scale for all, four numbers of which the last three are padding, for one or two sets of codes. */
template <enum dtype TYPE>
static __global__ void __launch_bounds__(AMAX_BLOCKS) join_amax(uint32_t *partial, int n, float *qs, float *ts)
{
    __shared__ uint32_t scratch[AMAX_BLOCKS / 32];
    uint32_t most = block_most((int)threadIdx.x < n ? partial[threadIdx.x] : 0, scratch);
    float inverse;
    f8_factor<TYPE>(most, &inverse);
    __syncthreads();
    if (threadIdx.x == 0)
        partial[0] = most;
    if (threadIdx.x < 4 && qs != NULL)
        qs[threadIdx.x] = threadIdx.x == 0 ? inverse : 0.0f;
    if (threadIdx.x < 4 && ts != NULL)
        ts[threadIdx.x] = threadIdx.x == 0 ? inverse : 0.0f;
}

extern "C" int64_t quantise_work_cuda(const struct quantise_args *a)
{
    return a->block == 0 ? AMAX_BLOCKS * (int64_t)sizeof(uint32_t) : 0;
}

template <typename T, enum dtype TYPE>
static int whole_amax(struct lane *l, const struct quantise_args *a, const struct source &x)
{
    unsigned blocks = (unsigned)min_i64(a->x.dim[0], AMAX_BLOCKS);
    uint32_t *partial = (uint32_t *)a->work.data;
    LAUNCH(l, find_amax<T>, blocks, 256, 0, x, a->x.dim[0], a->x.dim[1], partial);
    LAUNCH(l, join_amax<TYPE>, 1, AMAX_BLOCKS, 0, partial, (int)blocks, (float *)a->qs.data, (float *)a->ts.data);
    return ST_OK;
}

static struct source source_of(const struct quantise_args *a)
{
    struct source x = {};
    x.x = a->x.data;
    x.stride = a->x.dim[0] > 1 ? a->x.stride[0] : max_i64(a->x.dim[1], 1);
    x.src = (const int32_t *)a->src.data;
    x.rows = a->x.dim[0];
    x.k = (int)a->k;
    return x;
}

template <typename T, enum dtype TYPE>
static int plain_one(struct lane *l, const struct quantise_args *a, const struct tensor *codes,
                     const struct tensor *scales, bool transposed)
{
    struct plain p = {};
    p.x = source_of(a);
    p.transposed = transposed;
    p.rows = codes->dim[0];
    p.cols = codes->dim[1];
    p.width = a->block > 0 ? a->block : 128;
    p.height = a->square ? a->block : 1;
    p.stride = f8_scale_stride(p.rows, p.cols, a->block, a->square);
    p.codes = (uint8_t *)codes->data;
    p.scales = (float *)scales->data;
    p.square = a->square;
    int64_t blocks = ceil_div(p.rows, p.height) * ceil_div(p.cols, p.width);
    if (blocks >= 1ll << 31)
        return err_set(l->err, ST_UNSUPPORTED, "quantise: %lld blocks are more than one launch takes",
                       (long long)blocks);
    if (a->block > 0)
        TRY(cuda_status(l->err, (int)cudaMemsetAsync(scales->data, 0, (size_t)tensor_bytes(scales), stream_of(l)),
                        "cudaMemsetAsync"));
    LAUNCH(l, (quantise_plain<T, TYPE>), (unsigned)blocks, PLAIN_THREADS, 0, p,
           a->block == 0 ? (const uint32_t *)a->work.data : NULL);
    return ST_OK;
}

template <typename T, enum dtype TYPE> static int run(struct lane *l, const struct quantise_args *a)
{
    int64_t rows = quantise_rows(a), cols = a->x.dim[1];
    struct source x = source_of(a);
    bool empty = rows == 0 || cols == 0;
    const struct tensor *scales[] = {&a->qs, &a->ts};
    for (int i = 0; i < 2; i++)
        if (empty && present(scales[i]) && tensor_bytes(scales[i]) > 0)
            TRY(cuda_status(l->err,
                            (int)cudaMemsetAsync(scales[i]->data, 0, (size_t)tensor_bytes(scales[i]), stream_of(l)),
                            "cudaMemsetAsync"));
    if (empty)
        return ST_OK;
    if (a->block == 0)
        TRY((whole_amax<T, TYPE>(l, a, x)));
    bool tiles = (a->block == F8_TILE || a->block == 0) && x.rows > 0 &&
                 f8_tiles_fit(rows, cols, a->q.data, a->t.data) && (uintptr_t)x.x % 16 == 0 &&
                 x.stride * (int64_t)sizeof(T) % 16 == 0 && rows <= 65535ll * F8_TILE;
    if (!tiles) {
        if (present(&a->q))
            TRY((plain_one<T, TYPE>(l, a, &a->q, &a->qs, false)));
        return present(&a->t) ? plain_one<T, TYPE>(l, a, &a->t, &a->ts, true) : ST_OK;
    }
    struct f8_out o = f8_out_of(&a->q, &a->qs, &a->t, &a->ts, rows, cols, a->block, a->square);
    dim3 grid((unsigned)ceil_div(cols, F8_TILE), (unsigned)ceil_div(rows, F8_TILE));
    const uint32_t *amax = (const uint32_t *)a->work.data;
    if (a->row.data != NULL && !present(&a->t)) {
        grid.y = (unsigned)ceil_div(x.rows, F8_TILE);
        LAUNCH(l, (spread_tiles<T, TYPE>), grid, F8_THREADS, 0, x, o, (const int32_t *)a->row.data);
        LAUNCH(l, empty_places, (unsigned)ceil_div(o.q_stride, 8), 256, 0, x, o);
        return ST_OK;
    }
    if (a->block == 0)
        LAUNCH(l, (quantise_tiles<T, TYPE, F8_WHOLE>), grid, F8_THREADS, 0, x, o, amax);
    else if (a->square)
        LAUNCH(l, (quantise_tiles<T, TYPE, F8_SQUARE>), grid, F8_THREADS, 0, x, o, amax);
    else if (x.src != NULL)
        LAUNCH(l, (quantise_tiles<T, TYPE, F8_ROWS, true>), dim3(grid.y, grid.x), F8_THREADS, 0, x, o, amax);
    else
        LAUNCH(l, (quantise_tiles<T, TYPE, F8_ROWS>), grid, F8_THREADS, 0, x, o, amax);
    return ST_OK;
}

extern "C" int quantise_cuda(struct lane *l, const struct quantise_args *a)
{
    TRY(quantise_check(a, l->err));
    TRY(check_work("quantise", &a->work, quantise_work_cuda(a), l->err));
    enum dtype type = present(&a->q) ? a->q.dtype : a->t.dtype;
    BY_REAL(a->x.dtype, T, return type == DT_F8_E5M2 ? run<T, DT_F8_E5M2>(l, a) : run<T, DT_F8_E4M3>(l, a));
}
