/* Times of attention in bf16 on random data, by kernel: as chosen, and by each family that takes the call.
 *
 *   bench_attention [TEXT]...     shapes of the table below whose text holds one of these; default: all
 *
 * A line for each shape and direction: TFLOP/s of visible pairs (without documents), mean of back-to-back calls,
 * families in turns; for the backward pass also the relative distance of each gradient from the portable kernels' and
 * whether a second call gave the same bits. Needs a GPU; not part of check-gpu. */
#include "bench.cuh"

#include "dev/cuda.h"
#include "ops/attention/attention.h"

struct shape {
    const char *text;
    int64_t b, s, h, g, d, dv, window;
    bool sink, docs;
};
static const struct shape shapes[] = {
    {"b64 s1024 h8 d64", 64, 1024, 8, 8, 64, 64, 0, false, false},
    {"b8 s2048 h16 d64", 8, 2048, 16, 16, 64, 64, 0, false, false},
    {"b4 s4096 h16 d128", 4, 4096, 16, 16, 128, 128, 0, false, false},
    {"b4 s4096 h16/4 d128", 4, 4096, 16, 4, 128, 128, 0, false, false},
    {"b1 s4096 h64/8 d128", 1, 4096, 64, 8, 128, 128, 0, false, false},
    {"b2 s8192 h16 d128", 2, 8192, 16, 16, 128, 128, 0, false, false},
    {"b1 s32768 h16 d128", 1, 32768, 16, 16, 128, 128, 0, false, false},
    {"b4 s4096 h16/4 d128 sink", 4, 4096, 16, 4, 128, 128, 0, true, false},
    {"b4 s4096 h16/4 d128 window 1024", 4, 4096, 16, 4, 128, 128, 1024, false, false},
    {"b4 s4096 h16/4 d128 window 1024 sink", 4, 4096, 16, 4, 128, 128, 1024, true, false},
    {"b4 s4096 h16 d128 documents", 4, 4096, 16, 16, 128, 128, 0, false, true},
    {"b64 s1024 h8 d64 documents", 64, 1024, 8, 8, 64, 64, 0, false, true},
    {"b4 s4096 h16 d128 window 128", 4, 4096, 16, 16, 128, 128, 128, false, false},
    {"b16 s256 h5 d64", 16, 256, 5, 5, 64, 64, 0, false, false},
    {"b4 s4096 h16 d192/128", 4, 4096, 16, 16, 192, 128, 0, false, false},
    {"b2 s1000 h6/2 d96 window 300 sink documents", 2, 1000, 6, 2, 96, 96, 300, true, true},
};

struct bench {
    struct dev dev;
    struct lane lane;
    struct err err;
    uint64_t seed;
};
enum family { CHOSEN, LIBRARY, PORTABLE, FAMILIES };
static const char *const family_name[] = {"chosen", "library", "portable"};

static struct tensor room(struct tensor t)
{
    CHECK(cudaMalloc(&t.data, (size_t)tensor_bytes(&t) + 256));
    CHECK(cudaMemset(t.data, 0xff, (size_t)tensor_bytes(&t)));
    return t;
}
static struct tensor noise_4d(struct bench *b, int64_t n, int64_t s, int64_t h, int64_t d)
{
    struct tensor t = room(tensor_4d(NULL, DT_BF16, n, s, h, d));
    fill<bf16><<<1024, 256>>>((bf16 *)t.data, tensor_elems(&t), 1.0f, 0.0f, ++b->seed);
    return t;
}
/* Documents of 3/8, 1/8 and 1/2 of the sequence, shifted by batch. */
static struct tensor documents(const struct shape *s)
{
    struct tensor t = room(tensor_2d(NULL, DT_I32, s->b, s->s));
    int32_t *host = (int32_t *)malloc((size_t)tensor_bytes(&t));
    if (host == NULL)
        exit(1);
    for (int64_t b = 0; b < s->b; b++)
        for (int64_t i = 0, from = 0; i < s->s; i++) {
            if (i == s->s * 3 / 8 + 17 * b % 64 || i == s->s / 2 + b % 5)
                from = i;
            host[b * s->s + i] = (int32_t)from;
        }
    CHECK(cudaMemcpy(t.data, host, (size_t)tensor_bytes(&t), cudaMemcpyHostToDevice));
    free(host);
    return t;
}

