/* index_loss, index_mass and index_recall, CUDA version; see indexer.h. A block for each query: attention weights of
 * its keys, scores, loss, gradients of queries and weights. The gradient of keys is the work of another kernel, a block
 * for each key, which walks the queries of a chunk in order. */
#include "ops/indexer/indexer_cuda.cuh"
#include "ops/sparse/sparse_cuda.cuh"

enum { ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / 32, KEY_THREADS = 128 };

/* Shared memory of a query of so many channels: whole 16 bytes, for the compiler reads the last ones as four at once
 * even where fewer are left. */
static int query_bytes(int width) { return (int)round_up(width * (int64_t)sizeof(float), 16); }

/* Scratch: a chunk of queries of one sequence at a time. */
struct loss_parts {
    int64_t chunk;
    int64_t kl, target, z, place, sum, lse, bytes; /* offsets; all of it */
};

static int64_t most_keys(const struct index_loss_args *a) { return a->idx.rank > 0 ? a->idx.dim[2] : a->k.dim[1]; }

static loss_parts parts_of(const struct index_loss_args *a)
{
    enum { MOST_BYTES = 1 << 29, ALIGN = 256 };
    /* z of every head, or what a query adds to every key */
    int64_t most = most_keys(a), wide = max_i64(a->q.dim[2], a->q.dim[3]),
            row = most * (wide + 2) * 4 + a->k.dim[1] * 4;
    loss_parts p = {};
    p.chunk = min_i64(max_i64(1, a->q.dim[1]), max_i64(1, MOST_BYTES / max_i64(1, row)));
    p.target = round_up(a->q.dim[0] * a->q.dim[1] * 4, ALIGN);
    p.z = p.target + round_up(p.chunk * most * 2 * 4, ALIGN);
    p.place = p.z + round_up(p.chunk * most * wide * 4, ALIGN);
    p.sum = p.place + round_up(p.chunk * a->k.dim[1] * 4, ALIGN);
    p.lse = p.sum + round_up(a->k.dim[1] * a->k.dim[2] * 4, ALIGN);
    bool unknown = a->idx.rank == 0 && a->lse.rank == 0; /* denominators of whole ranges */
    p.bytes = p.lse + (unknown ? round_up(a->mq.dim[2] * p.chunk * 4, ALIGN) : 0);
    return p;
}

template <typename T> __device__ __forceinline__ float dot(const T *x, const float *y, int n)
{
    float sum = 0;
    for (int c = 0; c < n; c++)
        sum += to_float(x[c]) * y[c];
    return sum;
}
template <typename T> __device__ __forceinline__ void take_row(float *to, const T *from, int n)
{
    for (int x = threadIdx.x; x < n; x += ROW_THREADS)
        to[x] = to_float(from[x]);
    __syncthreads();
}

/* p = attention weights of all heads, added up; s: scores of a head. Every thread owns the entries that it strides
 * over. */
template <typename T>
__device__ __forceinline__ void add_heads(const index_call<T> &c, const key_list &keys, int64_t b, int64_t i, float *p,
                                          float *s, float *q, float *scratch)
{
    for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS)
        p[n] = 0;
    for (int h = 0; h < c.main_heads; h++) {
        float top = -INFINITY, lse = 0;
        __syncthreads();
        take_row(q, c.mq.at(b, i, h), c.main_width);
        for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS) {
            int j = keys.key(n);
            s[n] = j < 0 ? -INFINITY : c.softmax_scale * dot(c.mk.at(b, j, h / c.per_group), q, c.main_width);
            top = fmaxf(top, s[n]);
        }
        if (c.lse != NULL) {
            lse = c.lse[b * c.lse_batch + h * c.lse_head + i];
        } else {
            top = block_max<ROW_THREADS>(top, scratch);
            for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS)
                lse += s[n] == -INFINITY ? 0.0f : expf(s[n] - top);
            lse = top + logf(block_sum<ROW_THREADS>(lse, scratch));
        }
        for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS)
            p[n] += s[n] == -INFINITY ? 0.0f : expf(s[n] - lse);
    }
}

