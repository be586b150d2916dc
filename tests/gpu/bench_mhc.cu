/* Times of the mHC ops on a GPU at training shapes, bf16 and 4 streams, on random data, beside a copy measured in the same run.
 *
 *   bench_mhc [ROWS C]...      default: 16384 2048, 8192 4096
 *
 * The boundary is timed as it is chosen; forward also in two passes and, up to 4096 channels, in one pass of clusters. Backward leaves
 * products of the stream for the parameters: what a training step runs is "boundary bwd" and then "from products".
 *
 * Bytes are what an op must move at least: each tensor read or written once. Needs a GPU; not part of check-gpu. */
#include "bench.cuh"

struct bench {
    struct dev dev;
    struct lane lane;
    struct err err;
    const struct ops *ops;
    uint64_t seed;
    double copy; /* bytes a microsecond */
};

static struct tensor make(struct bench *b, enum dtype t, int64_t rows, int64_t cols, double scale, double mean)
{
    void *p = NULL;
    int64_t n = rows * cols;
    CHECK(cudaMalloc(&p, (size_t)n * dtype_bytes(t) + 256));
    if (t == DT_BF16)
        fill<bf16><<<1024, 256>>>((bf16 *)p, n, (float)scale, (float)mean, ++b->seed);
    else
        fill<float><<<1024, 256>>>((float *)p, n, (float)scale, (float)mean, ++b->seed);
    CHECK(cudaGetLastError());
    return tensor_2d(p, t, rows, cols);
}
static struct tensor vec(struct bench *b, int64_t n, double scale, double mean)
{
    struct tensor t = make(b, DT_F32, 1, n, scale, mean);
    return tensor_1d(t.data, DT_F32, n);
}
static struct tensor work_of(int64_t bytes)
{
    void *p = NULL;
    CHECK(cudaMalloc(&p, (size_t)bytes + 256));
    return tensor_1d(p, DT_U8, bytes);
}

typedef int (*call_fn)(struct bench *b, const void *args);
static void report(struct bench *b, const char *name, int64_t rows, int64_t d, double bytes, call_fn call, const void *args)
{
    enum { WARM = 3, RUNS = 20 };
    cudaStream_t stream = stream_of(&b->lane);
    cudaEvent_t from, to;
    float times[RUNS], total = 0;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    for (int i = 0; i < WARM + RUNS; i++) {
        CHECK(cudaEventRecord(from, stream));
        if (call(b, args) != ST_OK) {
            printf("not ok %s: %s\n", name, b->err.msg);
            exit(1);
        }
        CHECK(cudaEventRecord(to, stream));
        CHECK(cudaEventSynchronize(to));
        if (i >= WARM)
            CHECK(cudaEventElapsedTime(&times[i - WARM], from, to));
    }
    /* One after the other, as in a step. */
    CHECK(cudaEventRecord(from, stream));
    for (int i = 0; i < RUNS; i++)
        call(b, args);
    CHECK(cudaEventRecord(to, stream));
    CHECK(cudaEventSynchronize(to));
    CHECK(cudaEventElapsedTime(&total, from, to));
    double us = 1e3 * total / RUNS;
    float least = times[0];
    for (int i = 1; i < RUNS; i++)
        least = times[i] < least ? times[i] : least;
    printf("%-16s %6lld x %-5lld %9.1f us (least alone %8.1f) %8.1f MB %6.2f TB/s", name, (long long)rows, (long long)d, us, 1e3 * least, bytes / 1e6,
           bytes / us / 1e6);
    if (b->copy > 0)
        printf(" %5.1f %% of copy", 100 * bytes / us / b->copy);
    printf("\n");
    fflush(stdout);
}

struct copy_args {
    void *to, *from;
    size_t bytes;
};
static int run_copy(struct bench *b, const void *args)
{
    const struct copy_args *a = (const struct copy_args *)args;
    return cudaMemcpyAsync(a->to, a->from, a->bytes, cudaMemcpyDeviceToDevice, stream_of(&b->lane)) == cudaSuccess ? ST_OK : ST_INTERNAL;
}

