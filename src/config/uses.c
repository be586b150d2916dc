/* What reads an option: which kinds of layers, and which other options must be on. An option that the user set and that
 * nobody reads is reported (config_unused); one that a layer ought to read and cannot is refused (config_refused).
 *
 * The rows of a layer kind are in its definition (kind/kind.h); those here do not depend on layers. An option without a
 * row always counts. tests/train/test_uses.c walks all options over all kinds and compares what the rows say with what
 * the model does. */
#include "config/config_int.h"

#include <string.h>

/* ---- conditions ------------------------------------------------------------------------------ */

/* A pattern that is given has its own number of layers and of depths; the same number beside it is no contradiction. */
static bool layers_read(const struct config *c)
{
    enum config_source s = config_source_of(c, "model.pattern").source;
    int64_t layers = 0, units = 0; /* units: a group counts once, as Megatron's layer does */
    bool inside = false;
    for (const char *p = c->model.pattern; *p != '\0' && *p != '/'; p++) {
        layers += strchr("[]|", *p) == NULL;
        units += *p == '[' || (strchr("[]|", *p) == NULL && !inside);
        inside = *p == '[' || (*p != ']' && inside);
    }
    return s == CFG_FROM_DEFAULT || s == CFG_FROM_AUTO || layers == c->model.layers || units == c->model.layers;
}

static bool depths_read(const struct config *c)
{
    int64_t depths = 0;
    for (const char *p = c->model.pattern; *p != '\0'; p++)
        depths += *p == '/';
    return depths == c->model.mtp_layers;
}

static bool has_depths(const struct config *c)
{
    const char *depth = strchr(c->model.pattern, '/');
    return depth != NULL && strspn(depth, "/") < strlen(depth);
}
static bool adapts(const struct config *c) { return c->lora.rank > 0; }
static bool decays(const struct config *c) { return c->train.schedule != CFG_SCHEDULE_CONSTANT; }
static bool skips(const struct config *c) { return c->train.nonfinite == CFG_NONFINITE_SKIP; }
static bool has_dir(const struct config *c) { return c->run.dir[0] != '\0'; }
static bool saves_often(const struct config *c) { return has_dir(c) && c->run.save_every > 0; }
static bool has_vocabulary(const struct config *c) { return strcmp(c->data.tokenizer, "bytes") != 0; }
static bool talks(const struct config *c) { return c->data.chat[0] != '\0'; }
static bool ends_documents(const struct config *c) { return has_vocabulary(c) && c->data.eod; }
static bool traces(const struct config *c) { return c->plan.trace[0] != '\0'; }
static bool offloads(const struct config *c) { return c->plan.offload[0] != '\0'; }
static bool on_gpu(const struct config *c) { return c->run.device == CFG_DEVICE_CUDA; }
static bool in_fp8(const struct config *c) { return c->gpu.precision == CFG_PRECISION_FP8; }
static bool reads_precision(const struct config *c) { return on_gpu(c) || in_fp8(c); }
static bool narrow_layers(const struct config *c) { return on_gpu(c) && c->gpu.precision != CFG_PRECISION_FP32; }
static bool loops(const struct config *c) { return c->parallel.comm == CFG_COMM_LOOP; }
static bool rows_overlap(const struct config *c)
{
    bool travel = c->parallel.tp > 1 || (loops(c) && c->parallel.loop_axis == CFG_LOOP_TP);
    return c->parallel.overlap == CFG_OVERLAP_TP && travel;
}
static bool virtual_stages(const struct config *c) { return c->parallel.pp > 1; }

/* ---- the table ------------------------------------------------------------------------------- */

