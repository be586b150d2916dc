/* Signs that a run does not learn, reported once per spell: a loss far above where it began, gradients that are all
 * zero.
 */
#include "log/log_int.h"

#include <inttypes.h>
#include <math.h>

enum { PATIENCE = 10 };              /* steps in a row: one bad batch is no divergence */
static const double far_above = 1.0; /* nats per token */

void watch_start(struct watch *w, double first_loss) { *w = (struct watch){.first_loss = first_loss}; }

static bool loss_diverged(struct watch *w, const struct step_record *r)
{
    if (isnan(w->first_loss) && isfinite(r->loss))
        w->first_loss = r->loss;
    if (!isfinite(r->loss)) /* told by train.nonfinite */
        return false;
    if (r->loss <= w->first_loss)
        w->told_loss = false;
    w->above = r->loss > w->first_loss + far_above ? w->above + 1 : 0;
    if (w->above < PATIENCE || w->told_loss)
        return false;
    w->told_loss = true;
    return true;
}

static bool gradients_vanished(struct watch *w, const struct step_record *r)
{
    bool zero = r->grad_norm == 0 && !r->skipped, news = zero && !w->told_zero;
    w->told_zero = zero;
    return news;
}

bool watch_step(struct watch *w, const struct step_record *r, char *out, size_t size)
{
    out[0] = '\0';
    if (loss_diverged(w, r))
        snprintf(out, size,
                 "the run has diverged: at step %" PRId64
                 " the loss is %.4f, it began at %.4f; lower train.lr or raise train.warmup",
                 r->step, r->loss, w->first_loss);
    else if (gradients_vanished(w, r))
        snprintf(out, size,
                 "all gradients of step %" PRId64
                 " are zero: nothing is learned from it; is every label masked, or the loss saturated?",
                 r->step);
    return out[0] != '\0';
}