/* The weights divided by their sum. */
__device__ __forceinline__ void normalise(const key_list &keys, float *p, float *scratch)
{
    float total = 0;
    for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS)
        total += p[n];
    total = block_sum<ROW_THREADS>(total, scratch);
    for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS)
        p[n] = total == 0 ? p[n] : p[n] / total;
}

/* z[h][n] = q_h.k_n and s[n] = score_scale I, -inf where there is no key. */
template <typename T>
__device__ __forceinline__ void row_scores(const index_call<T> &c, const key_list &keys, int64_t b, int64_t i, float *s,
                                           float *z, float *q)
{
    for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS)
        s[n] = keys.key(n) < 0 ? -INFINITY : 0.0f;
    for (int h = 0; h < c.heads; h++) {
        float w = c.w.at(b, i, 0)[h];
        __syncthreads();
        take_row(q, c.q.at(b, i, h), c.width);
        for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS) {
            int j = keys.key(n);
            if (j < 0)
                continue;
            float x = dot(c.k.at(b, j, 0), q, c.width);
            z[(int64_t)h * c.most + n] = x;
            s[n] += w * (c.relu && x < 0 ? 0.0f : x);
        }
    }
    for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS)
        s[n] *= c.score_scale;
}

/* The loss of a row; p becomes its gradient by score_scale I. */
__device__ __forceinline__ float row_loss(const key_list &keys, float *p, const float *s, float *scratch)
{
    float top = -INFINITY, sum = 0, loss = 0;
    for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS)
        top = fmaxf(top, s[n]);
    top = block_max<ROW_THREADS>(top, scratch);
    for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS)
        sum += s[n] == -INFINITY ? 0.0f : expf(s[n] - top);
    sum = logf(block_sum<ROW_THREADS>(sum, scratch));
    for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS) {
        if (keys.key(n) < 0) {
            p[n] = 0;
            continue;
        }
        float lp = s[n] - top - sum;
        loss += p[n] == 0 ? 0.0f : p[n] * (logf(p[n]) - lp);
        p[n] = expf(lp) - p[n];
    }
    return block_sum<ROW_THREADS>(loss, scratch);
}

/* dq and dw: a warp for each head in turn, a lane for each channel. */
template <typename T>
__device__ __forceinline__ void row_gradient(const index_call<T> &c, const key_list &keys, int64_t b, int64_t i,
                                             const float *ds, const float *z, float factor)
{
    for (int h = threadIdx.x / 32; h < c.heads; h += ROW_WARPS) {
        float w = c.w.at(b, i, 0)[h];
        for (int x = threadIdx.x % 32; x < max(32, c.width); x += 32) {
            float dq = 0, dw = 0;
            for (int n = 0; n < keys.count; n++) {
                int j = keys.key(n);
                if (j < 0)
                    continue;
                float at = z[(int64_t)h * c.most + n], di = factor * ds[n];
                if (c.relu && at < 0)
                    continue;
                dw += di * at;
                dq += x < c.width ? di * w * to_float(c.k.at(b, j, 0)[x]) : 0.0f;
            }
            if (x < c.width)
                c.dq.at(b, i, h)[x] = from_float<T>(dq);
            if (x == 0)
                c.dw.at(b, i, 0)[h] = from_float<T>(dw);
        }
    }
}

template <typename T>
static __global__ void __launch_bounds__(ROW_THREADS)
    loss_rows(const __grid_constant__ index_call<T> c, int b, int first, float *kl, float *target, float *zs,
              const double *scale, double factor, bool added, bool scored)
{
    DYNAMIC_SHARED(float, q, 16);
    __shared__ float scratch[ROW_WARPS];
    int64_t i = first + blockIdx.x;
    key_list keys = keys_of(c, b, i);
    float *p = target + (int64_t)blockIdx.x * 2 * c.most, *s = p + c.most,
          *z = zs + (int64_t)blockIdx.x * c.heads * c.most;
    if (!added)
        add_heads(c, keys, b, i, p, z, q, scratch);
    normalise(keys, p, scratch);
    if (!scored)
        row_scores(c, keys, b, i, s, z, q);
    float loss = row_loss(keys, p, s, scratch);
    int64_t at = b * (int64_t)c.rows + i;
    float share = index_share(c.mass, (int64_t)c.batch * c.rows, c.ranks, c.rank, at);
    if (threadIdx.x == 0)
        kl[at] = keys.count > 0 ? share * loss : 0.0f;
    for (int n = threadIdx.x; c.mass != NULL && n < keys.count; n += ROW_THREADS)
        p[n] *= share;
    if (c.dq.data == NULL || scored)
        return;
    __syncthreads();
    row_gradient(c, keys, b, i, p, z, (float)(scale[0] * factor));
}

