/* train/: what can be combined with hyper-connections, two things at a time.
 *
 * Every model here has residual streams. The features below are combined so that each pair of them is in at least one
 * model (a cell); each cell is trained for a few steps, with the recompute policy it names and without, and the two
 * must agree bit for bit: losses, parameters, optimizer state. Pairs that are refused are named, with the reason, and
 * must be refused. docs/COMPAT.md is this table; the test says when it is out of date.
 *
 *   test_matrix                          train every cell, compare, compare the table with docs/COMPAT.md
 *   test_matrix --write docs/COMPAT.md   the same, and write the table
 *   test_matrix --pair NAME NAME         print the options of the model that holds both features, and train nothing */
#include "run.h"

enum axis {
    CORE,
    GROUP,
    MTP,
    SHARED,
    DROPOUT,
    BIAS,
    HEAD,
    ACCUMULATE,
    ROUTER,
    GLU,
    PROFILE,
    STREAMS,
    RECOMPUTE,
    OFFLOAD,
    AXES
};

struct feature {
    enum axis axis;
    const char *code, *name, *options; /* options: as on the command line; for CORE the symbol, for MTP the depths */
    bool plain;                        /* the absence of a feature: not in the table */
};
static const struct feature features[] = {
    {CORE, "`*`", "attention", "*", false},
    {CORE, "`M`", "Mamba-2", "M", false},
    {CORE, "`G`", "gated delta net", "G", false},
    {CORE, "`+`", "latent attention", "+", false},
    {CORE, "`D`", "sparse attention", "D", false},
    {CORE, "`C`", "compressed sparse attention", "C", false},
    {CORE, "`H`", "heavily compressed attention", "H", false},
    {CORE, "`W`", "sliding window attention", "W", false},
    {CORE, "`-`", "MLP", "-", false},
    {CORE, "`E`", "mixture of experts", "E", false},
    {GROUP, "flat", "no groups", "", true},
    {GROUP, "[ ]", "groups", "", false},
    {MTP, "mtp0", "no prediction depths", "0", true},
    {MTP, "mtp1", "one MTP depth", "1", false},
    {MTP, "mtp2", "two MTP depths", "2", false},
    {SHARED, "sh0", "no shared expert", "", true},
    {SHARED, "sh", "shared expert", "model.shared_ffn=8", false},
    {SHARED, "shg", "gated shared expert", "model.shared_ffn=8 model.shared_gate=on", false},
    {DROPOUT, "dr0", "no dropout", "", true},
    {DROPOUT, "drop", "dropout", "model.dropout=0.1", false},
    {BIAS, "b0", "no biases", "", true},
    {BIAS, "bias", "biases, experts' too", "model.bias=on model.expert_bias=on", false},
    {HEAD, "tied", "tied head", "model.tied=on", false},
    {HEAD, "own", "head of its own", "model.tied=off", false},
    {ACCUMULATE, "acc0", "one microbatch", "", true},
    {ACCUMULATE, "acc", "accumulation over 2 microbatches", "train.global_batch=2", false},
    {ROUTER, "soft", "router: softmax of the chosen", "", false},
    {ROUTER, "pre", "router: softmax before the choice", "model.router_pre_softmax=on", false},
    {ROUTER, "sig", "router: sigmoid", "model.router_score=sigmoid model.router_scale=2.5", false},
    {ROUTER, "sqsp", "router: sqrtsoftplus", "model.router_score=sqrtsoftplus", false},
    {ROUTER, "rbias", "router: balancing bias", "model.router_score=sigmoid model.router_bias=on", false},
    {ROUTER, "rgrp", "router: groups of experts", "model.router_groups=2 model.router_group_topk=1", false},
    {ROUTER, "hash", "router: hash table", "model.router_hash_layers=64", false},
    {ROUTER, "capp", "router: capacity, by probability", "model.router_capacity=0.7", false},
    {ROUTER, "capo", "router: capacity, by position", "model.router_capacity=0.7 model.router_drop=position", false},
    {ROUTER, "jit", "router: input noise", "model.router_jitter=0.1", false},
    {ROUTER, "aux", "router: all balancing losses",
     "model.aux_loss=0.1 model.seq_aux_loss=0.1 model.global_aux_loss=0.1 model.router_z_loss=0.01", false},
    {GLU, "glu0", "halves", "", true},
    {GLU, "glu", "GLU interleave", "model.glu_interleave=4", false},
    {PROFILE, "D", "profile D", "model.mhc_profile=d", false},
    {PROFILE, "S", "profile S", "model.mhc_profile=s", false},
    {STREAMS, "n2", "2 streams", "model.mhc_streams=2", false},
    {STREAMS, "n4", "4 streams", "model.mhc_streams=4", false},
    {RECOMPUTE, "norm", "recompute: norm", "plan.recompute=norm", false},
    {RECOMPUTE, "jnt", "recompute: joint.\\*", "plan.recompute=joint.*", false},
    {RECOMPUTE, "catt", "recompute: core_attn", "plan.recompute=core_attn", false},
    {RECOMPUTE, "mhc", "recompute: mhc", "plan.recompute=mhc", false},
    {RECOMPUTE, "mlp", "recompute: mlp", "plan.recompute=mlp", false},
    {RECOMPUTE, "mact", "recompute: moe.act", "plan.recompute=moe.act", false},
    {RECOMPUTE, "moe", "recompute: moe", "plan.recompute=moe", false},
    {RECOMPUTE, "full", "recompute: full", "plan.recompute=full", false},
    {RECOMPUTE, "blk1", "recompute: blocks of 1", "plan.recompute_block=1 plan.recompute=joint.norm", false},
    {RECOMPUTE, "blk2", "recompute: blocks of 2", "plan.recompute_block=2", false},
    {RECOMPUTE, "blk3", "recompute: blocks of 3", "plan.recompute_block=3", false},
    {RECOMPUTE, "auto", "recompute: blocks, automatic", "plan.recompute_block=auto plan.recompute=norm", false},
    {RECOMPUTE, "f+b2", "recompute: full, blocks of 2", "plan.recompute=full plan.recompute_block=2", false},
    {OFFLOAD, "off0", "nothing offloaded", "", true},
    {OFFLOAD, "offa", "offload: everything", "plan.offload=* plan.offload_min=0", false},
    {OFFLOAD, "offj", "offload: joint.\\*", "plan.offload=joint.* plan.offload_min=0", false},
};
enum { N = countof(features), SLOTS = AXES + 1, MAX_CELLS = 400, STEPS = 3 };

