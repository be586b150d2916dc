/* gdn beyond the descriptor's samples: chunks against the recurrence, texts in pieces, documents,
 * what the delta rule is for, rejected arguments. */
#include "support.h"
#include "ops/gdn/gdn.h"

#include "ops/ops.h"

/* One problem on one device, all tensors dense. */
struct problem {
    struct dev dev;
    struct lane lane;
    const struct ops *ops;
    struct err e;
    int64_t batch, rows, hk, hv, dk, dv, chunk;
    struct gdn_fwd_args f;
    struct gdn_bwd_args b;
    void *owned[64];
    int n_owned;
};

static struct tensor make(struct problem *p, enum dtype type, int rank, const int64_t *dim, uint64_t key)
{
    struct tensor t = tensor_shape(type, rank, dim);
    p->owned[p->n_owned++] = t.data = calloc((size_t)tensor_elems(&t) + 1, dtype_bytes(type));
    assert_non_null(t.data);
    for (int64_t i = 0; key > 0 && i < tensor_elems(&t); i++)
        tensor_set(&t, i, (double)(float)rng_normal(key, (uint64_t)i));
    return t;
}
#define MAKE(key, rank, ...) make(p, p->dev.real, rank, (const int64_t[]){__VA_ARGS__}, key)

/* Sizes are in p already; the same keys give the same values on every device. */
static void open_problem(struct problem *p, enum dev_kind kind)
{
    int64_t b = p->batch, s = p->rows, chunks = ceil_div(p->rows, p->chunk);
    assert_ok(dev_open(&p->dev, kind, 1, &p->e), &p->e);
    p->lane = (struct lane){.dev = &p->dev, .err = &p->e};
    p->ops = ops_for(&p->dev);
    struct gdn_fwd_args *f = &p->f;
    *f = (struct gdn_fwd_args){.q = MAKE(1, 4, b, s, p->hk, p->dk),
                               .k = MAKE(2, 4, b, s, p->hk, p->dk),
                               .v = MAKE(3, 4, b, s, p->hv, p->dv),
                               .alpha = MAKE(4, 3, b, s, p->hv),
                               .beta = MAKE(5, 3, b, s, p->hv),
                               .A_log = MAKE(6, 1, p->hv),
                               .dt_bias = MAKE(7, 1, p->hv),
                               .o = MAKE(0, 4, b, s, p->hv, p->dv),
                               .states = MAKE(0, 5, b, chunks, p->hv, p->dk, p->dv),
                               .chunk = p->chunk};
    for (int64_t h = 0; h < p->hv; h++)
        tensor_set(&f->A_log, h, tensor_get(&f->A_log, h) - 2); /* memories that outlive a chunk */
    f->work = make(p, DT_U8, 1, (const int64_t[]){p->ops->gdn_fwd_work(f)}, 0);
    p->b = (struct gdn_bwd_args){.d_o = MAKE(8, 4, b, s, p->hv, p->dv),
                                 .q = f->q,
                                 .k = f->k,
                                 .v = f->v,
                                 .alpha = f->alpha,
                                 .beta = f->beta,
                                 .A_log = f->A_log,
                                 .dt_bias = f->dt_bias,
                                 .states = f->states,
                                 .dq = MAKE(0, 4, b, s, p->hk, p->dk),
                                 .dk = MAKE(0, 4, b, s, p->hk, p->dk),
                                 .dv = MAKE(0, 4, b, s, p->hv, p->dv),
                                 .dalpha = MAKE(0, 3, b, s, p->hv),
                                 .dbeta = MAKE(0, 3, b, s, p->hv),
                                 .dA_log = MAKE(0, 1, p->hv),
                                 .ddt_bias = MAKE(0, 1, p->hv),
                                 .chunk = p->chunk};
    p->b.work = make(p, DT_U8, 1, (const int64_t[]){p->ops->gdn_bwd_work(&p->b)}, 0);
}

static void close_problem(struct problem *p)
{
    for (int i = 0; i < p->n_owned; i++)
        free(p->owned[i]);
    dev_close(&p->dev);
    *p = (struct problem){0};
}

static void forward(struct problem *p) { assert_ok(p->ops->gdn_fwd(&p->lane, &p->f), &p->e); }
static void backward(struct problem *p) { assert_ok(p->ops->gdn_bwd(&p->lane, &p->b), &p->e); }

static void assert_near(const struct tensor *got, const struct tensor *want, double bound, const char *what)
{
    double top = 0;
    for (int64_t i = 0; i < tensor_elems(want); i++)
        top = fmax(top, fabs(tensor_get(want, i)));
    for (int64_t i = 0; i < tensor_elems(want); i++)
        if (!(fabs(tensor_get(got, i) - tensor_get(want, i)) <= bound * top))
            fail_msg("%s[%d] is %g, not %g", what, (int)i, tensor_get(got, i), tensor_get(want, i));
}

