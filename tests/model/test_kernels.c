/* What is said about kernels: every case in which a GPU runs others than the best ones is printed with its reason, and
 * kernels that were asked for by name and do not exist are refused before anything is allocated. */
#include "dev/cuda.h"
#include "tiny.h"

static const char big[] = "model.hidden=512 model.heads=8 model.head_dim=64 model.experts=8 model.expert_ffn=256 "
                          "train.seq=256 train.micro_batch=2 "
                          "run.device=cuda ";

struct seen {
    const char *options;
    bool portable; /* not a Hopper GPU */
    bool no_cudnn;
    const char *text;
};

static char *printed(const struct seen *s)
{
    struct config c;
    struct cuda_dev gpu = {.hopper = !s->portable,
                           .smem_per_block = s->portable ? 163 * 1024 : 227 * 1024,
                           .dnn = s->no_cudnn ? NULL : (struct dnn *)(uintptr_t)1};
    struct buf out;
    char options[512];
    snprintf(options, sizeof options, "%s%s", big, s->options);
    tiny_config(&c, options);
    bool fp32 = c.gpu.precision == CFG_PRECISION_FP32;
    struct dev d = {.kind = DEV_CUDA, .real = fp32 ? DT_F32 : DT_BF16, .wide = DT_F32, .impl = &gpu};
    buf_init(&out, 0);
    model_print_kernels(&c, &d, &out);
    config_release(&c);
    assert_non_null(out.text);
    return out.text;
}

static void reasons_are_printed(void **state)
{
    (void)state;
    static const struct seen cases[] = {
        {"model.pattern=*E", false, false, "experts            products and activation in one kernel\n"},
        {"model.pattern=*E", true, false, "then the activation: the fused kernels need a Hopper GPU"},
        {"model.pattern=*E gpu.portable=on", true, false, "then the activation: gpu.portable"},
        {"model.pattern=*E model.act=geglu", false, false, "then the activation: the fused kernels know swiglu"},
        {"model.pattern=*E model.glu_interleave=8", false, false,
         "gate and up rows in halves (model.glu_interleave = 0)"},
        {"model.pattern=*E model.expert_ffn=100", false, false, "must be multiples of 8"},
        {"model.pattern=*E plan.fused_experts=off", false, false, "plan.fused_experts = off"},
        {"model.pattern=*E gpu.precision=fp32", false, false, "the fused kernels are bf16"},
        {"model.pattern=*-", false, false, "attention          cuDNN forward, own kernel for Hopper backward\n"},
        {"model.pattern=*-", true, false, "attention          cuDNN\n"},
        {"model.pattern=*- gpu.fast=on", true, false,
         "attention          cuDNN: gpu.fast lets its backward add in any order\n"},
        {"model.pattern=*-", false, true,
         "own kernels on tensor cores forward, own kernel for Hopper backward: cuDNN is not installed"},
        {"model.pattern=*-", true, true, "attention          own kernels on tensor cores: cuDNN is not installed"},
        {"model.pattern=*- model.attn_sink=learnable", false, false, "cuDNN forward, own kernel for Hopper backward\n"},
        {"model.pattern=*- model.attn_sink=off_by_one", true, false, "attention          cuDNN\n"},
        {"model.pattern=*- data.eod=on data.eod_mask=on model.vocab=300", false, false, "packed documents"},
        {"model.pattern=*- model.head_dim=20", false, false, "in multiples of 8"},
        {"model.pattern=*- model.attn_window=16", false, false, "cuDNN forward, own kernel for Hopper backward\n"},
        {"model.pattern=*- model.attn_window=16", true, false, "cuDNN forward, own kernels on tensor cores backward"},
        {"model.pattern=*- train.seq=32", false, false, "sequences of 64"},
        {"model.pattern=*- gpu.precision=fp32", false, false, "own kernels without tensor cores: cuDNN takes bf16"},
        {"model.pattern=*- gpu.fast=on", false, false, "algorithms by timing (gpu.fast)"},
        {"model.pattern=*- model.fp32_residual=on", false, false,
         "residual stream    fp32: model.fp32_residual; layers read and write bf16\n"},
        {"model.pattern=*- model.fp32_residual=on gpu.precision=fp32", false, false, "residual stream    fp32\n"},
        {"model.pattern=+-", false, false, "latent attention   cuDNN\n"},
        {"model.pattern=+- model.mla_nope=250", false, false, "without tensor cores: cuDNN takes heads of at most 256"},
        {"model.pattern=D- model.mla_kv_rank=512 model.mla_rope=64 model.dsa_indexer_head_dim=128", false, false,
         "sparse attention   own kernels for Hopper\n"},
        {"model.pattern=D- model.mla_kv_rank=512 model.mla_rope=64 model.dsa_indexer_head_dim=128", true, false,
         "sparse attention   own kernels without tensor cores: tensor cores need the shared memory of a Hopper GPU\n"},
        {"model.pattern=D- model.mla_kv_rank=512 model.mla_rope=64 model.dsa_indexer_head_dim=128", true, false,
         "indexer scores     own kernels on tensor cores: not a Hopper GPU, or gpu.portable\n"},
        {"model.pattern=D- model.mla_kv_rank=48 model.mla_rope=64 model.dsa_indexer_head_dim=96", false, false,
         "indexer scores     own kernels without tensor cores: tensor cores take indexer heads of 64 or 128"},
        {"model.pattern=C- model.mla_q_rank=8 model.mla_v=512", false, false,
         "window, entries    own kernels for Hopper\n"},
        {"model.pattern=C- model.mla_q_rank=8 model.mla_v=512", true, false,
         "indexer scores     own kernels on tensor cores: not a Hopper GPU, or gpu.portable\n"},
        {"model.pattern=W- model.mla_q_rank=8", false, false,
         "window, entries    own kernels without tensor cores: tensor cores take keys of 512 channels"},
        {"model.pattern=*- model.mhc_streams=4", false, false,
         "hyper-connections  fused, one pass of Hopper's clusters: clusters of this width fill the GPU"},
        {"model.pattern=*- model.mhc_streams=4", true, false, "separate kernels: not a Hopper GPU"},
        {"model.pattern=*- model.mhc_streams=4 mhc.kernels=boundary", true, false,
         "separate kernels: not a Hopper GPU"},
        {"model.pattern=*- model.mhc_streams=3", false, false, "separate kernels: fused kernels take 4 streams"},
        {"model.pattern=*- model.mhc_streams=4 mhc.kernels=primitive", false, false, "separate kernels: mhc.kernels"},
    };
    for (int i = 0; i < countof(cases); i++) {
        char *text = printed(&cases[i]);
        if (strstr(text, cases[i].text) == NULL)
            fail_msg("%s: '%s' is not in\n%s", cases[i].options, cases[i].text, text);
        free(text);
    }
}

