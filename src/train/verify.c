/* Running one variant and comparing it with the plain rank; see verify.h. Every rank compares what it holds: its
 * parameters, whole or a slice, and the moments of its shard. After one step the first moments are the summed gradients
 * times one factor, so a reduction that is missing or wrong shows there with the name of the parameter. */
#include "train/verify.h"

#include "train/reshard_int.h"
#include "train/verify_saved_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What a plain rank had. */
struct plain {
    bool ran;
    struct param_table params;
    double **moment, **value; /* [param], whole */
    double *weight;           /* [param]: of differences of moments; see weigh_moments */
    double loss[VERIFY_STEPS][1 + MTP_MAX_DEPTHS], norm[VERIFY_STEPS]; /* the main loss, then those of depths */
    struct saved saved;                                                /* its checkpoint at the end */
};

/* Balance over a step (model.global_aux_loss) takes the mean of the microbatches that are known so far, and those of
 * all data-parallel ranks at once. So D of them are one rank whose microbatches have D times as many sequences. Without
 * that loss one plain rank stands for all. */
enum { MOST_DP = 8 };
struct verify {
    struct config cfg;
    struct plain plain[MOST_DP + 1]; /* [D], run when first asked for */
    bool has_config;
};

/* ---- configs --------------------------------------------------------------------------------- */

/* The pattern with '|' between stages that have about the same number of items. */
static int cut_pattern(struct config *c, int segments, struct err *e)
{
    struct pattern p;
    struct buf b;
    buf_init(&b, 0);
    int st, segment = 0;
    TRY_OUT(pattern_parse(&p, c->model.pattern, e));
    for (int i = 0; i < p.n_items; i++) {
        for (; segment < i * segments / p.n_items; segment++)
            buf_add(&b, "|");
        pattern_add_item(&p, i, &b);
    }
    for (; segment < segments - 1; segment++)
        buf_add(&b, "|");
    buf_add(&b, p.text + p.main_len);
    TRY_OUT(buf_check(&b, e));
    TRY_OUT(config_set(c, "model.pattern", b.text, NULL, e));
out:
    buf_release(&b);
    return st;
}

static int set_options(struct config *c, const char *options, struct err *e)
{
    char name[64], value[64];
    for (const char *p = options; *p != '\0';) {
        size_t n = strcspn(p, " "), key = strcspn(p, "=");
        if (key >= n || key >= sizeof name || n - key > sizeof value)
            return err_set(e, ST_INTERNAL, "'%s' is no list of options", options);
        snprintf(name, sizeof name, "%.*s", (int)key, p);
        snprintf(value, sizeof value, "%.*s", (int)(n - key - 1), p + key + 1);
        TRY(config_set(c, name, value, NULL, e));
        p += n + (p[n] == ' ');
    }
    return ST_OK;
}

static int variant_config(struct config *c, const struct verify *v, const struct verify_case *variant, struct err *e)
{
    char number[16];
    const int value[] = {variant->pp, variant->vpp, variant->ep, variant->tp, variant->cp, variant->etp};
    static const char *const name[] = {"parallel.pp", "parallel.vpp", "parallel.ep",
                                       "parallel.tp", "parallel.cp",  "parallel.etp"};
    TRY(config_init(c, e));
    TRY(verify_copy(c, &v->cfg, e));
    for (int i = 0; i < countof(value); i++) {
        snprintf(number, sizeof number, "%d", value[i] > 0 ? value[i] : 1);
        TRY(config_set(c, name[i], number, NULL, e));
    }
    snprintf(number, sizeof number, "%d", variant->ranks);
    TRY(config_set(c, "parallel.ranks", number, NULL, e));
    if (variant->pp * variant->vpp > 1)
        TRY(cut_pattern(c, variant->pp * variant->vpp, e));
    TRY(set_options(c, variant->options, e));
    return ST_OK;
}

/* ---- the plain rank -------------------------------------------------------------------------- */

