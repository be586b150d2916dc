/* attention: known values, equalities between options, cached decoding, views of a fused buffer,
 * every instruction set, and every refusal. Generic checks are in test_ops.c. */
#include "bench.h"
#include "ops/attention/attention.h"

#include "ops/check.h"
#include "ops/opcheck.h"

#include <omp.h>

static struct tensor fresh(enum dtype type, int rank, const int64_t *dim, uint64_t key)
{
    struct tensor t = tensor_shape(type, rank, dim);
    t.data = malloc((size_t)tensor_bytes(&t) + 1);
    assert_non_null(t.data);
    for (int64_t i = 0; i < tensor_elems(&t); i++)
        tensor_set(&t, i, type == DT_F64 || type == DT_F32 ? (double)(float)rng_normal(key, (uint64_t)i) : 0);
    return t;
}
#define FRESH(type, rank, key, ...) fresh(type, rank, (const int64_t[]){__VA_ARGS__}, key)

/* A forward call with its own memory; sizes as in attention.h. */
struct sizes {
    int64_t b, s, skv, h, g, d, dv;
};
static struct attention_fwd_args make_forward(struct sizes z, enum dtype real)
{
    return (struct attention_fwd_args){.q = FRESH(real, 4, 1, z.b, z.s, z.h, z.d),
                                       .k = FRESH(real, 4, 2, z.b, z.skv, z.g, z.d),
                                       .v = FRESH(real, 4, 3, z.b, z.skv, z.g, z.dv),
                                       .o = FRESH(real, 4, 4, z.b, z.s, z.h, z.dv),
                                       .lse = FRESH(real, 3, 5, z.b, z.h, z.s),
                                       .scale = 0.3};
}

static void free_forward(struct attention_fwd_args *a)
{
    free(a->q.data);
    free(a->k.data);
    free(a->v.data);
    free(a->o.data);
    free(a->lse.data);
}

static int forward(struct bed *b, const struct attention_fwd_args *args)
{
    struct attention_fwd_args a = *args;
    struct dev *dev = &b->dev[a.q.dtype == DT_F32];
    struct lane l = {.dev = dev, .err = &b->e};
    const struct ops *ops = ops_for(dev);
    int64_t need = ops->attention_fwd_work ? ops->attention_fwd_work(&a) : 0;
    a.work = FRESH(DT_U8, 1, 0, need);
    int st = ops->attention_fwd(&l, &a);
    free(a.work.data);
    return st;
}

static int backward(struct bed *b, const struct attention_bwd_args *args)
{
    struct attention_bwd_args a = *args;
    struct dev *dev = &b->dev[a.q.dtype == DT_F32];
    struct lane l = {.dev = dev, .err = &b->e};
    const struct ops *ops = ops_for(dev);
    int64_t need = ops->attention_bwd_work ? ops->attention_bwd_work(&a) : 0;
    a.work = FRESH(DT_U8, 1, 0, need);
    int st = ops->attention_bwd(&l, &a);
    free(a.work.data);
    return st;
}

static void assert_near(const struct tensor *got, const struct tensor *want, double tolerance)
{
    assert_true(tensor_elems(got) == tensor_elems(want));
    for (int64_t i = 0; i < tensor_elems(got); i++) {
        double g = tensor_get(got, i), w = tensor_get(want, i);
        if (g != w && !(fabs(g - w) <= tolerance * (1 + fabs(w))))
            fail_msg("element %lld is %.9g, expected %.9g", (long long)i, g, w);
    }
}

static void assert_same(const struct tensor *a, const struct tensor *b) { assert_near(a, b, 0); }

static const enum dtype types[] = {DT_F64, DT_F32};

/* ---- values ---------------------------------------------------------------------------------- */

static void equal_scores_give_the_mean_of_the_visible_values(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    for (int t = 0; t < 2; t++)
        for (int64_t window = 0; window <= 40; window += 40) {
            struct attention_fwd_args a = make_forward((struct sizes){1, 150, 150, 1, 1, 8, 1}, types[t]);
            a.window = window;
            for (int64_t i = 0; i < 150; i++) {
                tensor_set(&a.v, i, (double)i);
                for (int64_t c = 0; c < 8; c++)
                    tensor_set(&a.q, i * 8 + c, 0);
            }
            assert_ok(forward(&b, &a), &b.e);
            for (int64_t i = 0; i < 150; i++) {
                int64_t first = window > 0 && i >= window ? i - window + 1 : 0;
                assert_true(fabs(tensor_get(&a.o, i) - (double)(first + i) / 2) < 1e-4);
                assert_true(fabs(tensor_get(&a.lse, i) - log((double)(i - first + 1))) < 1e-6);
            }
            free_forward(&a);
        }
    close_bed(&b);
}

