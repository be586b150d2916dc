/* Times of the mHC ops on a GPU, bf16 and 4 streams, on random data.
 *
 *   bench_mhc [ROWS C]...      a table beside a copy measured in the same run; default: 16384 2048, 8192 4096
 *   bench_mhc serve            asked for line by line, so that a script can alternate with other programs
 *                              (tools/speed_mhc_gpu.py):
 *     shape ROWS C             random data of that shape; answers "ok GIB"
 *     run OP MS                single calls for about so many milliseconds, each behind a write of 256 MB, so that the
 *                              cache has nothing of the op's data:
 *                              "US CALLS BYTES", the median
 *     row OP MS                the same for calls one after the other, on two sets of data in turns where a shape is
 *                              small: the mean
 *     quit
 *
 * OP: a row of the table `ops` below. Bytes are what an op must move at least: each tensor read or written once.
 * The boundary is timed as it is chosen. Backward leaves products of the stream
 * for the parameters' gradients: a training step runs boundary_bwd and then boundary_dw, together boundary_back; _bare
 * are those two without products.
 *
 * Needs a GPU; not part of check-gpu. */
#include "bench.cuh"

enum { N = 4, LOGITS = 24, FLUSH = 256 << 20, MOST_CALLS = 200, SETS = 2 };

struct bench {
    struct dev dev;
    struct lane lane;
    struct err err;
    uint64_t seed;
    int64_t taken;
    void *flush;
    void *held[512];
    int held_count;
};
struct data { /* of a shape */
    struct tensor x, y, dx, dy, f, df, h, dh, bias, dbias, gain, dgain, w, dw, products, p, rho, drho, beta, dbeta,
        a[3], da[3];
    struct tensor pre, post, res, dpre, dpost, dres, logits, dlogits, dz, coef_in, coef, dcoef, dcoef_in, stat;
    struct mhc_rebuild_args rebuild;
    struct mhc_rule rule;
    int64_t rows, d;
};

static void *room(struct bench *b, int64_t bytes)
{
    void *p = NULL;
    CHECK(cudaMalloc(&p, (size_t)bytes + 256));
    b->taken += bytes;
    if (b->held_count == countof(b->held)) {
        printf("not ok too many tensors\n");
        exit(1);
    }
    return b->held[b->held_count++] = p;
}
static void give_back(struct bench *b, int but)
{
    while (b->held_count > but)
        CHECK(cudaFree(b->held[--b->held_count]));
}
static struct tensor make(struct bench *b, enum dtype t, int64_t rows, int64_t cols, double scale, double mean)
{
    int64_t n = rows * cols;
    void *p = room(b, n * (int64_t)dtype_bytes(t));
    if (t == DT_BF16)
        fill<bf16><<<1024, 256>>>((bf16 *)p, n, (float)scale, (float)mean, ++b->seed);
    else
        fill<float><<<1024, 256>>>((float *)p, n, (float)scale, (float)mean, ++b->seed);
    CHECK(cudaGetLastError());
    return tensor_2d(p, t, rows, cols);
}
static struct tensor vec(struct bench *b, int64_t n, double scale, double mean)
{
    return tensor_1d(make(b, DT_F32, 1, n, scale, mean).data, DT_F32, n);
}
static struct tensor work_of(struct bench *b, int64_t bytes) { return tensor_1d(room(b, bytes), DT_U8, bytes); }