static int keep(double **out, const struct tensor *t, struct err *e)
{
    int64_t n = tensor_elems(t);
    TRY(mem_array((void **)out, (size_t)max_i64(n, 1), sizeof **out, e));
    for (int64_t i = 0; i < n; i++)
        (*out)[i] = tensor_get(t, i);
    return ST_OK;
}

static int keep_moments(struct plain *v, const struct trainer *t, struct err *e)
{
    for (int k = 0; k < t->model.params.n; k++) {
        int index;
        bool is_new;
        TRY(param_add(&v->params, &t->model.params.list[k].p, &index, &is_new, e));
        struct tensor m =
            !param_trained(&t->model.params.list[k].p) ? (struct tensor){0} : optim_state(&t->model, k, 0);
        if (m.data != NULL)
            TRY(keep(&v->moment[k], &m, e));
    }
    return ST_OK;
}

/* A gradient that is zero but for rounding (hyper-connections of streams that are still equal) has no digits to
 * compare:
 * what is smaller than a millionth of the largest gradient is compared on that scale. */
static int weigh_moments(struct plain *v, struct err *e)
{
    double most = 0, *largest;
    TRY(mem_array((void **)&v->weight, (size_t)v->params.n, sizeof *largest, e));
    largest = v->weight;
    for (int k = 0; k < v->params.n; k++) {
        for (int64_t i = 0, n = param_elems(&v->params.list[k].p); v->moment[k] != NULL && i < n; i++)
            largest[k] = fmax(largest[k], fabs(v->moment[k][i]));
        most = fmax(most, largest[k]);
    }
    for (int k = 0; k < v->params.n; k++)
        v->weight[k] = largest[k] >= 1e-6 * most ? 1 : fmax(largest[k], 1e-300) / (1e-6 * most);
    return ST_OK;
}

static int run_plain(struct plain *v, const struct config *cfg, struct trainer *t, struct err *e)
{
    TRY(trainer_open(t, cfg, NULL, true, e));
    TRY(mem_array((void **)&v->moment, (size_t)t->model.params.n, sizeof *v->moment, e));
    TRY(mem_array((void **)&v->value, (size_t)t->model.params.n, sizeof *v->value, e));
    for (int s = 0; s < VERIFY_STEPS; s++) {
        struct step_result r;
        TRY(trainer_step(t, &r, e));
        memcpy(v->loss[s], t->mean_loss, sizeof v->loss[s]);
        v->norm[s] = r.grad_norm;
        if (s == 0) {
            TRY(keep_moments(v, t, e));
            TRY(weigh_moments(v, e));
        }
    }
    for (int k = 0; k < t->model.params.n; k++) {
        struct tensor p = model_param(&t->model, k);
        TRY(keep(&v->value[k], &p, e));
    }
    return saved_keep(&v->saved, t, e);
}

/* The plain rank that dp data-parallel ones are compared with. */
static int plain_for(struct verify *v, int dp, const struct plain **out, struct err *e)
{
    struct trainer t = {0};
    struct config c = {0};
    int d = v->cfg.model.global_aux_loss > 0 ? dp : 1, st;
    if (d > MOST_DP)
        return err_set(e, ST_INTERNAL, "%d data-parallel ranks are more than %d", d, MOST_DP);
    struct plain *p = &v->plain[d];
    *out = p;
    if (p->ran)
        return ST_OK;
    char size[16];
    snprintf(size, sizeof size, "%lld", (long long)(v->cfg.train.micro_batch * d));
    param_table_init(&p->params);
    p->ran = true;
    TRY_OUT(config_init(&c, e));
    TRY_OUT(verify_copy(&c, &v->cfg, e));
    TRY_OUT(config_set(&c, "train.micro_batch", size, NULL, e));
    TRY_OUT(config_complete(&c, e));
    TRY_OUT(run_plain(p, &c, &t, e));
out:
    trainer_close(&t);
    config_release(&c);
    return st;
}

