/* Times of the mHC ops on a GPU, bf16 and 4 streams, asked for line by line, so that a script can alternate with other programs (tools/speed_mhc_gpu.py):
 *
 *   shape ROWS C     random data of that shape; answers "ok GIB"
 *   run OP MS        calls for about so many milliseconds, each behind a write of 256 MB, so that the cache has nothing of the op's data:
 *                    "US CALLS", the median
 *   quit
 *
 * OP: a primitive as ops.h names it without mhc_ (project_fwd ... sinkhorn_bwd; combine_bias_fwd and combine_bias_bwd with bias), boundary_fwd, boundary_bwd, boundary_dw,
 * each of the three with _ring or _single for those passes, the last two with _products (the backward pass leaves the product that dw needs), rebuild and combines (seven layers in one launch, and in seven), copy (ROWS x 4 C).
 *
 * Needs a GPU; not part of check-gpu. */
#include "bench.cuh"

enum { N = 4, LOGITS = 24, FLUSH = 256 << 20, MOST_CALLS = 200 };

struct bench {
    struct dev dev;
    struct lane lane;
    struct err err;
    uint64_t seed;
    int64_t taken;
    void *flush;
    void *held[256];
    int held_count;
};
struct data { /* of a shape */
    struct tensor x, y, dx, dy, f, df, h, dh, bias, dbias, gain, dgain, w, dw, products, p, rho, drho, beta, dbeta, a[3], da[3];
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
static struct tensor vec(struct bench *b, int64_t n, double scale, double mean) { return tensor_1d(make(b, DT_F32, 1, n, scale, mean).data, DT_F32, n); }
static struct tensor columns(struct tensor t, int64_t first, int64_t count)
{
    struct tensor v = tensor_2d((float *)t.data + first, DT_F32, t.dim[0], count);
    v.stride[0] = t.stride[0];
    return v;
}

static void data_open(struct bench *b, struct data *s, int64_t rows, int64_t d)
{
    int64_t k = N * d;
    *s = {};
    s->rows = rows, s->d = d, s->rule.streams = N, s->rule.iterations = 20;
    s->x = make(b, DT_BF16, rows, k, 1, 0), s->y = make(b, DT_BF16, rows, k, 1, 0), s->dx = make(b, DT_BF16, rows, k, 1, 0), s->dy = make(b, DT_BF16, rows, k, 1, 0);
    s->f = make(b, DT_BF16, rows, d, 1, 0), s->df = make(b, DT_BF16, rows, d, 1, 0), s->h = make(b, DT_BF16, rows, d, 1, 0), s->dh = make(b, DT_BF16, rows, d, 1, 0);
    s->bias = vec(b, d, 0.1, 0), s->dbias = vec(b, d, 0, 0), s->gain = vec(b, d, 0.1, 1), s->dgain = vec(b, d, 0, 0);
    s->w = make(b, DT_F32, LOGITS, k, 0.01, 0), s->dw = make(b, DT_F32, LOGITS, k, 0, 0), s->products = make(b, DT_F32, LOGITS, k, 1, 0), s->beta = vec(b, LOGITS, 0.1, 0), s->dbeta = vec(b, LOGITS, 0, 0);
    for (int i = 0; i < 3; i++)
        s->a[i] = vec(b, 1, 0, 0.01), s->da[i] = vec(b, 1, 0, 0);
    s->p = make(b, DT_F32, rows, LOGITS, 1, 0), s->rho = make(b, DT_F32, rows, 1, 0.1, 1), s->drho = make(b, DT_F32, rows, 1, 0.1, 1), s->dz = make(b, DT_F32, rows, LOGITS, 1, 0);
    s->pre = make(b, DT_F32, rows, N, 0.1, 0.5), s->post = make(b, DT_F32, rows, N, 0.1, 1), s->res = make(b, DT_F32, rows, N * N, 0.05, 0.25);
    s->dpre = make(b, DT_F32, rows, N, 1, 0), s->dpost = make(b, DT_F32, rows, N, 1, 0), s->dres = make(b, DT_F32, rows, N * N, 1, 0);
    s->logits = make(b, DT_F32, rows, N * N, 1, 0), s->dlogits = make(b, DT_F32, rows, N * N, 1, 0);
    s->coef_in = make(b, DT_F32, rows, LOGITS, 0.05, 0.25), s->coef = make(b, DT_F32, rows, LOGITS, 0.05, 0.25), s->stat = make(b, DT_F32, rows, LOGITS + 2, 0.1, 1);
    s->dcoef = make(b, DT_F32, rows, LOGITS, 1, 0), s->dcoef_in = make(b, DT_F32, rows, LOGITS, 1, 0);
    CHECK(cudaDeviceSynchronize());
}
static void data_close(struct bench *b)
{
    for (int i = 0; i < b->held_count; i++)
        CHECK(cudaFree(b->held[i]));
    b->held_count = 0;
    b->taken = 0;
}

/* ---- calls: everything is set up before the first is timed ------------------------------------------------------------------- */

struct job {
    int (*call)(struct bench *b, struct data *s, struct job *j);
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
        struct mhc_boundary_dw_args boundary_dw;
    } u;
};
#define CALL(op) \
    static int call_##op(struct bench *b, struct data *s, struct job *j) { return mhc_##op##_cuda(&b->lane, &j->u.op); }
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
CALL(boundary_dw)
static int call_copy(struct bench *b, struct data *s, struct job *j)
{
    cudaError_t e = cudaMemcpyAsync(s->y.data, s->x.data, (size_t)(s->rows * N * s->d * 2), cudaMemcpyDeviceToDevice, stream_of(&b->lane));
    return e == cudaSuccess ? ST_OK : ST_INTERNAL;
}
static int call_rebuild(struct bench *b, struct data *s, struct job *j) { return mhc_rebuild_cuda(&b->lane, &s->rebuild); }
static int call_combines(struct bench *b, struct data *s, struct job *j)
{
    struct mhc_combine_fwd_args c = {};
    c.rule = s->rule;
    c.x = s->rebuild.x;
    for (int i = 0; i < s->rebuild.layers; i++) {
        const struct mhc_rebuild_layer *l = &s->rebuild.layer[i];
        c.f = l->f, c.y = l->y, c.post = columns(l->coef, N, N), c.res = columns(l->coef, 2 * N, N * N);
        TRY(mhc_combine_fwd_cuda(&b->lane, &c));
        c.x = c.y;
    }
    return ST_OK;
}
static void open_rebuild(struct bench *b, struct data *s)
{
    struct mhc_rebuild_args *r = &s->rebuild;
    if (r->layers > 0)
        return;
    r->x = s->x, r->rule = s->rule;
    while (r->layers < MHC_REBUILD_LAYERS) {
        struct mhc_rebuild_layer *l = &r->layer[r->layers++];
        l->f = make(b, DT_BF16, s->rows, s->d, 1, 0), l->coef = make(b, DT_F32, s->rows, LOGITS, 0.05, 0.25), l->y = make(b, DT_BF16, s->rows, N * s->d, 1, 0);
    }
}
static struct tensor work_of(struct bench *b, int64_t bytes) { return tensor_1d(room(b, bytes), DT_U8, bytes); }

