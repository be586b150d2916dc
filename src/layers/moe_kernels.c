/* Sizes of a mixture of experts and the kernels that run it, as the rest of the program asks of every layer kind; see
 * moe.c. */
#include "layers/moe_experts_int.h"
#include "ops/act/act.h"
#include "ops/expert/expert.h"

#include <math.h>

struct kind_sizes moe_sizes(const struct config *c)
{
    const struct config_model *m = &c->model;
    double width = fmax((double)m->shared_ffn, 2 * (double)m->topk * (double)max_i64(m->expert_ffn, m->hidden));
    return (struct kind_sizes){
        .token = width, .weight = fmax(width, 2 * (double)m->experts * (double)m->expert_ffn) * (double)m->hidden};
}

/* Why products and activation are not one kernel; NULL: they are. */
static const char *not_fused(const struct kernel_report *r)
{
    const struct config_model *c = &r->cfg->model;
    struct act_rule rule = {.kind = (enum act_kind)c->act, .interleave = c->glu_interleave};
    if (r->cfg->plan.fused_experts == CFG_FUSED_OFF)
        return "plan.fused_experts = off";
    if (r->dev->real != DT_BF16)
        return "the fused kernels are bf16";
    if (!r->hopper)
        return r->cfg->gpu.portable ? "gpu.portable" : "the fused kernels need a Hopper GPU";
    if (c->hidden % 8 != 0 || c->expert_ffn % 8 != 0)
        return "model.hidden and model.expert_ffn must be multiples of 8";
    return expert_not_fused(&rule);
}

/* As linear8.c decides, but for globs of gpu.fp8_keep. */
static bool in_codes(const struct config *cfg)
{
    return cfg->gpu.precision == CFG_PRECISION_FP8 && cfg->model.hidden % 128 == 0 && cfg->model.expert_ffn % 128 == 0;
}
static void report_coded(const struct kernel_report *r)
{
    const struct config_model *c = &r->cfg->model;
    struct act_rule rule = {.kind = (enum act_kind)c->act, .interleave = c->glu_interleave};
    bool gpu = r->dev->kind == DEV_CUDA;
    const char *why = !gpu                                       ? NULL
                      : !r->hopper                               ? "the fast kernels need a Hopper GPU"
                      : r->cfg->gpu.fp8_recipe == CFG_FP8_MX     ? "no fast kernel for scales by 32 numbers"
                      : r->cfg->gpu.fp8_recipe == CFG_FP8_TENSOR ? "one scale is known after the last value only"
                                                                 : expert_not_fused(&rule);
    kernel_line(r, "experts",
                gpu && why == NULL ? "FP8, products, activation and its codes in one kernel"
                                   : "FP8, products, activation and its codes in steps",
                why);
}

void moe_kernels(const struct kernel_report *r)
{
    static const char separate[] = "grouped products, then the activation";
    enum config_fused asked = (enum config_fused)r->cfg->plan.fused_experts;
    if (in_codes(r->cfg)) {
        report_coded(r);
    } else if (r->dev->kind == DEV_CUDA) {
        const char *why = not_fused(r);
        kernel_line(r, "experts", why == NULL ? "products and activation in one kernel" : separate, why);
    } else if (asked == CFG_FUSED_ON) {
        kernel_line(r, "experts", "products and activation in one step", "plan.fused_experts = on");
    } else {
        kernel_line(r, "experts", separate,
                    asked == CFG_FUSED_OFF ? "plan.fused_experts = off" : "fused on a GPU only");
    }
}
