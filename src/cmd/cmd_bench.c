/* braid bench: time of every op against this machine's roofline; or whole training steps. */
#include "cmd/cmd.h"
#include "ops/opbench.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: braid bench [OP] [--seconds=0.3] [--json=FILE]      every op, or those whose name starts with OP\n"
    "       braid bench train [FILE.ini] [--section.key=value ...]   whole steps on random tokens: tokens per second\n\n"
    "The ceilings (GEMM rate, copy rate) are measured in the same run; \"roofline\" is ideal time over measured time.\n";

static int bench_ops(const char *only, double seconds, const char *json_path, struct dev *dev, struct err *e)
{
    struct roofline r;
    struct buf json;
    int n;
    const struct op_desc *const *all = op_registry(&n);
    TRY(roofline_measure(dev, &r, e));
    buf_init(&json, 0);
    printf("%s; ceilings: %.1f GFLOP/s, %.1f GB/s\n%-16s %-44s %10s %9s %9s %9s\n", dev->name, r.flops_per_s * 1e-9, r.bytes_per_s * 1e-9,
           "op", "shape", "us", "GB/s", "GFLOP/s", "roofline");
    buf_addf(&json, "{\"device\":\"%s\",\"gflops\":%.3f,\"gbytes\":%.3f,\"ops\":[", dev->name, r.flops_per_s * 1e-9, r.bytes_per_s * 1e-9);
    bool first = true;
    for (int i = 0; i < n; i++) {
        for (int s = 0; (only == NULL || str_starts(all[i]->name, only)) && s < all[i]->n_bench; s++) {
            struct op_timing t;
            TRY(op_bench(all[i], &all[i]->bench[s], dev, &r, seconds, &t, e));
            printf("%-16s %-44s %10.1f %9.2f %9.2f %8.1f%%\n", all[i]->name, all[i]->bench[s].text, t.seconds * 1e6,
                   t.cost.bytes / t.seconds * 1e-9, t.cost.flops / t.seconds * 1e-9, 100 * t.of_roofline);
            fflush(stdout);
            buf_addf(&json, "%s\n{\"op\":\"%s\",\"shape\":\"%s\",\"us\":%.3f,\"bytes\":%.0f,\"flops\":%.0f,\"roofline\":%.4f}", first ? "" : ",",
                     all[i]->name, all[i]->bench[s].text, t.seconds * 1e6, t.cost.bytes, t.cost.flops, t.of_roofline);
            first = false;
        }
    }
    buf_add(&json, "\n]}\n");
    int st = json_path ? buf_check(&json, e) : ST_OK;
    if (st == ST_OK && json_path != NULL)
        st = file_write_atomic(json_path, json.text, json.len, e);
    buf_release(&json);
    return st;
}

/* Before the ceilings are measured, which takes a while. */
static int check_name(const char *prefix, struct err *e)
{
    int n;
    const struct op_desc *const *all = op_registry(&n);
    for (int i = 0; i < n; i++)
        if (str_starts(all[i]->name, prefix) && all[i]->n_bench > 0)
            return ST_OK;
    err_set(e, ST_USAGE, "no op's name starts with '%s'", prefix);
    return err_hint(e, "`braid op list` shows all ops");
}

static int run_ops(int argc, char **argv, struct err *e)
{
    struct config c;
    struct config_extra extra[] = {{.name = "seconds"}, {.name = "json"}};
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    double seconds = 0.3;
    struct dev dev = {0};
    int st = cmd_config(&c, argc, argv, &args, e);
    if (st == ST_OK)
        st = cmd_words(&args, 1, e);
    if (st == ST_OK && args.n_positional > 0)
        st = check_name(args.positional[0], e);
    if (st == ST_OK && extra[0].value != NULL && (!parse_f64(extra[0].value, &seconds) || seconds <= 0))
        st = err_set(e, ST_USAGE, "--seconds=%s is not a positive number", extra[0].value);
    if (st == ST_OK)
        st = dev_open(&dev, DEV_CPU, (int)c.run.threads, e);
    if (st == ST_OK)
        st = bench_ops(args.n_positional ? args.positional[0] : NULL, seconds, extra[1].value, &dev, e);
    dev_close(&dev);
    config_release(&c);
    return st;
}

