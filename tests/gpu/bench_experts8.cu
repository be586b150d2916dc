/* The MLP of experts in FP8 on a GPU: are results the same bits on any number of multiprocessors and twice, and how
 * fast is it.
 *
 *   bench_experts8 check     small shapes, several numbers of multiprocessors: the same bits, or "not ok"
 *   bench_experts8 time [MS] OLMoE, Qwen3-30B and DeepSeek-V3: TFLOP/s forward and backward, with all quantising, and
 *   the
 *                            microseconds of each call; MS for each (60)
 * Rows are fetched from tokens by the quantiser, as in a layer whose experts are all here. dw is written, fp32. */
#include "bench.cuh"
#include "ops/act/act.h"
#include "ops/expert8/expert8.h"
#include "ops/gmm8/gmm8.h"
#include "ops/ops.h"
#include "ops/quantise/quantise.h"

enum { MOST_EXPERTS = 512, CALLS = 10, TIMES = 200 };

struct coded {
    struct tensor q, s;
};
struct mlp {
    int64_t experts, hidden, width, tokens, k;
    int32_t at[MOST_EXPERTS + 1];
    struct act_rule rule;
    struct tensor h, df, src, row, offset, prob, pre, y, dpre, again, dprob, dx, dw1, dw2, up_work, down_work;
    struct coded w1, w1t, w2, w2t, x, xt, act, actt, dy, dyt, dp, dpt;
};
struct bench {
    struct dev dev;
    struct lane lane;
    struct err err;
    const struct ops *ops;
    uint64_t seed;
    void *all[64];
    int n;
};

static void ok(struct bench *b, int st)
{
    if (st != ST_OK) {
        printf("not ok %s\n", b->err.msg);
        exit(1);
    }
}

/* ---- data ------------------------------------------------------------------------------------ */

static void *room(struct bench *b, int64_t bytes)
{
    void *p = NULL;
    if (b->n == countof(b->all))
        exit(1);
    CHECK(cudaMalloc(&p, (size_t)bytes + 1024));
    CHECK(cudaMemsetAsync(p, 0xff, (size_t)bytes, stream_of(&b->lane)));
    return b->all[b->n++] = p;
}
static int fill_on(struct bench *b, void *p, enum dtype t, int64_t n, double scale, double mean)
{
    unsigned blocks = (unsigned)min_i64(1024, ceil_div(n, 256));
    if (t == DT_BF16)
        LAUNCH(&b->lane, fill<bf16>, blocks, 256, 0, (bf16 *)p, n, (float)scale, (float)mean, ++b->seed);
    else
        LAUNCH(&b->lane, fill<float>, blocks, 256, 0, (float *)p, n, (float)scale, (float)mean, ++b->seed);
    return ST_OK;
}
static struct tensor matrix(struct bench *b, enum dtype t, int64_t rows, int64_t cols, double scale)
{
    struct tensor m = tensor_2d(room(b, rows * cols * (int64_t)dtype_bytes(t)), t, rows, cols);
    if (scale != 0)
        ok(b, fill_on(b, m.data, t, rows * cols, scale, 0));
    return m;
}
static struct coded codes(struct bench *b, int64_t rows, int64_t cols, bool square)
{
    struct coded c = {tensor_2d(room(b, rows * cols), DT_F8_E4M3, rows, cols),
                      f8_scales(DT_F32, rows, cols, 128, square)};
    c.s.data = room(b, tensor_bytes(&c.s));
    return c;
}
static int quantise(struct bench *b, const struct tensor *x, const struct mlp *by, const struct coded *q,
                    const struct coded *t, bool square)
{
    struct quantise_args a = {};
    a.x = *x;
    a.block = 128;
    a.square = square;
    a.k = 1;
    if (by != NULL) {
        a.src = by->src;
        a.row = by->row;
        a.k = by->k;
    }
    if (q != NULL) {
        a.q = q->q;
        a.qs = q->s;
    }
    if (t != NULL) {
        a.t = t->q;
        a.ts = t->s;
    }
    return b->ops->quantise(&b->lane, &a);
}
/* The codes of random weights [experts * out, in], both ways. */
static void weight(struct bench *b, int64_t rows, int64_t cols, struct coded *w, struct coded *wt)
{
    struct tensor values = matrix(b, DT_F32, rows, cols, 0.02);
    *w = codes(b, rows, cols, true);
    *wt = codes(b, cols, rows, true);
    ok(b, quantise(b, &values, NULL, w, wt, true));
}

