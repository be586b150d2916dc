/* One batch through a whole model; see probe.h. */
#include "train/probe.h"

#include "hf/hf.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the batch ------------------------------------------------------------------------------- */

static int read_ids(const struct st_file *in, const char *name, const struct probe_batch *b, int32_t *out,
                    struct err *e)
{
    struct tensor dst = tensor_2d(out, DT_I32, b->batch, b->seq);
    return st_read(st_find(in, name), &dst, e);
}

int probe_batch_read(struct probe_batch *b, const struct st_file *in, const char *label, struct err *e)
{
    const struct st_entry *tokens = st_find(in, "tokens");
    *b = (struct probe_batch){0};
    if (tokens == NULL || tokens->view.rank != 2)
        return err_set(e, ST_INVALID, "%s holds no tensor 'tokens' of shape [batch, seq]", label);
    b->batch = tokens->view.dim[0];
    b->seq = tokens->view.dim[1];
    int64_t n = b->batch * b->seq;
    if (n == 0)
        return err_set(e, ST_INVALID, "%s: tokens are empty", label);
    int32_t **arrays[] = {&b->tokens, &b->labels, &b->pos, &b->doc};
    for (int i = 0; i < countof(arrays); i++)
        TRY(mem_array((void **)arrays[i], (size_t)n, sizeof(int32_t), e));
    TRY(read_ids(in, "tokens", b, b->tokens, e));
    bool given = st_find(in, "labels") != NULL;
    if (given)
        TRY(read_ids(in, "labels", b, b->labels, e));
    for (int64_t i = 0; i < n; i++) {
        int64_t t = i % b->seq;
        if (!given)
            b->labels[i] = t + 1 < b->seq ? b->tokens[i + 1] : -1;
        b->pos[i] = (int32_t)t;
    }
    return ST_OK;
}

void probe_batch_release(struct probe_batch *b)
{
    free(b->tokens);
    free(b->labels);
    free(b->pos);
    free(b->doc);
    *b = (struct probe_batch){0};
}

/* ---- the run --------------------------------------------------------------------------------- */

static int fill(struct probe *p, const struct config *c, const struct ckpt *from, struct err *e)
{
    struct err note = {0};
    if (from != NULL)
        return load_params(&p->model, from, e);
    TRY(model_init_params(&p->model, e));
    if (c->run.load_weights[0] == '\0')
        return ST_OK;
    TRY(load_weights(&p->model, c->run.load_weights, c->run.load_allow, &note, e));
    if (note.msg[0] != '\0')
        fprintf(stderr, "note: %s\n", note.msg);
    return ST_OK;
}

int probe_run(struct probe *p, struct config *c, const struct probe_batch *b, const struct ckpt *from, struct err *e)
{
    struct model_plan *plans[] = {&p->plan};
    struct model_plan_opts o = {
        .name = "grads", .mode = BUILD_TRAIN, .batch = b->batch, .seq = b->seq, .want_logits = true};
    c->train.micro_batch = c->train.global_batch = b->batch;
    c->train.seq = b->seq;
    TRY(device_open(&p->dev, c, e));
    TRY(model_init(&p->model, c, &p->dev, e));
    TRY(model_plan_build(&p->model, &p->plan, &o, e));
    TRY(model_commit(&p->model, plans, 1, e));
    TRY(fill(p, c, from, e));
    exec_init(&p->exec, &p->dev);
    plan_options(&p->exec, c);
    TRY(exec_prepare(&p->exec, &p->plan.p, e));
    int64_t counts[1 + MTP_MAX_DEPTHS] = {0};
    double scale[1 + MTP_MAX_DEPTHS], loss[2] = {0};
    count_labels(b->labels, NULL, b->batch * b->seq, b->seq, p->plan.n_mtp, counts);
    loss_scales(c, counts, p->plan.n_mtp, scale);
    struct run_info run = {.first_mb = true,
                           .mb_share = 1,
                           .scale = scale[0],
                           .mtp_scale = scale + 1,
                           .tokens = b->tokens,
                           .labels = b->labels,
                           .pos = b->pos,
                           .doc_start = b->doc};
    TRY(exec_run(&p->exec, &p->plan.p, &run, e));
    struct tensor slot = model_slot(&p->model, &p->plan, p->plan.loss);
    TRY(p->dev.vt->copy_out(&p->dev, loss, slot.data, sizeof loss, e));
    p->loss = loss[0] / (double)max_i64(counts[0], 1);
    return ST_OK;
}

void probe_release(struct probe *p)
{
    exec_release(&p->exec);
    model_plan_release(&p->plan);
    model_release(&p->model);
    dev_close(&p->dev);
}

/* ---- comparison ------------------------------------------------------------------------------ */

/* KL divergence of one row of logits, over the n that both have. */
static double row_kl(const float *golden, const struct tensor *ours, int64_t first, int64_t n)
{
    double top_g = -INFINITY, top_o = -INFINITY, sum_g = 0, sum_o = 0, kl = 0;
    for (int64_t i = 0; i < n; i++) {
        top_g = fmax(top_g, (double)golden[i]);
        top_o = fmax(top_o, tensor_get(ours, first + i));
    }
    for (int64_t i = 0; i < n; i++) {
        sum_g += exp((double)golden[i] - top_g);
        sum_o += exp(tensor_get(ours, first + i) - top_o);
    }
    for (int64_t i = 0; i < n; i++) {
        double lg = (double)golden[i] - top_g - log(sum_g), lo = tensor_get(ours, first + i) - top_o - log(sum_o);
        kl += exp(lg) * (lg - lo);
    }
    return kl;
}

