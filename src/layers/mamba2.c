/* The Mamba-2 core, symbol 'M'.
 *
 * Shapes: T = batch * seq rows, H heads of P channels, I = H P inner width, G groups, N state size.
 *   zxbcdt [T, 2I + 2GN + H] = h Win^T             sections [z | x | B | C | dt]
 *   xbc    [T, I + 2GN]      = silu(conv(x | B | C) + bias), each channel by itself
 *   y      [T, I]            = state-space core of x, B, C, dt with A_log, dt_bias, D (ops/ssd)
 *   n      [T, I]            = RMSNorm(y * silu(z)) * w over each group, or over the whole width
 *   f      [T, hidden]       = n Wout^T
 * mixer_int.h has all but the state-space core. */
#include "layers/mixer_int.h"
#include "ops/ssd/ssd.h"

#include <math.h>
#include <string.h>

struct mamba {
    struct mixer m;
    int64_t dim, groups, state;
    int64_t b_at, c_at, dt_at; /* first columns: of B and C in xbc, of dt in zxbcdt */
    double dt_min, dt_max;
};

/* A literal in Megatron and Mamba-2, whatever the model's other norms use. */
static const double norm_eps = 1e-5;

static void rule_fwd(struct build *b, int n, const struct mixer *m, const struct mixer_decl *d,
                     const struct mixer_slots *s)
{
    struct graph *g = b->g;
    const struct mamba *r = (const struct mamba *)m;
    struct tensor xbc = of(g, s->mixed);
    GRAPH_OP(g, n, PH_FWD, ssd_fwd, .x = mixer_heads(m, xbc, 0, m->heads, r->dim),
             .Bm = mixer_heads(m, xbc, r->b_at, r->groups, r->state),
             .Cm = mixer_heads(m, xbc, r->c_at, r->groups, r->state),
             .dt = mixer_cols(m, of(g, s->in), r->dt_at, m->heads), .A_log = of(g, d->a_log.w),
             .dt_bias = of(g, d->dt_bias.w), .D = of(g, d->d.w), .doc_start = mixer_docs(b),
             .start = of(g, b->in.start), .init = of(g, s->state.init), .final = of(g, s->state.final),
             .states = of(g, s->states), .y = mixer_heads(m, of(g, s->y), 0, m->heads, r->dim), .chunk = m->chunk,
             .dt_min = r->dt_min, .dt_max = r->dt_max);
}

static void rule_bwd(struct build *b, int n, const struct mixer *m, const struct mixer_decl *d,
                     const struct mixer_slots *s)
{
    struct graph *g = b->g;
    const struct mamba *r = (const struct mamba *)m;
    struct tensor xbc = of(g, s->mixed), dxbc = of(g, s->dmixed);
    GRAPH_OP(g, n, PH_BWD, ssd_bwd, .dy = mixer_heads(m, of(g, s->dy), 0, m->heads, r->dim),
             .x = mixer_heads(m, xbc, 0, m->heads, r->dim), .dt = mixer_cols(m, of(g, s->in), r->dt_at, m->heads),
             .A_log = of(g, d->a_log.w), .dt_bias = of(g, d->dt_bias.w), .D = of(g, d->d.w),
             .Bm = mixer_heads(m, xbc, r->b_at, r->groups, r->state),
             .Cm = mixer_heads(m, xbc, r->c_at, r->groups, r->state), .doc_start = mixer_docs(b),
             .states = of(g, s->states), .dfinal = of(g, s->state.dfinal), .dinit = of(g, s->state.dinit),
             .dx = mixer_heads(m, dxbc, 0, m->heads, r->dim), .ddt = mixer_drest(g, m, s, r->dt_at, m->heads),
             .dA_log = of(g, d->a_log.dw), .ddt_bias = of(g, d->dt_bias.dw), .dD = of(g, d->d.dw),
             .dBm = mixer_heads(m, dxbc, r->b_at, r->groups, r->state),
             .dCm = mixer_heads(m, dxbc, r->c_at, r->groups, r->state), .chunk = m->chunk, .dt_min = r->dt_min,
             .dt_max = r->dt_max);
}

