/* Scans over tensors whose rows lie beyond 2^31 elements: Mamba-2 and gated delta net, forward and
 * backward, give the bits they give on dense tensors. A 32-bit index anywhere in them would read
 * and write elsewhere. The rows are 2^26 elements apart in address space that is only reserved, so
 * gigabytes are spanned and kilobytes are used. */
#include "ops/gdn/gdn.h"
#include "ops/ssd/ssd.h"
#include "support.h"

#include "ops/ops.h"

#include <sys/mman.h>

enum { B = 2, S = 40, H = 4, G = 2, N = 8, P = 16, CHUNK = 16 };
static const int64_t apart = (int64_t)1 << 26; /* elements between rows: row 32 begins at 2^31 */

struct far {
    struct dev dev;
    struct lane lane;
    const struct ops *ops;
    struct err e;
    bool spread; /* rows of what make_rows makes are far apart */
    void *memory[64];
    size_t bytes[64];
    int n;
};

static void *reserve(struct far *f, size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(p != MAP_FAILED);
    f->memory[f->n] = p;
    f->bytes[f->n++] = bytes;
    return p;
}

/* [B, S, ...]: the same values dense and far apart. */
static struct tensor make(struct far *f, bool rows, int rank, const int64_t *dim, uint64_t key)
{
    struct tensor t = tensor_shape(f->dev.real, rank, dim);
    int64_t span = tensor_elems(&t) + 1;
    if (rows && f->spread) {
        t.stride[1] = apart;
        t.stride[0] = S * apart;
        span = B * S * apart;
    }
    t.data = reserve(f, (size_t)span * dtype_bytes(t.dtype));
    for (int64_t i = 0; key > 0 && i < tensor_elems(&t); i++)
        tensor_set(&t, i, (double)(float)rng_normal(key, (uint64_t)i));
    return t;
}
#define ROWS(key, rank, ...) make(f, true, rank, (const int64_t[]){__VA_ARGS__}, key)
#define DENSE(key, rank, ...) make(f, false, rank, (const int64_t[]){__VA_ARGS__}, key)

static struct tensor work(struct far *f, int64_t bytes)
{
    return tensor_1d(reserve(f, (size_t)bytes + 1), DT_U8, bytes);
}

static void open_far(struct far *f, enum dev_kind kind, bool spread)
{
    memset(f, 0, sizeof *f);
    assert_ok(dev_open(&f->dev, kind, 1, &f->e), &f->e);
    f->lane = (struct lane){.dev = &f->dev, .err = &f->e};
    f->ops = ops_for(&f->dev);
    f->spread = spread;
}

static void close_far(struct far *f)
{
    for (int i = 0; i < f->n; i++)
        munmap(f->memory[i], f->bytes[i]);
    dev_close(&f->dev);
}

static void assert_same(const struct tensor *a, const struct tensor *b, const char *what)
{
    for (int64_t i = 0; i < tensor_elems(a); i++)
        if (tensor_get(a, i) != tensor_get(b, i))
            fail_msg("%s: element %lld is %.9g, dense %.9g", what, (long long)i, tensor_get(a, i), tensor_get(b, i));
}

struct ssd_case {
    struct far f;
    struct ssd_fwd_args a;
    struct ssd_bwd_args b;
};

static void run_ssd(struct ssd_case *c, enum dev_kind kind, bool spread)
{
    struct far *f = &c->f;
    open_far(f, kind, spread);
    c->a = (struct ssd_fwd_args){.x = ROWS(1, 4, B, S, H, P),
                                 .dt = ROWS(2, 3, B, S, H),
                                 .A_log = DENSE(3, 1, H),
                                 .dt_bias = DENSE(4, 1, H),
                                 .D = DENSE(5, 1, H),
                                 .Bm = ROWS(6, 4, B, S, G, N),
                                 .Cm = ROWS(7, 4, B, S, G, N),
                                 .y = ROWS(0, 4, B, S, H, P),
                                 .states = DENSE(0, 5, B, (S + CHUNK - 1) / CHUNK, H, N, P),
                                 .chunk = CHUNK};
    c->a.work = work(f, f->ops->ssd_fwd_work(&c->a));
    assert_ok(f->ops->ssd_fwd(&f->lane, &c->a), &f->e);
    c->b = (struct ssd_bwd_args){.dy = ROWS(8, 4, B, S, H, P),
                                 .x = c->a.x,
                                 .dt = c->a.dt,
                                 .A_log = c->a.A_log,
                                 .dt_bias = c->a.dt_bias,
                                 .D = c->a.D,
                                 .Bm = c->a.Bm,
                                 .Cm = c->a.Cm,
                                 .states = c->a.states,
                                 .dx = ROWS(0, 4, B, S, H, P),
                                 .ddt = ROWS(0, 3, B, S, H),
                                 .dA_log = DENSE(0, 1, H),
                                 .ddt_bias = DENSE(0, 1, H),
                                 .dD = DENSE(0, 1, H),
                                 .dBm = ROWS(0, 4, B, S, G, N),
                                 .dCm = ROWS(0, 4, B, S, G, N),
                                 .chunk = CHUNK};
    c->b.work = work(f, f->ops->ssd_bwd_work(&c->b));
    assert_ok(f->ops->ssd_bwd(&f->lane, &c->b), &f->e);
}

