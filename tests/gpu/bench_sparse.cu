/* Times of sparse attention (D) in bf16 on random data: 128 heads, latent 512 + 64, 2048 selected keys, indexer of 64
 * heads of 128 channels; the tensor-core kernels beside those for Hopper, and dense latent attention (128 heads of 192
 * and 128 channels) as chosen.
 *
 *   bench_sparse [TOKENS]...     sequences of so many tokens; default: 65536 131072
 *   bench_sparse check [TOKENS]  instead: distances of Hopper's results from the others, and whether a second call
 *                                gives the same bits; ends with "N passed, N failed"
 *
 * src/ops/sparse/sparse_path.c chooses between the two. Needs a Hopper GPU with 120 GB for 131,072 tokens; not part of
 * check-gpu. */
#include "bench.cuh"

#include "ops/attention/attention.h"
#include "ops/indexer/indexer_cuda.cuh"
#include "ops/sparse/sparse.h"

enum { HEADS = 128, WIDTH = 576, VALUES = 512, TOPK = 2048, INDEX_HEADS = 64, INDEX_WIDTH = 128 };
enum { SCORE_ROWS = 1024, CALLS = 2 };
enum family { CORES, HOPPER, FAMILIES };

struct bench {
    struct dev dev;
    struct lane lane;
    struct err err;
    uint64_t seed;
    int passed, failed;
};

static struct tensor room(struct tensor t)
{
    CHECK(cudaMalloc(&t.data, (size_t)tensor_bytes(&t) + 256));
    return t;
}
static int fill_noise(struct bench *b, const struct tensor *t)
{
    int64_t n = tensor_elems(t);
    unsigned blocks = (unsigned)(n < 1024 * 256 ? (n + 255) / 256 : 1024);
    if (t->dtype == DT_BF16)
        LAUNCH(&b->lane, fill<bf16>, blocks, 256, 0, (bf16 *)t->data, n, 1.0f, 0.0f, ++b->seed);
    else
        LAUNCH(&b->lane, fill<float>, blocks, 256, 0, (float *)t->data, n, 1.0f, 0.0f, ++b->seed);
    return ST_OK;
}
static struct tensor noise_of(struct bench *b, struct tensor t)
{
    t = room(t);
    if (fill_noise(b, &t) != ST_OK) {
        printf("not ok %s\n", b->err.msg);
        exit(1);
    }
    return t;
}
static void release(struct tensor **all, int n)
{
    for (int i = 0; i < n; i++) {
        CHECK(cudaFree(all[i]->data));
        all[i]->data = NULL;
    }
}

/* ---- calls ----------------------------------------------------------------------------------- */