/* Pairs no model can have. */
static const struct {
    const char *a, *b, *pattern, *says, *why;
} refusals[] = {
    {"`*`", "`+`", "*+", "both Attention and MLA",
     "a rule of the pattern language, not of this joint: as in Megatron-LM, whether queries and keys come from latents "
     "is one "
     "setting of the whole model, which rotary tables and checkpoint keys follow"},
    {"`*`", "`D`", "*D", "both Attention and", "as above: sparse attention is latent attention"},
    {"`*`", "`C`", "*C", "both Attention and", "as above: so is compressed attention"},
    {"`*`", "`H`", "*H", "both Attention and", "as above"},
    {"`*`", "`W`", "*W", "both Attention and", "as above"},
};

/* A cell: one feature of each axis, and of cores two (slot AXES is the second). */
struct cell {
    int f[SLOTS];
};
struct design {
    struct cell cells[MAX_CELLS];
    int n;
    int by[N][N]; /* cell that holds the pair, -1: none */
};

/* ---- which cells: greedy, each new one covers as many pairs as it can ------------------------ */

static enum axis axis_of(int slot) { return slot == AXES ? CORE : (enum axis)slot; }

static int refused(int a, int b)
{
    for (int i = 0; i < countof(refusals); i++) {
        const char *x = refusals[i].a, *y = refusals[i].b;
        if ((strcmp(features[a].code, x) == 0 && strcmp(features[b].code, y) == 0) ||
            (strcmp(features[b].code, x) == 0 && strcmp(features[a].code, y) == 0))
            return i;
    }
    return -1;
}

