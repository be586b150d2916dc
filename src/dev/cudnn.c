/* Attention through cuDNN's backend API, in plain C: opening the library, plans by shape, and running them.
 *
 * A plan (a graph of cudnn_graph.c, compiled) is made on first use of a shape and kept. The deterministic backward
 * keeps all scores of a call in bf16, so a large one is cut over batches and heads into pieces whose scratch is
 * bounded: the pieces are independent, use one plan and give the bits of the whole call. Alternating them over two
 * streams fills the tail of one with the start of the next. */
#include "dev/cudnn_int.h"

enum { SUM_ALIGN = 256 }; /* of every part of the scratch, and of its beginning */

static int64_t elem_count(const struct tensor *t, int first)
{
    int64_t n = 1;
    for (int i = first; i < t->rank; i++)
        n *= t->dim[i];
    return n;
}

/* ---- pieces of a call and their scratch: shapes alone ---------------------------------------- */

enum {
    PIECE_MB = 576,           /* scratch of one piece, where more than one is needed */
    LONG_SEQ = 4096,          /* longer ones may take twice that: a piece wants eight heads or so to fill a GPU */
    WORKSPACE_SLACK = 1 << 16 /* the library asks for 256 bytes beside what the formulas say */
};

/* Batches and kv heads (with the query heads that share them) of one call of the library. */
struct piece {
    int64_t batch, groups;
};

static int64_t heads_per_group(const struct dnn_attention *a)
{
    return a->k.dim[2] > 0 ? a->q.dim[2] / a->k.dim[2] : 1;
}

static int64_t rowsum_bytes(const struct dnn_attention *a, struct piece p)
{
    return round_up(p.batch * p.groups * heads_per_group(a) * a->q.dim[1] * 4, SUM_ALIGN);
}

static int64_t dq_sum_bytes(const struct dnn_attention *a, struct piece p, bool deterministic)
{
    return deterministic ? 0
                         : round_up(p.batch * p.groups * heads_per_group(a) * a->q.dim[1] * a->q.dim[3] * 4, SUM_ALIGN);
}

/* What the library will ask for; checked when the plan is made. */
static int64_t workspace_bytes(const struct dnn_attention *a, struct piece p, bool deterministic)
{
    int64_t n = a->q.dim[1], up = round_up(n, 128), heads = p.batch * p.groups * heads_per_group(a);
    int64_t grouped = heads_per_group(a) > 1 ? heads * n * (a->q.dim[3] + a->v.dim[3]) * 2 : 0;
    return WORKSPACE_SLACK + grouped + (deterministic ? heads * up * up * 2 : 0);
}

static int64_t piece_bytes(const struct dnn_attention *a, struct piece p, bool deterministic)
{
    return rowsum_bytes(a, p) + dq_sum_bytes(a, p, deterministic) +
           round_up(workspace_bytes(a, p, deterministic), SUM_ALIGN);
}

/* The next smaller part of n that divides it; 0 after 1. */
static int64_t smaller_divisor(int64_t n, int64_t d)
{
    while (--d > 0)
        if (n % d == 0)
            return d;
    return 0;
}

/* The next smaller piece: fewer batches first, since all heads of one batch are adjacent. groups 0
 * after the smallest. */
static struct piece smaller_piece(const struct dnn_attention *a, struct piece p)
{
    if (p.batch > 1)
        return (struct piece){smaller_divisor(a->q.dim[0], p.batch), p.groups};
    return (struct piece){1, smaller_divisor(a->k.dim[2], p.groups)};
}

static struct piece whole_call(const struct dnn_attention *a) { return (struct piece){a->q.dim[0], a->k.dim[2]}; }

/* The largest piece within this many bytes, else the smallest there is. */
static struct piece largest_piece(const struct dnn_attention *a, bool deterministic, int64_t bytes)
{
    struct piece p = whole_call(a);
    while (piece_bytes(a, p, deterministic) > bytes) {
        struct piece next = smaller_piece(a, p);
        if (next.groups == 0)
            break;
        p = next;
    }
    return p;
}

