/* What layers call while they declare themselves: weights, slots, tables, the linear block. */
#include "layers/shard.h"
#include "layers/unit.h"
#include "ops/attention/attention.h"
#include "ops/colsum/colsum.h"
#include "ops/gemm/gemm.h"
#include "ops/layernorm/layernorm.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"

#include <math.h>
#include <string.h>

struct weight no_weight(void)
{
    return (struct weight){.w = NO_SLOT, .dw = NO_SLOT, .param = -1, .codes = {NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT}};
}

struct param param_matrix(const char *name, int64_t out, int64_t in, double std)
{
    return (struct param){.key = name, .rank = 2, .dim = {out, in}, .init = INIT_NORMAL, .init_a = std, .decay = true};
}

struct param param_vector(const char *name, int64_t n, enum init_kind init)
{
    return (struct param){.key = name, .rank = 1, .dim = {n}, .init = init};
}

double output_std(const struct build *b)
{
    double std = b->cfg->model.init_std;
    int branches = b->cfg->model.init_scale == CFG_INIT_SCALE_GPT ? 2 : 1;
    if (b->cfg->model.init_scale == CFG_INIT_SCALE_NONE)
        return std;
    return std / sqrt((double)(branches * (b->n_layers > 0 ? b->n_layers : 1)));
}

/* Bytes that are kept of a parameter in one of its forms. */
static int64_t kept_bytes(const struct build *b, const struct param *p, enum kept_form form)
{
    enum dtype type = form == KEPT_WEIGHT ? param_dtype(p, b->dev->real) : b->dev->wide;
    return mesh_kept(b->mesh, p, form).n * (int64_t)dtype_bytes(type);
}

/* A group's freeze decides; without one base weights of LoRA are frozen, and all but the indexers while these warm up;
 * all else is trained. */
static void set_group(const struct build *b, struct param *p)
{
    int k = config_group_of(b->cfg, p->key);
    int freeze = k >= 0 ? b->cfg->group[k].freeze : CFG_FREEZE_AUTO;
    bool base = b->cfg->lora.rank > 0 && p->lora.of == 0;
    bool warms_up = b->cfg->model.dsa_dense_warmup && strchr(b->cfg->model.pattern, 'D') != NULL;
    bool waits = warms_up && strstr(p->key, ".indexer.") == NULL;
    p->group = k + 1;
    p->frozen = !p->buffer && (freeze == CFG_FREEZE_ON || (freeze == CFG_FREEZE_AUTO && (base || waits)));
}

struct weight build_weight(struct build *b, const struct param *decl)
{
    char key[192], name[224];
    int index;
    bool is_new;
    struct param p = *decl;
    snprintf(key, sizeof key, "%s%s", b->prefix, decl->key);
    p.key = key;
    p.layer = b->prefix[0] ? b->layer : -1;
    set_group(b, &p);
    if (b->g->err.code != ST_OK || shard_param(b, &p) != ST_OK ||
        param_add(b->params, &p, &index, &is_new, &b->g->err) != ST_OK)
        return no_weight();
    struct param_entry *row = &b->params->list[index];
    if (is_new) {
        row->offset = memory_reserve(b->mem, ARENA_PARAM, kept_bytes(b, &p, KEPT_WEIGHT));
        row->grad_offset = row->master_offset = row->code_work = -1;
        memset(row->code_offset, -1, sizeof row->code_offset);
    }
    struct weight w = no_weight();
    w.param = index;
    w.w = unit_weight(b, index, decl->key);
    if (p.codes)
        weight_codes(b, row, &w);
    if (training(b) && !p.buffer) {
        snprintf(name, sizeof name, "d.%s", decl->key);
        if (p.frozen) {
            w.dw = graph_unwanted(b->g, name, tensor_shape(b->dev->wide, p.rank, p.dim));
            return w;
        }
        if (row->grad_offset < 0)
            row->grad_offset = memory_reserve(b->mem, ARENA_GRAD, kept_bytes(b, &p, KEPT_GRADIENT));
        if (row->master_offset < 0 && param_dtype(&p, b->dev->real) != b->dev->wide)
            row->master_offset = memory_reserve(b->mem, ARENA_MASTER, kept_bytes(b, &p, KEPT_MASTER));
        w.dw = unit_gradient(b, index, name);
    }
    return w;
}

bool wide_stream(const struct build *b) { return b->cfg->model.fp32_residual && b->dev->wide != b->dev->real; }

