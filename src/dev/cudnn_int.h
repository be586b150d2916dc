/* What cudnn.c and cudnn_graph.c share: the functions of the library, and causal attention described to it as a graph
 * of primitive operations. Where the vendor's header is missing at build time, cudnn.c says the library is missing. */
#ifndef BRAID_DEV_CUDNN_INT_H
#define BRAID_DEV_CUDNN_INT_H

#include "dev/cuda.h"

#if defined(__has_include)
#if __has_include(<cudnn_graph.h>)
#define BRAID_CUDNN 1
#endif
#endif

#ifdef BRAID_CUDNN
#include <cudnn_graph.h>

/* Found at run time (vendor.c); named like the functions they point to, without the prefix. */
struct dnn_lib {
    void *handle;
    __typeof__(&cudnnGetVersion) version;
    __typeof__(&cudnnGetErrorString) error_string;
    __typeof__(&cudnnGetLastErrorString) last_error;
    __typeof__(&cudnnCreate) create;
    __typeof__(&cudnnDestroy) destroy;
    __typeof__(&cudnnSetStream) set_stream;
    __typeof__(&cudnnBackendCreateDescriptor) new_descriptor;
    __typeof__(&cudnnBackendDestroyDescriptor) free_descriptor;
    __typeof__(&cudnnBackendFinalize) finalize;
    __typeof__(&cudnnBackendSetAttribute) set;
    __typeof__(&cudnnBackendGetAttribute) get;
    __typeof__(&cudnnBackendExecute) execute;
};
int dnn_lib_open(struct dnn_lib *lib, struct err *e);
void dnn_lib_close(struct dnn_lib *lib);
/* Turns a status into ST_OK or ST_UNSUPPORTED with the library's own words. */
int dnn_status(const struct dnn_lib *lib, cudnnStatus_t code, const char *what, struct err *e);

/* Batch, row and head stride in elements of a tensor [batch, row, head, channel]; channels are adjacent. */
struct sdpa_stride {
    int64_t batch, row, head;
};
/* Everything a plan depends on; compared byte by byte, so it has no padding. */
struct sdpa_key {
    int64_t backward, deterministic, batch, heads, kv_heads, seq, d, d_v;
    int64_t windowed; /* the width itself is bound like the scale */
    struct sdpa_stride q, k, v, o, dout, dq, dk, dv;
    int64_t lse_batch, lse_head;
};

/* Names of the tensors that a call binds to addresses. The scalars are read from host memory. */
enum sdpa_uid {
    UID_Q = 1,
    UID_K,
    UID_V,
    UID_O,
    UID_LSE,
    UID_DO,
    UID_DQ,
    UID_DK,
    UID_DV,
    UID_ROWSUM, /* fp32 [batch, heads, seq]: sum of do * o; backward writes and reads it */
    UID_DQ_SUM, /* fp32 [batch, heads, seq, d]: dq before its rounding; only where not deterministic */
    UID_SCALE,
    UID_ONE,
    UID_NEG_INF,
    UID_WINDOW,  /* keys a row sees, as fp32 */
    UID_VIRTUAL, /* first of those that never exist in memory */
};

/* Descriptors made on the way; they live until the plan goes. The first failure sticks: later calls do nothing. */
enum { SDPA_MAX_DESCRIPTORS = 160, SDPA_MAX_OPS = 32 };
struct sdpa_graph {
    const struct dnn_lib *lib;
    struct err *e;
    int status;
    int n, n_ops;
    int64_t next_uid;
    cudnnBackendDescriptor_t made[SDPA_MAX_DESCRIPTORS], op[SDPA_MAX_OPS];
    cudnnBackendDescriptor_t graph;
};
/* handle NULL: no GPU; the graph can still be asked which engines a described GPU would offer. */
int sdpa_graph_build(struct sdpa_graph *g, const struct dnn_lib *lib, const struct sdpa_key *k, cudnnHandle_t handle,
                     struct err *e);
void sdpa_graph_free(struct sdpa_graph *g);
cudnnBackendDescriptor_t sdpa_new(struct sdpa_graph *g, cudnnBackendDescriptorType_t type);
void sdpa_set(struct sdpa_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
              cudnnBackendAttributeType_t type, int64_t n, const void *value);
void sdpa_finalize(struct sdpa_graph *g, cudnnBackendDescriptor_t d);
#endif

#endif
