/* Mistakes that other trainers of hybrid stacks made, each as a check that the model passes and
 * that a named mutant, which makes the mistake again, does not. A check reads a small description
 * (slots, numbers, replays, keys) and answers with the first fault, or NULL. Letters are those of
 * the ledger of the pattern and MTP code it re-creates; D needs the trainer and is in tests/train. */
#include "tiny.h"

enum { MAX_LAYERS = 64, MAX_NODES = 1024 };

#define SIZES                                                                                                          \
    "model.experts=4 model.topk=2 model.mamba_head_dim=4 model.mamba_state=4 "                                         \
    "model.mamba_groups=1 model.mamba_chunk=4 model.gdn_value_heads=2 model.gdn_key_heads=1 "                          \
    "model.gdn_key_dim=4 model.gdn_value_dim=4 model.gdn_chunk=4 model.mla_kv_rank=6 "                                 \
    "model.mla_nope=4 model.mla_rope=2 model.mla_v=4 "

static void open_pattern(struct tiny *t, const char *pattern, const char *options)
{
    char words[1024];
    int n = snprintf(words, sizeof words, SIZES "model.pattern=%s %s", pattern, options);
    assert_true(n > 0 && n < (int)sizeof words);
    tiny_open(t, words, DEV_CPU, 1);
}

/* One microbatch; tiny_run knows no MTP. */
static void run_once(struct tiny *t)
{
    static const double mtp_scale[MTP_MAX_DEPTHS] = {0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01};
    struct tiny_batch b;
    tiny_batch_fill(&b, &t->c, 4, t->c.train.micro_batch);
    struct run_info run = {.step = 3,
                           .first_sample = 4,
                           .first_mb = true,
                           .scale = 1.0 / 16,
                           .mtp_scale = mtp_scale,
                           .mb_share = 1,
                           .tokens = b.tokens,
                           .labels = b.labels,
                           .pos = b.pos,
                           .doc_start = b.doc};
    assert_ok(exec_run(&t->x, &t->train.p, &run, &t->e), &t->e);
    tiny_batch_release(&b);
}

/* ---- C: where routers leave their losses ----------------------------------------------------- */

struct router_slot {
    int depth, position; /* depth -1: main part; position in its stack */
    int layer;           /* number it is reported under */
    int64_t slot;
};
struct tracker {
    int n_layers, n_depths, n;
    int64_t size; /* slots there are */
    struct router_slot at[MAX_LAYERS];
};

/* The routers a pattern has, in order; slots and layers are left to the caller. */
static void tracker_start(struct tracker *t, const struct pattern *p)
{
    *t = (struct tracker){.n_layers = p->n_layers, .n_depths = p->n_mtp_depths};
    for (int d = -1; d < p->n_mtp_depths; d++)
        for (int i = 0; i < (d < 0 ? p->n_layers : p->n_mtp_layers); i++)
            if ((d < 0 ? p->symbols : p->mtp_symbols)[i] == 'E')
                t->at[t->n++] = (struct router_slot){.depth = d, .position = i};
}

static void tracker_of_model(struct tracker *t, const struct tiny *m, const char *tag)
{
    tracker_start(t, &m->m.pattern);
    t->size = m->m.mem.allocated[ARENA_STATE] / (int64_t)sizeof(double);
    int n = 0;
    for (int k = 0; k < m->m.metrics.n; k++) {
        const struct metric *one = &m->m.metrics.m[k];
        if (strcmp(one->tag, tag) != 0)
            continue;
        assert_true(n < t->n && one->offset % (int64_t)sizeof(double) == 0);
        t->at[n].layer = one->layer;
        t->at[n++].slot = one->offset / (int64_t)sizeof(double);
    }
    assert_int_equal(n, t->n); /* main E + depths * E of one depth */
}