struct sparse_calls {
    struct index_topk_args topk;
    struct sparse_fwd_args fwd;
    struct sparse_bwd_args bwd;
    struct index_loss_args loss;
};
/* The indexer's loss over the lists, with gradients. */
static struct index_loss_args loss_of(const struct sparse_calls *c, int64_t tokens)
{
    struct index_loss_args a = {};
    const double one = 1;
    a.q = c->topk.q;
    a.k = c->topk.k;
    a.w = c->topk.w;
    a.mq = c->fwd.q;
    a.mk = tensor_4d(c->fwd.kv.data, DT_BF16, 1, tokens, 1, WIDTH);
    a.lse = c->fwd.lse;
    a.idx = c->topk.idx;
    a.scale = room(tensor_1d(NULL, DT_F64, 1));
    CHECK(cudaMemcpy(a.scale.data, &one, sizeof one, cudaMemcpyHostToDevice));
    a.dq = room(tensor_4d(NULL, DT_BF16, 1, tokens, INDEX_HEADS, INDEX_WIDTH));
    a.dk = room(tensor_3d(NULL, DT_BF16, 1, tokens, INDEX_WIDTH));
    a.dw = room(tensor_3d(NULL, DT_BF16, 1, tokens, INDEX_HEADS));
    a.coeff = 1;
    a.score_scale = 1 / sqrt((double)INDEX_HEADS * INDEX_WIDTH);
    a.softmax_scale = c->fwd.scale;
    a.ratio = 1;
    a.relu = true;
    a.work = room(tensor_1d(NULL, DT_U8, index_loss_work_cuda(&a)));
    return a;
}
static struct sparse_calls sparse_open(struct bench *b, int64_t tokens)
{
    struct sparse_calls c = {};
    int64_t topk = min_i64(TOPK, tokens / 2);
    c.topk.q = noise_of(b, tensor_4d(NULL, DT_BF16, 1, tokens, INDEX_HEADS, INDEX_WIDTH));
    c.topk.k = noise_of(b, tensor_3d(NULL, DT_BF16, 1, tokens, INDEX_WIDTH));
    c.topk.w = noise_of(b, tensor_3d(NULL, DT_F32, 1, tokens, INDEX_HEADS));
    c.topk.idx = room(tensor_3d(NULL, DT_I32, 1, tokens, topk));
    c.topk.topk = topk;
    c.topk.ratio = 1;
    c.topk.relu = true;
    c.topk.work = room(tensor_1d(NULL, DT_U8, index_topk_work_cuda(&c.topk)));
    c.fwd.q = noise_of(b, tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, WIDTH));
    c.fwd.kv = noise_of(b, tensor_3d(NULL, DT_BF16, 1, tokens, WIDTH));
    c.fwd.idx = c.topk.idx;
    c.fwd.o = room(tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, VALUES));
    c.fwd.lse = room(tensor_3d(NULL, DT_F32, 1, HEADS, tokens));
    c.fwd.scale = 1 / sqrt(192.0);
    c.fwd.dv = VALUES;
    c.bwd.q = c.fwd.q;
    c.bwd.kv = c.fwd.kv;
    c.bwd.idx = c.fwd.idx;
    c.bwd.o = c.fwd.o;
    c.bwd.lse = c.fwd.lse;
    c.bwd.d_o = noise_of(b, tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, VALUES));
    c.bwd.dq = room(tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, WIDTH));
    c.bwd.dkv = room(tensor_3d(NULL, DT_BF16, 1, tokens, WIDTH));
    c.bwd.scale = c.fwd.scale;
    c.bwd.dv = VALUES;
    c.bwd.work = room(tensor_1d(NULL, DT_U8, sparse_bwd_work_cuda(&c.bwd)));
    c.loss = loss_of(&c, tokens);
    return c;
}
static void sparse_close(struct sparse_calls *c)
{
    struct tensor *all[] = {&c->topk.q,   &c->topk.k,     &c->topk.w,  &c->topk.idx, &c->topk.work, &c->fwd.q,
                            &c->fwd.kv,   &c->fwd.o,      &c->fwd.lse, &c->bwd.d_o,  &c->bwd.dq,    &c->bwd.dkv,
                            &c->bwd.work, &c->loss.scale, &c->loss.dq, &c->loss.dk,  &c->loss.dw,   &c->loss.work};
    release(all, countof(all));
}

struct dense_calls {
    struct attention_fwd_args fwd;
    struct attention_bwd_args bwd;
};
static struct dense_calls dense_open(struct bench *b, int64_t tokens)
{
    struct dense_calls c = {};
    c.fwd.q = noise_of(b, tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, 192));
    c.fwd.k = noise_of(b, tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, 192));
    c.fwd.v = noise_of(b, tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, 128));
    c.fwd.o = room(tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, 128));
    c.fwd.lse = room(tensor_3d(NULL, DT_F32, 1, HEADS, tokens));
    c.fwd.scale = 1 / sqrt(192.0);
    c.fwd.work = room(tensor_1d(NULL, DT_U8, attention_fwd_work_cuda(&c.fwd)));
    c.bwd.q = c.fwd.q;
    c.bwd.k = c.fwd.k;
    c.bwd.v = c.fwd.v;
    c.bwd.o = c.fwd.o;
    c.bwd.lse = c.fwd.lse;
    c.bwd.d_o = noise_of(b, tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, 128));
    c.bwd.dq = room(tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, 192));
    c.bwd.dk = room(tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, 192));
    c.bwd.dv = room(tensor_4d(NULL, DT_BF16, 1, tokens, HEADS, 128));
    c.bwd.scale = c.fwd.scale;
    c.bwd.work = room(tensor_1d(NULL, DT_U8, attention_bwd_work_cuda(&c.bwd)));
    return c;
}
static void dense_close(struct dense_calls *c)
{
    struct tensor *all[] = {&c->fwd.q,   &c->fwd.k,  &c->fwd.v,  &c->fwd.o,  &c->fwd.lse, &c->fwd.work,
                            &c->bwd.d_o, &c->bwd.dq, &c->bwd.dk, &c->bwd.dv, &c->bwd.work};
    release(all, countof(all));
}

