/* Opening and closing a trainer; see train.h. Steps are in step.c, saving in save.c. */
#include "train/groups_int.h"
#include "train/ranks_int.h"
#include "dev/gpus.h"
#include "train/samples_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum dev_kind device_of(const struct config *cfg)
{
    static const enum dev_kind kinds[] = {
        [CFG_DEVICE_CPU] = DEV_CPU, [CFG_DEVICE_REF] = DEV_REF, [CFG_DEVICE_CUDA] = DEV_CUDA};
    return kinds[cfg->run.device];
}

/* Ranks of a host take the GPUs from gpu.index on in turns; a number that no GPU has is left to dev_open_gpu. */
static int gpu_of(const struct config *cfg, const struct rank_place *place)
{
    int first = (int)cfg->gpu.index, n = place->gpu > 0 ? gpus_visible() - first : 0;
    return n > 0 ? first + place->gpu % n : first;
}

int device_open_on(struct dev *d, const struct config *cfg, const struct rank_place *place, struct err *e)
{
    enum dev_kind kind = device_of(cfg);
    int threads = place->threads > 0 ? place->threads : (int)cfg->run.threads;
    const struct dev_gpu gpu = {.fp32 = cfg->gpu.precision == CFG_PRECISION_FP32,
                                .portable = cfg->gpu.portable,
                                .fast = cfg->gpu.fast,
                                .index = gpu_of(cfg, place),
                                .sms = (int)cfg->gpu.sms,
                                .gemm_table = cfg->gpu.gemm_table};
    return kind == DEV_CUDA ? dev_open_gpu(d, &gpu, threads, e) : dev_open(d, kind, threads, e);
}

int device_open(struct dev *d, const struct config *cfg, struct err *e)
{
    struct rank_place place = place_alone();
    return device_open_on(d, cfg, &place, e);
}

void plan_options(struct exec *x, const struct config *cfg)
{
    x->poison = cfg->plan.poison;
    x->random_lanes = (uint64_t)cfg->plan.random_lanes;
    x->sync = cfg->plan.sync;
    x->find_nan = cfg->plan.find_nan;
    x->capture = cfg->plan.graphs;
}

int config_complete(struct config *c, struct err *e)
{
    if (c->model.vocab == 0) {
        struct tokenizer tok;
        TRY(tokenizer_for(c, &tok, e));
        int64_t vocab = tok.vocab;
        tokenizer_close(&tok);
        TRY(config_set_auto(c, "model.vocab", vocab, e));
    }
    return config_finish(c, e);
}

int tokenizer_fits(const struct config *cfg, const struct tokenizer *tok, struct err *e)
{
    if (cfg->model.vocab >= tok->vocab)
        return ST_OK;
    err_set(e, ST_USAGE, "model.vocab is %lld, but tokenizer '%s' has %d tokens", (long long)cfg->model.vocab,
            cfg->data.tokenizer, (int)tok->vocab);
    return err_hint(e, "leave model.vocab at 0 to take the tokenizer's; token files may have fewer");
}

/* ---- data ------------------------------------------------------------------------------------ */

static struct data_opts data_options(const struct trainer *t, const char *paths, enum data_part part)
{
    const struct config *c = t->cfg;
    /* One epoch: later ones are reshuffled by number, so the order does not depend on train.steps. */
    return (struct data_opts){.paths = paths,
                              .seq = c->train.seq,
                              .seed = c->data.seed,
                              .split = c->data.split,
                              .part = part,
                              .vocab = c->model.vocab,
                              .tokenizer = &t->tok,
                              .eod = t->tok.eod};
}

