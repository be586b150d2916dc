/* xent on the GPU. For each chunk of rows: logits by cuBLASLt, then one kernel that reads a row of logits once and writes
 * its gradient over it, then the two products of the gradient. Loss terms go to a table of rows, summed at the end in a
 * fixed order. */
#include "ops/cuda/kernel.cuh"

enum { THREADS = 1024, MAX_CHUNK = 4096 };

/* Rows of logits held at once: the products of the gradient want many. */
static int64_t chunk_rows(const struct xent_args *a)
{
    int64_t rows = a->h.dim[0];
    return a->chunk > 0 ? min_i64(a->chunk, rows) : min_i64(rows, MAX_CHUNK);
}

/* Rows of logits start on 16-byte boundaries. */
static int64_t logit_stride(const struct xent_args *a) { return round_up(a->w.dim[0], 8); }

struct layout {
    int64_t logits, nll, dbias, total;
};
static struct layout work_layout(const struct xent_args *a)
{
    struct layout w;
    int64_t chunk = chunk_rows(a), size = (int64_t)dtype_bytes(a->h.dtype);
    w.logits = 0;
    w.nll = round_up(chunk * logit_stride(a) * size, 256);
    w.dbias = w.nll + round_up(a->h.dim[0] * 4, 256);
    struct colsum_args s = {};
    s.x = tensor_2d(NULL, a->h.dtype, chunk, a->w.dim[0]);
    s.out = tensor_1d(NULL, DT_F32, a->w.dim[0]);
    w.total = w.dbias + (a->bias.rank > 0 && a->dh.rank > 0 ? colsum_work_cuda(&s) : 0);
    return w;
}

extern "C" int64_t xent_work_cuda(const struct xent_args *a) { return work_layout(a).total; }

/* Running maximum and sum of exp(x - max). */
struct online {
    float max, sum;
};
__device__ __forceinline__ struct online join(struct online a, struct online b)
{
    float m = fmaxf(a.max, b.max);
    float sa = a.max == m ? a.sum : a.sum * __expf(a.max - m), sb = b.max == m ? b.sum : b.sum * __expf(b.max - m);
    struct online r = {m, sa + sb};
    return r;
}

__device__ struct online block_join(struct online x, struct online *scratch)
{
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        struct online other = {__shfl_xor_sync(0xffffffffu, x.max, d), __shfl_xor_sync(0xffffffffu, x.sum, d)};
        x = join(x, other);
    }
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = x;
    __syncthreads();
    struct online all = scratch[0];
    for (int w = 1; w < THREADS / 32; w++)
        all = join(all, scratch[w]);
    __syncthreads();
    return all;
}

struct row_args {
    void *logits;
    int64_t stride, vocab, first; /* first: row of the chunk in the table of losses */
    const int32_t *label;
    const double *scale; /* NULL: no gradient */
    float *nll;
    float z_loss;
};

/* KEEP: the row stays in shared memory between reading and writing; otherwise it is read twice. */
template <typename T, bool KEEP> __global__ void __launch_bounds__(THREADS, 2) softmax_rows(struct row_args a)
{
    constexpr int N = pack<T>::N;
    extern __shared__ __align__(16) unsigned char kept_bytes[];
    T *kept = (T *)kept_bytes;
    __shared__ struct online scratch[THREADS / 32];
    T *row = (T *)a.logits + (int64_t)blockIdx.x * a.stride;
    int label = a.label[blockIdx.x];
    int64_t whole = a.vocab / N * N;
    struct online mine = {-INFINITY, 0};
#pragma unroll 2
    for (int64_t i = (int64_t)threadIdx.x * N; i < whole; i += THREADS * N) {
        pack<T> v = load16(row + i);
        if (KEEP)
            store16(kept + i, v);
        float m = to_float(v.v[0]);
#pragma unroll
        for (int k = 1; k < N; k++)
            m = fmaxf(m, to_float(v.v[k]));
        if (m > mine.max) {
            mine.sum *= __expf(mine.max - m);
            mine.max = m;
        }
#pragma unroll
        for (int k = 0; k < N; k++)
            mine.sum += __expf(to_float(v.v[k]) - mine.max);
    }
    for (int64_t i = whole + threadIdx.x; i < a.vocab; i += THREADS) {
        if (KEEP)
            kept[i] = row[i];
        struct online one = {to_float(row[i]), 1};
        mine = join(mine, one);
    }
    struct online all = block_join(mine, scratch); /* also orders the writes to kept */
    float lse = all.max + logf(all.sum);
    bool counts = label >= 0 && label < a.vocab;
    if (threadIdx.x == 0)
        a.nll[a.first + blockIdx.x] = counts ? lse - to_float(row[label]) : label == -1 ? 0.0f : NAN;
    if (a.scale == NULL)
        return;
    __syncthreads(); /* row[label] is read before anyone overwrites it */
    float scale = counts ? (float)*a.scale : 0.0f, factor = scale * (1.0f + 2.0f * a.z_loss * lse);
    const T *from = KEEP ? kept : row;
#pragma unroll 1
    for (int64_t i = (int64_t)threadIdx.x * N; i < whole; i += THREADS * N) {
        pack<T> v = load16(from + i), out;
#pragma unroll
        for (int k = 0; k < N; k++)
            out.v[k] = from_float<T>(factor * __expf(to_float(v.v[k]) - lse) - (i + k == label ? scale : 0.0f));
        store16(row + i, out);
    }
    for (int64_t i = whole + threadIdx.x; i < a.vocab; i += THREADS)
        row[i] = from_float<T>(factor * __expf(to_float(from[i]) - lse) - (i == label ? scale : 0.0f));
}

