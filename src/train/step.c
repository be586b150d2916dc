/* One optimizer step, and evaluation; see train.h. With several ranks each runs its own microbatches (step.c), the
 * update plan adds up gradients (optim/shard.c), and the few numbers that all must know are exchanged on the host
 * (ranks.c). */
#include "train/ranks_int.h"

#include <math.h>
#include <stdlib.h>

void count_labels(const int32_t *labels, const int32_t *doc_start, int64_t rows, int64_t seq, int depths,
                  int64_t *counts)
{
    for (int k = 0; k <= depths; k++)
        for (int64_t i = 0; i < rows; i++)
            counts[k] +=
                i % seq + k < seq && labels[i + k] >= 0 && (doc_start == NULL || doc_start[i + k] == doc_start[i]);
}

void loss_scales(const struct config *cfg, const int64_t *counts, int depths, double *scale)
{
    for (int k = 0; k <= depths; k++)
        scale[k] = (k == 0 ? 1 : cfg->model.mtp_scale / depths) / (double)max_i64(counts[k], 1);
}

/* ---- the microbatches of a step -------------------------------------------------------------- */

/* Taken from the batcher, with what their losses weigh: gradients are sums over all ranks, so labels of all count. */
static int take_batches(struct trainer *t, struct err *e)
{
    int64_t rows = t->cfg->train.micro_batch * t->cfg->train.seq;
    int st = ST_OK;
    for (int i = 0; i < countof(t->labels); i++)
        t->labels[i] = 0;
    for (int64_t k = 0; k < t->n_micro; k++) {
        st = batcher_next(t->batcher, &t->micro[k], e);
        if (st != ST_OK)
            break;
        count_labels(t->micro[k]->labels, config_separates(t->cfg) ? t->micro[k]->doc_start : NULL, rows,
                     t->cfg->train.seq, t->train.n_mtp, t->labels);
    }
    TRY(ranks_sum_counts(t, t->labels, countof(t->labels), st, e));
    loss_scales(t->cfg, t->labels, t->train.n_mtp, t->scale);
    return ST_OK;
}

static struct run_info run_of(const struct trainer *t, int64_t k)
{
    const struct batch *b = t->micro[k];
    return (struct run_info){.step = t->step,
                             .first_sample = b->first_sample,
                             .first_mb = k == 0,
                             .last_mb = k == t->n_micro - 1,
                             .scale = t->scale[0],
                             .mtp_scale = t->scale + 1,
                             .mb_share = 1.0 / (double)(t->n_micro * t->model.mesh.stage),
                             .tokens = b->part.tokens,
                             .labels = b->part.labels,
                             .pos = b->part.pos,
                             .doc_start = b->part.doc_start,
                             .first_pos = b->part.first,
                             .doc_local = b->part.doc_local,
                             .next_tokens = b->part.next_tokens,
                             .next_labels = b->part.next_labels,
                             .next_pos = b->part.next_pos};
}

const struct plan *trainer_first_plan(const struct trainer *t, bool pending)
{
    return pending && t->optim.beside.name != NULL ? &t->optim.beside : &t->train.p;
}

int trainer_settle(struct trainer *t, struct err *e)
{
    struct run_info run = {.step = t->step, .first_mb = true};
    if (!t->pending)
        return ST_OK;
    t->pending = false;
    return exec_run(&t->exec, &t->optim.apply, &run, e);
}

/* One by one, or, where their parts alternate in one plan, all in one run. */
static int run_micros(struct trainer *t, struct err *e)
{
    for (int64_t k = 0; k < t->n_micro; k++)
        t->run[k] = run_of(t, k);
    for (int64_t k = 0; k < t->n_micro; k += t->train.n_micro) {
        TRY(routes_give(t->routes, t->run[k].first_sample, e));
        TRY(exec_run(&t->exec, k == 0 ? trainer_first_plan(t, t->pending) : &t->train.p, &t->run[k], e));
        t->pending = false; /* also if the step is repeated */
        TRY(routes_take(t->routes, t->run[k].first_sample, e));
    }
    return ST_OK;
}

/* ---- buffers between ranks that were too small ----------------------------------------------- */

/* Rows of one kind that this rank wanted when the train or eval plan ran last, and those it has room for. */
static int wanted_rows(struct trainer *t, bool eval, enum room_kind kind, double *wanted, double *room, struct err *e)
{
    *wanted = *room = 0;
    for (int k = 0; k < t->model.metrics.n; k++) {
        const struct metric *m = &t->model.metrics.m[k];
        double value = 0;
        if (m->room <= 0 || m->eval != eval || m->room_kind != kind)
            continue;
        TRY(model_read_state(&t->model, m->offset, &value, sizeof value, e));
        *wanted = value > *wanted ? value : *wanted;
        *room = (double)m->room;
    }
    return ST_OK;
}