static void a_sink_takes_its_share(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    for (int t = 0; t < 2; t++) {
        struct attention_fwd_args a = make_forward((struct sizes){2, 70, 70, 3, 1, 16, 2}, types[t]);
        for (int64_t i = 0; i < tensor_elems(&a.v); i++)
            tensor_set(&a.v, i, 1);
        assert_ok(forward(&b, &a), &b.e);
        struct tensor plain = a.lse;
        a.lse = FRESH(types[t], 3, 5, 2, 3, 70);
        a.sink = FRESH(types[t], 1, 9, 3);
        assert_ok(forward(&b, &a), &b.e);
        for (int64_t i = 0; i < tensor_elems(&plain); i++) {
            int64_t batch = i / 210, head = i / 70 % 3, row = i % 70;
            double keys = exp(tensor_get(&plain, i)), sink = exp(tensor_get(&a.sink, head));
            double got = tensor_get(&a.o, ((batch * 70 + row) * 3 + head) * 2 + 1);
            assert_true(fabs(got - keys / (keys + sink)) < 1e-5);
            assert_true(fabs(tensor_get(&a.lse, i) - log(keys + sink)) < 1e-5);
        }
        /* Off by one is a sink of 0. */
        struct attention_fwd_args zero = make_forward((struct sizes){2, 70, 70, 3, 1, 16, 2}, types[t]);
        for (int i = 0; i < 3; i++)
            tensor_set(&a.sink, i, 0);
        assert_ok(forward(&b, &a), &b.e);
        memcpy(zero.v.data, a.v.data, (size_t)tensor_bytes(&a.v));
        zero.sink_zero = true;
        assert_ok(forward(&b, &zero), &b.e);
        assert_same(&zero.o, &a.o);
        assert_same(&zero.lse, &a.lse);
        free(a.sink.data);
        free(plain.data);
        free_forward(&zero);
        free_forward(&a);
    }
    close_bed(&b);
}

static void a_window_of_one_copies_and_a_wide_one_changes_nothing(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    for (int t = 0; t < 2; t++) {
        struct sizes z = {1, 129, 129, 2, 2, 12, 7};
        struct attention_fwd_args a = make_forward(z, types[t]), w = make_forward(z, types[t]);
        assert_ok(forward(&b, &a), &b.e);
        w.window = 129;
        assert_ok(forward(&b, &w), &b.e);
        assert_same(&w.o, &a.o);
        w.window = INT32_MAX;
        assert_ok(forward(&b, &w), &b.e);
        assert_same(&w.o, &a.o);
        w.window = 1;
        assert_ok(forward(&b, &w), &b.e);
        assert_near(&w.o, &w.v, 1e-7);
        free_forward(&a);
        free_forward(&w);
    }
    close_bed(&b);
}

static void packed_documents_equal_separate_ones(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    enum { FIRST = 71, SECOND = 66, ALL = FIRST + SECOND };
    for (int t = 0; t < 2; t++) {
        struct attention_fwd_args all = make_forward((struct sizes){1, ALL, ALL, 2, 1, 16, 16}, types[t]);
        int32_t doc[ALL];
        for (int i = 0; i < ALL; i++)
            doc[i] = i < FIRST ? 0 : FIRST;
        all.doc_start = tensor_2d(doc, DT_I32, 1, ALL);
        assert_ok(forward(&b, &all), &b.e);
        struct attention_fwd_args one = make_forward((struct sizes){1, SECOND, SECOND, 2, 1, 16, 16}, types[t]);
        size_t size = dtype_bytes(types[t]);
        memcpy(one.q.data, (char *)all.q.data + FIRST * 32 * size, SECOND * 32 * size);
        memcpy(one.k.data, (char *)all.k.data + FIRST * 16 * size, SECOND * 16 * size);
        memcpy(one.v.data, (char *)all.v.data + FIRST * 16 * size, SECOND * 16 * size);
        assert_ok(forward(&b, &one), &b.e);
        struct tensor tail = tensor_4d((char *)all.o.data + FIRST * 32 * size, types[t], 1, SECOND, 2, 16);
        assert_near(&tail, &one.o, t == 0 ? 0 : 1e-6);
        free_forward(&all);
        free_forward(&one);
    }
    close_bed(&b);
}

