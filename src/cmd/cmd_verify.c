/* braid verify: a small model of the configured kind, run on every mesh and schedule the config allows, compared with
 * one plain rank. */
#include "cmd/cmd.h"
#include "train/verify.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: braid verify [FILE.ini] [--section.key=value ...] [--only=TEXT] [--all=on]\n\n"
    "Shrinks the configured model (same kinds of layers, joints, routers and losses, small numbers) and trains it for "
    "two steps by\n"
    "one plain rank and by thread ranks: data, pipeline and expert parallel, every schedule, recompute, delayed weight "
    "gradients. In\n"
    "double precision, so that another order of sums differs by 1e-15 and a mistake does not. Prints a table; exits 1 "
    "if a variant\n"
    "differs by more than 1e-9: in losses, the gradient norm, gradients, parameters or the checkpoint. --only takes "
    "variants whose name contains TEXT.\n"
    "Beside the variants with names of their own, so many combinations are taken that every pair of options is among "
    "them; with --all=on all.\n";
static const char own_options[] = "model.pattern model.layers model.mhc_streams model.experts";

static void show_row(const struct verify_row *r)
{
    double most;
    printf("%-58s %2d  ", r->variant->name, r->variant->ranks);
    switch (r->outcome) {
    case VERIFY_SAME_BITS: printf("bit-equal%42s", ""); break;
    case VERIFY_CLOSE:
        most = fmax(fmax(r->grad, r->param), r->saved);
        printf("equal but for the %s: %-7.1e %10s", most > VERIFY_ALLOWED ? "rounding of FP8" : "order of sums", most,
               "");
        break;
    case VERIFY_DIFFERS:
        printf("DIFFERS: loss %.1e, norm %.1e, gradient %.1e, parameter %.1e, checkpoint %.1e\n%64slargest in %s ",
               r->loss, r->norm, r->grad, r->param, r->saved, "", r->where);
        break;
    case VERIFY_REFUSED: printf("refused: %s ", r->why.msg); break;
    }
    printf(" %5.1f s\n", r->seconds);
    fflush(stdout);
}

struct counts {
    int run, failed;
};

static int run_variants(struct verify *v, const struct config *small, const struct verify_case *variants, int n,
                        const char *only, struct counts *k, struct err *e)
{
    for (int i = 0; i < n; i++) {
        struct verify_row row;
        if (!verify_applies(small, &variants[i]) || (only != NULL && strstr(variants[i].name, only) == NULL))
            continue;
        TRY(verify_run(v, &variants[i], NULL, &row, e));
        show_row(&row);
        k->failed += row.outcome == VERIFY_DIFFERS;
        k->run++;
    }
    return ST_OK;
}

static int run_all(const struct config *small, const char *only, bool all, int *failed, struct err *e)
{
    int n;
    const struct verify_case *named = verify_cases(&n);
    struct counts k = {0};
    struct verify *v = NULL;
    struct verify_list more = {0};
    int st = verify_combinations(&more, small, all, e);
    if (st == ST_OK)
        st = verify_open(&v, small, e);
    if (st == ST_OK)
        printf("%-58s ranks  against one plain rank\n", "variant");
    if (st == ST_OK)
        st = run_variants(v, small, named, n, only, &k, e);
    if (st == ST_OK)
        st = run_variants(v, small, more.list, more.n, only, &k, e);
    verify_close(v);
    verify_list_release(&more);
    *failed = k.failed;
    if (st == ST_OK && k.run == 0)
        st = err_set(e, ST_USAGE, "--only=%s: no variant has that in its name", only != NULL ? only : "");
    return st;
}

static int run(struct config *c, struct config *small, const char *dir, int argc, char **argv, int *failed,
               struct err *e)
{
    struct config_extra extra[] = {{.name = "only"}, {.name = "all"}};
    bool all = false;
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    TRY(cmd_config(c, argc, argv, &args, e));
    TRY(cmd_words(&args, 0, e));
    if (extra[1].value != NULL && !parse_bool(extra[1].value, &all))
        return err_set(e, ST_USAGE, "--all takes on or off");
    TRY(cmd_finish(c, e));
    cmd_say_unused(c);
    TRY(verify_config(small, c, dir, e));
    printf("model: %s, pattern %s, as small as %s\n", args.ini != NULL ? args.ini : "defaults", c->model.pattern,
           small->model.pattern);
    if (c->model.global_aux_loss > 0 && (c->model.aux_loss > 0 || c->model.router_capacity > 0))
        printf("left out: model.aux_loss and model.router_capacity, which are about one microbatch; "
               "model.global_aux_loss is about a step. "
               "Verify them with --model.global_aux_loss=0.\n");
    if (c->model.global_aux_loss > 0)
        printf("model.global_aux_loss balances what is known of a step: D data-parallel ranks are compared with one "
               "whose microbatches are D "
               "times as large\n");
    return run_all(small, extra[0].value, all, failed, e);
}

int cmd_verify(int argc, char **argv)
{
    struct config c = {0}, small = {0}; /* run() fills c */
    struct err e = {0};
    char dir[] = "/tmp/braid-verify-XXXXXX";
    int failed = 0, st;
    if (cmd_wants_help(argc, argv, usage, own_options))
        return 0;
    if (mkdtemp(dir) == NULL) {
        err_set(&e, ST_IO, "cannot make a folder like %s", dir);
        return cmd_exit(ST_IO, &e);
    }
    st = config_init(&small, &e);
    if (st == ST_OK)
        st = run(&c, &small, dir, argc, argv, &failed, &e);
    config_release(&c);
    config_release(&small);
    struct err ignored = {0};
    file_remove_tree(dir, &ignored);
    if (st == ST_OK && failed > 0) {
        printf("%d variants differ\n", failed);
        return 1;
    }
    return cmd_exit(st, &e);
}