/* ---- whole steps ------------------------------------------------------------------------------------------------- */

/* A file of random tokens in a temporary place: the data path is part of a step. */
static int random_data(struct config *c, char *path, size_t size, struct err *e)
{
    snprintf(path, size, "/tmp/braid-bench-XXXXXX");
    int fd = mkstemp(path);
    if (fd < 0)
        return err_errno(e, "cannot create %s", path);
    uint64_t key = rng_key(1, "bench");
    uint8_t text[4096];
    int st = ST_OK;
    int64_t need = c->train.seq * (c->train.micro_batch + 1) * 4;
    for (int64_t done = 0; st == ST_OK && done < max_i64(need, 1 << 20); done += (int64_t)sizeof text) {
        for (size_t i = 0; i < sizeof text; i++)
            text[i] = (uint8_t)(1 + rng_below(key, (uint64_t)done + i, 255)); /* no NUL: it counts as text */
        st = file_write_fd(fd, text, sizeof text, path, e);
    }
    FILE *closing = fdopen(fd, "w");
    if (closing != NULL)
        fclose(closing);
    return st;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int time_steps(struct trainer *t, double opened, struct err *e)
{
    enum { MAX = 1000, WARM = 2 };
    double seconds[MAX];
    int n = (int)min_i64(t->cfg->train.steps, MAX);
    struct step_result r = {0};
    for (int i = 0; i < n + WARM; i++) {
        TRY(trainer_step(t, &r, e));
        if (i == 0)
            printf("start_to_first_step_s: %.3f\n", time_now() - opened);
        if (i >= WARM)
            seconds[i - WARM] = r.seconds;
    }
    qsort(seconds, (size_t)n, sizeof seconds[0], ascending);
    double flops = 3 * model_flops_per_token(t->cfg, &t->model.pattern, t->cfg->train.seq) * (double)r.tokens;
    double median = seconds[n / 2];
    printf("parameters: %lld\nsteps: %d\nms_per_step: %.2f (best %.2f)\ntokens_per_second: %.1f\ngflops: %.1f\npercent_of_gemm_peak: %.1f\n",
           (long long)param_table_elems(&t->model.params), n, median * 1e3, seconds[0] * 1e3, (double)r.tokens / median,
           flops / median * 1e-9, t->peak_flops > 0 ? 100 * flops / median / t->peak_flops : 0.0);
    return t->trace ? trace_write(t->trace, t->cfg->plan.trace, e) : ST_OK;
}

static int run_train(int argc, char **argv, struct err *e)
{
    struct config c;
    struct config_args args = {0};
    struct trainer t = {0};
    char path[64] = "";
    double opened = time_now();
    int st;
    TRY_OUT(cmd_config(&c, argc, argv, &args, e));
    TRY_OUT(cmd_words(&args, 0, e));
    TRY_OUT(cmd_finish(&c, e));
    if (c.data.train[0] == '\0') {
        TRY_OUT(random_data(&c, path, sizeof path, e));
        TRY_OUT(config_set(&c, "data.train", path, NULL, e));
    }
    TRY_OUT(trainer_open(&t, &c, NULL, true, e));
    st = time_steps(&t, opened, e);
out:
    trainer_close(&t);
    config_release(&c);
    if (path[0])
        remove(path);
    return st;
}

int cmd_bench(int argc, char **argv)
{
    struct err e = {0};
    bool train = argc > 1 && strcmp(argv[1], "train") == 0;
    if (cmd_wants_help(argc, argv, usage, train))
        return 0;
    return cmd_exit(train ? run_train(argc - 1, argv + 1, &e) : run_ops(argc, argv, &e), &e);
}
