/* The best meshes and policies for a number of GPUs; see search.h.
 *
 * The model is planned once on one rank for each size of microbatch and policy: seconds and bytes of a microbatch. From
 * these a candidate is estimated with the formulas that everybody uses (bubbles of a pipeline, exchanges over links,
 * shards of the state), a few microseconds each. The best are planned exactly, one rank of each stage, with as many
 * microbatches as fill the pipeline, and simulated; what is printed is their result. */
#include "sim/search.h"
#include "sim/fit.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_ATTEMPTS = 4096, MICROS = 4, POLICIES = 4 };
/* Steps that are planned for simulations: a few seconds of one core. */
enum { MOST_STEPS = 600000 };

/* Policies of activations, cheapest first. */
static const struct policy_row {
    const char *name, *recompute, *block;
} policies[POLICIES] = {
    {"keep all", "", "off"},
    {"norms", "norm", "off"},
    {"full", "full", "off"},
    {"full, blocks", "full", "auto"}, /* with hyper-connections */
};

/* One microbatch of the whole model on one rank. */
struct piece {
    bool known;
    double seconds, update;
    int64_t saved, work;
};
struct attempt {
    int pp, vpp, ep, zero, policy;
    int64_t micro, n_mb;
    bool overlap;
    double estimate, seconds; /* of a step: estimated, simulated */
    int64_t bytes;
    bool simulated;
};
struct finder {
    const struct config *given;
    struct config c;
    const struct machine *m;
    const struct search_opts *o;
    char *pattern;
    int items, expert_layers, layers;
    double weights, expert_weights; /* elements; those of experts apart */
    double flops;                   /* of a token, forward and backward */
    int64_t global;
    struct piece piece[MICROS][POLICIES];
    struct attempt *list;
    int n;
    size_t cap;
    int refused_batch, refused_items, refused_rules, too_large;
    int64_t planned; /* steps of the plans that were made for simulations */
    struct err *e;
};
static const int64_t micro_sizes[MICROS] = {1, 2, 4, 8};

static int set_number(struct config *c, const char *name, int64_t v, struct err *e)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)v);
    return config_set(c, name, text, NULL, e);
}

static int set_policy(struct finder *f, int policy, int64_t micro)
{
    TRY(config_set(&f->c, "plan.recompute_granularity", "none", NULL, f->e));
    TRY(config_set(&f->c, "plan.recompute", policies[policy].recompute, NULL, f->e));
    TRY(config_set(&f->c, "plan.recompute_block", policies[policy].block, NULL, f->e));
    return set_number(&f->c, "train.micro_batch", micro, f->e);
}

static int set_mesh(struct finder *f, const struct attempt *k, int64_t n_mb)
{
    struct buf cut;
    buf_init(&cut, 0);
    int st = config_set(&f->c, "model.pattern", f->pattern, NULL, f->e);
    if (st == ST_OK && k->pp * k->vpp > 1)
        st = timeline_cut_pattern(&f->c, k->pp, k->vpp, 0, &cut, f->e);
    if (st == ST_OK && cut.len > 0)
        st = config_set(&f->c, "model.pattern", cut.text, NULL, f->e);
    buf_release(&cut);
    TRY(st);
    TRY(set_number(&f->c, "parallel.ranks", (int64_t)k->pp * (k->pp == 1 && k->zero < 0 ? 1 : f->o->gpus / k->pp),
                   f->e));
    TRY(set_number(&f->c, "parallel.tp", 1, f->e)); /* neither is searched */
    TRY(set_number(&f->c, "parallel.cp", 1, f->e));
    TRY(set_number(&f->c, "parallel.pp", k->pp, f->e));
    TRY(set_number(&f->c, "parallel.vpp", k->vpp, f->e));
    TRY(set_number(&f->c, "parallel.ep", k->ep, f->e));
    TRY(set_number(&f->c, "parallel.zero", k->zero < 0 ? 0 : k->zero, f->e));
    TRY(config_set(&f->c, "parallel.overlap", k->overlap ? "ep" : "none", NULL, f->e));
    int64_t dp = k->zero < 0 ? 1 : f->o->gpus / k->pp;
    return set_number(&f->c, "train.global_batch", n_mb * k->micro * dp, f->e);
}

/* ---- one rank with the whole model ----------------------------------------------------------- */

