/* Weights of projections as FP8 blocks in a Hugging Face folder, in the form of DeepSeek-V3 that transformers and vLLM
 * read: NAME holds E4M3 codes, NAME_scale_inv an fp32 factor for each 128 x 128 of them, and config.json says so in
 * quantization_config. Scales are those of ops/quantise (tensor/f8.h), so a model trained with gpu.precision=fp8 is
 * exported with the codes it works with. */
#include "hf/out_int.h"
#include "tensor/f8.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK = 128 };

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

static bool takes_codes(const struct hf_out_tensor *t)
{
    return t->shape.rank == 2 && !t->keep_f32 && ends_with(t->name, "_proj.weight");
}

int hf_out_codes(struct hf_out *w, struct err *e)
{
    int n = w->n_tensors;
    struct hf_out_tensor *all;
    if (w->links.family->own_names)
        return err_set(e, ST_UNSUPPORTED, "--dtype=fp8: a %s model is written in bf16 or f32 only",
                       w->links.family->model_type);
    TRY(mem_array((void **)&all, 2 * (size_t)n + 1, sizeof *all, e));
    memcpy(all, w->tensors, (size_t)n * sizeof *all);
    free(w->tensors);
    w->tensors = all;
    for (int i = 0; i < n; i++) {
        struct hf_out_tensor *t = &all[i];
        if (!takes_codes(t))
            continue;
        t->codes = true;
        struct hf_out_tensor s = *t;
        s.codes = false;
        s.keep_f32 = s.scales = true;
        s.name = arena_printf(&w->links.memory, "%s_scale_inv", t->name);
        if (s.name == NULL)
            return err_set(e, ST_NOMEM, "out of memory for the scales of %s", t->name);
        s.of = t->shape;
        s.shape = tensor_2d(NULL, DT_F32, ceil_div(t->shape.dim[0], BLOCK), ceil_div(t->shape.dim[1], BLOCK));
        all[w->n_tensors++] = s;
    }
    if (w->n_tensors == n)
        return err_set(e, ST_UNSUPPORTED, "--dtype=fp8: this model has no projection that is a matrix of its own in %s",
                       w->links.family->model_type);
    return ST_OK;
}

/* The block's exponent k, of codes x * 2^k. */
static int block_exponent(const struct tensor *t, const float *values, int64_t r0, int64_t c0)
{
    int64_t rows = min_i64(BLOCK, t->dim[0] - r0), cols = min_i64(BLOCK, t->dim[1] - c0);
    float amax = 0;
    for (int64_t r = r0; r < r0 + rows; r++)
        for (int64_t c = c0; c < c0 + cols; c++) {
            float v = fabsf(values[r * t->dim[1] + c]);
            amax = isnan(amax) || v <= amax ? amax : v;
        }
    return isfinite(amax) ? f8_exponent(amax, DT_F8_E4M3) : INT32_MAX;
}

int hf_out_block_scales(const struct tensor *t, const char *name, const float *values, float *out, struct err *e)
{
    for (int64_t r = 0; r < t->dim[0]; r += BLOCK)
        for (int64_t c = 0; c < t->dim[1]; c += BLOCK) {
            int k = block_exponent(t, values, r, c);
            if (k == INT32_MAX)
                return err_set(e, ST_NONFINITE, "'%s' holds a value that is not finite, which FP8 blocks cannot say",
                               name);
            *out++ = f8_power(-k);
        }
    return ST_OK;
}

void hf_out_block_codes(const struct tensor *t, const float *values, uint8_t *out)
{
    for (int64_t r0 = 0; r0 < t->dim[0]; r0 += BLOCK)
        for (int64_t c0 = 0; c0 < t->dim[1]; c0 += BLOCK) {
            int k = block_exponent(t, values, r0, c0);
            float factor = k == INT32_MAX ? 1 : f8_power(k);
            for (int64_t r = r0; r < min_i64(r0 + BLOCK, t->dim[0]); r++)
                for (int64_t c = c0; c < min_i64(c0 + BLOCK, t->dim[1]); c++)
                    out[r * t->dim[1] + c] = f8_from_f32(values[r * t->dim[1] + c] * factor, DT_F8_E4M3);
        }
}

int hf_out_codes_config(const struct hf_out *w, json_t *config, struct err *e)
{
    json_t *kept = json_array(), *q = json_pack("{s:s, s:s, s:s, s:[i, i]}", "quant_method", "fp8", "fmt", "e4m3",
                                                "activation_scheme", "dynamic", "weight_block_size", BLOCK, BLOCK);
    for (int i = 0; kept != NULL && i < w->n_tensors; i++) {
        const struct hf_out_tensor *t = &w->tensors[i];
        const char *dot = strrchr(t->name, '.');
        if (!t->codes && !t->scales && t->shape.rank == 2 && dot != NULL && strcmp(dot, ".weight") == 0)
            json_array_append_new(kept, json_stringn(t->name, (size_t)(dot - t->name)));
    }
    int st = kept == NULL || q == NULL || json_object_set(q, "modules_to_not_convert", kept) != 0
                 ? err_set(e, ST_NOMEM, "out of memory for config.json")
                 : hf_put(config, "quantization_config", json_incref(q), e);
    json_decref(kept);
    json_decref(q);
    return st;
}