int64_t dnn_attention_fwd_bytes(const struct dnn_attention *a)
{
    (void)a;
    return WORKSPACE_SLACK + SUM_ALIGN;
}

int64_t dnn_attention_bwd_bytes(const struct dnn_attention *a)
{
    int64_t limit = ((int64_t)PIECE_MB << 20) * (a->q.dim[1] > LONG_SEQ ? 2 : 1);
    if (elem_count(&a->q, 0) == 0 || elem_count(&a->k, 0) == 0)
        return 0;
    struct piece p = largest_piece(a, true, limit), one = {1, 1};
    bool cut = p.batch != a->q.dim[0] || p.groups != a->k.dim[2];
    int64_t fast = min_i64(piece_bytes(a, whole_call(a), false), limit);
    return SUM_ALIGN + max_i64(piece_bytes(a, p, true) * (cut ? 2 : 1), max_i64(fast, piece_bytes(a, one, false)));
}

#ifdef BRAID_CUDNN

#include "dev/vendor.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    OLDEST_VERSION = 91000, /* older ones want the sum of dq cleared, or another mask value */
    MAX_CANDIDATES = 8,
    STREAMS = 2,
};

struct plan {
    struct sdpa_key key;
    struct sdpa_graph graph;
    cudnnBackendDescriptor_t plan;
    int64_t workspace;
    bool refused;
};

struct dnn {
    struct dnn_lib lib;
    cudnnHandle_t handle;
    cudaStream_t side[STREAMS - 1]; /* beside the stream of the call */
    cudaEvent_t fork, join[STREAMS - 1];
    struct plan **plan;
    size_t n_plans, cap_plans;
};

/* ---- the library ----------------------------------------------------------------------------- */

int dnn_status(const struct dnn_lib *lib, cudnnStatus_t code, const char *what, struct err *e)
{
    char words[256] = "";
    if (code == CUDNN_STATUS_SUCCESS)
        return ST_OK;
    lib->last_error(words, sizeof words);
    return err_set(e, ST_UNSUPPORTED, "%s: %s%s%.200s", what, lib->error_string(code), words[0] ? ": " : "", words);
}

int dnn_lib_open(struct dnn_lib *lib, struct err *e)
{
    static const char *const names[] = {"libcudnn.so.9", "libcudnn_graph.so.9", NULL};
    *lib = (struct dnn_lib){0};
    const struct vendor_symbol find[] = {
        {"cudnnGetVersion", (void **)&lib->version},
        {"cudnnGetErrorString", (void **)&lib->error_string},
        {"cudnnGetLastErrorString", (void **)&lib->last_error},
        {"cudnnCreate", (void **)&lib->create},
        {"cudnnDestroy", (void **)&lib->destroy},
        {"cudnnSetStream", (void **)&lib->set_stream},
        {"cudnnBackendCreateDescriptor", (void **)&lib->new_descriptor},
        {"cudnnBackendDestroyDescriptor", (void **)&lib->free_descriptor},
        {"cudnnBackendFinalize", (void **)&lib->finalize},
        {"cudnnBackendSetAttribute", (void **)&lib->set},
        {"cudnnBackendGetAttribute", (void **)&lib->get},
        {"cudnnBackendExecute", (void **)&lib->execute},
    };
    TRY(vendor_open(&lib->handle, names, e));
    TRY(vendor_find(lib->handle, find, countof(find), e));
    if (lib->version() < OLDEST_VERSION)
        return err_set(e, ST_UNSUPPORTED, "cuDNN is version %zu, needed is %d or later", lib->version(),
                       OLDEST_VERSION);
    return ST_OK;
}

void dnn_lib_close(struct dnn_lib *lib)
{
    vendor_close(lib->handle);
    lib->handle = NULL;
}

