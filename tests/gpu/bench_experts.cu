/* The MLP of experts on a GPU: are results the same bits on any number of multiprocessors, and how fast is it.
 *
 *   bench_experts check [N]      small shapes (the first N), several numbers of multiprocessors: the same bits, or "not
 *                                ok"
 *   bench_experts serve          reads commands, so that a script can alternate with another program
 *                                (tools/speed_experts.py):
 *     shape E H F COUNT...       experts, hidden size, width, rows of each expert: random data; answers "ok GIB"
 *     run fwd|bwd WAY MS         calls for about so many milliseconds: "US MHZ CALLS", median of the calls, clock after
 *                                them
 *     part NAME WAY MS           the same of one product or activation: up fc1 act fc2 down dfc2 dact dx dw1 dw2 db1;
 *                                zero: dw1 by memset
 *     bench NAME WAY MS          fwd, bwd or a part as triton.testing.do_bench times it: MS / 5 warm, then 256 MB of
 *                                zeros before every call
 *   WAY: fused, apart. dw is written, fp32. fused recomputes the activation, apart keeps it.
 *
 * serve needs a GPU; check runs on the emulator too (tests/emu). */
#include "bench.cuh"
#include "ops/act/act.h"
#include "ops/expert/expert.h"
#include "ops/gmm/gmm.h"
#include "ops/ops.h"

struct bench {
    struct dev dev;
    struct lane lane;
    struct err err;
    const struct ops *ops;
    int64_t taken;
    uint64_t seed;
};
static struct cuda_dev *gpu_of(struct bench *b) { return (struct cuda_dev *)b->dev.impl; }

static void ok(struct bench *b, int st)
{
    if (st != ST_OK) {
        printf("not ok %s\n", b->err.msg);
        exit(1);
    }
}

/* ---- data ------------------------------------------------------------------------------------ */

static int fill_on(struct bench *b, void *p, enum dtype t, int64_t n, double scale, double mean)
{
    unsigned blocks = (unsigned)min_i64(1024, ceil_div(n, 256));
    if (t == DT_BF16)
        LAUNCH(&b->lane, fill<bf16>, blocks, 256, 0, (bf16 *)p, n, (float)scale, (float)mean, ++b->seed);
    else
        LAUNCH(&b->lane, fill<float>, blocks, 256, 0, (float *)p, n, (float)scale, (float)mean, ++b->seed);
    return ST_OK;
}
static void *room(struct bench *b, int64_t bytes)
{
    void *p = NULL;
    CHECK(cudaMalloc(&p, (size_t)bytes + 1024));
    b->taken += bytes;
    return p;
}