/* Must some cell hold both? Two values of one axis exclude each other, except cores. */
static bool wanted(int a, int b)
{
    bool exclusive = features[a].axis == features[b].axis && features[a].axis != CORE;
    return a != b && !exclusive && !features[a].plain && !features[b].plain && refused(a, b) < 0;
}

/* Pairs that value v would newly cover beside what the cell has so far; -1: not possible. */
static int gain(const struct design *d, const struct cell *c, int v)
{
    int n = 0;
    for (int s = 0; s < SLOTS; s++) {
        if (c->f[s] < 0)
            continue;
        if (refused(v, c->f[s]) >= 0)
            return -1;
        n += wanted(v, c->f[s]) && d->by[v][c->f[s]] < 0;
    }
    return n;
}

static void fill_slot(const struct design *d, struct cell *c, int slot)
{
    int best = -1, most = -1;
    for (int k = 0; k < N; k++) {
        int v = (k + d->n) % N; /* ties go round, so that values without a wish take turns */
        if (features[v].axis != axis_of(slot))
            continue;
        int g = gain(d, c, v);
        if (g > most) {
            most = g;
            best = v;
        }
    }
    c->f[slot] = best;
}

static void note_cell(struct design *d, const struct cell *c)
{
    for (int i = 0; i < SLOTS; i++)
        for (int j = 0; j < SLOTS; j++)
            if (wanted(c->f[i], c->f[j]) && d->by[c->f[i]][c->f[j]] < 0)
                d->by[c->f[i]][c->f[j]] = d->n;
    d->cells[d->n++] = *c;
}

static void make_design(struct design *d)
{
    d->n = 0;
    memset(d->by, 0xFF, sizeof d->by);
    for (int a = 0; a < N; a++)
        for (int b = 0; b < N; b++) {
            if (!wanted(a, b) || d->by[a][b] >= 0)
                continue;
            struct cell c;
            memset(c.f, 0xFF, sizeof c.f);
            c.f[features[a].axis] = a;
            c.f[features[b].axis == features[a].axis ? (int)AXES : (int)features[b].axis] = b;
            for (int s = 0; s < SLOTS; s++)
                if (c.f[s] < 0)
                    fill_slot(d, &c, s);
            assert_true(d->n < MAX_CELLS);
            note_cell(d, &c);
        }
}

/* ---- a cell's model -------------------------------------------------------------------------- */

static const char *value(const struct cell *c, int slot) { return features[c->f[slot]].options; }
static bool is(const struct cell *c, int slot, const char *code)
{
    return strcmp(features[c->f[slot]].code, code) == 0;
}

/* A layer, or the group it is in: of a mixer with an MLP, of attention with what was asked for. */
static void add_layer(struct buf *b, char symbol, char attention, bool grouped)
{
    if (!grouped)
        buf_addf(b, "%c", symbol);
    else if (symbol == '-' || symbol == 'E')
        buf_addf(b, "[%c%c]", attention, symbol);
    else
        buf_addf(b, "[%c-]", symbol);
}

/* Both cores, then experts: their options then always mean something. What a recompute policy names is there, too. */
static void pattern_of(const struct cell *c, struct buf *b)
{
    char first = value(c, CORE)[0], second = value(c, AXES)[0];
    bool latent = strchr("+DCHW", first) != NULL || strchr("+DCHW", second) != NULL;
    char attention = latent ? '+' : '*';
    bool grouped = is(c, GROUP, "[ ]");
    add_layer(b, first, attention, grouped);
    add_layer(b, second, attention, grouped);
    if (is(c, RECOMPUTE, "catt") && first != attention && second != attention)
        add_layer(b, attention, attention, grouped);
    /* Experts whose router draws noise keep rows of their own, so with experts alone no norm is saved. */
    if (is(c, RECOMPUTE, "mlp") || (first == 'E' && second == 'E'))
        add_layer(b, '-', attention, grouped);
    add_layer(b, 'E', attention, grouped);
    for (int k = 0; k < atoi(value(c, MTP)); k++)
        buf_addf(b, "/%c%c", first, second);
}

/* policy: with what the cell recomputes and offloads. */
static void options_of(const struct cell *c, bool policy, struct buf *b)
{
    buf_add(b, "model.pattern=");
    pattern_of(c, b);
    for (int s = SHARED; s < AXES; s++)
        if ((s < RECOMPUTE || policy) && value(c, s)[0] != '\0')
            buf_addf(b, " %s", value(c, s));
}