static void data_open(struct bench *b, struct data *s, int64_t rows, int64_t d)
{
    int64_t k = N * d;
    *s = {};
    s->rows = rows, s->d = d, s->rule.streams = N, s->rule.iterations = 20;
    s->x = make(b, DT_BF16, rows, k, 1, 0), s->y = make(b, DT_BF16, rows, k, 1, 0),
    s->dx = make(b, DT_BF16, rows, k, 1, 0), s->dy = make(b, DT_BF16, rows, k, 1, 0);
    s->f = make(b, DT_BF16, rows, d, 1, 0), s->df = make(b, DT_BF16, rows, d, 1, 0),
    s->h = make(b, DT_BF16, rows, d, 1, 0), s->dh = make(b, DT_BF16, rows, d, 1, 0);
    s->bias = vec(b, d, 0.1, 0), s->dbias = vec(b, d, 0, 0), s->gain = vec(b, d, 0.1, 1), s->dgain = vec(b, d, 0, 0);
    s->w = make(b, DT_F32, LOGITS, k, 0.01, 0), s->dw = make(b, DT_F32, LOGITS, k, 0, 0),
    s->products = make(b, DT_F32, LOGITS + 1, k, 1, 0);
    s->beta = vec(b, LOGITS, 0.1, 0), s->dbeta = vec(b, LOGITS, 0, 0);
    for (int i = 0; i < 3; i++)
        s->a[i] = vec(b, 1, 0, 0.01), s->da[i] = vec(b, 1, 0, 0);
    s->p = make(b, DT_F32, rows, LOGITS, 1, 0), s->rho = make(b, DT_F32, rows, 1, 0.1, 1),
    s->drho = make(b, DT_F32, rows, 1, 0.1, 1), s->dz = make(b, DT_F32, rows, LOGITS, 1, 0);
    s->pre = make(b, DT_F32, rows, N, 0.1, 0.5), s->post = make(b, DT_F32, rows, N, 0.1, 1),
    s->res = make(b, DT_F32, rows, N * N, 0.05, 0.25);
    s->dpre = make(b, DT_F32, rows, N, 1, 0), s->dpost = make(b, DT_F32, rows, N, 1, 0),
    s->dres = make(b, DT_F32, rows, N * N, 1, 0);
    s->logits = make(b, DT_F32, rows, N * N, 1, 0), s->dlogits = make(b, DT_F32, rows, N * N, 1, 0);
    s->coef_in = make(b, DT_F32, rows, LOGITS, 0.05, 0.25), s->coef = make(b, DT_F32, rows, LOGITS, 0.05, 0.25),
    s->stat = make(b, DT_F32, rows, LOGITS + 2, 0.1, 1);
    s->dcoef = make(b, DT_F32, rows, LOGITS, 1, 0), s->dcoef_in = make(b, DT_F32, rows, LOGITS, 1, 0);
    CHECK(cudaDeviceSynchronize());
}

/* ---- ops: everything is set up before the first call is timed -------------------------------- */

struct job {
    int (*call)(struct bench *b, struct job *j);
    union {
        struct mhc_project_fwd_args project_fwd;
        struct mhc_project_bwd_args project_bwd;
        struct mhc_gates_fwd_args gates_fwd;
        struct mhc_gates_bwd_args gates_bwd;
        struct mhc_sinkhorn_fwd_args sinkhorn_fwd;
        struct mhc_sinkhorn_bwd_args sinkhorn_bwd;
        struct mhc_aggregate_fwd_args aggregate_fwd;
        struct mhc_aggregate_bwd_args aggregate_bwd;
        struct mhc_combine_fwd_args combine_fwd;
        struct mhc_combine_bwd_args combine_bwd;
        struct mhc_boundary_fwd_args boundary_fwd;
        struct mhc_boundary_bwd_args boundary_bwd;
        struct mhc_rebuild_args rebuild;
        struct tensor copy[2];
    } u;
    struct mhc_boundary_dw_args dw;
    cudaGraphExec_t graph;
};
#define CALL(op)                                                                                                       \
    static int call_##op(struct bench *b, struct job *j) { return mhc_##op##_cuda(&b->lane, &j->u.op); }
