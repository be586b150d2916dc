/* Every op of the CUDA tables against the double reference, on every sample of its descriptor, in bf16 and in fp32: run
 * on a machine with a GPU (make check-gpu). Without one it says so and fails. Prints a line per failure, a line per op,
 * and "N passed, N failed" last.
 *
 *   check_ops [--portable] [--large] [--sms=N] [--repeat=N] [--samples=N] [--only=TEXT] [--most=N]
 *   [--op=NAME] [PREFIX]
 *   check_ops --list   the ops' names
 *     --portable   the kernels for compute capability 8.0
 *     --large      products of experts in the largest tiles, however few there are
 *     --repeat=N   instead: the same call N times beside other work, bits compared
 *     --sms=N      use so many multiprocessors: blocks walk over more tiles
 *     --samples=N  only the first N samples of each op
 *     --only=TEXT  only samples whose text holds this
 *     --most=N     only samples of at most N million operations and N MB: for the emulator (tests/emu); those left out
 *                  are counted
 *     --op=NAME    only this op
 *     PREFIX       only ops whose name starts so */
#include "ops/opcheck.h"

#include <stdlib.h>
#include <string.h>

struct options {
    bool portable, large;
    int repeat, samples, sms;
    double most; /* 0: no limit */
    const char *only;
    const char *op; /* NULL: all */
    const char *prefix;
};
struct tally {
    int passed, failed;
};

static bool check_sample(const struct op_desc *d, const struct op_sample *s, int number, struct dev *dev,
                         const struct options *o, double *worst)
{
    struct op_check_result r = {0};
    struct err e = {0};
    int st = o->repeat > 0 ? op_repeat_gpu(d, s, dev, o->repeat, &e)
                           : op_compare_gpu(d, s, dev, 1 + (uint64_t)number, &r, &e);
    if (st != ST_OK)
        printf("not ok %s [%s] %s: %s\n", d->name, dtype_name(dev->real), s->text, e.msg);
    else if (r.worst > 1)
        printf("not ok %s [%s] %s: error is %.3g of what is allowed, at %s\n", d->name, dtype_name(dev->real), s->text,
               r.worst, r.where);
    *worst = r.worst > *worst ? r.worst : *worst;
    fflush(stdout);
    return st == ST_OK && r.worst <= 1;
}

/* Too much work for whoever runs this. An op that cannot be asked for its cost is not: its own check will say why. */
static bool too_large(const struct op_desc *d, const struct op_sample *s, const struct options *o,
                      const struct dev *dev)
{
    struct op_call c;
    struct op_cost cost = {0};
    struct err e = {0};
    if (o->most <= 0 || d->cost == NULL || op_call_sample(&c, d, s, ops_for(dev), &e) != ST_OK)
        return false;
    d->cost(&c, &cost);
    return cost.flops > o->most * 1e6 || cost.bytes > o->most * 1e6;
}

static void check_op(const struct op_desc *d, struct dev *dev, const struct options *o, struct tally *total)
{
    double worst = 0;
    int bad = 0, n = 0, large = 0, most = o->samples > 0 && o->samples < d->n_samples ? o->samples : d->n_samples;
    for (int s = 0; s < most; s++) {
        if (o->only != NULL && strstr(d->samples[s].text, o->only) == NULL)
            continue;
        if (too_large(d, &d->samples[s], o, dev)) {
            large++;
            continue;
        }
        n++;
        bad += !check_sample(d, &d->samples[s], s, dev, o, &worst);
    }
    if (o->repeat > 0)
        printf("%-22s %-5s %3d of %3d samples the same %d times\n", d->name, dtype_name(dev->real), n - bad, n,
               o->repeat);
    else
        printf("%-22s %-5s %3d of %3d samples, worst error %.3f of the allowed\n", d->name, dtype_name(dev->real),
               n - bad, n, worst);
    if (large > 0)
        printf("%-22s %-5s %3d samples left out: more than %g million operations or MB\n", d->name,
               dtype_name(dev->real), large, o->most);
    total->passed += n - bad;
    total->failed += bad;
}

static int check_table(const struct options *o, bool fp32, struct tally *total)
{
    int n;
    struct dev dev;
    struct err e = {0};
    const struct op_desc *const *all = op_registry(&n);
    if (dev_open_gpu(&dev,
                     &(struct dev_gpu){.fp32 = fp32, .portable = o->portable, .large_tiles = o->large, .sms = o->sms},
                     1, &e) != ST_OK) {
        printf("not ok no GPU: %s\n", e.msg);
        total->failed++;
        return 1;
    }
    printf("%s\n", dev.name);
    for (int i = 0; i < n; i++) {
        if (strncmp(all[i]->name, o->prefix, strlen(o->prefix)) != 0 ||
            (o->op != NULL && strcmp(all[i]->name, o->op) != 0))
            continue;
        if (ops_has(ops_for(&dev), all[i]->name)) {
            check_op(all[i], &dev, o, total);
        } else {
            printf("not ok %s [%s]: missing\n", all[i]->name, dtype_name(dev.real));
            total->failed++;
        }
    }
    dev_close(&dev);
    return 0;
}

static int list_ops(void)
{
    int n;
    const struct op_desc *const *all = op_registry(&n);
    for (int i = 0; i < n; i++)
        printf("%s\n", all[i]->name);
    return 0;
}

int main(int argc, char **argv)
{
    struct options o = {.prefix = ""};
    struct tally total = {0};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--portable") == 0)
            o.portable = true;
        else if (strcmp(argv[i], "--large") == 0)
            o.large = true;
        else if (strncmp(argv[i], "--repeat=", 9) == 0)
            o.repeat = atoi(argv[i] + 9);
        else if (strncmp(argv[i], "--samples=", 10) == 0)
            o.samples = atoi(argv[i] + 10);
        else if (strncmp(argv[i], "--sms=", 6) == 0)
            o.sms = atoi(argv[i] + 6);
        else if (strncmp(argv[i], "--only=", 7) == 0)
            o.only = argv[i] + 7;
        else if (strncmp(argv[i], "--most=", 7) == 0)
            o.most = atof(argv[i] + 7);
        else if (strncmp(argv[i], "--op=", 5) == 0)
            o.op = argv[i] + 5;
        else if (strcmp(argv[i], "--list") == 0)
            return list_ops();
        else
            o.prefix = argv[i];
    }
    for (int fp32 = 0; fp32 < 2; fp32++)
        if (check_table(&o, fp32 == 1, &total) != 0)
            break;
    printf("%d passed, %d failed\n", total.passed, total.failed);
    return total.failed != 0;
}
