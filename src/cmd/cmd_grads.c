/* braid grads: loss, logits and every gradient of one batch, as a safetensors file anyone can check. */
#include "cmd/cmd.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: braid grads FILE.ini --in=TOKENS.safetensors --out=OUT.safetensors [--ckpt=DIR | --run.load_weights=FILE] [--section.key=value ...]\n\n"
    "The input holds `tokens` and optionally `labels` (-1: ignored), I32 [batch, seq]; without labels they are the tokens\n"
    "shifted by one. The output holds `loss` (mean over labels), `logits`, and param.KEY and grad.KEY of every parameter.\n";

struct job {
    struct config c;
    struct ckpt *from;
    struct st_file *in;
    struct dev dev;
    struct model model;
    struct model_plan plan;
    struct exec exec;
    int32_t *tokens, *labels, *pos, *doc;
    int64_t n_labels;
    struct arena names;
};

static int read_ids(struct job *j, const char *name, int64_t rows, int64_t cols, int32_t *out, struct err *e)
{
    const struct st_entry *entry = st_find(j->in, name);
    struct tensor dst = tensor_2d(out, DT_I32, rows, cols);
    return st_read(entry, &dst, e);
}

static int read_batch(struct job *j, const char *path, struct err *e)
{
    TRY(st_open(&j->in, path, e));
    const struct st_entry *tokens = st_find(j->in, "tokens");
    if (tokens == NULL || tokens->view.rank != 2)
        return err_set(e, ST_INVALID, "%s holds no tensor 'tokens' of shape [batch, seq]", path);
    int64_t batch = tokens->view.dim[0], seq = tokens->view.dim[1], n = batch * seq;
    if (n == 0)
        return err_set(e, ST_INVALID, "%s: tokens are empty", path);
    j->c.train.micro_batch = j->c.train.global_batch = batch;
    j->c.train.seq = seq;
    int32_t **arrays[] = {&j->tokens, &j->labels, &j->pos, &j->doc};
    for (int i = 0; i < countof(arrays); i++)
        TRY(mem_array((void **)arrays[i], (size_t)n, sizeof(int32_t), e));
    TRY(read_ids(j, "tokens", batch, seq, j->tokens, e));
    bool given = st_find(j->in, "labels") != NULL;
    if (given)
        TRY(read_ids(j, "labels", batch, seq, j->labels, e));
    for (int64_t i = 0; i < n; i++) {
        int64_t t = i % seq;
        if (!given)
            j->labels[i] = t + 1 < seq ? j->tokens[i + 1] : -1;
        j->pos[i] = (int32_t)t;
        j->n_labels += j->labels[i] >= 0;
    }
    return ST_OK;
}

static int compute(struct job *j, struct err *e)
{
    struct model_plan *plans[] = {&j->plan};
    struct model_plan_opts o = {.name = "grads", .mode = BUILD_TRAIN, .batch = j->c.train.micro_batch, .seq = j->c.train.seq, .want_logits = true};
    TRY(device_open(&j->dev, &j->c, e));
    TRY(model_init(&j->model, &j->c, &j->dev, e));
    TRY(model_plan_build(&j->model, &j->plan, &o, e));
    TRY(model_commit(&j->model, plans, 1, e));
    TRY(j->from ? load_params(&j->model, j->from, e) : model_init_params(&j->model, e));
    if (j->c.run.load_weights[0] != '\0')
        TRY(cmd_take_weights(&j->model, e));
    exec_init(&j->exec, &j->dev);
    plan_options(&j->exec, &j->c);
    TRY(exec_prepare(&j->exec, &j->plan.p, e));
    int64_t counts[1 + MTP_MAX_DEPTHS] = {0}, rows = j->c.train.micro_batch * j->c.train.seq;
    double scale[1 + MTP_MAX_DEPTHS];
    count_labels(j->labels, NULL, rows, j->c.train.seq, j->plan.n_mtp, counts);
    loss_scales(&j->c, counts, j->plan.n_mtp, scale);
    struct run_info run = {.first_mb = true, .mb_share = 1, .scale = scale[0], .mtp_scale = scale + 1, .tokens = j->tokens, .labels = j->labels,
                           .pos = j->pos, .doc_start = j->doc};
    return exec_run(&j->exec, &j->plan.p, &run, e);
}