CALL(project_fwd)
CALL(project_bwd)
CALL(gates_fwd)
CALL(gates_bwd)
CALL(sinkhorn_fwd)
CALL(sinkhorn_bwd)
CALL(aggregate_fwd)
CALL(aggregate_bwd)
CALL(combine_fwd)
CALL(combine_bwd)
CALL(boundary_fwd)
CALL(boundary_bwd)
CALL(rebuild)
static int call_boundary_dw(struct bench *b, struct job *j) { return mhc_boundary_dw_cuda(&b->lane, &j->dw); }
static int call_back(struct bench *b, struct job *j)
{
    TRY(mhc_boundary_bwd_cuda(&b->lane, &j->u.boundary_bwd));
    return mhc_boundary_dw_cuda(&b->lane, &j->dw);
}
static int call_graph(struct bench *b, struct job *j)
{
    return cudaGraphLaunch(j->graph, stream_of(&b->lane)) == cudaSuccess ? ST_OK : ST_INTERNAL;
}
static int call_copy(struct bench *b, struct job *j)
{
    struct tensor *to = &j->u.copy[0], *from = &j->u.copy[1];
    return cudaMemcpyAsync(to->data, from->data, (size_t)tensor_bytes(to), cudaMemcpyDeviceToDevice,
                           stream_of(&b->lane)) == cudaSuccess
               ? ST_OK
               : ST_INTERNAL;
}
static int call_combines(struct bench *b, struct job *j)
{
    const struct mhc_rebuild_args *r = &j->u.rebuild;
    struct mhc_combine_fwd_args c = {};
    c.rule = r->rule;
    c.x = r->x;
    for (int i = 0; i < r->layers; i++) {
        const struct mhc_rebuild_layer *l = &r->layer[i];
        c.f = l->f, c.y = l->y, c.post = tensor_cols(&l->coef, N, N), c.res = tensor_cols(&l->coef, 2 * N, N * N);
        TRY(mhc_combine_fwd_cuda(&b->lane, &c));
        c.x = c.y;
    }
    return ST_OK;
}

static void open_project_fwd(struct bench *b, struct data *s, struct job *j)
{
    j->u.project_fwd = {s->x, s->w, s->p, s->rho};
}
static void open_project_bwd(struct bench *b, struct data *s, struct job *j)
{
    struct mhc_project_bwd_args a = {};
    a.dp = s->p, a.drho = s->drho, a.x = s->x, a.w = s->w, a.rho = s->rho, a.dx = s->dx, a.dw = s->dw;
    a.work = work_of(b, mhc_project_bwd_work_cuda(&a));
    j->u.project_bwd = a;
}
static void open_gates_fwd(struct bench *b, struct data *s, struct job *j)
{
    j->u.gates_fwd = {s->p, s->rho, s->a[0], s->a[1], s->a[2], s->beta, s->pre, s->post, s->logits, s->rule};
}
static void open_gates_bwd(struct bench *b, struct data *s, struct job *j)
{
    struct mhc_gates_bwd_args a = {};
    a.dpre = s->dpre, a.dpost = s->dpost, a.dlogits = s->dlogits, a.p = s->p, a.rho = s->rho, a.a_pre = s->a[0],
    a.a_post = s->a[1], a.a_res = s->a[2];
    a.beta = s->beta, a.dp = s->dcoef, a.drho = s->drho, a.da_pre = s->da[0], a.da_post = s->da[1], a.da_res = s->da[2],
    a.dbeta = s->dbeta, a.rule = s->rule;
    j->u.gates_bwd = a;
}
static void open_sinkhorn_fwd(struct bench *b, struct data *s, struct job *j)
{
    j->u.sinkhorn_fwd = {s->logits, s->res, s->rule};
}
static void open_sinkhorn_bwd(struct bench *b, struct data *s, struct job *j)
{
    j->u.sinkhorn_bwd = {s->dres, s->logits, s->dlogits, s->rule};
}
static void open_aggregate_fwd(struct bench *b, struct data *s, struct job *j)
{
    j->u.aggregate_fwd = {s->x, s->pre, s->h};
}
static void open_aggregate_bwd(struct bench *b, struct data *s, struct job *j)
{
    j->u.aggregate_bwd = {s->dh, s->x, s->pre, s->dx, false, s->dpre};
}
static void open_combine_fwd(struct bench *b, struct data *s, struct job *j)
{
    j->u.combine_fwd = {s->x, s->f, {}, s->post, s->res, s->y, s->rule, {}};
}
static void open_combine_bias_fwd(struct bench *b, struct data *s, struct job *j)
{
    j->u.combine_fwd = {s->x, s->f, s->bias, s->post, s->res, s->y, s->rule, {}};
}
static void open_back_of_combine(struct bench *b, struct data *s, struct job *j, struct tensor bias,
                                 struct tensor dbias)
{
    struct mhc_combine_bwd_args a = {};
    a.dy = s->dy, a.x = s->x, a.f = s->f, a.bias = bias, a.post = s->post, a.res = s->res, a.dx = s->dx, a.df = s->df,
    a.dpost = s->dpost, a.dres = s->dres;
    a.dbias = dbias, a.rule = s->rule;
    a.work = work_of(b, mhc_combine_bwd_work_cuda(&a));
    j->u.combine_bwd = a;
}
static void open_combine_bwd(struct bench *b, struct data *s, struct job *j) { open_back_of_combine(b, s, j, {}, {}); }
static void open_combine_bias_bwd(struct bench *b, struct data *s, struct job *j)
{
    open_back_of_combine(b, s, j, s->bias, s->dbias);
}

