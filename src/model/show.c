/* Tables of a model, as `braid plan` prints them. */
#include "model/model.h"

#include <string.h>

/* ---- the stack ------------------------------------------------------------------------------- */

static const char *plural(int n) { return n == 1 ? "" : "s"; }

static bool is_mtp(const struct param *p) { return str_starts(p->key, "mtp."); }

/* Parameters of a layer of the main part. */
static int64_t layer_elems(const struct model *m, int layer)
{
    int64_t sum = 0;
    for (int k = 0; k < m->params.n; k++) {
        const struct param *p = &m->params.list[k].p;
        sum += p->layer == layer && !is_mtp(p) ? param_reals(p) : 0;
    }
    return sum;
}

static int64_t prefix_elems(const struct model *m, const char *prefix)
{
    int64_t sum = 0;
    for (int k = 0; k < m->params.n; k++)
        sum += str_starts(m->params.list[k].p.key, prefix) ? param_reals(&m->params.list[k].p) : 0;
    return sum;
}

struct row {
    char layer[12], item[12], symbol[8];
    const char *core;
    char keys[96];
    int64_t elems;
    double flops; /* forward, per token */
};

static void print_row(const struct row *r, struct buf *out)
{
    char flops[32];
    buf_addf(out, "%5s %4s %-3s %-22s %-42s %12lld %11s\n", r->layer, r->item, r->symbol, r->core, r->keys,
             (long long)r->elems, r->flops > 0 ? human_count(r->flops, flops, sizeof flops) : "-");
}

static void print_layer(const struct model *m, int layer, struct buf *out)
{
    const struct pattern *p = &m->pattern;
    const struct pattern_item *it = &p->items[p->item_of[layer]];
    char symbol = p->symbols[layer];
    struct row r = {.core = core_find(symbol)->name,
                    .elems = layer_elems(m, layer),
                    .flops = model_layer_flops(m->cfg, symbol, m->cfg->train.seq)};
    snprintf(r.layer, sizeof r.layer, "%d", layer);
    snprintf(r.item, sizeof r.item, "%d", p->item_of[layer]);
    snprintf(r.symbol, sizeof r.symbol, "%c%c%c", it->grouped && layer == it->first ? '[' : ' ', symbol,
             it->grouped && layer == it->first + it->n - 1 ? ']' : ' ');
    snprintf(r.keys, sizeof r.keys, "decoder.layers.%d.*", pattern_layer_key_index(p, layer));
    print_row(&r, out);
}

static void print_segment(const struct model *m, int index, struct buf *out)
{
    const struct pattern_segment *s = &m->pattern.segments[index];
    if (m->pattern.n_segments > 1)
        buf_addf(out, "%5s      |  segment %d: %d layer%s, from layer %d, item %d\n", "", index, s->n_layers,
                 plural(s->n_layers), s->first_layer, s->first_item);
    for (int l = s->first_layer; l < s->first_layer + s->n_layers; l++)
        print_layer(m, l, out);
}

static void print_mtp_layer(const struct model *m, int depth, int i, struct buf *out)
{
    char symbol = m->pattern.mtp_symbols[i];
    struct row r = {
        .layer = "-", .core = core_find(symbol)->name, .flops = model_layer_flops(m->cfg, symbol, m->cfg->train.seq)};
    snprintf(r.symbol, sizeof r.symbol, " %c ", symbol);
    snprintf(r.keys, sizeof r.keys, "mtp.layers.%d.mtp_model_layer.layers.%d.", depth, i);
    r.elems = prefix_elems(m, r.keys);
    snprintf(r.keys, sizeof r.keys, "mtp.layers.%d.mtp_model_layer.layers.%d.*", depth, i);
    print_row(&r, out);
}

/* One MTP depth: what it has beside its layers, then those. */
static void print_depth(const struct model *m, int depth, struct buf *out)
{
    char name[32], all[32], layers[64];
    snprintf(name, sizeof name, "MTP depth %d", depth);
    snprintf(all, sizeof all, "mtp.layers.%d.", depth);
    snprintf(layers, sizeof layers, "mtp.layers.%d.mtp_model_layer.", depth);
    struct row entry = {.layer = "-", .symbol = " / ", .core = name, .flops = model_mtp_flops(m->cfg)};
    snprintf(entry.keys, sizeof entry.keys, "%senorm, hnorm, %s, ...", all,
             m->cfg->model.mhc_streams > 0 ? "e_proj, h_proj" : "eh_proj");
    entry.elems = prefix_elems(m, all) - prefix_elems(m, layers);
    print_row(&entry, out);
    for (int i = 0; i < m->pattern.n_mtp_layers; i++)
        print_mtp_layer(m, depth, i, out);
}