/* Sizes on one of so many ranks that share heads and groups. */
static void sizes(const struct build *b, struct mamba *s, int64_t ranks)
{
    const struct config_model *c = &b->cfg->model;
    int64_t heads = c->mamba_heads / ranks, groups = c->mamba_groups / ranks, inner = heads * c->mamba_head_dim,
            gn = groups * c->mamba_state;
    *s = (struct mamba){.m = {.batch = b->batch,
                              .seq = b->seq,
                              .heads = heads,
                              .inner = inner,
                              .conv = c->mamba_conv,
                              .chunk = c->mamba_chunk,
                              .mixed = inner + 2 * gn,
                              .mixed_at = inner,
                              .z_at = 0,
                              .width = 2 * inner + 2 * gn + heads,
                              .state_rows = c->mamba_state,
                              .state_cols = c->mamba_head_dim,
                              .norm_group = c->mamba_norm == CFG_MAMBA_NORM_WHOLE ? inner : inner / max_i64(groups, 1),
                              .norm_eps = norm_eps,
                              .rule_fwd = rule_fwd,
                              .rule_bwd = rule_bwd},
                        .dim = c->mamba_head_dim,
                        .groups = groups,
                        .state = c->mamba_state,
                        .b_at = inner,
                        .c_at = inner + gn,
                        .dt_at = 2 * inner + 2 * gn,
                        .dt_min = c->mamba_dt_min,
                        .dt_max = c->mamba_dt_max};
}

/* Sections x, B, C; of the projection in also z in front of them and dt behind them. */
static void split_channels(const struct build *b, const struct mixer *m, struct param *p, bool projection)
{
    const struct config_model *c = &b->cfg->model;
    if (projection)
        param_split_section(p, 0, m->inner, UNIT_HEADS, m->heads);
    param_split_section(p, 0, m->inner, UNIT_HEADS, m->heads);
    param_split_section(p, 0, c->mamba_groups * c->mamba_state, UNIT_GROUPS, c->mamba_groups);
    param_split_section(p, 0, c->mamba_groups * c->mamba_state, UNIT_GROUPS, c->mamba_groups);
    if (projection)
        param_split_section(p, 0, m->heads, UNIT_HEADS, m->heads);
}

static void declare_params(struct build *b, const struct mixer *m, struct mixer_decl *decl)
{
    const struct config_model *c = &b->cfg->model;
    struct param in = param_matrix("mixer.in_proj.weight", m->width, c->hidden, c->init_std);
    struct param out = param_matrix("mixer.out_proj.weight", c->hidden, m->inner, output_std(b));
    struct param conv_w = conv_param("mixer.conv1d.weight", m);
    struct param conv_b = param_vector("mixer.conv1d.bias", m->mixed, INIT_UNIFORM);
    struct param dt_bias = param_vector("mixer.dt_bias", m->heads, INIT_DT_BIAS);
    struct param a_log = param_vector("mixer.A_log", m->heads, INIT_LOG_UNIFORM);
    struct param d = param_vector("mixer.D", m->heads, INIT_ONE),
                 norm = param_vector("mixer.norm.weight", m->inner, INIT_ONE);
    conv_b.init_a = conv_w.init_a;
    conv_b.init_b = conv_w.init_b;
    dt_bias.init_a = 0.001;
    dt_bias.init_b = 0.1;
    a_log.init_a = 1;
    a_log.init_b = 16;
    struct param *by_head[] = {&dt_bias, &a_log, &d, &norm};
    for (int i = 0; i < countof(by_head); i++)
        param_split(by_head[i], 0, UNIT_HEADS, m->heads);
    param_split(&out, 1, UNIT_HEADS, m->heads);
    split_channels(b, m, &in, true);
    split_channels(b, m, &conv_w, false);
    split_channels(b, m, &conv_b, false);
    decl->w_in = build_linear_weight(b, &in);
    decl->conv_w = build_weight(b, &conv_w);
    decl->conv_b = build_weight(b, &conv_b);
    decl->dt_bias = build_weight(b, &dt_bias);
    decl->a_log = build_weight(b, &a_log);
    decl->d = build_weight(b, &d);
    decl->norm = build_weight(b, &norm);
    decl->w_out = build_linear_weight(b, &out);
}