int verify_open(struct verify **out, const struct config *small, struct err *e)
{
    struct verify *v = NULL;
    const struct plain *first;
    TRY(mem_array((void **)&v, 1, sizeof *v, e));
    *out = v;
    v->has_config = true;
    TRY(config_init(&v->cfg, e));
    TRY(verify_copy(&v->cfg, small, e));
    TRY(config_complete(&v->cfg, e));
    return plain_for(v, 1, &first, e);
}

static void plain_release(struct plain *p)
{
    if (!p->ran)
        return;
    for (int k = 0; k < p->params.n; k++) {
        if (p->moment != NULL)
            free(p->moment[k]);
        if (p->value != NULL)
            free(p->value[k]);
    }
    free(p->moment);
    free(p->value);
    free(p->weight);
    param_table_release(&p->params);
    saved_release(&p->saved);
}

void verify_close(struct verify *v)
{
    if (v == NULL)
        return;
    for (int d = 0; d < countof(v->plain); d++)
        plain_release(&v->plain[d]);
    if (v->has_config)
        config_release(&v->cfg);
    free(v);
}

/* ---- one variant ----------------------------------------------------------------------------- */

struct rank_run {
    const struct verify *v;
    const struct plain *plain;
    const struct verify_case *variant;
    const struct verify_sabotage *wrong;
    struct rank_found {
        double loss, norm, grad, param;
        char key[128];
        struct saved_difference saved;
        bool done;
    } found[16];
};

/* Largest difference of t, the elements from `first` on of this rank's part of p, from the whole parameter, over the
 * whole's largest. */
static double difference(const struct tensor *t, const double *whole, int64_t whole_n, const struct param *p,
                         int64_t first)
{
    double most = 0, size = 0;
    for (int64_t i = 0; i < whole_n; i++)
        size = fmax(size, fabs(whole[i]));
    for (int64_t i = 0, n = tensor_elems(t); i < n; i++) {
        double d = fabs(tensor_get(t, i) - whole[param_run_from(p, first + i).whole]);
        if (isnan(d))
            return INFINITY;
        most = fmax(most, d);
    }
    return most == 0 ? 0 : most / fmax(size, 1e-300);
}

static void note(struct rank_found *f, double *worst, double d, const char *key)
{
    if (d > fmax(f->grad, f->param))
        snprintf(f->key, sizeof f->key, "%s", key);
    *worst = fmax(*worst, d);
}

static void compare_params(struct rank_run *run, const struct trainer *t, bool moments)
{
    struct rank_found *f = &run->found[t->model.mesh.rank];
    const struct plain *v = run->plain;
    for (int k = 0; k < t->model.params.n; k++) {
        const struct param *p = &t->model.params.list[k].p;
        int at = param_find(&v->params, p->key);
        if (at < 0 || param_elems(p) > param_elems(&v->params.list[at].p)) { /* a stage that builds other layers */
            note(f, &f->param, INFINITY, p->key);
            continue;
        }
        int64_t n = param_elems(&v->params.list[at].p);
        if (!moments) {
            struct tensor x = model_param(&t->model, k);
            note(f, &f->param, difference(&x, v->value[at], n, p, model_param_kept(&t->model, k).first), p->key);
        } else if (param_trained(p)) {
            struct tensor m = optim_state(&t->model, k, 0);
            double d = difference(&m, v->moment[at], n, p, shard_updated(&t->model, k).first);
            note(f, &f->grad, d * v->weight[at], p->key);
        }
    }
}

static double relative(double a, double b) { return a == b ? 0 : fabs(a - b) / fmax(fabs(b), 1e-300); }

static int run_steps(struct rank_run *run, struct trainer *t, struct err *e)
{
    struct rank_found *f = &run->found[t->model.mesh.rank];
    for (int s = 0; s < VERIFY_STEPS; s++) {
        struct step_result r;
        TRY(trainer_step(t, &r, e));
        for (int k = 0; k <= t->train.n_mtp; k++)
            f->loss = fmax(f->loss, relative(t->mean_loss[k], run->plain->loss[s][k]));
        f->norm = fmax(f->norm, relative(r.grad_norm, run->plain->norm[s]));
        if (s == 0 && !t->pending) /* else the next step changes moments; those at the end are compared either way */
            compare_params(run, t, true);
    }
    TRY(saved_compare(&run->plain->saved, t, &f->saved, e)); /* needs no weights of other ranks */
    TRY(trainer_refresh(t, e));
    compare_params(run, t, false);
    f->done = true;
    return ST_OK;
}

