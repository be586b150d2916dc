/* What the rest of the program may use of an open GPU. Vendor headers stay in dev/ and .cu files: streams and
 * handles are plain pointers here. */
#ifndef BRAID_DEV_CUDA_H
#define BRAID_DEV_CUDA_H

#include "dev/dev.h"

struct blas; /* cuBLASLt: handle, algorithms by shape, a workspace per lane (cublas.c) */
struct dnn;  /* cuDNN: handle, plans by shape (cudnn.c); NULL where the library is missing */

/* What is asked once of an open GPU and kept, since each answer costs microseconds of every call. Whoever opens the GPU
 * owns it; it is written while work is enqueued, which one thread does at a time. */
enum { CUDA_MOST_CLUSTER = 16 /* blocks */ };
struct cuda_memo {
    void *tensor_maps;                         /* cuTensorMapEncodeTiled of the driver; NULL: not asked yet */
    int clusters[2][2][CUDA_MOST_CLUSTER + 1]; /* of mhc_cluster.cu, by kernel and blocks: how many run at once, and 1
                                                * more; 0: not asked yet */
};

enum { CUDA_LANES = 5, CUDA_GEMM_LANES = 4 }; /* the last one has no GEMMs, hence no workspace for them */
struct cuda_dev {
    struct dev_gpu want;
    int sm_count, major, minor;
    int sm_budget; /* for kernels that stay on their multiprocessors: sm_count or less */
    int64_t memory, free_memory, l2_bytes, smem_per_block;
    bool hopper; /* run the kernels for compute capability 9.0 */
    char gpu_name[64];
    void *stream[CUDA_LANES];    /* cudaStream_t by lane index */
    void *workspace[CUDA_LANES]; /* of cuBLASLt, by lane index, as large as blas_open was told */
    struct blas *blas;
    struct dnn *dnn;
    struct cuda_memo *memo; /* NULL: everything is asked every time */
};

static inline struct cuda_dev *cuda_of(const struct lane *l) { return (struct cuda_dev *)l->dev->impl; }
/* cudaStream_t of a lane. */
static inline void *cuda_stream(const struct lane *l) { return cuda_of(l)->stream[l->index]; }

/* What GPU c->want.index is and whether its kernels can run; why not, where they cannot. Changes no state. */
int cuda_describe(struct cuda_dev *c, struct err *e);
/* Makes this GPU the thread's current one, until cuda_leave restores the one before. */
int cuda_enter(int index, int *before, struct err *e);
void cuda_leave(int index, int before);
/* Turns a cudaError_t into ST_OK or an error that names the call. */
int cuda_status(struct err *e, int code, const char *what);
/* The driver's encoder of tensor maps, as a plain pointer. */
int cuda_tensor_maps(const struct lane *l, void **encoder);
/* Checks the launch just made on this lane. */
int cuda_launched(const struct lane *l, const char *kernel);

/* ---- cublas.c: C = alpha op(A) op(B) + beta C, row-major, any mix the library accepts -------- */

enum { BLAS_WORKSPACE = 64 << 20 };
/* workspace: bytes of each of c->workspace, which the caller owns; the algorithms chosen fit into it. */
int blas_open(struct cuda_dev *c, int64_t workspace, struct err *e);
void blas_close(struct cuda_dev *c);
/* Scales of an operand of FP8 codes, as ops/quantise makes them. */
enum blas_scale { BLAS_SCALE_NONE, BLAS_SCALE_TENSOR, BLAS_SCALE_ROWS, BLAS_SCALE_SQUARE };
/* A, B and C as in ops/gemm; lda, ldb, ldc in elements. Types: a and b the same (BF16 or F32), c BF16 or F32. For FP8
 * codes (blas_gemm8) a and b may differ (b_type), and have scales on the device. */
struct blas_call {
    const void *a, *b;
    void *c;
    enum dtype ab, c_type;
    enum dtype b_type; /* of codes; DT_NONE: as ab */
    enum blas_scale a_scale, b_scale;
    const void *a_scales, *b_scales;
    bool trans_a, trans_b;
    int64_t m, n, k, lda, ldb, ldc;
    float alpha, beta;
};
int blas_gemm(struct lane *l, const struct blas_call *g);
/* A B^T of codes. *done false: the library has no kernel for this shape on this GPU, and nothing was written. */
int blas_gemm8(struct lane *l, const struct blas_call *g, bool *done);

/* ---- cudnn.c: attention; a missing library leaves cuda_dev.dnn NULL -------------------------- */

int dnn_open(struct cuda_dev *c, struct err *e);
void dnn_close(struct cuda_dev *c);
/* Causal attention as in ops/attention, without sink, documents or start: q [B, S, H, D], k [B, S, G, D],
 * v [B, S, G, Dv], o [B, S, H, Dv] and their gradients bf16, strided; lse [B, H, S] fp32. */
struct dnn_attention {
    struct tensor q, k, v, o, lse, dout, dq, dk, dv;
    float scale;
    float window; /* 0: none */
    void *work;
    int64_t work_bytes;
};
/* Scratch that is enough, from shapes alone. */
int64_t dnn_attention_fwd_bytes(const struct dnn_attention *a);
int64_t dnn_attention_bwd_bytes(const struct dnn_attention *a);
/* *done false: there is no library, or it refuses this shape or layout; nothing was written. The first call of a shape
 * compiles a kernel (up to a second) and must not be captured. Deterministic unless cuda_dev.want.fast. */
int dnn_attention_fwd(struct lane *l, const struct dnn_attention *a, bool *done);
int dnn_attention_bwd(struct lane *l, const struct dnn_attention *a, bool *done);

/* ---- events between lanes, and captured runs ------------------------------------------------- */

int dev_open_cuda(struct dev *d, const struct dev_gpu *gpu, int threads, struct err *e);

#endif