static void open_boundary_fwd(struct bench *b, struct data *s, struct job *j)
{
    struct mhc_boundary_fwd_args f = {};
    f.x = s->x, f.f = s->f, f.y = s->y, f.h = s->h, f.coef_in = s->coef_in, f.coef = s->coef, f.stat = s->stat,
    f.w = s->w, f.beta = s->beta, f.gain = s->gain;
    f.a_pre = s->a[0], f.a_post = s->a[1], f.a_res = s->a[2], f.rule = s->rule, f.eps = 1e-5;
    f.work = work_of(b, mhc_boundary_fwd_work_cuda(&f));
    j->u.boundary_fwd = f;
}
static void open_norm_again(struct bench *b, struct data *s, struct job *j)
{
    open_boundary_fwd(b, s, j);
    struct mhc_boundary_fwd_args *f = &j->u.boundary_fwd;
    f->reuse = true, f->x = s->y, f->f = {}, f->coef_in = {}, f->y = {};
}
static void open_dw(struct bench *b, struct data *s, struct job *j, struct tensor products)
{
    struct mhc_boundary_dw_args w = {};
    w.dz = s->dz, w.stat = s->stat, w.y = s->y, w.dw = s->dw, w.dbeta = s->dbeta, w.rule = s->rule,
    w.products = products;
    w.a_pre = s->a[0], w.a_post = s->a[1], w.a_res = s->a[2], w.da_pre = s->da[0], w.da_post = s->da[1],
    w.da_res = s->da[2];
    w.work = work_of(b, mhc_boundary_dw_work_cuda(&w));
    j->dw = w;
}
static void open_back(struct bench *b, struct data *s, struct job *j, struct tensor products)
{
    struct mhc_boundary_bwd_args w = {};
    w.dh = s->dh, w.dy = s->dy, w.dcoef = s->dcoef, w.y = s->y, w.stat = s->stat, w.coef = s->coef, w.gain = s->gain,
    w.w = s->w, w.beta = s->beta, w.x = s->x, w.f = s->f;
    w.a_pre = s->a[0], w.a_post = s->a[1], w.a_res = s->a[2], w.coef_in = s->coef_in, w.dx = s->dx, w.df = s->df,
    w.dcoef_in = s->dcoef_in, w.dz = s->dz, w.dgain = s->dgain;
    w.rule = s->rule, w.products = products;
    w.work = work_of(b, mhc_boundary_bwd_work_cuda(&w));
    j->u.boundary_bwd = w;
    open_dw(b, s, j, products);
}
static void open_boundary_back(struct bench *b, struct data *s, struct job *j) { open_back(b, s, j, s->products); }
static void open_boundary_back_bare(struct bench *b, struct data *s, struct job *j) { open_back(b, s, j, {}); }
static void open_boundary_graph(struct bench *b, struct data *s, struct job *j)
{
    cudaStream_t stream = stream_of(&b->lane);
    cudaGraph_t graph = NULL;
    open_back(b, s, j, s->products);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    int st = call_back(b, j);
    CHECK(cudaStreamEndCapture(stream, &graph));
    if (st != ST_OK) {
        printf("not ok capture: %s\n", b->err.msg);
        exit(1);
    }
    CHECK(cudaGraphInstantiate(&j->graph, graph, 0));
    CHECK(cudaGraphDestroy(graph));
}
static void open_rebuild(struct bench *b, struct data *s, struct job *j)
{
    struct mhc_rebuild_args *r = &s->rebuild;
    if (r->layers == 0) { /* kept for as long as the shape */
        r->x = s->x, r->rule = s->rule;
        while (r->layers < MHC_REBUILD_LAYERS) {
            struct mhc_rebuild_layer *l = &r->layer[r->layers++];
            l->f = make(b, DT_BF16, s->rows, s->d, 1, 0), l->coef = make(b, DT_F32, s->rows, LOGITS, 0.05, 0.25),
            l->y = make(b, DT_BF16, s->rows, N * s->d, 1, 0);
        }
    }
    j->u.rebuild = *r;
}
static void open_copy(struct bench *b, struct data *s, struct job *j) { j->u.copy[0] = s->y, j->u.copy[1] = s->x; }

