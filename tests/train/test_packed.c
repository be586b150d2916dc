/* Packed documents: what a model computes for a document does not depend, by a single bit, on the
 * documents before it in the sequence, whatever layers it has. Without data.eod_mask and data.chat it does: the
 * test would notice a leak. Of experts on the CPU this holds up to rounding: which row of an expert's product a token
 * is depends on the tokens before it, and OpenBLAS has kernels (Haswell's) in which the last rows round differently. */
#include "tiny.h"

#include <math.h>

enum { LENGTH = 24, CUT = 11 }; /* the second document begins at CUT */

static const char *const models[] = {
    "model.pattern=*-*-",
    "model.pattern=*- model.attn_window=5 model.attn_sink=learnable",
    "model.pattern=+-+- model.mla_kv_rank=8 model.mla_nope=4 model.mla_rope=2 model.mla_v=4",
    "model.pattern=M-M- model.mamba_head_dim=4 model.mamba_state=5 model.mamba_groups=2 "
    "model.mamba_chunk=3",
    "model.pattern=G-G- model.gdn_value_heads=4 model.gdn_key_heads=2 model.gdn_key_dim=5 "
    "model.gdn_value_dim=4 model.gdn_chunk=3",
    "model.pattern=[M-][*E][G-] model.mamba_head_dim=4 model.mamba_state=5 model.mamba_groups=2 "
    "model.mamba_chunk=3 "
    "model.gdn_value_heads=4 model.gdn_key_heads=2 model.gdn_key_dim=5 model.gdn_value_dim=4 "
    "model.gdn_chunk=3 model.experts=4 "
    "model.topk=2 model.mhc_streams=2",
};

/* Logits of the second document, behind a first one drawn from `key`. */
static double *second_document(struct tiny *t, uint64_t key, bool masked, int64_t *n)
{
    int32_t tokens[LENGTH], labels[LENGTH], pos[LENGTH], doc[LENGTH];
    static const double mtp_scale[MTP_MAX_DEPTHS] = {0};
    for (int i = 0; i < LENGTH; i++) {
        tokens[i] = (int32_t)rng_below(i < CUT ? key : 7, (uint64_t)i, (uint64_t)t->c.model.vocab - 1);
        labels[i] = 1;
        pos[i] = masked && i >= CUT ? i - CUT : i;
        doc[i] = masked && i >= CUT ? CUT : 0;
    }
    tokens[CUT - 1] = (int32_t)t->c.model.vocab - 1;
    struct run_info run = {.first_mb = true,
                           .scale = 1,
                           .mtp_scale = mtp_scale,
                           .tokens = tokens,
                           .labels = labels,
                           .pos = pos,
                           .doc_start = doc};
    assert_ok(exec_run(&t->x, &t->train.p, &run, &t->e), &t->e);
    struct tensor all = model_slot(&t->m, &t->train, t->train.logits), rows = tensor_rows(&all, CUT, LENGTH - CUT);
    *n = tensor_elems(&rows);
    double *out = malloc((size_t)*n * sizeof *out);
    assert_non_null(out);
    for (int64_t i = 0; i < *n; i++)
        out[i] = tensor_get(&rows, i);
    return out;
}

/* How far apart two results may be that are the same but for rounding. */
static double allowed(const char *model, enum dev_kind kind)
{
    return kind == DEV_CPU && strchr(model, 'E') != NULL ? 1e-5 : 0;
}

/* Elements that differ between two first documents. */
static int differing(const char *model, enum dev_kind kind, const char *mask)
{
    bool masked = mask[0] != '\0';
    struct tiny t;
    char options[1024];
    int64_t n, differ = 0;
    snprintf(options, sizeof options, "train.seq=%d train.micro_batch=1 %s %s", LENGTH, model, mask);
    tiny_open(&t, options, kind, 1);
    double *a = second_document(&t, 1, masked, &n), *b = second_document(&t, 2, masked, &n);
    for (int64_t i = 0; i < n; i++)
        differ += !(fabs(a[i] - b[i]) <= allowed(model, kind) * fmax(1, fabs(a[i])));
    free(a);
    free(b);
    tiny_close(&t);
    return (int)differ;
}

static void a_document_does_not_see_the_one_before_it(void **state)
{
    (void)state;
    static const enum dev_kind kinds[] = {DEV_REF, DEV_CPU};
    for (int i = 0; i < countof(models); i++)
        for (int k = 0; k < countof(kinds); k++) {
            static const char *const masks[] = {"data.eod=on data.eod_mask=on", "data.chat=chatml"};
            for (int w = 0; w < countof(masks); w++) {
                int leaked = differing(models[i], kinds[k], masks[w]);
                if (leaked != 0)
                    fail_msg("%s, %s: %d logits of the second document depend on the first", models[i], masks[w],
                             leaked);
            }
            if (differing(models[i], kinds[k], "") == 0)
                fail_msg("%s: without a mask nothing depends on the first document; the test is blind", models[i]);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_document_does_not_see_the_one_before_it)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
