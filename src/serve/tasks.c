/* Multiple-choice tasks from a file of JSON lines: which continuation does the model find likeliest? */
#include "serve/serve_int.h"

#include <stdlib.h>
#include <string.h>

/* ---- scoring --------------------------------------------------------------------------------- */

struct pass {
    struct scorer *s;
    const struct task_opts *o;
    struct task_result *r;
    struct token_score *scores; /* s->length of them */
    double *logprob;            /* of each continuation of a line */
    bool *greedy;
    size_t cap_logprob, cap_greedy;
    int64_t tokens_done;
    struct buf out;
    bool score; /* second pass: the first only reads, so that a bad line is found before hours of work */
};

/* Where the sequence is too long, the context loses its beginning. */
static int score_continuation(struct pass *p, const struct task *t, int k, struct err *e)
{
    const struct token_ids *ids = &t->sequence[k];
    int64_t skip = max_i64((int64_t)ids->n - p->s->length, 0), n = (int64_t)ids->n - skip,
            from = t->n_context[k] - skip;
    struct tensor last;
    TRY(scorer_begin(p->s, ids->ids + skip, n, from, 1, p->scores, &last, e));
    p->logprob[k] = 0;
    p->greedy[k] = true;
    for (int64_t i = from; i < n; i++) {
        p->logprob[k] += p->scores[i].logprob;
        p->greedy[k] = p->greedy[k] && p->scores[i].logprob == p->scores[i].top[0].logprob;
    }
    p->tokens_done += n;
    p->r->cut += skip > 0;
    if (p->o->progress != NULL)
        p->o->progress(p->o->ctx, p->tokens_done, p->r->tokens);
    return ST_OK;
}

static void write_line(struct pass *p, const struct task *t, int64_t number, int best, int best_norm)
{
    struct buf *b = &p->out;
    buf_addf(b, "{\"line\": %lld, \"label\": ", (long long)number);
    if (t->label >= 0)
        buf_addf(b, "%lld", (long long)t->label);
    else
        buf_add(b, "null");
    buf_addf(b, ", \"chosen\": %d, \"chosen_norm\": %d, \"logprobs\": [", best, best_norm);
    for (int k = 0; k < t->n; k++)
        buf_addf(b, "%s%.17g", k ? ", " : "", p->logprob[k]);
    buf_add(b, "], \"greedy\": [");
    for (int k = 0; k < t->n; k++)
        buf_addf(b, "%s%s", k ? ", " : "", p->greedy[k] ? "true" : "false");
    buf_add(b, "], \"tokens\": [");
    for (int k = 0; k < t->n; k++)
        buf_addf(b, "%s%lld", k ? ", " : "", (long long)((int64_t)t->sequence[k].n - t->n_context[k]));
    buf_add(b, "], \"bytes\": [");
    for (int k = 0; k < t->n; k++)
        buf_addf(b, "%s%lld", k ? ", " : "", (long long)t->bytes[k]);
    buf_add(b, "]}\n");
}

static int score_task(struct pass *p, const struct task *t, int64_t number, struct err *e)
{
    int best = 0, best_norm = 0;
    TRY(mem_grow((void **)&p->logprob, &p->cap_logprob, (size_t)t->n, sizeof *p->logprob, e));
    TRY(mem_grow((void **)&p->greedy, &p->cap_greedy, (size_t)t->n, sizeof *p->greedy, e));
    for (int k = 0; k < t->n; k++) {
        TRY(score_continuation(p, t, k, e));
        best = p->logprob[k] > p->logprob[best] ? k : best;
        best_norm =
            p->logprob[k] / (double)t->bytes[k] > p->logprob[best_norm] / (double)t->bytes[best_norm] ? k : best_norm;
    }
    if (t->label >= 0) {
        p->r->labelled++;
        p->r->right += best == t->label;
        p->r->right_norm += best_norm == t->label;
        p->r->logprob += p->logprob[t->label];
    }
    if (p->o->out != NULL)
        write_line(p, t, number, best, best_norm);
    return buf_check(&p->out, e);
}

static int one_line(struct pass *p, const char *line, size_t n, int64_t number, struct err *e)
{
    struct task t;
    int st = task_read(p->s, &t, line, n, e);
    if (st == ST_OK && p->score)
        st = score_task(p, &t, number, e);
    else if (st == ST_OK) {
        p->r->lines++;
        p->r->continuations += t.n;
        for (int k = 0; k < t.n; k++)
            p->r->tokens += min_i64((int64_t)t.sequence[k].n, p->s->length);
    }
    task_release(&t);
    return st;
}

static int all_lines(struct pass *p, const struct file_map *m, struct err *e)
{
    int64_t number = 0;
    for (const char *at = (const char *)m->data, *end = at + m->size; at < end;) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t n = (size_t)((stop != NULL ? stop : end) - at);
        number++;
        if (task_without_spaces(at, n) > 0 && one_line(p, at, n, number, e) != ST_OK) {
            struct err inner = *e;
            err_set(e, inner.code, "%s, line %lld: %s%s%.300s", p->o->path, (long long)number, inner.trail,
                    inner.trail[0] ? ": " : "", inner.msg);
            return inner.hint[0] ? err_hint(e, "%s", inner.hint) : (int)inner.code;
        }
        at += n + 1;
    }
    return ST_OK;
}

int tasks_run(struct scorer *s, const struct task_opts *o, struct task_result *r, struct err *e)
{
    struct pass p = {.s = s, .o = o, .r = r};
    struct file_map m = {0};
    int st;
    *r = (struct task_result){0};
    buf_init(&p.out, 0);
    TRY_OUT(file_map_open(&m, o->path, e));
    TRY_OUT(mem_array((void **)&p.scores, (size_t)s->length, sizeof *p.scores, e));
    if (m.data != NULL)
        TRY_OUT(all_lines(&p, &m, e));
    if (r->lines == 0) {
        st = err_set(e, ST_INVALID, "%s holds no task", o->path);
        goto out;
    }
    p.score = true;
    TRY_OUT(all_lines(&p, &m, e));
    if (o->out != NULL)
        st = file_write_atomic(o->out, p.out.text, p.out.len, e);
out:
    file_map_close(&m);
    buf_release(&p.out);
    free(p.scores);
    free(p.logprob);
    free(p.greedy);
    return st;
}