static const struct op {
    const char *name;
    void (*open)(struct bench *b, struct data *s, struct job *j);
    int (*call)(struct bench *b, struct job *j);
    double streams, floats, weights; /* bytes it must move, in units of ROWS x C bf16, ROWS floats, the size of w */
} ops[] = {
    {"boundary_fwd", open_boundary_fwd, call_boundary_fwd, 10, 74, 1},
    {"norm_again", open_norm_again, call_boundary_fwd, 5, 5, 0},
    {"boundary_back", open_boundary_back, call_back, 15, 146, 2},
    {"boundary_back_graph", open_boundary_graph, call_graph, 15, 146, 2},
    {"boundary_bwd", open_boundary_back, call_boundary_bwd, 15, 146, 2},
    {"boundary_bwd_bare", open_boundary_back_bare, call_boundary_bwd, 15, 146, 1},
    {"boundary_dw", open_boundary_back, call_boundary_dw, 0, 48, 2},
    {"boundary_dw_bare", open_boundary_back_bare, call_boundary_dw, 4, 50, 1},
    {"project_fwd", open_project_fwd, call_project_fwd, 4, 25, 1},
    {"project_bwd", open_project_bwd, call_project_bwd, 8, 26, 2},
    {"gates_fwd", open_gates_fwd, call_gates_fwd, 0, 49, 0},
    {"gates_bwd", open_gates_bwd, call_gates_bwd, 0, 74, 0},
    {"sinkhorn_fwd", open_sinkhorn_fwd, call_sinkhorn_fwd, 0, 32, 0},
    {"sinkhorn_bwd", open_sinkhorn_bwd, call_sinkhorn_bwd, 0, 48, 0},
    {"aggregate_fwd", open_aggregate_fwd, call_aggregate_fwd, 5, 4, 0},
    {"aggregate_bwd", open_aggregate_bwd, call_aggregate_bwd, 9, 8, 0},
    {"combine_fwd", open_combine_fwd, call_combine_fwd, 9, 20, 0},
    {"combine_bwd", open_combine_bwd, call_combine_bwd, 14, 40, 0},
    {"combine_bias_fwd", open_combine_bias_fwd, call_combine_fwd, 9, 20, 0},
    {"combine_bias_bwd", open_combine_bias_bwd, call_combine_bwd, 14, 40, 0},
    /* seven layers in one launch */
    {"rebuild", open_rebuild, call_rebuild, 4 + 5 * MHC_REBUILD_LAYERS, 20 * MHC_REBUILD_LAYERS, 0},
    {"combines", open_rebuild, call_combines, 9 * MHC_REBUILD_LAYERS, 20 * MHC_REBUILD_LAYERS, 0}, /* and in seven */
    /* ROWS x 4 C */
    {"copy", open_copy, call_copy, 8, 0, 0},
};
static const struct op *op_named(const char *name)
{
    for (int i = 0; i < countof(ops); i++)
        if (strcmp(ops[i].name, name) == 0)
            return &ops[i];
    return NULL;
}
static bool op_keeps(const struct op *o) { return o->open == open_rebuild; } /* what it made stays for others */
static double op_bytes(const struct op *o, const struct data *s)
{
    double rows = (double)s->rows, d = (double)s->d;
    return 2 * o->streams * rows * d + 4 * o->floats * rows + 4 * o->weights * LOGITS * N * d;
}
static bool op_possible(const struct op *o, const struct data *s) { return !op_keeps(o) || s->d <= 4096; }