slot_id build_real(struct build *b, const char *name, int64_t rows, int64_t cols)
{
    return graph_slot(b->g, name, tensor_2d(NULL, b->dev->real, rows, cols));
}

slot_id build_wide(struct build *b, const char *name, int64_t rows, int64_t cols)
{
    return graph_slot(b->g, name, tensor_2d(NULL, b->dev->wide, rows, cols));
}

slot_id build_stream(struct build *b, const char *name, int64_t rows, int64_t cols)
{
    return wide_stream(b) ? build_wide(b, name, rows, cols) : build_real(b, name, rows, cols);
}

slot_id build_stream_grad(struct build *b, const char *name, int64_t rows, int64_t cols)
{
    return training(b) ? build_stream(b, name, rows, cols) : NO_SLOT;
}

slot_id build_grad(struct build *b, const char *name, int64_t rows, int64_t cols)
{
    return training(b) ? build_real(b, name, rows, cols) : NO_SLOT;
}

slot_id build_wide_grad(struct build *b, const char *name, int64_t rows, int64_t cols)
{
    return training(b) ? build_wide(b, name, rows, cols) : NO_SLOT;
}

slot_id build_work(struct build *b, const char *name, int64_t bytes)
{
    return bytes > 0 ? graph_slot(b->g, name, tensor_1d(NULL, DT_U8, bytes)) : NO_SLOT;
}

slot_id build_table(struct build *b, const char *name, struct tensor shape, void (*fill)(struct tensor *, const void *),
                    const void *arg)
{
    struct table_list *l = b->tables;
    const char *full = graph_name(b->g, name);
    if (full == NULL)
        return NO_SLOT;
    int i = 0;
    while (i < l->n && strcmp(l->t[i].name, full) != 0)
        i++;
    if (i == l->n) {
        char *kept = arena_strdup(&b->params->text, full);
        if (kept == NULL || mem_grow((void **)&l->t, &l->cap, (size_t)l->n + 1, sizeof *l->t, &b->g->err) != ST_OK) {
            err_set(&b->g->err, ST_NOMEM, "out of memory declaring %s", full);
            return NO_SLOT;
        }
        l->t[l->n++] = (struct table){.name = kept,
                                      .shape = shape,
                                      .fill = fill,
                                      .arg = arg,
                                      .offset = memory_reserve(b->mem, ARENA_STATE, tensor_bytes(&shape))};
    } else if (!tensor_same_shape(&l->t[i].shape, &shape)) {
        err_set(&b->g->err, ST_INTERNAL, "table %s is declared with two shapes", full);
        return NO_SLOT;
    }
    return graph_persistent(b->g, name, shape, ARENA_STATE, l->t[i].offset);
}

slot_id build_state(struct build *b, const char *name, struct tensor shape)
{
    return graph_persistent(b->g, name, shape, ARENA_STATE, memory_reserve(b->mem, ARENA_STATE, tensor_bytes(&shape)));
}

slot_id build_metric(struct build *b, const char *tag, int64_t n)
{
    struct metric_list *l = b->metrics;
    if (!training(b) || b->g->err.code != ST_OK ||
        mem_grow((void **)&l->m, &l->cap, (size_t)l->n + 1, sizeof *l->m, &b->g->err) != ST_OK)
        return NO_SLOT;
    struct tensor shape = tensor_1d(NULL, DT_F64, n);
    char *kept = arena_strdup(&b->params->text, tag);
    slot_id slot = build_state(b, tag, shape);
    graph_sum(b->g, slot);
    if (kept == NULL || slot == NO_SLOT)
        return NO_SLOT;
    l->m[l->n++] = (struct metric){.tag = kept, .layer = b->layer, .n = n, .offset = b->g->slots[slot].offset};
    return slot;
}

void build_update(struct build *b, const struct update_decl *u)
{
    struct update_list *l = b->updates;
    if (training(b) && b->g->err.code == ST_OK &&
        mem_grow((void **)&l->u, &l->cap, (size_t)l->n + 1, sizeof *l->u, &b->g->err) == ST_OK)
        l->u[l->n++] = *u;
}

struct sublayer sublayer_entry(slot_id x, slot_id dx, bool wide)
{
    struct sublayer s = {.x = x, .dx = dx, .f = NO_SLOT, .df = NO_SLOT, .h = NO_SLOT, .dh = NO_SLOT, .wide = wide};
    s.aux[AUX_CARRY] = NO_SLOT;
    return s;
}

