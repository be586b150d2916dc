/* gmm8, fast CPU version: codes decoded to fp32, then gmm; see gmm8.h. */
#include "ops/gmm8/gmm8_int.h"
#include "ops/ops_cpu_int.h"

static void decode(const struct tensor *codes, const struct tensor *scales, int64_t block, bool square, bool transposed,
                   int64_t matrices, void *out)
{
    int64_t rows = codes->dim[0], cols = codes->dim[1];
    const float *scale = scales->data;
    float table[256], *to = out;
    for (int i = 0; i < 256; i++)
        table[i] = f8_to_f32((uint8_t)i, codes->dtype);
#pragma omp parallel for schedule(static) if (rows * cols > 16384)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            to[gmm8_place(codes, transposed, matrices, r, c)] =
                table[((const uint8_t *)codes->data)[r * cols + c]] * scale[f8_scale_at(codes, block, square, r, c)];
}

static const struct gmm8_parts parts = {DT_F32, CPU_NAME(gmm_fwd_cpu), CPU_NAME(gmm_bwd_cpu), decode};

int64_t CPU_NAME(gmm8_work_cpu)(const struct gmm8_args *a) { return gmm8_work_by(a, DT_F32); }
int64_t CPU_NAME(gmm8_dw_work_cpu)(const struct gmm8_dw_args *a) { return gmm8_dw_work_by(a, DT_F32); }
int CPU_NAME(gmm8_cpu)(struct lane *l, const struct gmm8_args *a) { return gmm8_by(&parts, l, a); }
int CPU_NAME(gmm8_dw_cpu)(struct lane *l, const struct gmm8_dw_args *a) { return gmm8_dw_by(&parts, l, a); }
