/* Plans as text: the list of steps, and memory by layer and by recompute name. */
#include "plan/plan_int.h"

#include <stdlib.h>
#include <string.h>

static void print_uses(const struct plan *p, const struct step *s, bool written, struct buf *out)
{
    const struct phase *ph = step_phase(p, s);
    bool first = true;
    for (int u = 0; u < ph->n_uses; u++) {
        if (s->instance[u] < 0 || (ph->use[u].mode != USE_READ) != written)
            continue;
        const struct instance *x = &p->inst[s->instance[u]];
        static const char mark[] = {
            [ARENA_PARAM] = 'p', [ARENA_MASTER] = 'm', [ARENA_CODE] = 'c', [ARENA_GRAD] = 'g', [ARENA_OPTIM] = 'o',
            [ARENA_STATE] = 's', [ARENA_FRAME] = 'F',  [ARENA_WORK] = 'w', [ARENA_HOST] = 'h'};
        buf_addf(out, "%s%s%s@%c%lld", first ? "" : " ", ph->use[u].mode == USE_ADD ? "+" : "",
                 p->g->slots[x->slot].name, mark[x->arena], (long long)x->offset);
        first = false;
    }
}

void plan_print_steps(const struct plan *p, struct buf *out)
{
    buf_addf(out, "%5s %-8s %-7s %-26s %10s  %s\n", "step", "lane", "phase", "node", "MFLOP",
             "reads -> writes   (slot@arena+offset; F frame, w workspace, p parameter, g gradient, s state, h host; + "
             "adds)");
    for (int i = 0; i < p->n_steps; i++) {
        const struct step *s = &p->steps[i];
        buf_addf(out, "%5d %-8s %-7s %-26s %10.3f  ", i, lane_name(s->lane), phase_name(s->ref.phase),
                 p->g->nodes[s->ref.node].name, step_phase(p, s)->flops * 1e-6);
        if (p->n_mb > 1)
            buf_addf(out, "[mb %d] ", s->ref.mb);
        for (int w = 0; w < s->n_waits; w++)
            buf_addf(out, "[wait %d] ", s->wait[w]);
        print_uses(p, s, false, out);
        buf_add(out, " -> ");
        print_uses(p, s, true, out);
        buf_add(out, "\n");
    }
}

/* Counts one microbatch: the others save the same. */
static bool is_saved(const struct instance *x) { return x->mb == 0 && x->arena == ARENA_FRAME && x->merged < 0; }

/* Saved bytes of every tag, summed over layers; tags in order of first appearance. */
static void print_tags(const struct plan *p, struct buf *out)
{
    char text[32];
    buf_addf(out, "%-24s %10s %8s  %s\n", "saved slot", "all layers", "layers", "can be recomputed");
    for (int i = 0; i < p->n_inst; i++) {
        const struct slot *s = &p->g->slots[p->inst[i].slot];
        bool seen = !is_saved(&p->inst[i]);
        int64_t bytes = 0, count = 0;
        for (int k = 0; k < p->n_inst && !seen; k++) {
            const struct instance *x = &p->inst[k];
            if (!is_saved(x) || strcmp(p->g->slots[x->slot].tag, s->tag) != 0)
                continue;
            seen = k < i;
            bytes += x->bytes;
            count++;
        }
        if (!seen)
            buf_addf(out, "%-24s %10s %8lld  %s\n", s->tag, human_bytes((double)bytes, text, sizeof text),
                     (long long)count, s->replay >= 0 ? "yes" : "no");
    }
}

/* Offloaded bytes of every tag, summed over layers. */
static void print_offloaded(const struct plan *p, struct buf *out)
{
    char text[32];
    if (p->host_bytes == 0)
        return;
    buf_addf(out, "host memory %s, %d copies to it and back\n%-24s %10s %8s\n",
             human_bytes((double)p->host_bytes, text, sizeof text), p->n_fetches, "offloaded slot", "all layers",
             "layers");
    for (int i = 0; i < p->n_inst; i++) {
        const struct slot *s = &p->g->slots[p->inst[i].slot];
        bool seen = p->inst[i].arena != ARENA_HOST || p->inst[i].mb != 0;
        int64_t bytes = 0, count = 0;
        for (int k = 0; k < p->n_inst && !seen; k++) {
            const struct instance *x = &p->inst[k];
            if (x->arena != ARENA_HOST || x->mb != 0 || strcmp(p->g->slots[x->slot].tag, s->tag) != 0)
                continue;
            seen = k < i;
            bytes += x->bytes;
            count++;
        }
        if (!seen)
            buf_addf(out, "%-24s %10s %8lld\n", s->tag + strlen("host."), human_bytes((double)bytes, text, sizeof text),
                     (long long)count);
    }
}

void plan_print_memory(const struct plan *p, struct buf *out)
{
    char a[32], b[32], c[32];
    int layers = 0;
    for (int i = 0; i < p->g->n_slots; i++)
        layers = p->g->slots[i].layer + 1 > layers ? p->g->slots[i].layer + 1 : layers;
    buf_addf(out, "plan '%s': %d steps, %d waits, %d replays; frame %s, workspace %s (%s if nothing were shared)\n",
             p->name, p->n_steps, p->n_waits, p->n_replays, human_bytes((double)p->frame_bytes, a, sizeof a),
             human_bytes((double)p->work_bytes, b, sizeof b), human_bytes((double)p->work_unshared_bytes, c, sizeof c));
    print_offloaded(p, out);
    if (p->frame_bytes == 0)
        return;
    if (p->n_mb > 1)
        buf_addf(out, "%d microbatches with %d frames between them; below, what one microbatch saves\n", p->n_mb,
                 p->n_frames);
    buf_addf(out, "%-8s %12s\n", "layer", "saved");
    for (int l = -1; l < layers; l++) {
        int64_t bytes = 0;
        for (int i = 0; i < p->n_inst; i++)
            if (is_saved(&p->inst[i]) && p->g->slots[p->inst[i].slot].layer == l)
                bytes += p->inst[i].bytes;
        if (l < 0)
            buf_addf(out, "%-8s %12s\n", "-", human_bytes((double)bytes, a, sizeof a));
        else
            buf_addf(out, "%-8d %12s\n", l, human_bytes((double)bytes, a, sizeof a));
    }
    print_tags(p, out);
}
