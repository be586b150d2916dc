/* Learning-rate schedules; see schedule.h. */
#include "optim/schedule.h"

#include <inttypes.h>
#include <math.h>

static const double pi = 3.14159265358979323846;

int lr_schedule_check(const struct lr_schedule *s, struct err *e)
{
    if (s->kind < LR_CONSTANT || s->kind > LR_WSD)
        return err_set(e, ST_INVALID, "learning-rate schedule: unknown kind %d", (int)s->kind);
    if (!isfinite(s->max) || !isfinite(s->min) || !isfinite(s->init))
        return err_set(e, ST_INVALID, "learning rates must be finite: max %g, min %g, init %g", s->max, s->min,
                       s->init);
    if (s->min < 0 || s->init < 0 || s->max < s->min || s->max < s->init) {
        err_set(e, ST_INVALID, "learning rates max %g, min %g, init %g are out of order", s->max, s->min, s->init);
        return err_hint(e, "0 <= min <= max and 0 <= init <= max must hold");
    }
    if (s->warmup < 0)
        return err_set(e, ST_INVALID, "warm-up of %" PRId64 " updates is negative", s->warmup);
    if (s->kind == LR_CONSTANT)
        return ST_OK;
    if (s->decay <= s->warmup) {
        err_set(e, ST_INVALID, "the schedule ends at update %" PRId64 ", not after its warm-up of %" PRId64 " updates",
                s->decay, s->warmup);
        return err_hint(e, "shorten the warm-up or train for more steps");
    }
    if (s->kind != LR_WSD)
        return ST_OK;
    if (s->wsd_style < LR_WSD_LINEAR || s->wsd_style > LR_WSD_MINUS_SQRT)
        return err_set(e, ST_INVALID, "learning-rate schedule: unknown WSD style %d", (int)s->wsd_style);
    if (s->wsd < 1 || s->wsd > s->decay - s->warmup) {
        err_set(e, ST_INVALID,
                "a WSD tail of %" PRId64 " updates does not fit between warm-up (%" PRId64 ") and end (%" PRId64 ")",
                s->wsd, s->warmup, s->decay);
        return err_hint(e, "a tail of 20%% of the run, %" PRId64 " updates, is usual", s->decay > 5 ? s->decay / 5 : 1);
    }
    return ST_OK;
}

static double wsd_tail(enum lr_wsd_style style, double x)
{
    switch (style) {
    case LR_WSD_LINEAR: return 1 - x;
    case LR_WSD_COSINE: return 0.5 * (cos(pi * x) + 1);
    case LR_WSD_EXPONENTIAL: return 2 * pow(0.5, x) - 1;
    case LR_WSD_MINUS_SQRT: return 1 - sqrt(x);
    }
    return 1;
}

double lr_at(const struct lr_schedule *s, int64_t step)
{
    if (step < 0)
        step = 0;
    if (step < s->warmup)
        return s->init + (s->max - s->init) * (double)(step + 1) / (double)s->warmup;
    if (s->kind == LR_CONSTANT)
        return s->max;
    if (step >= s->decay)
        return s->min;
    double coef = 1;
    if (s->kind == LR_WSD) {
        int64_t start = s->decay - s->wsd;
        if (step > start)
            coef = wsd_tail(s->wsd_style, (double)(step - start) / (double)s->wsd);
    } else {
        double ratio = (double)(step - s->warmup) / (double)(s->decay - s->warmup);
        coef = s->kind == LR_COSINE ? 0.5 * (cos(pi * ratio) + 1) : 1 - ratio;
    }
    return s->min + coef * (s->max - s->min);
}
