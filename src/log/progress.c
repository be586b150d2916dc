/* The line a user watches: redrawn in place on a terminal, plain lines elsewhere. See log_int.h. */
#include "log/log_int.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static const double redraw_every = 0.1; /* seconds; a fast run would otherwise spend time on drawing */
static const double smoothing = 0.95;   /* of the step time, for the time left */

const char *short_count(double n, char *out, size_t size)
{
    static const char unit[] = {'k', 'M', 'G', 'T', 'P'};
    int i = -1;
    while (fabs(n) >= 999.5 && i < countof(unit) - 1) {
        n /= 1000;
        i++;
    }
    if (i < 0)
        snprintf(out, size, "%.3g", n);
    else
        snprintf(out, size, "%.*f%c", fabs(n) < 9.995 ? 2 : fabs(n) < 99.95 ? 1 : 0, n, unit[i]);
    return out;
}

void progress_init(struct progress *p, const struct log_opts *o)
{
    *p = (struct progress){
        .out = o->out != NULL ? o->out : stderr,
        .mode = o->progress,
        .total = o->total_steps,
        .log_every = o->log_every > 0 ? o->log_every : 1,
        .first = true,
        .val = NAN,
        .last_step = -1,
    };
    if (p->mode == LOG_PROGRESS_AUTO)
        p->mode = isatty(fileno(p->out)) ? LOG_PROGRESS_LINE : LOG_PROGRESS_PLAIN;
}

/* Seconds per step, smoothed. The first record only starts the clock: the step before it holds
 * start-up work (page faults, tuning) that later steps do not repeat. */
static void update_clock(struct progress *p, const struct step_record *r)
{
    if (p->last_step >= 0 && r->step > p->last_step && r->elapsed >= p->last_elapsed) {
        double now = (r->elapsed - p->last_elapsed) / (double)(r->step - p->last_step);
        p->step_time = smoothing * p->step_time + (1 - smoothing) * now;
        p->weight = smoothing * p->weight + (1 - smoothing);
    }
    p->last_step = r->step;
    p->last_elapsed = r->elapsed;
}

static void add(char *out, size_t size, const char *fmt, ...) PRINTF_LIKE(3, 4);
static void add(char *out, size_t size, const char *fmt, ...)
{
    size_t used = strlen(out);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(out + used, size - used, fmt, ap);
    va_end(ap);
}

void progress_text(const struct progress *p, const struct step_record *r, char *out, size_t size)
{
    char text[32];
    out[0] = '\0';
    if (p->total > 0) {
        int width = snprintf(text, sizeof text, "%" PRId64, p->total);
        add(out, size, "step %*" PRId64 "/%" PRId64, width, r->step, p->total);
    } else {
        add(out, size, "step %6" PRId64, r->step);
    }
    add(out, size, " | loss %.4f", r->loss);
    if (!isnan(p->val))
        add(out, size, " | val %.4f", p->val);
    add(out, size, " | lr %.1e", r->lr);
    if (!(r->grad_norm < 0))
        add(out, size, " | norm %.2f", r->grad_norm);
    if (r->skipped)
        add(out, size, " | SKIPPED");
    if (r->tokens_per_s > 0)
        add(out, size, " | %s tok/s", short_count(r->tokens_per_s, text, sizeof text));
    if (r->mfu > 0)
        add(out, size, " | %.*f%% peak", r->mfu < 9.95 ? 1 : 0, r->mfu);
    if (p->total > r->step && p->weight > 0) {
        double left = p->step_time / p->weight * (double)(p->total - r->step);
        if (left < 60)
            add(out, size, " | ETA %.0fs", left);
        else
            add(out, size, " | ETA %s", human_time(left, text, sizeof text));
    } else if (p->total > 0 && r->step >= p->total) {
        add(out, size, " | %s", human_time(r->elapsed, text, sizeof text));
    }
}

/* A line longer than the screen would wrap and could not be redrawn in place. */
static void cut_to_screen(const struct progress *p, char *line)
{
    struct winsize w;
    if (ioctl(fileno(p->out), TIOCGWINSZ, &w) == 0 && w.ws_col > 1 && strlen(line) >= w.ws_col)
        line[w.ws_col - 1] = '\0';
}

void progress_step(struct progress *p, const struct step_record *r)
{
    char line[256];
    update_clock(p, r);
    bool last = p->total > 0 && r->step >= p->total;
    bool must = p->first || last || !isfinite(r->loss) || r->skipped;
    if (p->mode == LOG_PROGRESS_PLAIN && (must || r->step % p->log_every == 0)) {
        progress_text(p, r, line, sizeof line);
        fprintf(p->out, "%s\n", line);
        fflush(p->out);
    } else if (p->mode == LOG_PROGRESS_LINE) {
        double now = time_now();
        if (must || now - p->drawn_at >= redraw_every) {
            progress_text(p, r, line, sizeof line);
            cut_to_screen(p, line);
            fprintf(p->out, "\r%s\033[K", line);
            fflush(p->out);
            p->drawn = true;
            p->drawn_at = now;
        }
    }
    p->first = false;
}

void progress_break(struct progress *p)
{
    if (p->drawn)
        fputc('\n', p->out);
    fflush(p->out);
    p->drawn = false;
}

static void clear_line(struct progress *p)
{
    if (p->drawn)
        fputs("\r\033[K", p->out);
    p->drawn = false;
    p->drawn_at = 0; /* draw again at the next step */
}

void progress_note(struct progress *p, const char *fmt, ...)
{
    if (p->mode == LOG_PROGRESS_OFF)
        return;
    clear_line(p);
    va_list ap;
    va_start(ap, fmt);
    vfprintf(p->out, fmt, ap);
    va_end(ap);
    fputc('\n', p->out);
    fflush(p->out);
}

void progress_eval(struct progress *p, const struct eval_record *r)
{
    p->val = r->loss;
    char steps[64] = "", bpb[48] = "";
    if (p->total > 0) {
        int width = snprintf(steps, sizeof steps, "%" PRId64, p->total);
        snprintf(steps, sizeof steps, "%*" PRId64 "/%" PRId64, width, r->step, p->total);
    } else {
        snprintf(steps, sizeof steps, "%6" PRId64, r->step);
    }
    if (r->bits_per_byte != 0)
        snprintf(bpb, sizeof bpb, " | %.4f bits/byte", r->bits_per_byte);
    progress_note(p, "eval %s | val  %.4f%s | ppl %.2f", steps, r->loss, bpb, log_perplexity(r->loss));
}