/* clang-format off */
static const struct option_use general_uses[] = {
    {"model.layers", layers_read, "a pattern made from it: model.pattern has its own number of layers"},
    {"model.mtp_layers", depths_read, "model.mtp_pattern: model.pattern has its own number of depths"},
    {"model.mtp_scale", has_depths, "multi-token prediction (/ in model.pattern)"},
    {"model.fp32_residual", narrow_layers,
     "run.device = cuda with gpu.precision = bf16 or fp8; elsewhere the residual stream is fp32 or wider already"},
    {"train.min_lr", decays, "a train.schedule that decays"},
    {"train.decay_steps", decays, "a train.schedule that decays"},
    {"train.nonfinite_limit", skips, "train.nonfinite = skip"},
    {"data.token_pattern", has_vocabulary, "data.tokenizer to name a file"},
    {"data.token_special", has_vocabulary, "data.tokenizer to name a file"},
    {"data.loss_roles", talks, "data.chat"},
    {"data.eod_token", ends_documents, "data.tokenizer to name a file, and data.eod = on"},
    {"run.keep", has_dir, "run.dir"},
    {"run.async_save", saves_often, "run.dir and run.save_every"},
    {"run.save_ranks", has_dir, "run.dir"},
    {"plan.graphs", on_gpu, "run.device = cuda"},
    {"plan.trace_steps", traces, "plan.trace"},
    {"plan.offload_min", offloads, "plan.offload"},
    {"gpu.precision", reads_precision, "run.device = cuda, or the value fp8"},
    {"gpu.fp8_recipe", in_fp8, "gpu.precision = fp8"},
    {"gpu.fp8_grad", in_fp8, "gpu.precision = fp8"},
    {"gpu.fp8_keep", in_fp8, "gpu.precision = fp8"},
    {"gpu.portable", on_gpu, "run.device = cuda"},
    {"gpu.fast", on_gpu, "run.device = cuda"},
    {"gpu.gemm_table", on_gpu, "run.device = cuda"},
    {"gpu.index", on_gpu, "run.device = cuda"},
    {"gpu.sms", on_gpu, "run.device = cuda"},
    {"lora.alpha", adapts, "lora.rank above 0"},
    {"lora.targets", adapts, "lora.rank above 0"},
    {"parallel.first_layers", virtual_stages, "parallel.pp above 1"},
    {"parallel.last_layers", virtual_stages, "parallel.pp above 1"},
    {"parallel.pp_group", virtual_stages, "parallel.pp above 1"},
    {"parallel.overlap", rows_overlap, "parallel.tp above 1 with the value tp, or experts with parallel.ep above 1"},
    {"parallel.loop_gbps", loops, "parallel.comm = loop"},
    {"parallel.loop_us", loops, "parallel.comm = loop"},
    {"parallel.loop_ranks", loops, "parallel.comm = loop"},
    {"parallel.loop_axis", loops, "parallel.comm = loop"},
};
/* clang-format on */

/* ---- asking it ------------------------------------------------------------------------------- */

/* Row k of those that name an option, and whose it is: cores first, then joints, then this file's. */
struct use_row {
    const struct option_use *use;
    const struct core_kind *core; /* NULL: does not depend on layers */
};

static bool find_in(const struct option_use *uses, int n, const char *name, const struct option_use **out)
{
    for (int i = 0; i < n; i++)
        if (strcmp(uses[i].name, name) == 0) {
            *out = &uses[i];
            return true;
        }
    return false;
}

static bool next_row(const char *name, int k, struct use_row *out)
{
    struct kind_at at;
    for (int i = 0; kind_at(i, &at); i++) {
        out->core = at.core;
        if (find_in(at.options->uses, at.options->n_uses, name, &out->use) && k-- == 0)
            return true;
    }
    out->core = NULL;
    return find_in(general_uses, countof(general_uses), name, &out->use) && k == 0;
}

static bool row_applies(const struct config *c, const struct use_row *r)
{
    return r->core == NULL || core_in(r->core, c->model.pattern);
}

/* A number written out that is the automatic one: configs of runs hold those. */
static bool is_automatic_value(const struct config *c, const struct option *o)
{
    struct config other;
    struct err e = {0};
    if (o->automatic == NULL || config_init(&other, &e) != ST_OK)
        return false;
    struct buf text;
    buf_init(&text, 0);
    int st = ST_OK;
    for (int i = 0; i < config_n_options && st == ST_OK; i++) {
        buf_clear(&text);
        option_text(c, &config_options[i], &text);
        st = option_set(&other, &config_options[i], text.text ? text.text : "", c->origin[i], &e);
    }
    if (st == ST_OK)
        st = option_set(&other, o, "0", (struct config_origin){.source = CFG_FROM_DEFAULT}, &e);
    if (st == ST_OK)
        derive_values(&other);
    bool same = st == ST_OK && option_equal(c, &other, o);
    buf_release(&text);
    config_release(&other);
    return same;
}