/* An MLP and everything it computes. */
enum { MOST_EXPERTS = 512 };
struct mlp {
    int64_t experts, hidden, width, rows;
    int32_t at[MOST_EXPERTS + 1];
    struct act_rule rule;
    struct tensor x, w1, w2, b1, b2, prob, offset, pre, act, y, dy, dact, dpre, again, dprob, dx, dw1, dw2, db1, work;
};
static struct tensor matrix(struct bench *b, enum dtype t, int64_t rows, int64_t cols, double scale)
{
    void *p = room(b, rows * cols * (int64_t)dtype_bytes(t));
    ok(b, fill_on(b, p, t, rows * cols, scale, 0));
    return tensor_2d(p, t, rows, cols);
}
static struct tensor stack(struct bench *b, enum dtype t, int64_t n, int64_t rows, int64_t cols, double scale)
{
    return tensor_3d(matrix(b, t, n * rows, cols, scale).data, t, n, rows, cols);
}
static void mlp_open(struct bench *b, struct mlp *m, int64_t rows, bool biased)
{
    int64_t e = m->experts, h = m->hidden, f = m->width, n = act_is_gated(m->rule.kind) ? 2 * f : f;
    m->rows = rows;
    m->x = matrix(b, DT_BF16, rows, h, 1);
    m->w1 = stack(b, DT_BF16, e, n, h, 0.02);
    m->w2 = stack(b, DT_BF16, e, h, f, 0.02);
    m->prob = tensor_1d(room(b, rows * 4), DT_F32, rows);
    ok(b, fill_on(b, m->prob.data, DT_F32, rows, 0.29, 0.5));
    m->offset = tensor_1d(room(b, (e + 1) * 4), DT_I32, e + 1);
    CHECK(cudaMemcpy(m->offset.data, m->at, (size_t)(e + 1) * 4, cudaMemcpyHostToDevice));
    m->pre = matrix(b, DT_BF16, rows, n, 1);
    m->act = matrix(b, DT_BF16, rows, f, 1);
    m->y = matrix(b, DT_BF16, rows, h, 1);
    m->dy = matrix(b, DT_BF16, rows, h, 1);
    m->dact = matrix(b, DT_BF16, rows, f, 1);
    m->dpre = matrix(b, DT_BF16, rows, n, 1);
    m->again = matrix(b, DT_BF16, rows, f, 1);
    m->dprob = tensor_1d(matrix(b, DT_F32, rows, 1, 1).data, DT_F32, rows);
    m->dx = matrix(b, DT_BF16, rows, h, 1);
    m->dw1 = stack(b, DT_F32, e, n, h, 1);
    m->dw2 = stack(b, DT_F32, e, h, f, 1);
    m->db1 = matrix(b, DT_F32, e, n, 1);
    if (biased) {
        m->b1 = matrix(b, DT_F32, e, n, 0.5);
        m->b2 = matrix(b, DT_F32, e, h, 0.5);
    }
    struct expert_down_bwd_args a = {};
    a.dz = m->dy;
    a.w = m->w2;
    a.pre = m->pre;
    a.rule = m->rule;
    int64_t bytes = b->ops->expert_down_bwd_work(&a);
    m->work = tensor_1d(room(b, bytes), DT_U8, bytes);
    CHECK(cudaDeviceSynchronize());
}
static void mlp_close(struct bench *b, struct mlp *m)
{
    struct tensor *all[] = {&m->x,     &m->w1,  &m->w2,  &m->b1,  &m->b2,   &m->prob, &m->offset,
                            &m->pre,   &m->act, &m->y,   &m->dy,  &m->dact, &m->dpre, &m->again,
                            &m->dprob, &m->dx,  &m->dw1, &m->dw2, &m->db1,  &m->work};
    for (int i = 0; i < countof(all); i++) {
        CHECK(cudaFree(all[i]->data));
        *all[i] = (struct tensor){};
    }
    b->taken = 0;
}

/* ---- what is called -------------------------------------------------------------------------- */