static void count_weights(struct finder *f, const struct trainer *t)
{
    f->weights = f->expert_weights = 0;
    for (int k = 0; k < t->model.params.n; k++) {
        const struct param *p = &t->model.params.list[k].p;
        *(p->expert ? &f->expert_weights : &f->weights) += (double)param_elems(p);
    }
    f->flops = 3 * model_flops_per_token(t->cfg, &t->model.pattern, t->cfg->train.seq);
    f->items = t->model.pattern.n_items;
    f->layers = t->model.pattern.n_layers;
    f->expert_layers = 0;
    for (int i = 0; i < f->layers; i++)
        f->expert_layers += t->model.pattern.symbols[i] == 'E';
}

static int measure_piece(struct finder *f, int micro, int policy)
{
    struct piece *p = &f->piece[micro][policy];
    const struct attempt alone = {.pp = 1, .vpp = 1, .ep = 1, .zero = -1, .micro = micro_sizes[micro]};
    struct timeline tl = {0};
    TRY(set_policy(f, policy, alone.micro));
    TRY(set_mesh(f, &alone, 1));
    int st = timeline_open(&tl, &f->c, f->m, NULL, f->e);
    if (st == ST_OK) {
        const struct trainer *t = &tl.rank[0].t;
        count_weights(f, t);
        *p = (struct piece){.known = true,
                            .seconds = tl.train.sim.makespan,
                            .update = tl.update.sim.makespan,
                            .saved = t->train.p.frame_bytes,
                            .work = max_i64(t->train.p.work_bytes, t->eval.p.work_bytes)};
    }
    timeline_close(&tl);
    return st;
}

/* ---- estimates ------------------------------------------------------------------------------- */

static double at_least_0(double x) { return x > 0 ? x : 0; }

/* Elements of weights on one rank. */
static double weights_of(const struct finder *f, const struct attempt *k)
{
    return (f->weights + f->expert_weights / k->ep) / k->pp;
}

static void estimate(const struct finder *f, struct attempt *k, const struct piece *p)
{
    int dp = f->o->gpus / k->pp;
    double w = weights_of(f, k), stages = k->pp;
    double uneven = (double)((f->items + k->pp - 1) / k->pp) * k->pp / f->items;
    double stage = p->seconds / stages * uneven;
    double copies = f->expert_layers > 0 ? k->ep * tokens_on_rank(&f->given->model, k->ep) : 0, /* of a token */
        rows = (double)(k->micro * f->given->train.seq) * copies * (double)f->given->model.hidden * 2;
    double exchanges =
        4 * (double)f->expert_layers / stages * machine_exchange(f->m, k->ep, rows) * (k->overlap ? 0.3 : 1);
    double step = (stage + exchanges) * ((double)k->n_mb + (stages - 1) / k->vpp);
    double reduce = dp > 1 ? machine_exchange(f->m, dp, 4 * w) : 0,
           gather = dp > 1 ? machine_exchange(f->m, dp, 2 * w) : 0;
    if (k->zero == 3) /* in every microbatch */
        step += at_least_0((2 * gather + reduce - stage) * (double)k->n_mb);
    else if (k->zero == 2)
        step += at_least_0((reduce - 0.6 * stage) * (double)k->n_mb) + at_least_0(gather - 0.3 * stage);
    else
        step += at_least_0(reduce - 0.6 * stage) + at_least_0(gather - 0.3 * stage);
    k->estimate = step + p->update / stages / (k->zero > 0 ? dp : 1);
    double kept = k->n_mb < k->pp ? (double)k->n_mb : stages * (1 + (k->vpp > 1 ? (stages - 1) / stages / k->vpp : 0));
    double state = 2 * w / (k->zero == 3 ? dp : 1) + 4 * w / (k->zero >= 2 ? dp : 1) + 12 * w / (k->zero >= 1 ? dp : 1);
    k->bytes = (int64_t)(state + (double)p->saved / stages * kept + (double)p->work);
}

static int add_attempt(struct finder *f, const struct attempt *k)
{
    if (f->n == MOST_ATTEMPTS)
        return ST_OK;
    TRY(mem_grow((void **)&f->list, &f->cap, (size_t)f->n + 1, sizeof *f->list, f->e));
    f->list[f->n++] = *k;
    return ST_OK;
}