static void mamba_rows_beyond_2_31_elements(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        struct ssd_case dense, far;
        run_ssd(&dense, k == 0 ? DEV_REF : DEV_CPU, false);
        run_ssd(&far, k == 0 ? DEV_REF : DEV_CPU, true);
        assert_same(&far.a.y, &dense.a.y, "y");
        assert_same(&far.b.dx, &dense.b.dx, "dx");
        assert_same(&far.b.ddt, &dense.b.ddt, "ddt");
        assert_same(&far.b.dBm, &dense.b.dBm, "dB");
        assert_same(&far.b.dCm, &dense.b.dCm, "dC");
        assert_same(&far.b.dA_log, &dense.b.dA_log, "dA_log");
        close_far(&dense.f);
        close_far(&far.f);
    }
}

struct gdn_case {
    struct far f;
    struct gdn_fwd_args a;
    struct gdn_bwd_args b;
};

static void run_gdn(struct gdn_case *c, enum dev_kind kind, bool spread)
{
    struct far *f = &c->f;
    open_far(f, kind, spread);
    c->a = (struct gdn_fwd_args){.q = ROWS(1, 4, B, S, G, N),
                                 .k = ROWS(2, 4, B, S, G, N),
                                 .v = ROWS(3, 4, B, S, H, P),
                                 .alpha = ROWS(4, 3, B, S, H),
                                 .beta = ROWS(5, 3, B, S, H),
                                 .A_log = DENSE(6, 1, H),
                                 .dt_bias = DENSE(7, 1, H),
                                 .o = ROWS(0, 4, B, S, H, P),
                                 .states = DENSE(0, 5, B, (S + CHUNK - 1) / CHUNK, H, N, P),
                                 .chunk = CHUNK};
    c->a.work = work(f, f->ops->gdn_fwd_work(&c->a));
    assert_ok(f->ops->gdn_fwd(&f->lane, &c->a), &f->e);
    c->b = (struct gdn_bwd_args){.d_o = ROWS(8, 4, B, S, H, P),
                                 .q = c->a.q,
                                 .k = c->a.k,
                                 .v = c->a.v,
                                 .alpha = c->a.alpha,
                                 .beta = c->a.beta,
                                 .A_log = c->a.A_log,
                                 .dt_bias = c->a.dt_bias,
                                 .states = c->a.states,
                                 .dq = ROWS(0, 4, B, S, G, N),
                                 .dk = ROWS(0, 4, B, S, G, N),
                                 .dv = ROWS(0, 4, B, S, H, P),
                                 .dalpha = ROWS(0, 3, B, S, H),
                                 .dbeta = ROWS(0, 3, B, S, H),
                                 .dA_log = DENSE(0, 1, H),
                                 .ddt_bias = DENSE(0, 1, H),
                                 .chunk = CHUNK};
    c->b.work = work(f, f->ops->gdn_bwd_work(&c->b));
    assert_ok(f->ops->gdn_bwd(&f->lane, &c->b), &f->e);
}

static void gated_delta_net_rows_beyond_2_31_elements(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        struct gdn_case dense, far;
        run_gdn(&dense, k == 0 ? DEV_REF : DEV_CPU, false);
        run_gdn(&far, k == 0 ? DEV_REF : DEV_CPU, true);
        assert_same(&far.a.o, &dense.a.o, "o");
        assert_same(&far.b.dq, &dense.b.dq, "dq");
        assert_same(&far.b.dk, &dense.b.dk, "dk");
        assert_same(&far.b.dv, &dense.b.dv, "dv");
        assert_same(&far.b.dalpha, &dense.b.dalpha, "dalpha");
        assert_same(&far.b.dbeta, &dense.b.dbeta, "dbeta");
        close_far(&dense.f);
        close_far(&far.f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mamba_rows_beyond_2_31_elements),
        cmocka_unit_test(gated_delta_net_rows_beyond_2_31_elements),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