static void grouped_heads_equal_repeated_keys_and_sum_their_gradients(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    enum { H = 6, G = 2, S = 67, D = 16 };
    for (int t = 0; t < 2; t++) {
        struct attention_fwd_args f[2] = {make_forward((struct sizes){1, S, S, H, G, D, D}, types[t]),
                                          make_forward((struct sizes){1, S, S, H, H, D, D}, types[t])};
        struct tensor dk[2], dv[2];
        for (int64_t j = 0; j < S; j++)
            for (int64_t h = 0; h < H; h++)
                for (int64_t c = 0; c < D; c++) {
                    int64_t from = (j * G + h / (H / G)) * D + c, to = (j * H + h) * D + c;
                    tensor_set(&f[1].k, to, tensor_get(&f[0].k, from));
                    tensor_set(&f[1].v, to, tensor_get(&f[0].v, from));
                }
        for (int i = 0; i < 2; i++) {
            assert_ok(forward(&b, &f[i]), &b.e);
            int64_t g = i == 0 ? G : H;
            dk[i] = FRESH(types[t], 4, 6, 1, S, g, D);
            dv[i] = FRESH(types[t], 4, 7, 1, S, g, D);
            struct attention_bwd_args r = {.d_o = FRESH(types[t], 4, 8, 1, S, H, D),
                                           .q = f[i].q,
                                           .k = f[i].k,
                                           .v = f[i].v,
                                           .o = f[i].o,
                                           .lse = f[i].lse,
                                           .dq = FRESH(types[t], 4, 9, 1, S, H, D),
                                           .dk = dk[i],
                                           .dv = dv[i],
                                           .scale = 0.3};
            assert_ok(backward(&b, &r), &b.e);
            free(r.d_o.data);
            free(r.dq.data);
        }
        assert_same(&f[0].o, &f[1].o);
        for (int64_t i = 0; i < S * G * D; i++) {
            double sum_k = 0, sum_v = 0;
            for (int64_t h = 0; h < H / G; h++) {
                int64_t at = (i / (G * D) * H + i / D % G * (H / G) + h) * D + i % D;
                sum_k += tensor_get(&dk[1], at);
                sum_v += tensor_get(&dv[1], at);
            }
            assert_true(fabs(sum_k - tensor_get(&dk[0], i)) < (t ? 1e-5 : 1e-13));
            assert_true(fabs(sum_v - tensor_get(&dv[0], i)) < (t ? 1e-5 : 1e-13));
        }
        for (int i = 0; i < 2; i++) {
            free(dk[i].data);
            free(dv[i].data);
            free_forward(&f[i]);
        }
    }
    close_bed(&b);
}

/* ---- parts of a sequence --------------------------------------------------------------------- */

static struct tensor rows_from(struct tensor t, int64_t first, int64_t n)
{
    t.data = (char *)t.data + first * t.stride[1] * (int64_t)dtype_bytes(t.dtype);
    t.dim[1] = n;
    return t;
}

/* Documents of 13 tokens. */
static struct tensor documents(int64_t batch, int64_t seq)
{
    struct tensor t = FRESH(DT_I32, 2, 0, batch, seq);
    for (int64_t i = 0; i < batch * seq; i++)
        ((int32_t *)t.data)[i] = (int32_t)(i % seq / 13 * 13);
    return t;
}

static void fill_zero(const struct tensor *t) { memset(t->data, 0, (size_t)tensor_bytes(t)); }

