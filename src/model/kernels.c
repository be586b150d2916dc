/* Which kernels run each class of ops on this model's device, and why: printed at the start of a run and by `braid
 * plan`. The reasons come from the functions that the launchers ask, so what is printed is what runs. A GPU on paper
 * (`braid plan`) is a Hopper GPU with cuDNN unless gpu.portable says otherwise. */
#include "ops/act/act.h"
#include "ops/attention/attention.h"
#include "ops/expert/expert.h"
#include "dev/cuda.h"
#include "model/model.h"
#include "ops/mhc/mhc_path.h"
#include "ops/ops.h"

#include <string.h>

struct gpu_facts {
    bool hopper, cudnn, on_paper;
};

static struct gpu_facts facts_of(const struct config *cfg, const struct dev *d)
{
    const struct cuda_dev *gpu = d->impl;
    if (gpu == NULL)
        return (struct gpu_facts){.hopper = !cfg->gpu.portable, .cudnn = true, .on_paper = true};
    return (struct gpu_facts){.hopper = gpu->hopper, .cudnn = gpu->dnn != NULL};
}

static void line(struct buf *out, const char *what, const char *kernel, const char *why)
{
    buf_addf(out, "  %-18s %s%s%s\n", what, kernel, why != NULL ? ": " : "", why != NULL ? why : "");
}

/* ---- attention ------------------------------------------------------------------------------- */

struct attention_facts {
    struct tensor q, k, v;
    const char *not_library, *not_hopper;
    int64_t widest;
};

static struct attention_facts attention_facts(const struct config *cfg, const struct dev *d, const struct gpu_facts *g,
                                              bool latent)
{
    const struct config_model *c = &cfg->model;
    int64_t width = latent ? c->mla_nope + c->mla_rope : c->head_dim, values = latent ? c->mla_v : c->head_dim;
    int64_t keys = latent ? c->heads : c->kv_heads, batch = cfg->train.micro_batch, seq = cfg->train.seq;
    /* With parallel.cp queries are those of a part; all ranks but the first see more keys. */
    struct attention_facts f = {.q = tensor_4d(NULL, d->real, batch, seq / cfg->parallel.cp, c->heads, width),
                                .k = tensor_4d(NULL, d->real, batch, seq, keys, width),
                                .v = tensor_4d(NULL, d->real, batch, seq, keys, values),
                                .widest = max_i64(width, values)};
    f.not_library = attention_not_library(&f.q, &f.k, &f.v);
    if (f.not_library == NULL && config_separates(cfg))
        f.not_library = "cuDNN takes no packed documents (data.eod_mask, data.chat)";
    if (f.not_library == NULL && !g->cudnn)
        f.not_library = "cuDNN is not installed";
    if (c->attention_dropout > 0)
        f.not_library = "cuDNN does not know braid's random numbers (model.attention_dropout)";
    f.not_hopper = c->attention_dropout > 0 ? "the backward kernel for Hopper drops no weights"
                   : g->hopper              ? attention_not_hopper(&f.q, &f.k, &f.v)
                                            : "not a Hopper GPU, or gpu.portable";
    return f;
}

static void print_attention(const struct config *cfg, const struct dev *d, const struct gpu_facts *g, bool latent,
                            struct buf *out)
{
    struct attention_facts f = attention_facts(cfg, d, g, latent);
    const char *what = latent ? "latent attention" : "attention", *forward = "cuDNN", *backward = "cuDNN";
    const char *own =
        d->real == DT_BF16 && f.widest <= 256 ? "own kernels on tensor cores" : "own kernels without tensor cores";
    const char *why = f.not_library;
    char text[128];
    if (f.not_library != NULL)
        forward = backward = own;
    if (f.not_hopper == NULL) {
        backward = "own kernel for Hopper";
    } else if (f.not_library == NULL && !latent && cfg->model.attn_window > 0 &&
               cfg->model.attn_window < cfg->train.seq / 5) {
        backward = own;
        why = "cuDNN's backward goes over all keys, whatever the window";
    } else if (f.not_library == NULL && cfg->gpu.fast) {
        why = "gpu.fast lets its backward add in any order";
    }
    snprintf(text, sizeof text, "%s%s%s%s", forward, strcmp(forward, backward) == 0 ? "" : " forward, ",
             strcmp(forward, backward) == 0 ? "" : backward, strcmp(forward, backward) == 0 ? "" : " backward");
    line(out, what, text, why);
}