/* Did every row of this kind find a place in what has just run? If not, `rows` of the mesh become as many as the
 * fullest rank needs and a quarter more. */
static int rows_fit(struct trainer *t, bool eval, enum room_kind kind, bool *fit, struct err *e)
{
    static const char *const what[] = {
        [ROOM_BUFFER] = "rows for another; buffers grow", [ROOM_EXPERTS] = "rows for its experts; their buffers grow"};
    int64_t *const rows[] = {[ROOM_BUFFER] = &t->model.mesh.ep_rows, [ROOM_EXPERTS] = &t->model.mesh.ep_expert_rows};
    double wanted, room;
    TRY(wanted_rows(t, eval, kind, &wanted, &room, e));
    wanted = wanted > room ? wanted : 0;
    TRY(ranks_largest(t, "fullest buffer", &wanted, e));
    if (wanted == 0)
        return ST_OK;
    *fit = false;
    *rows[kind] = (int64_t)ceil(wanted * 1.25);
    if (t->log != NULL)
        log_event(t->log, LOG_NOTE, t->step, "step %lld: a rank had %.0f %s to %lld, the %s is repeated",
                  (long long)t->step + !eval, wanted, what[kind], (long long)*rows[kind],
                  eval ? "batch of the evaluation" : "step");
    return ST_OK;
}

/* If not every row found a place, all ranks plan again with more room, and what ran is to be run again; before that
 * nothing may be updated or reported. */
static int buffers_fit(struct trainer *t, bool eval, int tries, bool *fit, struct err *e)
{
    enum { MOST_TRIES = 8 };
    const struct mesh *mesh = &t->model.mesh;
    bool limited = (mesh->ep > 1 || mesh->etp > 1 || mesh->ep_nodes) && t->cfg->parallel.ep_capacity > 0;
    *fit = true;
    if (!limited)
        return ST_OK;
    TRY(rows_fit(t, eval, ROOM_BUFFER, fit, e));
    TRY(rows_fit(t, eval, ROOM_EXPERTS, fit, e));
    if (*fit)
        return ST_OK;
    if (tries >= MOST_TRIES)
        return err_set(e, ST_INTERNAL, "buffers between ranks grew %d times in one step and are still too small",
                       MOST_TRIES);
    t->replayed++;
    return trainer_replan(t, e);
}

static int run_until_it_fits(struct trainer *t, struct err *e)
{
    bool fit = false;
    for (int tries = 0; !fit; tries++) {
        TRY(run_micros(t, e));
        TRY(buffers_fit(t, false, tries, &fit, e));
    }
    return ST_OK;
}

/* ---- the step -------------------------------------------------------------------------------- */

/* The update refused. Parameters are as before the step, so running it again with the search on finds the same first
 * bad value, on the rank that has it. Ranks meet inside a step, so the others notice that it stopped. */
static int name_culprit(struct trainer *t, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    bool searching = t->exec.find_nan, meet = mesh->world > 1;
    TRY(trainer_wait_for_save(t, e)); /* while all ranks are here: the search ends on each of them in its own way */
    t->exec.find_nan = true;
    int st = run_micros(t, e);
    t->exec.find_nan = searching;
    if (!meet || st == ST_OK)
        st = ranks_agree(t, "search for the bad value", st, e);
    if (st == ST_OK)
        st = err_set(e, ST_NONFINITE,
                     "the gradient norm is not finite at step %lld, though every value is: it overflowed",
                     (long long)t->step + 1);
    if (t->cfg->train.nonfinite == CFG_NONFINITE_SKIP)
        err_hint(e,
                 "train.nonfinite_limit: %lld steps in a row were skipped, and this one is no better; lower train.lr. "
                 "The last checkpoint is untouched",
                 (long long)t->skipped_in_a_row - 1);
    else
        err_hint(
            e,
            "lower train.lr, or continue past such steps with train.nonfinite=skip; the last checkpoint is untouched");
    return st;
}

/* Sum of a loss on this rank; 0 where another stage has the head, or another rank of tensor parallelism reports it. */
static int read_loss(struct trainer *t, slot_id slot, double *out, struct err *e)
{
    double loss[2] = {0};
    struct tensor at = model_slot(&t->model, &t->train, slot);
    if (slot != NO_SLOT && t->model.mesh.tp_rank == 0)
        TRY(t->dev.vt->copy_out(&t->dev, loss, at.data, sizeof loss, e));
    *out = loss[0];
    return ST_OK;
}

