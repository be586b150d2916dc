/* The best meshes and policies for a number of GPUs; see search.h.
 *
 * The model is planned once on one rank for each size of microbatch and policy: seconds and bytes of a microbatch. From
 * these a candidate is estimated with the formulas that everybody uses (bubbles of a pipeline, exchanges over links,
 * shards of the state), a few microseconds each. The best are planned exactly, one rank of each stage, with as many
 * microbatches as fill the pipeline, and simulated; what is printed is their result. */
#include "sim/search.h"
#include "sim/fit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ATTEMPTS = 65536, MICROS = 4, POLICIES = 4, MOST_REASONS = 8 };
/* Steps that are planned for simulations: a few seconds of one core. */
enum { MOST_STEPS = 2000000 };

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
    double attention; /* share of its seconds */
    int64_t saved, work;
};
struct attempt {
    int pp, vpp, tp, cp, ep, etp, zero, policy;
    int64_t micro, n_mb;
    bool overlap;
    double estimate, seconds; /* of a step: estimated, simulated */
    double guess;             /* estimated bytes */
    int64_t bytes;            /* the same, and exact once it is simulated */
    bool simulated;
    bool large;   /* not worth a plan unless nothing fits */
    bool refused; /* by its plan */
};
/* Why meshes are left out, each reason once. */
struct reason {
    char text[200];
    int n;
};
/* The pattern cut for a number of stages and virtual stages. */
struct cut {
    int pp, vpp;
    char *pattern;
};
struct finder {
    const struct config *given;
    struct config c;
    const struct machine *m;
    const struct search_opts *o;
    char *pattern;
    struct cut *cuts;
    int n_cuts;
    size_t cap_cuts;
    int items, expert_layers, attention_layers, layers;
    double weights, expert_weights; /* elements; those of experts apart */
    double flops;                   /* of a token, forward and backward */
    /* bytes on the device for each element: weights, gradients, and what the optimizer keeps */
    double weight_bytes, grad_bytes, state_bytes;
    int64_t global;
    struct piece piece[MICROS][POLICIES];
    struct attempt *list;
    int n;
    size_t cap;
    int refused_batch, refused_items, refused_rules, too_large;
    struct reason reason[MOST_REASONS];
    int n_reasons;
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

/* Ranks that share the batch. */
static int batch_ranks(const struct finder *f, const struct attempt *k) { return f->o->gpus / (k->pp * k->tp * k->cp); }

static int set_pattern(struct finder *f, int pp, int vpp)
{
    struct buf cut;
    for (int i = 0; i < f->n_cuts; i++)
        if (f->cuts[i].pp == pp && f->cuts[i].vpp == vpp)
            return config_set(&f->c, "model.pattern", f->cuts[i].pattern, NULL, f->e);
    TRY(config_set(&f->c, "model.pattern", f->pattern, NULL, f->e));
    TRY(mem_grow((void **)&f->cuts, &f->cap_cuts, (size_t)f->n_cuts + 1, sizeof *f->cuts, f->e));
    buf_init(&cut, 0);
    int st = pp * vpp > 1 ? timeline_cut_pattern(&f->c, pp, vpp, 0, &cut, f->e) : ST_OK;
    char *text = st == ST_OK ? strdup(pp * vpp > 1 ? cut.text : f->pattern) : NULL;
    buf_release(&cut);
    TRY(st);
    if (text == NULL)
        return err_set(f->e, ST_NOMEM, "out of memory");
    f->cuts[f->n_cuts++] = (struct cut){.pp = pp, .vpp = vpp, .pattern = text};
    return config_set(&f->c, "model.pattern", text, NULL, f->e);
}

static const char *overlap_of(const struct attempt *k) { return !k->overlap ? "none" : k->tp > 1 ? "tp" : "ep"; }

static int set_mesh(struct finder *f, const struct attempt *k, int64_t n_mb)
{
    bool alone = k->zero < 0;
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {
        {"parallel.ranks", alone ? 1 : f->o->gpus},
        {"parallel.tp", k->tp},
        {"parallel.cp", k->cp},
        {"parallel.etp", k->etp},
        {"parallel.pp", k->pp},
        {"parallel.vpp", k->vpp},
        {"parallel.ep", k->ep},
        {"parallel.zero", alone ? 0 : k->zero},
        {"train.global_batch", n_mb * k->micro * (alone ? 1 : batch_ranks(f, k))},
    };
    TRY(set_pattern(f, k->pp, k->vpp));
    for (int i = 0; i < countof(sizes); i++)
        TRY(set_number(&f->c, sizes[i].name, sizes[i].value, f->e));
    return config_set(&f->c, "parallel.overlap", overlap_of(k), NULL, f->e);
}

/* A message without the values in its brackets is the reason. */
static void add_reason(struct finder *f, const struct err *why)
{
    char text[sizeof f->reason->text];
    snprintf(text, sizeof text, "%.*s", (int)strcspn(why->msg, "("), why->msg);
    for (size_t n = strlen(text); n > 0 && text[n - 1] == ' '; n--)
        text[n - 1] = '\0';
    f->refused_rules++;
    for (int i = 0; i < f->n_reasons; i++)
        if (strcmp(f->reason[i].text, text) == 0) {
            f->reason[i].n++;
            return;
        }
    if (f->n_reasons == MOST_REASONS)
        return;
    struct reason *x = &f->reason[f->n_reasons++];
    memcpy(x->text, text, sizeof x->text);
    x->n = 1;
}

/* ---- one rank with the whole model ----------------------------------------------------------- */

static int64_t device_bytes(const struct trainer *t, enum arena_id a)
{
    return memory_on_host(&t->model.mem, a) ? 0 : t->model.mem.planned[a];
}

static void count_weights(struct finder *f, const struct trainer *t)
{
    f->weights = f->expert_weights = 0;
    for (int k = 0; k < t->model.params.n; k++) {
        const struct param *p = &t->model.params.list[k].p;
        *(p->expert ? &f->expert_weights : &f->weights) += (double)param_elems(p);
    }
    double all = f->weights + f->expert_weights;
    f->weight_bytes = (double)(device_bytes(t, ARENA_PARAM) + device_bytes(t, ARENA_CODE)) / all;
    f->grad_bytes = (double)device_bytes(t, ARENA_GRAD) / all;
    f->state_bytes = (double)(device_bytes(t, ARENA_MASTER) + device_bytes(t, ARENA_OPTIM)) / all;
    f->flops = 3 * model_flops_per_token(t->cfg, &t->model.pattern, t->cfg->train.seq);
    f->items = t->model.pattern.n_items;
    f->layers = t->model.pattern.n_layers;
    f->expert_layers = f->attention_layers = 0;
    for (int i = 0; i < f->layers; i++) {
        f->expert_layers += t->model.pattern.symbols[i] == 'E';
        f->attention_layers += strchr("*+", t->model.pattern.symbols[i]) != NULL;
    }
}

/* Seconds of attention proper: with parallel.cp the last rank has almost twice the mean of them. */
static double attention_seconds(const struct timeline *tl)
{
    const struct sim_rank *r = &tl->train.sim.rank[0];
    double sum = 0;
    for (int i = 0; i < r->n; i++) {
        const char *dot = r->task[i].name != NULL ? strrchr(r->task[i].name, '.') : NULL;
        sum += dot != NULL && strcmp(dot, ".core") == 0 ? r->task[i].seconds : 0;
    }
    return sum;
}

static int measure_piece(struct finder *f, int micro, int policy)
{
    struct piece *p = &f->piece[micro][policy];
    const struct attempt alone = {
        .pp = 1, .vpp = 1, .tp = 1, .cp = 1, .ep = 1, .etp = 1, .zero = -1, .micro = micro_sizes[micro]};
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
                            .attention = attention_seconds(&tl) / tl.train.sim.makespan,
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
    return (f->weights / k->tp + f->expert_weights / (k->ep * k->etp)) / k->pp;
}

/* What a microbatch takes in one stage without pipeline: computing, rows between tensor-parallel ranks (five times for
 * each layer), keys and values of the ranks before (forward and backward), rows to experts. */
static double stage_seconds(const struct finder *f, const struct attempt *k, const struct piece *p)
{
    const struct config_model *c = &f->given->model;
    double stages = k->pp, tokens = (double)(k->micro * f->given->train.seq), own = tokens / k->cp;
    double uneven = (double)((f->items + k->pp - 1) / k->pp) * k->pp / f->items;
    double last = 1 + p->attention * ((2.0 * k->cp - 1) / k->cp - 1); /* of the ranks that divide a sequence */
    double compute = p->seconds / stages * uneven / (k->tp * k->cp) * last;
    double stream = own * (double)c->hidden * 2, keys = tokens * (double)(2 * c->kv_heads * c->head_dim) / k->tp * 2;
    double hidden = k->overlap ? 0.7 : 0, hidden_rows = k->overlap ? 0.85 : 0; /* behind the other of a pair */
    double rows = 5 * (double)f->layers / stages * machine_exchange(f->m, k->tp, 1, stream);
    double context = 2 * (double)f->attention_layers / stages * machine_exchange(f->m, k->cp, k->tp, keys);
    double copies = f->expert_layers > 0 ? k->ep * tokens_on_rank(c, k->ep) : 0; /* of a token */
    double rows_out = stream * copies / k->tp;
    double sent =
        4 * (double)f->expert_layers / stages *
        (machine_exchange(f->m, k->ep, k->etp, rows_out) + machine_exchange(f->m, k->etp, 1, rows_out * k->etp));
    return compute + context + (1 - hidden_rows) * rows + (1 - hidden) * sent;
}

/* What a message costs beside `room` seconds of computing, which it slows down. */
static double beside(const struct finder *f, double message, double room)
{
    return at_least_0(message - room) + f->m->beside * (message < room ? message : room);
}

/* Gradients and weights of copies beside what is computed. */
static double exposed_copies(const struct finder *f, const struct attempt *k, double stage)
{
    int copies = batch_ranks(f, k) * k->cp;
    double w = weights_of(f, k), reduce = copies > 1 ? machine_exchange(f->m, copies, k->tp, 4 * w) : 0,
           gather = copies > 1 ? machine_exchange(f->m, copies, k->tp, 2 * w) : 0;
    switch (k->zero) {
    case 3: return beside(f, 2 * gather + reduce, stage) * (double)k->n_mb; /* in every microbatch */
    case 2: return beside(f, reduce, 0.6 * stage) * (double)k->n_mb + beside(f, gather, 0.3 * stage);
    case 1: return beside(f, reduce, 0.6 * stage) + beside(f, gather, 0.3 * stage);
    default: return beside(f, 2 * reduce, 0.6 * stage); /* sums to all */
    }
}

static void estimate(const struct finder *f, struct attempt *k, const struct piece *p)
{
    int copies = batch_ranks(f, k) * k->cp;
    double w = weights_of(f, k), stages = k->pp, shares = k->tp * k->cp, stage = stage_seconds(f, k, p);
    k->estimate = stage * ((double)k->n_mb + (stages - 1) / k->vpp) + exposed_copies(f, k, stage) +
                  p->update / stages / k->tp / (k->zero > 0 ? copies : 1);
    double kept = k->n_mb < k->pp ? (double)k->n_mb : stages * (1 + (k->vpp > 1 ? (stages - 1) / stages / k->vpp : 0));
    double state = f->weight_bytes * w / (k->zero == 3 ? copies : 1) + f->grad_bytes * w / (k->zero >= 2 ? copies : 1) +
                   f->state_bytes * w / (k->zero >= 1 ? copies : 1);
    /* Stages differ: the fullest has more layers or the head, and with virtual stages chunks of several microbatches
     * lie side by side. */
    double fullest = k->pp == 1 ? 1 : k->vpp == 1 ? 1.2 : 1.3;
    k->guess = state + fullest * ((double)p->saved / stages * kept / shares + (double)p->work / shares);
    k->bytes = (int64_t)k->guess;
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
    int64_t dp = batch_ranks(f, &k);
    for (int i = 0; i < MICROS; i++) {
        k.micro = micro_sizes[i];
        k.n_mb = f->global / (k.micro * dp);
        if (k.n_mb < 1 || f->global % (k.micro * dp) != 0 || (k.vpp > 1 && k.n_mb < k.pp)) {
            f->refused_batch++;
            continue;
        }
        for (k.policy = 0; k.policy < POLICIES; k.policy++) {
            if (k.policy == 3 && f->given->model.mhc_streams == 0)
                continue;
            if (!f->piece[i][k.policy].known)
                TRY(measure_piece(f, i, k.policy));
            estimate(f, &k, &f->piece[i][k.policy]);
            k.large = (double)k.bytes > 1.15 * f->o->budget;
            f->too_large += k.large;
            TRY(add_attempt(f, &k));
            if ((double)k.bytes < 0.85 * f->o->budget) /* recomputing more would only take longer */
                break;
        }
    }
    return ST_OK;
}

/* Does a rule of the options refuse the mesh? The reason is kept. */
static int is_legal(struct finder *f, const struct attempt *k, bool *legal)
{
    struct err why = {0};
    TRY(set_policy(f, 0, k->micro));
    TRY(set_mesh(f, k, max_i64(k->pp, 1)));
    int st = config_finish(&f->c, &why);
    *legal = st == ST_OK;
    if (st != ST_OK && st != ST_USAGE) {
        *f->e = why;
        return st;
    }
    if (st != ST_OK)
        add_reason(f, &why);
    return ST_OK;
}

/* All levels of parallel.zero. */
static int add_levels(struct finder *f, struct attempt k)
{
    for (k.zero = 0; k.zero <= 3; k.zero++) {
        bool legal;
        if (batch_ranks(f, &k) * k.cp == 1 && k.zero != 1) /* nothing but norms has copies */
            continue;
        TRY(is_legal(f, &k, &legal));
        if (legal)
            TRY(add_mesh(f, k));
    }
    return ST_OK;
}

/* All ways to share experts, each of them within a machine only. */
static int add_shapes(struct finder *f, struct attempt k)
{
    int64_t experts = f->expert_layers > 0 ? f->given->model.experts : 1;
    int stage = f->o->gpus / k.pp, most = f->expert_layers > 0 ? f->m->gpus : 1;
    if (f->items < k.pp * k.vpp) {
        f->refused_items++;
        return ST_OK;
    }
    for (k.ep = 1; k.ep <= stage; k.ep++)
        for (k.etp = 1; k.etp <= most; k.etp *= 2) {
            if (stage % (k.ep * k.etp) != 0 || experts % k.ep != 0)
                continue;
            bool pairs = k.pp == 1 || k.vpp > 1;
            k.overlap = k.ep > 1 && pairs;
            TRY(add_levels(f, k));
            if (k.ep > 1 || k.tp == 1 || !pairs)
                continue;
            k.overlap = true; /* of rows between tensor-parallel ranks, for the memory of a second microbatch */
            TRY(add_levels(f, k));
        }
    return ST_OK;
}

/* Tensor parallelism within a machine only; parts of sequences of at least 2048 tokens. */
static int add_all(struct finder *f)
{
    enum { LEAST_PART = 2048 };
    int gpus = f->o->gpus;
    for (int pp = 1; pp <= gpus; pp++)
        for (int tp = 1; tp <= f->m->gpus && gpus % pp == 0; tp *= 2)
            for (int cp = 1; cp <= gpus && (cp == 1 || f->given->train.seq / cp >= LEAST_PART); cp *= 2)
                for (int vpp = 1; gpus / pp % (tp * cp) == 0 && vpp <= (pp > 1 ? 2 : 1); vpp++)
                    TRY(add_shapes(f, (struct attempt){.pp = pp, .vpp = vpp, .tp = tp, .cp = cp, .micro = 1}));
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

/* A step of so many microbatches: its time, memory, and how long the microbatches take. */
static int simulate_some(struct finder *f, struct attempt *k, int64_t shown, double *makespan, struct err *why)
{
    struct timeline tl = {0};
    TRY(set_mesh(f, k, shown));
    int st = timeline_open(&tl, &f->c, f->m, NULL, why);
    for (int r = 0; st == ST_OK && r < tl.n; r++) {
        const struct trainer *t = &tl.rank[r].t;
        f->planned += t->train.p.n_steps;
        k->bytes = max_i64(r > 0 ? k->bytes : 0, memory_total(&t->model.mem, t->model.mem.planned, false));
    }
    k->seconds = st == ST_OK ? tl.seconds : 0;
    *makespan = st == ST_OK ? tl.train.sim.makespan : 0;
    timeline_close(&tl);
    return st;
}

/* More microbatches than fill the pipeline repeat what these do. Where pairs of them overlap, the first and the last
 * have no partner, so what another group of them adds is taken. */
static int simulate(struct finder *f, struct attempt *k)
{
    int64_t shown = min_i64(k->n_mb, k->pp > 1 ? 2 * (int64_t)k->pp : k->overlap ? 4 : 2);
    struct err why = {0};
    double some, more;
    if (k->vpp > 1) /* whole groups */
        shown = max_i64(k->pp, shown - shown % k->pp);
    TRY(set_policy(f, k->policy, k->micro));
    int st = simulate_some(f, k, shown, &some, &why);
    double each = some / ((double)shown + (double)(k->pp - 1) / k->vpp);
    if (st == ST_OK && k->overlap && shown + k->pp <= k->n_mb) {
        shown += k->pp;
        st = simulate_some(f, k, shown, &more, &why);
        each = (more - some) / k->pp;
    }
    k->simulated = st == ST_OK;
    k->refused = !k->simulated;
    if (st == ST_OK)
        k->seconds += each * (double)(k->n_mb - shown);
    else
        add_reason(f, &why);
    if (st == ST_USAGE || st == ST_OK || st == ST_INVALID) /* a rule or a schedule refuses it */
        return ST_OK;
    *f->e = why;
    return st;
}

/* ---- the table ------------------------------------------------------------------------------- */

/* Policies that are the configuration's own are left out. */
static void print_options(const struct finder *f, const struct attempt *k, struct buf *out)
{
    const struct config *c = f->given;
    const struct policy_row *p = &policies[k->policy];
    buf_addf(out, "  --parallel.pp=%d --parallel.vpp=%d --parallel.tp=%d --parallel.cp=%d --parallel.ep=%d", k->pp,
             k->vpp, k->tp, k->cp, k->ep);
    if (k->etp > 1 || c->parallel.etp > 1)
        buf_addf(out, " --parallel.etp=%d", k->etp);
    buf_addf(out, " --parallel.zero=%d --train.micro_batch=%lld --train.global_batch=%lld", k->zero,
             (long long)k->micro, (long long)f->global);
    if (k->overlap || c->parallel.overlap != CFG_OVERLAP_NONE)
        buf_addf(out, " --parallel.overlap=%s", overlap_of(k));
    if (c->plan.recompute_granularity != CFG_GRANULARITY_NONE)
        buf_add(out, " --plan.recompute_granularity=none");
    if (strcmp(p->recompute, c->plan.recompute) != 0)
        buf_addf(out, " --plan.recompute=%s", p->recompute);
    if (strcmp(p->block, c->plan.recompute_block) != 0)
        buf_addf(out, " --plan.recompute_block=%s", p->block);
}

static void print_row(const struct finder *f, const struct attempt *k, struct buf *out)
{
    char memory[32];
    double rate = (double)(f->global * f->given->train.seq) / k->seconds;
    buf_addf(out, "%9.1f %12.0f %7.0f %11s", k->seconds * 1e3, rate, rate * f->flops / f->o->gpus * 1e-12,
             human_bytes((double)k->bytes, memory, sizeof memory));
    if (f->o->tokens > 0)
        buf_addf(out, " %9.1f", f->o->tokens / rate / 86400);
    print_options(f, k, out);
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
        "%d refused by rules, %d too large\n",
        meshes, f->refused_batch, f->refused_items, f->refused_rules, f->too_large);
    for (int i = 0; i < f->n_reasons; i++)
        buf_addf(out, "    %d: %s\n", f->reason[i].n, f->reason[i].text);
    buf_add(out, "\n");
    buf_addf(out, "%9s %12s %7s %11s", "ms/step", "tokens/s", "TFLOP/s", "memory");
    if (f->o->tokens > 0)
        buf_addf(out, " %9s", "days");
    buf_add(out, "  options\n");
}

/* Was the same mesh with the same microbatches refused before, whatever the policy? */
static bool is_refused(const struct finder *f, const struct attempt *k)
{
    for (int i = 0; i < f->n; i++) {
        const struct attempt *x = &f->list[i];
        if (x->refused && x->pp == k->pp && x->vpp == k->vpp && x->tp == k->tp && x->cp == k->cp && x->ep == k->ep &&
            x->etp == k->etp && x->micro == k->micro)
            return true;
    }
    return false;
}

/* Is another plan of it worth its time? Not if one on the same mesh, with a better estimate, fits; if plans of the same
 * stages needed so much more than estimated that this one cannot fit; or if the best so far is far ahead of its
 * estimate, which hides what a schedule cannot. */
static bool is_promising(const struct finder *f, int i, double best)
{
    const struct attempt *k = &f->list[i];
    double more = 0;
    if (k->large || k->estimate > 1.25 * best || is_refused(f, k))
        return false;
    for (int j = 0; j < i; j++) {
        const struct attempt *x = &f->list[j];
        bool stages = x->simulated && x->pp == k->pp && x->vpp == k->vpp;
        if (stages && x->tp == k->tp && x->cp == k->cp && x->ep == k->ep && x->etp == k->etp &&
            (double)x->bytes <= f->o->budget)
            return false;
        if (stages && x->policy == k->policy && x->guess > 0)
            more = (double)x->bytes / x->guess > more ? (double)x->bytes / x->guess : more;
    }
    return more * k->guess <= 1.02 * f->o->budget;
}

static int by_guess(const void *a, const void *b)
{
    const struct attempt *x = a, *y = b;
    return (x->guess > y->guess) - (x->guess < y->guess);
}

/* Nothing that was planned fits: those with the least estimated memory are planned, too, and the smallest is the answer
 * whether it fits or not. */
static int show_smallest(struct finder *f, struct buf *out)
{
    enum { ENOUGH = 6 };
    const struct attempt *least = NULL;
    char text[32], wanted[32];
    if (f->n > 0)
        qsort(f->list, (size_t)f->n, sizeof *f->list, by_guess);
    for (int i = 0, planned = 0; i < f->n && planned < ENOUGH; i++) {
        struct attempt *k = &f->list[i];
        if (is_refused(f, k))
            continue;
        if (!k->simulated || k->overlap) {
            k->overlap = false; /* which would need more */
            TRY(simulate(f, k));
        }
        planned += k->simulated;
        if (k->simulated && (least == NULL || k->bytes < least->bytes))
            least = k;
    }
    if (least == NULL) {
        buf_add(out, "no mesh of so many GPUs is possible\n");
        return ST_OK;
    }
    human_bytes((double)least->bytes, text, sizeof text);
    if ((double)least->bytes > f->o->budget)
        buf_addf(out, "no mesh of so many GPUs fits %s; the smallest needs %s:\n",
                 human_bytes(f->o->budget, wanted, sizeof wanted), text);
    print_row(f, least, out);
    return ST_OK;
}

/* The best of the list, planned: those that fit after all are printed, fastest first. */
static int show_best(struct finder *f, struct buf *out)
{
    enum { SHOWN = 10 };
    const struct attempt *best = NULL;
    int simulated = 0, fit = 0;
    double fastest = INFINITY;
    if (f->n > 0)
        qsort(f->list, (size_t)f->n, sizeof *f->list, by_estimate);
    for (int i = 0; i < f->n && simulated < f->o->simulated && f->planned < MOST_STEPS; i++) {
        struct attempt *k = &f->list[i];
        if (!is_promising(f, i, fastest))
            continue;
        TRY(simulate(f, k));
        simulated += k->simulated;
        if (k->simulated && (double)k->bytes <= f->o->budget && k->seconds < fastest)
            fastest = k->seconds;
    }
    if (f->n > 0)
        qsort(f->list, (size_t)f->n, sizeof *f->list, by_seconds);
    print_head(f, f->n, out);
    for (int i = 0; i < f->n && f->list[i].simulated; i++) {
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
    return fit == 0 ? show_smallest(f, out) : ST_OK;
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
    for (int i = 0; i < f.n_cuts; i++)
        free(f.cuts[i].pattern);
    free(f.cuts);
    free(f.pattern);
    free(f.list);
    return st;
}
