/* sparse, CUDA version; see sparse_cuda.cuh. The gradient of keys needs no atomics: for a chunk of queries a table says
 * where each key stands in each list, and the owner of a key walks its column, queries in order. */
#include "ops/sparse/sparse_cuda.cuh"

enum { WARPS = 4, THREADS = WARPS * 32, KEY_THREADS = 128 };

template <typename T> static rows_view<T> view_of(const struct tensor *t)
{
    rows_view<T> v = {(T *)t->data, t->stride[0], t->stride[1], t->rank == 4 ? t->stride[2] : 0};
    return v;
}

template <typename T> __device__ __forceinline__ float dot(const T *x, const float *y, int n)
{
    float sum = 0;
    for (int c = 0; c < n; c++)
        sum += to_float(x[c]) * y[c];
    return sum;
}

/* Query and head of this warp: heads of a query are neighbours and read the same keys. */
struct warp_row {
    int b, i, h;
};
__device__ __forceinline__ warp_row row_of_warp(int rows, int heads)
{
    int64_t w = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    warp_row r = {(int)(w / heads / rows), (int)(w / heads % rows), (int)(w % heads)};
    return r;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) fwd_plain(const __grid_constant__ sparse_call<T> c)
{
    DYNAMIC_SHARED(float, pool, 4);
    warp_row w = row_of_warp(c.rows, c.heads);
    if (w.b >= c.batch)
        return;
    float *q = pool + threadIdx.x / 32 * (c.width + c.dv), *o = q + c.width;
    int lane = threadIdx.x % 32;
    const T *from = c.q.at(w.b, w.i, w.h);
    for (int x = lane; x < c.width; x += 32)
        q[x] = to_float(from[x]);
    for (int x = lane; x < c.dv; x += 32)
        o[x] = 0;
    __syncwarp();
    const int32_t *list = c.list(w.b, w.i);
    float top = c.sink != NULL ? c.sink[w.h] : -INFINITY, sum = c.sink != NULL ? 1.0f : 0.0f;
    for (int k = 0; k < c.most; k += 32) {
        int j = k + lane < c.most ? key_of(list[k + lane], c.keys) : -1;
        float s = j >= 0 ? c.scale * dot(c.kv.at(w.b, j, 0), q, c.width) : -INFINITY, next = fmaxf(top, warp_max(s));
        if (next == -INFINITY)
            continue;
        float shrink = expf(top - next), p = expf(s - next);
        sum = sum * shrink + warp_sum(p);
        top = next;
        for (int x = lane; x < c.dv; x += 32)
            o[x] *= shrink;
        for (int n = 0; n < min(32, c.most - k); n++) {
            int key = __shfl_sync(0xffffffffu, j, n);
            float weight = __shfl_sync(0xffffffffu, p, n);
            if (key < 0)
                continue;
            const T *kv = c.kv.at(w.b, key, 0);
            for (int x = lane; x < c.dv; x += 32)
                o[x] += weight * to_float(kv[x]);
        }
    }
    T *out = c.o.at(w.b, w.i, w.h);
    for (int x = lane; x < c.dv; x += 32)
        out[x] = from_float<T>(sum > 0 ? o[x] / sum : o[x] + 0.0f * sum);
    if (lane == 0)
        *c.lse_at(w.b, w.h, w.i) = sum == 0 ? -INFINITY : top + logf(sum);
}