template <typename T>
static __global__ void __launch_bounds__(ROW_THREADS)
    mass_rows(const __grid_constant__ index_call<T> c, int b, int first, float *target, float *mass, bool added)
{
    DYNAMIC_SHARED(float, q, 16);
    __shared__ float scratch[ROW_WARPS];
    int64_t i = first + blockIdx.x;
    key_list keys = keys_of(c, b, i);
    float *p = target + (int64_t)blockIdx.x * 2 * c.most, total = 0;
    if (!added)
        add_heads(c, keys, b, i, p, p + c.most, q, scratch);
    for (int n = threadIdx.x; n < keys.count; n += ROW_THREADS)
        total += p[n];
    total = block_sum<ROW_THREADS>(total, scratch);
    if (threadIdx.x == 0)
        mass[b * (int64_t)c.rows + i] = total;
}

template <typename T>
static __global__ void __launch_bounds__(256) note_places(const __grid_constant__ index_call<T> c, int b, int first,
                                                          int count, const __grid_constant__ index_places place)
{
    int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    int row = (int)(at / c.most), n = (int)(at % c.most);
    if (row >= count)
        return;
    key_list keys = keys_of(c, b, first + row);
    int j = n < keys.count ? keys.key(n) : -1;
    if (j >= 0)
        *place.at(row, j) = n;
}

template <typename T>
static __global__ void __launch_bounds__(KEY_THREADS)
    key_gradient(const __grid_constant__ index_call<T> c, int b, int first, int count, const float *target,
                 const float *zs, const __grid_constant__ index_places place, float *sum, bool add, const double *scale,
                 double factor)
{
    int j = blockIdx.x;
    float by = (float)(scale[0] * factor);
    for (int x = threadIdx.x; x < c.width; x += KEY_THREADS) {
        float total = add ? sum[(int64_t)j * c.width + x] : 0.0f;
        for (int row = 0; row < count; row++) {
            int n = *place.at(row, j);
            if (n < 0)
                continue;
            float di = by * target[(int64_t)row * 2 * c.most + n];
            const float *z = zs + (int64_t)row * c.heads * c.most + n, *w = c.w.at(b, first + row, 0);
            for (int h = 0; h < c.heads; h++)
                if (!c.relu || z[(int64_t)h * c.most] >= 0)
                    total += di * w[h] * to_float(c.q.at(b, first + row, h)[x]);
        }
        sum[(int64_t)j * c.width + x] = total;
    }
}

template <typename T>
static __global__ void __launch_bounds__(KEY_THREADS)
    store_keys(const __grid_constant__ index_call<T> c, int b, const float *sum)
{
    for (int x = threadIdx.x; x < c.width; x += KEY_THREADS)
        c.dk.at(b, blockIdx.x, 0)[x] = from_float<T>(sum != NULL ? sum[(int64_t)blockIdx.x * c.width + x] : 0.0f);
}

/* out (+)= factor * sum of x, in an order of n alone. */
static __global__ void __launch_bounds__(256) sum_rows(double *out, const float *x, int64_t n, double factor, bool add)
{
    __shared__ double part[256];
    double sum = 0;
    for (int64_t r = threadIdx.x; r < n; r += 256)
        sum += x[r];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half)
            part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        *out = (add ? *out : 0.0) + factor * part[0];
}

static __global__ void __launch_bounds__(256) copy_rows(float *to, const float *from, int64_t n)
{
    int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (at < n)
        to[at] = from[at];
}