static int part_up(struct bench *b, struct mlp *m)
{
    struct expert_up_args a = {m->x, m->w1, m->b1, m->prob, m->offset, m->pre, m->act, m->rule};
    return b->ops->expert_up(&b->lane, &a);
}
static int part_fc1(struct bench *b, struct mlp *m)
{
    struct gmm_fwd_args a = {};
    a.x = m->x;
    a.w = m->w1;
    a.bias = m->b1;
    a.offset = m->offset;
    a.y = m->pre;
    return b->ops->gmm_fwd(&b->lane, &a);
}
static int part_act(struct bench *b, struct mlp *m)
{
    struct act_fwd_args a = {};
    a.x = m->pre;
    a.prob = m->prob;
    a.y = m->act;
    a.rule = m->rule;
    return b->ops->act_fwd(&b->lane, &a);
}
static int part_fc2(struct bench *b, struct mlp *m)
{
    struct gmm_fwd_args a = {m->act, m->w2, m->b2, m->b2.data != NULL ? m->prob : m->b2, m->offset, m->y};
    return b->ops->gmm_fwd(&b->lane, &a);
}
static int part_down(struct bench *b, struct mlp *m)
{
    struct expert_down_bwd_args a = {m->dy,   m->w2,    m->b2,    m->pre,  m->prob, m->offset,
                                     m->dpre, m->again, m->dprob, m->work, m->rule};
    return b->ops->expert_down_bwd(&b->lane, &a);
}
static int part_dfc2(struct bench *b, struct mlp *m)
{
    struct gmm_bwd_args a = {};
    a.dy = m->dy;
    a.w = m->w2;
    a.offset = m->offset;
    a.dx = m->dact;
    return b->ops->gmm_bwd(&b->lane, &a);
}
static int part_dact(struct bench *b, struct mlp *m)
{
    struct act_bwd_args a = {};
    a.dy = m->dact;
    a.x = m->pre;
    a.prob = m->prob;
    a.dx = m->dpre;
    a.dprob = m->dprob;
    a.rule = m->rule;
    return b->ops->act_bwd(&b->lane, &a);
}
static int part_dx(struct bench *b, struct mlp *m)
{
    struct gmm_bwd_args a = {};
    a.dy = m->dpre;
    a.w = m->w1;
    a.offset = m->offset;
    a.dx = m->dx;
    return b->ops->gmm_bwd(&b->lane, &a);
}
static int weights(struct bench *b, const struct mlp *m, const struct tensor *dy, const struct tensor *x,
                   const struct tensor *dw, bool add)
{
    struct gmm_bwd_args a = {};
    a.dy = *dy;
    a.x = *x;
    a.offset = m->offset;
    a.dw = *dw;
    a.acc_dw = add;
    return b->ops->gmm_bwd(&b->lane, &a);
}
static int part_dw1(struct bench *b, struct mlp *m) { return weights(b, m, &m->dpre, &m->x, &m->dw1, false); }
static int part_dw2(struct bench *b, struct mlp *m) { return weights(b, m, &m->dy, &m->act, &m->dw2, false); }
static int part_db1(struct bench *b, struct mlp *m)
{
    struct gmm_bwd_args a = {};
    a.dy = m->dpre;
    a.offset = m->offset;
    a.dbias = m->db1;
    return b->ops->gmm_bwd(&b->lane, &a);
}
static int part_zero(struct bench *b, struct mlp *m)
{
    CHECK(cudaMemsetAsync(m->dw1.data, 0, (size_t)tensor_bytes(&m->dw1), stream_of(&b->lane)));
    return ST_OK;
}

static int fwd_fused(struct bench *b, struct mlp *m)
{
    TRY(part_up(b, m));
    return part_fc2(b, m);
}
static int fwd_apart(struct bench *b, struct mlp *m)
{
    TRY(part_fc1(b, m));
    TRY(part_act(b, m));
    return part_fc2(b, m);
}
static int bwd_fused(struct bench *b, struct mlp *m)
{
    TRY(part_down(b, m));
    TRY(part_dx(b, m));
    TRY(weights(b, m, &m->dy, &m->again, &m->dw2, false));
    return part_dw1(b, m);
}
static int bwd_apart(struct bench *b, struct mlp *m)
{
    TRY(part_dfc2(b, m));
    TRY(part_dact(b, m));
    TRY(part_dx(b, m));
    TRY(part_dw2(b, m));
    return part_dw1(b, m);
}

typedef int (*call_fn)(struct bench *b, struct mlp *m);
static const struct named_call {
    const char *name;
    call_fn call;
} parts[] = {{"up", part_up},     {"fc1", part_fc1},   {"act", part_act},   {"fc2", part_fc2},
             {"down", part_down}, {"dfc2", part_dfc2}, {"dact", part_dact}, {"dx", part_dx},
             {"dw1", part_dw1},   {"dw2", part_dw2},   {"db1", part_db1},   {"zero", part_zero}};

/* ---- the same bits --------------------------------------------------------------------------- */