/* delta[b][i][h] = sum of do * o. */
template <typename T>
static __global__ void __launch_bounds__(THREADS) delta_rows(const __grid_constant__ sparse_call<T> c, float *delta)
{
    warp_row w = row_of_warp(c.rows, c.heads);
    if (w.b >= c.batch)
        return;
    const T *dout = c.dout.at(w.b, w.i, w.h), *o = c.o.at(w.b, w.i, w.h);
    float sum = 0;
    for (int x = threadIdx.x % 32; x < c.dv; x += 32)
        sum += to_float(dout[x]) * to_float(o[x]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        delta[((int64_t)w.b * c.rows + w.i) * c.heads + w.h] = sum;
}

/* p and ds of every entry of the lists of a chunk, pairs[i][h][k], and dq. */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    dq_plain(const __grid_constant__ sparse_call<T> c, int b, int first, int count, const float *delta, float2 *pairs)
{
    DYNAMIC_SHARED(float, pool, 4);
    int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int row = (int)(at / c.heads), h = (int)(at % c.heads), i = first + row, lane = threadIdx.x % 32;
    if (row >= count)
        return;
    float *q = pool + threadIdx.x / 32 * (2 * c.width + c.dv), *d_o = q + c.width, *dq = d_o + c.dv;
    const T *from = c.q.at(b, i, h), *dout = c.dout.at(b, i, h);
    for (int x = lane; x < c.width; x += 32) {
        q[x] = to_float(from[x]);
        dq[x] = 0;
    }
    for (int x = lane; x < c.dv; x += 32)
        d_o[x] = to_float(dout[x]);
    __syncwarp();
    const int32_t *list = c.list(b, i);
    float lse = *c.lse_at(b, h, i), own = delta[((int64_t)b * c.rows + i) * c.heads + h];
    for (int k = 0; k < c.most; k += 32) {
        int j = k + lane < c.most ? key_of(list[k + lane], c.keys) : -1;
        float p = 0, ds = 0;
        if (j >= 0) {
            const T *kv = c.kv.at(b, j, 0);
            p = expf(c.scale * dot(kv, q, c.width) - lse);
            ds = p * (dot(kv, d_o, c.dv) - own) * c.scale;
        }
        if (k + lane < c.most)
            pairs[((int64_t)row * c.heads + h) * c.most + k + lane] = make_float2(p, ds);
        for (int n = 0; n < min(32, c.most - k); n++) {
            int key = __shfl_sync(0xffffffffu, j, n);
            float weight = __shfl_sync(0xffffffffu, ds, n);
            if (key < 0)
                continue;
            const T *kv = c.kv.at(b, key, 0);
            for (int x = lane; x < c.width; x += 32)
                dq[x] += weight * to_float(kv[x]);
        }
    }
    T *out = c.dq.at(b, i, h);
    for (int x = lane; x < c.width; x += 32)
        out[x] = from_float<T>(dq[x]);
}

/* A block for each key: what the queries of a chunk add to it. */
template <typename T>
static __global__ void __launch_bounds__(KEY_THREADS)
    dkv_plain(const __grid_constant__ sparse_call<T> c, int b, int first, int count, const float2 *pairs,
              const int32_t *place, float *sum, bool add)
{
    int j = blockIdx.x;
    for (int x = threadIdx.x; x < c.width; x += KEY_THREADS) {
        float total = add ? sum[(int64_t)j * c.width + x] : 0.0f;
        for (int row = 0; row < count; row++) {
            int k = place[(int64_t)row * c.keys + j];
            if (k < 0)
                continue;
            for (int h = 0; h < c.heads; h++) {
                float2 pair = pairs[((int64_t)row * c.heads + h) * c.most + k];
                total += pair.y * to_float(c.q.at(b, first + row, h)[x]);
                if (x < c.dv)
                    total += pair.x * to_float(c.dout.at(b, first + row, h)[x]);
            }
        }
        sum[(int64_t)j * c.width + x] = total;
    }
}

template <typename T>
static __global__ void __launch_bounds__(KEY_THREADS)
    store_keys(const __grid_constant__ sparse_call<T> c, int b, const float *sum)
{
    T *to = c.dkv.at(b, blockIdx.x, 0);
    for (int x = threadIdx.x; x < c.width; x += KEY_THREADS)
        to[x] = from_float<T>(sum != NULL ? sum[(int64_t)blockIdx.x * c.width + x] : 0.0f);
}

/* A block for each head. */
template <typename T>
static __global__ void __launch_bounds__(256)
    sink_gradient(const __grid_constant__ sparse_call<T> c, const float *delta)
{
    __shared__ float scratch[8];
    int h = blockIdx.x;
    float sum = 0;
    for (int64_t r = threadIdx.x; r < (int64_t)c.batch * c.rows; r += 256)
        sum -= expf(c.sink[h] - *c.lse_at(r / c.rows, h, r % c.rows)) * delta[r * c.heads + h];
    sum = block_sum<256>(sum, scratch);
    if (threadIdx.x == 0)
        c.dsink[h] = (c.acc_dsink ? c.dsink[h] : 0.0f) + sum;
}

/* ---- launchers ------------------------------------------------------------------------------- */

static int check_width(struct lane *l, int64_t floats)
{
    int64_t have = cuda_of(l)->smem_per_block, need = floats * 4 * WARPS;
    if (need <= have)
        return ST_OK;
    return err_set(l->err, ST_UNSUPPORTED, "sparse: rows so wide need %lld bytes of shared memory, this GPU has %lld",
                   (long long)need, (long long)have);
}

static unsigned warps_for(int64_t n) { return (unsigned)ceil_div(n, WARPS); }

static int fwd_on_cores(struct lane *l, const sparse_call<bf16> &c, enum sparse_path path)
{
    return (path == SPARSE_PATH_HOPPER ? sparse_fwd_hopper : sparse_fwd_mma)(l, c);
}
static int fwd_on_cores(struct lane *, const sparse_call<float> &, enum sparse_path) { return ST_OK; } /* never fits */

/* What both directions have. A: their args. */
template <typename T, typename A> static sparse_call<T> call_of(const A *a)
{
    sparse_call<T> c = {};
    c.q = view_of<T>(&a->q);
    c.kv = view_of<T>(&a->kv);
    c.o = view_of<T>(&a->o);
    c.idx = (const int32_t *)a->idx.data;
    c.idx_batch = a->idx.stride[0];
    c.idx_row = a->idx.stride[1];
    c.lse = (float *)a->lse.data;
    c.lse_batch = a->lse.stride[0];
    c.lse_head = a->lse.stride[1];
    c.sink = (const float *)a->sink.data;
    c.batch = (int)a->q.dim[0];
    c.rows = (int)a->q.dim[1];
    c.keys = (int)a->kv.dim[1];
    c.heads = (int)a->q.dim[2];
    c.width = (int)a->q.dim[3];
    c.dv = (int)a->dv;
    c.most = (int)a->idx.dim[2];
    c.scale = (float)a->scale;
    return c;
}

template <typename T> static int run_fwd(struct lane *l, const struct sparse_fwd_args *a)
{
    sparse_call<T> c = call_of<T>(a);
    struct sparse_device gpu = sparse_device_of(l);
    struct sparse_shape shape =
        sparse_shape_of(&a->q, &a->kv, a->dv, aligned16(&a->q) && aligned16(&a->kv) && aligned16(&a->o));
    enum sparse_path path = sparse_path_of(&shape, &gpu).path;
    if (path != SPARSE_PATH_PLAIN)
        return fwd_on_cores(l, c, path);
    int smem = (c.width + c.dv) * 4 * WARPS;
    TRY(check_width(l, c.width + c.dv));
    auto kernel = fwd_plain<T>;
    NEEDS_SMEM(l, kernel, smem);
    LAUNCH(l, kernel, warps_for((int64_t)c.batch * c.rows * c.heads), THREADS, smem, c);
    return ST_OK;
}

extern "C" int64_t sparse_fwd_work_cuda(const struct sparse_fwd_args *a)
{
    (void)a;
    return 0;
}

extern "C" int sparse_fwd_cuda(struct lane *l, const struct sparse_fwd_args *a)
{
    TRY(sparse_fwd_check(a, l->err));
    BY_REAL(a->q.dtype, T, return run_fwd<T>(l, a));
}

static sparse_parts parts_of(const struct sparse_bwd_args *a)
{
    enum { MOST_BYTES = 1 << 27, ALIGN = 256 };
    int64_t row = a->q.dim[2] * a->idx.dim[2] * 8 + a->kv.dim[1] * 4; /* pairs and places of a query */
    sparse_parts p = {};
    p.chunk = min_i64(max_i64(1, a->q.dim[1]), max_i64(1, MOST_BYTES / max_i64(1, row)));
    p.pairs = round_up(a->q.dim[0] * a->q.dim[1] * a->q.dim[2] * 4, ALIGN);
    p.place = p.pairs + round_up(p.chunk * a->q.dim[2] * a->idx.dim[2] * 8, ALIGN);
    p.sum = p.place + round_up(p.chunk * a->kv.dim[1] * 4, ALIGN);
    p.bytes = p.sum + round_up(a->kv.dim[1] * a->kv.dim[2] * 4, ALIGN);
    return p;
}

extern "C" int64_t sparse_bwd_work_cuda(const struct sparse_bwd_args *a)
{
    /* Whatever GPU runs it, and whichever kernels are asked for there. */
    const struct sparse_device gpus[] = {{false, sparse_some_hopper.smem_per_block}, sparse_some_hopper};
    struct sparse_shape shape = sparse_shape_of(&a->q, &a->kv, a->dv, true);
    int64_t most = parts_of(a).bytes;
    for (int i = 0; i < countof(gpus); i++) {
        enum sparse_path path = sparse_path_of(&shape, &gpus[i]).path;
        most = max_i64(most, path == SPARSE_PATH_HOPPER  ? sparse_hopper_bytes(a, NULL, NULL)
                             : path == SPARSE_PATH_CORES ? sparse_mma_bytes(a, NULL, NULL)
                                                         : 0);
    }
    return most;
}

template <typename T>
static int chunk_plain(struct lane *l, const sparse_call<T> &c, const sparse_parts &p, char *work, int b, int first)
{
    int count = (int)min_i64(p.chunk, c.rows - first), smem = (2 * c.width + c.dv) * 4 * WARPS;
    float *delta = (float *)(work + p.delta), *sum = (float *)(work + p.sum);
    float2 *pairs = (float2 *)(work + p.pairs);
    int32_t *place = (int32_t *)(work + p.place);
    int64_t places = (int64_t)count * c.keys;
    auto kernel = dq_plain<T>;
    NEEDS_SMEM(l, kernel, smem);
    LAUNCH(l, kernel, warps_for((int64_t)count * c.heads), THREADS, smem, c, b, first, count, delta, pairs);
    LAUNCH(l, fill_words<-1>, (unsigned)ceil_div(places, 256), 256, 0, place, places);
    LAUNCH(l, note_list_places<T>, (unsigned)ceil_div((int64_t)count * c.most, 256), 256, 0, c, b, first, count, place,
           1, c.keys);
    LAUNCH(l, dkv_plain<T>, c.keys, KEY_THREADS, 0, c, b, first, count, pairs, place, sum, first > 0);
    return ST_OK;
}

static int bwd_on_cores(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b,
                        enum sparse_path path)
{
    return (path == SPARSE_PATH_HOPPER ? sparse_bwd_hopper : sparse_bwd_mma)(l, c, w, b);
}
static int bwd_on_cores(struct lane *, const sparse_call<float> &, const sparse_scratch &, int, enum sparse_path)
{
    return ST_OK;
}

template <typename T> static int run_bwd(struct lane *l, const struct sparse_bwd_args *a)
{
    sparse_parts p = parts_of(a);
    char *work = (char *)a->work.data;
    sparse_call<T> c = call_of<T>(a);
    c.dout = view_of<T>(&a->d_o);
    c.dq = view_of<T>(&a->dq);
    c.dkv = view_of<T>(&a->dkv);
    c.dsink = (float *)a->dsink.data;
    c.acc_dsink = a->acc_dsink;
    struct sparse_device gpu = sparse_device_of(l);
    struct sparse_shape shape = sparse_shape_of(
        &a->q, &a->kv, a->dv, aligned16(&a->q) && aligned16(&a->kv) && aligned16(&a->d_o) && aligned16(&a->dq));
    enum sparse_path path = sparse_path_of(&shape, &gpu).path;
    bool cores = path != SPARSE_PATH_PLAIN;
    sparse_scratch w = {};
    if (cores)
        (path == SPARSE_PATH_HOPPER ? sparse_hopper_bytes : sparse_mma_bytes)(a, work, &w);
    else
        TRY(check_width(l, 2 * c.width + c.dv));
    float *delta = cores ? w.delta : (float *)(work + p.delta), *sum = cores ? w.sum : (float *)(work + p.sum);
    LAUNCH(l, delta_rows<T>, warps_for((int64_t)c.batch * c.rows * c.heads), THREADS, 0, c, delta);
    for (int b = 0; b < c.batch; b++) {
        if (cores)
            TRY(bwd_on_cores(l, c, w, b, path));
        for (int first = 0; !cores && first < c.rows; first += (int)p.chunk)
            TRY(chunk_plain(l, c, p, work, b, first));
        LAUNCH(l, store_keys<T>, c.keys, KEY_THREADS, 0, c, b, c.rows > 0 ? sum : NULL);
    }
    if (present(&a->sink))
        LAUNCH(l, sink_gradient<T>, c.heads, 256, 0, c, delta);
    return ST_OK;
}

extern "C" int sparse_bwd_cuda(struct lane *l, const struct sparse_bwd_args *a)
{
    TRY(sparse_bwd_check(a, l->err));
    TRY(check_work("sparse_bwd", &a->work, sparse_bwd_work_cuda(a), l->err));
    BY_REAL(a->q.dtype, T, return run_bwd<T>(l, a));
}