/* What the chunked form needs per row, counted truthfully: causal halves of C B^T and of its
 * product with x, and the state in and out. The "model FLOPs" of model_flops_per_token follow
 * Megatron's formula instead. */
static double ssd_flops(const struct build *b, const struct mamba *s)
{
    double q = (double)min_i64(s->m.chunk, b->seq), inner = (double)s->m.inner, n = (double)s->state;
    return (double)b->rows * (q * (double)s->groups * n + q * inner + 4 * inner * n);
}

static int mamba_declare(struct build *b, struct core_io *io)
{
    struct mamba whole, rule, *s = &rule;
    sizes(b, &whole, 1);
    sizes(b, s, b->mesh->tp);
    struct mixer_decl d = {.in = "zxbcdt",
                           .mixed = "xbc",
                           .y = "y",
                           .state = "ssm_state",
                           .rule = "ssd",
                           .fwd_flops = ssd_flops(b, s),
                           .bwd_flops = 2.2 * ssd_flops(b, s)};
    graph_scope(b->g, b->layer, "mamba");
    declare_params(b, &whole.m, &d);
    return mixer_declare(b, &s->m, &d, io);
}

/* ---- options --------------------------------------------------------------------------------- */

static bool several_groups(const struct config *c) { return c->model.mamba_groups > 1; }

static bool has_mamba(const struct config *c) { return strchr(c->model.pattern, 'M') != NULL; }
static bool mamba_heads_missing(const struct config *c) { return has_mamba(c) && c->model.mamba_heads == 0; }

/* Its mean square would be one over all ranks. */
static bool whole_norm_divided(const struct config *c)
{
    return has_mamba(c) && c->parallel.tp > 1 && c->model.mamba_norm == CFG_MAMBA_NORM_WHOLE;
}

static bool mamba_groups_do_not_divide(const struct config *c)
{
    return has_mamba(c) && c->model.mamba_heads % c->model.mamba_groups != 0;
}

static bool mamba_parts_too_short(const struct config *c)
{
    return has_mamba(c) && c->parallel.cp > 1 && c->train.seq / c->parallel.cp < c->model.mamba_conv - 1;
}

static bool mamba_steps_crossed(const struct config *c)
{
    return c->model.mamba_dt_max > 0 && c->model.mamba_dt_min > c->model.mamba_dt_max;
}

/* clang-format off */
static const struct option_use mamba_uses[] = {
    {"model.mamba_heads", NULL, NULL},
    {"model.mamba_head_dim", NULL, NULL},
    {"model.mamba_state", NULL, NULL},
    {"model.mamba_groups", NULL, NULL},
    {"model.mamba_conv", NULL, NULL},
    {"model.mamba_chunk", NULL, NULL},
    {"model.mamba_dt_min", NULL, NULL},
    {"model.mamba_dt_max", NULL, NULL},
    {"model.mamba_norm", several_groups, "model.mamba_groups above 1"},
};
static const struct rule mamba_rules[] = {
    {"mamba-heads-fit", mamba_heads_missing,
     "2 * model.hidden must be a multiple of model.mamba_head_dim unless model.mamba_heads is set",
     {"model.hidden", "model.mamba_head_dim", "model.mamba_heads"}},
    {"mamba-groups-divide-heads", mamba_groups_do_not_divide,
     "model.mamba_heads must be a multiple of model.mamba_groups",
     {"model.mamba_heads", "model.mamba_groups", "model.hidden", "model.mamba_head_dim"}},
    {"mamba-parts-hold-the-taps", mamba_parts_too_short,
     "each rank of parallel.cp takes the last model.mamba_conv - 1 rows of the one before it, so train.seq / "
     "parallel.cp "
     "must be that many at least",
     {"train.seq", "parallel.cp", "model.mamba_conv"}},
    {"mamba-norm-by-group-under-tp", whole_norm_divided,
     "model.mamba_norm = whole takes one norm over all heads, which parallel.tp divides; use parallel.tp = 1",
     {"model.mamba_norm", "parallel.tp"}},
    {"mamba-steps-ordered", mamba_steps_crossed,
     "model.mamba_dt_min must not be above model.mamba_dt_max",
     {"model.mamba_dt_min", "model.mamba_dt_max"}},
};
static const struct tiny_size mamba_tiny[] = {
    {"model.mamba_heads", 4, true}, {"model.mamba_head_dim", 8, false}, {"model.mamba_state", 6, false},
    {"model.mamba_groups", 2, true},
    {"model.mamba_chunk", 8, false},
};
/* clang-format on */