/* Primitives. */
static bool open_primitive(struct bench *b, struct data *s, const char *op, struct job *j)
{
    bool bias = strncmp(op, "combine_bias_", 13) == 0;
    if (strcmp(op, "project_fwd") == 0) {
        j->call = call_project_fwd;
        j->u.project_fwd = {s->x, s->w, s->p, s->rho};
    } else if (strcmp(op, "project_bwd") == 0) {
        j->call = call_project_bwd;
        j->u.project_bwd = {s->p, s->drho, s->x, s->w, s->rho, s->dx, s->dw, {}, false, false};
        j->u.project_bwd.work = work_of(b, mhc_project_bwd_work_cuda(&j->u.project_bwd));
    } else if (strcmp(op, "gates_fwd") == 0) {
        j->call = call_gates_fwd;
        j->u.gates_fwd = {s->p, s->rho, s->a[0], s->a[1], s->a[2], s->beta, s->pre, s->post, s->logits, s->rule};
    } else if (strcmp(op, "gates_bwd") == 0) {
        j->call = call_gates_bwd;
        j->u.gates_bwd = {s->dpre, s->dpost, s->dlogits, s->p, s->rho, s->a[0], s->a[1], s->a[2], s->beta, s->dcoef, s->drho, {}, s->da[0], s->da[1], s->da[2], s->dbeta, s->rule, false};
    } else if (strcmp(op, "sinkhorn_fwd") == 0) {
        j->call = call_sinkhorn_fwd;
        j->u.sinkhorn_fwd = {s->logits, s->res, s->rule};
    } else if (strcmp(op, "sinkhorn_bwd") == 0) {
        j->call = call_sinkhorn_bwd;
        j->u.sinkhorn_bwd = {s->dres, s->logits, s->dlogits, s->rule};
    } else if (strcmp(op, "aggregate_fwd") == 0) {
        j->call = call_aggregate_fwd;
        j->u.aggregate_fwd = {s->x, s->pre, s->h};
    } else if (strcmp(op, "aggregate_bwd") == 0) {
        j->call = call_aggregate_bwd;
        j->u.aggregate_bwd = {s->dh, s->x, s->pre, s->dx, s->dpre, false};
    } else if (strcmp(op, "combine_fwd") == 0 || strcmp(op, "combine_bias_fwd") == 0) {
        j->call = call_combine_fwd;
        j->u.combine_fwd = {s->x, s->f, bias ? s->bias : (struct tensor){}, s->post, s->res, s->y, s->rule, {}};
    } else if (strcmp(op, "combine_bwd") == 0 || strcmp(op, "combine_bias_bwd") == 0) {
        j->call = call_combine_bwd;
        j->u.combine_bwd = {s->dy, s->x, s->f, bias ? s->bias : (struct tensor){}, s->post, s->res, s->dx, s->df, s->dpost, s->dres, bias ? s->dbias : (struct tensor){}, {}, s->rule, {}, false};
        j->u.combine_bwd.work = work_of(b, mhc_combine_bwd_work_cuda(&j->u.combine_bwd));
    } else if (strcmp(op, "copy") == 0) {
        j->call = call_copy;
    } else if (strcmp(op, "rebuild") == 0 || strcmp(op, "combines") == 0) {
        j->call = op[0] == 'r' ? call_rebuild : call_combines;
        open_rebuild(b, s);
    }
    return j->call != NULL;
}

