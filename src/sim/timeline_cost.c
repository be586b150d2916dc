/* Seconds of a step on a stated machine; see timeline.h. */
#include "layers/unit.h"
#include "sim/timeline.h"

#include <string.h>

struct machine machine_h200(void)
{
    return (struct machine){.flops = 620e12,
                            .attention = 620e12,
                            .attention_back = 555e12,
                            .attention_ramp = 450,
                            .bandwidth = 4.0e12,
                            .node = 3e-6,
                            .link = 45e9,
                            .link_delay = 15e-6,
                            .inner = 370e9,
                            .gpus = 8,
                            .host = 55e9,
                            .beside = 0.12,
                            .memory = 141e9};
}

void machine_print(const struct machine *m, bool measured, struct buf *out)
{
    if (measured)
        buf_add(out, "computing: measured node by node on this machine, one rank with the whole model\n");
    else
        buf_addf(out,
                 "computing: PREDICTED, a node takes the larger of FLOP / %.0f TFLOP/s and bytes / %.2f TB/s, at least "
                 "%.0f us; attention over long\n"
                 "           sequences %.0f TFLOP/s forward, %.0f backward, half of that over %.0f tokens\n",
                 m->flops * 1e-12, m->bandwidth * 1e-12, m->node * 1e6, m->attention * 1e-12, m->attention_back * 1e-12,
                 m->attention_ramp);
    buf_addf(out,
             "links:     PREDICTED, %.3g GB/s out of each GPU and %.3g us to other machines, %.3g GB/s within a "
             "machine of %d; a row travels once to each\n"
             "           rank that has experts of it, of GPUs whole buffers (parallel.ep_capacity); even routing; "
             "computing takes %.0f "
             "%% longer while the link is busy;\n"
             "           no other traffic on the network; %.3g GB/s to and from host memory\n",
             m->link * 1e-9, m->link_delay * 1e6, m->inner * 1e-9, m->gpus, m->beside * 100, m->host * 1e-9);
}

/* ---- who is near ----------------------------------------------------------------------------- */

/* Members of a group, `stride` ranks apart, and how many of them (this one included) are in this rank's machine. */
struct near {
    int size, here;
};

static struct near near_of(const struct machine *m, int rank, int index, int size, int stride)
{
    struct near n = {.size = size};
    for (int i = 0; i < size; i++)
        n.here += (rank + (i - index) * stride) / m->gpus == rank / m->gpus;
    return n;
}

/* Each member gives every other one its share of the bytes. */
static double exchange_seconds(const struct machine *m, struct near n, double bytes)
{
    double share = bytes / n.size, inner = share * (n.here - 1) / m->inner, outer = share * (n.size - n.here) / m->link;
    if (n.size == 1)
        return 0;
    return m->link_delay + (inner > outer ? inner : outer);
}

double machine_exchange(const struct machine *m, int ranks, int stride, double bytes)
{
    return exchange_seconds(m, near_of(m, 0, 0, ranks, stride), bytes);
}

static double message_seconds(const struct machine *m, const struct mesh *mesh, bool forward, double bytes)
{
    int other = (mesh->rank + (forward ? mesh->stage : mesh->world - mesh->stage)) % mesh->world;
    bool here = other / m->gpus == mesh->rank / m->gpus;
    return bytes / (here ? m->inner : m->link);
}

/* From rank to rank of those that divide sequences, over the slowest link between two neighbours. */
static double hop_seconds(const struct machine *m, const struct mesh *mesh, double bytes)
{
    struct near n = near_of(m, mesh->rank, mesh->cp_rank, mesh->cp, mesh->tp);
    return m->link_delay + bytes / (n.here == n.size ? m->inner : m->link);
}

/* ---- exchanges of units ---------------------------------------------------------------------- */