#define RUNNER(op)                                                                                          \
    static int run_##op(struct bench *b, const void *args) { return b->ops->op(&b->lane, (const struct op##_args *)args); }
RUNNER(mhc_boundary_fwd)
RUNNER(mhc_boundary_bwd)
RUNNER(mhc_boundary_dw)
RUNNER(mhc_combine_fwd)
RUNNER(mhc_rebuild)
RUNNER(mhc_combine_bwd)
RUNNER(mhc_aggregate_fwd)
RUNNER(mhc_aggregate_bwd)
RUNNER(mhc_project_fwd)
RUNNER(mhc_project_bwd)
RUNNER(mhc_sinkhorn_fwd)
RUNNER(mhc_sinkhorn_bwd)
RUNNER(mhc_gates_fwd)

static void shape(struct bench *b, int64_t rows, int64_t d)
{
    enum { N = 4, LOGITS = 24 };
    int64_t k = N * d;
    double u = 2.0 * (double)rows * (double)d, c = 4.0 * (double)rows;
    size_t before = 0, all = 0;
    CHECK(cudaMemGetInfo(&before, &all));
    struct mhc_rule rule = {};
    rule.streams = N;
    rule.iterations = 20;
    struct tensor x = make(b, DT_BF16, rows, k, 1, 0), f = make(b, DT_BF16, rows, d, 1, 0), y = make(b, DT_BF16, rows, k, 1, 0), h = make(b, DT_BF16, rows, d, 1, 0);
    struct tensor coef_in = make(b, DT_F32, rows, LOGITS, 0.05, 0.25), coef = make(b, DT_F32, rows, LOGITS, 0.05, 0.25), stat = make(b, DT_F32, rows, LOGITS + 2, 0.1, 1);
    struct tensor w = make(b, DT_F32, LOGITS, k, 0.01, 0), beta = vec(b, LOGITS, 0.1, 0), a_pre = vec(b, 1, 0, 0.01), a_post = vec(b, 1, 0, 0.01), a_res = vec(b, 1, 0, 0.01);
    struct tensor gain = vec(b, d, 0.1, 1), dgain = vec(b, d, 0, 0);

    struct mhc_boundary_fwd_args fw = {};
    fw.x = x, fw.f = f, fw.y = y, fw.h = h, fw.coef_in = coef_in, fw.coef = coef, fw.stat = stat, fw.w = w, fw.beta = beta, fw.a_pre = a_pre, fw.a_post = a_post;
    fw.a_res = a_res, fw.gain = gain, fw.rule = rule, fw.eps = 1e-5;
    fw.work = work_of(b->ops->mhc_boundary_fwd_work(&fw));
    report(b, "boundary fwd", rows, d, 10 * u + 74 * c, run_mhc_boundary_fwd, &fw);
    bool one_pass = d % 256 == 0 && d / 256 <= 16;
    struct mhc_boundary_fwd_args ring = fw;
    ring.rule.ring = true;
    report(b, "  in two passes", rows, d, 10 * u + 74 * c, run_mhc_boundary_fwd, &ring);
    if (one_pass) {
        struct mhc_boundary_fwd_args single = fw;
        single.rule.single_pass = true;
        report(b, "  in one pass", rows, d, 10 * u + 74 * c, run_mhc_boundary_fwd, &single);
    }
    struct mhc_boundary_fwd_args again = fw;
    again.reuse = true;
    again.x = y, again.f = {}, again.coef_in = {}, again.y = {};
    report(b, "norm replay", rows, d, 5 * u + 5 * c, run_mhc_boundary_fwd, &again);

    struct tensor dy = make(b, DT_BF16, rows, k, 1, 0), dh = make(b, DT_BF16, rows, d, 1, 0), dcoef = make(b, DT_F32, rows, LOGITS, 1, 0);
    struct tensor dx = make(b, DT_BF16, rows, k, 1, 0), df = make(b, DT_BF16, rows, d, 1, 0), dcoef_in = make(b, DT_F32, rows, LOGITS, 1, 0), dz = make(b, DT_F32, rows, LOGITS, 1, 0);
    struct mhc_boundary_bwd_args bw = {};
    bw.dh = dh, bw.dy = dy, bw.dcoef = dcoef, bw.y = y, bw.stat = stat, bw.coef = coef, bw.gain = gain, bw.w = w, bw.a_pre = a_pre, bw.a_post = a_post, bw.a_res = a_res;
    bw.beta = beta, bw.x = x, bw.f = f, bw.coef_in = coef_in, bw.dx = dx, bw.df = df, bw.dcoef_in = dcoef_in, bw.dz = dz, bw.dgain = dgain, bw.rule = rule;
    bw.products = make(b, DT_F32, LOGITS, k, 0, 0);
    bw.work = work_of(b->ops->mhc_boundary_bwd_work(&bw));
    report(b, "boundary bwd", rows, d, 15 * u + 146 * c, run_mhc_boundary_bwd, &bw);
    struct mhc_boundary_bwd_args bare = bw;
    bare.products = {};
    report(b, "  no products", rows, d, 15 * u + 146 * c, run_mhc_boundary_bwd, &bare);
    struct tensor dw = make(b, DT_F32, LOGITS, k, 0, 0), dbeta = vec(b, LOGITS, 0, 0), da[3] = {vec(b, 1, 0, 0), vec(b, 1, 0, 0), vec(b, 1, 0, 0)};
    struct mhc_boundary_dw_args pw = {};
    pw.dz = dz, pw.stat = stat, pw.y = y, pw.a_pre = a_pre, pw.a_post = a_post, pw.a_res = a_res, pw.dw = dw, pw.da_pre = da[0], pw.da_post = da[1], pw.da_res = da[2];
    pw.dbeta = dbeta, pw.rule = rule;
    pw.work = work_of(b->ops->mhc_boundary_dw_work(&pw));
    report(b, "boundary dw", rows, d, 4 * u + 50 * c, run_mhc_boundary_dw, &pw);
    struct mhc_boundary_dw_args made = pw;
    made.products = bw.products;
    report(b, "  from products", rows, d, 98 * c + 12 * LOGITS * k, run_mhc_boundary_dw, &made);

    struct tensor pre = make(b, DT_F32, rows, N, 0.1, 0.5), post = make(b, DT_F32, rows, N, 0.1, 1), res = make(b, DT_F32, rows, N * N, 0.05, 0.25);
    struct tensor dpre = make(b, DT_F32, rows, N, 1, 0), dpost = make(b, DT_F32, rows, N, 1, 0), dres = make(b, DT_F32, rows, N * N, 1, 0);
    struct tensor p = make(b, DT_F32, rows, LOGITS, 1, 0), rho = make(b, DT_F32, rows, 1, 0.1, 1), drho = make(b, DT_F32, rows, 1, 0.1, 1), logits = make(b, DT_F32, rows, N * N, 1, 0);
    struct mhc_combine_fwd_args cf = {};
    cf.x = x, cf.f = f, cf.post = post, cf.res = res, cf.y = y, cf.rule = rule;
    report(b, "combine fwd", rows, d, 9 * u + 20 * c, run_mhc_combine_fwd, &cf);
    struct mhc_rebuild_args rb = {};
    rb.x = x, rb.rule = rule;
    for (rb.layers = 0; rb.layers < MHC_REBUILD_LAYERS;) {
        struct mhc_rebuild_layer *l = &rb.layer[rb.layers++];
        l->f = make(b, DT_BF16, rows, d, 1, 0), l->coef = make(b, DT_F32, rows, LOGITS, 0.05, 0.25), l->y = make(b, DT_BF16, rows, k, 1, 0);
        if (rb.layers == 4 || rb.layers == MHC_REBUILD_LAYERS)
            report(b, rb.layers == 4 ? "rebuild 4" : "rebuild 7", rows, d, (4 + 5 * rb.layers) * u + 20 * rb.layers * c, run_mhc_rebuild, &rb);
    }
    struct mhc_combine_bwd_args cb = {};
    cb.dy = dy, cb.x = x, cb.f = f, cb.post = post, cb.res = res, cb.dx = dx, cb.df = df, cb.dpost = dpost, cb.dres = dres, cb.rule = rule;
    report(b, "combine bwd", rows, d, 14 * u + 40 * c, run_mhc_combine_bwd, &cb);
    struct mhc_aggregate_fwd_args af = {};
    af.x = x, af.pre = pre, af.a = h;
    report(b, "aggregate fwd", rows, d, 5 * u + 4 * c, run_mhc_aggregate_fwd, &af);
    struct mhc_aggregate_bwd_args ab = {};
    ab.da = dh, ab.x = x, ab.pre = pre, ab.dx = dx, ab.dpre = dpre;
    report(b, "aggregate bwd", rows, d, 9 * u + 8 * c, run_mhc_aggregate_bwd, &ab);
    struct mhc_project_fwd_args pf = {};
    pf.x = x, pf.w = w, pf.p = p, pf.rho = rho;
    report(b, "project fwd", rows, d, 4 * u + 25 * c, run_mhc_project_fwd, &pf);
    struct mhc_project_bwd_args pb = {};
    pb.dp = p, pb.drho = drho, pb.x = x, pb.w = w, pb.rho = rho, pb.dx = dx, pb.dw = dw;
    pb.work = work_of(b->ops->mhc_project_bwd_work(&pb));
    report(b, "project bwd", rows, d, 8 * u + 26 * c, run_mhc_project_bwd, &pb);
    struct mhc_gates_fwd_args gf = {};
    gf.p = p, gf.rho = rho, gf.a_pre = a_pre, gf.a_post = a_post, gf.a_res = a_res, gf.beta = beta, gf.pre = pre, gf.post = post, gf.logits = logits, gf.rule = rule;
    report(b, "gates fwd", rows, d, 49 * c, run_mhc_gates_fwd, &gf);
    struct mhc_sinkhorn_fwd_args sf = {};
    sf.logits = logits, sf.res = res, sf.rule = rule;
    report(b, "sinkhorn fwd", rows, d, 32 * c, run_mhc_sinkhorn_fwd, &sf);
    struct mhc_sinkhorn_bwd_args sb = {};
    sb.dres = dres, sb.logits = logits, sb.dlogits = res, sb.rule = rule;
    report(b, "sinkhorn bwd", rows, d, 48 * c, run_mhc_sinkhorn_bwd, &sb);
    CHECK(cudaDeviceSynchronize());
}