/* Losses of all ranks, and whether one of them wants to stop. */
static int exchange_results(struct trainer *t, struct step_result *r, struct err *e)
{
    struct step_summary w = {0};
    TRY(read_loss(t, t->train.loss, &w.loss[0], e));
    for (int k = 0; k < t->train.n_mtp; k++)
        TRY(read_loss(t, t->train.mtp_loss[k], &w.loss[k + 1], e));
    w.stop = t->stop_request != NULL ? t->stop_request(t) : STOP_NOT;
    w.saving = trainer_saving(t) == SAVING_UNDER_WAY;
    TRY(ranks_after_step(t, &w, e));
    for (int k = 0; k <= t->train.n_mtp; k++)
        t->mean_loss[k] = w.loss[k] / (double)max_i64(t->labels[k], 1);
    r->loss = t->mean_loss[0];
    r->stop = (enum stop_request)w.stop;
    r->saving = w.saving > 0;
    return ST_OK;
}

int trainer_step(struct trainer *t, struct step_result *r, struct err *e)
{
    double begin = time_now(), hyper[HYPER_COUNT], clip[CLIP_COUNT];
    if (t->world != NULL)
        world_at_step(t->world, t->step + 1);
    TRY(take_batches(t, e));
    TRY(model_share_codes(&t->model, e));
    TRY(run_until_it_fits(t, e));
    optim_hyper(&t->optim, t->step, hyper);
    struct run_info run = {.step = t->step, .first_mb = true, .hyper = hyper};
    TRY(exec_run(&t->exec, &t->optim.p, &run, e));
    t->stale = true;
    t->pending = t->optim.n_buckets > 0;
    if (t->optim.beside.name == NULL)
        TRY(trainer_settle(t, e));

    if (t->world != NULL) /* where another rank never came, this names it */
        TRY(world_sync(t->world, "update", e));
    const struct slot *clip_slot = &t->optim.g.slots[t->optim.clip];
    TRY(model_read_state(&t->model, clip_slot->offset, clip, sizeof clip, e));
    *r = (struct step_result){.grad_norm = clip[CLIP_NORM],
                              .lr = hyper[HYPER_LR],
                              .tokens = t->cfg->train.global_batch * t->cfg->train.seq,
                              .skipped = clip[CLIP_SKIP] != 0};
    TRY(exchange_results(t, r, e));
    t->skipped_in_a_row = r->skipped ? t->skipped_in_a_row + 1 : 0;
    t->pending &= !r->skipped; /* it would change nothing */
    int64_t limit = t->cfg->train.nonfinite_limit;
    if (r->skipped && (t->cfg->train.nonfinite == CFG_NONFINITE_STOP || (limit > 0 && t->skipped_in_a_row > limit)))
        return name_culprit(t, e);
    t->step++;
    t->skipped += r->skipped;
    t->tokens_seen += r->tokens;
    r->seconds = time_now() - begin;
    t->train_seconds += r->seconds;
    return ST_OK;
}

/* ---- weights of the other ranks -------------------------------------------------------------- */

int trainer_refresh(struct trainer *t, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    struct lane lane = {.dev = &t->dev, .index = LANE_COMM, .err = e};
    TRY(trainer_settle(t, e));
    TRY(model_share_codes(&t->model, e));
    if (!t->stale || mesh->world == 1)
        return ST_OK;
    t->stale = false;
    TRY(t->dev.vt->sync(&t->dev, e));
    for (int k = 0; k < t->model.params.n; k++) {
        const struct param_entry *row = &t->model.params.list[k];
        const struct param *p = &row->p;
        if (!mesh_shards(mesh, p, KEPT_MOMENT) || mesh_shards(mesh, p, KEPT_WEIGHT))
            continue;
        struct tensor w =
            tensor_1d(t->model.mem.base[ARENA_PARAM] + row->offset, param_dtype(p, t->dev.real), param_elems(p));
        TRY(comm_all_gather(mesh_copy_comm(mesh, p), &lane, "weights of other ranks", &w, mesh_shard(mesh, p).piece));
    }
    return t->world != NULL ? world_sync(t->world, "weights", e) : t->dev.vt->sync(&t->dev, e);
}

/* ---- evaluation ------------------------------------------------------------------------------ */

/* What one batch gave. Kept apart and added up in the order of batches, so that the result does not depend on who ran
 * which. */
struct eval_batch {
    double loss, labels;
    double bytes;  /* NaN: the tokenizer does not know an id of a token file */
    double failed; /* 1: the batch could not be read */
};

/* Stands in for a batch that could not be read: ranks may meet inside the plan, so all of them run it. */
static void blank_batch(struct batch *b)
{
    for (int64_t i = 0; i < b->rows * b->seq; i++) {
        b->tokens[i] = b->doc_start[i] = 0;
        b->labels[i] = -1;
        b->pos[i] = (int32_t)(i % b->seq);
    }
    batch_cut(b);
}