/* ---- experts --------------------------------------------------------------------------------- */

static const char *experts_not_fused(const struct config *cfg, const struct dev *d, const struct gpu_facts *g)
{
    const struct config_model *c = &cfg->model;
    struct act_rule rule = {.kind = (enum act_kind)c->act, .interleave = c->glu_interleave};
    if (cfg->plan.fused_experts == CFG_FUSED_OFF)
        return "plan.fused_experts = off";
    if (d->real != DT_BF16)
        return "the fused kernels are bf16";
    if (!g->hopper)
        return cfg->gpu.portable ? "gpu.portable" : "the fused kernels need a Hopper GPU";
    if (c->hidden % 8 != 0 || c->expert_ffn % 8 != 0)
        return "model.hidden and model.expert_ffn must be multiples of 8";
    return expert_not_fused(&rule);
}

/* As linear8.c decides, but for globs of gpu.fp8_keep. */
static bool experts_in_codes(const struct config *cfg)
{
    return cfg->gpu.precision == CFG_PRECISION_FP8 && cfg->model.hidden % 128 == 0 && cfg->model.expert_ffn % 128 == 0;
}

static void print_coded_experts(const struct config *cfg, const struct dev *d, const struct gpu_facts *g,
                                struct buf *out)
{
    const struct config_model *c = &cfg->model;
    struct act_rule rule = {.kind = (enum act_kind)c->act, .interleave = c->glu_interleave};
    const char *why = d->kind != DEV_CUDA                     ? NULL
                      : !g->hopper                            ? "the fast kernels need a Hopper GPU"
                      : cfg->gpu.fp8_recipe == CFG_FP8_MX     ? "no fast kernel for scales by 32 numbers"
                      : cfg->gpu.fp8_recipe == CFG_FP8_TENSOR ? "one scale is known after the last value only"
                                                              : expert_not_fused(&rule);
    line(out, "experts",
         d->kind == DEV_CUDA && why == NULL ? "FP8, products, activation and its codes in one kernel"
                                            : "FP8, products, activation and its codes in steps",
         why);
}

static void print_experts(const struct config *cfg, const struct dev *d, const struct gpu_facts *g, struct buf *out)
{
    if (experts_in_codes(cfg)) {
        print_coded_experts(cfg, d, g, out);
        return;
    }
    const char *why = experts_not_fused(cfg, d, g);
    line(out, "experts",
         why == NULL ? "products and activation in one kernel" : "grouped products, then the activation", why);
}

/* ---- hyper-connections ----------------------------------------------------------------------- */

/* The boundary between two layers, forward, on this device; one on paper runs as many clusters as it likes. */
static struct mhc_choice streams_path(const struct config *cfg, const struct dev *d, const struct gpu_facts *g,
                                      struct mhc_shape *s)
{
    const struct cuda_dev *gpu = d->impl;
    struct mhc_device there = g->hopper ? mhc_some_hopper : mhc_some_gpu;
    *s = (struct mhc_shape){.kernels = (enum mhc_kernels)cfg->mhc.kernels,
                            .real = d->real,
                            .streams = cfg->model.mhc_streams,
                            .channels = cfg->model.hidden,
                            .aligned = true,
                            .w_aligned = true,
                            .closes = true,
                            .maps = true};
    const struct ops *ops = gpu != NULL && gpu->sm_count > 0 ? ops_for(d) : NULL;
    if (ops != NULL && ops->mhc_boundary_clusters != NULL && g->hopper && mhc_may_cluster(s)) {
        struct err e = {0};
        struct lane lane = {.dev = (struct dev *)(uintptr_t)d, .err = &e};
        there.multiprocessors = gpu->sm_count;
        if (ops->mhc_boundary_clusters(&lane, s->channels, &there.in_clusters) != ST_OK)
            there.in_clusters = 0; /* the first step will say what is wrong */
    }
    return mhc_path_of(s, &there);
}

