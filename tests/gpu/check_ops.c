/* Every op of the CUDA tables against the double reference, on every sample of its descriptor, in bf16 and in fp32: run
 * on a machine with a GPU (make check-gpu). Without one it says so and fails. Prints a line per failure, a line per op,
 * and "N passed, N failed" last.
 *
 *   check_ops [PREFIX]   only ops whose name starts so */
#include "ops/opcheck.h"

#include <string.h>

struct tally {
    int passed, failed;
};

static void check_op(const struct op_desc *d, struct dev *dev, struct tally *total)
{
    double worst = 0;
    int bad = 0;
    for (int s = 0; s < d->n_samples; s++) {
        struct op_check_result r;
        struct err e = {0};
        int st = op_compare_gpu(d, &d->samples[s], dev, 1 + (uint64_t)s, &r, &e);
        if (st != ST_OK) {
            printf("not ok %s [%s] %s: %s\n", d->name, dtype_name(dev->real), d->samples[s].text, e.msg);
            bad++;
        } else if (r.worst > 1) {
            printf("not ok %s [%s] %s: error is %.3g of what is allowed, at %s\n", d->name, dtype_name(dev->real), d->samples[s].text, r.worst, r.where);
            bad++;
        }
        if (st == ST_OK && r.worst > worst)
            worst = r.worst;
        fflush(stdout);
    }
    printf("%-22s %-5s %3d of %3d samples, worst error %.3f of the allowed\n", d->name, dtype_name(dev->real), d->n_samples - bad, d->n_samples, worst);
    total->passed += d->n_samples - bad;
    total->failed += bad;
}

int main(int argc, char **argv)
{
    int n;
    struct tally total = {0};
    const struct op_desc *const *all = op_registry(&n);
    for (int fp32 = 0; fp32 < 2; fp32++) {
        struct dev dev;
        struct err e = {0};
        if (dev_open_gpu(&dev, &(struct dev_gpu){.fp32 = fp32 == 1}, 1, &e) != ST_OK) {
            printf("not ok no GPU: %s\n0 passed, 1 failed\n", e.msg);
            return 1;
        }
        printf("%s\n", dev.name);
        for (int i = 0; i < n; i++) {
            if (argc > 1 && strncmp(all[i]->name, argv[1], strlen(argv[1])) != 0)
                continue;
            if (ops_has(ops_for(&dev), all[i]->name))
                check_op(all[i], &dev, &total);
            else
                printf("%-22s %-5s missing\n", all[i]->name, dtype_name(dev.real));
        }
        dev_close(&dev);
    }
    printf("%d passed, %d failed\n", total.passed, total.failed);
    return total.failed != 0;
}