/* ---- launchers ------------------------------------------------------------------------------- */

extern "C" int64_t index_loss_work_cuda(const struct index_loss_args *a) { return parts_of(a).bytes; }

template <typename T> static index_call<T> call_of(const struct index_loss_args *a)
{
    index_call<T> c = {};
    c.q = index_view<T>(&a->q);
    c.k = index_view<T>(&a->k);
    c.w = index_view<float>(&a->w);
    c.mq = index_view<T>(&a->mq);
    c.mk = index_view<T>(&a->mk);
    if (present(&a->dq)) {
        c.dq = index_view<T>(&a->dq);
        c.dk = index_view<T>(&a->dk);
        c.dw = index_view<T>(&a->dw);
    }
    c.lse = (const float *)a->lse.data;
    c.lse_batch = present(&a->lse) ? a->lse.stride[0] : 0;
    c.lse_head = present(&a->lse) ? a->lse.stride[1] : 0;
    c.mass = (const float *)a->mass.data;
    c.ranks = (int)(present(&a->mass) ? a->mass.dim[0] : 0);
    c.rank = (int)a->rank;
    c.idx = (const int32_t *)a->idx.data;
    c.idx_batch = present(&a->idx) ? a->idx.stride[0] : 0;
    c.idx_row = present(&a->idx) ? a->idx.stride[1] : 0;
    c.doc = (const int32_t *)a->doc_start.data;
    c.doc_batch = present(&a->doc_start) ? a->doc_start.stride[0] : 0;
    c.start = (const int64_t *)a->start.data;
    c.batch = (int)a->q.dim[0];
    c.rows = (int)a->q.dim[1];
    c.keys = (int)a->k.dim[1];
    c.heads = (int)a->q.dim[2];
    c.width = (int)a->q.dim[3];
    c.main_heads = (int)a->mq.dim[2];
    c.per_group = (int)(a->mq.dim[2] / max_i64(1, a->mk.dim[2]));
    c.main_width = (int)a->mq.dim[3];
    c.most = (int)most_keys(a);
    c.ratio = a->ratio;
    c.score_scale = (float)a->score_scale;
    c.softmax_scale = (float)a->softmax_scale;
    c.relu = a->relu;
    return c;
}

/* Which kernels take attention over lists with one key head, as sparse_fwd computes it. */
static enum sparse_path weights_path(struct lane *l, const struct index_loss_args *a)
{
    int64_t d = a->mk.dim[3];
    struct sparse_device gpu = sparse_device_of(l);
    struct sparse_shape s = {a->mq.dtype, a->mq.dim[2], d,
                             d == 576               ? 512
                             : d == 160 || d == 192 ? 128
                                                    : d,
                             aligned16(&a->mq) && aligned16(&a->mk)};
    bool lists = present(&a->lse) && present(&a->idx) && a->mk.dim[2] == 1;
    return lists ? sparse_path_of(&s, &gpu).path : SPARSE_PATH_PLAIN;
}

static int add_on_cores(struct lane *l, const struct index_loss_args *a, const index_call<bf16> &c, int b, int first,
                        int count, float *target, enum sparse_path path)
{
    sparse_call<bf16> s = {};
    s.q = {c.mq.data, c.mq.batch, c.mq.row, c.mq.head};
    s.kv = {c.mk.data, c.mk.batch, c.mk.row, 0};
    s.idx = c.idx;
    s.idx_batch = c.idx_batch;
    s.idx_row = c.idx_row;
    s.lse = (float *)a->lse.data;
    s.lse_batch = c.lse_batch;
    s.lse_head = c.lse_head;
    s.batch = c.batch;
    s.rows = c.rows;
    s.keys = c.keys;
    s.heads = c.main_heads;
    s.width = c.main_width;
    s.most = c.most;
    s.scale = c.softmax_scale;
    return (path == SPARSE_PATH_HOPPER ? sparse_weights_hopper : sparse_weights_mma)(l, s, b, first, count, target,
                                                                                     2 * (int64_t)c.most);
}
static int add_on_cores(struct lane *, const struct index_loss_args *, const index_call<float> &, int, int, int,
                        float *, enum sparse_path)
{
    return ST_OK; /* never fits */
}

