/* gmm8 on hosts, by way of gmm: codes are decoded, which is exact, and multiplied like other numbers. */
#ifndef BRAID_OPS_GMM8_INT_H
#define BRAID_OPS_GMM8_INT_H

#include "ops/check.h"
#include "ops/gmm/gmm.h"
#include "ops/gmm8/gmm8.h"
#include "ops/quantise/quantise.h"
#include "tensor/f8.h"

/* The values in scratch: two tensors of this many numbers. */
static inline int64_t gmm8_values_bytes(int64_t a, int64_t b, enum dtype wide)
{
    return (round_up(a, 32) + b) * (int64_t)dtype_bytes(wide);
}
static inline void *gmm8_second(void *work, int64_t a, enum dtype wide)
{
    return work == NULL ? NULL : (char *)work + round_up(a, 32) * (int64_t)dtype_bytes(wide);
}

struct gmm8_parts {
    enum dtype real; /* of the values: the device's wide type */
    int (*gmm_fwd)(struct lane *, const struct gmm_fwd_args *);
    int (*gmm_bwd)(struct lane *, const struct gmm_bwd_args *);
    /* codes [rows, cols] to out: at [r, c], or transposed at [c, r]; with `matrices` above 1 columns are that many
     * matrices side by side, which are put one below the other. */
    void (*decode)(const struct tensor *codes, const struct tensor *scales, int64_t block, bool square, bool transposed,
                   int64_t matrices, void *out);
};
int gmm8_by(const struct gmm8_parts *p, struct lane *l, const struct gmm8_args *a);
int gmm8_dw_by(const struct gmm8_parts *p, struct lane *l, const struct gmm8_dw_args *a);
int64_t gmm8_work_by(const struct gmm8_args *a, enum dtype wide);
int64_t gmm8_dw_work_by(const struct gmm8_dw_args *a, enum dtype wide);

/* Where the value of code [r, c] goes. */
static inline int64_t gmm8_place(const struct tensor *codes, bool transposed, int64_t matrices, int64_t r, int64_t c)
{
    int64_t each = codes->dim[1] / matrices;
    return transposed ? c * codes->dim[0] + r : (c / each * codes->dim[0] + r) * each + c % each;
}

#endif
