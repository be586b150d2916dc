/* Dependencies between steps, and the waits that keep them. A vector clock per step says how far every
 * lane is known to have come when the step starts; a wait is added only where the clocks do not
 * already prove the order. The same clocks later decide which slots may share memory. */
#include "plan/plan_int.h"

#include <stdlib.h>

/* Who last touched an instance: the last writer, and the last reader on each lane since. */
struct history {
    int writer;
    int reader[LANE_COUNT];
};

static void depend(struct builder *b, int step, int on)
{
    struct plan *p = b->p;
    if (on < 0 || on == step)
        return;
    int lane = p->steps[on].lane, *mine = &b->clock[step * LANE_COUNT];
    if (mine[lane] >= p->steps[on].lane_pos)
        return; /* the lane's own order or an earlier wait proves it */
    struct step *s = &p->steps[step];
    int w = 0; /* one wait per lane is enough: keep the latest */
    while (w < s->n_waits && p->steps[s->wait[w]].lane != lane)
        w++;
    s->wait[w] = on;
    if (w == s->n_waits)
        s->n_waits++;
    const int *theirs = &b->clock[on * LANE_COUNT];
    for (int l = 0; l < LANE_COUNT; l++)
        mine[l] = theirs[l] > mine[l] ? theirs[l] : mine[l];
    mine[lane] = p->steps[on].lane_pos;
}

static void order_uses(struct builder *b, int step, struct history *history)
{
    const struct step *s = &b->p->steps[step];
    const struct phase *ph = step_phase(b->p, s);
    for (int u = 0; u < ph->n_uses; u++) {
        if (s->instance[u] < 0)
            continue;
        struct history *h = &history[s->instance[u]];
        depend(b, step, h->writer);
        for (int l = 0; ph->use[u].mode != USE_READ && l < LANE_COUNT; l++)
            depend(b, step, h->reader[l]);
    }
    for (int u = 0; u < ph->n_uses; u++) {
        if (s->instance[u] < 0)
            continue;
        struct history *h = &history[s->instance[u]];
        if (ph->use[u].mode == USE_READ) {
            h->reader[s->lane] = step;
        } else {
            h->writer = step;
            for (int l = 0; l < LANE_COUNT; l++)
                h->reader[l] = -1;
        }
    }
}

int plan_waits(struct builder *b)
{
    struct plan *p = b->p;
    struct history *history = NULL;
    TRY(mem_array((void **)&b->clock, (size_t)p->n_steps * LANE_COUNT, sizeof *b->clock, b->e));
    TRY(mem_array((void **)&history, (size_t)p->n_inst, sizeof *history, b->e));
    for (int i = 0; i < p->n_inst; i++) {
        history[i].writer = -1;
        for (int l = 0; l < LANE_COUNT; l++)
            history[i].reader[l] = -1;
    }
    int last_on[LANE_COUNT], count[LANE_COUNT] = {0};
    for (int l = 0; l < LANE_COUNT; l++)
        last_on[l] = -1;
    for (int i = 0; i < p->n_steps; i++) {
        struct step *s = &p->steps[i];
        p->uses_lane[s->lane] |= !b->g->nodes[s->ref.node].host; /* those run before the lanes part */
        int *mine = &b->clock[i * LANE_COUNT];
        s->lane_pos = count[s->lane]++;
        for (int l = 0; l < LANE_COUNT; l++)
            mine[l] = last_on[s->lane] >= 0 ? b->clock[last_on[s->lane] * LANE_COUNT + l] : -1;
        mine[s->lane] = s->lane_pos - 1;
        depend(b, i, s->after);
        depend(b, i, s->after_copy);
        order_uses(b, i, history);
        last_on[s->lane] = i;
        p->n_waits += s->n_waits;
        for (int k = 0; k < s->n_waits; k++)
            p->steps[s->wait[k]].waited = true;
    }
    free(history);
    return ST_OK;
}