static void print_streams(const struct config *cfg, const struct dev *d, const struct gpu_facts *g, struct buf *out)
{
    struct mhc_shape s;
    struct mhc_choice c = streams_path(cfg, d, g, &s);
    line(out, "hyper-connections", c.kernels, c.why);
}

int model_check_kernels(const struct config *cfg, const struct dev *d, struct err *e)
{
    if (d->kind != DEV_CUDA || cfg->model.mhc_streams == 0)
        return ST_OK;
    struct gpu_facts g = facts_of(cfg, d);
    struct mhc_shape s;
    struct mhc_choice c = streams_path(cfg, d, &g, &s);
    return mhc_refuse_path(&s, &c, e) != ST_OK ? (e->code = ST_USAGE) : ST_OK;
}

/* ---- all of them ----------------------------------------------------------------------------- */

static void print_codes(const struct config *cfg, const struct dev *d, const struct gpu_facts *g, struct buf *out)
{
    static const char *const recipe[] = {[CFG_FP8_BLOCKWISE] = "FP8, scales by 128 numbers, of weights by 128 x 128",
                                         [CFG_FP8_TENSOR] = "FP8, one scale for a tensor",
                                         [CFG_FP8_MX] = "FP8, scales by 32 numbers"};
    if (cfg->gpu.precision != CFG_PRECISION_FP8)
        return;
    bool fast = d->kind == DEV_CUDA && g->hopper && cfg->gpu.fp8_recipe != CFG_FP8_MX;
    line(out, "linear layers", recipe[cfg->gpu.fp8_recipe],
         fast                  ? NULL
         : d->kind == DEV_CUDA ? "products by a plain kernel, for comparisons: slow"
                               : "emulated: codes and scales as on a GPU, sums in this device's type");
}

static void print_gpu(const struct config *cfg, const struct dev *d, struct buf *out)
{
    struct gpu_facts g = facts_of(cfg, d);
    const char *p = cfg->model.pattern, *products = NULL;
    buf_addf(out, "kernels%s:\n", !g.on_paper ? "" : g.hopper ? " on a Hopper GPU with cuDNN" : " on a GPU with cuDNN");
    if (cfg->gpu.gemm_table[0] != '\0')
        products = "algorithms from gpu.gemm_table, those it lacks are timed";
    else if (cfg->gpu.fast)
        products = "algorithms by timing (gpu.fast)";
    line(out, "matrix products", "cuBLASLt", products);
    print_codes(cfg, d, &g, out);
    if (strchr(p, '*') != NULL)
        print_attention(cfg, d, &g, false, out);
    if (strchr(p, '+') != NULL)
        print_attention(cfg, d, &g, true, out);
    if (strchr(p, 'E') != NULL)
        print_experts(cfg, d, &g, out);
    if (cfg->model.fp32_residual)
        line(out, "residual stream", "fp32",
             d->real == DT_F32 ? NULL : "model.fp32_residual; layers read and write bf16");
    if (cfg->model.mhc_streams > 0)
        print_streams(cfg, d, &g, out);
    line(out, "everything else", "own kernels", NULL);
}

static void print_host(const struct config *cfg, const struct dev *d, struct buf *out)
{
    bool fused = cfg->plan.fused_experts == CFG_FUSED_ON;
    buf_add(out, "kernels:\n");
    line(out, "matrix products", d->kind == DEV_CPU ? "OpenBLAS" : "plain loops in double", NULL);
    print_codes(cfg, d, NULL, out);
    if (strchr(cfg->model.pattern, 'E') != NULL && experts_in_codes(cfg))
        print_coded_experts(cfg, d, NULL, out);
    else if (strchr(cfg->model.pattern, 'E') != NULL)
        line(out, "experts", fused ? "products and activation in one step" : "grouped products, then the activation",
             fused                                      ? "plan.fused_experts = on"
             : cfg->plan.fused_experts == CFG_FUSED_OFF ? "plan.fused_experts = off"
                                                        : "fused on a GPU only");
    line(out, "everything else", d->kind == DEV_CPU ? "own code, vectors and threads" : "plain loops in double", NULL);
}

void model_print_kernels(const struct config *cfg, const struct dev *d, struct buf *out)
{
    if (d->kind == DEV_CUDA)
        print_gpu(cfg, d, out);
    else
        print_host(cfg, d, out);
}
