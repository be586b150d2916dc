/* xent on the GPU. For each chunk of rows: logits by cuBLASLt, then one kernel that reads a row of logits once and
 * writes its gradient over it, then the two products of the gradient. Loss terms go to a table of rows, summed at the
 * end in a fixed order. */
#include "ops/cuda/loss_sum.cuh"
#include "ops/cuda/ptx.cuh"
#include "ops/colsum/colsum.h"
#include "ops/gemm/gemm.h"
#include "ops/xent/xent.h"

enum {
    MAX_CHUNK = 4096,
    LONG = 512,   /* threads for a row of a large vocabulary: two such blocks share an SM */
    MEDIUM = 128, /* and for one of up to MEDIUM_VOCAB */
    MEDIUM_VOCAB = 16384,
    SHORT_PACKS = 4, /* a warp takes a row of up to 32 * SHORT_PACKS packs of 16 bytes, in registers */
    SHORT_ROWS = 8,  /* warps of such a block */
    SUM_THREADS = 256,
};
constexpr float LOG2E = 1.4426950408889634f;

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

/* ---- softmax of a row and its gradient ------------------------------------------------------- */

struct row_args {
    void *logits;
    int64_t stride, rows, first; /* first: row of the chunk in the table of losses */
    int vocab;
    const int32_t *label;
    const double *scale; /* NULL: no gradient */
    float *nll;
    float z_loss;
};

/* exp(x - at), at2 = -at * log2(e). For bf16 one multiply-add in front of the exponential is exact enough. */
template <typename T> __device__ __forceinline__ float exp_from(float x, float at, float at2)
{
    return exp2_fast(sizeof(T) == 2 ? fmaf(x, LOG2E, at2) : (x - at) * LOG2E);
}

__device__ __forceinline__ float pack_max(const pack<float> &p)
{
    return fmaxf(fmaxf(p.v[0], p.v[1]), fmaxf(p.v[2], p.v[3]));
}
__device__ __forceinline__ float pack_max(const pack<bf16> &p)
{
    const __nv_bfloat162 *two = (const __nv_bfloat162 *)p.v;
    __nv_bfloat162 m = __hmax2(__hmax2(two[0], two[1]), __hmax2(two[2], two[3]));
    return fmaxf(__low2float(m), __high2float(m));
}

/* Maximum so far, and the sum of exp(x - max). The start is finite, so that rows of minus infinity give no NaN on the
 * way. */
struct online {
    float max, sum;
};
__device__ __forceinline__ struct online no_values() { return {-1e30f, 0.0f}; }

template <typename T> __device__ __forceinline__ void take(struct online &o, const pack<T> &p)
{
    float m = pack_max(p);
    if (m > o.max) {
        o.sum *= exp2_fast((o.max - m) * LOG2E);
        o.max = m;
    }
    float at2 = -o.max * LOG2E, sum = 0;
#pragma unroll
    for (int k = 0; k < pack<T>::N; k++)
        sum += exp_from<T>(to_float(p.v[k]), o.max, at2);
    o.sum += sum;
}

__device__ __forceinline__ struct online warp_join(struct online o)
{
    float m = warp_max(o.max);
    return {m, warp_sum(o.sum * exp2_fast((o.max - m) * LOG2E))};
}

/* scratch: THREADS / 32 of them. */
template <int THREADS> __device__ __forceinline__ struct online block_join(struct online o, struct online *scratch)
{
    o = warp_join(o);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = o;
    __syncthreads();
    return warp_join(threadIdx.x % 32 < THREADS / 32 ? scratch[threadIdx.x % 32] : no_values());
}

template <typename T> __device__ __forceinline__ pack<T> without_padding(pack<T> p, int first, int vocab)
{
#pragma unroll
    for (int k = 0; k < pack<T>::N; k++)
        p.v[k] = first + k < vocab ? p.v[k] : from_float<T>(-INFINITY);
    return p;
}

/* What a row's gradient needs. */
struct row_grad {
    float lse, lse2, factor, scale;
};
__device__ __forceinline__ struct row_grad grad_of(const struct row_args &a, struct online all, bool counts)
{
    float lse = all.max + logf(all.sum), scale = counts && a.scale != NULL ? (float)*a.scale : 0.0f;
    return {lse, -lse * LOG2E, scale * (1.0f + 2.0f * a.z_loss * lse), scale};
}

template <typename T> __device__ __forceinline__ float softmax_part(const struct row_grad &g, float x)
{
    return g.factor * exp_from<T>(x, g.lse, g.lse2);
}