/* boundary_fwd, _bwd, _dw with _ring, _single or _products behind it. */
static bool open_boundary(struct bench *b, struct data *s, const char *op, struct job *j)
{
    struct mhc_rule rule = s->rule;
    const char *way = strrchr(op, '_');
    char name[32] = "";
    if (strncmp(op, "boundary_", 9) != 0)
        return false;
    rule.ring = strcmp(way, "_ring") == 0;
    rule.single_pass = strcmp(way, "_single") == 0;
    bool products = strcmp(way, "_products") == 0;
    snprintf(name, sizeof name, "%.*s", (int)(rule.ring || rule.single_pass || products ? way - op : (ptrdiff_t)strlen(op)), op);
    if (strcmp(name, "boundary_fwd") == 0) {
        struct mhc_boundary_fwd_args f = {};
        f.x = s->x, f.f = s->f, f.y = s->y, f.h = s->h, f.coef_in = s->coef_in, f.coef = s->coef, f.stat = s->stat, f.w = s->w, f.beta = s->beta, f.gain = s->gain;
        f.a_pre = s->a[0], f.a_post = s->a[1], f.a_res = s->a[2], f.rule = rule, f.eps = 1e-5;
        f.work = work_of(b, mhc_boundary_fwd_work_cuda(&f));
        j->call = call_boundary_fwd;
        j->u.boundary_fwd = f;
    } else if (strcmp(name, "boundary_bwd") == 0) {
        struct mhc_boundary_bwd_args w = {};
        w.dh = s->dh, w.dy = s->dy, w.dcoef = s->dcoef, w.y = s->y, w.stat = s->stat, w.coef = s->coef, w.gain = s->gain, w.w = s->w, w.beta = s->beta, w.x = s->x, w.f = s->f;
        w.a_pre = s->a[0], w.a_post = s->a[1], w.a_res = s->a[2], w.coef_in = s->coef_in, w.dx = s->dx, w.df = s->df, w.dcoef_in = s->dcoef_in, w.dz = s->dz, w.dgain = s->dgain;
        w.rule = rule;
        if (products)
            w.products = s->products;
        w.work = work_of(b, mhc_boundary_bwd_work_cuda(&w));
        j->call = call_boundary_bwd;
        j->u.boundary_bwd = w;
    } else if (strcmp(name, "boundary_dw") == 0) {
        struct mhc_boundary_dw_args w = {};
        w.dz = s->dz, w.stat = s->stat, w.y = s->y, w.dw = s->dw, w.dbeta = s->dbeta, w.rule = rule;
        if (products)
            w.products = s->products;
        w.a_pre = s->a[0], w.a_post = s->a[1], w.a_res = s->a[2], w.da_pre = s->da[0], w.da_post = s->da[1], w.da_res = s->da[2];
        w.work = work_of(b, mhc_boundary_dw_work_cuda(&w));
        j->call = call_boundary_dw;
        j->u.boundary_dw = w;
    }
    return j->call != NULL;
}