/* Scores of the last rows, which see most keys, without the selection. */
static int run_scores(struct lane *l, const struct index_topk_args *a)
{
    index_call<bf16> c = {};
    c.q = index_view<bf16>(&a->q);
    c.k = index_view<bf16>(&a->k);
    c.w = index_view<float>(&a->w);
    c.batch = 1;
    c.rows = (int)a->q.dim[1];
    c.keys = c.most = (int)a->k.dim[1];
    c.heads = INDEX_HEADS;
    c.width = INDEX_WIDTH;
    c.ratio = 1;
    c.relu = c.by_key = true;
    int64_t count = min_i64(SCORE_ROWS, a->work.dim[0] / 4 / c.keys);
    return index_scores(l, c, c.rows - count, (unsigned)count, (float *)a->work.data, c.keys, 1.0f);
}
static double score_pairs(const struct index_topk_args *a)
{
    int64_t keys = a->k.dim[1], count = min_i64(SCORE_ROWS, a->work.dim[0] / 4 / keys);
    return (double)count * ((double)keys - ((double)count - 1) / 2);
}

enum what { SCORES, SELECT, SPARSE_FWD, SPARSE_BWD, INDEX_LOSS, SPARSE_OPS, DENSE_FWD = SPARSE_OPS, DENSE_BWD };
static const char *const what_name[] = {"indexer scores, last rows",  "index_topk",    "sparse_fwd",    "sparse_bwd",
                                        "index_loss, with gradients", "dense forward", "dense backward"};
struct calls {
    struct sparse_calls s;
    struct dense_calls d;
};
static void run(struct bench *b, const struct calls *c, enum what w, enum family by)
{
    struct lane *l = &b->lane;
    cuda_of(l)->hopper = by == HOPPER || w >= DENSE_FWD;
    int st = w == SCORES       ? run_scores(l, &c->s.topk)
             : w == SELECT     ? index_topk_cuda(l, &c->s.topk)
             : w == SPARSE_FWD ? sparse_fwd_cuda(l, &c->s.fwd)
             : w == SPARSE_BWD ? sparse_bwd_cuda(l, &c->s.bwd)
             : w == INDEX_LOSS ? index_loss_cuda(l, &c->s.loss)
             : w == DENSE_FWD  ? attention_fwd_cuda(l, &c->d.fwd)
                               : attention_bwd_cuda(l, &c->d.bwd);
    if (st != ST_OK) {
        printf("not ok %s: %s\n", what_name[w], b->err.msg);
        exit(1);
    }
}

/* ---- times ----------------------------------------------------------------------------------- */

/* The best of CALLS after a first one. */
static double milliseconds(struct bench *b, const struct calls *c, enum what w, enum family by)
{
    cudaEvent_t from, to;
    float best = INFINITY, ms;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    for (int i = 0; i <= CALLS; i++) {
        CHECK(cudaEventRecord(from, stream_of(&b->lane)));
        run(b, c, w, by);
        CHECK(cudaEventRecord(to, stream_of(&b->lane)));
        CHECK(cudaEventSynchronize(to));
        CHECK(cudaEventElapsedTime(&ms, from, to));
        best = i > 0 ? fminf(best, ms) : best;
    }
    CHECK(cudaEventDestroy(from));
    CHECK(cudaEventDestroy(to));
    return best;
}

/* TFLOP/s of a GEMM of n x n x n. */
static double gemm_rate(struct bench *b, int64_t n)
{
    enum { TIMES = 10 };
    struct tensor x = noise_of(b, tensor_2d(NULL, DT_BF16, n, n)), y = noise_of(b, x), z = room(x);
    struct blas_call g = {};
    cudaEvent_t from, to;
    float ms;
    g.a = x.data;
    g.b = y.data;
    g.c = z.data;
    g.ab = g.c_type = DT_BF16;
    g.trans_b = true;
    g.m = g.n = g.k = g.lda = g.ldb = g.ldc = n;
    g.alpha = 1;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    for (int i = 0; i < 2 * TIMES; i++) {
        if (i == TIMES)
            CHECK(cudaEventRecord(from, stream_of(&b->lane)));
        if (blas_gemm(&b->lane, &g) != ST_OK) {
            printf("not ok GEMM: %s\n", b->err.msg);
            exit(1);
        }
    }
    CHECK(cudaEventRecord(to, stream_of(&b->lane)));
    CHECK(cudaEventSynchronize(to));
    CHECK(cudaEventElapsedTime(&ms, from, to));
    struct tensor *all[] = {&x, &y, &z};
    release(all, countof(all));
    return 2.0 * (double)(n * n) * (double)n * TIMES / ms * 1e-9;
}