/* Reductions and gathers among the ranks that hold copies. */
static double unit_seconds(const struct step_cost *c, const struct node *node, const struct phase *ph)
{
    const struct mesh *mesh = &c->t->model.mesh;
    const struct unit_exchange *x = node->self;
    struct copies who = mesh_group(mesh, x->group);
    struct near n = near_of(c->m, mesh->rank, who.rank, who.n, who.stride);
    return exchange_seconds(c->m, n, ph->bytes) * (x->collect ? 2 : 1);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static const struct tensor *find_slot(const struct graph *g, const char *end)
{
    for (int i = 0; i < g->n_slots; i++) {
        const char *dot = g->slots[i].tag != NULL ? strrchr(g->slots[i].tag, '.') : NULL;
        if (dot != NULL && strcmp(dot + 1, end) == 0)
            return &g->slots[i].shape;
    }
    return NULL;
}

/* Buffers, and rows at the experts, are planned larger than an even routing fills them. */
static void find_rows(struct step_cost *c)
{
    const struct graph *g = &c->t->train.g;
    const struct mesh *mesh = &c->t->model.mesh;
    const struct config_model *m = &c->t->cfg->model;
    const struct tensor *places = find_slot(g, "buffer_src"), *rows = find_slot(g, "got_src"),
                        *choices = find_slot(g, "choice_row");
    if (places == NULL || rows == NULL || choices == NULL)
        return;
    double tokens = (double)choices->dim[0], ranks = mesh->ep;
    c->places = places->dim[0];
    c->filled = tokens * ranks * tokens_on_rank(m, mesh->ep) / (double)c->places;
    c->rows = rows->dim[0];
    c->rows_filled = tokens * (double)m->topk * mesh->etp / (double)c->rows;
}

struct step_cost step_cost_of(const struct machine *m, const struct node_times *times, const struct trainer *t)
{
    struct step_cost c = {.m = m, .times = times, .t = t, .first_mb = true, .last_mb = true};
    find_rows(&c);
    return c;
}

static const struct phase *phase_of(const struct plan *p, int step)
{
    return &p->g->nodes[p->steps[step].ref.node].phase[p->steps[step].ref.phase];
}

static double fill_share(const struct step_cost *c, const struct plan *p, const struct phase *ph)
{
    for (int u = 0; u < ph->n_uses && c->places > 0; u++) {
        int64_t n = ph->use[u].slot >= 0 ? p->g->slots[ph->use[u].slot].shape.dim[0] : 0;
        if (n == c->rows)
            return c->rows_filled;
        if (n == c->places || n == c->places * c->t->model.mesh.etp)
            return c->filled;
    }
    return 1;
}

/* Rows among the ranks that share experts, and of each rank's share among those that share each of them. */
static double rows_seconds(const struct step_cost *c, double bytes)
{
    const struct mesh *mesh = &c->t->model.mesh;
    return exchange_seconds(c->m, near_of(c->m, mesh->rank, mesh->ep_rank, mesh->ep, mesh->etp), bytes) +
           exchange_seconds(c->m, near_of(c->m, mesh->rank, mesh->etp_rank, mesh->etp, 1), bytes * mesh->etp);
}

static double used_bytes(const struct plan *p, const struct phase *ph)
{
    double bytes = 0;
    for (int u = 0; u < ph->n_uses; u++)
        if (ph->use[u].slot >= 0)
            bytes += (double)tensor_bytes(&p->g->slots[ph->use[u].slot].shape);
    return bytes;
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), k = strlen(end);
    return n >= k && strcmp(name + n - k, end) == 0;
}

/* What attention reaches depends on the length of its rows, on the width of heads, and backward on the kernel: heads
 * of more than 128 channels (latent attention) run on cuDNN's deterministic one. Shares: docs/SPEED.md, Attention. */
static double attention_rate(const struct step_cost *c, const char *name, bool backward)
{
    const struct config_model *m = &c->t->cfg->model;
    bool plain = strstr(name, ".attn.") != NULL;
    double tokens = (double)c->t->cfg->train.seq, share = 1;
    if (plain && m->attn_window > 0 && (double)m->attn_window < tokens)
        tokens = (double)m->attn_window;
    if (plain ? m->head_dim <= 64 : backward)
        share = 0.78;
    return share * (backward ? c->m->attention_back : c->m->attention) * tokens / (tokens + c->m->attention_ramp);
}

static double compute_seconds(const struct step_cost *c, const struct plan *p, int step)
{
    const struct phase *ph = phase_of(p, step);
    const char *name = p->g->nodes[p->steps[step].ref.node].name;
    double fill = fill_share(c, p, ph), seconds;
    if (c->times != NULL && node_times_get(c->times, p, step, fill, &seconds))
        return seconds;
    double bytes = ph->flops == 0 && ph->bytes == 0 ? used_bytes(p, ph) : ph->bytes;
    bool backward = p->steps[step].ref.phase == PH_BWD;
    double work = ph->flops / (ends_with(name, ".core") ? attention_rate(c, name, backward) : c->m->flops),
           memory = bytes / c->m->bandwidth;
    seconds = fill * (work > memory ? work : memory);
    return seconds > c->m->node ? seconds : c->m->node;
}