static const char *tracker_fault(const struct tracker *t)
{
    for (int i = 0; i < t->n; i++) {
        const struct router_slot *a = &t->at[i];
        if (a->slot < 0 || a->slot >= t->size)
            return "out of range";
        if (a->depth < 0 && a->layer != a->position)
            return "a main router under another number";
        if (a->depth >= 0 && a->layer < t->n_layers)
            return "an MTP router under a main number";
        for (int k = 0; k < i; k++)
            if (t->at[k].slot == a->slot || t->at[k].layer == a->layer)
                return "shared";
    }
    return NULL;
}

/* The wrong rules number slots 0 .. layers + depths - 1, as the tracker they come from does. */
static void mutant_C(struct tracker *t, int (*slot)(const struct tracker *, int position))
{
    t->size = t->n_layers + t->n_depths;
    for (int i = 0; i < t->n; i++) {
        struct router_slot *a = &t->at[i];
        a->layer = a->depth < 0 ? a->position : slot(t, a->position);
        a->slot = a->layer;
    }
}

static int mutant_C_position_in_inner_stack(const struct tracker *t, int position) { return t->n_layers + position; }

static int mutant_C_position_modulo_depths(const struct tracker *t, int position)
{
    return t->n_layers + position % t->n_depths;
}

static int mutant_C_not_known_as_mtp(const struct tracker *t, int position)
{
    (void)t;
    return position;
}

static void every_router_of_every_depth_has_a_slot_of_its_own(void **state)
{
    (void)state;
    static const char *const patterns[] = {"MEME/*E/*E",    "MEME/*E",          "MEME",   "[*E][*E]/*E/*E",   "E/EE/EE",
                                           "M|E|/*E/*E/*E", "[*-]|[*E]|/*E/*E", "-E/-/-", "E/E/E/E/E/E/E/E/E"};
    static const char *const tags[] = {"router aux loss", "router z loss", "router loss"};
    for (int i = 0; i < countof(patterns); i++) {
        struct tiny m;
        struct tracker t;
        open_pattern(&m, patterns[i], "model.aux_loss=0.1 model.router_z_loss=0.01");
        double *base = (double *)(void *)m.m.mem.base[ARENA_STATE];
        for (int k = 0; k < countof(tags); k++) {
            tracker_of_model(&t, &m, tags[k]);
            assert_null(tracker_fault(&t));
            for (int r = 0; r < t.n; r++)
                base[t.at[r].slot] = (double)NAN;
        }
        run_once(&m);
        for (int k = 0; k < countof(tags); k++) {
            tracker_of_model(&t, &m, tags[k]);
            for (int r = 0; r < t.n; r++) { /* each wrote, and nobody else did */
                assert_true(isfinite(base[t.at[r].slot]) && base[t.at[r].slot] > 0);
                for (int s = 0; s < r; s++)
                    assert_true(base[t.at[r].slot] != base[t.at[s].slot]);
            }
        }
        tiny_close(&m);
    }
}

static void wrong_slots_of_mtp_routers_are_caught(void **state)
{
    (void)state;
    static const struct {
        const char *pattern;
        int (*slot)(const struct tracker *, int position);
        const char *fault;
    } cases[] = {
        {"MEME/*E", mutant_C_position_in_inner_stack, "out of range"},
        {"MEME/*E/*E", mutant_C_position_in_inner_stack, "shared"},
        {"MEME/*E/*E", mutant_C_position_modulo_depths, "shared"},
        {"[*E][*E]/*E/*E/*E", mutant_C_position_modulo_depths, "shared"},
        {"MEME/*E", mutant_C_not_known_as_mtp, "an MTP router under a main number"},
        {"MEME/*E/*E", mutant_C_not_known_as_mtp, "an MTP router under a main number"},
    };
    struct tracker t = {.n_layers = 8, .n_depths = 2};
    assert_int_equal(mutant_C_position_modulo_depths(&t, 5 - 1), 8); /* vector of the ledger */
    for (int i = 0; i < countof(cases); i++) {
        struct tiny m;
        open_pattern(&m, cases[i].pattern, "model.aux_loss=0.1");
        tracker_of_model(&t, &m, "router aux loss");
        assert_null(tracker_fault(&t));
        mutant_C(&t, cases[i].slot);
        assert_non_null(tracker_fault(&t));
        assert_string_equal(tracker_fault(&t), cases[i].fault);
        tiny_close(&m);
    }
}

