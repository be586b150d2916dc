/* Products with a file of choices (gpu.gemm_table) on a GPU: timing leaves the result as it should be, a second run
 * with the file repeats the first bit for bit and times nothing, files of other machines and broken ones are refused.
 * Prints "N passed, N failed" last. */
#include "dev/cuda.h"
#include "ops/check.h"
#include "ops/gemm/gemm.h"
#include "ops/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 2048 };
struct tally {
    int passed, failed;
};

static void verdict(struct tally *t, const char *what, bool ok)
{
    ok ? t->passed++ : t->failed++;
    printf("%s %s\n", ok ? "ok" : "not ok", what);
}

static struct tensor there(struct dev *d, enum dtype type, uint64_t key, struct err *e)
{
    struct tensor host = tensor_2d(malloc((size_t)SIZE * SIZE * 4), type, SIZE, SIZE), t = host;
    for (int64_t i = 0; i < tensor_elems(&host); i++)
        tensor_set(&host, i, rng_normal(key, (uint64_t)i));
    if (d->vt->alloc(d, tensor_bytes(&t), &t.data, e) != ST_OK ||
        d->vt->copy_in(d, t.data, host.data, tensor_bytes(&t), e) != ST_OK) {
        printf("not ok %s\n0 passed, 1 failed\n", e->msg);
        exit(1);
    }
    d->vt->sync(d, e);
    free(host.data);
    return t;
}

/* c += a b^T on a fresh device; the result as floats, to be freed. NULL: the device did not open. */
static float *product(const char *table, struct err *e)
{
    struct dev d;
    if (dev_open_gpu(&d, &(struct dev_gpu){.gemm_table = table}, 1, e) != ST_OK)
        return NULL;
    struct lane lane = {.dev = &d, .err = e};
    struct gemm_args g = {.a = there(&d, DT_BF16, 1, e),
                          .b = there(&d, DT_BF16, 2, e),
                          .c = there(&d, DT_F32, 3, e),
                          .trans_b = true,
                          .alpha = 1,
                          .acc_c = true};
    float *out = calloc((size_t)SIZE * SIZE, sizeof *out);
    int st = ops_for(&d)->gemm(&lane, &g);
    if (st == ST_OK)
        st = d.vt->copy_out(&d, out, g.c.data, (int64_t)SIZE * SIZE * 4, e);
    d.vt->free(&d, g.a.data);
    d.vt->free(&d, g.b.data);
    d.vt->free(&d, g.c.data);
    dev_close(&d);
    if (st == ST_OK)
        return out;
    free(out);
    return NULL;
}

static double apart(const float *x, const float *y)
{
    double diff = 0, size = 0;
    for (int64_t i = 0; i < (int64_t)SIZE * SIZE; i++) {
        diff += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        size += (double)y[i] * y[i];
    }
    return sqrt(diff / size);
}

static bool refused(const char *path, const char *text)
{
    struct err e = {0};
    if (file_write_atomic(path, text, strlen(text), &e) != ST_OK)
        return false;
    float *x = product(path, &e);
    bool no = x == NULL && e.code == ST_INVALID;
    free(x);
    return no;
}

int main(void)
{
    struct tally t = {0};
    struct err e = {0};
    char path[] = "/tmp/braid-products-XXXXXX", *before = NULL, *after = NULL;
    size_t n_before = 0, n_after = 0, bytes = (size_t)SIZE * SIZE * sizeof(float);
    int fd = mkstemp(path);
    float *plain = product(NULL, &e), *first = NULL, *second = NULL;
    if (fd < 0 || plain == NULL) {
        printf("not ok %s\n0 passed, 1 failed\n", e.msg);
        return 1;
    }
    first = product(path, &e);
    verdict(&t, "a product that was timed is right", first != NULL && apart(first, plain) < 1e-6);
    file_read(path, 1 << 20, &before, &n_before, &e);
    verdict(&t, "its algorithm is in the file",
            before != NULL && strchr(before, '\n') != NULL && strstr(before, "\n2048 2048 2048 ") != NULL);
    second = product(path, &e);
    file_read(path, 1 << 20, &after, &n_after, &e);
    verdict(&t, "the file gives the same bits again",
            first != NULL && second != NULL && memcmp(first, second, bytes) == 0);
    verdict(&t, "and stays as it is",
            before != NULL && after != NULL && n_before == n_after && memcmp(before, after, n_before) == 0);
    verdict(&t, "choices of another machine are refused",
            refused(path, "braid products, Another GPU, 1 SMs, cuBLASLt 1\n"));
    if (before != NULL) {
        char *end = strchr(before, '\n');
        snprintf(end + 1, n_before - (size_t)(end + 1 - before), "1 2 three");
        verdict(&t, "a broken line is refused", refused(path, before));
    }
    remove(path);
    free(plain);
    free(first);
    free(second);
    free(before);
    free(after);
    printf("%d passed, %d failed\n", t.passed, t.failed);
    return t.failed != 0;
}
