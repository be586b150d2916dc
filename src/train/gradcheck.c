/* Whole-model gradient check: central differences in double on the reference device, through the very
 * plans that train. */
#include "train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct checker {
    struct dev dev;
    struct model model;
    struct model_plan train;
    struct exec exec;
    int32_t *tokens, *labels, *pos, *doc;
    int64_t rows, counts[1 + MTP_MAX_DEPTHS];
    double scale[1 + MTP_MAX_DEPTHS];
};

static int fill_batch(struct checker *c, const struct config *cfg, uint64_t seed, struct err *e)
{
    c->rows = cfg->train.micro_batch * cfg->train.seq;
    int32_t **arrays[] = {&c->tokens, &c->labels, &c->pos, &c->doc};
    for (int i = 0; i < countof(arrays); i++)
        TRY(mem_array((void **)arrays[i], (size_t)c->rows, sizeof(int32_t), e));
    uint64_t key = rng_key(seed, "tokens");
    for (int64_t i = 0; i < c->rows; i++) {
        int64_t in_row = i % cfg->train.seq, doc = in_row >= cfg->train.seq / 3 ? cfg->train.seq / 3 : 0;
        c->tokens[i] = (int32_t)rng_below(key, (uint64_t)(2 * i), (uint64_t)cfg->model.vocab);
        c->labels[i] = i % 7 == 5 ? -1 : (int32_t)rng_below(key, (uint64_t)(2 * i + 1), (uint64_t)cfg->model.vocab);
        c->doc[i] = (int32_t)doc;
        c->pos[i] = (int32_t)(config_separates(cfg) ? in_row - doc : in_row);
    }
    return ST_OK;
}

/* What train.z_loss adds, which the loss that is reported leaves out: the squared log-sum-exp of each labelled row. */
static double z_term(const struct checker *c, const struct config *cfg)
{
    double sum = 0;
    if (cfg->train.z_loss == 0)
        return 0;
    struct tensor z = model_slot(&c->model, &c->train, c->train.logits);
    for (int64_t r = 0; r < c->rows; r++) {
        const double *row = (const double *)z.data + r * z.dim[1];
        double max = row[0], exps = 0;
        for (int64_t v = 1; v < z.dim[1]; v++)
            max = fmax(max, row[v]);
        for (int64_t v = 0; v < z.dim[1]; v++)
            exps += exp(row[v] - max);
        double lse = max + log(exps);
        sum += c->labels[r] >= 0 ? lse * lse : 0;
    }
    return cfg->train.z_loss * c->scale[0] * sum;
}

/* What the parameter with this key is trained by. A loss that is detached from the rest of the model may be smaller
 * than the others by far: it is apart, so that their rounding does not hide its changes. */
struct losses {
    double model, detached;
};

static int losses_of(struct checker *c, const char *key, struct losses *loss, struct err *e)
{
    struct run_info run = {.step = 3,
                           .first_sample = 11,
                           .first_mb = true,
                           .scale = c->scale[0],
                           .mtp_scale = c->scale + 1,
                           .mb_share = 1,
                           .tokens = c->tokens,
                           .labels = c->labels,
                           .pos = c->pos,
                           .doc_start = c->doc};
    TRY(exec_run(&c->exec, &c->train.p, &run, e));
    struct tensor slot = model_slot(&c->model, &c->train, c->train.loss);
    *loss = (struct losses){.model = ((const double *)slot.data)[0] * c->scale[0] + z_term(c, c->model.cfg)};
    for (int k = 0; k < c->train.n_mtp; k++) {
        slot = model_slot(&c->model, &c->train, c->train.mtp_loss[k]);
        loss->model += ((const double *)slot.data)[0] * c->scale[k + 1];
    }
    for (int k = 0; k < c->model.metrics.n; k++) {
        const struct metric *m = &c->model.metrics.m[k];
        double value = 0;
        if (m->objective && (m->only == NULL || strstr(key, m->only) != NULL))
            TRY(model_read_state(&c->model, m->offset, &value, sizeof value, e));
        *(m->only != NULL ? &loss->detached : &loss->model) += value * run.mb_share;
    }
    return ST_OK;
}

static void shift(struct tensor *p, uint64_t key, double by)
{
    for (int64_t i = 0, n = tensor_elems(p); i < n; i++)
        ((double *)p->data)[i] += by * rng_normal(key, (uint64_t)i);
}

/* Central difference along one direction with step h. */
static int difference(struct checker *c, int k, uint64_t key, double h, double *out, struct err *e)
{
    struct tensor tensor = model_param(&c->model, k), *p = &tensor;
    const char *name = c->model.params.list[k].p.key;
    struct losses up, down;
    shift(p, key, h);
    TRY(losses_of(c, name, &up, e));
    shift(p, key, -2 * h);
    TRY(losses_of(c, name, &down, e));
    shift(p, key, h);
    *out = ((up.model - down.model) + (up.detached - down.detached)) / (2 * h);
    return ST_OK;
}

/* From steps of h and 2h without the third derivative, so that h may be large and rounding small. */
static int wide_difference(struct checker *c, int k, uint64_t key, double h, double *out, struct err *e)
{
    double near, far;
    TRY(difference(c, k, key, h, &near, e));
    TRY(difference(c, k, key, 2 * h, &far, e));
    *out = (4 * near - far) / 3;
    return ST_OK;
}