/* Somebody gave it a value of its own; fresh holds the defaults. */
static bool is_set(const struct config *c, const struct config *fresh, const struct option *o)
{
    enum config_source s = c->origin[option_index(o)].source;
    return s != CFG_FROM_DEFAULT && s != CFG_FROM_AUTO && !option_equal(c, fresh, o) && !is_automatic_value(c, o);
}

/* The user did, not a checkpoint, whose author was told. */
static bool set_by_user(const struct config *c, const struct config *fresh, const struct option *o)
{
    return c->origin[option_index(o)].source != CFG_FROM_CHECKPOINT && is_set(c, fresh, o);
}

/* "attention (*), MLP (-) or experts (E)": the kinds that read an option. */
static void add_readers(struct buf *out, const char *name)
{
    struct use_row r, more;
    for (int k = 0; next_row(name, k, &r); k++)
        buf_addf(out, "%s%s (%c)",
                 k == 0                         ? ""
                 : next_row(name, k + 1, &more) ? ", "
                                                : " or ",
                 r.core->title, r.core->symbol);
}

static void describe(const struct config *c, const struct option *o, struct buf *out)
{
    char from[320];
    struct use_row r;
    buf_addf(out, "%s = ", o->name);
    option_text(c, o, out);
    buf_addf(out, " (%s) has no effect: ", config_source_text(c, o->name, from, sizeof from));
    for (int k = 0; next_row(o->name, k, &r); k++)
        if (row_applies(c, &r)) {
            buf_addf(out, "it needs %s\n", r.use->needs);
            return;
        }
    buf_addf(out, "model.pattern %.200s has no ", c->model.pattern);
    add_readers(out, o->name);
    buf_add(out, " layer\n");
}

bool config_reads(const struct config *c, const char *name)
{
    struct use_row r;
    int k = 0;
    for (; next_row(name, k, &r); k++)
        if (row_applies(c, &r) && (r.use->read == NULL || r.use->read(c)))
            return true;
    return k == 0;
}

int config_unused(const struct config *c, struct buf *out)
{
    int n = 0;
    struct config fresh;
    struct err e = {0};
    if (config_init(&fresh, &e) != ST_OK)
        return 0;
    for (int i = 0; i < config_n_options; i++) {
        const struct option *o = &config_options[i];
        if (config_reads(c, o->name) || !set_by_user(c, &fresh, o))
            continue;
        describe(c, o, out);
        n++;
    }
    config_release(&fresh);
    return n;
}

int config_given(const struct config *c, const char *globs, struct buf *out)
{
    int n = 0;
    for (int i = 0; i < config_n_options; i++) {
        const char *name = config_options[i].name;
        if (config_source_of(c, name).source != CFG_FROM_COMMAND || !config_globs_match(globs, name))
            continue;
        buf_addf(out, "%s\n", name);
        n++;
    }
    return n;
}

static int refuse(const struct config *c, const struct option *o, const struct core_kind *k, struct err *e)
{
    struct buf text;
    char from[320];
    buf_init(&text, 0);
    option_text(c, o, &text);
    err_set(e, ST_USAGE, "%s (%c) cannot do what %s = %.100s says (%s; model.pattern = %.200s)", k->title, k->symbol,
            o->name, text.text ? text.text : "", config_source_text(c, o->name, from, sizeof from), c->model.pattern);
    buf_release(&text);
    return err_hint(e, "leave %s out, or use other layers", o->name);
}

int config_refused(const struct config *c, struct err *e)
{
    struct config fresh = {0};
    struct kind_at at;
    int st = ST_OK;
    for (int i = 0; st == ST_OK && kind_at(i, &at); i++) {
        const char *const *name = at.options->refused;
        if (name[0] == NULL || at.core == NULL || !core_in(at.core, c->model.pattern))
            continue;
        if (fresh.origin == NULL)
            st = config_init(&fresh, e);
        for (int k = 0; st == ST_OK && k < KIND_MAX_REFUSED && name[k] != NULL; k++)
            if (is_set(c, &fresh, option_find(name[k])))
                st = refuse(c, option_find(name[k]), at.core, e);
    }
    config_release(&fresh);
    return st;
}