/* Every size of microbatch and policy on this mesh. */
static int add_mesh(struct finder *f, struct attempt k)
{
    int64_t dp = f->o->gpus / k.pp;
    for (int i = 0; i < MICROS; i++) {
        k.micro = micro_sizes[i];
        k.n_mb = f->global / (k.micro * dp);
        if (f->global % (k.micro * dp) != 0 || (k.vpp > 1 && k.n_mb < k.pp)) {
            f->refused_batch++;
            continue;
        }
        for (k.policy = 0; k.policy < POLICIES; k.policy++) {
            if (k.policy == 3 && f->given->model.mhc_streams == 0)
                continue;
            if (!f->piece[i][k.policy].known)
                TRY(measure_piece(f, i, k.policy));
            estimate(f, &k, &f->piece[i][k.policy]);
            if ((double)k.bytes > 1.15 * f->o->budget) {
                f->too_large++;
                continue;
            }
            TRY(add_attempt(f, &k));
            if ((double)k.bytes < 0.85 * f->o->budget) /* recomputing more would only take longer */
                break;
        }
    }
    return ST_OK;
}

static int add_all(struct finder *f)
{
    int64_t experts = f->expert_layers > 0 ? f->given->model.experts : 1;
    for (int pp = 1; pp <= f->o->gpus; pp++)
        for (int vpp = 1; f->o->gpus % pp == 0 && vpp <= (pp > 1 ? 2 : 1); vpp++)
            for (int ep = 1; ep <= f->o->gpus / pp; ep++)
                for (int zero = 1; zero <= 3; zero++) {
                    bool overlap = ep > 1 && (pp == 1 || vpp > 1);
                    if (f->o->gpus / pp % ep != 0 || experts % ep != 0)
                        continue;
                    if (f->items < pp * vpp) {
                        f->refused_items++;
                        continue;
                    }
                    if (zero == 3 && pp > 1) { /* weights of every virtual stage would be gathered again and again */
                        f->refused_rules++;
                        continue;
                    }
                    TRY(add_mesh(f,
                                 (struct attempt){.pp = pp, .vpp = vpp, .ep = ep, .zero = zero, .overlap = overlap}));
                }
    return ST_OK;
}

static int by_estimate(const void *a, const void *b)
{
    const struct attempt *x = a, *y = b;
    return (x->estimate > y->estimate) - (x->estimate < y->estimate);
}

static int by_seconds(const void *a, const void *b)
{
    const struct attempt *x = a, *y = b;
    if (x->simulated != y->simulated)
        return x->simulated ? -1 : 1;
    return x->simulated ? (x->seconds > y->seconds) - (x->seconds < y->seconds) : by_estimate(a, b);
}

/* ---- exact ----------------------------------------------------------------------------------- */

/* More microbatches than fill the pipeline repeat what these do. */
static int simulate(struct finder *f, struct attempt *k)
{
    int64_t shown = min_i64(k->n_mb, k->pp > 1 ? 2 * (int64_t)k->pp : 2);
    struct timeline tl = {0};
    struct err why = {0};
    if (k->vpp > 1) /* whole groups */
        shown = max_i64(k->pp, shown - shown % k->pp);
    TRY(set_policy(f, k->policy, k->micro));
    TRY(set_mesh(f, k, shown));
    int st = timeline_open(&tl, &f->c, f->m, NULL, &why);
    k->simulated = st == ST_OK;
    for (int r = 0; st == ST_OK && r < tl.n; r++)
        f->planned += tl.rank[r].t.train.p.n_steps;
    if (st == ST_OK) {
        double stage = tl.train.sim.makespan / ((double)shown + (double)(k->pp - 1) / k->vpp);
        k->seconds = tl.seconds + stage * (double)(k->n_mb - shown);
        k->bytes = 0;
        for (int r = 0; r < tl.n; r++)
            k->bytes = max_i64(k->bytes, memory_total(&tl.rank[r].t.model.mem, tl.rank[r].t.model.mem.planned, false));
    } else {
        f->refused_rules++;
    }
    timeline_close(&tl);
    if (st == ST_USAGE || st == ST_OK || st == ST_INVALID) /* a rule or a schedule refuses it */
        return ST_OK;
    *f->e = why;
    return st;
}

/* ---- the table ------------------------------------------------------------------------------- */

