/* A model's memory: committing arenas, filling tables and parameters, host views. */
#include "model/model.h"
#include "ops/init/init.h"
#include "ops/ops.h"

#include <math.h>
#include <stdlib.h>

int model_init(struct model *m, const struct config *cfg, struct dev *dev, struct err *e)
{
    *m = (struct model){.cfg = cfg, .dev = dev, .ops = ops_for(dev), .mesh = mesh_alone()};
    param_table_init(&m->params);
    TRY(pattern_parse(&m->pattern, cfg->model.pattern, e));
    TRY(pattern_check_cores(&m->pattern, e));
    TRY(model_check_kernels(cfg, dev, e));
    TRY(policy_read(&m->policy, cfg, m->pattern.n_layers, e));
    m->mem.away[ARENA_OPTIM] = cfg->optim.offload != CFG_OPTIM_OFFLOAD_OFF;
    m->mem.away[ARENA_MASTER] = cfg->optim.offload == CFG_OPTIM_OFFLOAD_ALL;
    return pattern_check_keys(&m->pattern, e);
}

void model_release(struct model *m)
{
    memory_release(&m->mem);
    policy_release(&m->policy);
    param_table_release(&m->params);
    free(m->tables.t);
    free(m->metrics.m);
    free(m->routes.s);
    free(m->updates.u);
    *m = (struct model){0};
}

static int fill_tables(struct model *m, struct err *e)
{
    for (int i = 0; i < m->tables.n; i++) {
        struct table *t = &m->tables.t[i];
        struct tensor host = t->shape;
        if (t->fill == NULL)
            continue;
        int64_t bytes = tensor_bytes(&host);
        TRY(mem_aligned(&host.data, (size_t)bytes, DEV_ALIGN, e));
        t->fill(&host, t->arg);
        int st = model_write_state(m, t->offset, host.data, bytes, e);
        free(host.data);
        TRY(st);
    }
    return ST_OK;
}

int model_commit(struct model *m, struct model_plan **plans, int n_plans, struct err *e)
{
    TRY(memory_commit(&m->mem, m->dev, e));
    for (int a = 0; a < ARENA_ALL; a++)
        if (m->mem.allocated[a] != m->mem.planned[a])
            return err_set(e, ST_INTERNAL, "arena %s: planned %lld bytes, allocated %lld", arena_name((enum arena_id)a),
                           (long long)m->mem.planned[a], (long long)m->mem.allocated[a]);
    for (int i = 0; i < n_plans; i++)
        TRY(plan_bind(&plans[i]->p, &m->mem, e));
    return fill_tables(m, e);
}

/* What is kept of a host tensor that holds all of the parameter. */
static struct tensor kept_of(const struct model *m, int index, const struct tensor *host, enum kept_form form)
{
    struct shard s = mesh_kept(&m->mesh, &m->params.list[index].p, form);
    return tensor_1d((char *)host->data + s.first * (int64_t)dtype_bytes(host->dtype), host->dtype, s.n);
}

int model_set_param(struct model *m, int index, const struct tensor *whole, struct err *e)
{
    const struct param_entry *row = &m->params.list[index];
    struct tensor from = kept_of(m, index, whole, KEPT_WEIGHT), *host = &from,
                  master = kept_of(m, index, whole, KEPT_MASTER);
    struct tensor copy = tensor_1d(NULL, param_dtype(&row->p, m->dev->real), from.dim[0]);
    if (row->master_offset >= 0)
        TRY(m->dev->vt->copy_in(m->dev, m->mem.base[ARENA_MASTER] + row->master_offset, master.data,
                                tensor_bytes(&master), e));
    if (from.dim[0] == 0)
        return ST_OK;
    char *to = m->mem.base[ARENA_PARAM] + row->offset;
    if (copy.dtype == host->dtype)
        return m->dev->vt->copy_in(m->dev, to, host->data, tensor_bytes(host), e);
    TRY(mem_aligned(&copy.data, (size_t)tensor_bytes(&copy), DEV_ALIGN, e));
    tensor_convert(&copy, host);
    int st = m->dev->vt->copy_in(m->dev, to, copy.data, tensor_bytes(&copy), e);
    free(copy.data);
    return st;
}

/* Initial values are a function of an element's place in the whole parameter, so a part has those of the whole. First
 * element of the part that y is; copy: the same in the layers' type, or absent. lane: NULL for host memory. */
static int fill_param(const struct model *m, const struct param *p, int64_t first, const struct tensor *y,
                      const struct tensor *copy, struct lane *lane, struct err *e)
{
    int64_t n = tensor_elems(y);
    for (int64_t at = 0; at < n;) {
        struct param_run run = param_run_from(p, first + at);
        int64_t here = min_i64(run.n, n - at);
        struct init_args a = {.y = tensor_rows(y, at, here),
                              .kind = p->init,
                              .a = p->init_a,
                              .b = p->init_b,
                              .row = p->rank > 1 ? p->dim[1] : 1,
                              .n_values = p->n_values,
                              .key = rng_key((uint64_t)m->cfg->run.seed, p->key),
                              .first = run.whole};
        if (copy->data != NULL)
            a.copy = tensor_rows(copy, at, here);
        TRY(lane != NULL ? m->ops->init(lane, &a) : init_host(&a, e));
        at += here;
    }
    return ST_OK;
}

