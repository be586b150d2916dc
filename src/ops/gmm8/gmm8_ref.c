/* gmm8, reference: codes decoded to double, then gmm; see gmm8.h. */
#include "ops/gmm8/gmm8_int.h"
#include "ops/ops_ref_int.h"

static void decode(const struct tensor *codes, const struct tensor *scales, int64_t block, bool square, bool transposed,
                   int64_t matrices, void *out)
{
    const uint8_t *code = codes->data;
    const double *scale = scales->data;
    for (int64_t r = 0; r < codes->dim[0]; r++)
        for (int64_t c = 0; c < codes->dim[1]; c++)
            ((double *)out)[gmm8_place(codes, transposed, matrices, r, c)] =
                (double)f8_to_f32(code[r * codes->dim[1] + c], codes->dtype) *
                scale[f8_scale_at(codes, block, square, r, c)];
}

static const struct gmm8_parts parts = {DT_F64, gmm_fwd_ref, gmm_bwd_ref, decode};

int64_t gmm8_work_ref(const struct gmm8_args *a) { return gmm8_work_by(a, DT_F64); }
int64_t gmm8_dw_work_ref(const struct gmm8_dw_args *a) { return gmm8_dw_work_by(a, DT_F64); }
int gmm8_ref(struct lane *l, const struct gmm8_args *a) { return gmm8_by(&parts, l, a); }
int gmm8_dw_ref(struct lane *l, const struct gmm8_dw_args *a) { return gmm8_dw_by(&parts, l, a); }