/* Everything a pass writes, in one piece of host memory. In between outputs are filled with NaNs. */
static void passes(struct bench *b, struct mlp *m, char *out, size_t bytes)
{
    struct tensor *results[] = {&m->pre, &m->act, &m->y, &m->dpre, &m->again, &m->dprob, &m->dx, &m->dw1, &m->dw2};
    size_t used = 0;
    for (int i = 0; i < countof(results); i++)
        CHECK(cudaMemsetAsync(results[i]->data, 0xff, (size_t)tensor_bytes(results[i]), stream_of(&b->lane)));
    ok(b, fwd_fused(b, m));
    ok(b, bwd_fused(b, m));
    ok(b, weights(b, m, &m->dpre, &m->x, &m->dw1, true)); /* once more, added */
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < countof(results); i++) {
        bool tail = results[i] == &m->again; /* rows of no expert are not defined */
        size_t n = tail ? (size_t)m->at[m->experts] * (size_t)m->width * 2 : (size_t)tensor_bytes(results[i]);
        if (used + n > bytes)
            exit(1);
        CHECK(cudaMemcpy(out + used, results[i]->data, n, cudaMemcpyDeviceToHost));
        used += n;
    }
    /* In place: the gradient over the saved input. */
    struct tensor dpre = m->dpre, pre = m->pre;
    CHECK(cudaMemcpyAsync(dpre.data, pre.data, (size_t)tensor_bytes(&pre), cudaMemcpyDeviceToDevice,
                          stream_of(&b->lane)));
    m->pre = dpre;
    ok(b, part_down(b, m));
    m->pre = pre;
    CHECK(cudaDeviceSynchronize());
    if (used + (size_t)tensor_bytes(&dpre) > bytes)
        exit(1);
    CHECK(cudaMemcpy(out + used, dpre.data, (size_t)tensor_bytes(&dpre), cudaMemcpyDeviceToHost));
}

static int check_shape(struct bench *b, struct mlp *m, int64_t rows, bool biased, const char *name)
{
    int bad = 0, budget = gpu_of(b)->sm_budget;
    const int some[] = {budget, 7, 2, 1};
    mlp_open(b, m, rows, biased);
    size_t bytes = (size_t)b->taken;
    char *first = (char *)calloc(1, bytes), *again = (char *)calloc(1, bytes);
    if (first == NULL || again == NULL)
        exit(1);
    passes(b, m, first, bytes);
    for (int k = 0; k < countof(some); k++) {
        gpu_of(b)->sm_budget = some[k];
        memset(again, 0, bytes);
        passes(b, m, again, bytes);
        gpu_of(b)->sm_budget = budget;
        bool same = memcmp(first, again, bytes) == 0;
        printf("%s %s: %d multiprocessors, the same bits\n", same ? "ok" : "not ok", name, some[k]);
        bad += !same;
    }
    free(first);
    free(again);
    mlp_close(b, m);
    return bad;
}

static int check(struct bench *b, int most)
{
    static const struct {
        const char *name;
        int64_t experts, hidden, width, rows;
        int32_t at[6];
        enum act_kind kind;
        double clamp, offset;
        bool biased;
    } shapes[] = {
        {"few rows", 2, 64, 64, 40, {0, 0, 40}, ACT_SWIGLU, 0, 0, false},
        {"ragged, a tail, odd width", 5, 136, 264, 700, {0, 130, 130, 391, 500, 691}, ACT_SWIGLU, 0, 0, true},
        {"many tiles a block", 3, 192, 576, 900, {0, 256, 257, 900}, ACT_SWIGLU, 0, 0, false},
        {"no rows of an expert at all", 2, 64, 128, 70, {0, 0, 0}, ACT_SWIGLU, 0, 0, true},
        {"squared relu", 3, 128, 320, 420, {0, 200, 200, 417}, ACT_RELU2, 0, 0, true},
        {"clamped", 3, 72, 320, 300, {0, 129, 257, 300}, ACT_QUICK_GEGLU, 2, 1, true},
    };
    int bad = 0, n = most > 0 && most < countof(shapes) ? most : countof(shapes);
    static struct mlp m;
    for (int i = 0; i < n; i++) {
        m.experts = shapes[i].experts;
        m.hidden = shapes[i].hidden;
        m.width = shapes[i].width;
        memcpy(m.at, shapes[i].at, sizeof shapes[i].at);
        m.rule = (struct act_rule){};
        m.rule.kind = shapes[i].kind;
        m.rule.clamp = shapes[i].clamp;
        m.rule.offset = shapes[i].offset;
        m.rule.alpha = 1.702;
        bad += check_shape(b, &m, shapes[i].rows, shapes[i].biased, shapes[i].name);
    }
    printf("%d passed, %d failed\n", 4 * n - bad, bad);
    return bad != 0;
}