int main(int argc, char **argv)
{
    static struct bench b;
    struct dev_gpu gpu = {};
    if (!open_gpu(&b.dev, &b.lane, &b.err, &gpu))
        return 1;
    b.ops = ops_for(&b.dev);
    struct copy_args copy = {};
    copy.bytes = (size_t)1 << 30;
    CHECK(cudaMalloc(&copy.to, copy.bytes));
    CHECK(cudaMalloc(&copy.from, copy.bytes));
    fill<bf16><<<1024, 256>>>((bf16 *)copy.from, (int64_t)copy.bytes / 2, 1, 0, 1);
    cudaEvent_t from, to;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    for (int i = 0; i < 13; i++) {
        if (i == 3)
            CHECK(cudaEventRecord(from, stream_of(&b.lane)));
        run_copy(&b, &copy);
    }
    CHECK(cudaEventRecord(to, stream_of(&b.lane)));
    CHECK(cudaEventSynchronize(to));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, from, to));
    b.copy = 2.0 * (double)copy.bytes * 10 / (1e3 * ms);
    printf("copy %.2f TB/s\n", b.copy / 1e6);
    cudaFree(copy.to);
    cudaFree(copy.from);
    if (argc < 3) {
        shape(&b, 16384, 2048);
        shape(&b, 8192, 4096);
    }
    for (int i = 1; i + 1 < argc; i += 2)
        shape(&b, atoll(argv[i]), atoll(argv[i + 1]));
    return 0;
}