static int add_item(struct job *j, struct st_item *items, int *n, const char *name, const struct tensor *values, const struct param *p,
                    struct err *e)
{
    if (name == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    items[*n] = (struct st_item){.name = name, .param = p};
    TRY(dev_fetch(&j->dev, values, &items[*n].host, e));
    (*n)++;
    return ST_OK;
}

static int write_out(struct job *j, const char *path, struct err *e)
{
    struct model *m = &j->model;
    struct st_item *items = NULL;
    int n = 0;
    TRY(mem_array((void **)&items, (size_t)(2 * m->params.n + 2), sizeof *items, e));
    struct tensor slot = model_slot(m, &j->plan, j->plan.loss), logits = model_slot(m, &j->plan, j->plan.logits);
    double loss[2] = {0};
    int st = j->dev.vt->copy_out(&j->dev, loss, slot.data, sizeof loss, e);
    double mean = loss[0] / (double)max_i64(j->n_labels, 1);
    items[n++] = (struct st_item){.name = "loss", .host = tensor_1d(&mean, DT_F64, 1)};
    if (st == ST_OK)
        st = add_item(j, items, &n, "logits", &logits, NULL, e);
    for (int k = 0; k < m->params.n && st == ST_OK; k++) {
        const struct param *p = &m->params.list[k].p;
        struct tensor value = model_param(m, k), grad = p->buffer ? value : model_grad(m, k);
        st = add_item(j, items, &n, arena_printf(&j->names, "param.%s", p->key), &value, p, e);
        if (st == ST_OK && !p->buffer)
            st = add_item(j, items, &n, arena_printf(&j->names, "grad.%s", p->key), &grad, p, e);
    }
    if (st == ST_OK)
        st = st_write_file(path, items, n, NULL, 0, e);
    if (st == ST_OK)
        printf("loss: %.9g\nwrote %s\n", mean, path);
    for (int i = 1; i < n; i++)
        dev_fetched(&j->dev, &items[i].host);
    free(items);
    return st;
}

static int run(struct job *j, int argc, char **argv, struct err *e)
{
    struct config_extra extra[] = {{.name = "in"}, {.name = "out"}, {.name = "ckpt"}};
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    arena_init(&j->names);
    TRY(cmd_config(&j->c, argc, argv, &args, e));
    TRY(cmd_words(&args, 0, e));
    if (extra[0].value == NULL || extra[1].value == NULL)
        return err_set(e, ST_USAGE, "braid grads needs --in and --out");
    if (extra[2].value == NULL && j->c.run.load[0] != '\0')
        extra[2].value = j->c.run.load;
    if (extra[2].value != NULL) {
        args.positional[0] = extra[2].value;
        args.n_positional = 1;
        TRY(cmd_open_checkpoint(&j->c, &args, &j->from, e));
    }
    TRY(cmd_finish(&j->c, e));
    if (j->from != NULL && j->c.run.load_weights[0] != '\0')
        return err_set(e, ST_USAGE, "--ckpt takes the model and its weights, run.load_weights the weights alone: give one of them");
    cmd_say_unused(&j->c);
    TRY(routes_refuse(&j->c, "braid grads", e));
    TRY(read_batch(j, extra[0].value, e));
    TRY(compute(j, e));
    return write_out(j, extra[1].value, e);
}

int cmd_grads(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, true))
        return 0;
    struct job j = {0};
    struct err e = {0};
    int code = cmd_exit(run(&j, argc, argv, &e), &e);
    exec_release(&j.exec);
    model_plan_release(&j.plan);
    model_release(&j.model);
    dev_close(&j.dev);
    st_close(j.in);
    ckpt_close(j.from);
    config_release(&j.c);
    arena_release(&j.names);
    free(j.tokens);
    free(j.labels);
    free(j.pos);
    free(j.doc);
    return code;
}
