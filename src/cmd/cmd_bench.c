/* braid bench: time of every op against this machine's roofline; or whole training steps; or text that is
 * generated (bench_generate.c). */
#include "cmd/cmd.h"
#include "log/baseline.h"
#include "ops/opbench.h"
#include "ops/opcheck.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: braid bench [OP[,OP...]] [--seconds=0.3] [--json=FILE] [--record=FILE] [--against=FILE]\n"
    "                                                                   every op, or those whose name starts with OP\n"
    "       braid bench train [FILE.ini] [--steps=20] [--profile=on] [--bits=on] [--exposed=on] [--json=FILE] "
    "[--section.key=value ...]\n"
    "                                                                   whole steps on random tokens, after 2 that are "
    "not counted\n"
    "       braid bench generate [FILE.ini] [--prompt=512] [--json=FILE] [--section.key=value ...]\n"
    "                                                                   generate.tokens tokens after a prompt, "
    "generate.batch sequences side by side\n\n"
    "The ceilings (peak FMA rate, copy rate) are measured in the same run; \"roofline\" is ideal time over measured "
    "time.\n"
    "--record=FILE adds the times to a baseline (bench/ has those of known GPUs); --against=FILE prints what changed "
    "since: rows\n"
    "that differ by more than --changed=5 percent, and other bits of training.\n"
    "run.device chooses where. --profile=on adds a table of time by node, from a step in which each waits for the "
    "last.\n"
    "bits is a fingerprint of every loss and norm, by which schedules are compared; --bits=on adds all parameters. "
    "Ranks as with braid train.\n"
    "--exposed=on, with parallel.comm=loop: steps over the link and over one without limits in turn, and with a wait\n"
    "after every node; prints what exchanges take (whole), what a step takes longer for them (exposed), and how\n"
    "much is hidden.\n";
static const char own_options[] =
    "run.device run.threads gpu.* train.seq train.micro_batch train.global_batch generate.batch generate.tokens";

/* Whether the name starts with one of a comma list. */
static bool listed(const char *name, const char *prefixes)
{
    for (const char *at = prefixes; *at != '\0';) {
        size_t n = strcspn(at, ",");
        if (n > 0 && strncmp(name, at, n) == 0)
            return true;
        at += n + (at[n] == ',');
    }
    return false;
}

/* ---- baselines ------------------------------------------------------------------------------- */

struct bench_files {
    const char *json, *record, *against; /* each may be NULL */
    double percent;
    struct baseline old, now;
};

/* Errors in the files are reported before anything is measured. */
static int files_open(struct bench_files *f, const char *changed, struct err *e)
{
    struct baseline there;
    bool exists = false;
    baseline_init(&f->old);
    baseline_init(&f->now);
    baseline_init(&there);
    f->percent = 5;
    if (changed != NULL && (!parse_f64(changed, &f->percent) || f->percent < 0))
        return err_set(e, ST_USAGE, "--changed=%s is not a percentage from 0 on", changed);
    if (f->against != NULL)
        TRY(baseline_read(&f->old, f->against, e));
    if (f->record != NULL)
        TRY(file_lookup(f->record, &exists, e));
    int st = exists ? baseline_read(&there, f->record, e) : ST_OK;
    baseline_release(&there);
    return st;
}

static void files_release(struct bench_files *f)
{
    baseline_release(&f->old);
    baseline_release(&f->now);
}

static int files_finish(struct bench_files *f, bool all, struct err *e)
{
    struct buf out;
    buf_init(&out, 0);
    if (f->against != NULL)
        baseline_compare(&f->old, &f->now, f->percent, all, &out);
    int st = buf_check(&out, e);
    if (st == ST_OK && f->against != NULL)
        printf("against %s:\n%s", f->against, out.text);
    buf_release(&out);
    if (st == ST_OK && f->record != NULL)
        st = baseline_record(&f->now, f->record, e);
    return st;
}

/* ---- ops ------------------------------------------------------------------------------------- */