template <typename T> __device__ __forceinline__ void write_pack(T *to, const struct row_grad &g, const pack<T> &p)
{
    pack<T> out;
#pragma unroll
    for (int k = 0; k < pack<T>::N; k++)
        out.v[k] = from_float<T>(softmax_part<T>(g, to_float(p.v[k])));
    store16(to, out);
}

/* By the thread that wrote the pack with the label: what the softmax alone does not give. */
template <typename T>
__device__ __forceinline__ void write_label(const struct row_args &a, T *to, const struct row_grad &g, float x,
                                            float *nll)
{
    *nll = g.lse - x;
    if (a.scale != NULL)
        *to = from_float<T>(softmax_part<T>(g, x) - g.scale);
}

__device__ __forceinline__ float nll_without_label(int label) { return label == -1 ? 0.0f : NAN; }

/* A row for each warp, in registers: small vocabularies. */
template <typename T> __global__ void __launch_bounds__(SHORT_ROWS * 32) softmax_short(const struct row_args a)
{
    constexpr int N = pack<T>::N;
    int64_t r = (int64_t)blockIdx.x * SHORT_ROWS + threadIdx.x / 32;
    if (r >= a.rows)
        return;
    int lane = threadIdx.x % 32, label = a.label[r];
    T *row = (T *)a.logits + r * a.stride;
    pack<T> p[SHORT_PACKS];
    struct online o = no_values();
#pragma unroll
    for (int j = 0; j < SHORT_PACKS; j++)
        if ((j * 32 + lane) * N < a.vocab)
            p[j] = load16(row + (j * 32 + lane) * N);
#pragma unroll
    for (int j = 0; j < SHORT_PACKS; j++)
        if ((j * 32 + lane) * N < a.vocab)
            take(o, without_padding(p[j], (j * 32 + lane) * N, a.vocab));
    bool counts = label >= 0 && label < a.vocab;
    struct row_grad g = grad_of(a, warp_join(o), counts);
    bool mine = counts && label / N % 32 == lane;
    float x = mine ? to_float(row[label]) : 0.0f;
#pragma unroll
    for (int j = 0; j < SHORT_PACKS; j++)
        if (a.scale != NULL && (j * 32 + lane) * N < a.vocab)
            write_pack(row + (j * 32 + lane) * N, g, p[j]);
    if (mine)
        write_label(a, row + label, g, x, &a.nll[a.first + r]);
    if (!counts && lane == 0)
        a.nll[a.first + r] = nll_without_label(label);
}

/* Whole packs of one row that are this thread's: every THREADS-th. */
template <typename T, int THREADS, bool KEEP> struct row_part {
    T *row, *kept; /* kept: in shared memory; each thread reads back only what it brought there */
    int packs, vocab;
    __device__ __forceinline__ pack<T> get(int c) const { return load16((KEEP ? kept : row) + c * pack<T>::N); }
    /* Beyond the vocabulary the last pack holds padding, which is ours to overwrite. */
    __device__ __forceinline__ void clear_padding() const
    {
        if ((packs - 1) % THREADS == threadIdx.x)
            for (int i = vocab; i < packs * pack<T>::N; i++)
                (KEEP ? kept : row)[i] = from_float<T>(-INFINITY);
    }
    __device__ __forceinline__ void bring(int from, int to) const
    {
        for (int c = from + threadIdx.x; KEEP && c < to; c += THREADS)
            copy_async16(kept + c * pack<T>::N, row + c * pack<T>::N);
        if (KEEP)
            copies_commit();
    }
    __device__ __forceinline__ void sum(struct online &o, int from, int to) const
    {
#pragma unroll 2
        for (int c = from + threadIdx.x; c < to; c += THREADS)
            take(o, get(c));
    }
};