/* ---- clocks ---------------------------------------------------------------------------------- */

struct clock {
    cudaEvent_t from[MOST_CALLS], to[MOST_CALLS];
};
static void call_one(struct bench *b, struct job *j)
{
    if (j->call(b, j) != ST_OK) {
        printf("not ok %s\n", b->err.msg);
        exit(1);
    }
}
static void cold_call(struct bench *b, struct job *j, struct clock *c, int i)
{
    cudaStream_t stream = stream_of(&b->lane);
    CHECK(cudaMemsetAsync(b->flush, 0, FLUSH, stream));
    CHECK(cudaEventRecord(c->from[i], stream));
    call_one(b, j);
    CHECK(cudaEventRecord(c->to[i], stream));
}
static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}
static int calls_in(double ms, float one) { return (int)min(max(ms / (one + 0.1f), 5.0), (double)MOST_CALLS); }

/* The median of single calls, microseconds. */
static double time_cold(struct bench *b, struct job *j, struct clock *c, double ms, int *calls)
{
    float took[MOST_CALLS];
    for (int i = 0; i < 3; i++)
        cold_call(b, j, c, i);
    CHECK(cudaEventSynchronize(c->to[2]));
    CHECK(cudaEventElapsedTime(took, c->from[2], c->to[2]));
    *calls = calls_in(ms, took[0]);
    for (int i = 0; i < *calls; i++)
        cold_call(b, j, c, i);
    CHECK(cudaEventSynchronize(c->to[*calls - 1]));
    for (int i = 0; i < *calls; i++)
        CHECK(cudaEventElapsedTime(&took[i], c->from[i], c->to[i]));
    qsort(took, (size_t)*calls, sizeof took[0], by_size);
    return 1e3 * took[*calls / 2];
}
/* The mean of calls one after the other. */
static double time_row(struct bench *b, struct job *j, int sets, struct clock *c, double ms, int *calls)
{
    cudaStream_t stream = stream_of(&b->lane);
    float took = 0;
    for (int pass = 0, n = 4; pass < 2; pass++, n = *calls) {
        CHECK(cudaEventRecord(c->from[0], stream));
        for (int i = 0; i < n; i++)
            call_one(b, &j[i % sets]);
        CHECK(cudaEventRecord(c->to[0], stream));
        CHECK(cudaEventSynchronize(c->to[0]));
        CHECK(cudaEventElapsedTime(&took, c->from[0], c->to[0]));
        took /= (float)n;
        if (pass == 0)
            *calls = calls_in(ms, took) / 2 * 2;
    }
    return 1e3 * took;
}

struct shape {
    struct data data[SETS];
    int sets; /* two where a set does not fill the cache several times over */
};
static void shape_open(struct bench *b, struct shape *s, int64_t rows, int64_t d)
{
    give_back(b, 0);
    b->taken = 0;
    s->sets = rows * d <= (int64_t)1 << 26 ? SETS : 1;
    for (int i = 0; i < s->sets; i++)
        data_open(b, &s->data[i], rows, d);
}
/* Microseconds of an op, its calls in a row or cold. */
static double measure(struct bench *b, struct shape *s, const struct op *o, struct clock *c, bool row, double ms,
                      int *calls)
{
    struct job jobs[SETS] = {};
    int sets = row && !op_keeps(o) ? s->sets : 1, held = b->held_count;
    for (int i = 0; i < sets; i++) {
        jobs[i].call = o->call;
        o->open(b, &s->data[i], &jobs[i]);
    }
    double us = row ? time_row(b, jobs, sets, c, ms, calls) : time_cold(b, jobs, c, ms, calls);
    for (int i = 0; i < sets; i++)
        if (jobs[i].graph != NULL)
            CHECK(cudaGraphExecDestroy(jobs[i].graph));
    if (!op_keeps(o))
        give_back(b, held);
    return us;
}

