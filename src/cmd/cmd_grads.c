/* braid grads: loss, logits and every gradient of one batch, as a safetensors file anyone can check. */
#include "cmd/cmd.h"
#include "train/probe.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: braid grads FILE.ini --in=TOKENS.safetensors --out=OUT.safetensors [--ckpt=DIR | --run.load_weights=FILE] "
    "[--section.key=value ...]\n\n"
    "The input holds `tokens` and optionally `labels` (-1: ignored), I32 [batch, seq]; without labels they are the "
    "tokens\n"
    "shifted by one. The output holds `loss` (mean over labels), `logits`, and param.KEY and grad.KEY of every "
    "parameter.\n";
static const char own_options[] = "model.pattern run.load_weights run.device run.threads";

struct job {
    struct config c;
    struct ckpt *from;
    struct st_file *in;
    struct probe_batch batch;
    struct probe probe;
    struct arena names;
};

static int add_item(struct job *j, struct st_item *items, int *n, const char *name, const struct tensor *values,
                    const struct param *p, struct err *e)
{
    if (name == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    items[*n] = (struct st_item){.name = name, .param = p};
    TRY(dev_fetch(&j->probe.dev, values, &items[*n].host, e));
    (*n)++;
    return ST_OK;
}

static int write_out(struct job *j, const char *path, struct err *e)
{
    struct probe *p = &j->probe;
    struct model *m = &p->model;
    struct st_item *items = NULL;
    int n = 0;
    TRY(mem_array((void **)&items, (size_t)(2 * m->params.n + 2), sizeof *items, e));
    struct tensor logits = model_slot(m, &p->plan, p->plan.logits);
    items[n++] = (struct st_item){.name = "loss", .host = tensor_1d(&p->loss, DT_F64, 1)};
    int st = add_item(j, items, &n, "logits", &logits, NULL, e);
    for (int k = 0; k < m->params.n && st == ST_OK; k++) {
        const struct param *q = &m->params.list[k].p;
        struct tensor value = model_param(m, k), grad = !param_trained(q) ? value : model_grad(m, k);
        st = add_item(j, items, &n, arena_printf(&j->names, "param.%s", q->key), &value, q, e);
        if (st == ST_OK && param_trained(q))
            st = add_item(j, items, &n, arena_printf(&j->names, "grad.%s", q->key), &grad, q, e);
    }
    if (st == ST_OK)
        st = st_write_file(path, items, n, NULL, 0, e);
    if (st == ST_OK)
        printf("loss: %.9g\nwrote %s\n", p->loss, path);
    for (int i = 1; i < n; i++)
        dev_fetched(&p->dev, &items[i].host);
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
        return err_set(e, ST_USAGE,
                       "--ckpt takes the model and its weights, run.load_weights the weights alone: give one of them");
    cmd_say_unused(&j->c);
    cmd_say_unread(&j->c, "grads");
    if (j->c.data.eod_mask && !j->c.run.quiet)
        fprintf(stderr, "note: data.eod_mask = on has no effect: braid grads takes every row as one document\n");
    TRY(routes_refuse(&j->c, "braid grads", e));
    TRY(st_open(&j->in, extra[0].value, e));
    TRY(probe_batch_read(&j->batch, j->in, extra[0].value, e));
    TRY(probe_run(&j->probe, &j->c, &j->batch, j->from, e));
    return write_out(j, extra[1].value, e);
}

int cmd_grads(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, own_options))
        return 0;
    struct job j = {0};
    struct err e = {0};
    int code = cmd_exit(run(&j, argc, argv, &e), &e);
    probe_release(&j.probe);
    probe_batch_release(&j.batch);
    st_close(j.in);
    ckpt_close(j.from);
    config_release(&j.c);
    arena_release(&j.names);
    return code;
}