/* ---- times ----------------------------------------------------------------------------------- */

/* Cycles and nanoseconds of about a tenth of a millisecond. */
static __global__ void clock_probe(int64_t *out)
{
#ifdef __CUDACC__
    uint64_t from, to;
    int64_t cycles = clock64();
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(to));
    while (to - from < 100000);
    out[0] = clock64() - cycles;
    out[1] = (int64_t)(to - from);
#else
    out[0] = 0;
    out[1] = 1;
#endif
}
static int clock_mhz(struct bench *b, double *mhz)
{
    int64_t *there = (int64_t *)room(b, 16), host[2];
    LAUNCH(&b->lane, clock_probe, 1, 1, 0, there);
    CHECK(cudaStreamSynchronize(stream_of(&b->lane)));
    CHECK(cudaMemcpy(host, there, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(there));
    *mhz = 1e3 * (double)host[0] / (double)host[1];
    return ST_OK;
}

static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}
/* Events, made once. */
enum { MOST_CALLS = 1000 };
static cudaEvent_t *events(void)
{
    static cudaEvent_t at[2 * MOST_CALLS + 1];
    for (int i = 0; i < countof(at) && at[i] == NULL; i++)
        CHECK(cudaEventCreate(&at[i]));
    return at;
}
static float between(cudaEvent_t from, cudaEvent_t to)
{
    float ms;
    CHECK(cudaEventElapsedTime(&ms, from, to));
    return ms;
}
/* How many calls of `one` ms fit. */
static int calls_in(double ms, double one, int least)
{
    int n = (int)(ms / (one > 0.001 ? one : 0.001));
    return n < least ? least : n > MOST_CALLS ? MOST_CALLS : n;
}
static void answer(struct bench *b, float *took, int n)
{
    double mhz;
    ok(b, clock_mhz(b, &mhz));
    qsort(took, (size_t)n, sizeof took[0], by_size);
    printf("%.2f %.0f %d\n", 1e3 * 0.5 * (took[n / 2] + took[(n - 1) / 2]), mhz, n);
}

/* One call after the other. */
static void timed(struct bench *b, struct mlp *m, call_fn call, double ms)
{
    cudaEvent_t *at = events();
    float took[MOST_CALLS];
    cudaStream_t stream = stream_of(&b->lane);
    for (int i = 0; i < 2; i++) /* warm; the second says how many fit */
        for (int k = 0; k < 2; k++) {
            CHECK(cudaEventRecord(at[k], stream));
            ok(b, call(b, m));
        }
    CHECK(cudaEventRecord(at[2], stream));
    CHECK(cudaEventSynchronize(at[2]));
    int n = calls_in(ms, between(at[1], at[2]), 5);
    CHECK(cudaEventRecord(at[0], stream));
    for (int i = 0; i < n; i++) {
        ok(b, call(b, m));
        CHECK(cudaEventRecord(at[i + 1], stream));
    }
    CHECK(cudaEventSynchronize(at[n]));
    for (int i = 0; i < n; i++)
        took[i] = between(at[i], at[i + 1]);
    answer(b, took, n);
}

/* As triton.testing.do_bench: five calls say how many fit, warm-up without pauses, then each call after a flush of the
 * cache. */
