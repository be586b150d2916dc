/* Scans: ssd (Mamba-2) and the gated delta rule, as calls of ops/ssd and ops/gdn. */
#include "lib/lib_int.h"

#include "ops/gdn/gdn.h"
#include "ops/ssd/ssd.h"

/* ---- ssd ------------------------------------------------------------------------------------- */

struct ssd_sizes {
    int64_t b, s, h, p, g, n, chunks;
};

static int chunk_check(struct call *c, int64_t chunk, int64_t most)
{
    return chunk >= 1 && chunk <= most
               ? ST_OK
               : invalid(c, "argument chunk is %lld, expected 1 to %lld", (long long)chunk, (long long)most);
}

static int ssd_sizes_of(struct call *c, const struct braidk_tensor *x, const struct braidk_tensor *B, int64_t chunk,
                        struct ssd_sizes *s)
{
    TRY(begin(c, "x", x));
    TRY(chunk_check(c, chunk, SSD_MAX_CHUNK));
    if (x->rank != 4 || B->rank != 4)
        return invalid(c, "argument %s must have rank 4", x->rank != 4 ? "x" : "B");
    *s = (struct ssd_sizes){
        x->shape[0], x->shape[1], x->shape[2], x->shape[3], B->shape[2], B->shape[3], ceil_div(x->shape[1], chunk)};
    return s->g > 0 && s->h % s->g == 0 ? ST_OK
                                        : invalid(c, "argument B has %lld groups, which do not divide the %lld heads",
                                                  (long long)s->g, (long long)s->h);
}

/* The inputs that both directions have, and these as fields of their arguments. */
#define SSD_INPUTS(c, a, s)                                                                                            \
    struct tensor x, dt, A_log, dt_bias, D = {0}, B, C, doc_start = {0};                                               \
    TAKE(c, a, x, real_of(c), (s).b, (s).s, (s).h, (s).p);                                                             \
    TAKE(c, a, dt, real_of(c), (s).b, (s).s, (s).h);                                                                   \
    TAKE(c, a, A_log, wide_type(c), (s).h);                                                                            \
    TAKE(c, a, dt_bias, wide_type(c), (s).h);                                                                          \
    TAKE_OPT(c, a, D, wide_type(c), (s).h);                                                                            \
    TAKE(c, a, B, real_of(c), (s).b, (s).s, (s).g, (s).n);                                                             \
    TAKE(c, a, C, real_of(c), (s).b, (s).s, (s).g, (s).n);                                                             \
    TAKE_OPT(c, a, doc_start, DT_I32, (s).b, (s).s)
#define SSD_GIVEN(a)                                                                                                   \
    .x = x, .dt = dt, .A_log = A_log, .dt_bias = dt_bias, .D = D, .Bm = B, .Cm = C, .doc_start = doc_start,            \
    .chunk = (a)->chunk

int lib_ssd(struct call *c, const struct braidk_ssd_args *a)
{
    struct ssd_sizes s;
    struct tensor y, states;
    TRY(ssd_sizes_of(c, &a->x, &a->B, a->chunk, &s));
    SSD_INPUTS(c, a, s);
    TAKE(c, a, y, real_of(c), s.b, s.s, s.h, s.p);
    TAKE(c, a, states, real_of(c), s.b, s.chunks, s.h, s.n, s.p);
    struct ssd_fwd_args f = {SSD_GIVEN(a), .y = y, .states = states};
    RUN(c, ssd_fwd, &f);
    return ST_OK;
}

int lib_ssd_bwd(struct call *c, const struct braidk_ssd_bwd_args *a)
{
    struct ssd_sizes s;
    struct tensor dy, states, dx, ddt, dA_log, ddt_bias, dD = {0}, dB, dC;
    TRY(ssd_sizes_of(c, &a->x, &a->B, a->chunk, &s));
    SSD_INPUTS(c, a, s);
    TAKE(c, a, dy, real_of(c), s.b, s.s, s.h, s.p);
    TAKE(c, a, states, real_of(c), s.b, s.chunks, s.h, s.n, s.p);
    TAKE(c, a, dx, real_of(c), s.b, s.s, s.h, s.p);
    TAKE(c, a, ddt, real_of(c), s.b, s.s, s.h);
    TAKE(c, a, dA_log, wide_type(c), s.h);
    TAKE(c, a, ddt_bias, wide_type(c), s.h);
    if (D.rank > 0)
        TAKE(c, a, dD, wide_type(c), s.h);
    TAKE(c, a, dB, real_of(c), s.b, s.s, s.g, s.n);
    TAKE(c, a, dC, real_of(c), s.b, s.s, s.g, s.n);
    struct ssd_bwd_args b = {SSD_GIVEN(a),         .dy = dy, .states = states, .dx = dx, .ddt = ddt, .dA_log = dA_log,
                             .ddt_bias = ddt_bias, .dD = dD, .dBm = dB,        .dCm = dC};
    RUN(c, ssd_bwd, &b);
    return ST_OK;
}