static void print_summary(const struct model *m, struct buf *out)
{
    const struct pattern *p = &m->pattern;
    buf_addf(out, "pattern %s: %d layer%s", p->text, p->n_layers, plural(p->n_layers));
    if (p->grouped)
        buf_addf(out, " in %d item%s", p->n_items, plural(p->n_items));
    if (p->n_segments > 1)
        buf_addf(out, ", %d pipeline segments", p->n_segments);
    if (p->n_mtp_depths > 0)
        buf_addf(out, ", %d MTP depth%s of %d layer%s", p->n_mtp_depths, plural(p->n_mtp_depths), p->n_mtp_layers,
                 plural(p->n_mtp_layers));
    buf_add(out, "\n");
    if (m->cfg->model.layers != 0 && m->cfg->model.layers != p->n_layers && m->cfg->model.layers != p->n_items)
        buf_addf(out, "  model.layers = %lld is not used: the pattern has %d layer%s\n",
                 (long long)m->cfg->model.layers, p->n_layers, plural(p->n_layers));
    if (m->cfg->model.mtp_layers != 0 && m->cfg->model.mtp_layers != p->n_mtp_depths)
        buf_addf(out, "  model.mtp_layers = %lld is not used: the pattern has %d MTP depth%s\n",
                 (long long)m->cfg->model.mtp_layers, p->n_mtp_depths, plural(p->n_mtp_depths));
}

/* ---- stages ---------------------------------------------------------------------------------- */

static void print_chunk(const struct pattern *p, const struct model_chunk *c, struct buf *out)
{
    enum { ROOM = 40 };
    const char *between = "";
    buf_addf(out, "  segment %d:", c->segment);
    if (c->first) {
        buf_add(out, " embedding");
        between = ",";
    }
    if (c->n > 0) {
        buf_addf(out, "%s layers %d to %d, %.*s%s", between, c->from, c->from + c->n - 1, c->n < ROOM ? c->n : ROOM,
                 p->symbols + c->from, c->n > ROOM ? "..." : "");
        between = ",";
    }
    if (c->last)
        buf_addf(out, "%s final norm, head", between);
    if (c->last && p->n_mtp_depths > 0)
        buf_addf(out, ", %d MTP depth%s", p->n_mtp_depths, plural(p->n_mtp_depths));
    if (!c->first && !c->last && c->n == 0)
        buf_add(out, " nothing");
    buf_add(out, "\n");
}

void model_print_stages(const struct model *m, struct buf *out)
{
    struct mesh at = m->mesh;
    struct model_chunk c;
    struct err e = {0};
    if (at.pp * at.vpp == 1)
        return;
    buf_addf(out, "pipeline: %d stage%s of %d chunk%s\n", at.pp, plural(at.pp), at.vpp, plural(at.vpp));
    for (at.pp_rank = 0; at.pp_rank < at.pp; at.pp_rank++) {
        buf_addf(out, " stage %d\n", at.pp_rank);
        for (int v = 0; v < at.vpp; v++)
            if (model_chunk(&m->pattern, &at, v, &c, &e) == ST_OK)
                print_chunk(&m->pattern, &c, out);
    }
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void print_whole(const struct model *m, struct buf *out)
{
    const struct config_model *c = &m->cfg->model;
    const struct pattern *p = &m->pattern;
    char text[32];
    int64_t total = param_table_elems(&m->params), rest = total;
    print_summary(m, out);
    buf_addf(out, "%5s %4s %-3s %-22s %-42s %12s %11s\n", "layer", "item", "", "core", "keys", "parameters",
             "FLOP/token");
    for (int s = 0; s < p->n_segments; s++)
        print_segment(m, s, out);
    for (int l = 0; l < p->n_layers; l++)
        rest -= layer_elems(m, l);
    struct row ends = {.layer = "-", .core = "ends", .flops = model_head_flops(m->cfg)};
    const char *norm = p->grouped ? "final_layernorm" : "final_norm";
    snprintf(ends.keys, sizeof ends.keys, "embedding%s, %s%s", c->tied ? " (tied)" : "", norm,
             c->tied ? "" : ", output");
    ends.elems = rest - prefix_elems(m, "mtp.");
    print_row(&ends, out);
    for (int k = 0; k < p->n_mtp_depths; k++)
        print_depth(m, k, out);
    buf_addf(out, "parameters: %lld (%s)\n", (long long)total, human_count((double)total, text, sizeof text));
}

/* A rank that holds a part shows the whole model too, declared on paper. */
void model_print_stack(const struct model *m, struct buf *out)
{
    struct model whole = {0};
    struct model_plan plan = {0};
    struct err e = {0};
    struct model_plan_opts o = {
        .name = "whole", .mode = BUILD_TRAIN, .batch = m->cfg->train.micro_batch, .seq = m->cfg->train.seq};
    bool part = m->mesh.pp > 1 || m->mesh.ep > 1 || m->mesh.etp > 1 || m->mesh.tp > 1;
    bool shown =
        part && model_init(&whole, m->cfg, m->dev, &e) == ST_OK && model_plan_build(&whole, &plan, &o, &e) == ST_OK;
    print_whole(shown ? &whole : m, out);
    if (part) {
        model_plan_release(&plan);
        model_release(&whole);
    }
    model_print_stages(m, out);
}

void model_print_params(const struct model *m, struct buf *out)
{
    buf_addf(out, "%-58s %-18s %s\n", "key", "shape", "decay");
    for (int k = 0; k < m->params.n; k++) {
        const struct param *p = &m->params.list[k].p;
        struct tensor t = tensor_shape(m->dev->real, p->rank, p->dim);
        char shape[64];
        buf_addf(out, "%-58s %-18s %s\n", p->key, tensor_text(&t, shape, sizeof shape), p->decay ? "yes" : "no");
    }
}