/* ---- F: logical and physical numbers side by side -------------------------------------------- */

/* Every accepted pattern of the grammar tables, their chunk examples with groups, and a few of both. */
static const char *const all_patterns[] = {
    "M*-M*-M*-",
    "M[M*]-",
    "[M*E]",
    "MMMMMMMMM",
    "MM*-MM*-",
    "E",
    "GGG*GGG*",
    "GEGEGE*E",
    "MDMD",
    "M+M+",
    "M*M*",
    "MMMM",
    "*M*M",
    "MM-*",
    "DM",
    "+M",
    "M*|M*",
    "M-M-|M-M*-",
    "M|M|M|M",
    "M*M*/MM",
    "MMMM/*M",
    "M/M",
    "M*M*/MM/MM",
    "M*M*/MM/MM/MM",
    "MMMM/*M/*M/*M",
    "M*/*/*/*",
    "M/M/M/M/M",
    "M-M-|M-M*-/MM/MM",
    "/MM/MM",
    "M*M*/",
    "M*M*M*M*/MMM/MMM",
    "MM-MM-/*M/*M",
    "MEME/MM/MM",
    "GEGEGE*E/GG/GG",
    "MDMD/MD/MD",
    "M+M+/M+/M+",
    "*****/M/M/M/M",
    "|",
    "||",
    "M|",
    "|/*E",
    "M-M-|M-M*-|M-M-|M-M*-",
    "||M",
    "MG*-E",
    "MGD-E",
    "MG+-E",
    "M[M*]E",
    "GMGM",
    "G*GM*",
    "DMDM",
    "+M+M",
    "[*-][*-]",
    "[M*E]|M-",
    "[*-][*-]|[*E][*E]",
    "[*-][*E]M-",
    "M[M*]-|[*E]/*E/*E",
    "[*-][*-]|[*-][*E]|[*E][*E]|[*E][*E]|[*E][*E]|[*E][*E]|[*E][*E]|/*E",
};

struct numbering {
    int n; /* layers: main part, then each depth */
    int key[MAX_LAYERS], number[MAX_LAYERS];
};

static char symbol_at(const struct pattern *p, int i)
{
    return i < p->n_layers ? p->symbols[i] : p->mtp_symbols[(i - p->n_layers) % p->n_mtp_layers];
}

/* Layers in the order of their norms' keys. */
static void read_keys(const struct tiny *t, struct numbering *nb)
{
    const struct pattern *p = &t->m.pattern;
    int n = 0, total = p->n_layers + p->n_mtp_depths * p->n_mtp_layers;
    assert_true(total <= MAX_LAYERS);
    for (int k = 0; k < t->m.params.n && n < total; k++) {
        const char *key = t->m.params.list[k].p.key;
        int index = -1, depth = 0, end = 0;
        if (n < p->n_layers)
            sscanf(key, "decoder.layers.%d.%n", &index, &end);
        else
            sscanf(key, "mtp.layers.%d.mtp_model_layer.layers.%d.%n", &depth, &index, &end);
        if (end == 0 || strcmp(key + end, core_find(symbol_at(p, n))->norm_key) != 0)
            continue;
        if (n >= p->n_layers)
            assert_int_equal(depth, (n - p->n_layers) / p->n_mtp_layers);
        nb->key[n++] = index;
    }
    assert_int_equal(n, total);
    nb->n = total;
}

/* Numbers of the cores in the graph, in order. */
static void read_numbers(const struct tiny *t, struct numbering *nb)
{
    const struct graph *g = &t->train.g;
    int n = 0;
    for (int k = 0; k < g->n_nodes; k++) {
        int layer = g->nodes[k].layer;
        bool joint = str_glob("*.joint.*", g->nodes[k].name);
        if (layer < 0 || joint || (n > 0 && nb->number[n - 1] == layer))
            continue;
        assert_true(n < MAX_LAYERS);
        nb->number[n++] = layer;
    }
    assert_int_equal(n, nb->n);
}