static void cell_config(struct config *c, const struct playground *pg, const struct cell *cell, bool policy)
{
    struct buf b;
    buf_init(&b, 0);
    buf_add(&b, "model.hidden=16 model.heads=2 model.ffn=12 model.experts=4 model.mhc_gating=0.5 model.mtp_scale=0.3 "
                "model.mhc_iterations=5 "
                "model.mamba_head_dim=8 model.mamba_state=4 model.mamba_groups=1 model.mamba_chunk=4 "
                "model.gdn_value_heads=2 "
                "model.gdn_key_heads=1 model.gdn_key_dim=4 model.gdn_value_dim=4 model.gdn_chunk=4 model.mla_kv_rank=8 "
                "model.mla_nope=4 model.mla_rope=2 model.mla_v=4 model.mla_q_rank=6 model.dsa_indexer_n_heads=2 "
                "model.csa_window_size=3 model.compress_rate_csa=2 model.compress_rate_hca=4 model.o_groups=2 "
                "model.o_lora_rank=3 "
                "model.dsa_indexer_head_dim=4 model.dsa_indexer_topk=3 train.micro_batch=1 train.global_batch=1 "
                "train.seq=8 "
                "");
    options_of(cell, policy, &b);
    run_config(c, pg, b.text);
    buf_release(&b);
}

struct trained {
    double loss[STEPS];
    struct snapshot after;
    int64_t frame;
    int replays, fetches;
};

static void train_cell(struct trained *r, const struct playground *pg, const struct cell *cell, bool policy)
{
    struct config c;
    struct trainer t;
    struct err e = {0};
    cell_config(&c, pg, cell, policy);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    run_steps(&t, STEPS, r->loss);
    snapshot_take(&r->after, &t);
    r->frame = t.train.p.frame_bytes;
    r->replays = t.train.p.n_replays;
    r->fetches = t.train.p.n_fetches;
    trainer_close(&t);
    config_release(&c);
}

static void check_cell(const struct playground *pg, const struct cell *cell)
{
    struct trained off, on;
    struct buf b;
    buf_init(&b, 0);
    options_of(cell, true, &b);
    train_cell(&off, pg, cell, false);
    train_cell(&on, pg, cell, true);
    for (int i = 0; i < STEPS; i++)
        if (!isfinite(off.loss[i]))
            fail_msg("%s: the loss is not finite", b.text);
    if (off.loss[0] == off.loss[STEPS - 1])
        fail_msg("%s: nothing is learned", b.text);
    if (memcmp(off.loss, on.loss, sizeof off.loss) != 0 || !snapshot_equal(&off.after, &on.after))
        fail_msg("%s: the policy changes the result", b.text);
    if (off.replays != 0 || on.replays == 0 || on.frame >= off.frame || off.fetches != 0 ||
        (on.fetches > 0) == is(cell, OFFLOAD, "off0"))
        fail_msg("%s: %d replays, %d fetches, %lld bytes saved instead of %lld", b.text, on.replays, on.fetches,
                 (long long)on.frame, (long long)off.frame);
    snapshot_free(&off.after);
    snapshot_free(&on.after);
    buf_release(&b);
}

/* ---- the page -------------------------------------------------------------------------------- */

static const char intro[] =
    "# What works together\n\n"
    "For everybody who wants to combine features. Every pair below has been trained in one model, together with "
    "hyper-connections\n"
    "(`model.mhc_streams`), for a few steps on the CPU, with a policy of recompute and offload and without: losses, "
    "parameters and "
    "optimizer state are\n"
    "equal bit for bit, and the policy saves memory. `./check` repeats it (`tests/train/test_matrix.c`, which also "
    "writes this page:\n"
    "`build/tests/train/test_matrix --write docs/COMPAT.md`). Pairs of meshes and schedules are in "
    "[PARALLEL.md](PARALLEL.md), comparisons with\n"
    "other implementations in [PARITY.md](PARITY.md).\n\n";

