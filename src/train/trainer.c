/* Opening a trainer, taking a step, saving; see train.h. */
#include "train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum dev_kind device_of(const struct config *cfg)
{
    static const enum dev_kind kinds[] = {[CFG_DEVICE_CPU] = DEV_CPU, [CFG_DEVICE_REF] = DEV_REF, [CFG_DEVICE_CUDA] = DEV_CUDA};
    return kinds[cfg->run.device];
}

int device_open(struct dev *d, const struct config *cfg, struct err *e)
{
    enum dev_kind kind = device_of(cfg);
    const struct dev_gpu gpu = {.fp32 = cfg->gpu.precision == CFG_PRECISION_FP32, .portable = cfg->gpu.portable, .fast = cfg->gpu.fast,
                                .index = (int)cfg->gpu.index};
    return kind == DEV_CUDA ? dev_open_gpu(d, &gpu, (int)cfg->run.threads, e) : dev_open(d, kind, (int)cfg->run.threads, e);
}

void plan_options(struct exec *x, const struct config *cfg)
{
    x->poison = cfg->plan.poison;
    x->random_lanes = (uint64_t)cfg->plan.random_lanes;
    x->sync = cfg->plan.sync;
    x->find_nan = cfg->plan.find_nan;
    x->capture = cfg->plan.graphs;
}

int tokenizer_for(const struct config *cfg, struct tokenizer *tok, struct err *e)
{
    TRY(tokenizer_open(tok, cfg->data.tokenizer, cfg->data.eod, e));
    if (cfg->model.vocab >= tok->vocab)
        return ST_OK;
    err_set(e, ST_USAGE, "model.vocab is %lld, but tokenizer '%s' has %d tokens", (long long)cfg->model.vocab, cfg->data.tokenizer,
            (int)tok->vocab);
    return err_hint(e, "leave model.vocab at 0 to take the tokenizer's");
}

/* ---- data ---------------------------------------------------------------------------------------------------- */

static struct data_opts data_options(const struct trainer *t, const char *paths, enum data_part part)
{
    const struct config *c = t->cfg;
    /* One epoch: later ones are reshuffled by number, so the order does not depend on train.steps. */
    return (struct data_opts){.paths = paths, .seq = c->train.seq, .seed = c->data.seed, .split = c->data.split, .part = part,
                              .vocab = c->model.vocab, .tokenizer = &t->tok, .eod = t->tok.eod};
}

static int open_data(struct trainer *t, struct err *e)
{
    const struct config *c = t->cfg;
    TRY(tokenizer_for(c, &t->tok, e));
    if (c->data.train[0] == '\0') {
        err_set(e, ST_USAGE, "data.train is not set: there is nothing to train on");
        return err_hint(e, "give a text file, a folder of text, or a token file: --data.train=PATH");
    }
    struct data_opts train = data_options(t, c->data.train, DATA_TRAIN);
    TRY(dataset_open(&t->train_data, &train, e));
    t->batch_opts = (struct batch_opts){.micro_batch = c->train.micro_batch, .global_batch = c->train.global_batch, .dp_size = 1,
                                        .eod = t->tok.eod, .eod_mask = c->data.eod_mask, .eod_mask_loss = c->data.eod_mask,
                                        .ahead = 2, .keep = (int)t->n_micro};
    if (c->data.valid[0] == '\0' && c->data.split[0] == '\0')
        return ST_OK;
    struct data_opts valid = data_options(t, c->data.valid[0] ? c->data.valid : c->data.train, DATA_VALID);
    TRY(dataset_open(&t->valid_data, &valid, e));
    TRY(batch_alloc(&t->eval_batch, c->train.micro_batch, c->train.seq, e));
    t->has_eval = true;
    return ST_OK;
}

/* ---- parameters ------------------------------------------------------------------------------------------------- */

static const char *const moment[2] = {"exp_avg", "exp_avg_sq"};