static int bench_ops(const char *only, double seconds, struct bench_files *files, struct dev *dev, struct err *e)
{
    const char *json_path = files->json;
    struct roofline r;
    struct buf json;
    int n;
    const struct op_desc *const *all = op_registry(&n);
    TRY(roofline_measure(dev, &r, e));
    TRY(baseline_device(&files->now, dev->name, e));
    buf_init(&json, 0);
    printf("%s; ceilings: %.1f GFLOP/s, %.1f GB/s\n%-16s %-44s %10s %9s %9s %9s\n", dev->name, r.flops_per_s * 1e-9,
           r.bytes_per_s * 1e-9, "op", "shape", "us", "GB/s", "GFLOP/s", "roofline");
    buf_addf(&json, "{\"device\":\"%s\",\"gflops\":%.3f,\"gbytes\":%.3f,\"ops\":[", dev->name, r.flops_per_s * 1e-9,
             r.bytes_per_s * 1e-9);
    bool first = true;
    for (int i = 0; i < n; i++) {
        bool wanted = (only == NULL || listed(all[i]->name, only)) && ops_has(ops_for(dev), all[i]->name);
        for (int s = 0; wanted && s < all[i]->n_bench; s++) {
            struct op_timing t;
            if (dev->kind != DEV_CUDA && op_sample_flag(&all[i]->bench[s], "gpu"))
                continue;
            TRY(op_bench(all[i], &all[i]->bench[s], dev, &r, seconds, &t, e));
            TRY(baseline_put(
                &files->now,
                &(struct baseline_row){.what = all[i]->name, .shape = all[i]->bench[s].text, .us = t.seconds * 1e6},
                e));
            printf("%-16s %-44s %10.1f %9.2f %9.2f %8.1f%%\n", all[i]->name, all[i]->bench[s].text, t.seconds * 1e6,
                   t.cost.bytes / t.seconds * 1e-9, t.cost.flops / t.seconds * 1e-9, 100 * t.of_roofline);
            fflush(stdout);
            buf_addf(&json,
                     "%s\n{\"op\":\"%s\",\"shape\":\"%s\",\"us\":%.3f,\"bytes\":%.0f,\"flops\":%.0f,\"roofline\":%.4f}",
                     first ? "" : ",", all[i]->name, all[i]->bench[s].text, t.seconds * 1e6, t.cost.bytes, t.cost.flops,
                     t.of_roofline);
            first = false;
        }
    }
    buf_add(&json, "\n]}\n");
    int st = json_path ? buf_check(&json, e) : ST_OK;
    if (st == ST_OK && json_path != NULL)
        st = file_write_atomic(json_path, json.text, json.len, e);
    buf_release(&json);
    return st == ST_OK ? files_finish(files, only == NULL, e) : st;
}

/* Before the ceilings are measured, which takes a while. */
static int check_name(const char *prefixes, struct err *e)
{
    int n;
    const struct op_desc *const *all = op_registry(&n);
    for (int i = 0; i < n; i++)
        if (listed(all[i]->name, prefixes) && all[i]->n_bench > 0)
            return ST_OK;
    err_set(e, ST_USAGE, "no op's name starts with '%s'", prefixes);
    return err_hint(e, "`braid op list` shows all ops");
}

static int run_ops(int argc, char **argv, struct err *e)
{
    struct config c;
    struct config_extra extra[] = {
        {.name = "seconds"}, {.name = "json"}, {.name = "record"}, {.name = "against"}, {.name = "changed"}};
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
    struct bench_files files = {.json = extra[1].value, .record = extra[2].value, .against = extra[3].value};
    if (st == ST_OK)
        st = files_open(&files, extra[4].value, e);
    if (st == ST_OK)
        st = device_open(&dev, &c, e);
    if (st == ST_OK)
        st = bench_ops(args.n_positional ? args.positional[0] : NULL, seconds, &files, &dev, e);
    files_release(&files);
    dev_close(&dev);
    config_release(&c);
    return st;
}

/* ---- whole steps ----------------------------------------------------------------------------- */

