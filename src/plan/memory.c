/* Arenas: sized while planning, allocated once. */
#include "plan/memory.h"

const char *arena_name(enum arena_id a)
{
    static const char *const names[] = {"parameters", "fp32 master", "gradients", "optimizer",
                                        "state",      "frames",      "workspace", "codes"};
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

static int refuse(struct memory *m, struct err *e)
{
    struct buf table;
    buf_init(&table, 400);
    for (int k = 0; k < ARENA_COUNT; k++) {
        char text[32];
        if (m->planned[k] > 0)
            buf_addf(&table, "%s%s %s", table.len > 0 ? ", " : "", arena_name((enum arena_id)k),
                     human_bytes((double)m->planned[k], text, sizeof text));
    }
    err_hint(e,
             "this plan needs: %s. A smaller train.micro_batch or train.seq shrinks frames and "
             "workspace, plan.recompute frames, train.loss_chunk the workspace; `braid plan` shows the largest slots",
             table.text ? table.text : "?");
    buf_release(&table);
    memory_release(m);
    return e->code;
}

/* A device that knows its free memory refuses before anything is allocated. */
static int check_room(const struct memory *m, struct dev *dev, struct err *e)
{
    int64_t need = 0, room = dev->vt->available != NULL ? dev->vt->available(dev) : -1;
    char a[32], b[32];
    for (int k = 0; k < ARENA_COUNT; k++)
        need += m->planned[k];
    if (room < 0 || need <= room)
        return ST_OK;
    return err_set(e, ST_NOMEM, "the plan needs %s, but %s has %s free", human_bytes((double)need, a, sizeof a),
                   dev->name, human_bytes((double)room, b, sizeof b));
}

int memory_commit(struct memory *m, struct dev *dev, struct err *e)
{
    m->dev = dev;
    if (check_room(m, dev, e) != ST_OK)
        return refuse(m, e);
    for (int a = 0; a < ARENA_COUNT; a++) {
        void *base = NULL;
        if (m->planned[a] == 0)
            continue;
        if (dev->vt->alloc(dev, m->planned[a], &base, e) != ST_OK)
            return refuse(m, e);
        m->base[a] = base;
        m->allocated[a] = m->planned[a];
        /* Frames and workspace are written before they are read; nothing may depend on their start. */
        if (a != ARENA_FRAME && a != ARENA_WORK)
            TRY(dev->vt->fill(dev, base, 0, m->planned[a], e));
    }
    return ST_OK;
}

int memory_renew(struct memory *m, struct err *e)
{
    static const enum arena_id renewed[] = {ARENA_FRAME, ARENA_WORK};
    for (int i = 0; i < countof(renewed); i++) {
        enum arena_id a = renewed[i];
        void *base = NULL;
        if (m->base[a] != NULL)
            m->dev->vt->free(m->dev, m->base[a]);
        m->base[a] = NULL;
        m->allocated[a] = 0;
        if (m->planned[a] > 0 && m->dev->vt->alloc(m->dev, m->planned[a], &base, e) != ST_OK)
            return refuse(m, e);
        m->base[a] = base;
        m->allocated[a] = m->planned[a];
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