/* A wrong gradient is wrong at every step size. A right one may miss at one of them: a large step can push a
 * token over the edge to another expert, or see the third derivative; a small one drowns a gradient near 0
 * in rounding. So several steps get a say, the last ones for gradients near 0. */
static int check_param(struct checker *c, int k, const double *grad, uint64_t seed, struct model_check_row *row,
                       struct err *e)
{
    static const double steps[] = {1e-5, 1e-6, 2e-7, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2};
    enum { PLAIN_STEPS = 5 };
    struct tensor p = model_param(&c->model, k);
    uint64_t key = rng_key(seed, c->model.params.list[k].p.key);
    double scale = 0;
    *row = (struct model_check_row){.key = c->model.params.list[k].p.key, .error = HUGE_VAL};
    for (int64_t i = 0, n = tensor_elems(&p); i < n; i++) {
        double term = grad[i] * rng_normal(key, (uint64_t)i);
        row->analytic += term;
        scale += term * term;
    }
    for (int s = 0; s < countof(steps) && !(row->error <= GRADCHECK_ALLOWED); s++) {
        double numeric;
        TRY(s < PLAIN_STEPS ? difference(c, k, key, steps[s], &numeric, e)
                            : wide_difference(c, k, key, steps[s], &numeric, e));
        double error = fabs(numeric - row->analytic) / (sqrt(scale) + fabs(row->analytic) + 1e-6);
        if (!(error >= row->error)) {
            row->numeric = numeric;
            row->error = error;
        }
    }
    return ST_OK;
}

static int run_checks(struct checker *c, const struct config *cfg, uint64_t seed,
                      void (*visit)(void *, const struct model_check_row *), void *ctx, double *worst, struct err *e)
{
    struct model_plan *plans[] = {&c->train};
    struct model_plan_opts o = {.name = "gradcheck",
                                .mode = BUILD_TRAIN,
                                .batch = cfg->train.micro_batch,
                                .seq = cfg->train.seq,
                                .want_logits = cfg->train.z_loss > 0};
    struct losses loss;
    double *saved = NULL;
    TRY(routes_refuse(cfg, "gradcheck", e));
    if (cfg->gpu.precision == CFG_PRECISION_FP8) {
        err_set(
            e, ST_USAGE,
            "gradcheck: with gpu.precision = fp8 the loss is a staircase, which has no differences to compare with");
        return err_hint(e, "leave gpu.precision away; `braid grads` compares gradients of devices and precisions");
    }
    if (cfg->train.z_loss > 0 && strchr(cfg->model.pattern, '/') != NULL) {
        err_set(e, ST_USAGE,
                "gradcheck: train.z_loss is part of gradients but of no loss that prediction depths report");
        return err_hint(e, "leave train.z_loss out, or check a pattern without prediction depths (/)");
    }
    TRY(dev_open(&c->dev, DEV_REF, 1, e));
    TRY(model_init(&c->model, cfg, &c->dev, e));
    TRY(model_plan_build(&c->model, &c->train, &o, e));
    TRY(model_commit(&c->model, plans, 1, e));
    TRY(model_init_params(&c->model, e));
    exec_init(&c->exec, &c->dev);
    plan_options(&c->exec, cfg);
    TRY(exec_prepare(&c->exec, &c->train.p, e));
    TRY(fill_batch(c, cfg, seed, e));
    count_labels(c->labels, config_separates(cfg) ? c->doc : NULL, c->rows, cfg->train.seq, c->train.n_mtp, c->counts);
    loss_scales(cfg, c->counts, c->train.n_mtp, c->scale);
    /* Away from the symmetric start: gains of 1 and biases of 0 would hide errors. */
    for (int k = 0; k < c->model.params.n; k++) {
        struct tensor p = model_param(&c->model, k);
        if (p.dtype == DT_F64) /* not a table of numbers */
            shift(&p, rng_key(seed, "start"), 0.1);
    }
    TRY(losses_of(c, "", &loss, e));
    int64_t bytes = c->model.mem.allocated[ARENA_GRAD];
    TRY(mem_aligned((void **)&saved, (size_t)bytes, DEV_ALIGN, e));
    int st = c->dev.vt->copy_out(&c->dev, saved, c->model.mem.base[ARENA_GRAD], bytes, e);
    for (int k = 0; st == ST_OK && k < c->model.params.n; k++) {
        struct model_check_row row;
        if (!param_trained(&c->model.params.list[k].p))
            continue;
        const double *grad = (const double *)((const char *)saved + c->model.params.list[k].grad_offset);
        st = check_param(c, k, grad, seed + 1, &row, e);
        *worst = st == ST_OK && !(row.error <= *worst) ? row.error : *worst;
        if (st == ST_OK && visit != NULL)
            visit(ctx, &row);
    }
    free(saved);
    return st;
}

int model_gradcheck(const struct config *cfg, uint64_t seed, void (*visit)(void *, const struct model_check_row *),
                    void *ctx, double *worst, struct err *e)
{
    struct checker c = {0};
    *worst = 0;
    int st = run_checks(&c, cfg, seed, visit, ctx, worst, e);
    exec_release(&c.exec);
    model_plan_release(&c.train);
    model_release(&c.model);
    dev_close(&c.dev);
    free(c.tokens);
    free(c.labels);
    free(c.pos);
    free(c.doc);
    return st;
}