/* ---- the two ways to ask --------------------------------------------------------------------- */

static int serve(struct bench *b, struct clock *c)
{
    static struct shape s;
    char line[256], op[32], what[8];
    long long rows, d;
    double ms;
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (sscanf(line, "shape %lld %lld", &rows, &d) == 2 && rows > 0 && d > 0) {
            shape_open(b, &s, rows, d);
            printf("ok %.1f\n", (double)b->taken / (1 << 30));
        } else if (sscanf(line, "%7s %31s %lf", what, op, &ms) == 3 && s.sets > 0) {
            const struct op *o = op_named(op);
            int calls = 0;
            if (o == NULL || !op_possible(o, &s.data[0])) {
                printf("not ok no op '%s' at this shape\n", op);
                return 1;
            }
            double us = measure(b, &s, o, c, strcmp(what, "row") == 0, ms, &calls);
            printf("%.2f %d %.0f\n", us, calls, op_bytes(o, &s.data[0]));
        } else {
            return strncmp(line, "quit", 4) != 0;
        }
        fflush(stdout);
    }
    return 0;
}

static void table(struct bench *b, struct clock *c, int64_t rows, int64_t d, double copy)
{
    static struct shape s;
    int calls = 0;
    shape_open(b, &s, rows, d);
    for (int i = 0; i < countof(ops); i++) {
        const struct op *o = &ops[i];
        if (!op_possible(o, &s.data[0]))
            continue;
        double us = measure(b, &s, o, c, true, 20, &calls), cold = measure(b, &s, o, c, false, 20, &calls),
               bytes = op_bytes(o, &s.data[0]);
        printf("%-20s %6lld x %-5lld %9.1f us (cold %8.1f) %8.1f MB %6.2f TB/s %5.1f %% of copy\n", o->name,
               (long long)rows, (long long)d, us, cold, bytes / 1e6, bytes / us / 1e6, 100 * bytes / us / copy);
        fflush(stdout);
    }
}
/* Bytes a microsecond, read and written. */
static double copy_rate(struct bench *b, struct clock *c)
{
    struct shape s = {};
    int calls = 0;
    s.sets = 1, s.data[0].rows = 1 << 18, s.data[0].d = 1 << 10; /* 2 GiB */
    s.data[0].x = make(b, DT_BF16, s.data[0].rows, N * s.data[0].d, 1, 0),
    s.data[0].y = make(b, DT_BF16, s.data[0].rows, N * s.data[0].d, 1, 0);
    const struct op *o = op_named("copy");
    double rate = op_bytes(o, &s.data[0]) / measure(b, &s, o, c, true, 20, &calls);
    give_back(b, 0);
    return rate;
}

int main(int argc, char **argv)
{
    static struct bench b;
    static struct clock c;
    struct dev_gpu want = {};
    if (!open_gpu(&b.dev, &b.lane, &b.err, &want))
        return 1;
    CHECK(cudaMalloc(&b.flush, FLUSH));
    for (int i = 0; i < MOST_CALLS; i++) {
        CHECK(cudaEventCreate(&c.from[i]));
        CHECK(cudaEventCreate(&c.to[i]));
    }
    if (argc == 2 && strcmp(argv[1], "serve") == 0)
        return serve(&b, &c);
    double copy = copy_rate(&b, &c);
    printf("copy %.2f TB/s\n", copy / 1e6);
    if (argc < 3) {
        table(&b, &c, 16384, 2048, copy);
        table(&b, &c, 8192, 4096, copy);
    }
    for (int i = 1; i + 1 < argc; i += 2)
        table(&b, &c, atoll(argv[i]), atoll(argv[i + 1]), copy);
    return 0;
}
