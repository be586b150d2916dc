/* braid gradcheck: every op's backward, and a whole model's, against central differences in double. */
#include "cmd/cmd.h"
#include "ops/opcheck.h"

#include <string.h>

static const char usage[] =
    "usage: braid gradcheck [FILE.ini] [--section.key=value ...] [--only=ops|model|OP]\n\n"
    "Checks the gradient of every op on its sample shapes, then of every parameter of the configured model (keep it "
    "tiny:\n"
    "the reference device is slow by design). Exits 1 if a relative error exceeds 1e-6.\n";
static const char own_options[] =
    "model.pattern model.hidden model.heads model.ffn model.vocab train.seq train.micro_batch run.threads";

static const double allowed = GRADCHECK_ALLOWED;

static int check_ops(const char *only, int *failed, struct err *e)
{
    int n;
    const struct op_desc *const *all = op_registry(&n);
    int checked = 0;
    for (int i = 0; i < n; i++) {
        double worst = 0;
        int checks = 0;
        bool bad = false;
        for (int s = 0;
             all[i]->backward != NULL && (only == NULL || str_starts(all[i]->name, only)) && s < all[i]->n_samples;
             s++) {
            struct op_check_result r;
            if (op_sample_flag(&all[i]->samples[s], "gpu"))
                continue;
            TRY(op_gradcheck(all[i], &all[i]->samples[s], 11, &r, e));
            worst = r.worst > worst ? r.worst : worst;
            bad |= !(r.worst <= allowed); /* so that NaN is bad, too */
            checks += r.compared;
        }
        if (checks == 0)
            continue;
        checked++;
        *failed += bad;
        printf("op     %-52s %3d checks  worst %.2e  %s\n", all[i]->name, checks, worst, bad ? "FAILED" : "ok");
    }
    if (checked > 0)
        return ST_OK;
    err_set(e, ST_USAGE, "--only=%s: no op with a gradient has a name that starts so", only ? only : "ops");
    return err_hint(e, "ops, model, or the start of a name that `braid op list` shows");
}

static void show(void *ctx, const struct model_check_row *row)
{
    int *failed = ctx;
    *failed += !(row->error <= allowed);
    printf("param  %-52s %13.6e  error %.2e  %s\n", row->key, row->analytic, row->error,
           row->error <= allowed ? "ok" : "FAILED");
}

static int run(struct config *c, int argc, char **argv, int *failed, struct err *e)
{
    struct config_extra extra[] = {{.name = "only"}};
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    TRY(cmd_config(c, argc, argv, &args, e));
    TRY(cmd_words(&args, 0, e));
    const char *only = extra[0].value;
    bool ops = only == NULL || strcmp(only, "model") != 0, model = only == NULL || strcmp(only, "model") == 0;
    const char *filter = only != NULL && strcmp(only, "ops") != 0 ? only : NULL;
    TRY(cmd_finish(c, e));
    TRY(cmd_refuse_weights(c, "braid gradcheck", e));
    cmd_say_unread(c, "gradcheck");
    cmd_say_unused(c);
    if (ops)
        TRY(check_ops(filter, failed, e));
    if (model) {
        double worst;
        TRY(model_gradcheck(c, (uint64_t)c->run.seed, show, failed, &worst, e));
        printf("model  %-52s worst relative error %.2e\n", c->model.pattern, worst);
    }
    return ST_OK;
}

int cmd_gradcheck(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, own_options))
        return 0;
    struct config c = {0};
    struct err e = {0};
    int failed = 0, code = cmd_exit(run(&c, argc, argv, &failed, &e), &e);
    config_release(&c);
    if (code == 0 && failed > 0)
        fprintf(stderr, "braid: error: %d gradients are wrong (allowed relative error %g)\n", failed, allowed);
    return code ? code : failed > 0;
}