static int open_handle(struct dnn *d, struct err *e)
{
    TRY(dnn_lib_open(&d->lib, e));
    TRY(dnn_status(&d->lib, d->lib.create(&d->handle), "cudnnCreate", e));
    TRY(cuda_status(e, (int)cudaEventCreateWithFlags(&d->fork, cudaEventDisableTiming), "cudaEventCreateWithFlags"));
    for (int i = 0; i < STREAMS - 1; i++) {
        TRY(cuda_status(e, (int)cudaStreamCreateWithFlags(&d->side[i], cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags"));
        TRY(cuda_status(e, (int)cudaEventCreateWithFlags(&d->join[i], cudaEventDisableTiming),
                        "cudaEventCreateWithFlags"));
    }
    return ST_OK;
}

/* Without the library attention has kernels of its own, so nothing that goes wrong here is an error. */
int dnn_open(struct cuda_dev *c, struct err *e)
{
    struct err why = {0};
    TRY(mem_array((void **)&c->dnn, 1, sizeof *c->dnn, e));
    if (c->want.fp32 || open_handle(c->dnn, &why) != ST_OK)
        dnn_close(c);
    return ST_OK;
}

static void free_plan(struct plan *p)
{
    sdpa_graph_free(&p->graph);
    free(p);
}

void dnn_close(struct cuda_dev *c)
{
    struct dnn *d = c->dnn;
    if (d == NULL)
        return;
    for (size_t i = 0; i < d->n_plans; i++)
        free_plan(d->plan[i]);
    free(d->plan);
    for (int i = 0; i < STREAMS - 1; i++) {
        if (d->join[i] != NULL)
            cudaEventDestroy(d->join[i]);
        if (d->side[i] != NULL)
            cudaStreamDestroy(d->side[i]);
    }
    if (d->fork != NULL)
        cudaEventDestroy(d->fork);
    if (d->handle != NULL)
        d->lib.destroy(d->handle);
    dnn_lib_close(&d->lib);
    free(d);
    c->dnn = NULL;
}

/* ---- plans ----------------------------------------------------------------------------------- */

/* The engines the library proposes for a graph, best first. */
static int propose(struct sdpa_graph *g, cudnnBackendDescriptor_t *out, int64_t *n)
{
    cudnnBackendDescriptor_t heur = sdpa_new(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    sdpa_set(g, heur, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &g->graph);
    sdpa_set(g, heur, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    sdpa_finalize(g, heur);
    for (int i = 0; i < MAX_CANDIDATES; i++)
        out[i] = sdpa_new(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    TRY(g->status);
    *n = 0;
    cudnnStatus_t code =
        g->lib->get(heur, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_CANDIDATES, n, out);
    TRY(dnn_status(g->lib, code, "cuDNN heuristics", g->e));
    *n = min_i64(*n, MAX_CANDIDATES);
    return *n > 0 ? ST_OK : err_set(g->e, ST_UNSUPPORTED, "cuDNN proposes no engine");
}

static int compile(struct plan *p, cudnnHandle_t handle, cudnnBackendDescriptor_t config)
{
    struct sdpa_graph *g = &p->graph;
    int64_t n = 0;
    g->status = ST_OK; /* the engine before this one may have failed */
    p->plan = sdpa_new(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    sdpa_set(g, p->plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    sdpa_set(g, p->plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &config);
    sdpa_finalize(g, p->plan);
    TRY(g->status);
    return dnn_status(
        g->lib, g->lib->get(p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &n, &p->workspace),
        "cuDNN workspace size", g->e);
}

static int make_plan(struct dnn *d, struct plan *p, struct err *e)
{
    cudnnBackendDescriptor_t config[MAX_CANDIDATES];
    int64_t n = 0;
    TRY(sdpa_graph_build(&p->graph, &d->lib, &p->key, d->handle, e));
    TRY(propose(&p->graph, config, &n));
    int st = ST_UNSUPPORTED;
    for (int64_t i = 0; i < n && st != ST_OK; i++)
        st = compile(p, d->handle, config[i]);
    return st;
}

/* A refusal is remembered too. */
static int find_plan(struct dnn *d, const struct sdpa_key *key, struct plan **out, struct err *e)
{
    for (size_t i = 0; i < d->n_plans; i++)
        if (memcmp(&d->plan[i]->key, key, sizeof *key) == 0) {
            *out = d->plan[i];
            return ST_OK;
        }
    struct plan *p;
    struct err why = {0};
    TRY(mem_grow((void **)&d->plan, &d->cap_plans, d->n_plans + 1, sizeof *d->plan, e));
    TRY(mem_array((void **)&p, 1, sizeof *p, e));
    p->key = *key;
    p->refused = make_plan(d, p, &why) != ST_OK;
    p->graph.e = NULL; /* nothing is built in it from here on */
    d->plan[d->n_plans++] = p;
    *out = p;
    return ST_OK;
}

static struct sdpa_stride stride_of(const struct tensor *t)
{
    return (struct sdpa_stride){t->stride[0], t->stride[1], t->stride[2]};
}

static struct sdpa_key key_of(const struct dnn_attention *a, struct piece p, bool backward, bool deterministic)
{
    struct sdpa_key k = {.backward = backward,
                         .deterministic = deterministic,
                         .batch = p.batch,
                         .heads = p.groups * heads_per_group(a),
                         .kv_heads = p.groups,
                         .seq = a->q.dim[1],
                         .d = a->q.dim[3],
                         .d_v = a->v.dim[3],
                         .windowed = a->window > 0,
                         .q = stride_of(&a->q),
                         .k = stride_of(&a->k),
                         .v = stride_of(&a->v),
                         .o = stride_of(&a->o),
                         .lse_batch = a->lse.stride[0],
                         .lse_head = a->lse.stride[1]};
    if (backward) {
        k.dout = stride_of(&a->dout);
        k.dq = stride_of(&a->dq);
        k.dk = stride_of(&a->dk);
        k.dv = stride_of(&a->dv);
    }
    return k;
}

/* ---- running --------------------------------------------------------------------------------- */

/* 16-byte rows are promised to the library. */
static bool layout_fits(const struct tensor *t)
{
    bool fits = (uintptr_t)t->data % 16 == 0 && t->dim[3] % 8 == 0;
    for (int i = 0; i < 3; i++)
        fits = fits && t->stride[i] % 8 == 0;
    return fits;
}

static bool call_fits(const struct dnn_attention *a, bool backward)
{
    bool fits = a->q.dtype == DT_BF16 && a->lse.dtype == DT_F32 && (uintptr_t)a->lse.data % 16 == 0 &&
                layout_fits(&a->q) && layout_fits(&a->k) && layout_fits(&a->v) && layout_fits(&a->o);
    return fits &&
           (!backward || (layout_fits(&a->dout) && layout_fits(&a->dq) && layout_fits(&a->dk) && layout_fits(&a->dv)));
}

/* Addresses for one execution, by tensor name. */
enum { MAX_BOUND = 16 };
struct binding {
    int64_t n, uid[MAX_BOUND];
    void *at[MAX_BOUND];
};

static void bind(struct binding *b, enum sdpa_uid uid, const void *at)
{
    b->uid[b->n] = uid;
    memcpy(&b->at[b->n++], &at, sizeof at); /* the library takes no const pointers */
}

/* The scratch from its first aligned byte on. */
static struct dnn_attention aligned(const struct dnn_attention *a)
{
    struct dnn_attention out = *a;
    int64_t skip = (int64_t)(-(uintptr_t)a->work % SUM_ALIGN);
    out.work = (char *)a->work + skip;
    out.work_bytes = max_i64(0, a->work_bytes - skip);
    return out;
}

static void *offset(const struct tensor *t, int64_t batch, int64_t head)
{
    return (char *)t->data + (batch * t->stride[0] + head * t->stride[2]) * (int64_t)dtype_bytes(t->dtype);
}

static int execute(const struct dnn *d, const struct plan *p, const struct binding *b, void *workspace,
                   cudaStream_t stream, struct err *e)
{
    const struct dnn_lib *lib = &d->lib;
    cudnnBackendDescriptor_t pack = NULL;
    TRY(dnn_status(lib, lib->set_stream(d->handle, stream), "cudnnSetStream", e));
    TRY(dnn_status(lib, lib->new_descriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack),
                   "cudnnBackendCreateDescriptor", e));
    cudnnStatus_t code = lib->set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, b->n, b->uid);
    if (code == CUDNN_STATUS_SUCCESS)
        code = lib->set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, b->n, b->at);
    if (code == CUDNN_STATUS_SUCCESS)
        code = lib->set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    if (code == CUDNN_STATUS_SUCCESS)
        code = lib->finalize(pack);
    if (code == CUDNN_STATUS_SUCCESS)
        code = lib->execute(d->handle, p->plan, pack);
    int st = dnn_status(lib, code, "cudnnBackendExecute", e);
    lib->free_descriptor(pack);
    return st;
}

static const float one_value = 1.0f, neg_inf_value = -INFINITY;

static void bind_inputs(struct binding *b, const struct dnn_attention *a, int64_t batch, int64_t head, int64_t group)
{
    bind(b, UID_Q, offset(&a->q, batch, head));
    bind(b, UID_K, offset(&a->k, batch, group));
    bind(b, UID_V, offset(&a->v, batch, group));
    bind(b, UID_O, offset(&a->o, batch, head));
    bind(b, UID_LSE, (float *)a->lse.data + batch * a->lse.stride[0] + head * a->lse.stride[1]);
    bind(b, UID_SCALE, &a->scale);
    bind(b, UID_NEG_INF, &neg_inf_value);
    if (a->window > 0)
        bind(b, UID_WINDOW, &a->window);
}

int dnn_attention_fwd(struct lane *l, const struct dnn_attention *call, bool *done)
{
    struct dnn *d = cuda_of(l)->dnn;
    struct plan *p;
    *done = false;
    if (d == NULL || !call_fits(call, false))
        return ST_OK;
    const struct dnn_attention shifted = aligned(call), *a = &shifted;
    struct sdpa_key key = key_of(a, whole_call(a), false, false);
    TRY(find_plan(d, &key, &p, l->err));
    if (p->refused)
        return ST_OK;
    if (p->workspace > a->work_bytes)
        return err_set(l->err, ST_INTERNAL, "attention_fwd: cuDNN asks for %lld bytes of scratch, planned were %lld",
                       (long long)p->workspace, (long long)a->work_bytes);
    struct binding b = {0};
    bind_inputs(&b, a, 0, 0, 0);
    *done = true;
    return execute(d, p, &b, a->work, cuda_stream(l), l->err);
}

/* One piece, starting at this batch and kv head; scratch holds piece_bytes. */
static int run_piece(const struct dnn *d, const struct plan *p, const struct dnn_attention *a, struct piece size,
                     int64_t batch, int64_t group, char *scratch, cudaStream_t stream, struct err *e)
{
    bool deterministic = p->key.deterministic != 0;
    int64_t head = group * heads_per_group(a);
    struct binding b = {0};
    bind_inputs(&b, a, batch, head, group);
    bind(&b, UID_DO, offset(&a->dout, batch, head));
    bind(&b, UID_DQ, offset(&a->dq, batch, head));
    bind(&b, UID_DK, offset(&a->dk, batch, group));
    bind(&b, UID_DV, offset(&a->dv, batch, group));
    bind(&b, UID_ONE, &one_value);
    bind(&b, UID_ROWSUM, scratch);
    scratch += rowsum_bytes(a, size);
    if (!deterministic)
        bind(&b, UID_DQ_SUM, scratch);
    scratch += dq_sum_bytes(a, size, deterministic);
    return execute(d, p, &b, scratch, stream, e);
}

/* How a backward call is cut: the plan of a piece, and how many pieces run side by side. */
struct cut {
    struct piece size;
    struct plan *plan;
    int64_t streams, slot;
};

static int64_t real_bytes(const struct dnn_attention *a, const struct cut *c, bool deterministic)
{
    return rowsum_bytes(a, c->size) + dq_sum_bytes(a, c->size, deterministic) + c->plan->workspace;
}

/* The largest piece whose plan really fits the scratch at hand; no plan: none does. */
static int cut_call(struct dnn *d, const struct dnn_attention *a, bool deterministic, struct cut *c, struct err *e)
{
    bool whole = piece_bytes(a, whole_call(a), deterministic) <= a->work_bytes;
    for (c->streams = whole || !deterministic ? 1 : STREAMS;; c->streams--) {
        c->slot = a->work_bytes / c->streams / SUM_ALIGN * SUM_ALIGN;
        c->size = largest_piece(a, deterministic, c->slot);
        if (c->streams == 1 || piece_bytes(a, c->size, deterministic) <= c->slot)
            break; /* little scratch is better used by one piece at a time */
    }
    for (;;) {
        struct sdpa_key key = key_of(a, c->size, true, deterministic);
        TRY(find_plan(d, &key, &c->plan, e));
        if (c->plan->refused || real_bytes(a, c, deterministic) <= c->slot)
            return ST_OK;
        struct piece next = smaller_piece(a, c->size);
        if (next.groups == 0) { /* not even one head */
            c->plan = NULL;
            return ST_OK;
        }
        c->size = next;
    }
}

static int run_pieces(const struct dnn *d, const struct dnn_attention *a, const struct cut *c,
                      const cudaStream_t *stream, struct err *e)
{
    int64_t at = 0;
    for (int64_t b = 0; b < a->q.dim[0]; b += c->size.batch)
        for (int64_t g = 0; g < a->k.dim[2]; g += c->size.groups, at++) {
            int64_t s = at % c->streams;
            TRY(run_piece(d, c->plan, a, c->size, b, g, (char *)a->work + s * c->slot, stream[s], e));
        }
    return ST_OK;
}

int dnn_attention_bwd(struct lane *l, const struct dnn_attention *call, bool *done)
{
    struct dnn *d = cuda_of(l)->dnn;
    struct cut c = {0};
    *done = false;
    if (d == NULL || !call_fits(call, true))
        return ST_OK;
    const struct dnn_attention shifted = aligned(call), *a = &shifted;
    TRY(cut_call(d, a, !cuda_of(l)->want.fast, &c, l->err));
    bool cut = c.size.batch != a->q.dim[0] || c.size.groups != a->k.dim[2];
    /* pieces of odd length would begin at unaligned statistics */
    if (c.plan == NULL || c.plan->refused || (cut && a->q.dim[1] % 4 != 0))
        return ST_OK;
    *done = true;
    cudaStream_t stream[STREAMS] = {cuda_stream(l)};
    for (int64_t i = 1; i < c.streams; i++) {
        stream[i] = d->side[i - 1];
        if (i == 1)
            TRY(cuda_status(l->err, (int)cudaEventRecord(d->fork, stream[0]), "cudaEventRecord"));
        TRY(cuda_status(l->err, (int)cudaStreamWaitEvent(stream[i], d->fork, 0), "cudaStreamWaitEvent"));
    }
    TRY(run_pieces(d, a, &c, stream, l->err));
    for (int64_t i = 1; i < c.streams; i++) {
        TRY(cuda_status(l->err, (int)cudaEventRecord(d->join[i - 1], stream[i]), "cudaEventRecord"));
        TRY(cuda_status(l->err, (int)cudaStreamWaitEvent(stream[0], d->join[i - 1], 0), "cudaStreamWaitEvent"));
    }
    return ST_OK;
}

#else

int dnn_open(struct cuda_dev *c, struct err *e)
{
    (void)e;
    c->dnn = NULL;
    return ST_OK;
}

void dnn_close(struct cuda_dev *c) { (void)c; }

int dnn_attention_fwd(struct lane *l, const struct dnn_attention *a, bool *done)
{
    (void)l;
    (void)a;
    *done = false;
    return ST_OK;
}

int dnn_attention_bwd(struct lane *l, const struct dnn_attention *a, bool *done)
{
    return dnn_attention_fwd(l, a, done);
}

#endif