/* What a rank of parallel.cp does: its queries against the keys up to its last one; gradients of keys add up. */
static void chunks_of_queries_equal_the_whole(struct bed *bed, enum dtype type, bool docs)
{
    enum { B = 2, S = 60, H = 4, G = 2, D = 8, C = 3, N = S / C };
    struct sizes z = {B, S, S, H, G, D, D};
    int64_t info[4] = {3, 5, 0, 0};
    struct attention_fwd_args a = make_forward(z, type);
    a.sink = FRESH(type, 1, 8, H);
    a.doc_start = docs ? documents(B, S) : (struct tensor){0};
    a.window = 25;
    a.drop = (struct dropout_rule){.p = 0.2, .key = 77, .info = tensor_1d(info, DT_I64, 4)};
    assert_ok(forward(bed, &a), &bed->e);
    struct tensor dout = FRESH(type, 4, 9, B, S, H, D), dq = FRESH(type, 4, 10, B, S, H, D),
                  dk = FRESH(type, 4, 11, B, S, G, D), dv = FRESH(type, 4, 12, B, S, G, D),
                  dsink = FRESH(type, 1, 13, H), o = FRESH(type, 4, 14, B, S, H, D),
                  dq_of = FRESH(type, 4, 15, B, S, H, D), dk_sum = FRESH(type, 4, 16, B, S, G, D),
                  dv_sum = FRESH(type, 4, 17, B, S, G, D), dk_part = FRESH(type, 4, 18, B, S, G, D),
                  dv_part = FRESH(type, 4, 19, B, S, G, D), dsink_sum = FRESH(type, 1, 20, H);
    struct attention_bwd_args g = {.d_o = dout,
                                   .q = a.q,
                                   .k = a.k,
                                   .v = a.v,
                                   .o = a.o,
                                   .lse = a.lse,
                                   .sink = a.sink,
                                   .doc_start = a.doc_start,
                                   .dq = dq,
                                   .dk = dk,
                                   .dv = dv,
                                   .dsink = dsink,
                                   .scale = a.scale,
                                   .window = a.window,
                                   .drop = a.drop};
    assert_ok(backward(bed, &g), &bed->e);
    fill_zero(&dk_sum);
    fill_zero(&dv_sum);
    for (int64_t r = 0; r < C; r++) {
        struct attention_fwd_args p = a;
        info[2] = r * N;
        p.q = rows_from(a.q, r * N, N);
        p.k = rows_from(a.k, 0, (r + 1) * N);
        p.v = rows_from(a.v, 0, (r + 1) * N);
        p.o = rows_from(o, r * N, N);
        p.lse = FRESH(type, 3, 5, B, H, N);
        if (docs)
            p.doc_start = rows_from(a.doc_start, r * N, N);
        assert_ok(forward(bed, &p), &bed->e);
        struct attention_bwd_args h = g;
        h.d_o = rows_from(dout, r * N, N);
        h.q = p.q, h.k = p.k, h.v = p.v, h.o = p.o, h.lse = p.lse, h.doc_start = p.doc_start;
        h.dq = rows_from(dq_of, r * N, N);
        h.dk = rows_from(dk_part, 0, (r + 1) * N);
        h.dv = rows_from(dv_part, 0, (r + 1) * N);
        h.dsink = dsink_sum;
        h.acc_dsink = r > 0;
        fill_zero(&dk_part);
        fill_zero(&dv_part);
        assert_ok(backward(bed, &h), &bed->e);
        for (int64_t i = 0; i < tensor_elems(&dk_sum); i++) {
            tensor_set(&dk_sum, i, tensor_get(&dk_sum, i) + tensor_get(&dk_part, i));
            tensor_set(&dv_sum, i, tensor_get(&dv_sum, i) + tensor_get(&dv_part, i));
        }
        free(p.lse.data);
    }
    double near = type == DT_F64 ? 1e-13 : 2e-5;
    assert_near(&o, &a.o, near);
    assert_near(&dq_of, &dq, near);
    assert_near(&dk_sum, &dk, near);
    assert_near(&dv_sum, &dv, near);
    assert_near(&dsink_sum, &dsink, near);
    struct tensor *all[] = {&dout,   &dq,     &dk,      &dv,      &dsink,     &o,     &dq_of,
                            &dk_sum, &dv_sum, &dk_part, &dv_part, &dsink_sum, &a.sink};
    for (int i = 0; i < countof(all); i++)
        free(all[i]->data);
    free(a.doc_start.data);
    free_forward(&a);
}

static void parts_of_a_sequence_give_the_rows_and_gradients_of_the_whole(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    for (int t = 0; t < 2; t++) {
        chunks_of_queries_equal_the_whole(&b, types[t], false);
        chunks_of_queries_equal_the_whole(&b, types[t], true);
    }
    close_bed(&b);
}