static int run_rank(struct world *w, void *ctx, struct err *e)
{
    struct rank_run *run = ctx;
    struct rank_place place = place_alone();
    struct config c = {0};
    struct trainer t = {0};
    int st, rank = w != NULL ? world_rank(w) : 0;
    TRY_OUT(variant_config(&c, run->v, run->variant, e));
    if (run->wrong != NULL && run->wrong->config != NULL)
        run->wrong->config(&c, rank);
    TRY_OUT(config_complete(&c, e));
    TRY_OUT(place_open(&place, &c, w, rank, run->variant->ranks, e));
    place.threads = 1;
    TRY_OUT(trainer_open_on(&t, &c, &place, NULL, true, e));
    if (run->wrong != NULL && run->wrong->trainer != NULL)
        run->wrong->trainer(&t);
    TRY_OUT(run_steps(run, &t, e));
out:
    trainer_close(&t);
    place_close(&place);
    config_release(&c);
    return st;
}

static double allowed_for(const struct rank_run *run)
{
    const struct verify_case *c = run->variant;
    bool divides = verify_cp(c) > 1 || verify_tp(c) > 1 || c->ep > 1 || verify_etp(c) > 1;
    return run->v->cfg.gpu.precision == CFG_PRECISION_FP8 && divides ? VERIFY_ALLOWED_FP8 : VERIFY_ALLOWED;
}

static void sum_up(const struct rank_run *run, struct verify_row *row)
{
    double worst = -1;
    for (int r = 0; r < run->variant->ranks; r++) {
        const struct rank_found *f = &run->found[r];
        double d = fmax(f->grad, f->param);
        row->loss = fmax(row->loss, f->loss);
        row->norm = fmax(row->norm, f->norm);
        row->grad = fmax(row->grad, f->grad);
        row->param = fmax(row->param, f->param);
        if (d > worst && f->key[0] != '\0') {
            snprintf(row->where, sizeof row->where, "%s, rank %d", f->key, r);
            worst = d;
        }
    }
    const struct saved_difference *saved = &run->found[0].saved;
    row->saved = saved->most;
    double allowed = allowed_for(run);
    if (row->saved > allowed && worst <= allowed)
        snprintf(row->where, sizeof row->where, "%s, in the checkpoint", saved->key);
    double most = fmax(fmax(fmax(row->loss, row->norm), fmax(row->grad, row->param)), row->saved);
    row->outcome = most == 0 ? VERIFY_SAME_BITS : most <= allowed ? VERIFY_CLOSE : VERIFY_DIFFERS;
}

int verify_run(struct verify *v, const struct verify_case *variant, const struct verify_sabotage *wrong,
               struct verify_row *row, struct err *e)
{
    double begin = time_now();
    struct rank_run run = {.v = v, .variant = variant, .wrong = wrong};
    struct world_opts o = {.kind = COMM_THREADS, .ranks = variant->ranks, .timeout = 60};
    struct err why = {0};
    *row = (struct verify_row){.variant = variant};
    if (variant->ranks > countof(run.found))
        return err_set(e, ST_INTERNAL, "%d ranks are more than %d", variant->ranks, countof(run.found));
    TRY(plain_for(v, variant->ranks / (variant->pp * verify_cp(variant) * verify_tp(variant)), &run.plain, e));
    int st = world_threads(&o, run_rank, &run, &why);
    row->seconds = time_now() - begin;
    if (st == ST_USAGE) {
        row->outcome = VERIFY_REFUSED;
        row->why = why;
        return ST_OK;
    }
    if (st != ST_OK) {
        *e = why;
        err_in(e, "variant '%s'", variant->name);
        return st;
    }
    sum_up(&run, row);
    return ST_OK;
}