static double flops_of(const struct calls *c, enum what w, int64_t tokens)
{
    double pairs = (double)tokens * ((double)tokens + 1) / 2,
           selected = (double)tokens * (double)c->s.fwd.idx.dim[2] * HEADS;
    return w == SCORES       ? 2 * score_pairs(&c->s.topk) * INDEX_HEADS * INDEX_WIDTH
           : w == SELECT     ? 2 * pairs * INDEX_HEADS * INDEX_WIDTH
           : w == SPARSE_FWD ? 2 * selected * (WIDTH + VALUES)
           : w == SPARSE_BWD ? 2 * selected * (3 * WIDTH + 2 * VALUES)
           : w == INDEX_LOSS ? 2 * selected / HEADS * (HEADS * WIDTH + 3 * INDEX_HEADS * INDEX_WIDTH)
           : w == DENSE_FWD  ? 2 * pairs * HEADS * (192 + 128)
                             : 2 * pairs * HEADS * (3 * 192 + 2 * 128);
}

static void time_tokens(struct bench *b, int64_t tokens, double gemm)
{
    struct calls c = {};
    double sum[FAMILIES] = {0}, dense = 0;
    c.s = sparse_open(b, tokens);
    printf("%lld tokens                    tensor cores, ms (TFLOP/s)   Hopper, ms (TFLOP/s)\n", (long long)tokens);
    for (int w = 0; w < SPARSE_OPS; w++) {
        double ms[FAMILIES], flops = flops_of(&c, (enum what)w, tokens);
        for (int by = 0; by < FAMILIES; by++) {
            ms[by] = milliseconds(b, &c, (enum what)w, (enum family)by);
            sum[by] += w == SCORES || w == INDEX_LOSS ? 0 : ms[by];
        }
        printf("  %-28s %10.2f (%4.0f) %17.2f (%4.0f)   %.2f times as fast", what_name[w], ms[CORES],
               flops / ms[CORES] * 1e-9, ms[HOPPER], flops / ms[HOPPER] * 1e-9, ms[CORES] / ms[HOPPER]);
        printf(w == SCORES ? ", %.0f %% of a GEMM's rate\n" : "\n", flops / ms[HOPPER] * 1e-7 / gemm);
        fflush(stdout);
    }
    printf("  scratch: index_topk %.0f MiB, sparse_bwd %.0f MiB\n", (double)c.s.topk.work.dim[0] / 1048576,
           (double)c.s.bwd.work.dim[0] / 1048576);
    sparse_close(&c.s);
    c.d = dense_open(b, tokens);
    for (int w = DENSE_FWD; w <= DENSE_BWD; w++) {
        double ms = milliseconds(b, &c, (enum what)w, CORES);
        dense += ms;
        printf("  %-28s %10.2f (%4.0f)\n", what_name[w], ms, flops_of(&c, (enum what)w, tokens) / ms * 1e-9);
    }
    dense_close(&c.d);
    printf("  selection, forward, backward %10.2f %24.2f   dense %.2f: %.2f and %.2f times as fast as dense\n",
           sum[CORES], sum[HOPPER], dense, dense / sum[CORES], dense / sum[HOPPER]);
    fflush(stdout);
}

/* ---- check ----------------------------------------------------------------------------------- */

