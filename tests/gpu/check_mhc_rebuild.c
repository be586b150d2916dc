/* Streams of several layers recomputed in one launch have the bits of combine after combine, aligned or not. Needs a
 * GPU; "N passed, N failed" comes last.
 *
 *   check_mhc_rebuild */
#include "ops/mhc/mhc_rebuild_int.h"
#include "ops/mhc/mhc.h"
#include "ops/opcheck.h"
#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>

static int combine_all(const struct ops *ops, struct lane *lane, const struct mhc_rebuild_args *a)
{
    for (int l = 0; l < a->layers; l++) {
        struct mhc_combine_fwd_args c = mhc_rebuild_combine(a, l);
        TRY(ops->mhc_combine_fwd(lane, &c));
    }
    return ST_OK;
}

/* The first y that is not as it was before; -1: all are. */
static int first_difference(const struct op_call *now, const struct op_block *block, const char *before)
{
    for (int i = 0; i < now->desc->n_args; i++) {
        const struct tensor *t = &now->t[i];
        if (now->desc->args[i].role != ARG_OOUT || t->data == NULL)
            continue;
        size_t size = dtype_bytes(t->dtype), at = (size_t)((char *)t->data - block->base),
               row = (size_t)t->dim[1] * size;
        for (int64_t r = 0; r < t->dim[0]; r++, at += (size_t)t->stride[0] * size)
            if (memcmp(before + at, block->base + at, row) != 0)
                return i;
    }
    return -1;
}

/* Outputs before the second run: nothing of the first. */
static int wipe(struct dev *dev, const struct op_call *there, struct err *e)
{
    for (int i = 0; i < there->desc->n_args; i++)
        for (int64_t r = 0; there->desc->args[i].role == ARG_OOUT && there->t[i].data != NULL && r < there->t[i].dim[0];
             r++) {
            struct tensor row = tensor_rows(&there->t[i], r, 1);
            TRY(dev->vt->fill(dev, row.data, 0, row.dim[1] * (int64_t)dtype_bytes(row.dtype), e));
        }
    return ST_OK;
}

static bool check(struct dev *dev, const char *text, bool strided)
{
    struct err e = {0};
    struct lane lane = {.dev = dev, .err = &e};
    const struct ops *ops = ops_for(dev);
    const struct op_desc *d = op_find("mhc_rebuild");
    struct op_sample sample = {text};
    struct op_call host, there;
    struct op_block block = {0};
    void *base = NULL;
    char *first = NULL;
    int which = -1;
    bool ok = op_call_sample(&host, d, &sample, ops, &e) == ST_OK &&
              op_call_alloc(&host, &block, 11, strided, &e) == ST_OK &&
              op_send(&host, &block, dev, &there, &base, &e) == ST_OK && op_call_run(ops, &lane, &there) == ST_OK &&
              op_fetch(&block, dev, base, &e) == ST_OK && op_guards_intact(&host, &block) &&
              (first = malloc(block.bytes)) != NULL;
    if (ok) {
        memcpy(first, block.base, block.bytes);
        OP_UNPACK(mhc_rebuild, packed, &there);
        struct mhc_rebuild_args a = *packed;
        ok = wipe(dev, &there, &e) == ST_OK && combine_all(ops, &lane, &a) == ST_OK &&
             op_fetch(&block, dev, base, &e) == ST_OK;
        which = ok ? first_difference(&host, &block, first) : -1;
    }
    ok = ok && which < 0;
    printf("%s mhc_rebuild [%s%s] %s%s%s%s%s\n", ok ? "ok" : "not ok", dtype_name(dev->real),
           strided ? ", strided" : "", text, which >= 0 ? ": other bits than combine in " : "",
           which >= 0 ? d->args[which].name : "", e.msg[0] ? ": " : "", e.msg);
    if (base != NULL)
        dev->vt->free(dev, base);
    op_call_free(&block);
    free(first);
    return ok;
}

int main(void)
{
    /* Beside the descriptor's: whole blocks, parts of one and several blocks a row; every number of layers. */
    static const char *const more[] = {"rows=19 d=1024 layers=1",
                                       "rows=300 d=2048 layers=2 no_bias1=1 no_bias2=1",
                                       "rows=7 d=7168 layers=3 p=0.1 seq=3",
                                       "rows=40 d=256 layers=4 profile=1",
                                       "rows=40 d=1288 layers=5 p=0.25 no_y2=1 no_y4=1",
                                       "rows=65 d=512 layers=6",
                                       "rows=130 d=128 layers=7 p=0.5 seq=7 profile=1"};
    int passed = 0, failed = 0;
    for (int fp32 = 0; fp32 < 2; fp32++) {
        struct dev dev;
        struct err e = {0};
        if (dev_open_gpu(&dev, &(struct dev_gpu){.fp32 = fp32 == 1}, 1, &e) != ST_OK) {
            printf("not ok no GPU: %s\n", e.msg);
            failed++;
            break;
        }
        const struct op_desc *d = op_find("mhc_rebuild");
        for (int i = 0; i < d->n_samples + countof(more); i++)
            for (int strided = 0; strided < 2; strided++)
                check(&dev, i < d->n_samples ? d->samples[i].text : more[i - d->n_samples], strided == 1) ? passed++
                                                                                                          : failed++;
        dev_close(&dev);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
