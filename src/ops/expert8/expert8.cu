/* expert8 on the GPU: on Hopper in one kernel (gmm8_tma.cuh), everything else as a composition; see expert8.h. */
#include "ops/gmm8/gmm8_cuda.cuh"
#include "ops/expert/expert.h"
extern "C" {
#include "ops/expert8/expert8_int.h"
}

static const struct expert8_parts parts = {
    gmm8_cuda, NULL, act_fwd_cuda, act_bwd_cuda, quantise_cuda, quantise_work_cuda,
};

static void rule_of(struct gmm_tma_job *j, const struct act_rule *r)
{
    j->kind = r->kind == ACT_RELU2 ? GMM_RELU2 : r->clamp > 0 || r->offset != 0 ? GMM_CLAMPED_GATE : GMM_GATE;
    j->limit = r->clamp > 0 ? (float)r->clamp : INFINITY;
    j->alpha = r->kind == ACT_QUICK_GEGLU ? (float)r->alpha : 1.0f;
    j->offset = (float)r->offset;
}

extern "C" int64_t expert8_up_work_cuda(const struct expert8_up_args *a) { return expert8_up_work_by(&parts, a); }

extern "C" int expert8_up_cuda(struct lane *l, const struct expert8_up_args *a)
{
    TRY(expert8_up_check(a, l->err));
    bool fits;
    struct gmm8_job p =
        gmm8_job_of(&a->x, &a->xs, &a->w, &a->ws, &a->offset, a->block, a->square, false, a->q.dim[1], &fits);
    rule_of(&p.j, &a->rule);
    p.j.after = GMM_ACT;
    p.j.g.bias = (const float *)a->bias.data;
    p.j.g.prob = (const float *)a->prob.data;
    p.j.pre = (bf16 *)a->pre.data;
    p.j.ldpre = a->pre.stride[0];
    p.q = (uint8_t *)a->q.data;
    p.qs = (float *)a->qs.data;
    p.qs_stride = f8_scale_stride(a->q.dim[0], a->q.dim[1], a->block, false);
    bool one_kernel = fits && a->block == 128 && expert_not_fused(&a->rule) == NULL && a->pre.dtype == DT_BF16 &&
                      aligned16(&a->pre) && (uintptr_t)a->q.data % 16 == 0;
    return one_kernel && gmm8_tma_fits(l, &p) ? gmm8_tma(l, &p) : expert8_up_by(&parts, l, a);
}

extern "C" int64_t expert8_down_bwd_work_cuda(const struct expert8_down_bwd_args *a)
{
    int64_t part = a->dz.dim[0] * ceil_div(a->w.dim[0], GMM_FORM_COLS) * (int64_t)sizeof(float);
    return max_i64(expert8_down_bwd_work_by(&parts, a), part);
}

extern "C" int expert8_down_bwd_cuda(struct lane *l, const struct expert8_down_bwd_args *a)
{
    TRY(expert8_down_bwd_check(a, l->err));
    TRY(check_work("expert8_down_bwd", &a->work, expert8_down_bwd_work_cuda(a), l->err));
    bool fits;
    struct gmm8_job p =
        gmm8_job_of(&a->dz, &a->dzs, &a->w, &a->ws, &a->offset, a->block, a->square, true, a->w.dim[0], &fits);
    rule_of(&p.j, &a->rule);
    p.j.after = GMM_DACT;
    p.j.g.prob = (const float *)a->prob.data;
    p.j.g.c = a->dpre.data;
    p.j.g.ldc = a->dpre.stride[0];
    p.j.pre = (bf16 *)a->pre.data;
    p.j.ldpre = a->pre.stride[0];
    p.j.act = (bf16 *)a->y.data;
    p.j.ldact = a->y.data != NULL ? a->y.stride[0] : 0;
    p.j.part = a->dprob.data != NULL ? (float *)a->work.data : NULL;
    bool one_kernel = fits && expert_not_fused(&a->rule) == NULL && a->pre.dtype == DT_BF16 && aligned16(&a->pre) &&
                      aligned16(&a->dpre) && absent_or_aligned16(&a->y);
    if (!one_kernel || !gmm8_tma_fits(l, &p))
        return expert8_down_bwd_by(&parts, l, a);
    TRY(gmm8_tma(l, &p));
    return p.j.part != NULL ? gmm_tma_dprob(l, &p.j, (float *)a->dprob.data) : ST_OK;
}