/* Relative distance of two buffers; bits: how many elements differ at all. */
static double distance(const struct tensor *x, const struct tensor *y, int64_t *bits)
{
    int64_t n = tensor_elems(x), size = tensor_bytes(x);
    char *u = (char *)malloc((size_t)size), *v = (char *)malloc((size_t)size);
    double diff = 0, norm = 0;
    if (u == NULL || v == NULL)
        exit(1);
    CHECK(cudaMemcpy(u, x->data, (size_t)size, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(v, y->data, (size_t)size, cudaMemcpyDeviceToHost));
    struct tensor hx = *x, hy = *y;
    hx.data = u;
    hy.data = v;
    *bits = 0;
    for (int64_t i = 0; i < n; i++) {
        double p = tensor_get(&hx, i), q = tensor_get(&hy, i);
        diff += (p - q) * (p - q);
        norm += q * q;
        *bits += !(p == q);
    }
    free(u);
    free(v);
    return diff == 0 ? 0 : sqrt(diff / norm);
}

/* On the lane's stream: a plain copy within the GPU does not wait, and what overwrites the source next is there. */
static void keep(struct bench *b, const struct tensor *to, const struct tensor *from)
{
    CHECK(cudaMemcpyAsync(to->data, from->data, (size_t)tensor_bytes(from), cudaMemcpyDeviceToDevice,
                          stream_of(&b->lane)));
}

static void check_result(struct bench *b, const struct calls *c, enum what w, struct tensor *result, const char *name,
                         double allowed)
{
    struct tensor mine = *result, other = room(mine), again = room(mine);
    struct tensor *all[] = {&other, &again};
    int64_t bits, repeated;
    run(b, c, w, HOPPER);
    keep(b, &again, &mine);
    CHECK(cudaMemsetAsync(mine.data, 0xff, (size_t)tensor_bytes(&mine), stream_of(&b->lane)));
    run(b, c, w, CORES);
    keep(b, &other, &mine);
    CHECK(cudaMemsetAsync(mine.data, 0xff, (size_t)tensor_bytes(&mine), stream_of(&b->lane)));
    run(b, c, w, HOPPER);
    CHECK(cudaStreamSynchronize(stream_of(&b->lane)));
    double far = distance(&mine, &other, &bits);
    (void)distance(&mine, &again, &repeated);
    bool list = mine.dtype == DT_I32, ok = repeated == 0;
    double share = (double)bits / (double)tensor_elems(&mine);
    ok = ok && (list ? share <= allowed : far <= allowed);
    printf("%s %-26s %-4s %s %.1e of %.1e allowed, %s\n", ok ? "ok" : "not ok", what_name[w], name,
           list ? "other entries" : "distance", list ? share : far, allowed,
           repeated == 0 ? "same bits again" : "OTHER BITS AGAIN");
    b->passed += ok;
    b->failed += !ok;
    release(all, countof(all));
}

static void check(struct bench *b, int64_t tokens)
{
    struct calls c = {};
    c.s = sparse_open(b, tokens);
    /* Sums in another order swap keys whose scores are almost equal, and move those behind them in the list. */
    check_result(b, &c, SELECT, &c.s.topk.idx, "idx", 0.2);
    check_result(b, &c, SPARSE_FWD, &c.s.fwd.o, "o", 5e-3);
    check_result(b, &c, SPARSE_FWD, &c.s.fwd.lse, "lse", 1e-5);
    check_result(b, &c, SPARSE_BWD, &c.s.bwd.dq, "dq", 5e-3);
    check_result(b, &c, SPARSE_BWD, &c.s.bwd.dkv, "dkv", 5e-3);
    check_result(b, &c, INDEX_LOSS, &c.s.loss.dq, "dq", 5e-3);
    check_result(b, &c, INDEX_LOSS, &c.s.loss.dk, "dk", 5e-3);
    sparse_close(&c.s);
}

int main(int argc, char **argv)
{
    struct bench b = {};
    const struct dev_gpu want = {};
    const char *const usual[] = {"65536", "131072"};
    bool checks = argc > 1 && strcmp(argv[1], "check") == 0;
    if (!open_gpu(&b.dev, &b.lane, &b.err, &want))
        return 1;
    if (checks) {
        check(&b, argc > 2 ? atoll(argv[2]) : 1024);
        printf("%d passed, %d failed\n", b.passed, b.failed);
        return b.failed != 0;
    }
    const char *const *lengths = argc > 1 ? (const char *const *)argv + 1 : usual;
    int n = argc > 1 ? argc - 1 : countof(usual);
    int64_t size = min_i64(8192, atoll(lengths[0])); /* few tokens: on the emulator */
    double gemm = gemm_rate(&b, size);
    printf("bf16 GEMM, %lld x %lld x %lld: %.0f TFLOP/s\n", (long long)size, (long long)size, (long long)size, gemm);
    for (int i = 0; i < n; i++)
        time_tokens(&b, atoll(lengths[i]), gemm);
    return 0;
}
