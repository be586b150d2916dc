/* A device: where tensors live and what computes on them. Memory, lanes and copies are here; the
 * maths is a table of ops (ops/ops.h) that belongs to the device. Three kinds:
 *   ref   slow, obvious, double precision: the reference for the others
 *   cpu   fast, fp32, OpenMP and OpenBLAS
 *   cuda  one NVIDIA GPU, bf16 storage (fp32 for tests); built where nvcc is, chosen at run time
 */
#ifndef BRAID_DEV_H
#define BRAID_DEV_H

#include "tensor/tensor.h"

enum dev_kind { DEV_REF, DEV_CPU, DEV_CUDA };

struct dev_vt;
struct dev {
    enum dev_kind kind;
    enum dtype real; /* activations and weights: F64, F32 or BF16 */
    enum dtype wide; /* statistics, coefficients, vectors of parameters, gradients of parameters: F64 or F32 */
    bool hopper;     /* a GPU that runs the kernels for compute capability 9.0; a plan on paper assumes one */
    int n_threads;   /* host threads the ops may use */
    char name[96];   /* for people: "AMD EPYC, 2 threads, avx512" */
    const struct dev_vt *vt;
    void *impl;
};

/* A lane is an ordered queue of work (a stream on a GPU). Ops take the lane they run on, and put
 * their error text where the executor looks for it. */
struct lane {
    struct dev *dev;
    int index;
    struct err *err;
    void *native;
};

struct dev_vt {
    int (*alloc)(struct dev *d, int64_t bytes, void **out, struct err *e);
    void (*free)(struct dev *d, void *p);
    int (*copy_in)(struct dev *d, void *dst, const void *host, int64_t bytes, struct err *e);
    int (*copy_out)(struct dev *d, void *host, const void *src, int64_t bytes, struct err *e);
    int (*fill)(struct dev *d, void *dst, int byte, int64_t bytes, struct err *e);
    int (*sync)(struct dev *d, struct err *e);
    void (*close)(struct dev *d);
    /* A host device has none of the following (NULL). Bytes that are free, -1 if unknown. */
    int64_t (*available)(struct dev *d);
    /* Mark a point of a lane; let another lane wait for it. Events are numbered by the caller. */
    int (*record)(struct dev *d, int lane, int event, struct err *e);
    int (*wait)(struct dev *d, int lane, int event, struct err *e);
    /* Between begin and end lane 0, and lanes that wait for it, record work instead of doing it. */
    int (*capture_begin)(struct dev *d, struct err *e);
    int (*capture_end)(struct dev *d, void **captured, struct err *e);
    int (*capture_run)(struct dev *d, void *captured, struct err *e);
    void (*capture_free)(struct dev *d, void *captured);
    /* Names what is launched in between, for profilers. */
    void (*range_begin)(struct dev *d, const char *name);
    void (*range_end)(struct dev *d);
};

/* threads 0: all cores this process may use. cuda: bf16. */
int dev_open(struct dev *d, enum dev_kind kind, int threads, struct err *e);
/* Settings of GPUs only. */
struct dev_gpu {
    bool fp32;        /* store and compute in fp32 (without tensor cores), for tests */
    bool portable;    /* kernels for compute capability 8.0 even where better ones exist */
    bool fast;        /* allow algorithms that are not deterministic */
    int index;        /* which GPU */
    int sms;          /* multiprocessors that persistent kernels fill; 0: all */
    bool large_tiles; /* tests: GEMMs of experts in the largest tiles, however few there are */
    /* file that stores the algorithm chosen for each GEMM; NULL or empty: none. Must outlive the device */
    const char *gemm_table;
};
int dev_open_gpu(struct dev *d, const struct dev_gpu *gpu, int threads, struct err *e);
void dev_close(struct dev *d);

/* Alignment of every buffer and slot, in bytes: two cache lines, as the bulk copies of a GPU require. */
enum { DEV_ALIGN = 128 };

/* Peak rate of this machine, measured once at start (a few milliseconds): fp32 FMA
 * throughput for "percent of peak". 0 if unknown. */
double dev_peak_flops(struct dev *d);

/* A host view of a dense device tensor: on a host device the tensor itself, else a copy, released by dev_fetched. */
int dev_fetch(struct dev *d, const struct tensor *t, struct tensor *host, struct err *e);
void dev_fetched(struct dev *d, struct tensor *host);

/* Called before each run of a plan. Host devices check from time to time whether other programs use the cores, and
 * adapt how threads wait. */
void dev_between_runs(struct dev *d);

/* A back end may refuse, with the reason, before anything else happens. */
int dev_open_host(struct dev *d, struct err *e); /* ref and cpu */

/* Best instruction set this processor runs: "avx512", "avx2" or "base". */
const char *cpu_isa(void);

#endif
