/* Which kernels run each class of ops on this model's device, and why: printed at the start of a run and by `braid
 * plan`. Layer kinds and residual connections have lines of their own (layers/kernels.c). A GPU on paper (`braid plan`)
 * is a Hopper GPU with cuDNN unless gpu.portable says otherwise. */
#include "layers/layer.h"
#include "model/model.h"

int model_check_kernels(const struct config *cfg, const struct dev *d, struct err *e)
{
    struct kernel_report r = kernel_report_of(cfg, d, NULL);
    const struct joint_kind *joint = joint_of(cfg);
    return joint->check_kernels == NULL ? ST_OK : joint->check_kernels(&r, e);
}

static void print_codes(const struct kernel_report *r)
{
    static const char *const recipe[] = {[CFG_FP8_BLOCKWISE] = "FP8, scales by 128 numbers, of weights by 128 x 128",
                                         [CFG_FP8_TENSOR] = "FP8, one scale for a tensor",
                                         [CFG_FP8_MX] = "FP8, scales by 32 numbers"};
    const struct config *cfg = r->cfg;
    if (cfg->gpu.precision != CFG_PRECISION_FP8)
        return;
    bool fast = r->dev->kind == DEV_CUDA && r->hopper && cfg->gpu.fp8_recipe != CFG_FP8_MX;
    kernel_line(r, "linear layers", recipe[cfg->gpu.fp8_recipe],
                fast                       ? NULL
                : r->dev->kind == DEV_CUDA ? "products by a plain kernel, for comparisons: slow"
                                           : "emulated: codes and scales as on a GPU, sums in this device's type");
    if (cfg->parallel.zero > 0 && cfg->parallel.ranks > 1)
        kernel_line(r, "their weights", codes_travel(cfg) ? "gathered as codes, 1 byte a value" : "gathered in fp32",
                    codes_travel(cfg) ? NULL : "scales of 32 numbers are others for the transpose");
}

static void print_products(const struct kernel_report *r)
{
    const struct config *cfg = r->cfg;
    if (r->dev->kind != DEV_CUDA) {
        kernel_line(r, "matrix products", r->dev->kind == DEV_CPU ? "OpenBLAS" : "plain loops in double", NULL);
        return;
    }
    kernel_line(r, "matrix products", "cuBLASLt",
                cfg->gpu.gemm_table[0] != '\0' ? "algorithms from gpu.gemm_table, those it lacks are timed"
                : cfg->gpu.fast                ? "algorithms by timing (gpu.fast)"
                                               : NULL);
}

void model_print_kernels(const struct config *cfg, const struct dev *d, struct buf *out)
{
    struct kernel_report r = kernel_report_of(cfg, d, out);
    int n;
    const struct core_kind *const *kinds = core_kinds(&n);
    buf_addf(out, "kernels%s:\n", !r.on_paper ? "" : r.hopper ? " on a Hopper GPU with cuDNN" : " on a GPU with cuDNN");
    print_products(&r);
    print_codes(&r);
    for (int i = 0; i < n; i++)
        if (kinds[i]->kernels != NULL && core_in(kinds[i], cfg->model.pattern))
            kinds[i]->kernels(&r);
    if (joint_of(cfg)->kernels != NULL)
        joint_of(cfg)->kernels(&r);
    kernel_line(&r, "everything else",
                d->kind == DEV_CUDA  ? "own kernels"
                : d->kind == DEV_CPU ? "own code, vectors and threads"
                                     : "plain loops in double",
                NULL);
}