/* In, scan, out: Megatron's formula, which fixes inner at 2 d even when heads are set; here it is the layer's own. The
 * truthful count of the scan is chunk (groups state + inner) + 4 inner state, plus the convolution. */
static double mamba_flops(const struct config *cfg, int64_t seq)
{
    (void)seq;
    const struct config_model *c = &cfg->model;
    double d = (double)c->hidden, inner = (double)(c->mamba_heads * c->mamba_head_dim),
           bc = (double)(c->mamba_groups * c->mamba_state);
    return 2 * d * (2 * inner + 2 * bc + (double)c->mamba_heads) + 7 * inner * (double)c->mamba_state + 2 * inner * d;
}

static const struct key_split mamba_splits[] = {
    {"mixer.in_proj.weight", {"z", "x", "B", "C", "dt"}},
    {"mixer.in_proj.bias", {"z", "x", "B", "C", "dt"}},
    {"mixer.conv1d.weight", {"x", "B", "C"}},
    {"mixer.conv1d.bias", {"x", "B", "C"}},
};

static void mamba_part_rows(const struct config *c, const struct key_split *s, int64_t rows[KEY_MAX_PARTS])
{
    const struct config_model *m = &c->model;
    int64_t inner = m->mamba_heads * m->mamba_head_dim, state = m->mamba_groups * m->mamba_state;
    for (int k = 0; k < KEY_MAX_PARTS && s->parts[k] != NULL; k++) {
        const char *part = s->parts[k];
        rows[k] = strcmp(part, "dt") == 0                            ? m->mamba_heads
                  : strcmp(part, "B") == 0 || strcmp(part, "C") == 0 ? state
                                                                     : inner;
    }
}

/* The largest is a chunk's state. */
static struct kind_sizes mamba_sizes(const struct config *c)
{
    const struct config_model *m = &c->model;
    double width = (double)m->mamba_heads * (double)m->mamba_head_dim;
    return (struct kind_sizes){.token = width * fmax((double)m->mamba_state / (double)m->mamba_chunk, 1),
                               .weight = width * (double)m->hidden};
}

const struct core_kind core_mamba2 = {
    .symbol = 'M',
    .name = "mamba2",
    .title = "Mamba-2",
    .norm_key = "mixer.in_proj.layer_norm_weight",
    .options = {KIND_ROWS(uses, mamba_uses), KIND_ROWS(rules, mamba_rules), KIND_ROWS(tiny, mamba_tiny)},
    .keys = {.family = "Mamba",
             .place = KEY_PLACE_ALONE,
             .mixes = true,
             .optional = true,
             .prefixes = {"mixer."},
             KIND_ROWS(splits, mamba_splits),
             .part_rows = mamba_part_rows},
    .divides_sequence = true,
    .divides_weights = true,
    .fills = true,
    .flops = mamba_flops,
    .sizes = mamba_sizes,
    .declare = mamba_declare,
};