/* ---- gated delta rule ------------------------------------------------------------------------ */

struct gdn_sizes {
    int64_t b, s, hk, hv, dk, dv, chunks;
};

static int gdn_sizes_of(struct call *c, const struct braidk_tensor *q, const struct braidk_tensor *v, int64_t chunk,
                        struct gdn_sizes *s)
{
    TRY(begin(c, "q", q));
    TRY(chunk_check(c, chunk, GDN_MAX_CHUNK));
    if (q->rank != 4 || v->rank != 4)
        return invalid(c, "argument %s must have rank 4", q->rank != 4 ? "q" : "v");
    *s = (struct gdn_sizes){
        q->shape[0], q->shape[1], q->shape[2], v->shape[2], q->shape[3], v->shape[3], ceil_div(q->shape[1], chunk)};
    return s->hk > 0 && s->hv % s->hk == 0 ? ST_OK
                                           : invalid(c, "argument q has %lld heads, which do not divide the %lld of v",
                                                     (long long)s->hk, (long long)s->hv);
}

#define GDN_INPUTS(c, a, s)                                                                                            \
    struct tensor q, k, v, alpha, beta, A_log, dt_bias, doc_start = {0};                                               \
    TAKE(c, a, q, real_of(c), (s).b, (s).s, (s).hk, (s).dk);                                                           \
    TAKE(c, a, k, real_of(c), (s).b, (s).s, (s).hk, (s).dk);                                                           \
    TAKE(c, a, v, real_of(c), (s).b, (s).s, (s).hv, (s).dv);                                                           \
    TAKE(c, a, alpha, real_of(c), (s).b, (s).s, (s).hv);                                                               \
    TAKE(c, a, beta, real_of(c), (s).b, (s).s, (s).hv);                                                                \
    TAKE(c, a, A_log, wide_type(c), (s).hv);                                                                           \
    TAKE(c, a, dt_bias, wide_type(c), (s).hv);                                                                         \
    TAKE_OPT(c, a, doc_start, DT_I32, (s).b, (s).s)
#define GDN_GIVEN(a)                                                                                                   \
    .q = q, .k = k, .v = v, .alpha = alpha, .beta = beta, .A_log = A_log, .dt_bias = dt_bias, .doc_start = doc_start,  \
    .chunk = (a)->chunk

int lib_gated_delta_rule(struct call *c, const struct braidk_gated_delta_rule_args *a)
{
    struct gdn_sizes s;
    struct tensor o, states;
    TRY(gdn_sizes_of(c, &a->q, &a->v, a->chunk, &s));
    GDN_INPUTS(c, a, s);
    TAKE(c, a, o, real_of(c), s.b, s.s, s.hv, s.dv);
    TAKE(c, a, states, real_of(c), s.b, s.chunks, s.hv, s.dk, s.dv);
    struct gdn_fwd_args f = {GDN_GIVEN(a), .o = o, .states = states};
    RUN(c, gdn_fwd, &f);
    return ST_OK;
}

int lib_gated_delta_rule_bwd(struct call *c, const struct braidk_gated_delta_rule_bwd_args *a)
{
    struct gdn_sizes s;
    struct tensor d_o, states, dq, dk, dv, dalpha, dbeta, dA_log, ddt_bias;
    TRY(gdn_sizes_of(c, &a->q, &a->v, a->chunk, &s));
    GDN_INPUTS(c, a, s);
    TAKE(c, a, d_o, real_of(c), s.b, s.s, s.hv, s.dv);
    TAKE(c, a, states, real_of(c), s.b, s.chunks, s.hv, s.dk, s.dv);
    TAKE(c, a, dq, real_of(c), s.b, s.s, s.hk, s.dk);
    TAKE(c, a, dk, real_of(c), s.b, s.s, s.hk, s.dk);
    TAKE(c, a, dv, real_of(c), s.b, s.s, s.hv, s.dv);
    TAKE(c, a, dalpha, real_of(c), s.b, s.s, s.hv);
    TAKE(c, a, dbeta, real_of(c), s.b, s.s, s.hv);
    TAKE(c, a, dA_log, wide_type(c), s.hv);
    TAKE(c, a, ddt_bias, wide_type(c), s.hv);
    struct gdn_bwd_args b = {GDN_GIVEN(a), .d_o = d_o,       .states = states, .dq = dq,         .dk = dk,
                             .dv = dv,     .dalpha = dalpha, .dbeta = dbeta,   .dA_log = dA_log, .ddt_bias = ddt_bias};
    RUN(c, gdn_bwd, &b);
    return ST_OK;
}
