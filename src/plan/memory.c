/* Arenas: sized while planning, allocated once. */
#include "plan/memory.h"
#include "dev/host.h"

#include <unistd.h>

const char *arena_name(enum arena_id a)
{
    static const char *const names[] = {"parameters", "fp32 master", "gradients", "optimizer",  "state",
                                        "frames",     "workspace",   "codes",     "host: slots"};
    return (unsigned)a < ARENA_ALL ? names[a] : "?";
}

bool memory_on_host(const struct memory *m, int arena) { return arena >= ARENA_COUNT || m->away[arena]; }

int64_t memory_total(const struct memory *m, const int64_t *sizes, bool host)
{
    int64_t sum = 0;
    for (int a = 0; a < ARENA_ALL; a++)
        sum += memory_on_host(m, a) == host ? sizes[a] : 0;
    return sum;
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
    for (int k = 0; k < ARENA_ALL; k++) {
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
    int64_t need = memory_total(m, m->planned, false), room = dev->vt->available != NULL ? dev->vt->available(dev) : -1;
    char a[32], b[32];
    if (room < 0 || need <= room)
        return ST_OK;
    return err_set(e, ST_NOMEM, "the plan needs %s, but %s has %s free", human_bytes((double)need, a, sizeof a),
                   dev->name, human_bytes((double)room, b, sizeof b));
}

/* Pinned memory cannot be swapped out: more than the machine has would end the process, not the allocation. */
static int check_host(const struct memory *m, struct err *e)
{
    double need = (double)memory_total(m, m->planned, true);
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    char a[32], b[32];
    if (pages <= 0 || page <= 0 || need <= 0.95 * (double)pages * (double)page)
        return ST_OK;
    return err_set(e, ST_NOMEM, "plan.offload and optim.offload need %s of host memory, and this machine has %s",
                   human_bytes(need, a, sizeof a), human_bytes((double)pages * (double)page, b, sizeof b));
}

/* Takes one arena from the device or from the host. */
static int take(struct memory *m, enum arena_id a, struct err *e)
{
    void *base = NULL;
    char text[32];
    if (m->planned[a] == 0)
        return ST_OK;
    bool host = memory_on_host(m, a);
    int st =
        host ? dev_alloc_host(m->dev, m->planned[a], &base, e) : m->dev->vt->alloc(m->dev, m->planned[a], &base, e);
    if (st != ST_OK && host)
        err_in(e, "%s of host memory for %s", human_bytes((double)m->planned[a], text, sizeof text),
               a == ARENA_HOST ? "plan.offload" : "optim.offload");
    TRY(st);
    m->base[a] = base;
    m->allocated[a] = m->planned[a];
    return ST_OK;
}

static void give_back(struct memory *m, enum arena_id a)
{
    if (m->base[a] != NULL && memory_on_host(m, a))
        dev_free_host(m->dev, m->base[a]);
    else if (m->base[a] != NULL)
        m->dev->vt->free(m->dev, m->base[a]);
    m->base[a] = NULL;
    m->allocated[a] = 0;
}

int memory_commit(struct memory *m, struct dev *dev, struct err *e)
{
    m->dev = dev;
    if (check_room(m, dev, e) != ST_OK || check_host(m, e) != ST_OK)
        return refuse(m, e);
    for (int a = 0; a < ARENA_ALL; a++) {
        if (take(m, (enum arena_id)a, e) != ST_OK)
            return refuse(m, e);
        /* Activations are written before they are read; nothing may depend on their start. Host memory is zero. */
        if (m->base[a] != NULL && a != ARENA_FRAME && a != ARENA_WORK && !memory_on_host(m, a))
            TRY(dev->vt->fill(dev, m->base[a], 0, m->planned[a], e));
    }
    return ST_OK;
}

int memory_renew(struct memory *m, struct err *e)
{
    static const enum arena_id renewed[] = {ARENA_FRAME, ARENA_WORK, ARENA_HOST};
    for (int i = 0; i < countof(renewed); i++) {
        give_back(m, renewed[i]);
        if (take(m, renewed[i], e) != ST_OK)
            return refuse(m, e);
    }
    return ST_OK;
}

void memory_release(struct memory *m)
{
    for (int a = 0; a < ARENA_ALL; a++)
        give_back(m, (enum arena_id)a);
}

void memory_print(const struct memory *m, struct buf *out)
{
    int64_t total = memory_total(m, m->planned, false);
    char text[32];
    buf_addf(out, "%-12s %14s\n", "arena", "bytes");
    for (int host = 0; host < 2; host++) {
        for (int a = 0; a < ARENA_ALL; a++)
            if (memory_on_host(m, a) == (host == 1) && (host == 0 || m->planned[a] > 0))
                buf_addf(out, "%-12s %14lld  %10s%s\n", arena_name((enum arena_id)a), (long long)m->planned[a],
                         human_bytes((double)m->planned[a], text, sizeof text), host ? " in host memory" : "");
        if (host == 0)
            buf_addf(out, "%-12s %14lld  %10s\n", "total", (long long)total,
                     human_bytes((double)total, text, sizeof text));
    }
}