/* Rows and columns of the table: features that belong together by meaning. */
static const struct {
    const char *name;
    enum axis first, last;
} columns[] = {
    {"layer kinds", CORE, CORE},
    {"groups, MTP", GROUP, MTP},
    {"shared expert", SHARED, SHARED},
    {"router settings", ROUTER, ROUTER},
    {"model details", DROPOUT, ACCUMULATE},
    {"GLU interleave", GLU, GLU},
    {"streams, profile", PROFILE, STREAMS},
    {"recompute policies", RECOMPUTE, RECOMPUTE},
    {"offload", OFFLOAD, OFFLOAD},
};

static bool in_column(int k, int f)
{
    return !features[f].plain && features[f].axis >= columns[k].first && features[f].axis <= columns[k].last;
}

/* Pairs of a feature of group r and one of group k: how many were trained, and which are refused. */
static void print_cell(int r, int k, struct buf *out)
{
    int trained = 0;
    struct buf not ;
    buf_init(&not, 0);
    for (int a = 0; a < N; a++)
        for (int b = 0; b < N; b++) {
            if (!in_column(r, a) || !in_column(k, b) || (r == k && b >= a))
                continue;
            trained += wanted(a, b);
            if (refused(a, b) >= 0)
                buf_addf(&not, ", not %s with %s (%d)", features[a].name, features[b].name, refused(a, b) + 1);
        }
    if (trained == 0)
        buf_add(out, " one at a time |");
    else
        buf_addf(out, " %s%d%s |", not .text == NULL ? "all " : "", trained, not .text != NULL ? not .text : "");
    buf_release(&not );
}

static void print_groups(struct buf *out)
{
    buf_add(out, "| |");
    for (int k = 0; k < countof(columns); k++)
        buf_addf(out, " %s |", columns[k].name);
    buf_add(out, "\n|---|");
    for (int k = 0; k < countof(columns); k++)
        buf_add(out, "---|");
    for (int r = 0; r < countof(columns); r++) {
        int n = 0;
        for (int a = 0; a < N; a++)
            n += in_column(r, a);
        buf_addf(out, "\n| **%s** (%d) |", columns[r].name, n);
        for (int k = 0; k < countof(columns); k++)
            if (k < r)
                buf_add(out, " |");
            else
                print_cell(r, k, out);
    }
    buf_add(out, "\n");
}

static void print_options(int a, struct buf *out)
{
    switch (features[a].axis) {
    case CORE: buf_addf(out, "%s in `model.pattern`", features[a].code); break;
    case GROUP: buf_add(out, "brackets in `model.pattern`"); break;
    case MTP: buf_add(out, "after `/` in `model.pattern`"); break;
    default: buf_addf(out, features[a].options[0] != '\0' ? "`%s`" : "the default%s", features[a].options); break;
    }
}

static void print_table(const struct design *d, struct buf *out)
{
    int pairs = 0, shown = 0;
    for (int a = 0; a < N; a++) {
        shown += !features[a].plain;
        for (int b = 0; b < a; b++)
            pairs += wanted(a, b);
    }
    buf_add(out, intro);
    buf_addf(out,
             "%d features, %d pairs in %d models, %d pair%s refused. A cell says how many pairs of a feature on the "
             "left and one above were\n"
             "trained; \"all\": each with each. \"one at a time\": these settings exclude each other.\n\n",
             shown, pairs, d->n, countof(refusals), countof(refusals) == 1 ? "" : "s");
    print_groups(out);
    buf_add(out, "\n## Refused\n\n");
    for (int i = 0; i < countof(refusals); i++)
        buf_addf(out, "%d. %s with %s: %s.\n", i + 1, refusals[i].a, refusals[i].b, refusals[i].why);
    buf_add(out, "\n## The features\n\n| group | feature | options |\n|---|---|---|\n");
    for (int k = 0; k < countof(columns); k++)
        for (int a = 0; a < N; a++)
            if (in_column(k, a)) {
                buf_addf(out, "| %s | %s | ", columns[k].name, features[a].name);
                print_options(a, out);
                buf_add(out, " |\n");
            }
    buf_add(out, "\nThe model that holds a pair: `build/tests/train/test_matrix --pair 'Mamba-2' 'recompute: mhc'` "
                 "prints its options.\n");
}

