/* LoRA: low-rank adapters of linear layers, y = x W^T + s (x A^T) B^T with s = alpha / rank.
 *
 *   xa  [rows, rank] = x A^T             A [rank, in] down, uniform in +-1/sqrt(in) at first
 *   y  (a part of it) += s xa B^T        B [rows of the part, rank] up, zero at first
 * backward: dxa = s dy B; dx += dxa A; dA = dxa^T x; dB = s dy^T xa.
 * They are further op calls of the layer's own node, so that schedules, recomputing and ranks do not know of them. A
 * projection that holds several (q, k and v; gate and up) has an adapter for each, as programs that keep these apart
 * have.
 *
 * Under tensor parallelism an adapter is divided as its weight is. Where ranks hold rows of the weight they hold the
 * same rows of B, and A is on all of them: each adds up its rows' part of dxa, so that dA is a part of the sum. Where
 * they hold columns, A has the same columns and B is on all of them: xa is a part of a sum, and so are y, which is
 * summed anyway, and dB. Nothing further travels. */
#include "layers/layer.h"
#include "ops/gemm/gemm.h"

#include <math.h>
#include <string.h>

struct adapter {
    struct adapter *next;
    int node;
    struct weight a, b;
    slot_id y, xa, dxa;
    int64_t first, rows; /* columns of y */
};

/* ---- which layers ---------------------------------------------------------------------------- */

/* Hugging Face's names of modules, and what they are here: the end of a weight's key without
 * ".weight", with the part. */
static const struct {
    const char *theirs, *ours;
} modules[] = {
    {"q_proj", "linear_qkv.q"},       {"k_proj", "linear_qkv.k"},         {"v_proj", "linear_qkv.v"},
    {"q_proj", "linear_q_proj"},      {"o_proj", "linear_proj"},          {"gate_proj", "linear_fc1.gate"},
    {"up_proj", "linear_fc1.up"},     {"down_proj", "linear_fc2"},        {"q_a_proj", "linear_q_down_proj"},
    {"q_b_proj", "linear_q_up_proj"}, {"kv_b_proj", "linear_kv_up_proj"}, {"kv_a_proj_with_mqa", "linear_kv_down_proj"},
};

/* Is word the last components of name? */
static bool ends_with(const char *name, const char *word)
{
    size_t n = strlen(name), k = strlen(word);
    return n >= k && strcmp(name + n - k, word) == 0 && (n == k || name[n - k - 1] == '.');
}

bool lora_names(const char *word, const char *weight_key, const char *part)
{
    char module[224], whole[256];
    size_t n = strlen(weight_key), cut = str_ends(weight_key, ".weight") ? strlen(".weight") : 0;
    bool has_part = part != NULL && part[0] != '\0';
    snprintf(module, sizeof module, "%.*s", (int)(n - cut), weight_key);
    snprintf(whole, sizeof whole, "%s%s%s", module, has_part ? "." : "", has_part ? part : "");
    if (strcmp(word, "all-linear") == 0)
        return true;
    if (strchr(word, '*') != NULL)
        return str_glob(word, weight_key) || str_glob(word, module) || str_glob(word, whole);
    bool named = ends_with(module, word) || ends_with(whole, word) || strcmp(weight_key, word) == 0;
    for (int i = 0; i < countof(modules) && !named; i++)
        named = strcmp(modules[i].theirs, word) == 0 &&
                (ends_with(module, modules[i].ours) || ends_with(whole, modules[i].ours));
    return named;
}

static bool is_target(const struct config *c, const char *key, const char *part)
{
    char word[512];
    for (const char *p = c->lora.targets; *p != '\0';) {
        p += strspn(p, ", \t\n");
        size_t n = strcspn(p, ", \t\n");
        snprintf(word, sizeof word, "%.*s", (int)min_i64((int64_t)n, sizeof word - 1), p);
        if (n > 0 && n < sizeof word && lora_names(word, key, part))
            return true;
        p += n;
    }
    return false;
}

/* ---- declaration ----------------------------------------------------------------------------- */

static double scale_of(const struct build *b) { return b->cfg->lora.alpha / (double)b->cfg->lora.rank; }

/* "mlp.linear_fc1.adapter.adapter_gate.linear_in.weight" below the layer's prefix: Megatron Bridge's names. */
static void adapter_key(char *out, size_t size, const char *weight, const char *part, const char *which)
{
    int module = (int)(strlen(weight) - (str_ends(weight, ".weight") ? strlen(".weight") : 0));
    bool has_part = part != NULL && part[0] != '\0';
    snprintf(out, size, "%.*s.adapter%s%s.%s.weight", module, weight, has_part ? ".adapter_" : "", has_part ? part : "",
             which);
}

/* Sizes and split of the whole adapter of rows [first, first + rows) of this rank's part of a weight. */
static void divide_adapter(const struct param *w, int64_t first, int64_t rows, struct param *down, struct param *up)
{
    int64_t ranks = max_i64(1, w->slice.ranks), at = 0, whole = 0;
    down->lora.first = up->lora.first = first;
    if (w->split.how != SPLIT_DIM) {
        down->split = up->split = w->split;
        return;
    }
    if (w->split.dim == 1) {
        down->dim[1] *= ranks;
        down->split = w->split;
        param_replicate(up, GRAD_OVER_HEADS);
        return;
    }
    param_replicate(down, GRAD_OVER_HEADS);
    up->dim[0] *= ranks;
    for (int i = 0; i < w->split.n_sections; i++) {
        const struct split_section *x = &w->split.section[i];
        if (at == first)
            down->lora.first = up->lora.first = whole;
        if (at >= first && at < first + rows)
            param_split_section(up, 0, x->size, x->unit, x->units);
        at += x->size / ranks;
        whole += x->size;
    }
}