static int open_data(struct trainer *t, struct err *e)
{
    const struct config *c = t->cfg;
    TRY(tokenizer_for(c, &t->tok, e));
    if (c->data.train[0] == '\0') {
        err_set(e, ST_USAGE, "data.train is not set: there is nothing to train on");
        return err_hint(e, "give a text file, a folder of text, or a token file: --data.train=PATH");
    }
    TRY(tokenizer_pack(&t->tok, t->tok_files, &t->n_tok_files, e));
    if (c->data.chat[0] != '\0') {
        TRY(chat_for(c, &t->tok, &t->chat, e));
        TRY(chat_pack(c, t->tok_files, &t->n_tok_files, e));
        if (t->chat.found[0] != '\0' && trainer_is_rank0(t) && !c->run.quiet)
            fprintf(stderr, "data.chat=auto: template %s, recognised in %s\n", t->chat.name, t->chat.found);
    }
    struct data_opts train = data_options(t, c->data.train, DATA_TRAIN);
    TRY(text_options(t, &train, e));
    TRY(dataset_open(&t->train_data, &train, e));
    if (dataset_has_text(t->train_data))
        TRY(tokenizer_fits(c, &t->tok, e));
    t->batch_opts = (struct batch_opts){.micro_batch = c->train.micro_batch,
                                        .global_batch = c->train.global_batch,
                                        .dp_rank = t->model.mesh.dp_rank,
                                        .dp_size = t->model.mesh.dp,
                                        .parts = t->model.mesh.cp,
                                        .part = t->model.mesh.cp_rank,
                                        .depths = t->train.n_mtp,
                                        .eod = t->tok.eod,
                                        .eod_mask = c->data.eod_mask,
                                        .eod_mask_loss = c->data.eod_mask,
                                        .ahead = 2,
                                        .keep = (int)t->n_micro};
    if (c->data.valid[0] == '\0' && c->data.split[0] == '\0')
        return ST_OK;
    struct data_opts valid = data_options(t, c->data.valid[0] ? c->data.valid : c->data.train, DATA_VALID);
    TRY(text_options(t, &valid, e));
    TRY(dataset_open(&t->valid_data, &valid, e));
    if (dataset_has_text(t->valid_data))
        TRY(tokenizer_fits(c, &t->tok, e));
    TRY(batch_alloc(&t->eval_batch, c->train.micro_batch, c->train.seq, e));
    TRY(batch_divide(&t->eval_batch, t->model.mesh.cp, t->model.mesh.cp_rank, 0, e));
    t->has_eval = true;
    return ST_OK;
}

/* ---- parameters ------------------------------------------------------------------------------ */

static int load_optim(struct trainer *t, const struct ckpt *c, struct err *e)
{
    TRY(load_moments(&t->model, c, e));
    t->step = ckpt_step(c);
    t->tokens_seen = ckpt_counters(c)->tokens;
    t->train_seconds = ckpt_counters(c)->wall_seconds;
    return ST_OK;
}

/* ---- opening --------------------------------------------------------------------------------- */

static int build_plans(struct trainer *t, struct err *e)
{
    const struct config *c = t->cfg;
    struct model_plan_opts train = {.name = "train",
                                    .mode = BUILD_TRAIN,
                                    .batch = c->train.micro_batch,
                                    .seq = c->train.seq,
                                    .n_micro = t->n_micro};
    struct model_plan_opts eval = {
        .name = "eval", .mode = BUILD_EVAL, .batch = c->train.micro_batch, .seq = c->train.seq};
    TRY(model_plan_build(&t->model, &t->train, &train, e));
    TRY(model_plan_build(&t->model, &t->eval, &eval, e));
    TRY(samples_plan(t, e));
    return optim_build(&t->optim, &t->model, &t->train, e);
}

/* Addresses, and an executor with room for every plan. */
static int bind(struct trainer *t, struct err *e)
{
    struct plan *plans[] = {&t->train.p, &t->eval.p, &t->optim.p, &t->optim.apply, &t->optim.beside};
    for (int i = 0; i < countof(plans); i++)
        TRY(plan_bind(plans[i], &t->model.mem, e));
    exec_init(&t->exec, &t->dev);
    plan_options(&t->exec, t->cfg);
    t->exec.capture &= t->world == NULL || world_captures(t->world, t->model.mesh.pp > 1);
    for (int i = 0; i < countof(plans); i++)
        TRY(exec_prepare(&t->exec, plans[i], e));
    return samples_bind(t, e);
}

/* Arenas, of which much host memory takes a while: the operating system clears and pins every page. */
static int take_memory(struct trainer *t, struct err *e)
{
    double begin = time_now(), host = (double)memory_total(&t->model.mem, t->model.mem.planned, true);
    bool says = host >= (double)(1 << 30) && t->dev.kind == DEV_CUDA && trainer_is_rank0(t) && !t->cfg->run.quiet;
    char size[32];
    if (says)
        fprintf(stderr, "pinning %s of host memory ...\n", human_bytes(host, size, sizeof size));
    TRY(model_commit(&t->model, NULL, 0, e));
    TRY(bind(t, e));
    t->start.memory = time_now() - begin;
    if (says)
        fprintf(stderr, "pinned after %.1f s\n", t->start.memory);
    return ST_OK;
}