/* The same over all keys that rows see. */
static bool ranges_fit(const struct index_loss_args *a)
{
    return !present(&a->idx) && index_ranges_fit(&a->mq, &a->mk);
}
static int add_ranges(struct lane *l, const index_call<bf16> &c, int b, int first, int count, float *target, float *lse)
{
    return index_range_weights(l, c, b, first, count, target, 2 * (int64_t)c.most, lse);
}
static int add_ranges(struct lane *, const index_call<float> &, int, int, int, float *, float *)
{
    return ST_OK; /* never fits */
}

/* Scores of a chunk to the second half of its targets. */
static int scores_on_cores(struct lane *l, const index_call<bf16> &c, int64_t first, int count, float *target)
{
    return index_scores(l, c, first, (unsigned)count, target + c.most, 2 * (int64_t)c.most, c.score_scale);
}
static int scores_on_cores(struct lane *, const index_call<float> &, int64_t, int, float *) { return ST_OK; }
static int gradient_on_cores(struct lane *l, const index_call<bf16> &c, const index_gradient &g, int64_t first,
                             int count, bool keep)
{
    TRY(index_gradient_mma(l, c, g, first, count));
    return index_sum_keys(l, c, g, count, keep);
}
static int gradient_on_cores(struct lane *, const index_call<float> &, const index_gradient &, int64_t, int, bool)
{
    return ST_OK;
}

template <typename T>
static int loss_chunk(struct lane *l, const struct index_loss_args *a, const index_call<T> &c, const loss_parts &p,
                      int b, int first)
{
    char *work = (char *)a->work.data;
    float *kl = (float *)(work + p.kl), *target = (float *)(work + p.target), *z = (float *)(work + p.z),
          *sum = (float *)(work + p.sum);
    index_places place = {(int32_t *)(work + p.place), c.idx != NULL ? 1 : c.keys, c.idx != NULL ? p.chunk : 1};
    int count = (int)min_i64(p.chunk, c.rows - first), smem = query_bytes(max(c.width, c.main_width));
    double factor = a->coeff * a->score_scale / (double)(a->q.dim[0] * a->q.dim[1]);
    const double *scale = (const double *)a->scale.data;
    int64_t places = (int64_t)(c.idx != NULL ? p.chunk : count) * c.keys;
    auto kernel = loss_rows<T>;
    NEEDS_SMEM(l, kernel, smem);
    enum sparse_path path = weights_path(l, a);
    bool cores = path != SPARSE_PATH_PLAIN, ranges = ranges_fit(a);
    if (cores)
        TRY(add_on_cores(l, a, c, b, first, count, target, path));
    if (ranges)
        TRY(add_ranges(l, c, b, first, count, target, (float *)(work + p.lse)));
    bool scored = index_cores_fit(&a->q, &a->k) && (!present(&a->dq) || aligned16(&a->dq));
    if (scored)
        TRY(scores_on_cores(l, c, (int64_t)b * c.rows + first, count, target));
    LAUNCH(l, kernel, count, ROW_THREADS, smem, c, b, first, kl, target, z, scale, factor, cores || ranges, scored);
    if (!present(&a->dk))
        return ST_OK;
    LAUNCH(l, fill_words<-1>, (unsigned)ceil_div(places, 256), 256, 0, place.data, places);
    LAUNCH(l, note_places<T>, (unsigned)ceil_div((int64_t)count * c.most, 256), 256, 0, c, b, first, count, place);
    index_gradient g = {target, z, sum, place, scale, factor};
    if (scored)
        return gradient_on_cores(l, c, g, (int64_t)b * c.rows + first, count, first > 0);
    LAUNCH(l, key_gradient<T>, c.keys, KEY_THREADS, 0, c, b, first, count, target, z, place, sum, first > 0, scale,
           factor);
    return ST_OK;
}

