/* FP8 codes of weights, made anew after every change of values.
 *
 * A rank that has all of a weight makes its codes. Where ranks share it out and codes travel (codes_travel()), each has
 * whole rows of it, and all of them together make the codes of the whole:
 *
 *   CODES_MOST    the largest magnitude of the own rows in every scale block that they reach into
 *   CODES_SHARE   every rank gets those of all: four bytes a block
 *   CODES_ENCODE  all scales, and the codes of the own rows
 *   CODES_GATHER  every rank gets the codes of all rows: a byte a value. With parallel.zero = 3 units do it (unit.c)
 *   CODES_TURN    codes of the transpose; the same
 * A block that is divided between ranks has the largest value of all of them, so codes and scales are bit for bit those
 * of the whole weight. */
#include "model/model.h"
#include "ops/ops.h"
#include "ops/quantise/quantise.h"
#include "ops/shard8/shard8.h"

static struct tensor codes_at(const struct model *m, int64_t offset, struct tensor shape)
{
    shape.data = offset < 0 ? NULL : m->mem.base[ARENA_CODE] + offset;
    return shape;
}

struct quantise_args model_param_codes(const struct model *m, int index)
{
    const struct param_entry *row = &m->params.list[index];
    struct code_rule r = code_rule(m->cfg);
    int64_t out = param_code_rows(&row->p), in = row->p.dim[row->p.rank - 1];
    enum dtype wide = m->dev->wide;
    struct tensor all = model_param(m, index);
    return (struct quantise_args){.x = tensor_2d(all.data, all.dtype, out, in),
                                  .q = codes_at(m, row->code_offset[0], tensor_2d(NULL, DT_F8_E4M3, out, in)),
                                  .qs = codes_at(m, row->code_offset[1], f8_scales(wide, out, in, r.block, r.square)),
                                  .t = codes_at(m, row->code_offset[2], tensor_2d(NULL, DT_F8_E4M3, in, out)),
                                  .ts = codes_at(m, row->code_offset[3], f8_scales(wide, in, out, r.block, r.square)),
                                  .block = r.block,
                                  .square = r.square};
}

int model_quantise_param(const struct model *m, int index, struct lane *lane)
{
    const struct param_entry *row = &m->params.list[index];
    struct quantise_args a = model_param_codes(m, index);
    int64_t work = m->ops->quantise_work != NULL ? m->ops->quantise_work(&a) : 0;
    a.work = codes_at(m, work > 0 ? row->code_work : -1, tensor_1d(NULL, DT_U8, work));
    return m->ops->quantise(lane, &a);
}

bool model_shares_codes(const struct model *m, int index)
{
    const struct param_entry *row = &m->params.list[index];
    return row->code_offset[0] >= 0 && row->p.code_shards && mesh_shards(&m->mesh, &row->p, KEPT_WEIGHT);
}

int model_quantise(struct model *m, struct err *e)
{
    struct lane lane = {.dev = m->dev, .err = e};
    for (int k = 0; k < m->params.n; k++) {
        m->codes_stale |= model_shares_codes(m, k);
        if (m->params.list[k].code_offset[0] >= 0 && !model_shares_codes(m, k) &&
            model_quantise_param(m, k, &lane) != ST_OK)
            return err_in(e, "FP8 codes of %s", m->params.list[k].p.key);
    }
    return ST_OK;
}

/* ---- codes that ranks make together ---------------------------------------------------------- */

/* What this rank has of a parameter, as rows of a matrix. */
struct own_rows {
    int64_t first, n, piece;
    struct tensor x, q;    /* values, and where their codes go */
    struct tensor maxima;  /* of all ranks */
    struct tensor own_max; /* of this one */
};

static struct own_rows own_rows(const struct model *m, int index)
{
    const struct param_entry *row = &m->params.list[index];
    const struct param *p = &row->p;
    struct shard s = mesh_shard(&m->mesh, p);
    int64_t cols = p->dim[p->rank - 1];
    struct own_rows o = {.first = s.first / cols, .n = s.n / cols, .piece = s.piece / cols};
    int64_t skip = s.first - mesh_kept(&m->mesh, p, KEPT_CODES).first;
    o.maxima = codes_at(m, row->code_work, code_maxima(m->cfg, &m->mesh, p, m->dev->wide));
    o.own_max = tensor_2d(o.maxima.data, o.maxima.dtype, o.maxima.dim[1], o.maxima.dim[2]);
    o.own_max.data = (char *)o.maxima.data + mesh_copy_rank(&m->mesh, p) * tensor_bytes(&o.own_max);
    o.x = tensor_2d(m->mem.base[ARENA_PARAM] + row->offset, m->dev->wide, o.n, cols);
    o.q = codes_at(m, row->code_offset[0] + skip, tensor_2d(NULL, DT_F8_E4M3, o.n, cols));
    return o;
}