/* A row for each block. KEEP: it stays in shared memory between reading and writing; otherwise it is read twice. */
template <typename T, int THREADS, bool KEEP>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS) softmax_rows(const struct row_args a)
{
    constexpr int N = pack<T>::N;
    DYNAMIC_SHARED(unsigned char, kept_bytes, 16);
    __shared__ struct online scratch[THREADS / 32];
    row_part<T, THREADS, KEEP> part = {(T *)a.logits + (int64_t)blockIdx.x * a.stride, (T *)kept_bytes,
                                       (a.vocab + N - 1) / N, a.vocab};
    int label = a.label[blockIdx.x], half = part.packs / 2 / THREADS * THREADS; /* less than all */
    part.bring(0, half);
    part.bring(half, part.packs);
    struct online o = no_values();
    if (KEEP)
        copies_wait<1>();
    part.sum(o, 0, half);
    if (KEEP)
        copies_wait<0>();
    part.clear_padding();
    part.sum(o, half, part.packs);
    bool counts = label >= 0 && label < a.vocab, mine = counts && label / N % THREADS == threadIdx.x;
    struct row_grad g = grad_of(a, block_join<THREADS>(o, scratch), counts);
    float x = mine ? to_float(part.row[label]) : 0.0f;
    if (a.scale != NULL) {
#pragma unroll 2
        for (int c = threadIdx.x; c < part.packs; c += THREADS)
            write_pack(part.row + c * N, g, part.get(c));
    }
    if (mine)
        write_label(a, part.row + label, g, x, &a.nll[a.first + blockIdx.x]);
    if (!counts && threadIdx.x == 0)
        a.nll[a.first + blockIdx.x] = nll_without_label(label);
}

/* ---- the loss -------------------------------------------------------------------------------- */

static struct tensor rows_part(const struct tensor *t, int64_t first, int64_t n)
{
    struct tensor part = *t;
    part.data = (char *)t->data + first * t->stride[0] * (int64_t)dtype_bytes(t->dtype);
    part.dim[0] = n;
    return part;
}

template <typename T, int THREADS> static int softmax_blocks(struct lane *l, const struct row_args *r)
{
    int64_t bytes = round_up(r->vocab * (int64_t)sizeof(T), 16);
    if (bytes + 1024 > cuda_of(l)->smem_per_block) {
        LAUNCH(l, (softmax_rows<T, THREADS, false>), (unsigned)r->rows, THREADS, 0, *r);
        return ST_OK;
    }
    NEEDS_SMEM(l, (softmax_rows<T, THREADS, true>), bytes);
    LAUNCH(l, (softmax_rows<T, THREADS, true>), (unsigned)r->rows, THREADS, (size_t)bytes, *r);
    return ST_OK;
}

template <typename T> static int softmax_chunk(struct lane *l, const struct row_args *r)
{
    if (r->vocab > MEDIUM_VOCAB)
        return softmax_blocks<T, LONG>(l, r);
    if (r->vocab > 32 * SHORT_PACKS * pack<T>::N)
        return softmax_blocks<T, MEDIUM>(l, r);
    LAUNCH(l, softmax_short<T>, (unsigned)ceil_div(r->rows, SHORT_ROWS), SHORT_ROWS * 32, 0, *r);
    return ST_OK;
}

static int gradients(struct lane *l, const struct xent_args *a, const struct tensor *dz, const struct tensor *h,
                     int64_t first, void *work)
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
    to_w.acc_c = a->acc_dw || first > 0;
    if (present(&a->dw))
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
                        (int)cudaMemcpy2DAsync(out.data, (size_t)out.stride[0] * size, z.data,
                                               (size_t)z.stride[0] * size, (size_t)z.dim[1] * size, (size_t)n,
                                               cudaMemcpyDeviceToDevice, stream_of(l)),
                        "copy of logits"));
    }
    struct row_args r = {};
    r.logits = z.data;
    r.stride = z.stride[0];
    r.vocab = (int)a->w.dim[0];
    r.rows = n;
    r.first = first;
    r.label = (const int32_t *)a->label.data + first;
    r.scale = present(&a->dh) ? (const double *)a->scale.data : NULL;
    r.nll = (float *)(work + w->nll);
    r.z_loss = (float)a->z_loss;
    BY_REAL(z.dtype, T, TRY(softmax_chunk<T>(l, &r)));
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
        TRY(cuda_status(l->err, (int)cudaMemsetAsync(a->dw.data, 0, (size_t)tensor_bytes(&a->dw), stream_of(l)),
                        "clearing dw"));
    if (rows == 0 && present(&a->dbias) && !a->acc_dbias)
        TRY(cuda_status(l->err, (int)cudaMemsetAsync(a->dbias.data, 0, (size_t)tensor_bytes(&a->dbias), stream_of(l)),
                        "clearing dbias"));
    LAUNCH(l, sum_losses<SUM_THREADS>, 1, SUM_THREADS, 0, (const float *)((char *)a->work.data + w.nll),
           (const int32_t *)a->label.data, rows, (double *)a->loss.data, a->acc_loss, (float *)a->nll.data);
    return ST_OK;
}