template <typename T> static int run_loss(struct lane *l, const struct index_loss_args *a)
{
    loss_parts p = parts_of(a);
    index_call<T> c = call_of<T>(a);
    const float *kl = (const float *)((char *)a->work.data + p.kl),
                *sum = (const float *)((char *)a->work.data + p.sum);
    int64_t rows = a->q.dim[0] * a->q.dim[1];
    for (int b = 0; b < c.batch; b++) {
        for (int first = 0; first < c.rows; first += (int)p.chunk)
            TRY(loss_chunk(l, a, c, p, b, first));
        if (present(&a->dk))
            LAUNCH(l, store_keys<T>, c.keys, KEY_THREADS, 0, c, b, c.rows > 0 ? sum : NULL);
    }
    if (present(&a->kl))
        LAUNCH(l, copy_rows, (unsigned)ceil_div(rows, 256), 256, 0, (float *)a->kl.data, kl, rows);
    if (present(&a->loss))
        LAUNCH(l, sum_rows, 1, 256, 0, (double *)a->loss.data, kl, rows, rows > 0 ? a->coeff / (double)rows : 0.0,
               a->acc_loss);
    return ST_OK;
}

extern "C" int index_loss_cuda(struct lane *l, const struct index_loss_args *a)
{
    TRY(index_loss_check(a, l->err));
    TRY(check_work("index_loss", &a->work, index_loss_work_cuda(a), l->err));
    BY_REAL(a->q.dtype, T, return run_loss<T>(l, a));
}

/* ---- mass ------------------------------------------------------------------------------------ */

/* The call of index_loss whose target this adds up; of its own scores it has none. */
static struct index_loss_args loss_of(const struct index_mass_args *a)
{
    struct index_loss_args loss = {};
    loss.q = a->mq;
    loss.k = loss.mk = a->mk;
    loss.mq = a->mq;
    loss.lse = a->lse;
    loss.idx = a->idx;
    loss.doc_start = a->doc_start;
    loss.start = a->start;
    loss.softmax_scale = a->softmax_scale;
    loss.ratio = a->ratio;
    return loss;
}

/* Rows at once: weights, and room for the scores of a head, of each. */
static int64_t mass_chunk(const struct index_mass_args *a)
{
    enum { MOST_BYTES = 1 << 28 };
    struct index_loss_args loss = loss_of(a);
    return min_i64(max_i64(1, a->mq.dim[1]), max_i64(1, MOST_BYTES / max_i64(1, 2 * most_keys(&loss) * 4)));
}

extern "C" int64_t index_mass_work_cuda(const struct index_mass_args *a)
{
    struct index_loss_args loss = loss_of(a);
    return mass_chunk(a) * 2 * most_keys(&loss) * 4;
}

template <typename T> static int run_mass(struct lane *l, const struct index_mass_args *a)
{
    struct index_loss_args loss = loss_of(a);
    index_call<T> c = call_of<T>(&loss);
    int chunk = (int)mass_chunk(a), smem = query_bytes(c.main_width);
    float *target = (float *)a->work.data;
    enum sparse_path path = weights_path(l, &loss);
    bool cores = path != SPARSE_PATH_PLAIN, ranges = ranges_fit(&loss);
    auto kernel = mass_rows<T>;
    NEEDS_SMEM(l, kernel, smem);
    for (int b = 0; b < c.batch; b++)
        for (int first = 0; first < c.rows; first += chunk) {
            int count = (int)min_i64(chunk, c.rows - first);
            if (cores)
                TRY(add_on_cores(l, &loss, c, b, first, count, target, path));
            if (ranges)
                TRY(add_ranges(l, c, b, first, count, target, NULL));
            LAUNCH(l, kernel, count, ROW_THREADS, smem, c, b, first, target, (float *)a->mass.data, cores || ranges);
        }
    return ST_OK;
}

extern "C" int index_mass_cuda(struct lane *l, const struct index_mass_args *a)
{
    TRY(index_mass_check(a, l->err));
    TRY(check_work("index_mass", &a->work, index_mass_work_cuda(a), l->err));
    BY_REAL(a->mq.dtype, T, return run_mass<T>(l, a));
}