static int compute_stage(const struct model *m, int index, enum code_stage stage, struct lane *lane)
{
    struct quantise_args all = model_param_codes(m, index);
    struct own_rows o = own_rows(m, index);
    struct shard8_most_args most = {.x = o.x, .most = o.own_max, .first = o.first, .block = all.block};
    struct shard8_codes_args codes = {.x = o.x,
                                      .most = o.maxima,
                                      .q = o.q,
                                      .qs = all.qs,
                                      .ts = all.ts,
                                      .rows = all.q.dim[0],
                                      .first = o.first,
                                      .piece = o.piece,
                                      .block = all.block};
    if (stage == CODES_MOST)
        return m->ops->shard8_most(lane, &most);
    if (stage == CODES_ENCODE)
        return m->ops->shard8_codes(lane, &codes);
    return all.t.data != NULL ? m->ops->shard8_turn(lane, &(struct shard8_turn_args){.q = all.q, .t = all.t}) : ST_OK;
}

static int exchange_stage(const struct model *m, int index, enum code_stage stage, struct comm *comm, const char *what,
                          struct lane *lane)
{
    const struct param_entry *row = &m->params.list[index];
    struct own_rows o = own_rows(m, index);
    struct tensor maxima = tensor_1d(o.maxima.data, o.maxima.dtype, tensor_elems(&o.maxima)),
                  codes = codes_at(m, row->code_offset[0], tensor_1d(NULL, DT_F8_E4M3, param_elems(&row->p)));
    return stage == CODES_SHARE ? comm_all_gather(comm, lane, what, &maxima, tensor_elems(&o.own_max))
                                : comm_all_gather(comm, lane, what, &codes, mesh_shard(&m->mesh, &row->p).piece);
}

/* Is there something to do at this stage? */
static bool in_stage(const struct model *m, int index, enum code_stage stage)
{
    return model_shares_codes(m, index) &&
           (stage < CODES_GATHER || !mesh_shards(&m->mesh, &m->params.list[index].p, KEPT_CODES));
}

/* One message for all weights that the same ranks have copies of. */
static int exchange_group(const struct model *m, enum copy_group group, enum code_stage stage, const char *what,
                          struct lane *lane)
{
    struct comm *comm = mesh_group(&m->mesh, group).comm;
    bool begun = false;
    for (int k = 0; k < m->params.n; k++) {
        if (!in_stage(m, k, stage) || mesh_copy_group(&m->mesh, &m->params.list[k].p) != group)
            continue;
        if (comm == NULL)
            return err_set(lane->err, ST_INTERNAL, "%s: this plan was made without the ranks it is for", what);
        if (!begun)
            TRY(comm_group_begin(comm, lane, what));
        begun = true;
        TRY(exchange_stage(m, k, stage, comm, what, lane));
    }
    return begun ? comm_group_end(comm, lane) : ST_OK;
}

int model_code_stage(const struct model *m, enum code_stage stage, const char *what, struct lane *lane)
{
    bool exchange = stage == CODES_SHARE || stage == CODES_GATHER;
    for (int group = 0; exchange && group < COPY_GROUPS; group++)
        TRY(exchange_group(m, (enum copy_group)group, stage, what, lane));
    for (int k = 0; !exchange && k < m->params.n; k++)
        if (in_stage(m, k, stage))
            TRY(compute_stage(m, k, stage, lane));
    return ST_OK;
}

double model_code_stage_bytes(const struct model *m, enum code_stage stage)
{
    double bytes = 0, wide = (double)dtype_bytes(m->dev->wide);
    for (int k = 0; k < m->params.n; k++) {
        const struct param *p = &m->params.list[k].p;
        if (!in_stage(m, k, stage))
            continue;
        struct tensor maxima = code_maxima(m->cfg, &m->mesh, p, m->dev->wide);
        double all = (double)param_elems(p), own = (double)mesh_shard(&m->mesh, p).n;
        const double of[] = {[CODES_MOST] = own * wide,
                             [CODES_SHARE] = (double)tensor_bytes(&maxima),
                             [CODES_ENCODE] = own * (wide + 1),
                             [CODES_GATHER] = all,
                             [CODES_TURN] = 2 * all};
        bytes += of[stage];
    }
    return bytes;
}

int model_share_codes(struct model *m, struct err *e)
{
    struct lane lanes[] = {{.dev = m->dev, .err = e}, {.dev = m->dev, .index = LANE_COMM, .err = e}};
    if (!m->codes_stale)
        return ST_OK;
    for (int stage = 0; stage < CODE_STAGES; stage++) {
        bool exchange = stage == CODES_SHARE || stage == CODES_GATHER;
        TRY(model_code_stage(m, (enum code_stage)stage, "FP8 codes of weights", &lanes[exchange]));
        TRY(m->dev->vt->sync(m->dev, e));
    }
    m->codes_stale = false;
    return ST_OK;
}
