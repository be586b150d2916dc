/* Arenas: sized while planning, allocated once; see plan.h. */
#include "plan/plan.h"

const char *arena_name(enum arena_id a)
{
    static const char *const names[] = {"parameters", "gradients", "optimizer", "state", "frames", "workspace"};
    return (unsigned)a < ARENA_COUNT ? names[a] : "?";
}

int64_t memory_reserve(struct memory *m, enum arena_id a, int64_t bytes)
{
    int64_t at = m->planned[a];
    m->planned[a] += round_up(bytes, DEV_ALIGN);
    return at;
}

void memory_reserve_max(struct memory *m, enum arena_id a, int64_t bytes)
{
    m->planned[a] = max_i64(m->planned[a], round_up(bytes, DEV_ALIGN));
}

int memory_commit(struct memory *m, struct dev *dev, struct err *e)
{
    m->dev = dev;
    for (int a = 0; a < ARENA_COUNT; a++) {
        void *base = NULL;
        if (m->planned[a] == 0)
            continue;
        if (dev->vt->alloc(dev, m->planned[a], &base, e) != ST_OK) {
            struct buf table;
            buf_init(&table, 400);
            for (int k = 0; k < ARENA_COUNT; k++) {
                char text[32];
                buf_addf(&table, "%s%s %s", k ? ", " : "", arena_name((enum arena_id)k),
                         human_bytes((double)m->planned[k], text, sizeof text));
            }
            err_hint(e, "this plan needs: %s. A smaller train.micro_batch or train.seq shrinks frames and "
                     "workspace, plan.recompute frames", table.text ? table.text : "?");
            buf_release(&table);
            memory_release(m);
            return e->code;
        }
        m->base[a] = base;
        m->allocated[a] = m->planned[a];
        /* Frames and workspace are written before they are read; nothing may depend on their start. */
        if (a != ARENA_FRAME && a != ARENA_WORK)
            TRY(dev->vt->fill(dev, base, 0, m->planned[a], e));
    }
    return ST_OK;
}

void memory_release(struct memory *m)
{
    for (int a = 0; a < ARENA_COUNT; a++) {
        if (m->base[a] != NULL)
            m->dev->vt->free(m->dev, m->base[a]);
        m->base[a] = NULL;
        m->allocated[a] = 0;
    }
}

void memory_print(const struct memory *m, struct buf *out)
{
    int64_t total = 0;
    char text[32];
    buf_addf(out, "%-12s %14s\n", "arena", "bytes");
    for (int a = 0; a < ARENA_COUNT; a++) {
        total += m->planned[a];
        buf_addf(out, "%-12s %14lld  %10s\n", arena_name((enum arena_id)a), (long long)m->planned[a],
                 human_bytes((double)m->planned[a], text, sizeof text));
    }
    buf_addf(out, "%-12s %14lld  %10s\n", "total", (long long)total, human_bytes((double)total, text, sizeof text));
}
