/* Learning-rate schedules: the rate of an update is a pure function of its number, so resuming
 * needs no scheduler state. */
#ifndef BRAID_OPTIM_SCHEDULE_H
#define BRAID_OPTIM_SCHEDULE_H

#include "base/err.h"

#include <stdint.h>

enum lr_kind {
    LR_CONSTANT, /* max after the warm-up, for ever */
    LR_LINEAR,
    LR_COSINE,
    LR_WSD, /* warm-up, stable, decay: max until the last `wsd` updates before `decay` */
};

/* Shape of the WSD tail, from 1 to 0 as x goes from 0 to 1. */
enum lr_wsd_style {
    LR_WSD_LINEAR,      /* 1 - x */
    LR_WSD_COSINE,      /* (cos(pi x) + 1) / 2 */
    LR_WSD_EXPONENTIAL, /* 2 * 0.5^x - 1 */
    LR_WSD_MINUS_SQRT,  /* 1 - sqrt(x) */
};

/* All counts are optimizer updates. Updates 0 .. warmup-1 warm up; from update `decay` on the rate
 * is min (except LR_CONSTANT). Megatron counts samples and asks before it counts, so its first
 * update has rate `init`, usually 0, and changes nothing; here update s of the warm-up gets
 * init + (max - init) * (s + 1) / warmup: the first already moves, update warmup-1 has max. */
struct lr_schedule {
    enum lr_kind kind;
    enum lr_wsd_style wsd_style;
    double max, min, init;
    int64_t warmup, decay, wsd;
};

int lr_schedule_check(const struct lr_schedule *s, struct err *e);
/* Rate of update number `step`, counted from 0. Defined for a schedule that passed the check. */
double lr_at(const struct lr_schedule *s, int64_t step);

#endif