/* What keys should say is counted from the text, not asked of the parser. */
static const char *numbering_fault(const struct pattern *p, const struct numbering *nb)
{
    int item = 0, layer = 0;
    bool inside = false;
    for (const char *s = p->text; s < p->text + p->main_len; s++) {
        if (*s == '[' || *s == ']') {
            inside = *s == '[';
            item += *s == ']';
        } else if (*s != '|') {
            if (nb->key[layer] != item)
                return "key";
            if (nb->number[layer] != layer)
                return "number";
            item += !inside;
            layer++;
        }
    }
    for (; layer < nb->n; layer++) {
        if (nb->key[layer] != (layer - p->n_layers) % p->n_mtp_layers)
            return "key of a depth";
        if (nb->number[layer] < p->n_layers || nb->number[layer] <= nb->number[layer - 1])
            return "number of a depth";
    }
    return NULL;
}

static void mutant_F_keys_by_physical_number(const struct pattern *p, struct numbering *nb)
{
    for (int l = 0; l < p->n_layers; l++)
        nb->key[l] = l;
}

static void mutant_F_graph_by_logical_number(const struct pattern *p, struct numbering *nb)
{
    for (int l = 0; l < p->n_layers; l++)
        nb->number[l] = p->item_of[l];
}

static void mutant_F_keys_restart_at_each_pipe(const struct pattern *p, struct numbering *nb)
{
    for (int s = 0; s < p->n_segments; s++)
        for (int l = 0; l < p->segments[s].n_layers; l++)
            nb->key[p->segments[s].first_layer + l] -= p->segments[s].first_item;
}

static void mutant_F_depths_count_from_zero(const struct pattern *p, struct numbering *nb)
{
    for (int l = p->n_layers; l < nb->n; l++)
        nb->number[l] = (l - p->n_layers) % p->n_mtp_layers;
}

static bool can_be_built(const char *text)
{
    struct pattern p;
    struct err e = {0};
    assert_ok(pattern_parse(&p, text, &e), &e);
    int status = pattern_check_cores(&p, &e);
    bool gap = p.n_layers == 0 || (strchr(text, 'D') != NULL && core_find('D')->declare == NULL);
    assert_int_equal(status, gap ? ST_USAGE : ST_OK);
    return status == ST_OK;
}

static void every_pattern_is_built_with_both_of_its_numbers(void **state)
{
    (void)state;
    static void (*const mutants[])(const struct pattern *, struct numbering *) = {
        mutant_F_keys_by_physical_number, mutant_F_graph_by_logical_number, mutant_F_keys_restart_at_each_pipe,
        mutant_F_depths_count_from_zero};
    int caught[countof(mutants)] = {0}, built = 0;
    for (int i = 0; i < countof(all_patterns); i++) {
        struct tiny t;
        struct numbering real = {0};
        if (!can_be_built(all_patterns[i]))
            continue;
        open_pattern(&t, all_patterns[i], "");
        read_keys(&t, &real);
        read_numbers(&t, &real);
        const struct pattern *p = &t.m.pattern;
        const char *fault = numbering_fault(p, &real);
        if (fault != NULL)
            fail_msg("'%s': %s", all_patterns[i], fault);
        for (int k = 0; k < countof(mutants); k++) {
            struct numbering wrong = real;
            mutants[k](p, &wrong);
            bool differs = memcmp(&wrong, &real, sizeof real) != 0;
            if ((numbering_fault(p, &wrong) != NULL) != differs)
                fail_msg("'%s': mutant %d goes unnoticed", all_patterns[i], k);
            caught[k] += differs;
        }
        built++;
        tiny_close(&t);
    }
    assert_true(built >= 45);
    for (int k = 0; k < countof(mutants); k++)
        assert_true(caught[k] >= 5);
}

/* ---- H: groups are recomputed once ----------------------------------------------------------- */

struct replays {
    int n_nodes, total;
    int of[MAX_NODES]; /* by node */
};