/* ---- linear ---------------------------------------------------------------------------------- */

struct linear_cost {
    double flops, bytes;
};
static struct linear_cost linear_cost(const struct build *b, const struct linear *l)
{
    double rows = (double)b->rows, in = (double)l->in, out = (double)l->out;
    return (struct linear_cost){2 * rows * in * out,
                                (double)dtype_bytes(b->dev->real) * (rows * in + rows * out + in * out)};
}

/* Where several ranks add up what they have, each adds the bias to its own share of the rows, so that every row has it
 * once. */
static bool bias_on_share(const struct build *b, const struct linear *l)
{
    return l->summed && l->bias.w != NO_SLOT && b->mesh->tp > 1;
}

static struct tensor own_share(const struct build *b, struct tensor t)
{
    int64_t n = b->rows / b->mesh->tp;
    return tensor_rows(&t, b->mesh->tp_rank * n, n);
}

static void declare_product(struct build *b, int n, const struct linear *l)
{
    struct graph *g = b->g;
    struct tensor x = of(g, l->x), y = of(g, l->y), w = of(g, l->w.w), bias = of(g, l->bias.w);
    if (!bias_on_share(b, l)) {
        GRAPH_OP(g, n, PH_FWD, gemm, .a = x, .b = w, .c = y, .bias = bias, .trans_b = true, .alpha = 1);
        return;
    }
    int64_t share = b->rows / b->mesh->tp, first = b->mesh->tp_rank * share, end = first + share;
    if (first > 0)
        GRAPH_OP(g, n, PH_FWD, gemm, .a = tensor_rows(&x, 0, first), .b = w, .c = tensor_rows(&y, 0, first),
                 .trans_b = true, .alpha = 1);
    GRAPH_OP(g, n, PH_FWD, gemm, .a = own_share(b, x), .b = w, .c = own_share(b, y), .bias = bias, .trans_b = true,
             .alpha = 1);
    if (end < b->rows)
        GRAPH_OP(g, n, PH_FWD, gemm, .a = tensor_rows(&x, end, b->rows - end), .b = w,
                 .c = tensor_rows(&y, end, b->rows - end), .trans_b = true, .alpha = 1);
}

int linear_forward(struct build *b, const char *name, const struct linear *l)
{
    struct graph *g = b->g;
    struct linear_cost cost = linear_cost(b, l);
    bool codes = l->w.codes.q != NO_SLOT;
    if (codes)
        activation_codes(b, l);
    int n = graph_node(g, name, LANE_COMPUTE, NULL);
    if (codes)
        linear8_forward(b, n, l);
    else
        declare_product(b, n, l);
    graph_cost(g, n, PH_FWD, cost.flops, cost.bytes);
    lora_forward(b, n, l, name);
    return n;
}

void linear_backward(struct build *b, int n, const struct linear *l)
{
    struct graph *g = b->g;
    struct linear_cost cost = linear_cost(b, l);
    if (!training(b))
        return;
    graph_again(g, n, l->y);
    bool codes = l->w.codes.q != NO_SLOT;
    if (codes)
        linear8_backward(b, n, l);
    if (l->dx != NO_SLOT) {
        if (!codes)
            GRAPH_OP(g, n, PH_BWD, gemm, .a = of(g, l->dy), .b = of(g, l->w.w), .c = of(g, l->dx), .alpha = 1);
        graph_cost(g, n, PH_BWD, cost.flops, cost.bytes);
    }
    if (!codes)
        GRAPH_OP(g, n, PH_DW, gemm, .a = of(g, l->dy), .b = of(g, l->x), .c = of(g, l->w.dw), .trans_a = true,
                 .alpha = 1);
    if (l->bias.w != NO_SLOT)
        GRAPH_OP(g, n, PH_DW, colsum, .x = bias_on_share(b, l) ? own_share(b, of(g, l->dy)) : of(g, l->dy),
                 .out = of(g, l->bias.dw));
    graph_cost(g, n, PH_DW, cost.flops, cost.bytes);
    lora_backward(b, n, l);
}

int linear_declare(struct build *b, const char *name, const struct linear *l)
{
    int n = linear_forward(b, name, l);
    linear_backward(b, n, l);
    return n;
}

/* ---- norm ------------------------------------------------------------------------------------ */