static void benched(struct bench *b, struct mlp *m, call_fn call, double ms)
{
    enum { FLUSH = 256 << 20 };
    static void *flush;
    cudaEvent_t *at = events();
    float took[MOST_CALLS];
    cudaStream_t stream = stream_of(&b->lane);
    if (flush == NULL)
        CHECK(cudaMalloc(&flush, FLUSH));
    ok(b, call(b, m));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventRecord(at[0], stream));
    for (int i = 0; i < 5; i++) {
        CHECK(cudaMemsetAsync(flush, 0, FLUSH, stream));
        ok(b, call(b, m));
    }
    CHECK(cudaEventRecord(at[1], stream));
    CHECK(cudaDeviceSynchronize());
    double one = between(at[0], at[1]) / 5;
    int warm = calls_in(ms / 5, one, 1), n = calls_in(ms, one, 1);
    for (int i = 0; i < warm; i++)
        ok(b, call(b, m));
    for (int i = 0; i < n; i++) {
        CHECK(cudaMemsetAsync(flush, 0, FLUSH, stream));
        CHECK(cudaEventRecord(at[2 * i], stream));
        ok(b, call(b, m));
        CHECK(cudaEventRecord(at[2 * i + 1], stream));
    }
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++)
        took[i] = between(at[2 * i], at[2 * i + 1]);
    answer(b, took, n);
}

static bool parse_shape(struct mlp *m, char *rest)
{
    long v[3];
    for (int i = 0; i < 3; i++)
        v[i] = strtol(rest, &rest, 10);
    if (v[0] < 1 || v[0] > MOST_EXPERTS || v[1] < 8 || v[2] < 8)
        return false;
    m->experts = v[0];
    m->hidden = v[1];
    m->width = v[2];
    m->at[0] = 0;
    for (long e = 0; e < v[0]; e++)
        m->at[e + 1] = m->at[e] + (int32_t)strtol(rest, &rest, 10);
    m->rule = (struct act_rule){};
    m->rule.kind = ACT_SWIGLU;
    return true;
}

static call_fn call_of(const char *name, const char *way)
{
    bool fused = strcmp(way, "fused") == 0;
    if (strcmp(name, "fwd") == 0)
        return fused ? fwd_fused : fwd_apart;
    if (strcmp(name, "bwd") == 0)
        return fused ? bwd_fused : bwd_apart;
    for (int i = 0; i < countof(parts); i++)
        if (strcmp(parts[i].name, name) == 0)
            return parts[i].call;
    return NULL;
}

static int serve(struct bench *b)
{
    static char line[65536];
    static struct mlp m;
    while (fgets(line, sizeof line, stdin) != NULL) {
        char what[16] = "", name[16], way[16];
        double ms;
        if (strncmp(line, "shape ", 6) == 0) {
            if (m.x.data != NULL)
                mlp_close(b, &m);
            if (!parse_shape(&m, line + 6))
                return 1;
            mlp_open(b, &m, m.at[m.experts], false);
            printf("ok %.1f\n", (double)b->taken / (1 << 30));
        } else if (sscanf(line, "%15s %15s %15s %lf", what, name, way, &ms) == 4 && m.x.data != NULL) {
            call_fn call = call_of(name, way);
            if (call == NULL)
                return 1;
            (strcmp(what, "bench") == 0 ? benched : timed)(b, &m, call, ms);
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
    want.large_tiles = argc > 1 && strcmp(argv[1], "check") == 0;
    if (argc < 2 || argc > 3 || (strcmp(argv[1], "check") != 0 && strcmp(argv[1], "serve") != 0)) {
        fprintf(stderr, "bench_experts check [N] | serve\n");
        return 2;
    }
    if (!open_gpu(&b.dev, &b.lane, &b.err, &want))
        return 1;
    b.ops = ops_for(&b.dev);
    int bad = strcmp(argv[1], "check") == 0 ? check(&b, argc > 2 ? atoi(argv[2]) : 0) : serve(&b);
    dev_close(&b.dev);
    return bad;
}