static void read_replays(const struct tiny *t, struct replays *r)
{
    const struct plan *p = &t->train.p;
    *r = (struct replays){.n_nodes = t->train.g.n_nodes};
    assert_true(r->n_nodes <= MAX_NODES);
    for (int i = 0; i < p->n_steps; i++)
        if (p->steps[i].ref.phase == PH_REPLAY) {
            r->of[p->steps[i].ref.node]++;
            r->total++;
        }
    assert_int_equal(r->total, p->n_replays);
}

static const char *replays_fault(const struct replays *grouped, const struct replays *flat)
{
    if (grouped->n_nodes != flat->n_nodes)
        return "other nodes";
    for (int i = 0; i < grouped->n_nodes; i++) {
        if (grouped->of[i] > 1)
            return "replayed twice";
        if (grouped->of[i] != flat->of[i])
            return "replayed otherwise than without brackets";
    }
    return grouped->total == flat->total ? NULL : "another total";
}

/* A group that recomputes itself, and whose layers do so again inside it. */
static void mutant_H_children_replay_inside_their_group(const struct tiny *t, struct replays *r)
{
    const struct pattern *p = &t->m.pattern;
    for (int i = 0; i < r->n_nodes; i++) {
        int layer = t->train.g.nodes[i].layer;
        if (layer >= 0 && layer < p->n_layers && p->items[p->item_of[layer]].grouped) {
            r->total += r->of[i];
            r->of[i] *= 2;
        }
    }
}

/* A group that nobody recomputes: its layers leave it to the group, the group to its layers. */
static void mutant_H_nobody_replays_a_group(const struct tiny *t, struct replays *r)
{
    const struct pattern *p = &t->m.pattern;
    for (int i = 0; i < r->n_nodes; i++) {
        int layer = t->train.g.nodes[i].layer;
        if (layer >= 0 && layer < p->n_layers && p->items[p->item_of[layer]].grouped) {
            r->total -= r->of[i];
            r->of[i] = 0;
        }
    }
}

static int rebuilt_twice(const struct tiny *t)
{
    const struct plan *p = &t->train.p;
    int twice = 0;
    for (int i = 0; i < p->n_inst; i++)
        for (int k = 0; k < i && p->inst[i].rebuilt; k++)
            twice += p->inst[k].rebuilt && p->inst[k].slot == p->inst[i].slot && p->inst[k].mb == p->inst[i].mb;
    return twice;
}

static void full_recompute_replays_a_group_once(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"[*-]", "*-"}, {"[*-][*-]", "*-*-"}, {"M[M*]-", "MM*-"}, {"[*E]|[*-]/*E", "*E|*-/*E"}, {"[G*E]", "G*E"}};
    for (int i = 0; i < countof(pairs); i++) {
        struct tiny grouped, flat, kept;
        struct replays g, f, wrong;
        open_pattern(&grouped, pairs[i][0], "plan.recompute=full");
        open_pattern(&flat, pairs[i][1], "plan.recompute=full");
        open_pattern(&kept, pairs[i][1], "");
        read_replays(&grouped, &g);
        read_replays(&flat, &f);
        assert_true(f.total >= 4);
        assert_int_equal(kept.train.p.n_replays, 0);
        const char *fault = replays_fault(&g, &f);
        if (fault != NULL)
            fail_msg("'%s': %s", pairs[i][0], fault);
        assert_int_equal(rebuilt_twice(&grouped), 0);
        wrong = g;
        mutant_H_children_replay_inside_their_group(&grouped, &wrong);
        assert_non_null(replays_fault(&wrong, &f));
        wrong = g;
        mutant_H_nobody_replays_a_group(&grouped, &wrong);
        assert_non_null(replays_fault(&wrong, &f));
        /* and what it computes is what the flat model computes without any recompute */
        size_t n = (size_t)kept.m.mem.allocated[ARENA_PARAM];
        assert_int_equal(grouped.m.mem.allocated[ARENA_PARAM], n);
        memcpy(grouped.m.mem.base[ARENA_PARAM], kept.m.mem.base[ARENA_PARAM], n);
        run_once(&grouped);
        run_once(&kept);
        assert_memory_equal(grouped.m.mem.base[ARENA_GRAD], kept.m.mem.base[ARENA_GRAD],
                            (size_t)kept.m.mem.allocated[ARENA_GRAD]);
        tiny_close(&grouped);
        tiny_close(&flat);
        tiny_close(&kept);
    }
}