static void add_adapter(struct build *b, int node, const struct linear *l, const char *name, const char *part,
                        int64_t first, int64_t rows)
{
    char key[192], weight[192], slot[64];
    int64_t rank = b->cfg->lora.rank;
    struct adapter *x = graph_own(b->g, sizeof *x);
    if (x == NULL)
        return;
    snprintf(weight, sizeof weight, "%s",
             b->params->list[l->w.param].p.key + strlen(b->prefix)); /* the table may move */
    struct param down = param_matrix(key, rank, l->in, 0), up = param_matrix(key, rows, rank, 0);
    down.init = INIT_UNIFORM;
    up.init = INIT_ZERO;
    down.lora.of = up.lora.of = l->w.param + 1;
    up.lora.up = true;
    divide_adapter(&b->params->list[l->w.param].p, l->first + first, rows, &down, &up);
    down.init_b = 1 / sqrt((double)down.dim[1]); /* of all ranks */
    down.init_a = -down.init_b;
    *x = (struct adapter){.next = b->adapters, .node = node, .y = l->y, .first = first, .rows = rows};
    adapter_key(key, sizeof key, weight, part, "linear_in");
    x->a = build_weight(b, &down);
    adapter_key(key, sizeof key, weight, part, "linear_out");
    x->b = build_weight(b, &up);
    snprintf(slot, sizeof slot, "%s_lora%s%s", name, part ? "_" : "", part ? part : "");
    x->xa = build_real(b, slot, b->rows, rank);
    snprintf(slot, sizeof slot, "d%s_lora%s%s", name, part ? "_" : "", part ? part : "");
    x->dxa = build_grad(b, slot, b->rows, rank);
    b->adapters = x;
}

void lora_forward(struct build *b, int node, const struct linear *l, const char *name)
{
    struct graph *g = b->g;
    int64_t first = 0;
    if (b->cfg->lora.rank == 0 || l->plain || g->err.code != ST_OK || l->w.param < 0)
        return;
    int n = 0;
    while (n < LINEAR_MAX_PARTS && l->part[n].name != NULL)
        n++;
    for (int i = 0; i < (n > 0 ? n : 1); i++) {
        int64_t rows = n > 0 ? l->part[i].rows : l->out;
        const char *part = n > 1 ? l->part[i].name : NULL, *named = n > 0 ? l->part[i].name : NULL;
        char key[192]; /* of the weight: the table moves when an adapter is added */
        snprintf(key, sizeof key, "%s", b->params->list[l->w.param].p.key);
        if (rows > 0 && is_target(b->cfg, key, named))
            add_adapter(b, node, l, name, part, first, rows);
        first += rows;
    }
    struct phase *p = &g->nodes[node].phase[PH_FWD];
    for (const struct adapter *x = b->adapters; x != NULL && x->node == node && x->y == l->y; x = x->next) {
        struct tensor y = of(g, l->y);
        GRAPH_OP(g, node, PH_FWD, gemm, .a = of(g, l->x), .b = of(g, x->a.w), .c = of(g, x->xa), .trans_b = true,
                 .alpha = 1);
        GRAPH_OP(g, node, PH_FWD, gemm, .a = of(g, x->xa), .b = of(g, x->b.w), .c = tensor_cols(&y, x->first, x->rows),
                 .trans_b = true, .alpha = scale_of(b));
        graph_cost(g, node, PH_FWD, p->flops + 2 * (double)(b->rows * b->cfg->lora.rank) * (double)(l->in + x->rows),
                   p->bytes);
    }
}

void lora_backward(struct build *b, int node, const struct linear *l)
{
    struct graph *g = b->g;
    if (!training(b) || g->err.code != ST_OK)
        return;
    for (const struct adapter *x = b->adapters; x != NULL && x->node == node; x = x->next) {
        if (x->y != l->y)
            continue;
        struct tensor dy = of(g, l->dy), dy_part = tensor_cols(&dy, x->first, x->rows);
        graph_again(g, node, x->xa);
        GRAPH_OP(g, node, PH_BWD, gemm, .a = dy_part, .b = of(g, x->b.w), .c = of(g, x->dxa), .alpha = scale_of(b));
        if (l->dx != NO_SLOT)
            GRAPH_OP(g, node, PH_BWD, gemm, .a = of(g, x->dxa), .b = of(g, x->a.w), .c = of(g, l->dx), .alpha = 1);
        GRAPH_OP(g, node, PH_DW, gemm, .a = of(g, x->dxa), .b = of(g, l->x), .c = of(g, x->a.dw), .trans_a = true,
                 .alpha = 1);
        GRAPH_OP(g, node, PH_DW, gemm, .a = dy_part, .b = of(g, x->xa), .c = of(g, x->b.dw), .trans_a = true,
                 .alpha = scale_of(b));
    }
}
