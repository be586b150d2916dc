/* Ranks of a command: found from launcher and config, opened, each given its place, and ended with one message. */
#include "cmd/cmd.h"

#include <math.h>
#include <stdlib.h>

/* ---- which world ----------------------------------------------------------------------------- */

static const char *config_word(const struct config *c, struct buf *b)
{
    return config_value_text(c, "parallel.comm", b);
}

static int refuse(const struct config *c, const struct launch *l, const char *why, struct err *e)
{
    struct buf b;
    buf_init(&b, 0);
    err_set(e, ST_USAGE, "parallel.comm=%s, but %s (launcher: %s, %d ranks; parallel.ranks = %lld)", config_word(c, &b),
            why, l->by, l->size, (long long)c->parallel.ranks);
    buf_release(&b);
    return e->code;
}

static enum comm_kind automatic(const struct config *c, const struct launch *l)
{
    if (l->size > 1)
        return c->run.device == CFG_DEVICE_CUDA ? COMM_NCCL : l->kind;
    return c->parallel.ranks > 1 ? COMM_THREADS : COMM_SELF;
}

/* How many ranks, and how they reach each other; both sources must agree. */
static int choose(const struct config *c, const struct launch *l, enum comm_kind *kind, int *ranks, struct err *e)
{
#define CHOSEN(X, id, name) [CFG_COMM_##id] = COMM_##id,
    static const enum comm_kind kinds[] = {TRANSPORTS(CHOSEN, )};
    *kind = c->parallel.comm == CFG_COMM_AUTO ? automatic(c, l) : kinds[c->parallel.comm];
    bool given = config_source_of(c, "parallel.ranks").source != CFG_FROM_AUTO && c->parallel.ranks > 0;
    bool threads = comm_kind_ranks(*kind) == RANKS_THREADS, alone = comm_kind_ranks(*kind) == RANKS_ONE;
    *ranks = threads ? (int)c->parallel.ranks : alone ? 1 : l->size;
    if ((threads || alone) && l->size > 1) {
        refuse(c, l, "a launcher started several processes", e);
        return err_hint(e, "start one process without a launcher, or leave parallel.comm at auto");
    }
    if (threads && !given) {
        refuse(c, l, "their number is not given", e);
        return err_hint(e, "give --parallel.ranks=N");
    }
    if (given && c->parallel.ranks != *ranks) {
        refuse(c, l, "the number of ranks differs", e);
        return err_hint(e, "leave parallel.ranks out, or give it the number of ranks that are started");
    }
    return ST_OK;
}

int cmd_count_ranks(struct config *c, struct cmd_ranks *r, struct err *e)
{
    *r = (struct cmd_ranks){.kind = COMM_SELF, .ranks = 1};
    TRY(launch_detect(&r->launch, e));
    TRY(choose(c, &r->launch, &r->kind, &r->ranks, e));
    return r->ranks > 1 && c->parallel.ranks == 0 ? config_set_auto(c, "parallel.ranks", r->ranks, e) : ST_OK;
}

/* ---- running --------------------------------------------------------------------------------- */

struct job {
    const struct config *cfg;
    const struct cmd_ranks *ranks;
    int (*fn)(const struct rank_place *place, void *ctx, struct err *e);
    void *ctx;
};

/* Options of the invocation (a GPU's number, a trace) may differ; ranks that were told different things about the run
 * may not. */
static int check_same(struct world *w, const struct config *c, struct err *e)
{
    struct buf text;
    buf_init(&text, 0);
    config_write(c, &text, false);
    int st = buf_check(&text, e);
    if (st == ST_OK)
        st = world_same(w, "configuration", text.text, e);
    buf_release(&text);
    return st;
}

static int rank_main(struct world *w, void *ctx, struct err *e)
{
    const struct job *j = ctx;
    bool threads = j->ranks->kind == COMM_THREADS;
    const struct launch *l = &j->ranks->launch;
    struct rank_place place = place_alone(); /* of threads: all on one GPU */
    int st = threads ? ST_OK : check_same(w, j->cfg, e);
    if (st == ST_OK)
        st = place_open(&place, j->cfg, w, threads ? 0 : l->local_rank,
                        threads ? world_size(w) : (int)max_i64(l->local_size, 1), e);
    if (st == ST_OK)
        st = j->fn(&place, j->ctx, e);
    place_close(&place);
    return st;
}

int cmd_run_ranks(const struct config *c, const struct cmd_ranks *r,
                  int (*fn)(const struct rank_place *place, void *ctx, struct err *e), void *ctx, struct err *e)
{
    struct job j = {.cfg = c, .ranks = r, .fn = fn, .ctx = ctx};
    char *board = c->run.dir[0] != '\0' ? path_join(c->run.dir, "ranks.board") : NULL;
    struct world_opts o = {.kind = r->kind,
                           .ranks = r->ranks,
                           .timeout = c->parallel.timeout,
                           .board = board,
                           .port = (int)c->parallel.port,
                           .secret = c->parallel.secret,
                           .loop_rate = c->parallel.loop_gbps * 1e9,
                           .loop_latency = c->parallel.loop_us * 1e-6,
                           .loop_ranks = (int)c->parallel.loop_ranks,
                           .choose_gpus = c->parallel.comm == CFG_COMM_AUTO};
    struct world *w = NULL;
    bool single = r->kind == COMM_SELF && r->ranks == 1;
    struct rank_place alone = place_alone(), asked = alone;
    /* Sizes that one rank cannot have are refused, not passed over; virtual stages it can have, and sends itself
     * messages. */
    int st = single ? place_on_paper(&asked, c, 0, e) : ST_OK;
    if (st != ST_OK || (single && asked.mesh.vpp == 1)) {
        st = st != ST_OK ? st : fn(&alone, ctx, e);
    } else if (r->kind == COMM_THREADS) {
        st = world_threads(&o, rank_main, &j, e);
    } else {
        st = world_open(&w, &o, e);
        if (st == ST_OK) {
            st = rank_main(w, &j, e);
            st = world_finish(w, st, e);
        }
        world_close(w);
    }
    free(board);
    return st;
}

int cmd_tell_ranks(const struct config *c, int status, struct err *e)
{
    struct launch l;
    struct err why = *e;
    struct world *w = NULL;
    if (launch_detect(&l, NULL) != ST_OK || l.size < 2)
        return status;
    /* A config that was read only in part may lack these; then so it is on the other ranks, which read the same one. */
    const struct world_opts o = {.kind = l.kind,
                                 .timeout = fmin(60, c->parallel.timeout > 0 ? c->parallel.timeout : 60),
                                 .port = (int)c->parallel.port,
                                 .secret = c->parallel.secret,
                                 .status = status,
                                 .why = &why};
    if (world_open(&w, &o, e) == ST_PEER)
        *e = why; /* says more than that the others could not be told */
    world_close(w);
    return status;
}