static int commit(struct trainer *t, const struct ckpt *from, struct err *e)
{
    TRY(take_memory(t, e));
    double begin = time_now();
    t->stale = from == NULL; /* a rank fills what it updates */
    TRY(from == NULL ? model_init_params(&t->model, e) : load_params(&t->model, from, e));
    if (from != NULL)
        TRY(load_optim(t, from, e));
    TRY(t->dev.vt->sync(&t->dev, e));
    t->start.params = time_now() - begin;
    return ST_OK;
}

/* A GPU as far as a plan needs one: types and the op table. */
static int device_on_paper(struct dev *d, const struct config *cfg, struct err *e)
{
    *d = (struct dev){.kind = DEV_CUDA,
                      .real = cfg->gpu.precision == CFG_PRECISION_FP32 ? DT_F32 : DT_BF16,
                      .wide = DT_F32,
                      .hopper = !cfg->gpu.portable};
    return ops_for(d) != NULL ? ST_OK : dev_open_gpu(d, &(struct dev_gpu){0}, 0, e);
}

/* Microbatches of a step on this rank. */
static int count_micros(const struct config *cfg, const struct mesh *mesh, int64_t *n, struct err *e)
{
    int64_t at_once = cfg->train.micro_batch * mesh->dp;
    *n = cfg->train.global_batch / at_once;
    if (cfg->train.global_batch % at_once == 0)
        return ST_OK;
    err_set(e, ST_USAGE,
            "train.global_batch = %lld does not divide into microbatches of %lld on %d data-parallel ranks",
            (long long)cfg->train.global_batch, (long long)cfg->train.micro_batch, mesh->dp);
    return err_hint(e, "give a multiple of %lld", (long long)at_once);
}

/* Choices are recorded and dictated microbatch by microbatch, in one file. */
static int check_routes(const struct config *cfg, const struct mesh *mesh, int64_t n_micro, struct err *e)
{
    bool record = cfg->train.record_routes[0] != '\0', replay = cfg->train.replay_routes[0] != '\0';
    bool paired = (cfg->parallel.overlap == CFG_OVERLAP_EP || cfg->parallel.overlap == CFG_OVERLAP_TP) &&
                  config_reads(cfg, "parallel.overlap");
    if (record && mesh->world > 1)
        return err_set(e, ST_USAGE,
                       "train.record_routes is set, but there are %d ranks: routes are recorded by a run on one",
                       mesh->world);
    if ((record || replay) && (mesh->pp > 1 || (n_micro > 1 && (mesh->vpp > 1 || paired))))
        return err_set(e, ST_USAGE,
                       "train.%s is set, but microbatches of a step run as one plan (parallel.pp, parallel.vpp or "
                       "parallel.overlap)",
                       record ? "record_routes" : "replay_routes");
    return ST_OK;
}

int trainer_plan_on(struct trainer *t, const struct config *cfg, const struct rank_place *place, bool on_paper,
                    struct err *e)
{
    *t = (struct trainer){.cfg = cfg, .world = place->world};
    TRY(count_micros(cfg, &place->mesh, &t->n_micro, e));
    TRY(check_routes(cfg, &place->mesh, t->n_micro, e));
    TRY(on_paper && device_of(cfg) == DEV_CUDA ? device_on_paper(&t->dev, cfg, e)
                                               : device_open_on(&t->dev, cfg, place, e));
    if (place->world != NULL)
        TRY(world_device(place->world, &t->dev, e));
    double begin = time_now();
    TRY(model_init(&t->model, cfg, &t->dev, e));
    t->model.mesh = place->mesh;
    TRY(build_plans(t, e));
    t->start.plan = time_now() - begin;
    return groups_check_model(&t->model, e);
}

int trainer_plan(struct trainer *t, const struct config *cfg, bool on_paper, struct err *e)
{
    struct rank_place place = place_alone();
    return trainer_plan_on(t, cfg, &place, on_paper, e);
}