static struct expert8_up_args up_args(const struct mlp *m)
{
    struct expert8_up_args a = {};
    a.x = m->x.q;
    a.xs = m->x.s;
    a.w = m->w1.q;
    a.ws = m->w1.s;
    a.prob = m->prob;
    a.offset = m->offset;
    a.pre = m->pre;
    a.q = m->act.q;
    a.qs = m->act.s;
    a.work = m->up_work;
    a.block = 128;
    a.square = true;
    a.rule = m->rule;
    return a;
}
static struct expert8_down_bwd_args down_args(const struct mlp *m)
{
    struct expert8_down_bwd_args a = {};
    a.dz = m->dy.q;
    a.dzs = m->dy.s;
    a.w = m->w2t.q;
    a.ws = m->w2t.s;
    a.pre = m->pre;
    a.prob = m->prob;
    a.offset = m->offset;
    a.dpre = m->dpre;
    a.y = m->again;
    a.dprob = m->dprob;
    a.work = m->down_work;
    a.block = 128;
    a.square = true;
    a.rule = m->rule;
    return a;
}

static void mlp_open(struct bench *b, struct mlp *m)
{
    int64_t e = m->experts, h = m->hidden, f = m->width, n = act_is_gated(m->rule.kind) ? 2 * f : f,
            rows = m->tokens * m->k;
    m->h = matrix(b, DT_BF16, m->tokens, h, 1);
    m->df = matrix(b, DT_BF16, m->tokens, h, 1);
    m->src = tensor_1d(room(b, rows * 4), DT_I32, rows);
    m->row = tensor_2d(room(b, rows * 4), DT_I32, m->tokens, m->k);
    int32_t *src = (int32_t *)malloc((size_t)rows * 8), *row = src + rows;
    if (src == NULL)
        exit(1);
    memset(row, 0xff, (size_t)rows * 4);
    for (int64_t i = 0; i < rows; i++) { /* tokens in order within an expert, as a router gives them */
        src[i] = i < m->at[e] ? (int32_t)(i * m->k % rows + i * m->k / rows) : -1;
        if (src[i] >= 0)
            row[src[i]] = (int32_t)i;
    }
    CHECK(cudaMemcpy(m->src.data, src, (size_t)rows * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(m->row.data, row, (size_t)rows * 4, cudaMemcpyHostToDevice));
    free(src);
    m->offset = tensor_1d(room(b, (e + 1) * 4), DT_I32, e + 1);
    CHECK(cudaMemcpy(m->offset.data, m->at, (size_t)(e + 1) * 4, cudaMemcpyHostToDevice));
    m->prob = tensor_1d(matrix(b, DT_F32, rows, 1, 0.3).data, DT_F32, rows);
    weight(b, e * n, h, &m->w1, &m->w1t);
    weight(b, e * h, f, &m->w2, &m->w2t);
    m->x = codes(b, rows, h, false);
    m->xt = codes(b, h, rows, false);
    m->act = codes(b, rows, f, false);
    m->actt = codes(b, f, rows, false);
    m->dy = codes(b, rows, h, false);
    m->dyt = codes(b, h, rows, false);
    m->dp = codes(b, rows, n, false);
    m->dpt = codes(b, n, rows, false);
    m->pre = matrix(b, DT_BF16, rows, n, 0);
    m->dpre = matrix(b, DT_BF16, rows, n, 0);
    m->again = matrix(b, DT_BF16, rows, f, 0);
    m->y = matrix(b, DT_BF16, rows, h, 0);
    m->dx = matrix(b, DT_BF16, rows, h, 0);
    m->dprob = tensor_1d(matrix(b, DT_F32, rows, 1, 0).data, DT_F32, rows);
    m->dw1 = tensor_3d(matrix(b, DT_F32, e * n, h, 0).data, DT_F32, e, n, h);
    m->dw2 = tensor_3d(matrix(b, DT_F32, e * h, f, 0).data, DT_F32, e, h, f);
    struct expert8_up_args up = up_args(m);
    struct expert8_down_bwd_args down = down_args(m);
    int64_t up_bytes = b->ops->expert8_up_work(&up), down_bytes = b->ops->expert8_down_bwd_work(&down);
    m->up_work = tensor_1d(room(b, up_bytes), DT_U8, up_bytes);
    m->down_work = tensor_1d(room(b, down_bytes), DT_U8, down_bytes);
    CHECK(cudaDeviceSynchronize());
}
static void mlp_close(struct bench *b)
{
    for (int i = 0; i < b->n; i++)
        CHECK(cudaFree(b->all[i]));
    b->n = 0;
}

/* ---- what is called -------------------------------------------------------------------------- */

static int product(struct bench *b, const struct mlp *m, const struct coded *x, const struct coded *w, bool turned,
                   const struct tensor *y)
{
    struct gmm8_args a = {};
    a.x = x->q;
    a.xs = x->s;
    a.w = w->q;
    a.ws = w->s;
    a.offset = m->offset;
    a.y = *y;
    a.block = 128;
    a.square = true;
    a.turned = turned;
    return b->ops->gmm8(&b->lane, &a);
}
static int weights(struct bench *b, const struct mlp *m, const struct coded *dyt, const struct coded *xt,
                   const struct tensor *dw)
{
    struct gmm8_dw_args a = {};
    a.dyt = dyt->q;
    a.dyts = dyt->s;
    a.xt = xt->q;
    a.xts = xt->s;
    a.offset = m->offset;
    a.dw = *dw;
    a.block = 128;
    return b->ops->gmm8_dw(&b->lane, &a);
}
/* Call i of a pass: 0 - 2 forward, the others backward. */
static int call(struct bench *b, const struct mlp *m, int i)
{
    struct expert8_up_args up = up_args(m);
    struct expert8_down_bwd_args down = down_args(m);
    switch (i) {
    case 0: return quantise(b, &m->h, m, &m->x, NULL, false);
    case 1: return b->ops->expert8_up(&b->lane, &up);
    case 2: return product(b, m, &m->act, &m->w2, false, &m->y);
    case 3: return quantise(b, &m->df, m, &m->dy, &m->dyt, false);
    case 4: return b->ops->expert8_down_bwd(&b->lane, &down);
    case 5: return quantise(b, &m->again, NULL, NULL, &m->actt, false);
    case 6: return weights(b, m, &m->dyt, &m->actt, &m->dw2);
    case 7: return quantise(b, &m->dpre, NULL, &m->dp, &m->dpt, false);
    case 8: return product(b, m, &m->dp, &m->w1t, true, &m->dx);
    default: TRY(quantise(b, &m->h, m, NULL, &m->xt, false)); return weights(b, m, &m->dpt, &m->xt, &m->dw1);
    }
}

/* ---- the same bits --------------------------------------------------------------------------- */

static size_t pass(struct bench *b, const struct mlp *m, char *out, size_t bytes)
{
    const struct tensor *results[] = {&m->pre,  &m->act.q, &m->act.s, &m->y,    &m->dpre,  &m->again, &m->dprob,
                                      &m->dx,   &m->dw1,   &m->dw2,   &m->x.q,  &m->x.s,   &m->xt.q,  &m->xt.s,
                                      &m->dy.q, &m->dyt.q, &m->dyt.s, &m->dp.q, &m->dpt.q, &m->actt.q};
    size_t used = 0;
    for (int i = 0; i < countof(results); i++)
        CHECK(cudaMemsetAsync(results[i]->data, 0xff, (size_t)tensor_bytes(results[i]), stream_of(&b->lane)));
    for (int i = 0; i < CALLS; i++)
        ok(b, call(b, m, i));
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < countof(results); i++) {
        size_t n = (size_t)tensor_bytes(results[i]);
        if (out != NULL && used + n <= bytes)
            CHECK(cudaMemcpy(out + used, results[i]->data, n, cudaMemcpyDeviceToHost));
        used += n;
    }
    return used;
}

