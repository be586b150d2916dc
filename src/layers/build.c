/* What layers call while they declare themselves: weights, slots, tables, the linear block. */
#include "layers/layer.h"
#include "ops/colsum/colsum.h"
#include "ops/gemm/gemm.h"
#include "ops/rope/rope.h"

#include <math.h>
#include <string.h>

struct weight no_weight(void) { return (struct weight){.w = NO_SLOT, .dw = NO_SLOT}; }

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

static struct tensor param_shape(const struct build *b, const struct param *p)
{
    return tensor_shape(param_dtype(p, b->dev->real), p->rank, p->dim);
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
    if (b->g->err.code != ST_OK || param_add(b->params, &p, &index, &is_new, &b->g->err) != ST_OK)
        return no_weight();
    struct param_entry *row = &b->params->list[index];
    struct tensor shape = param_shape(b, &p);
    if (is_new) {
        row->offset = memory_reserve(b->mem, ARENA_PARAM, tensor_bytes(&shape));
        row->grad_offset = row->master_offset = -1;
    }
    struct weight w = no_weight();
    w.w = graph_persistent(b->g, decl->key, shape, ARENA_PARAM, row->offset);
    if (training(b) && !p.buffer) {
        snprintf(name, sizeof name, "d.%s", decl->key);
        struct tensor grad = tensor_shape(b->dev->wide, p.rank, p.dim);
        if (row->grad_offset < 0)
            row->grad_offset = memory_reserve(b->mem, ARENA_GRAD, tensor_bytes(&grad));
        if (row->master_offset < 0 && shape.dtype != grad.dtype)
            row->master_offset = memory_reserve(b->mem, ARENA_MASTER, tensor_bytes(&grad));
        w.dw = graph_persistent(b->g, name, grad, ARENA_GRAD, row->grad_offset);
    }
    return w;
}

slot_id build_real(struct build *b, const char *name, int64_t rows, int64_t cols)
{
    return graph_slot(b->g, name, tensor_2d(NULL, b->dev->real, rows, cols));
}

slot_id build_wide(struct build *b, const char *name, int64_t rows, int64_t cols)
{
    return graph_slot(b->g, name, tensor_2d(NULL, b->dev->wide, rows, cols));
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

slot_id build_table(struct build *b, const char *name, struct tensor shape,
                    void (*fill)(struct tensor *, const void *), const void *arg)
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
        l->t[l->n++] = (struct table){.name = kept, .shape = shape, .fill = fill, .arg = arg,
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

/* ---- linear ---------------------------------------------------------------------------------------------- */

static int linear_fwd(const struct step_ctx *c)
{
    enum { X, W, BIAS, Y };
    struct gemm_args a = {.a = c->t[X], .b = c->t[W], .c = c->t[Y], .bias = c->t[BIAS], .trans_b = true, .alpha = 1};
    return c->ops->gemm(c->lane, &a);
}

static int linear_bwd(const struct step_ctx *c)
{
    enum { DY, W, DX };
    struct gemm_args a = {.a = c->t[DY], .b = c->t[W], .c = c->t[DX], .alpha = 1, .acc_c = c->add[DX]};
    return c->ops->gemm(c->lane, &a);
}

static int linear_dw(const struct step_ctx *c)
{
    enum { DY, X, DW, DBIAS, WORK };
    struct gemm_args a = {.a = c->t[DY], .b = c->t[X], .c = c->t[DW], .trans_a = true, .alpha = 1, .acc_c = c->add[DW]};
    TRY(c->ops->gemm(c->lane, &a));
    if (c->t[DBIAS].data == NULL)
        return ST_OK;
    struct colsum_args s = {.x = c->t[DY], .out = c->t[DBIAS], .work = c->t[WORK], .acc_out = c->add[DBIAS]};
    return c->ops->colsum(c->lane, &s);
}

int linear_declare(struct build *b, const char *name, const struct linear *l)
{
    const struct use uses[] = {READS(l->x), READS(l->w.w), READS(l->bias.w), WRITES(l->y)};
    return linear_declare_with(b, name, l, linear_fwd, NULL, uses, countof(uses));
}

int linear_declare_with(struct build *b, const char *name, const struct linear *l, step_fn fn, const void *self, const struct use *uses, int n_uses)
{
    struct graph *g = b->g;
    double size = (double)dtype_bytes(b->dev->real), rows = (double)b->rows, in = (double)l->in, out = (double)l->out;
    double flops = 2 * rows * in * out, bytes = size * (rows * in + rows * out + in * out);
    int n = graph_node(g, name, LANE_COMPUTE, self);
    graph_phase(g, n, PH_FWD, fn, uses, n_uses);
    graph_cost(g, n, PH_FWD, flops, bytes);
    if (!training(b))
        return n;
    if (!l->no_replay) {
        graph_phase(g, n, PH_REPLAY, fn, uses, n_uses);
        graph_cost(g, n, PH_REPLAY, flops, bytes);
        graph_replay(g, l->y, n);
    }
    if (l->dx != NO_SLOT) {
        GRAPH_PHASE(g, n, PH_BWD, linear_bwd, READS(l->dy), READS(l->w.w), {l->dx, l->add_dx ? USE_ADD : USE_WRITE});
        graph_cost(g, n, PH_BWD, flops, bytes);
    }
    char work_name[64];
    snprintf(work_name, sizeof work_name, "%s.dbias_work", name);
    struct colsum_args s = {.x = tensor_2d(NULL, b->dev->real, b->rows, l->out), .out = tensor_1d(NULL, b->dev->wide, l->out)};
    bool needs_work = l->bias.w != NO_SLOT && b->ops->colsum_work != NULL;
    slot_id work = needs_work ? build_work(b, work_name, b->ops->colsum_work(&s)) : NO_SLOT;
    GRAPH_PHASE(g, n, PH_DW, linear_dw, READS(l->dy), READS(l->x), ADDS(l->w.dw), ADDS(l->bias.dw), WRITES(work));
    graph_cost(g, n, PH_DW, flops, bytes);
    return n;
}

struct rope_config rope_from_config(const struct config *cfg, int64_t dim)
{
    const struct config_model *c = &cfg->model;
    return (struct rope_config){.dim = dim, .base = c->rope_base, .scaling = (enum rope_scaling)c->rope_scaling,
                                .factor = c->rope_factor, .original = c->rope_original, .low = c->rope_low, .high = c->rope_high,
                                .beta_fast = c->rope_beta_fast, .beta_slow = c->rope_beta_slow, .mscale = c->rope_mscale,
                                .mscale_all_dim = c->rope_mscale_all_dim};
}