static void chunks_of_any_length_are_the_recurrence(void **state)
{
    (void)state;
    static const int64_t chunks[] = {1, 2, 15, 16, 17, 64, 77, 1000}, repeats[] = {1, 2, 4};
    for (int r = 0; r < countof(repeats); r++)
        for (int c = 0; c < countof(chunks); c++) {
            struct problem ref = {.batch = 2, .rows = 77, .hk = 2, .dk = 20, .dv = 18, .chunk = chunks[c]}, cpu;
            ref.hv = ref.hk * repeats[r];
            cpu = ref;
            open_problem(&ref, DEV_REF);
            open_problem(&cpu, DEV_CPU);
            forward(&ref);
            forward(&cpu);
            assert_near(&cpu.f.o, &ref.f.o, 3e-6, "o");
            backward(&ref);
            backward(&cpu);
            assert_near(&cpu.b.dq, &ref.b.dq, 1e-5, "dq");
            assert_near(&cpu.b.dk, &ref.b.dk, 1e-5, "dk");
            assert_near(&cpu.b.dv, &ref.b.dv, 1e-5, "dv");
            assert_near(&cpu.b.dalpha, &ref.b.dalpha, 1e-5, "dalpha");
            assert_near(&cpu.b.dbeta, &ref.b.dbeta, 1e-5, "dbeta");
            assert_near(&cpu.b.dA_log, &ref.b.dA_log, 1e-5, "dA_log");
            assert_near(&cpu.b.ddt_bias, &ref.b.ddt_bias, 1e-5, "ddt_bias");
            close_problem(&ref);
            close_problem(&cpu);
        }
}

/* Rows [first, first + n) of a tensor [B, S, ..]. */
static struct tensor part(const struct tensor *t, int64_t first, int64_t n)
{
    struct tensor out = *t;
    out.dim[1] = n;
    out.data = (char *)t->data + (size_t)(first * t->stride[1]) * dtype_bytes(t->dtype);
    return out;
}

static void text_in_pieces_is_the_text(enum dev_kind kind, double bound)
{
    static const int64_t pieces[] = {1, 1, 2, 5, 40, 3, 1, 24}; /* by rows and by chunks */
    struct problem whole = {.batch = 2, .rows = 77, .hk = 1, .hv = 2, .dk = 9, .dv = 7, .chunk = 16}, *p = &whole;
    open_problem(p, kind);
    forward(p);
    struct tensor want = p->f.o, o = MAKE(0, 4, 2, 77, 2, 7), s = MAKE(9, 4, 2, 2, 9, 7); /* garbage: start is 0 */
    int64_t at = 0;
    for (int i = 0; i < countof(pieces); i++) {
        int64_t n = pieces[i];
        struct gdn_fwd_args a = p->f;
        a.q = part(&p->f.q, at, n);
        a.k = part(&p->f.k, at, n);
        a.v = part(&p->f.v, at, n);
        a.alpha = part(&p->f.alpha, at, n);
        a.beta = part(&p->f.beta, at, n);
        a.o = part(&o, at, n);
        a.states = (struct tensor){0};
        a.init = a.final = s;
        a.start = tensor_1d(&at, DT_I64, 1);
        assert_ok(p->ops->gdn_fwd(&p->lane, &a), &p->e);
        at += n;
    }
    assert_int_equal(at, 77);
    assert_near(&o, &want, bound, "o");
    close_problem(p);
}

static void a_text_in_pieces_is_the_text(void **state)
{
    (void)state;
    text_in_pieces_is_the_text(DEV_REF, 0);
    text_in_pieces_is_the_text(DEV_CPU, 3e-6);
}

/* A document that begins at row 33 gets the outputs and gradients it would get alone, and the rows
 * before it do not feel it. */