static int check(struct bench *b)
{
    static const struct {
        const char *name;
        int64_t experts, hidden, width, tokens;
        int32_t at[6];
        enum act_kind kind;
    } shapes[] = {
        {"ragged, a tail", 5, 128, 256, 352, {0, 130, 130, 391, 500, 691}, ACT_SWIGLU},
        {"many tiles a block", 3, 256, 640, 448, {0, 256, 257, 896}, ACT_SWIGLU},
        {"squared relu", 3, 128, 384, 208, {0, 200, 200, 416}, ACT_RELU2},
    };
    static struct mlp m;
    struct cuda_dev *gpu = (struct cuda_dev *)b->dev.impl;
    int bad = 0, budget = gpu->sm_budget, all = 0;
    const int some[] = {budget, 7, 1};
    for (int i = 0; i < countof(shapes); i++) {
        m = (struct mlp){};
        m.experts = shapes[i].experts;
        m.hidden = shapes[i].hidden;
        m.width = shapes[i].width;
        m.tokens = shapes[i].tokens;
        m.k = 2;
        memcpy(m.at, shapes[i].at, sizeof shapes[i].at);
        m.rule.kind = shapes[i].kind;
        mlp_open(b, &m);
        size_t bytes = pass(b, &m, NULL, 0);
        char *first = (char *)malloc(bytes), *again = (char *)malloc(bytes);
        if (first == NULL || again == NULL)
            exit(1);
        pass(b, &m, first, bytes);
        for (int k = 0; k < countof(some); k++, all++) {
            gpu->sm_budget = some[k];
            pass(b, &m, again, bytes);
            gpu->sm_budget = budget;
            bool same = memcmp(first, again, bytes) == 0;
            printf("%s %s: %d multiprocessors, the same bits\n", same ? "ok" : "not ok", shapes[i].name, some[k]);
            bad += !same;
        }
        free(first);
        free(again);
        mlp_close(b);
    }
    printf("%d passed, %d failed\n", all - bad, bad);
    return bad != 0;
}