/* ---- J: the key of the final norm ------------------------------------------------------------ */

#define FLAT_KEY "decoder.final_norm.weight"
#define GROUPED_KEY "decoder.final_layernorm.weight"

/* Old checkpoints of flat models hold FLAT_KEY, Transformer ones GROUPED_KEY; any bracket decides,
 * for every chunk alike. */
static const char *final_norm_fault(const struct pattern *p, const char *key)
{
    bool bracket = memchr(p->text, '[', (size_t)p->main_len) != NULL;
    if (strcmp(key, bracket ? GROUPED_KEY : FLAT_KEY) == 0)
        return NULL;
    return bracket ? "Transformer's readers miss it" : "old checkpoints miss it";
}

static const char *final_norm_of_model(const struct tiny *t)
{
    bool flat = param_find(&t->m.params, FLAT_KEY) >= 0;
    assert_true(flat != (param_find(&t->m.params, GROUPED_KEY) >= 0)); /* one of them */
    return flat ? FLAT_KEY : GROUPED_KEY;
}

static const char *mutant_J_renames_flat_models_too(const struct pattern *p)
{
    (void)p;
    return GROUPED_KEY;
}

static const char *mutant_J_never_renames(const struct pattern *p)
{
    (void)p;
    return FLAT_KEY;
}

/* The chunk that owns the norm looks at its own layers instead of the whole pattern. */
static const char *mutant_J_asks_the_last_chunk(const struct pattern *p)
{
    const struct pattern_segment *last = &p->segments[p->n_segments - 1];
    for (int i = 0; i < last->n_items; i++)
        if (p->items[last->first_item + i].grouped)
            return GROUPED_KEY;
    return FLAT_KEY;
}

static void only_grouped_models_rename_the_final_norm(void **state)
{
    (void)state;
    static const char *(*const mutants[])(const struct pattern *) = {
        mutant_J_renames_flat_models_too, mutant_J_never_renames, mutant_J_asks_the_last_chunk};
    static const struct {
        const char *pattern;
        bool caught[countof(mutants)];
    } cases[] = {
        {"*-", {true, false, false}},      {"*-*-|*-", {true, false, false}},   {"MM*-/*-/*-", {true, false, false}},
        {"E", {true, false, false}},       {"[*-]", {false, true, false}},      {"*-[*-]", {false, true, false}},
        {"[*-]|*-", {false, true, true}},  {"M[M*]-|/*E", {false, true, true}}, {"*-|[*E]", {false, true, false}},
        {"[*-]/*-", {false, true, false}},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct tiny t;
        open_pattern(&t, cases[i].pattern, "");
        const struct pattern *p = &t.m.pattern;
        assert_null(final_norm_fault(p, final_norm_of_model(&t)));
        for (int k = 0; k < countof(mutants); k++)
            assert_int_equal(final_norm_fault(p, mutants[k](p)) != NULL, cases[i].caught[k]);
        /* Depths keep Transformer's name whatever the main part is. */
        for (int d = 0; d < p->n_mtp_depths; d++) {
            char key[64];
            snprintf(key, sizeof key, "mtp.layers.%d.final_layernorm.weight", d);
            assert_true(param_find(&t.m.params, key) >= 0);
        }
        tiny_close(&t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_router_of_every_depth_has_a_slot_of_its_own),
        cmocka_unit_test(wrong_slots_of_mtp_routers_are_caught),
        cmocka_unit_test(every_pattern_is_built_with_both_of_its_numbers),
        cmocka_unit_test(full_recompute_replays_a_group_once),
        cmocka_unit_test(only_grouped_models_rename_the_final_norm),
    };
    return cmocka_run_group_tests_name("regressions", tests, NULL, NULL);
}