int cmd_random_data(struct config *c, char *path, size_t size, struct err *e)
{
    snprintf(path, size, "/tmp/braid-bench-XXXXXX");
    int fd = mkstemp(path);
    if (fd < 0)
        return err_errno(e, "cannot create %s", path);
    /* Few tokens: bytes of text. Many: a shard of 16-bit tokens, so that all of the vocabulary is in use. */
    uint64_t key = rng_key(1, "bench");
    uint16_t block[2048];
    int64_t n = max_i64(c->train.seq * (c->train.global_batch + 1) * 8, 1 << 19) / countof(block) * countof(block);
    bool shard = c->model.vocab > 257;
    int32_t header[256] = {20240520, 1, (int32_t)n};
    int st = shard ? file_write_fd(fd, header, sizeof header, path, e) : ST_OK;
    for (int64_t done = 0; st == ST_OK && done < n; done += countof(block)) {
        for (int i = 0; i < countof(block); i++) {
            uint64_t limit = (uint64_t)min_i64(c->model.vocab, 65536);
            uint16_t two = (uint16_t)rng_below(key, (uint64_t)(done + i), 255 * 256);
            /* no NUL */
            block[i] =
                shard ? (uint16_t)rng_below(key, (uint64_t)(done + i), limit) : (uint16_t)((two | 0x0101) & 0x7F7F);
        }
        st = file_write_fd(fd, block, sizeof block, path, e);
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

double bench_median(double *seconds, int64_t n)
{
    qsort(seconds, (size_t)n, sizeof *seconds, ascending);
    return seconds[n / 2];
}

enum { MAX_STEPS = 1000 };

/* Steps on each rank; rank 0 reports. */
struct steps_job {
    struct config c;
    struct cmd_ranks ranks;
    bool profile, bits, exposed;
    int steps; /* to be timed */
    struct bench_files files;
    struct buf words; /* of the command, without those that change nothing of a step */
    double opened;
    char data[64]; /* made here, to be removed; "" if none */
};

static int write_json(const struct trainer *t, const char *path, double median, double best, int n, int64_t tokens,
                      int64_t bytes, double flops, double peak, struct err *e)
{
    struct buf out;
    buf_init(&out, 0);
    buf_addf(&out,
             "{\"device\":\"%s\",\"pattern\":\"%s\",\"parameters\":%lld,\"memory_bytes\":%lld,\"steps\":%d,\"ms_per_"
             "step\":%.4f,\"best_ms\":%.4f,"
             "\"tokens_per_second\":%.2f,\"flops_per_step\":%.6g,\"peak_flops\":%.6g,\"mfu\":%.5f,\"ranks\":%d}\n",
             t->dev.name, t->cfg->model.pattern, (long long)param_table_elems(&t->model.params), (long long)bytes, n,
             median * 1e3, best * 1e3, (double)tokens / median, flops, peak, peak > 0 ? flops / median / peak : 0.0,
             t->model.mesh.world);
    int st = buf_check(&out, e);
    if (st == ST_OK)
        st = file_write_atomic(path, out.text, out.len, e);
    buf_release(&out);
    return st;
}

static int print_steps(struct trainer *t, const char *json_path, double median, double best, int n, int64_t tokens,
                       struct err *e)
{
    double flops = 3 * model_flops_per_token(t->cfg, &t->model.pattern, t->cfg->train.seq) * (double)tokens,
           ranks = t->model.mesh.world;
    double peak = t->peak_flops * ranks;
    if (t->dev.kind == DEV_CUDA) {
        struct roofline r = {0};
        TRY(roofline_measure(&t->dev, &r, e));
        peak = r.flops_per_s * ranks;
        printf("ceilings: %.1f TFLOP/s (product of 8192^3), %.3f TB/s (copy)\n", r.flops_per_s * 1e-12,
               r.bytes_per_s * 1e-12);
    }
    int64_t bytes = memory_total(&t->model.mem, t->model.mem.allocated, false),
            host = memory_total(&t->model.mem, t->model.mem.allocated, true);
    if (json_path != NULL)
        TRY(write_json(t, json_path, median, best, n, tokens, bytes, flops, peak, e));
    if (host > 0)
        printf("host_memory_gib: %.2f\n", (double)host / (1 << 30));
    printf("device: %s\nparameters: %lld\nmemory_gib: %.2f\nsteps: %d\nms_per_step: %.2f (best "
           "%.2f)\ntokens_per_second: %.1f\n"
           "gflops: %.1f\npercent_of_peak: %.1f\npeak_gflops: %.1f (%s)\nflop_count: 3 x forward, causal half of "
           "attention, nothing for recomputation\n",
           t->dev.name, (long long)param_table_elems(&t->model.params), (double)bytes / (1 << 30), n, median * 1e3,
           best * 1e3, (double)tokens / median, flops / median * 1e-9, peak > 0 ? 100 * flops / median / peak : 0.0,
           peak * 1e-9,
           t->dev.kind == DEV_CUDA ? "measured: product of 8192^3" : "measured: fused multiply-adds on all threads");
    return ST_OK;
}

/* All parameters of this rank, added to the fingerprint. */
static int add_param_bits(struct trainer *t, uint64_t *bits, struct err *e)
{
    for (int k = 0; k < t->model.params.n; k++) {
        struct tensor host, p = model_param(&t->model, k);
        TRY(dev_fetch(&t->dev, &p, &host, e));
        *bits = hash64(host.data, (size_t)tensor_bytes(&host), *bits);
        dev_fetched(&t->dev, &host);
    }
    return ST_OK;
}

/* Drawn over itself on a terminal; elsewhere nothing, as the results are what is read. */
static void show_step(int i, int n, double seconds)
{
    if (isatty(STDERR_FILENO) && i < n)
        fprintf(stderr, "\rstep %d of %d, %.1f ms \033[K", i + 1, n, seconds * 1e3);
    else if (isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

/* A row of a baseline: the words of the command name it. */
static int keep_steps(struct steps_job *j, const struct trainer *t, double median, uint64_t bits, struct err *e)
{
    char fingerprint[17];
    snprintf(fingerprint, sizeof fingerprint, "%016llx", (unsigned long long)bits);
    buf_addf(&j->words, "%d steps", j->steps);
    TRY(buf_check(&j->words, e));
    TRY(baseline_device(&j->files.now, t->dev.name, e));
    TRY(baseline_put(
        &j->files.now,
        &(struct baseline_row){.what = "train", .shape = j->words.text, .us = median * 1e6, .bits = fingerprint}, e));
    return files_finish(&j->files, false, e);
}

static int time_steps(struct trainer *t, struct steps_job *j, struct err *e)
{
    enum { WARM = 2 };
    double seconds[MAX_STEPS];
    int n = j->steps;
    bool is_rank0 = trainer_is_rank0(t);
    uint64_t bits = 0;
    struct step_result r = {0};
    for (int i = 0; i < n + WARM; i++) {
        TRY(trainer_step(t, &r, e));
        const double said[2] = {r.loss, r.grad_norm};
        bits = hash64(said, sizeof said, bits);
        if (i == 0 && is_rank0)
            printf("start_to_first_step_s: %.3f (plan %.2f, memory %.2f, parameters %.2f, first step %.2f)\n",
                   time_now() - j->opened, t->start.plan, t->start.memory, t->start.params, r.seconds);
        if (i >= WARM)
            seconds[i - WARM] = r.seconds;
        if (is_rank0)
            show_step(i, n + WARM, r.seconds);
    }
    if (is_rank0)
        show_step(n + WARM, n + WARM, 0);
    TRY(trainer_settle(t, e));
    if (j->bits)
        TRY(add_param_bits(t, &bits, e));
    double median = bench_median(seconds, n);
    if (!is_rank0)
        return bench_offload(t, median, e);
    TRY(bench_offload(t, median, e));
    TRY(print_steps(t, j->files.json, median, seconds[0], n, r.tokens, e));
    printf("loss: %.17g\nbits: %016llx (losses and norms of all steps%s)\n", r.loss, (unsigned long long)bits,
           j->bits ? ", parameters" : "");
    TRY(keep_steps(j, t, median, bits, e));
    return t->trace ? trace_write(t->trace, t->cfg->plan.trace, e) : ST_OK;
}

/* One more step, each node alone on the device. */
static int profile(struct trainer *t, struct err *e)
{
    struct trace *trace = NULL;
    struct step_result r;
    struct buf out;
    buf_init(&out, 0);
    int st;
    TRY_OUT(trace_open(
        &trace, (int)min_i64(t->n_micro * t->train.p.n_steps + t->optim.p.n_steps + t->optim.apply.n_steps, 1000000),
        e));
    t->exec.trace = trace;
    st = trainer_step(t, &r, e);
    t->exec.trace = t->trace;
    if (st == ST_OK)
        st = trace_table(trace, &out, e);
    if (st == ST_OK && trainer_is_rank0(t))
        fputs(out.text, stdout);
out:
    trace_close(trace);
    buf_release(&out);
    return st;
}

/* Processes of a launcher compare their configs before they come here: each has random data of its own, with the same
 * values. */
static int bench_rank(const struct rank_place *place, void *ctx, struct err *e)
{
    struct steps_job *j = ctx;
    struct trainer t = {0};
    int st = ST_OK;
    if (j->c.data.train[0] == '\0') {
        st = cmd_random_data(&j->c, j->data, sizeof j->data, e);
        if (st == ST_OK)
            st = config_set(&j->c, "data.train", j->data, NULL, e);
    }
    if (place->mesh.all != NULL)
        st = comm_agree(place->mesh.all, "data", st, e);
    if (st == ST_OK)
        st = trainer_open_on(&t, &j->c, place, NULL, true, e);
    if (st == ST_OK)
        st = j->exposed ? bench_link(&t, j->steps, e) : time_steps(&t, j, e);
    if (st == ST_OK && j->profile)
        st = profile(&t, e);
    trainer_close(&t);
    return st;
}

/* A length of training, which a config file has, is none of a benchmark; one on the command line is meant for it. */
static int choose_steps(struct steps_job *j, const char *given, struct err *e)
{
    int64_t n = config_source_of(&j->c, "train.steps").source == CFG_FROM_COMMAND ? j->c.train.steps : 20;
    if (given != NULL && (!parse_i64(given, &n) || n < 1))
        return err_set(e, ST_USAGE, "--steps=%s is not a number of steps from 1 on", given);
    j->steps = (int)min_i64(n, MAX_STEPS);
    return ST_OK;
}

/* Files, and options that change nothing of a step, are no part of a row's name. */
static void name_command(struct buf *out, int argc, char **argv)
{
    static const char *const left_out[] = {"--json", "--record", "--against", "--changed", "--profile", "--steps"};
    for (int i = 1; i < argc; i++) {
        size_t n = strcspn(argv[i], "=");
        int k = 0;
        while (k < countof(left_out) && (strlen(left_out[k]) != n || strncmp(argv[i], left_out[k], n) != 0))
            k++;
        if (k == countof(left_out))
            buf_addf(out, "%s ", argv[i]);
        else if (argv[i][n] == '\0')
            i++; /* its value is a word of its own */
    }
}

static int fit(struct steps_job *j, struct err *e)
{
    struct buf text;
    buf_init(&text, 0);
    int st = cmd_fit(&j->c, j->ranks.launch.size, &text, e);
    if (st == ST_OK && text.text != NULL && cmd_is_rank0(&j->ranks))
        fputs(text.text, stderr);
    buf_release(&text);
    return st;
}

static int prepare_train(struct steps_job *j, int argc, char **argv, struct err *e)
{
    struct config_extra extra[] = {{.name = "profile"}, {.name = "bits"},    {.name = "json"},    {.name = "steps"},
                                   {.name = "record"},  {.name = "against"}, {.name = "changed"}, {.name = "exposed"}};
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    TRY(cmd_config(&j->c, argc, argv, &args, e));
    TRY(cmd_words(&args, 0, e));
    if ((extra[0].value && !parse_bool(extra[0].value, &j->profile)) ||
        (extra[1].value && !parse_bool(extra[1].value, &j->bits)) ||
        (extra[7].value && !parse_bool(extra[7].value, &j->exposed)))
        return err_set(e, ST_USAGE, "--profile, --bits and --exposed take on or off");
    if (j->exposed &&
        (j->c.parallel.comm != CFG_COMM_LOOP || j->bits || extra[2].value || extra[4].value || extra[5].value))
        return err_set(e, ST_USAGE,
                       "--exposed=on is for parallel.comm=loop, without --bits, --json, --record and --against");
    j->files.json = extra[2].value;
    j->files.record = extra[4].value;
    j->files.against = extra[5].value;
    TRY(files_open(&j->files, extra[6].value, e));
    name_command(&j->words, argc, argv);
    TRY(choose_steps(j, extra[3].value, e));
    TRY(cmd_count_ranks(&j->c, &j->ranks, e));
    TRY(cmd_finish(&j->c, e));
    TRY(cmd_refuse_weights(&j->c, "braid bench", e));
    TRY(fit(j, e));
    cmd_say_unused(&j->c);
    if (j->ranks.kind != COMM_THREADS || j->c.data.train[0] != '\0')
        return ST_OK;
    TRY(cmd_random_data(&j->c, j->data, sizeof j->data, e)); /* threads share it */
    return config_set(&j->c, "data.train", j->data, NULL, e);
}

static int run_train(int argc, char **argv, struct err *e)
{
    struct steps_job j = {.opened = time_now()};
    buf_init(&j.words, 0);
    int st = prepare_train(&j, argc, argv, e);
    if (st != ST_OK)
        st = cmd_tell_ranks(&j.c, st, e);
    else
        st = cmd_run_ranks(&j.c, &j.ranks, bench_rank, &j, e);
    config_release(&j.c);
    files_release(&j.files);
    buf_release(&j.words);
    if (j.data[0] != '\0')
        remove(j.data);
    return st;
}

int cmd_bench(int argc, char **argv)
{
    struct err e = {0};
    const char *what = argc > 1 ? argv[1] : "";
    if (cmd_wants_help(argc, argv, usage, own_options))
        return 0;
    int st = strcmp(what, "train") == 0      ? run_train(argc - 1, argv + 1, &e)
             : strcmp(what, "generate") == 0 ? bench_generate(argc - 1, argv + 1, &e)
                                             : run_ops(argc, argv, &e);
    return cmd_exit(st, &e);
}
