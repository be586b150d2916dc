/* Moments of AdamW: their type, where they are, and which element of the whole parameter each belongs to, since draws
 * of their rounding (optim.state=bf16) are keyed by that. See optim.h. */
#include "optim/optim_int.h"

enum dtype optim_type(const struct model *m)
{
    return m->cfg->optim.state == CFG_OPTIM_STATE_BF16 ? DT_BF16 : m->dev->wide;
}

struct tensor optim_state(const struct model *m, int index, int which)
{
    const struct param *p = &m->params.list[index].p;
    struct tensor t = tensor_shape(optim_type(m), p->rank, p->dim);
    if (!shard_is_all(m, index))
        t = tensor_1d(NULL, t.dtype, shard_of(m, index).n);
    t.data =
        m->mem.base[ARENA_OPTIM] + m->params.list[index].optim_offset + which * round_up(tensor_bytes(&t), DEV_ALIGN);
    return t;
}

/* Elements [from, from + n) of a part. */
static struct adamw_part cut_part(const struct adamw_part *whole, int64_t from, int64_t n)
{
    struct adamw_part out = *whole;
    struct tensor *const t[] = {&out.p, &out.g, &out.m, &out.v, &out.copy};
    for (int i = 0; i < countof(t); i++)
        if (t[i]->dtype != DT_NONE)
            *t[i] = tensor_1d(t[i]->data != NULL ? (char *)t[i]->data + from * (int64_t)dtype_bytes(t[i]->dtype) : NULL,
                              t[i]->dtype, n);
    return out;
}

/* A rank's part of a parameter that tensor parallelism divides lies in rows of the whole one: a fixed distance apart,
 * or where it has several sections, stretch by stretch. */
int split_parts(const struct update_node *n, const struct trained *t, const struct adamw_part *whole,
                struct adamw_part *out)
{
    const struct param *p = &n->m->params.list[t->index].p;
    int count = 0;
    if (n->state != DT_BF16) {
        if (out != NULL)
            out[0] = *whole;
        return 1;
    }
    uint64_t key = rng_key(rng_key((uint64_t)n->m->cfg->run.seed, "optim.state"), p->key);
    bool rows = p->slice.ranks > 0 && p->split.n_sections == 1;
    int64_t row = rows ? param_run_from(p, 0).n : 0, lead = rows ? t->local % row : 0;
    for (int64_t at = 0; at < t->elems; count++) {
        struct param_run run = param_run_from(p, t->local + at - lead);
        int64_t here = rows ? t->elems : min_i64(run.n, t->elems - at);
        if (run.n <= 0) /* the checks of params.c have seen that this cannot be */
            break;
        if (out != NULL) {
            out[count] = cut_part(whole, at, here);
            out[count].at = (struct adamw_place){
                .key = key, .first = run.whole, .lead = lead, .row = row, .step = row * p->slice.ranks};
        }
        at += here;
    }
    return count;
}

struct adamw_args update_args(const struct update_node *n, const struct adamw_part *p, int parts,
                              const struct tensor *hyper, const struct tensor *scale)
{
    return (struct adamw_args){.p = p->p,
                               .g = p->g,
                               .m = p->m,
                               .v = p->v,
                               .copy = p->copy,
                               .hyper = *hyper,
                               .scale = *scale,
                               .beta1 = n->beta1,
                               .beta2 = n->beta2,
                               .eps = n->eps,
                               .decay = p->decay,
                               .rate = p->rate,
                               .bf16 = n->state == DT_BF16,
                               .at = p->at,
                               .q = p->q,
                               .qs = p->qs,
                               .t = p->t,
                               .ts = p->ts,
                               .more = p + 1,
                               .n_more = parts - 1};
}