int model_init_params(struct model *m, struct err *e)
{
    struct lane lane = {.dev = m->dev, .err = e};
    for (int k = 0; k < m->params.n; k++) {
        const struct param_entry *row = &m->params.list[k];
        const struct param *p = &row->p;
        struct shard kept = model_param_kept(m, k), copy = mesh_kept(&m->mesh, p, KEPT_WEIGHT);
        int64_t n = kept.n;
        struct tensor trained = model_param(m, k);
        if (n == 0)
            continue;
        struct tensor values = tensor_1d(trained.data, trained.dtype, n), copies = {0};
        if (row->master_offset >= 0) /* of other ranks' pieces, their values are gathered from them */
            copies = tensor_1d(m->mem.base[ARENA_PARAM] + row->offset +
                                   (kept.first - copy.first) * (int64_t)dtype_bytes(m->dev->real),
                               m->dev->real, n);
        if (values.dtype != DT_BF16) {
            TRY(fill_param(m, p, kept.first, &values, &copies, &lane, e));
            continue;
        }
        /* A narrow copy without a master: nothing is trained here. */
        struct tensor host = tensor_shape(m->dev->wide, p->rank, p->dim);
        TRY(mem_aligned(&host.data, (size_t)tensor_bytes(&host), DEV_ALIGN, e));
        values = tensor_1d(host.data, host.dtype, n);
        int st = fill_param(m, p, kept.first, &values, &copies, NULL, e);
        if (st == ST_OK)
            st = model_set_param(m, k, &host, e);
        free(host.data);
        TRY(st);
    }
    return model_quantise(m, e);
}

struct tensor model_param(const struct model *m, int index)
{
    const struct param_entry *row = &m->params.list[index];
    bool master = row->master_offset >= 0;
    struct tensor t = tensor_shape(param_dtype(&row->p, master ? m->dev->wide : m->dev->real), row->p.rank, row->p.dim);
    if (mesh_shards(&m->mesh, &row->p, master ? KEPT_MASTER : KEPT_WEIGHT))
        t = tensor_1d(NULL, t.dtype, model_param_kept(m, index).n);
    t.data = master ? m->mem.base[ARENA_MASTER] + row->master_offset : m->mem.base[ARENA_PARAM] + row->offset;
    return t;
}

struct shard model_param_kept(const struct model *m, int index)
{
    const struct param_entry *row = &m->params.list[index];
    return mesh_kept(&m->mesh, &row->p, row->master_offset >= 0 ? KEPT_MASTER : KEPT_WEIGHT);
}

struct tensor model_grad(const struct model *m, int index)
{
    const struct param_entry *row = &m->params.list[index];
    struct tensor t = tensor_shape(m->dev->wide, row->p.rank, row->p.dim);
    if (mesh_shards(&m->mesh, &row->p, KEPT_GRADIENT))
        t = tensor_1d(NULL, t.dtype, mesh_shard(&m->mesh, &row->p).n);
    t.data = m->mem.base[ARENA_GRAD] + row->grad_offset;
    return t;
}

int model_read_state(const struct model *m, int64_t offset, void *out, int64_t bytes, struct err *e)
{
    return m->dev->vt->copy_out(m->dev, out, m->mem.base[ARENA_STATE] + offset, bytes, e);
}

int model_write_state(const struct model *m, int64_t offset, const void *in, int64_t bytes, struct err *e)
{
    return m->dev->vt->copy_in(m->dev, m->mem.base[ARENA_STATE] + offset, in, bytes, e);
}

struct tensor model_slot(const struct model *m, const struct model_plan *mp, slot_id slot)
{
    if (slot < 0)
        return (struct tensor){0};
    const struct slot *s = &mp->g.slots[slot];
    struct tensor t = s->shape;
    t.data = m->mem.base[s->arena] + s->offset;
    return t;
}

double model_layer_flops(const struct config *cfg, char symbol, int64_t seq)
{
    const struct core_kind *core = core_find(symbol);
    return core != NULL && core->flops != NULL ? core->flops(cfg, seq) : 0;
}

double model_head_flops(const struct config *cfg)
{
    return 2 * (double)cfg->model.hidden * (double)padded_vocab(&cfg->model);
}

/* A depth projects its embedding and every stream, each once, and has a head. */
double model_mtp_flops(const struct config *cfg)
{
    double products = 1 + (double)max_i64(cfg->model.mhc_streams, 1);
    return 2 * products * (double)cfg->model.hidden * (double)cfg->model.hidden + model_head_flops(cfg);
}

double model_flops_per_token(const struct config *cfg, const struct pattern *p, int64_t seq)
{
    double sum = model_head_flops(cfg), depth = model_mtp_flops(cfg);
    for (int i = 0; i < p->n_layers; i++)
        sum += model_layer_flops(cfg, p->symbols[i], seq);
    for (int i = 0; i < p->n_mtp_layers; i++)
        depth += model_layer_flops(cfg, p->mtp_symbols[i], seq);
    return sum + p->n_mtp_depths * depth;
}