/* ---- times ----------------------------------------------------------------------------------- */

/* Median microseconds of calls [from, to), one after the other. */
static double timed(struct bench *b, const struct mlp *m, int from, int to, double ms)
{
    static float took[TIMES];
    cudaEvent_t start, end;
    double total = 0;
    int n = 0;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    for (int i = -2; (total < ms || n < 3) && n < TIMES; i++) {
        float one;
        CHECK(cudaEventRecord(start, stream_of(&b->lane)));
        for (int c = from; c < to; c++)
            ok(b, call(b, m, c));
        CHECK(cudaEventRecord(end, stream_of(&b->lane)));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&one, start, end));
        if (i < 0)
            continue;
        int at = n++;
        for (; at > 0 && took[at - 1] > one; at--)
            took[at] = took[at - 1];
        took[at] = one;
        total += one;
    }
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(end));
    return 1e3 * took[n / 2];
}

static int times(struct bench *b, double ms)
{
    static const char *const names[CALLS] = {"x", "up", "fc2", "dy", "down", "act_t", "dw2", "dpre", "dx", "x_t+dw1"};
    static const struct {
        const char *name;
        int64_t experts, hidden, width, rows;
    } shapes[] = {
        {"OLMoE", 64, 2048, 1024, 131072}, {"Qwen3-30B", 128, 2048, 768, 131072}, {"DSv3", 4, 7168, 2048, 32768}};
    static struct mlp m;
    for (int i = 0; i < countof(shapes); i++) {
        m = (struct mlp){};
        m.experts = shapes[i].experts;
        m.hidden = shapes[i].hidden;
        m.width = shapes[i].width;
        m.k = 8;
        m.tokens = shapes[i].rows / m.k;
        for (int64_t e = 0; e <= m.experts; e++)
            m.at[e] = (int32_t)(e * (shapes[i].rows / m.experts));
        for (int64_t e = 1; e < m.experts; e++) /* no expert begins at a block of tokens */
            m.at[e] += (int32_t)(e * 37 % 100 - 50);
        m.rule.kind = ACT_SWIGLU;
        mlp_open(b, &m);
        for (int c = 0; c < CALLS; c++)
            ok(b, call(b, &m, c));
        double work = 6e-6 * (double)shapes[i].rows * (double)m.hidden * (double)m.width;
        double fwd = timed(b, &m, 0, 3, ms), bwd = timed(b, &m, 3, CALLS, ms);
        printf("%-10s fwd %7.1f us %6.1f TFLOP/s  bwd %7.1f us %6.1f TFLOP/s |", shapes[i].name, fwd, work / fwd, bwd,
               2 * work / bwd);
        for (int c = 0; c < CALLS; c++)
            printf(" %s %.0f", names[c], timed(b, &m, c, c + 1, ms / 4));
        printf("\n");
        mlp_close(b);
    }
    return 0;
}

int main(int argc, char **argv)
{
    static struct bench b;
    struct dev_gpu want = {};
    bool checks = argc > 1 && strcmp(argv[1], "check") == 0;
    if (argc < 2 || (!checks && strcmp(argv[1], "time") != 0)) {
        fprintf(stderr, "bench_experts8 check | time [MS]\n");
        return 2;
    }
    if (!open_gpu(&b.dev, &b.lane, &b.err, &want))
        return 1;
    b.ops = ops_for(&b.dev);
    int bad = checks ? check(&b) : times(&b, argc > 2 ? atof(argv[2]) : 60);
    dev_close(&b.dev);
    return bad;
}