static void documents_do_not_see_each_other(void **state)
{
    (void)state;
    enum { ROWS = 70, FIRST = 33 };
    static int32_t doc[ROWS];
    for (int i = 0; i < ROWS; i++)
        doc[i] = i < FIRST ? 0 : FIRST;
    for (int kind = DEV_REF; kind <= DEV_CPU; kind++)
        for (int half = 0; half < 2; half++) {
            int64_t first = half ? FIRST : 0, n = half ? ROWS - FIRST : FIRST;
            struct problem both = {.batch = 1, .rows = ROWS, .hk = 1, .hv = 2, .dk = 16, .dv = 12, .chunk = 16},
                           alone = both;
            alone.rows = n;
            open_problem(&both, (enum dev_kind)kind);
            open_problem(&alone, (enum dev_kind)kind);
            both.f.doc_start = both.b.doc_start = tensor_2d(doc, DT_I32, 1, ROWS);
            alone.f.q = alone.b.q = part(&both.f.q, first, n);
            alone.f.k = alone.b.k = part(&both.f.k, first, n);
            alone.f.v = alone.b.v = part(&both.f.v, first, n);
            alone.f.alpha = alone.b.alpha = part(&both.f.alpha, first, n);
            alone.f.beta = alone.b.beta = part(&both.f.beta, first, n);
            alone.b.d_o = part(&both.b.d_o, first, n);
            forward(&both);
            forward(&alone);
            backward(&both);
            backward(&alone);
            struct tensor got[] = {both.f.o, both.b.dq, both.b.dk, both.b.dv, both.b.dalpha, both.b.dbeta};
            struct tensor want[] = {alone.f.o, alone.b.dq, alone.b.dk, alone.b.dv, alone.b.dalpha, alone.b.dbeta};
            for (int i = 0; i < countof(got); i++) {
                struct tensor here = part(&got[i], first, n);
                assert_near(&here, &want[i], kind == DEV_REF ? 1e-12 : 1e-5, "a document alone");
            }
            close_problem(&both);
            close_problem(&alone);
        }
}

/* Without decay and with beta near 1 the rule is a memory: reading with a key gives the value last
 * written with it, whatever was written before with that key or an orthogonal one. */
static void the_last_value_of_a_key_is_recalled(void **state)
{
    (void)state;
    static const int keys[] = {0, 1, 0, 2, 1, 0, 3, 3, 2, 1};
    for (int kind = DEV_REF; kind <= DEV_CPU; kind++) {
        struct problem p = {.batch = 1, .rows = countof(keys), .hk = 1, .hv = 1, .dk = 4, .dv = 3, .chunk = 64};
        open_problem(&p, (enum dev_kind)kind);
        tensor_set(&p.f.A_log, 0, -60);
        for (int t = 0; t < countof(keys); t++) {
            tensor_set(&p.f.beta, t, 40);
            for (int c = 0; c < 4; c++) {
                tensor_set(&p.f.k, 4 * t + c, c == keys[t] ? 1000 : 0);     /* length does not matter */
                tensor_set(&p.f.q, 4 * t + c, c == keys[t / 2] ? 3000 : 0); /* asks for an older key */
            }
        }
        forward(&p);
        for (int t = 0; t < countof(keys); t++) {
            int last = t;
            while (keys[last] != keys[t / 2])
                last--;
            for (int c = 0; c < 3; c++) {
                double want = tensor_get(&p.f.v, 3 * last + c) / 2; /* times dk^-1/2 */
                assert_true(fabs(tensor_get(&p.f.o, 3 * t + c) - want) < 1e-5);
            }
        }
        close_problem(&p);
    }
}

static void wrong_arguments_are_named(void **state)
{
    (void)state;
    struct problem p = {.batch = 1, .rows = 5, .hk = 2, .hv = 4, .dk = 4, .dv = 3, .chunk = 64};
    open_problem(&p, DEV_CPU);
    struct gdn_fwd_args a = p.f;
    a.chunk = 0;
    assert_fails(p.ops->gdn_fwd(&p.lane, &a), ST_INVALID, &p.e, "gdn_fwd: chunk is 0, expected 1 to");
    a = p.f;
    a.k.dim[2] = a.q.dim[2] = 3;
    assert_fails(p.ops->gdn_fwd(&p.lane, &a), ST_INVALID, &p.e, "4 value heads are no multiple of 3 key heads");
    a = p.f;
    a.beta.dim[2] = 3;
    assert_fails(p.ops->gdn_fwd(&p.lane, &a), ST_INVALID, &p.e, "beta");
    a = p.f;
    a.work.dim[0] -= 1;
    assert_fails(p.ops->gdn_fwd(&p.lane, &a), ST_INVALID, &p.e, "work");
    struct gdn_bwd_args b = p.b;
    b.states = (struct tensor){0};
    assert_fails(p.ops->gdn_bwd(&p.lane, &b), ST_INVALID, &p.e, "states");
    close_problem(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_of_any_length_are_the_recurrence),
        cmocka_unit_test(a_text_in_pieces_is_the_text),
        cmocka_unit_test(documents_do_not_see_each_other),
        cmocka_unit_test(the_last_value_of_a_key_is_recalled),
        cmocka_unit_test(wrong_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