static int load_optim(struct trainer *t, const struct ckpt *c, struct err *e)
{
    TRY(load_moments(&t->model, c, e));
    t->step = ckpt_step(c);
    t->tokens_seen = ckpt_counters(c)->tokens;
    t->train_seconds = ckpt_counters(c)->wall_seconds;
    return ST_OK;
}

int trainer_save(struct trainer *t, struct err *e)
{
    struct model *m = &t->model;
    int n = 0, st;
    struct ckpt_item *items = NULL;
    struct arena keys;
    struct buf config;
    arena_init(&keys);
    buf_init(&config, 0);
    TRY_OUT(mem_array((void **)&items, 3 * (size_t)m->params.n, sizeof *items, e));
    for (int k = 0; k < m->params.n; k++) {
        const struct param *p = &m->params.list[k].p;
        struct tensor values = model_param(m, k);
        items[n] = (struct ckpt_item){.key = p->key, .param = p, .section = CKPT_MODEL};
        TRY_OUT(dev_fetch(&t->dev, &values, &items[n++].host, e));
        for (int w = 0; w < 2 && !p->buffer; w++) {
            char *key = arena_printf(&keys, "%s.%s", moment[w], p->key);
            if (key == NULL)
                TRY_OUT(err_set(e, ST_NOMEM, "out of memory saving a checkpoint"));
            values = optim_state(m, k, w);
            items[n] = (struct ckpt_item){.key = key, .param = p, .section = CKPT_OPTIM};
            TRY_OUT(dev_fetch(&t->dev, &values, &items[n++].host, e));
        }
    }
    config_write(t->cfg, &config, false);
    TRY_OUT(buf_check(&config, e));
    struct ckpt_save_args args = {
        .run_dir = t->cfg->run.dir, .step = t->step, .items = items, .n_items = n, .config_text = config.text, .keep = (int)t->cfg->run.keep,
        .counters = {.samples = t->step * t->cfg->train.global_batch, .tokens = t->tokens_seen, .seed = (uint64_t)t->cfg->run.seed,
                     .wall_seconds = t->train_seconds}};
    st = ckpt_save(&args, e);
out:
    for (int i = 0; items != NULL && i < n; i++)
        dev_fetched(&t->dev, &items[i].host);
    free(items);
    arena_release(&keys);
    buf_release(&config);
    return st;
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static int build_plans(struct trainer *t, struct err *e)
{
    const struct config *c = t->cfg;
    struct model_plan_opts train = {.name = "train", .mode = BUILD_TRAIN, .batch = c->train.micro_batch, .seq = c->train.seq};
    struct model_plan_opts eval = {.name = "eval", .mode = BUILD_EVAL, .batch = c->train.micro_batch, .seq = c->train.seq};
    TRY(model_plan_build(&t->model, &t->train, &train, e));
    TRY(model_plan_build(&t->model, &t->eval, &eval, e));
    return optim_build(&t->optim, &t->model, &t->train, e);
}

static int commit(struct trainer *t, const struct ckpt *from, struct err *e)
{
    struct model_plan *plans[] = {&t->train, &t->eval};
    TRY(model_commit(&t->model, plans, countof(plans), e));
    TRY(plan_bind(&t->optim.p, &t->model.mem, e));
    exec_init(&t->exec, &t->dev);
    plan_options(&t->exec, t->cfg);
    TRY(exec_prepare(&t->exec, &t->train.p, e));
    TRY(exec_prepare(&t->exec, &t->eval.p, e));
    TRY(exec_prepare(&t->exec, &t->optim.p, e));
    if (from == NULL)
        return model_init_params(&t->model, e);
    TRY(load_params(&t->model, from, e));
    return load_optim(t, from, e);
}

/* A GPU as far as a plan needs one: types and the op table. */
static int device_on_paper(struct dev *d, const struct config *cfg, struct err *e)
{
    *d = (struct dev){.kind = DEV_CUDA, .real = cfg->gpu.precision == CFG_PRECISION_FP32 ? DT_F32 : DT_BF16, .wide = DT_F32};
    return ops_for(d) != NULL ? ST_OK : dev_open_gpu(d, &(struct dev_gpu){0}, 0, e);
}

int trainer_plan(struct trainer *t, const struct config *cfg, bool on_paper, struct err *e)
{
    *t = (struct trainer){.cfg = cfg, .n_micro = cfg->train.global_batch / cfg->train.micro_batch};
    TRY(on_paper && device_of(cfg) == DEV_CUDA ? device_on_paper(&t->dev, cfg, e) : device_open(&t->dev, cfg, e));
    TRY(model_init(&t->model, cfg, &t->dev, e));
    return build_plans(t, e);
}

int trainer_open(struct trainer *t, const struct config *cfg, const struct ckpt *from, bool with_data, struct err *e)
{
    TRY(trainer_plan(t, cfg, false, e));
    TRY(mem_array((void **)&t->micro, (size_t)t->n_micro, sizeof(struct batch *), e));
    if (with_data)
        TRY(open_data(t, e));
    TRY(commit(t, from, e));
    t->peak_flops = dev_peak_flops(&t->dev);
    if (with_data)
        TRY(batcher_open(&t->batcher, t->train_data, &t->batch_opts, t->step, e));
    if (cfg->plan.trace[0] != '\0') {
        int64_t events = cfg->plan.trace_steps * (t->n_micro * t->train.p.n_steps + t->optim.p.n_steps);
        TRY(trace_open(&t->trace, (int)min_i64(events, 10000000), e));
        t->exec.trace = t->trace;
    }
    return ST_OK;
}

void trainer_close(struct trainer *t)
{
    batcher_close(t->batcher);
    dataset_close(t->train_data);
    dataset_close(t->valid_data);
    batch_release(&t->eval_batch);
    if (t->tok.ops != NULL)
        tokenizer_close(&t->tok);
    trace_close(t->trace);
    exec_release(&t->exec);
    optim_release(&t->optim);
    model_plan_release(&t->train);
    model_plan_release(&t->eval);
    model_release(&t->model);
    dev_close(&t->dev);
    free(t->micro);
    *t = (struct trainer){0};
}

/* ---- a step ------------------------------------------------------------------------------------------------------- */

void count_labels(const int32_t *labels, const int32_t *doc_start, int64_t rows, int64_t seq, int depths, int64_t *counts)
{
    for (int k = 0; k <= depths; k++)
        for (int64_t i = 0; i < rows; i++)
            counts[k] += i % seq + k < seq && labels[i + k] >= 0 && (doc_start == NULL || doc_start[i + k] == doc_start[i]);
}

void loss_scales(const struct config *cfg, const int64_t *counts, int depths, double *scale)
{
    for (int k = 0; k <= depths; k++)
        scale[k] = (k == 0 ? 1 : cfg->model.mtp_scale / depths) / (double)max_i64(counts[k], 1);
}

static int run_micros(struct trainer *t, struct err *e)
{
    for (int64_t k = 0; k < t->n_micro; k++) {
        const struct batch *b = t->micro[k];
        struct run_info run = {.step = t->step, .first_sample = b->first_sample, .first_mb = k == 0, .scale = t->scale[0], .mtp_scale = t->scale + 1,
                               .mb_share = 1.0 / (double)t->n_micro, .tokens = b->tokens, .labels = b->labels, .pos = b->pos,
                               .doc_start = b->doc_start};
        TRY(exec_run(&t->exec, &t->train.p, &run, e));
    }
    return ST_OK;
}

/* The update refused. Parameters are as before the step, so running it again with the search on finds
 * the same first bad value. */
static int name_culprit(struct trainer *t, struct err *e)
{
    bool searching = t->exec.find_nan;
    t->exec.find_nan = true;
    int st = run_micros(t, e);
    t->exec.find_nan = searching;
    if (st == ST_OK)
        st = err_set(e, ST_NONFINITE, "the gradient norm is not finite at step %lld, though every value is: it overflowed",
                     (long long)t->step + 1);
    err_hint(e, "lower train.lr, or continue past such steps with train.nonfinite=skip; the last checkpoint is untouched");
    return st;
}

/* The microbatches of the step, and what their losses weigh. */
static int take_batches(struct trainer *t, struct err *e)
{
    int64_t rows = t->cfg->train.micro_batch * t->cfg->train.seq;
    for (int i = 0; i < countof(t->labels); i++)
        t->labels[i] = 0;
    for (int64_t k = 0; k < t->n_micro; k++) {
        TRY(batcher_next(t->batcher, &t->micro[k], e));
        count_labels(t->micro[k]->labels, t->cfg->data.eod_mask ? t->micro[k]->doc_start : NULL, rows, t->cfg->train.seq, t->train.n_mtp,
                     t->labels);
    }
    loss_scales(t->cfg, t->labels, t->train.n_mtp, t->scale);
    return ST_OK;
}

int trainer_step(struct trainer *t, struct step_result *r, struct err *e)
{
    double begin = time_now(), hyper[HYPER_COUNT];
    TRY(take_batches(t, e));
    TRY(run_micros(t, e));
    optim_hyper(&t->optim, t->step, hyper);
    struct run_info run = {.step = t->step, .first_mb = true, .hyper = hyper};
    TRY(exec_run(&t->exec, &t->optim.p, &run, e));

    double loss[2], clip[CLIP_COUNT];
    const struct slot *clip_slot = &t->optim.g.slots[t->optim.clip];
    struct tensor loss_slot = model_slot(&t->model, &t->train, t->train.loss);
    TRY(t->dev.vt->copy_out(&t->dev, loss, loss_slot.data, sizeof loss, e));
    TRY(t->dev.vt->copy_out(&t->dev, clip, t->model.mem.base[ARENA_STATE] + clip_slot->offset, sizeof clip, e));
    *r = (struct step_result){.loss = loss[0] / (double)max_i64(t->labels[0], 1), .grad_norm = clip[CLIP_NORM], .lr = hyper[HYPER_LR],
                              .tokens = t->cfg->train.global_batch * t->cfg->train.seq, .skipped = clip[CLIP_SKIP] != 0};
    if (r->skipped && t->cfg->train.nonfinite == CFG_NONFINITE_STOP)
        return name_culprit(t, e);
    t->step++;
    t->skipped += r->skipped;
    t->tokens_seen += r->tokens;
    r->seconds = time_now() - begin;
    t->train_seconds += r->seconds;
    return ST_OK;
}

int trainer_eval(struct trainer *t, double *loss, double *bits_per_byte, struct err *e)
{
    int64_t labels = 0, bytes = 0, rows = t->cfg->train.micro_batch * t->cfg->train.seq;
    struct batch_opts o = t->batch_opts;
    o.global_batch = o.micro_batch;
    for (int64_t k = 0; k < t->cfg->train.eval_batches; k++) {
        int64_t n;
        TRY(batch_fill(&t->eval_batch, t->valid_data, &o, k, 0, e));
        const struct batch *b = &t->eval_batch;
        struct run_info run = {.step = t->step, .first_mb = k == 0, .tokens = b->tokens, .labels = b->labels, .pos = b->pos,
                               .doc_start = b->doc_start};
        TRY(exec_run(&t->exec, &t->eval.p, &run, e));
        for (int64_t i = 0; i < rows; i++)
            labels += b->labels[i] >= 0;
        TRY(tokenizer_count_bytes(&t->tok, b->labels, rows, &n, e));
        bytes += n;
    }
    double sum[2];
    struct tensor slot = model_slot(&t->model, &t->eval, t->eval.loss);
    TRY(t->dev.vt->copy_out(&t->dev, sum, slot.data, sizeof sum, e));
    *loss = sum[0] / (double)max_i64(labels, 1);
    *bits_per_byte = bytes > 0 ? sum[0] / (log(2.0) * (double)bytes) : 0;
    return ST_OK;
}
