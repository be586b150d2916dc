/* braid plan: what a config would do, without doing it. */
#include "cmd/cmd.h"

static const char usage[] =
    "usage: braid plan [FILE.ini] [--section.key=value ...] [--steps=on] [--params=on]\n\n"
    "Prints the stack, parameters, FLOPs, every arena and the memory of each layer; with --steps=on every step with its\n"
    "lane, waits and addresses, with --params=on every parameter. Nothing is allocated; training allocates exactly this.\n";

static void totals(const struct trainer *t, struct buf *out)
{
    const struct config *c = t->cfg;
    char a[32], b[32], d[32];
    double per_token = 3 * model_flops_per_token(c, &t->model.pattern, c->train.seq);
    double tokens = (double)(c->train.global_batch * c->train.seq);
    buf_addf(out, "step: %lld tokens (%lld microbatches of %lld x %lld), %sFLOP per token, %sFLOP per step, %sFLOP for all %lld steps\n",
             (long long)tokens, (long long)t->n_micro, (long long)c->train.micro_batch, (long long)c->train.seq,
             human_count(per_token, a, sizeof a), human_count(per_token * tokens, b, sizeof b),
             human_count(per_token * tokens * (double)c->train.steps, d, sizeof d), (long long)c->train.steps);
    buf_addf(out, "      (Megatron's count: 3 x forward, causal half of attention; the plan's own steps, replays included: %sFLOP)\n",
             human_count(plan_flops(&t->train.p) * (double)t->n_micro, a, sizeof a));
}

static int run(struct config *c, int argc, char **argv, struct trainer *t, struct err *e)
{
    struct config_extra extra[] = {{.name = "steps"}, {.name = "params"}};
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    bool steps = false, params = false;
    TRY(cmd_config(c, argc, argv, &args, e));
    TRY(cmd_words(&args, 0, e));
    if ((extra[0].value && !parse_bool(extra[0].value, &steps)) || (extra[1].value && !parse_bool(extra[1].value, &params)))
        return err_set(e, ST_USAGE, "--steps and --params take on or off");
    TRY(cmd_finish(c, e));
    TRY(trainer_plan(t, c, true, e));
    struct buf out;
    buf_init(&out, 0);
    model_print_stack(&t->model, &out);
    totals(t, &out);
    buf_add(&out, "\n");
    memory_print(&t->model.mem, &out);
    buf_add(&out, "\n");
    plan_print_memory(&t->train.p, &out);
    plan_print_memory(&t->eval.p, &out);
    plan_print_memory(&t->optim.p, &out);
    if (params) {
        buf_add(&out, "\n");
        model_print_params(&t->model, &out);
    }
    if (steps) {
        buf_add(&out, "\n");
        plan_print_steps(&t->train.p, &out);
        plan_print_steps(&t->optim.p, &out);
    }
    int st = buf_check(&out, e);
    if (st == ST_OK)
        fputs(out.text, stdout);
    buf_release(&out);
    return st;
}

int cmd_plan(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, true))
        return 0;
    struct config c = {0};
    struct trainer t = {0};
    struct err e = {0};
    int code = cmd_exit(run(&c, argc, argv, &t, &e), &e);
    trainer_close(&t);
    config_release(&c);
    return code;
}