/* ---- recall ---------------------------------------------------------------------------------- */

/* A block for each query that is looked at and head of it. */
template <typename T>
static __global__ void __launch_bounds__(ROW_THREADS)
    recall_rows(const __grid_constant__ index_call<T> c, int64_t every, int64_t sampled, float *share)
{
    DYNAMIC_SHARED(float, q, 16);
    __shared__ float scratch[ROW_WARPS];
    int64_t u = blockIdx.x, b = u / c.main_heads / sampled,
            i = index_sample_row(c.rows, every, u / c.main_heads % sampled);
    int h = (int)(u % c.main_heads);
    key_list list = keys_of(c, b, i);
    index_range seen = row_seen(c, b, i);
    take_row(q, c.mq.at(b, i, h), c.main_width);
    float top = -INFINITY, sum = 0, kept = 0;
    for (int64_t j = seen.first + threadIdx.x; j < seen.end; j += ROW_THREADS) {
        float s = c.softmax_scale * dot(c.mk.at(b, j, h / c.per_group), q, c.main_width), next = fmaxf(top, s);
        sum = sum * expf(top - next) + expf(s - next);
        top = next;
    }
    float all = block_max<ROW_THREADS>(top, scratch);
    sum = block_sum<ROW_THREADS>(top == -INFINITY ? 0.0f : sum * expf(top - all), scratch);
    for (int n = threadIdx.x; n < list.count; n += ROW_THREADS)
        if (list.key(n) >= 0)
            kept += expf(c.softmax_scale * dot(c.mk.at(b, list.key(n), h / c.per_group), q, c.main_width) - all);
    kept = block_sum<ROW_THREADS>(kept, scratch);
    if (threadIdx.x == 0)
        share[u] = seen.first < seen.end ? kept / sum : 1.0f;
}

extern "C" int64_t index_recall_work_cuda(const struct index_recall_args *a)
{
    return a->mq.dim[0] * index_sampled(a->mq.dim[1], a->every) * a->mq.dim[2] * 4;
}

template <typename T> static int run_recall(struct lane *l, const struct index_recall_args *a)
{
    index_call<T> c = {};
    c.mq = index_view<T>(&a->mq);
    c.mk = index_view<T>(&a->mk);
    c.idx = (const int32_t *)a->idx.data;
    c.idx_batch = a->idx.stride[0];
    c.idx_row = a->idx.stride[1];
    c.doc = (const int32_t *)a->doc_start.data;
    c.doc_batch = present(&a->doc_start) ? a->doc_start.stride[0] : 0;
    c.start = (const int64_t *)a->start.data;
    c.rows = (int)a->mq.dim[1];
    c.keys = (int)a->mk.dim[1];
    c.main_heads = (int)a->mq.dim[2];
    c.per_group = (int)(a->mq.dim[2] / max_i64(1, a->mk.dim[2]));
    c.main_width = (int)a->mq.dim[3];
    c.most = (int)a->idx.dim[2];
    c.ratio = a->ratio;
    c.softmax_scale = (float)a->softmax_scale;
    int64_t sampled = index_sampled(a->mq.dim[1], a->every), all = a->mq.dim[0] * sampled * a->mq.dim[2];
    int smem = query_bytes(c.main_width);
    auto kernel = recall_rows<T>;
    NEEDS_SMEM(l, kernel, smem);
    LAUNCH(l, kernel, (unsigned)all, ROW_THREADS, smem, c, a->every, sampled, (float *)a->work.data);
    LAUNCH(l, sum_rows, 1, 256, 0, (double *)a->recall.data, (const float *)a->work.data, all,
           all > 0 ? 1.0 / (double)all : 0.0, a->acc_recall);
    return ST_OK;
}

extern "C" int index_recall_cuda(struct lane *l, const struct index_recall_args *a)
{
    TRY(index_recall_check(a, l->err));
    TRY(check_work("index_recall", &a->work, index_recall_work_cuda(a), l->err));
    BY_REAL(a->mq.dtype, T, return run_recall<T>(l, a));
}
