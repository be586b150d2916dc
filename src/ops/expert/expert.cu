/* expert on the GPU: bf16 on Hopper in one kernel (gmm_tma.cuh), everything else as a composition; see expert.h. */
#include "ops/gmm/gmm_tma.cuh"
#include "ops/act/act.h"
#include "ops/expert/expert.h"
#include "ops/gmm/gmm.h"
extern "C" {
#include "ops/expert/expert_int.h"
}

static const struct expert_parts parts = {gmm_fwd_cuda, gmm_bwd_cuda, act_fwd_cuda, act_bwd_cuda};

static bool known(const struct act_rule *r) { return expert_not_fused(r) == NULL; }
static struct gmm_tma_job job_of(const struct act_rule *r, const struct tensor *prob, const struct tensor *offset)
{
    struct gmm_tma_job j = {};
    j.kind = r->kind == ACT_RELU2 ? GMM_RELU2 : r->clamp > 0 || r->offset != 0 ? GMM_CLAMPED_GATE : GMM_GATE;
    j.limit = r->clamp > 0 ? (float)r->clamp : INFINITY;
    j.alpha = r->kind == ACT_QUICK_GEGLU ? (float)r->alpha : 1.0f;
    j.offset = (float)r->offset;
    j.g.prob = (const float *)prob->data;
    j.g.offset = (const int32_t *)offset->data;
    j.g.experts = (int)(offset->dim[0] - 1);
    return j;
}

extern "C" int expert_up_cuda(struct lane *l, const struct expert_up_args *a)
{
    TRY(expert_up_check(a, l->err));
    struct gmm_tma_job j = job_of(&a->rule, &a->prob, &a->offset);
    j.after = GMM_ACT;
    j.g.a = a->x.data;
    j.g.lda = a->x.stride[0];
    j.g.b = a->w.data;
    j.g.ldb = a->w.dim[2];
    j.g.c = a->y.data;
    j.g.ldc = a->y.stride[0];
    j.g.bias = (const float *)a->bias.data;
    j.g.rows = (int)a->x.dim[0];
    j.g.across = (int)a->y.dim[1];
    j.g.depth = (int)a->x.dim[1];
    j.pre = (bf16 *)a->pre.data;
    j.ldpre = a->pre.stride[0];
    bool vectors = aligned16(&a->x) && aligned16(&a->w) && aligned16(&a->pre) && aligned16(&a->y);
    if (known(&a->rule) && a->x.dtype == DT_BF16 && vectors && gmm_tma_fits(l, &j))
        return gmm_tma(l, &j, GMM_FORWARD);
    return expert_up_by(&parts, l, a);
}

extern "C" int64_t expert_down_bwd_work_cuda(const struct expert_down_bwd_args *a)
{
    int64_t part = a->dz.dim[0] * ceil_div(a->w.dim[2], GMM_FORM_COLS) * (int64_t)sizeof(float);
    return max_i64(expert_down_bwd_work_by(a), part);
}

/* The bias of the second matrix has its share in the gradient of the probability. */
static int scaled_bias(struct lane *l, const struct expert_down_bwd_args *a)
{
    struct gmm_bwd_args g = {};
    if (a->bias.data == NULL || a->dprob.data == NULL)
        return ST_OK;
    g.dy = a->dz;
    g.bias = a->bias;
    g.offset = a->offset;
    g.dprob = a->dprob;
    g.acc_dprob = true;
    return gmm_bwd_cuda(l, &g);
}

extern "C" int expert_down_bwd_cuda(struct lane *l, const struct expert_down_bwd_args *a)
{
    TRY(expert_down_bwd_check(a, l->err));
    TRY(check_work("expert_down_bwd", &a->work, expert_down_bwd_work_cuda(a), l->err));
    struct gmm_tma_job j = job_of(&a->rule, &a->prob, &a->offset);
    j.after = GMM_DACT;
    j.g.a = a->dz.data;
    j.g.lda = a->dz.stride[0];
    j.g.b = a->w.data;
    j.g.ldb = a->w.dim[2];
    j.g.c = a->dpre.data;
    j.g.ldc = a->dpre.stride[0];
    j.g.rows = (int)a->dz.dim[0];
    j.g.across = (int)a->w.dim[2];
    j.g.depth = (int)a->w.dim[1];
    j.pre = (bf16 *)a->pre.data;
    j.ldpre = a->pre.stride[0];
    j.act = (bf16 *)a->y.data;
    j.ldact = a->y.data != NULL ? a->y.stride[0] : 0;
    j.part = a->dprob.data != NULL ? (float *)a->work.data : NULL;
    bool vectors = aligned16(&a->dz) && aligned16(&a->w) && aligned16(&a->pre) && aligned16(&a->dpre) &&
                   absent_or_aligned16(&a->y);
    if (!known(&a->rule) || a->dz.dtype != DT_BF16 || !vectors || !gmm_tma_fits(l, &j))
        return expert_down_bwd_by(&parts, l, a);
    TRY(gmm_tma(l, &j, GMM_INPUT));
    if (j.part != NULL)
        TRY(gmm_tma_dprob(l, &j, (float *)a->dprob.data));
    return scaled_bias(l, a);
}