static void rows_without_keys_give_zero(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    for (int t = 0; t < 2; t++)
        for (int64_t s = 2; s <= 80; s += 78) {
            struct attention_fwd_args a = make_forward((struct sizes){1, s, s, 1, 1, 4, 4}, types[t]);
            int64_t start = -1;
            a.start = tensor_1d(&start, DT_I64, 1);
            assert_ok(forward(&b, &a), &b.e);
            for (int64_t c = 0; c < 4; c++) {
                assert_true(tensor_get(&a.o, c) == 0);
                assert_true(fabs(tensor_get(&a.o, 4 + c) - tensor_get(&a.v, c)) < 1e-7);
            }
            assert_true(isinf(tensor_get(&a.lse, 0)) && tensor_get(&a.lse, 0) < 0);
            a.sink = FRESH(types[t], 1, 9, 1);
            assert_ok(forward(&b, &a), &b.e);
            assert_true(tensor_get(&a.o, 0) == 0 && tensor_get(&a.lse, 0) == tensor_get(&a.sink, 0));
            start = INT64_MIN;
            assert_ok(forward(&b, &a), &b.e);
            assert_true(tensor_get(&a.o, tensor_elems(&a.o) - 1) == 0);
            free(a.sink.data);
            free_forward(&a);
        }
    close_bed(&b);
}

static void huge_scores_stay_finite(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    for (int64_t s = 3; s <= 100; s += 97) {
        struct attention_fwd_args a = make_forward((struct sizes){1, s, s, 1, 1, 8, 8}, DT_F32);
        struct attention_fwd_args r = make_forward((struct sizes){1, s, s, 1, 1, 8, 8}, DT_F64);
        a.scale = r.scale = 1e4;
        assert_ok(forward(&b, &a), &b.e);
        assert_ok(forward(&b, &r), &b.e);
        assert_near(&a.o, &r.o, 1e-3);
        free_forward(&a);
        free_forward(&r);
    }
    close_bed(&b);
}

/* ---- decoding -------------------------------------------------------------------------------- */

/* Feed the rows of `all` in pieces through a cache whose unwritten part is NaN. */
static void decode(struct bed *b, const struct attention_fwd_args *all, int64_t prefill, int64_t cache,
                   double tolerance)
{
    int64_t s = all->q.dim[1], h = all->q.dim[2], g = all->k.dim[2], d = all->q.dim[3], dv = all->v.dim[3];
    enum dtype real = all->q.dtype;
    size_t size = dtype_bytes(real);
    struct tensor k = FRESH(real, 4, 2, 1, cache, g, d), v = FRESH(real, 4, 3, 1, cache, g, dv);
    memset(k.data, 0xFF, (size_t)tensor_bytes(&k));
    memset(v.data, 0xFF, (size_t)tensor_bytes(&v));
    for (int64_t at = 0, n; at < s; at += n) {
        n = at == 0 ? prefill : 1;
        memcpy((char *)k.data + (size_t)(at * g * d) * size, (char *)all->k.data + (size_t)(at * g * d) * size,
               (size_t)(n * g * d) * size);
        memcpy((char *)v.data + (size_t)(at * g * dv) * size, (char *)all->v.data + (size_t)(at * g * dv) * size,
               (size_t)(n * g * dv) * size);
        struct attention_fwd_args a = *all;
        a.q = tensor_4d((char *)all->q.data + (size_t)(at * h * d) * size, real, 1, n, h, d);
        a.k = k;
        a.v = v;
        a.start = tensor_1d(&at, DT_I64, 1);
        if (present(&a.doc_start))
            a.doc_start = tensor_2d((int32_t *)all->doc_start.data + at, DT_I32, 1, n);
        a.o = FRESH(real, 4, 4, 1, n, h, dv);
        a.lse = FRESH(real, 3, 5, 1, h, n);
        assert_ok(forward(b, &a), &b->e);
        struct tensor want = tensor_4d((char *)all->o.data + (size_t)(at * h * dv) * size, real, 1, n, h, dv);
        assert_near(&a.o, &want, tolerance);
        for (int64_t i = 0; i < h * n; i++) {
            double got = tensor_get(&a.lse, i), full = tensor_get(&all->lse, i / n * s + at + i % n);
            assert_true(fabs(got - full) <= tolerance);
        }
        free(a.o.data);
        free(a.lse.data);
    }
    free(k.data);
    free(v.data);
}