static void once(struct bench *b, struct data *s, struct job *j, cudaEvent_t from, cudaEvent_t to)
{
    cudaStream_t stream = stream_of(&b->lane);
    CHECK(cudaMemsetAsync(b->flush, 0, FLUSH, stream));
    CHECK(cudaEventRecord(from, stream));
    if (j->call(b, s, j) != ST_OK) {
        printf("not ok %s\n", b->err.msg);
        exit(1);
    }
    CHECK(cudaEventRecord(to, stream));
}
static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}
static void timed(struct bench *b, struct data *s, struct job *j, double ms)
{
    static cudaEvent_t from[MOST_CALLS], to[MOST_CALLS];
    float took[MOST_CALLS];
    for (int i = 0; i < MOST_CALLS && from[i] == NULL; i++) {
        CHECK(cudaEventCreate(&from[i]));
        CHECK(cudaEventCreate(&to[i]));
    }
    for (int i = 0; i < 3; i++)
        once(b, s, j, from[i], to[i]);
    CHECK(cudaEventSynchronize(to[2]));
    CHECK(cudaEventElapsedTime(took, from[2], to[2]));
    int calls = (int)min(max(ms / (took[0] + 0.1f), 5.0), (double)MOST_CALLS);
    for (int i = 0; i < calls; i++)
        once(b, s, j, from[i], to[i]);
    CHECK(cudaEventSynchronize(to[calls - 1]));
    for (int i = 0; i < calls; i++)
        CHECK(cudaEventElapsedTime(&took[i], from[i], to[i]));
    qsort(took, (size_t)calls, sizeof took[0], by_size);
    printf("%.2f %d\n", 1e3 * took[calls / 2], calls);
}

static int serve(struct bench *b)
{
    static struct data s;
    char line[256], op[32];
    long long rows, d;
    double ms;
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (sscanf(line, "shape %lld %lld", &rows, &d) == 2 && rows > 0 && d > 0) {
            data_close(b);
            data_open(b, &s, rows, d);
            printf("ok %.1f\n", (double)b->taken / (1 << 30));
        } else if (sscanf(line, "run %31s %lf", op, &ms) == 2 && s.rows > 0) {
            struct job j = {};
            int held = b->held_count;
            if (!open_primitive(b, &s, op, &j) && !open_boundary(b, &s, op, &j)) {
                printf("not ok no op '%s'\n", op);
                return 1;
            }
            timed(b, &s, &j, ms);
            while (j.call != call_rebuild && j.call != call_combines && b->held_count > held) /* its work */
                CHECK(cudaFree(b->held[--b->held_count]));
        } else {
            return strncmp(line, "quit", 4) != 0;
        }
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char **argv)
{
    static struct bench b;
    struct dev_gpu want = {};
    if (!open_gpu(&b.dev, &b.lane, &b.err, &want))
        return 1;
    CHECK(cudaMalloc(&b.flush, FLUSH));
    return serve(&b);
}