static int compare_logits(struct probe *p, const struct config *c, const struct st_file *golden, const char *label,
                          struct probe_difference *out, struct err *e)
{
    const struct st_entry *entry = st_find(golden, "logits");
    struct tensor at = model_slot(&p->model, &p->plan, p->plan.logits), host;
    int64_t rows = at.dim[0], wide = tensor_elems(&at) / max_i64(rows, 1), n = c->model.vocab;
    if (entry == NULL || tensor_elems(&entry->view) != rows * n || entry->view.dim[entry->view.rank - 1] != n)
        return err_set(e, ST_INVALID, "%s holds no 'logits' of %lld positions and %lld tokens", label, (long long)rows,
                       (long long)n);
    struct tensor want = tensor_shape(DT_F32, entry->view.rank, entry->view.dim);
    TRY(mem_array(&want.data, (size_t)(rows * n), sizeof(float), e));
    int st = st_read(entry, &want, e);
    if (st == ST_OK)
        st = dev_fetch(&p->dev, &at, &host, e);
    const float *g = want.data;
    double most = 0, largest = 0;
    for (int64_t r = 0; st == ST_OK && r < rows; r++) {
        for (int64_t i = 0; i < n; i++) {
            most = fmax(most, fabs((double)g[r * n + i] - tensor_get(&host, r * wide + i)));
            largest = fmax(largest, fabs((double)g[r * n + i]));
        }
        out->kl += row_kl(g + r * n, &host, r * wide, n) / (double)rows;
    }
    out->logits = largest > 0 ? most / largest : most;
    if (st == ST_OK)
        dev_fetched(&p->dev, &host);
    free(want.data);
    return st;
}

/* Squares of a difference and of what it differs from, over the parameters that are parts of one tensor. */
struct distance {
    double apart, norm;
};

/* Golden gradients have the names and shapes of a folder's tensors, so that they are read like its weights. */
static int compare_gradient(struct probe *p, struct hf_folder *f, int i, struct distance *d, struct err *e)
{
    const struct param *q = &p->model.params.list[i].p;
    struct tensor want = tensor_shape(DT_F32, q->rank, q->dim), at = model_grad(&p->model, i), host;
    int64_t rows = q->rows.matrices > 0 ? q->dim[0] * q->dim[1] : q->dim[0], n = param_elems(q),
            cols = rows > 0 ? n / rows : 0;
    TRY(mem_array(&want.data, (size_t)n, sizeof(float), e));
    int st = hf_load(f, i, &want, e);
    if (st == ST_OK)
        st = dev_fetch(&p->dev, &at, &host, e);
    for (int64_t r = 0; st == ST_OK && r < rows; r++)
        for (int64_t k = 0; k < cols; k++) {
            double g = (double)((const float *)want.data)[r * cols + k],
                   o = tensor_get(&host, param_row_from_disk(q, r) * cols + k);
            d->apart += (g - o) * (g - o);
            d->norm += g * g;
        }
    free(want.data);
    if (st == ST_OK)
        dev_fetched(&p->dev, &host);
    return st;
}

static void judge_gradient(const struct distance *d, const char *key, struct probe_difference *out)
{
    double off = sqrt(d->apart) / fmax(sqrt(d->norm), 1e-30);
    if (d->norm == 0)
        off = sqrt(d->apart); /* an expert that no token chose */
    if (!(off <= out->gradient)) {
        out->gradient = off;
        snprintf(out->worst, sizeof out->worst, "%s", key);
    }
    out->n_gradients++;
}

/* Has the parameter a loss of its own, which the other program's gradients know nothing of (metric.only)? */
static bool trained_apart(const struct probe *p, const char *key)
{
    for (int k = 0; k < p->model.metrics.n; k++)
        if (p->model.metrics.m[k].only != NULL && strstr(key, p->model.metrics.m[k].only) != NULL)
            return true;
    return false;
}

static bool compared(const struct probe *p, const struct param *q)
{
    return param_trained(q) && !trained_apart(p, q->key);
}

static int compare_gradients(struct probe *p, const struct config *c, const char *golden, const char *folder,
                             struct probe_difference *out, struct err *e)
{
    struct hf_folder *f = NULL;
    const struct param **params = NULL;
    struct distance d = {0};
    int n = 0, st;
    TRY(mem_array((void **)&params, (size_t)p->model.params.n, sizeof *params, e));
    TRY_OUT(hf_open_gradients(&f, folder, golden, e));
    for (int i = 0; i < p->model.params.n; i++)
        params[n++] = &p->model.params.list[i].p;
    TRY_OUT(hf_bind(f, c, params, n, NULL, e));
    for (int i = 0; st == ST_OK && i < n; i++) {
        if (!compared(p, params[i]))
            continue;
        st = compare_gradient(p, f, i, &d, e);
        if (st != ST_OK || (i + 1 < n && compared(p, params[i + 1]) && hf_same_tensor(f, i, i + 1)))
            continue; /* a scale of three numbers is three parameters */
        judge_gradient(&d, params[i]->key, out);
        d = (struct distance){0};
    }
out:
    hf_close(f);
    free(params);
    return st;
}

int probe_compare(struct probe *p, const struct config *c, const char *golden, const char *hf_folder,
                  struct probe_difference *out, struct err *e)
{
    struct st_file *file = NULL;
    bool gradients = false;
    *out = (struct probe_difference){.gradient = -1};
    TRY(st_open(&file, golden, e));
    int st = compare_logits(p, c, file, golden, out, e);
    for (int i = 0; i < st_count(file); i++)
        gradients |= str_starts(st_entry(file, i)->name, "grad.");
    st_close(file);
    TRY(st);
    return gradients ? compare_gradients(p, c, golden, hf_folder, out, e) : ST_OK;
}