static void cached_decoding_equals_the_full_pass(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    enum { S = 90 };
    int32_t doc[S];
    for (int i = 0; i < S; i++)
        doc[i] = i < 30 ? 0 : 30;
    for (int t = 0; t < 2; t++)
        for (int option = 0; option < 4; option++) {
            struct attention_fwd_args a = make_forward((struct sizes){1, S, S, 4, 2, 16, 8}, types[t]);
            a.window = option == 1 ? 20 : 0;
            a.sink_zero = option == 3;
            if (option == 2) {
                a.doc_start = tensor_2d(doc, DT_I32, 1, S);
                a.sink = FRESH(types[t], 1, 9, 4);
            }
            assert_ok(forward(&b, &a), &b.e);
            decode(&b, &a, 1, 128, t == 0 ? 0 : 2e-6); /* on ref: bit for bit */
            decode(&b, &a, 70, 95, t == 0 ? 0 : 2e-6);
            free(a.sink.data);
            free_forward(&a);
        }
    close_bed(&b);
}

/* ---- views, threads, instruction sets -------------------------------------------------------- */

enum { FB = 2, FS = 100, FH = 6, FG = 2, FD = 16, FROW = (FH + 2 * FG) * FD + 5 };

/* q, k and v as parts of one row [q heads | k heads | v heads | 5 of something else]. */
static void split(const struct tensor *fused, struct tensor *q, struct tensor *k, struct tensor *v)
{
    struct tensor part = tensor_cols(fused, 0, FH * FD);
    *q = tensor_split_last(&part, FH, FD);
    part = tensor_cols(fused, FH * FD, FG * FD);
    *k = tensor_split_last(&part, FG, FD);
    part = tensor_cols(fused, (FH + FG) * FD, FG * FD);
    *v = tensor_split_last(&part, FG, FD);
}

static struct tensor dense_copy(const struct tensor *view)
{
    struct tensor t = fresh(view->dtype, view->rank, view->dim, 0);
    for (int64_t i = 0; i < tensor_elems(&t); i++)
        tensor_set(&t, i, tensor_get(view, i));
    return t;
}

static void views_of_a_fused_buffer_give_the_same_bits_as_dense_tensors(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    for (int t = 0; t < 2; t++) {
        struct tensor fused = FRESH(types[t], 3, 1, FB, FS, FROW), grads = FRESH(types[t], 3, 2, FB, FS, FROW);
        struct tensor before = dense_copy(&grads), o = FRESH(types[t], 4, 4, FB, FS, FH, FD);
        struct tensor lse = FRESH(types[t], 3, 5, FB, FH, FS), dout = FRESH(types[t], 4, 6, FB, FS, FH, FD);
        struct attention_fwd_args f = {.o = o, .lse = lse, .scale = 0.25, .window = 50};
        split(&fused, &f.q, &f.k, &f.v);
        assert_ok(forward(&b, &f), &b.e);
        struct attention_bwd_args r = {
            .d_o = dout, .q = f.q, .k = f.k, .v = f.v, .o = o, .lse = lse, .scale = 0.25, .window = 50};
        split(&grads, &r.dq, &r.dk, &r.dv);
        assert_ok(backward(&b, &r), &b.e);

        struct attention_fwd_args df = f;
        df.q = dense_copy(&f.q);
        df.k = dense_copy(&f.k);
        df.v = dense_copy(&f.v);
        df.o = FRESH(types[t], 4, 7, FB, FS, FH, FD);
        df.lse = FRESH(types[t], 3, 8, FB, FH, FS);
        assert_ok(forward(&b, &df), &b.e);
        assert_same(&df.o, &o);
        assert_same(&df.lse, &lse);
        struct attention_bwd_args dr = r;
        dr.q = df.q;
        dr.k = df.k;
        dr.v = df.v;
        dr.dq = dense_copy(&r.dq);
        dr.dk = dense_copy(&r.dk);
        dr.dv = dense_copy(&r.dv);
        assert_ok(backward(&b, &dr), &b.e);
        assert_same(&dr.dq, &r.dq);
        assert_same(&dr.dk, &r.dk);
        assert_same(&dr.dv, &r.dv);
        for (int64_t row = 0; row < FB * FS; row++) /* what lies beside them is left alone */
            for (int64_t c = FROW - 5; c < FROW; c++)
                assert_true(tensor_get(&grads, row * FROW + c) == tensor_get(&before, row * FROW + c));
        struct tensor *all[] = {&fused, &grads, &before, &dout, &dr.dq, &dr.dk, &dr.dv, &o, &lse};
        for (int i = 0; i < countof(all); i++)
            free(all[i]->data);
        free_forward(&df);
    }
    close_bed(&b);
}