static __global__ void distances(const bf16 *x, const bf16 *y, int64_t n, double *out)
{
    __shared__ double sum[2][256];
    double diff = 0, size = 0;
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (int64_t)gridDim.x * 256) {
        double u = to_float(x[i]), v = to_float(y[i]);
        diff += (u - v) * (u - v);
        size += v * v;
    }
    sum[0][threadIdx.x] = diff;
    sum[1][threadIdx.x] = size;
    __syncthreads();
    if (threadIdx.x == 0) {
        diff = size = 0;
        for (int t = 0; t < 256; t++) {
            diff += sum[0][t];
            size += sum[1][t];
        }
        out[2 * blockIdx.x] = diff;
        out[2 * blockIdx.x + 1] = size;
    }
}
static double distance(const struct tensor *x, const struct tensor *y)
{
    enum { BLOCKS = 512 };
    static double host[2 * BLOCKS];
    double *out, diff = 0, size = 0;
    CHECK(cudaMalloc(&out, sizeof host));
    distances<<<BLOCKS, 256>>>((bf16 *)x->data, (bf16 *)y->data, tensor_elems(x), out);
    CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(out));
    for (int i = 0; i < BLOCKS; i++) {
        diff += host[2 * i];
        size += host[2 * i + 1];
    }
    return sqrt(diff / size);
}

struct call {
    struct attention_fwd_args f;
    struct attention_bwd_args a;
};
static void run(struct bench *b, struct call *c, bool backward, enum family by)
{
    struct cuda_dev *d = cuda_of(&b->lane);
    struct dnn *dnn = d->dnn;
    bool hopper = d->hopper;
    d->hopper = hopper && by == CHOSEN;
    d->dnn = by == PORTABLE ? NULL : dnn;
    int st = backward ? attention_bwd_cuda(&b->lane, &c->a) : attention_fwd_cuda(&b->lane, &c->f);
    d->hopper = hopper;
    d->dnn = dnn;
    if (st != ST_OK) {
        printf("not ok %s\n", b->err.msg);
        exit(1);
    }
}
static double milliseconds(struct bench *b, struct call *c, bool backward, enum family by, int calls)
{
    cudaEvent_t from, to;
    float ms;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    run(b, c, backward, by);
    run(b, c, backward, by);
    CHECK(cudaEventRecord(from, stream_of(&b->lane)));
    for (int i = 0; i < calls; i++)
        run(b, c, backward, by);
    CHECK(cudaEventRecord(to, stream_of(&b->lane)));
    CHECK(cudaEventSynchronize(to));
    CHECK(cudaEventElapsedTime(&ms, from, to));
    return ms / calls;
}

static double visible_pairs(const struct shape *s)
{
    double pairs = 0;
    for (int64_t i = 0; i < s->s; i++)
        pairs += (double)(s->window > 0 && i + 1 > s->window ? s->window : i + 1);
    return pairs * (double)(s->b * s->h);
}
static void time_families(struct bench *b, struct call *c, const struct shape *s, bool backward)
{
    double flops = 2 * visible_pairs(s) * (double)(backward ? 3 * s->d + 2 * s->dv : s->d + s->dv),
           best[FAMILIES] = {0};
    int calls = (int)fmax(3, fmin(100, 8e12 / flops));
    printf("%-42s %s", s->text, backward ? "bwd" : "fwd");
    for (int turn = 0; turn < 3; turn++)
        for (int by = 0; by < FAMILIES; by++) {
            if (by == PORTABLE && turn > 0)
                continue;
            double rate = flops / milliseconds(b, c, backward, (enum family)by, calls) * 1e-9;
            best[by] = rate > best[by] ? rate : best[by];
        }
    for (int by = 0; by < FAMILIES; by++)
        printf("  %s %5.0f", family_name[by], best[by]);
}

static struct tensor like(const struct tensor *t)
{
    return room(tensor_4d(NULL, DT_BF16, t->dim[0], t->dim[1], t->dim[2], t->dim[3]));
}