static int eval_one(struct trainer *t, int64_t k, struct eval_batch *out, struct err *why, struct err *e)
{
    int64_t rows = t->eval_batch.rows * t->eval_batch.part.seq, bytes;
    struct batch_opts o = t->batch_opts;
    o.global_batch = o.micro_batch;
    o.dp_rank = 0;
    o.dp_size = 1;
    struct err unread = {0}, unknown = {0};
    bool failed = batch_fill(&t->eval_batch, t->valid_data, &o, k, 0, &unread) != ST_OK;
    if (failed) {
        blank_batch(&t->eval_batch);
        *why = unread;
    }
    const struct batch_part *b = &t->eval_batch.part;
    struct run_info run = {.step = t->step,
                           .first_mb = true,
                           .tokens = b->tokens,
                           .labels = b->labels,
                           .pos = b->pos,
                           .doc_start = b->doc_start,
                           .first_pos = b->first,
                           .doc_local = b->doc_local};
    bool fit = false;
    for (int tries = 0; !fit; tries++) {
        TRY(exec_run(&t->exec, &t->eval.p, &run, e));
        TRY(buffers_fit(t, true, tries, &fit, e));
    }
    *out = (struct eval_batch){.failed = failed};
    if (t->eval.loss == NO_SLOT || failed)
        return ST_OK;
    double sum[2];
    struct tensor slot = model_slot(&t->model, &t->eval, t->eval.loss);
    TRY(t->dev.vt->copy_out(&t->dev, sum, slot.data, sizeof sum, e));
    bool counted = tokenizer_count_bytes(&t->tok, b->labels, rows, &bytes, &unknown) == ST_OK;
    if (!counted && why->code == ST_OK)
        *why = unknown;
    int64_t labels = 0;
    count_labels(b->labels, NULL, rows, b->seq, 0, &labels);
    *out = (struct eval_batch){.loss = sum[0], .labels = (double)labels, .bytes = counted ? (double)bytes : NAN};
    return ST_OK;
}

/* Rank d of a stage runs batches d, d + dp, ...; all run as many, since they may meet inside: the surplus does not
 * count. */
static int eval_share(struct trainer *t, int64_t n, int64_t share, struct eval_batch *mine, struct err *why,
                      struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    for (int64_t i = 0; i < share; i++) {
        int64_t k = i * mesh->dp + mesh->dp_rank;
        TRY(eval_one(t, min_i64(k, n - 1), &mine[i], why, e));
    }
    return ST_OK;
}

/* Batches of one evaluation: train.eval_batches, where 0 stands for each whole one of the validation data. */
static int64_t eval_batches(const struct trainer *t)
{
    int64_t whole = dataset_n_samples(t->valid_data) / t->cfg->train.micro_batch;
    return t->cfg->train.eval_batches > 0 ? t->cfg->train.eval_batches : max_i64(whole, 1);
}

int trainer_eval(struct trainer *t, struct eval_result *r, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    int64_t n = eval_batches(t), share = ceil_div(n, mesh->dp);
    int last = mesh->pp - 1, st; /* the stage with the head */
    struct eval_batch *mine = NULL, *all = NULL, sum = {0};
    TRY_OUT(mem_array((void **)&mine, (size_t)share, sizeof *mine, e));
    TRY_OUT(mem_array((void **)&all, (size_t)(share * mesh->world), sizeof *all, e));
    *r = (struct eval_result){0};
    TRY_OUT(trainer_refresh(t, e));
    TRY_OUT(eval_share(t, n, share, mine, &r->why, e));
    TRY_OUT(ranks_collect(t, "evaluation", mine, share * (int64_t)sizeof *mine, all, e));
    for (int64_t i = 0; i < n * mesh->cp; i++) { /* of batch k, each rank of parallel.cp has a part */
        int64_t k = i / mesh->cp;
        int rank = mesh_rank_at(mesh, last, (int)(k % mesh->dp), (int)(i % mesh->cp), 0);
        const struct eval_batch *b = &all[rank * share + k / mesh->dp];
        sum.loss += b->loss;
        sum.labels += b->labels;
        sum.bytes += b->bytes;
        sum.failed += b->failed;
    }
    r->failed = sum.failed > 0;
    r->tokens = n * t->cfg->train.micro_batch * t->cfg->train.seq;
    r->tokens_total = dataset_tokens(t->valid_data);
    r->bytes = sum.bytes > 0 ? sum.bytes : 0;
    r->loss = sum.loss / (sum.labels > 0 ? sum.labels : 1);
    r->bits_per_byte = sum.bytes > 0 ? sum.loss / (log(2.0) * sum.bytes) : 0; /* NaN is not above 0 */
    if (r->failed && r->why.code == ST_OK)
        err_set(&r->why, ST_CORRUPT, "another rank could not read its validation data");
out:
    free(mine);
    free(all);
    return st;
}