static void kernels_that_do_not_exist_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *options;
        bool fits;
    } cases[] = {{"model.mhc_streams=4 mhc.kernels=boundary", true},
                 {"model.mhc_streams=3 mhc.kernels=boundary", false},
                 {"model.mhc_streams=4 mhc.kernels=boundary model.hidden=200", true},
                 {"model.mhc_streams=4 mhc.kernels=boundary gpu.portable=on", true},
                 {"model.mhc_streams=4 mhc.kernels=boundary gpu.precision=fp32", false},
                 {"model.mhc_streams=3", true},
                 {"model.mhc_streams=3 mhc.kernels=primitive", true}};
    for (int i = 0; i < countof(cases); i++) {
        struct config c;
        struct err e = {0};
        char options[512];
        snprintf(options, sizeof options, "%smodel.pattern=*- %s", big, cases[i].options);
        tiny_config(&c, options);
        struct dev d = {
            .kind = DEV_CUDA, .real = c.gpu.precision == CFG_PRECISION_FP32 ? DT_F32 : DT_BF16, .wide = DT_F32};
        struct model m;
        int st = model_init(&m, &c, &d, &e);
        if (cases[i].fits)
            assert_ok(st, &e);
        else
            assert_fails(st, ST_USAGE, &e, "mhc.kernels = boundary");
        model_release(&m);
        d.kind = DEV_CPU; /* hosts have fused ones for all */
        assert_ok(model_check_kernels(&c, &d, &e), &e);
        config_release(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reasons_are_printed),
        cmocka_unit_test(kernels_that_do_not_exist_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