enum task_kind step_kind(const struct plan *p, int step)
{
    const struct step *s = &p->steps[step];
    const struct node *n = &p->g->nodes[s->ref.node];
    static const enum task_kind phases[] = {
        [PH_FWD] = KIND_FORWARD, [PH_BWD] = KIND_BACKWARD, [PH_DW] = KIND_DW, [PH_REPLAY] = KIND_REPLAY};
    if (n->role == ROLE_DISPATCH)
        return KIND_DISPATCH;
    if (n->role == ROLE_COMBINE)
        return KIND_COMBINE;
    if (n->role == ROLE_CUT_IN || n->role == ROLE_CUT_OUT)
        return KIND_CUT;
    if (n->role == ROLE_GATHER || n->role == ROLE_REDUCE)
        return n->role == ROLE_GATHER ? KIND_GATHER : KIND_REDUCE;
    if (n->role == ROLE_CONTEXT || n->role == ROLE_RING)
        return KIND_CONTEXT;
    if (role_is_shard(n->role))
        return n->phase[s->ref.phase].flops > 0 ? phases[s->ref.phase] : KIND_ROWS;
    if (n->role == ROLE_OFFLOAD)
        return KIND_HOST;
    bool update = strncmp(n->name, "update.", 7) == 0;
    if (s->lane != LANE_COMM)
        return update ? KIND_UPDATE : phases[s->ref.phase];
    if (update && strcmp(n->name + 7, "gather") == 0)
        return KIND_GATHER;
    return update && strcmp(n->name + 7, "ends") == 0 ? KIND_REDUCE : KIND_SUMMARY;
}

double step_seconds(const void *ctx, const struct plan *p, int step)
{
    const struct step_cost *c = ctx;
    const struct mesh *mesh = &c->t->model.mesh;
    const struct phase *ph = phase_of(p, step);
    const struct node *n = &p->g->nodes[p->steps[step].ref.node];
    bool backward = p->steps[step].ref.phase == PH_BWD, out = n->role == ROLE_CUT_OUT;
    if (n->host)
        return 0;
    switch (step_kind(p, step)) {
    case KIND_DISPATCH:
    case KIND_COMBINE: /* a GPU's counts are not looked at: whole buffers travel */
        return rows_seconds(c, ph->bytes * (c->t->dev.kind == DEV_CUDA ? 1 : fill_share(c, p, ph)));
    case KIND_CUT: /* the sender's lane is busy; the receiver waits for the first byte */
        return out != backward ? message_seconds(c->m, mesh, out, ph->bytes) : c->m->link_delay;
    case KIND_REDUCE:
    case KIND_GATHER:
        if (n->role == ROLE_NONE && step_kind(p, step) == KIND_GATHER) /* weights with codes */
            return exchange_seconds(c->m, near_of(c->m, mesh->rank, mesh->stage_rank, mesh->stage, 1), ph->bytes);
        if (n->role == ROLE_NONE) /* both ends of a pipeline */
            return 2 * c->m->link_delay + ph->bytes / c->m->link;
        return n->per_step && !(n->role == ROLE_GATHER ? c->first_mb : c->last_mb) ? 0 : unit_seconds(c, n, ph);
    case KIND_CONTEXT:
        if (n->role == ROLE_RING)
            return ph->bytes > 0 ? hop_seconds(c->m, mesh, ph->bytes) : 0;
        return ph->bytes > 0
                   ? exchange_seconds(c->m, near_of(c->m, mesh->rank, mesh->cp_rank, mesh->cp, mesh->tp), ph->bytes)
                   : 0;
    case KIND_ROWS: return exchange_seconds(c->m, near_of(c->m, mesh->rank, mesh->tp_rank, mesh->tp, 1), ph->bytes);
    case KIND_HOST: return ph->bytes / c->m->host;
    case KIND_SUMMARY: return mesh->world > 1 ? c->m->link_delay : 0;
    default: return compute_seconds(c, p, step);
    }
}