/* Few kv heads and many threads take another road through the backward: by key block, then by query
 * block. It must end in the same bits. */
static void many_threads_and_few_heads_give_the_same_bits(void **state)
{
    (void)state;
    struct err e = {0};
    const struct op_desc *d = op_find("attention_bwd");
    static const struct op_sample samples[] = {{"b=1 s=300 h=3 g=1 d=24 dv=40"},
                                               {"b=2 s=130 skv=200 h=2 g=2 d=16 window=70"},
                                               {"b=1 s=0 skv=70 h=1 g=1"},
                                               {"b=1 s=90 skv=40 h=1 g=1 no_doc_start=1"}};
    for (int s = 0; s < countof(samples); s++) {
        struct op_call c[2];
        struct op_block memory[2];
        for (int i = 0; i < 2; i++) {
            struct dev dev;
            assert_ok(dev_open(&dev, DEV_CPU, i == 0 ? 1 : 8, &e), &e);
            struct lane lane = {.dev = &dev, .err = &e};
            assert_ok(op_call_sample(&c[i], d, &samples[s], ops_for(&dev), &e), &e);
            assert_ok(op_call_alloc(&c[i], &memory[i], 3, false, &e), &e);
            assert_ok(op_call_run(ops_for(&dev), &lane, &c[i]), &e);
            dev_close(&dev);
        }
        static const char *const outputs[] = {"dq", "dk", "dv", "dsink"};
        for (int i = 0; i < countof(outputs); i++) {
            int arg = op_arg_index(d, outputs[i]);
            assert_same(&c[1].t[arg], &c[0].t[arg]);
        }
        op_call_free(&memory[0]);
        op_call_free(&memory[1]);
    }
}

extern const struct ops ops_cpu_base;
#if defined(__x86_64__)
extern const struct ops ops_cpu_avx2, ops_cpu_avx512;
#endif

static void check_table(const struct ops *ops, const char *name, const char *isa)
{
    struct err e = {0};
    struct dev dev = {.kind = DEV_CPU, .real = DT_F32}, ref = {.kind = DEV_REF, .real = DT_F64};
    struct lane fast_lane = {.dev = &dev, .err = &e}, ref_lane = {.dev = &ref, .err = &e};
    const struct op_desc *d = op_find(name);
    for (int s = 0; s < d->n_samples; s++) {
        struct op_call fast, slow;
        struct op_block fm, sm;
        assert_ok(op_call_sample(&fast, d, &d->samples[s], ops, &e), &e);
        assert_ok(op_call_sample(&slow, d, &d->samples[s], &ops_ref, &e), &e);
        assert_ok(op_call_alloc(&fast, &fm, 5, op_sample_flag(&d->samples[s], "strided"), &e), &e);
        assert_ok(op_call_alloc(&slow, &sm, 5, false, &e), &e);
        assert_ok(op_call_run(ops, &fast_lane, &fast), &e);
        assert_ok(op_call_run(&ops_ref, &ref_lane, &slow), &e);
        assert_true(op_guards_intact(&fast, &fm));
        for (int i = 0; i < d->n_args; i++) {
            if ((d->args[i].role != ARG_OUT && d->args[i].role != ARG_OOUT) || fast.t[i].data == NULL)
                continue;
            double worst = 0, largest = 1e-6;
            for (int64_t k = 0; k < tensor_elems(&fast.t[i]); k++) {
                double w = tensor_get(&slow.t[i], k), g = tensor_get(&fast.t[i], k);
                largest = fmax(largest, fabs(w));
                worst = g == w ? worst : fmax(worst, isnan(g - w) ? HUGE_VAL : fabs(g - w));
            }
            if (worst > d->tolerance * largest)
                fail_msg("%s (%s) '%s': %s is off by %g of %g", name, isa, d->samples[s].text, d->args[i].name, worst,
                         largest);
        }
        op_call_free(&fm);
        op_call_free(&sm);
    }
}