struct norm norm_weights(struct build *b, const char *key, int64_t width)
{
    const struct config_model *c = &b->cfg->model;
    struct norm n = {.b = no_weight(),
                     .mean = NO_SLOT,
                     .rstd = NO_SLOT,
                     .eps = c->norm_eps,
                     .layer = c->norm == CFG_NORM_LAYER,
                     .zero_centered = c->norm_zero_centered};
    struct param gain = param_vector(key, width, n.zero_centered ? INIT_ZERO : INIT_ONE);
    param_replicate(&gain, GRAD_OVER_TOKENS);
    n.w = build_weight(b, &gain);
    if (!n.layer)
        return n;
    char bias_key[128];
    snprintf(bias_key, sizeof bias_key, "%.*sbias", (int)(strlen(key) - strlen("weight")), key);
    struct param bias = param_vector(bias_key, width, INIT_ZERO);
    param_replicate(&bias, GRAD_OVER_TOKENS);
    n.b = build_weight(b, &bias);
    return n;
}

void norm_statistics(struct build *b, struct norm *n, const char *prefix, int64_t rows)
{
    char name[32];
    struct tensor shape = tensor_1d(NULL, b->dev->wide, rows);
    snprintf(name, sizeof name, "%srstd", prefix);
    n->rstd = graph_slot(b->g, name, shape);
    snprintf(name, sizeof name, "%smean", prefix);
    n->mean = n->layer ? graph_slot(b->g, name, shape) : NO_SLOT;
}

void norm_forward(struct graph *g, int node, enum phase_id ph, const struct norm *n, struct tensor x, struct tensor y)
{
    if (n->layer)
        GRAPH_OP(g, node, ph, layernorm_fwd, .x = x, .w = of(g, n->w.w), .b = of(g, n->b.w), .y = y,
                 .mean = of(g, n->mean), .rstd = of(g, n->rstd), .eps = n->eps, .zero_centered = n->zero_centered);
    else
        GRAPH_OP(g, node, ph, rmsnorm_fwd, .x = x, .w = of(g, n->w.w), .y = y, .rstd = of(g, n->rstd), .eps = n->eps,
                 .zero_centered = n->zero_centered);
}

void norm_backward(struct graph *g, int node, const struct norm *n, struct tensor dy, struct tensor x,
                   struct tensor dres, struct tensor dx)
{
    if (n->layer)
        GRAPH_OP(g, node, PH_BWD, layernorm_bwd, .dy = dy, .x = x, .w = of(g, n->w.w), .mean = of(g, n->mean),
                 .rstd = of(g, n->rstd), .dres = dres, .dx = dx, .dw = of(g, n->w.dw), .db = of(g, n->b.dw),
                 .zero_centered = n->zero_centered);
    else
        GRAPH_OP(g, node, PH_BWD, rmsnorm_bwd, .dy = dy, .x = x, .w = of(g, n->w.w), .rstd = of(g, n->rstd),
                 .dres = dres, .dx = dx, .dw = of(g, n->w.dw), .zero_centered = n->zero_centered);
}

bool attention_draws(const struct config *c) { return c->model.attention_dropout > 0; }

struct dropout_rule attention_dropout(const struct build *b)
{
    if (!training(b) || b->cfg->model.attention_dropout == 0)
        return (struct dropout_rule){0};
    char site[64];
    snprintf(site, sizeof site, "dropout.attention.%d", b->layer);
    int64_t first_head = b->mesh->tp_rank * (b->cfg->model.heads / b->mesh->tp);
    return (struct dropout_rule){.p = b->cfg->model.attention_dropout,
                                 .key = attention_drop_key(rng_key((uint64_t)b->cfg->run.seed, site), first_head),
                                 .seq = b->seq,
                                 .info = of(b->g, b->in.info)};
}

struct rope_config rope_from_config(const struct config *cfg, int64_t dim)
{
    const struct config_model *c = &cfg->model;
    return (struct rope_config){.dim = dim,
                                .base = c->rope_base,
                                .scaling = (enum rope_scaling)c->rope_scaling,
                                .factor = c->rope_factor,
                                .original = c->rope_original,
                                .low = c->rope_low,
                                .high = c->rope_high,
                                .beta_fast = c->rope_beta_fast,
                                .beta_slow = c->rope_beta_slow,
                                .mscale = c->rope_mscale,
                                .mscale_all_dim = c->rope_mscale_all_dim,
                                .exact = !c->rope_truncate};
}
