/* The products of experts on Hopper, as gmm.cu and expert.cu ask for them: one block per multiprocessor walks over
 * tiles of the output, one thread copies operands into a ring of stages with bulk copies (TMA), two groups of four
 * warps multiply with wgmma and store. gmm_form.h says how tiles are cut; gmm_feed.cuh copies and multiplies,
 * gmm_store.cuh stores, gmm_tma.cu has the kernel. */
#ifndef BRAID_OPS_GMM_TMA_CUH
#define BRAID_OPS_GMM_TMA_CUH

#include "ops/cuda/hopper.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/gmm/gmm_cuda.cuh"
extern "C" {
#include "ops/gmm/gmm_form.h"
}

struct gmm_tma_job {
    struct gmm_job g; /* across of ACT and DACT: the width f of the activation */
    enum gmm_after after;
    int kind; /* ACT, DACT: enum gmm_curve */
    float limit, alpha, offset;
    bf16 *pre, *act; /* ACT writes pre, DACT reads it (may be c); act may be NULL */
    int64_t ldpre, ldact;
    float *part; /* DACT: [column tiles][rows]; NULL: not wanted */
};
/* x sigmoid(alpha x) (up + offset); limits only where clamped */
enum gmm_curve { GMM_RELU2, GMM_GATE, GMM_CLAMPED_GATE };

/* Columns of pre. */
static inline int64_t gmm_pre_columns(const struct gmm_tma_job *j)
{
    return (j->kind == GMM_RELU2 ? 1 : 2) * (int64_t)j->g.across;
}

/* gmm_tma.cu. Whether these kernels take the job: bf16, all rows at multiples of 16 bytes is for the caller to know. */
extern "C" bool gmm_tma_fits(const struct lane *l, const struct gmm_tma_job *j);
extern "C" int gmm_tma(struct lane *l, const struct gmm_tma_job *j, enum gmm_product product);
/* DACT, after it: dprob from part. */
extern "C" int gmm_tma_dprob(struct lane *l, const struct gmm_tma_job *j, float *dprob);

#endif