/* Declared in the same order, everything persistent gets the place it has; only frames and workspace
 * change their size. */
int trainer_replan(struct trainer *t, struct err *e)
{
    struct memory *mem = &t->model.mem;
    struct trace *trace = t->exec.trace;
    exec_release(&t->exec);
    optim_release(&t->optim);
    model_plan_release(&t->train);
    model_plan_release(&t->eval);
    samples_release(t);
    t->model.tables.n = t->model.metrics.n = t->model.routes.n = t->model.updates.n = 0;
    static const enum arena_id again[] = {ARENA_OPTIM, ARENA_STATE, ARENA_FRAME, ARENA_WORK, ARENA_HOST};
    for (int i = 0; i < countof(again); i++)
        mem->planned[again[i]] = 0;
    TRY(build_plans(t, e));
    if (t->world != NULL)
        TRY(world_forget(t->world, e));
    for (int a = 0; a < ARENA_FRAME; a++)
        if (mem->planned[a] != mem->allocated[a])
            return err_set(e, ST_INTERNAL, "planning again gave arena %s %lld bytes instead of %lld",
                           arena_name((enum arena_id)a), (long long)mem->planned[a], (long long)mem->allocated[a]);
    TRY(memory_renew(mem, e));
    TRY(bind(t, e));
    t->exec.trace = trace;
    return ST_OK;
}

int trainer_open(struct trainer *t, const struct config *cfg, const struct ckpt *from, bool with_data, struct err *e)
{
    struct rank_place place = place_alone();
    return trainer_open_on(t, cfg, &place, from, with_data, e);
}

/* What a rank opens without the others; they hear how it went before any of them goes on. */
static int open_own(struct trainer *t, const struct config *cfg, const struct rank_place *place,
                    const struct ckpt *from, bool with_data, struct err *e)
{
    TRY(trainer_plan_on(t, cfg, place, false, e));
    TRY(mem_array((void **)&t->micro, (size_t)t->n_micro, sizeof(struct batch *), e));
    TRY(mem_array((void **)&t->run, (size_t)t->n_micro, sizeof *t->run, e));
    if (with_data)
        TRY(open_data(t, e));
    TRY(commit(t, from, e));
    return routes_open(&t->routes, &t->model, cfg, t->step, e);
}

int trainer_open_on(struct trainer *t, const struct config *cfg, const struct rank_place *place,
                    const struct ckpt *from, bool with_data, struct err *e)
{
    int st = open_own(t, cfg, place, from, with_data, e);
    if (place->mesh.all != NULL)
        st = comm_agree(place->mesh.all, "start", st, e);
    TRY(st);
    TRY(ranks_open(t, e));
    t->peak_flops = dev_peak_flops(&t->dev);
    if (with_data)
        TRY(batcher_open(&t->batcher, t->train_data, &t->batch_opts, t->step, e));
    if (cfg->plan.trace[0] != '\0') {
        int64_t events =
            cfg->plan.trace_steps * (t->n_micro * t->train.p.n_steps + t->optim.p.n_steps + t->optim.apply.n_steps);
        TRY(trace_open(&t->trace, (int)min_i64(events, 10000000), e));
        t->exec.trace = t->trace;
    }
    return ST_OK;
}

void trainer_close(struct trainer *t)
{
    trainer_save_drop(t);
    batcher_close(t->batcher);
    dataset_close(t->train_data);
    dataset_close(t->valid_data);
    batch_release(&t->eval_batch);
    tokenizer_close(&t->tok);
    tokenizer_unpack(t->tok_files, t->n_tok_files);
    chat_template_close(&t->chat);
    free(t->token_dir);
    trace_close(t->trace);
    ranks_close(t->ranks);
    routes_close(t->routes);
    exec_release(&t->exec);
    optim_release(&t->optim);
    model_plan_release(&t->train);
    model_plan_release(&t->eval);
    samples_release(t);
    model_release(&t->model);
    dev_close(&t->dev);
    for (int i = 0; i < t->n_data; i++)
        free((char *)(uintptr_t)t->data[i].file.path);
    free(t->data);
    free(t->data_note);
    free(t->micro);
    free(t->run);
    *t = (struct trainer){0};
}