/* One block: rows by thread, then threads in order, in double. */
__global__ void sum_loss(const float *nll, const int32_t *label, int64_t rows, double *loss, bool add, float *nll_out)
{
    __shared__ double sums[THREADS], counts[THREADS];
    double s = 0, n = 0;
    for (int64_t r = threadIdx.x; r < rows; r += THREADS) {
        s += (double)nll[r];
        n += label[r] >= 0;
        if (nll_out != NULL)
            nll_out[r] = nll[r];
    }
    sums[threadIdx.x] = s;
    counts[threadIdx.x] = n;
    __syncthreads();
    if (threadIdx.x == 0) {
        s = n = 0;
        for (int t = 0; t < THREADS; t++) {
            s += sums[t];
            n += counts[t];
        }
        loss[0] = (add ? loss[0] : 0) + s;
        loss[1] = (add ? loss[1] : 0) + n;
    }
}

static struct tensor rows_part(const struct tensor *t, int64_t first, int64_t n)
{
    struct tensor part = *t;
    part.data = (char *)t->data + first * t->stride[0] * (int64_t)dtype_bytes(t->dtype);
    part.dim[0] = n;
    return part;
}

template <typename T> static int softmax_chunk(struct lane *l, const struct row_args *r, int64_t rows)
{
    int64_t bytes = round_up(r->vocab * (int64_t)sizeof(T), 16);
    if (bytes + 4096 > cuda_of(l)->smem_per_block) {
        LAUNCH(l, (softmax_rows<T, false>), (unsigned)rows, THREADS, 0, *r);
        return ST_OK;
    }
    NEEDS_SMEM(l, (softmax_rows<T, true>), bytes);
    LAUNCH(l, (softmax_rows<T, true>), (unsigned)rows, THREADS, (size_t)bytes, *r);
    return ST_OK;
}

static int gradients(struct lane *l, const struct xent_args *a, const struct tensor *dz, const struct tensor *h, int64_t first, void *work)
{
    struct gemm_args to_h = {}, to_w = {};
    to_h.a = *dz;
    to_h.b = a->w;
    to_h.c = rows_part(&a->dh, first, dz->dim[0]);
    to_h.alpha = 1;
    TRY(gemm_cuda(l, &to_h));
    to_w.a = *dz;
    to_w.b = *h;
    to_w.c = a->dw;
    to_w.trans_a = true;
    to_w.alpha = 1;
    to_w.beta = a->acc_dw || first > 0 ? 1 : 0;
    TRY(gemm_cuda(l, &to_w));
    if (!present(&a->dbias))
        return ST_OK;
    struct colsum_args s = {};
    s.x = *dz;
    s.out = a->dbias;
    s.acc_out = a->acc_dbias || first > 0;
    s.work = tensor_1d(work, DT_U8, colsum_work_cuda(&s));
    return colsum_cuda(l, &s);
}

static int one_chunk(struct lane *l, const struct xent_args *a, const struct layout *w, int64_t first, int64_t n)
{
    char *work = (char *)a->work.data;
    struct tensor h = rows_part(&a->h, first, n), z = tensor_2d(work + w->logits, a->h.dtype, n, a->w.dim[0]);
    z.stride[0] = logit_stride(a);
    struct gemm_args logits = {};
    logits.a = h;
    logits.b = a->w;
    logits.c = z;
    logits.bias = a->bias;
    logits.trans_b = true;
    logits.alpha = 1;
    TRY(gemm_cuda(l, &logits));
    if (present(&a->logits)) {
        size_t size = dtype_bytes(z.dtype);
        struct tensor out = rows_part(&a->logits, first, n);
        TRY(cuda_status(l->err,
                        (int)cudaMemcpy2DAsync(out.data, (size_t)out.stride[0] * size, z.data, (size_t)z.stride[0] * size,
                                               (size_t)z.dim[1] * size, (size_t)n, cudaMemcpyDeviceToDevice, stream_of(l)),
                        "copy of logits"));
    }
    struct row_args r = {};
    r.logits = z.data;
    r.stride = z.stride[0];
    r.vocab = a->w.dim[0];
    r.first = first;
    r.label = (const int32_t *)a->label.data + first;
    r.scale = present(&a->dh) ? (const double *)a->scale.data : NULL;
    r.nll = (float *)(work + w->nll);
    r.z_loss = (float)a->z_loss;
    BY_REAL(z.dtype, T, TRY(softmax_chunk<T>(l, &r, n)));
    return present(&a->dh) ? gradients(l, a, &z, &h, first, work + w->dbias) : ST_OK;
}

extern "C" int xent_cuda(struct lane *l, const struct xent_args *a)
{
    TRY(xent_check(a, l->err));
    TRY(check_work("xent", &a->work, xent_work_cuda(a), l->err));
    struct layout w = work_layout(a);
    int64_t rows = a->h.dim[0], chunk = chunk_rows(a);
    for (int64_t first = 0; first < rows; first += chunk)
        TRY(one_chunk(l, a, &w, first, min_i64(chunk, rows - first)));
    if (rows == 0 && present(&a->dw) && !a->acc_dw)
        TRY(cuda_status(l->err, (int)cudaMemsetAsync(a->dw.data, 0, (size_t)tensor_bytes(&a->dw), stream_of(l)), "clearing dw"));
    if (rows == 0 && present(&a->dbias) && !a->acc_dbias)
        TRY(cuda_status(l->err, (int)cudaMemsetAsync(a->dbias.data, 0, (size_t)tensor_bytes(&a->dbias), stream_of(l)), "clearing dbias"));
    LAUNCH(l, sum_loss, 1, THREADS, 0, (const float *)((char *)a->work.data + w.nll), (const int32_t *)a->label.data, rows,
           (double *)a->loss.data, a->acc_loss, (float *)a->nll.data);
    return ST_OK;
}