static void print_row(const struct finder *f, const struct attempt *k, struct buf *out)
{
    char memory[32];
    double rate = (double)(f->global * f->given->train.seq) / k->seconds;
    buf_addf(out, "%9.1f %12.0f %7.0f %11s", k->seconds * 1e3, rate, rate * f->flops / f->o->gpus * 1e-12,
             human_bytes((double)k->bytes, memory, sizeof memory));
    if (f->o->tokens > 0)
        buf_addf(out, " %9.1f", f->o->tokens / rate / 86400);
    buf_addf(out, "  --parallel.pp=%d --parallel.vpp=%d --parallel.ep=%d --parallel.zero=%d --train.micro_batch=%lld",
             k->pp, k->vpp, k->ep, k->zero, (long long)k->micro);
    if (k->overlap)
        buf_add(out, " --parallel.overlap=ep");
    if (policies[k->policy].recompute[0] != '\0')
        buf_addf(out, " --plan.recompute=%s", policies[k->policy].recompute);
    if (strcmp(policies[k->policy].block, "off") != 0)
        buf_addf(out, " --plan.recompute_block=%s", policies[k->policy].block);
    buf_add(out, "\n");
}

static void print_head(const struct finder *f, int meshes, struct buf *out)
{
    buf_addf(out, "PREDICTION: %d GPUs of %.3g GB, %lld sequences of %lld tokens a step\n", f->o->gpus,
             f->o->budget * 1e-9, (long long)f->global, (long long)f->given->train.seq);
    machine_print(f->m, false, out);
    buf_addf(
        out,
        "%d meshes and policies estimated; the best planned to the byte and simulated, one rank of each stage. "
        "Nothing is measured.\n"
        "left out: %d that train.global_batch does not divide into, %d with more stages than the pattern has items, "
        "%d refused by rules (parallel.zero=3 with stages), %d too large\n\n",
        meshes, f->refused_batch, f->refused_items, f->refused_rules, f->too_large);
    buf_addf(out, "%9s %12s %7s %11s", "ms/step", "tokens/s", "TFLOP/s", "memory");
    if (f->o->tokens > 0)
        buf_addf(out, " %9s", "days");
    buf_add(out, "  options\n");
}

/* The best of the list, planned: those that fit after all are printed, fastest first. */
static int show_best(struct finder *f, struct buf *out)
{
    enum { SHOWN = 10 };
    const struct attempt *best = NULL;
    int simulated = 0, fit = 0;
    int64_t least = INT64_MAX;
    char text[32];
    if (f->n > 0)
        qsort(f->list, (size_t)f->n, sizeof *f->list, by_estimate);
    for (int i = 0; i < f->n && simulated < f->o->simulated && f->planned < MOST_STEPS; i++) {
        TRY(simulate(f, &f->list[i]));
        simulated += f->list[i].simulated;
    }
    if (f->n > 0)
        qsort(f->list, (size_t)f->n, sizeof *f->list, by_seconds);
    print_head(f, f->n + f->too_large, out);
    for (int i = 0; i < f->n && f->list[i].simulated; i++) {
        least = min_i64(least, f->list[i].bytes);
        if ((double)f->list[i].bytes > f->o->budget || fit == SHOWN)
            continue;
        best = fit == 0 ? &f->list[i] : best;
        print_row(f, &f->list[i], out);
        fit++;
    }
    if (best != NULL && best->pp * best->vpp > 1) {
        TRY(set_mesh(f, best, best->n_mb));
        buf_addf(out, "stages of the first: --model.pattern='%s'\n", f->c.model.pattern);
    }
    if (fit == 0 && simulated > 0)
        buf_addf(out, "none of those planned fits; the smallest needs %s\n",
                 human_bytes((double)least, text, sizeof text));
    else if (fit == 0)
        buf_add(out, "no mesh of so many GPUs fits; more GPUs or more memory would\n");
    return ST_OK;
}

static int strip_cuts(struct finder *f)
{
    char *to = f->pattern = strdup(f->given->model.pattern);
    if (f->pattern == NULL)
        return err_set(f->e, ST_NOMEM, "out of memory");
    for (const char *from = f->given->model.pattern; *from != '\0'; from++)
        if (*from != '|')
            *to++ = *from;
    *to = '\0';
    return ST_OK;
}

int search_print(const struct config *c, const struct machine *m, const struct search_opts *o, struct buf *out,
                 struct err *e)
{
    struct finder f = {.given = c, .m = m, .o = o, .global = c->train.global_batch, .e = e};
    int st = strip_cuts(&f);
    if (st == ST_OK)
        st = fit_copy_config(&f.c, c, e);
    if (st == ST_OK)
        st = measure_piece(&f, 0, 0);
    if (st == ST_OK)
        st = add_all(&f);
    if (st == ST_OK)
        st = show_best(&f, out);
    config_release(&f.c);
    free(f.pattern);
    free(f.list);
    return st;
}