static int find_feature(const char *name)
{
    for (int i = 0; i < N; i++)
        if (strcmp(features[i].name, name) == 0 || strcmp(features[i].code, name) == 0)
            return i;
    return -1;
}

static int print_pair(const struct design *d, const char *a_name, const char *b_name)
{
    int a = find_feature(a_name), b = find_feature(b_name);
    if (a < 0 || b < 0 || !wanted(a, b)) {
        fprintf(stderr, "%s and %s: no such pair; docs/COMPAT.md has the names\n", a_name, b_name);
        return 1;
    }
    struct buf text;
    buf_init(&text, 0);
    options_of(&d->cells[d->by[a][b]], true, &text);
    printf("%s\n", text.text != NULL ? text.text : "");
    buf_release(&text);
    return 0;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void every_core_is_in_the_matrix(void **state)
{
    (void)state;
    for (const char *s = "MG*+D-E"; *s != '\0'; s++) {
        bool listed = false;
        for (int i = 0; i < N; i++)
            listed |= features[i].axis == CORE && features[i].options[0] == *s;
        const struct core_kind *core = core_find(*s);
        if (core != NULL && core->declare != NULL && !listed)
            fail_msg("the core '%c' is not in the list of features", *s);
    }
}

static void every_pair_trains_and_recomputes_bit_for_bit(void **state)
{
    const struct design *d = *state;
    struct playground pg;
    playground_open(&pg);
    for (int i = 0; i < d->n; i++)
        check_cell(&pg, &d->cells[i]);
    playground_close(&pg);
}

static void refused_pairs_are_refused_with_a_reason(void **state)
{
    (void)state;
    for (int i = 0; i < countof(refusals); i++) {
        struct config c;
        struct err e = {0};
        struct dev dev;
        struct model m;
        char options[160];
        snprintf(options, sizeof options,
                 "model.mhc_streams=2 model.pattern=%s model.mla_q_rank=4 model.compress_rate_hca=4",
                 refusals[i].pattern);
        tiny_config(&c, options);
        assert_ok(dev_open(&dev, DEV_REF, 1, &e), &e);
        int st = model_init(&m, &c, &dev, &e);
        assert_fails(st, st != ST_OK ? st : -1, &e, refusals[i].says);
        model_release(&m);
        dev_close(&dev);
        config_release(&c);
    }
}

static void the_page_is_current(void **state)
{
    struct buf want;
    struct err e = {0};
    char *have = NULL;
    size_t len;
    buf_init(&want, 0);
    print_table(*state, &want);
    assert_ok(buf_check(&want, &e), &e);
    assert_ok(file_read("docs/COMPAT.md", 4 << 20, &have, &len, &e), &e);
    if (strcmp(have, want.text) != 0)
        fail_msg("docs/COMPAT.md is out of date: run test_matrix --write docs/COMPAT.md");
    free(have);
    buf_release(&want);
}

static int write_page(const struct design *d, const char *path)
{
    struct buf b;
    struct err e = {0};
    buf_init(&b, 0);
    print_table(d, &b);
    int st = buf_check(&b, &e);
    if (st == ST_OK)
        st = file_write_atomic(path, b.text, b.len, &e);
    if (st != ST_OK)
        err_print(&e, stderr);
    buf_release(&b);
    return st;
}

int main(int argc, char **argv)
{
    static struct design d;
    make_design(&d);
    bool write = argc == 3 && strcmp(argv[1], "--write") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_core_is_in_the_matrix),
        cmocka_unit_test(refused_pairs_are_refused_with_a_reason),
        cmocka_unit_test_prestate(every_pair_trains_and_recomputes_bit_for_bit, &d),
        cmocka_unit_test_prestate(the_page_is_current, &d),
    };
    if (argc == 4 && strcmp(argv[1], "--pair") == 0)
        return print_pair(&d, argv[2], argv[3]);
    if (write && write_page(&d, argv[2]) != ST_OK)
        return 1;
    return cmocka_run_group_tests_name("matrix", tests, NULL, NULL);
}