static void every_instruction_set_agrees_with_the_reference(void **state)
{
    (void)state;
    omp_set_num_threads(2);
    static const char *const names[] = {"attention_fwd", "attention_bwd", "rope_fwd", "rope_bwd"};
    for (int i = 0; i < countof(names); i++) {
        check_table(&ops_cpu_base, names[i], "base");
#if defined(__x86_64__)
        const char *best = cpu_isa();
        if (strcmp(best, "base") != 0)
            check_table(&ops_cpu_avx2, names[i], "avx2");
        if (strcmp(best, "avx512") == 0)
            check_table(&ops_cpu_avx512, names[i], "avx512");
#endif
    }
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    for (int t = 0; t < 2; t++) {
        struct attention_fwd_args good = make_forward((struct sizes){1, 7, 9, 4, 2, 8, 8}, types[t]), a = good;
        a.k.dim[2] = a.v.dim[2] = 3;
        assert_fails(forward(&b, &a), ST_INVALID, &b.e, "4 query heads cannot share 3 kv heads");
        a = good;
        a.k.dim[2] = a.v.dim[2] = 0;
        assert_fails(forward(&b, &a), ST_INVALID, &b.e, "0 kv heads");
        a = good;
        a.k.dim[3] = 7;
        assert_fails(forward(&b, &a), ST_INVALID, &b.e, "tensor k");
        a = good;
        a.window = -1;
        assert_fails(forward(&b, &a), ST_INVALID, &b.e, "window is -1");
        a.window = INT64_MAX;
        assert_fails(forward(&b, &a), ST_INVALID, &b.e, "window is 9223372036854775807");
        a = good;
        a.sink = FRESH(types[t], 1, 1, 4);
        a.sink_zero = true;
        assert_fails(forward(&b, &a), ST_INVALID, &b.e, "exclude each other");
        free(a.sink.data);
        a = good;
        int64_t start = 4;
        a.start = tensor_1d(&start, DT_I64, 1);
        assert_fails(forward(&b, &a), ST_INVALID, &b.e, "start 4 + 7 queries is beyond the 9 keys");
        start = INT64_MAX;
        assert_fails(forward(&b, &a), ST_INVALID, &b.e, "beyond the 9 keys");
        a = good;
        a.v.stride[3] = 2;
        assert_fails(forward(&b, &a), ST_INVALID, &b.e, "strided last dimension");
        a = good;
        a.lse.data = NULL;
        assert_fails(forward(&b, &a), ST_INVALID, &b.e, "lse is missing");
        struct attention_bwd_args r = {.d_o = good.o,
                                       .q = good.q,
                                       .k = good.k,
                                       .v = good.v,
                                       .o = good.o,
                                       .lse = good.lse,
                                       .dq = good.q,
                                       .dk = good.k,
                                       .dv = good.v};
        r.dk.dim[1] = 8;
        assert_fails(backward(&b, &r), ST_INVALID, &b.e, "tensor dk");
        r.dk = good.k;
        r.sink = tensor_1d(good.o.data, types[t], 4);
        assert_fails(backward(&b, &r), ST_INVALID, &b.e, "dsink is missing");
        if (t == 1) {
            struct lane l = {.dev = &b.dev[1], .err = &b.e};
            assert_fails(ops_for(&b.dev[1])->attention_fwd(&l, &good), ST_INVALID, &b.e, "work has 0 bytes");
        }
        free_forward(&good);
    }
    close_bed(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_scores_give_the_mean_of_the_visible_values),
        cmocka_unit_test(a_sink_takes_its_share),
        cmocka_unit_test(a_window_of_one_copies_and_a_wide_one_changes_nothing),
        cmocka_unit_test(packed_documents_equal_separate_ones),
        cmocka_unit_test(grouped_heads_equal_repeated_keys_and_sum_their_gradients),
        cmocka_unit_test(parts_of_a_sequence_give_the_rows_and_gradients_of_the_whole),
        cmocka_unit_test(rows_without_keys_give_zero),
        cmocka_unit_test(huge_scores_stay_finite),
        cmocka_unit_test(cached_decoding_equals_the_full_pass),
        cmocka_unit_test(views_of_a_fused_buffer_give_the_same_bits_as_dense_tensors),
        cmocka_unit_test(many_threads_and_few_heads_give_the_same_bits),
        cmocka_unit_test(every_instruction_set_agrees_with_the_reference),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