static void check_gradients(struct bench *b, struct call *c)
{
    struct tensor *mine[3] = {&c->a.dq, &c->a.dk, &c->a.dv}, first[3], portable[3];
    bool same = true;
    for (int i = 0; i < 3; i++) {
        first[i] = *mine[i];
        portable[i] = like(mine[i]);
        *mine[i] = portable[i];
    }
    run(b, c, true, PORTABLE);
    for (int i = 0; i < 3; i++)
        *mine[i] = first[i];
    run(b, c, true, CHOSEN);
    for (int i = 0; i < 3; i++)
        *mine[i] = like(&first[i]);
    run(b, c, true, CHOSEN);
    CHECK(cudaStreamSynchronize(stream_of(&b->lane)));
    printf("  distances");
    for (int i = 0; i < 3; i++) {
        printf(" %.1e", distance(&first[i], &portable[i]));
        same = same && distance(mine[i], &first[i]) == 0;
        CHECK(cudaFree(portable[i].data));
        CHECK(cudaFree(mine[i]->data));
        *mine[i] = first[i];
    }
    printf(", %s\n", same ? "same bits" : "OTHER BITS");
}

static void bench_shape(struct bench *b, const struct shape *s)
{
    struct call c = {};
    c.f.q = noise_4d(b, s->b, s->s, s->h, s->d);
    c.f.k = noise_4d(b, s->b, s->s, s->g, s->d);
    c.f.v = noise_4d(b, s->b, s->s, s->g, s->dv);
    c.f.o = room(tensor_4d(NULL, DT_BF16, s->b, s->s, s->h, s->dv));
    c.f.lse = room(tensor_3d(NULL, DT_F32, s->b, s->h, s->s));
    c.f.scale = 1 / sqrt((double)s->d);
    c.f.window = s->window;
    if (s->sink) {
        c.f.sink = room(tensor_1d(NULL, DT_F32, s->h));
        fill<float><<<1, 256>>>((float *)c.f.sink.data, s->h, 1.0f, 0.0f, ++b->seed);
    }
    if (s->docs)
        c.f.doc_start = documents(s);
    c.f.work = room(tensor_1d(NULL, DT_U8, attention_fwd_work_cuda(&c.f)));
    struct attention_bwd_args a = {};
    a.q = c.f.q;
    a.k = c.f.k;
    a.v = c.f.v;
    a.o = c.f.o;
    a.lse = c.f.lse;
    a.sink = c.f.sink;
    a.doc_start = c.f.doc_start;
    a.d_o = noise_4d(b, s->b, s->s, s->h, s->dv);
    a.dq = like(&a.q);
    a.dk = like(&a.k);
    a.dv = like(&a.v);
    if (s->sink)
        a.dsink = room(tensor_1d(NULL, DT_F32, s->h));
    a.scale = c.f.scale;
    a.window = c.f.window;
    a.work = room(tensor_1d(NULL, DT_U8, attention_bwd_work_cuda(&a)));
    c.a = a;
    time_families(b, &c, s, false);
    printf("\n");
    time_families(b, &c, s, true);
    check_gradients(b, &c);
    fflush(stdout);
    struct tensor *all[] = {&c.f.q,    &c.f.k,   &c.f.v,  &c.f.o,  &c.f.lse, &c.f.sink,  &c.f.doc_start,
                            &c.f.work, &c.a.d_o, &c.a.dq, &c.a.dk, &c.a.dv,  &c.a.dsink, &c.a.work};
    for (size_t i = 0; i < countof(all); i++)
        CHECK(cudaFree(all[i]->data));
}

int main(int argc, char **argv)
{
    struct bench b = {};
    const struct dev_gpu want = {};
    if (!open_gpu(&b.dev, &b.lane, &b.err, &want))
        return 1;
    for (size_t i = 0; i < countof(shapes); i++) {
        bool wanted = argc == 1;
        for (int k = 1; k < argc; k++)
            wanted = wanted || strstr(shapes[i].text, argv[k]) != NULL;
        if (wanted)
            bench_shape(&b, &shapes[i]);
    }
    return 0;
}
