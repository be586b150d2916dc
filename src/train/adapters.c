/* LoRA adapters of a checkpoint: merged into the weights they belong to, or handed to PEFT's format. */
#include "train/adapters_int.h"

#include <stdlib.h>
#include <string.h>

static int load_matrix(const struct ckpt *from, const struct param *p, float *values, struct err *e)
{
    struct tensor host = tensor_2d(values, DT_F32, p->dim[0], p->dim[1]);
    return ckpt_load(from, p->key, CKPT_MODEL, &host, NULL, e);
}

static int matrix(const struct ckpt *from, const struct param *p, float **out, struct err *e)
{
    TRY(mem_array((void **)out, (size_t)max_i64(param_elems(p), 1), sizeof **out, e));
    return load_matrix(from, p, *out, e);
}

bool adapters_of(const struct paper *p, int index)
{
    for (int k = 0; k < p->n; k++)
        if (p->params[k]->lora.of == index + 1)
            return true;
    return false;
}

/* values [rows, in] of the weight += scale * up * down, for the rows that this adapter is for. */
static int add_product(const struct param *weight, const struct param *up, const float *a, const float *b, double scale,
                       float *values, struct err *e)
{
    int64_t rows = weight->dim[0], in = weight->dim[1], rank = up->dim[1];
    double *sum = NULL;
    TRY(mem_array((void **)&sum, (size_t)in, sizeof *sum, e));
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = param_row_from_disk(weight, r) - up->lora.first;
        if (at < 0 || at >= up->dim[0])
            continue;
        for (int64_t c = 0; c < in; c++)
            sum[c] = 0;
        for (int64_t k = 0; k < rank; k++) {
            double x = b[at * rank + k];
            for (int64_t c = 0; c < in; c++)
                sum[c] += x * (double)a[k * in + c];
        }
        for (int64_t c = 0; c < in; c++)
            values[r * in + c] = (float)((double)values[r * in + c] + scale * sum[c]);
    }
    free(sum);
    return ST_OK;
}

int adapters_merge(const struct ckpt *from, const struct config *c, const struct paper *p, int index, float *values,
                   struct err *e)
{
    double scale = c->lora.alpha / (double)max_i64(c->lora.rank, 1);
    int st = ST_OK;
    for (int k = 1; st == ST_OK && k < p->n; k++) {
        const struct param *up = p->params[k], *down = p->params[k - 1];
        float *a = NULL, *b = NULL;
        if (up->lora.of != index + 1 || !up->lora.up)
            continue;
        st = matrix(from, down, &a, e);
        if (st == ST_OK)
            st = matrix(from, up, &b, e);
        if (st == ST_OK)
            st = add_product(p->params[index], up, a, b, scale, values, e);
        free(a);
        free(b);
    }
    return st;
}

/* ---- a checkpoint without adapters ----------------------------------------------------------- */

struct merger {
    const struct ckpt *from;
    const struct config *config;
    const struct paper *paper;
    void *values;
    size_t cap;
};

static int fetch_merged(void *ctx, const char *key, struct tensor *host, struct err *e)
{
    struct merger *m = ctx;
    int i = 0;
    while (i < m->paper->n && strcmp(m->paper->params[i]->key, key) != 0)
        i++;
    if (i == m->paper->n)
        return err_set(e, ST_INTERNAL, "nobody merges %s", key);
    TRY(mem_grow(&m->values, &m->cap, (size_t)max_i64(tensor_bytes(host), 1), 1, e));
    host->data = m->values;
    TRY(ckpt_load(m->from, key, CKPT_MODEL, host, NULL, e));
    return adapters_of(m->paper, i) ? adapters_merge(m->from, m->config, m->paper, i, m->values, e) : ST_OK;
}

/* The saved options without LoRA, and without groups that may name adapters. */
static int merged_config(const struct ckpt *from, struct buf *out, struct err *e)
{
    struct config c;
    const char *text = ckpt_config_text(from);
    TRY(config_init(&c, e));
    int st = config_read_ini_text(&c, text, strlen(text), ckpt_path(from), e);
    if (st == ST_OK)
        st = config_set(&c, "lora.rank", "0", NULL, e);
    if (st == ST_OK)
        st = config_set(&c, "lora.alpha", "0", NULL, e);
    c.n_groups = 0;
    if (st == ST_OK)
        config_write(&c, out, false);
    config_release(&c);
    return st == ST_OK ? buf_check(out, e) : st;
}

int merge_checkpoint(const struct ckpt *from, const struct config *c, const struct ckpt_file *files, int n_files,
                     const char *run_dir, struct err *e)
{
    struct paper paper;
    struct ckpt_item *items = NULL;
    struct buf text;
    int st, n = 0;
    if (c->lora.rank == 0) {
        err_set(e, ST_INVALID, "%s has no LoRA adapters: there is nothing to merge", ckpt_path(from));
        return err_hint(e, "checkpoints of runs with lora.rank above 0 have them");
    }
    TRY(paper_open(&paper, c, e));
    buf_init(&text, 0);
    struct merger m = {.from = from, .config = c, .paper = &paper};
    TRY_OUT(merged_config(from, &text, e));
    TRY_OUT(mem_array((void **)&items, (size_t)paper.n, sizeof *items, e));
    for (int i = 0; i < paper.n; i++) {
        const struct param *p = paper.params[i];
        if (p->lora.of == 0)
            items[n++] = (struct ckpt_item){
                .key = p->key, .host = tensor_shape(param_dtype(p, DT_F32), p->rank, p->dim), .section = CKPT_MODEL};
    }
    struct ckpt_source source = {fetch_merged, &m};
    struct ckpt_save_args args = {.run_dir = run_dir,
                                  .step = ckpt_step(from),
                                  .items = items,
                                  .n_items = n,
                                  .source = &source,
                                  .config_text = text.text,
                                  .counters = *ckpt_counters(from),
                                  .files = files,
                                  .n_files = n_files};
    st = ckpt_save(&args, e);
out:
    free(m.values);
    free(items);
    buf_release(&text);
    paper_close(&paper);
    return st;
}

/* ---- PEFT ------------------------------------------------------------------------------------ */

/* A group with freeze = off trains weights of the base, which PEFT's file has no place for. */
static int refuse_trained_base(const struct ckpt *from, struct err *e)
{
    struct config c;
    const char *text = ckpt_config_text(from);
    TRY(config_init(&c, e));
    int st = config_read_ini_text(&c, text, strlen(text), ckpt_path(from), e);
    for (int i = 0; st == ST_OK && i < c.n_groups; i++)
        if (c.group[i].freeze == CFG_FREEZE_OFF) {
            st = err_set(e, ST_UNSUPPORTED,
                         "group %s of %s trained weights beside the adapters, which PEFT's format would leave out",
                         c.group[i].name, ckpt_path(from));
            err_hint(e, "--format=hf writes the whole model with the adapters merged");
        }
    config_release(&c);
    return st;
}

/* One weight: its adapters' second matrices as rows of one, in the order of files. */
static int collect(const struct ckpt *from, const struct paper *p, int index, struct arena *memory,
                   struct peft_adapter *out, struct err *e)
{
    const struct param *w = p->params[index];
    int64_t rows = w->dim[0], rank = 0;
    int n = 0;
    for (int k = 0; k < p->n; k++)
        if (p->params[k]->lora.of == index + 1 && p->params[k]->lora.up)
            n++, rank = p->params[k]->dim[1];
    float *part_of = arena_alloc(memory, (size_t)rows * sizeof *part_of),
          *up = arena_alloc(memory, (size_t)(rows * rank) * sizeof *up);
    const float **down = arena_alloc(memory, (size_t)n * sizeof *down);
    if (part_of == NULL || up == NULL || down == NULL)
        return err_set(e, ST_NOMEM, "out of memory for the adapters of %s", w->key);
    for (int64_t r = 0; r < rows; r++)
        part_of[r] = -1;
    n = 0;
    for (int k = 1; k < p->n; k++) {
        const struct param *b = p->params[k], *a = p->params[k - 1];
        if (b->lora.of != index + 1 || !b->lora.up)
            continue;
        float *av = arena_alloc(memory, (size_t)param_elems(a) * sizeof *av),
              *bv = arena_alloc(memory, (size_t)param_elems(b) * sizeof *bv);
        if (av == NULL || bv == NULL)
            return err_set(e, ST_NOMEM, "out of memory for the adapters of %s", w->key);
        TRY(load_matrix(from, a, av, e));
        TRY(load_matrix(from, b, bv, e));
        for (int64_t r = 0; r < rows; r++) {
            int64_t at = param_row_from_disk(w, r) - b->lora.first;
            if (at < 0 || at >= b->dim[0])
                continue;
            part_of[r] = (float)n;
            memcpy(up + r * rank, bv + at * rank, (size_t)rank * sizeof *up);
        }
        down[n++] = av;
    }
    *out =
        (struct peft_adapter){.key = w->key, .rows = rows, .in = w->dim[1], .part_of = part_of, .up = up, .down = down};
    return ST_OK;
}

int export_peft(const struct ckpt *from, const struct config *c, const struct export_opts *o, const char *base,
                struct err *e)
{
    struct paper paper;
    struct peft_adapter *list = NULL;
    struct arena memory;
    int st, n = 0;
    if (c->lora.rank == 0)
        return err_hint((err_set(e, ST_INVALID, "%s has no LoRA adapters", ckpt_path(from)), e),
                        "--format=hf writes the whole model");
    TRY(refuse_trained_base(from, e));
    TRY(paper_open(&paper, c, e));
    arena_init(&memory);
    TRY_OUT(mem_array((void **)&list, (size_t)paper.n, sizeof *list, e));
    for (int i = 0; i < paper.n; i++)
        if (adapters_of(&paper, i))
            TRY_OUT(collect(from, &paper, i, &memory, &list[n++], e));
    struct peft_export x = {
        .path = o->path, .config = c, .list = list, .n = n, .family = o->family, .base = base, .dtype = o->dtype};
    st = peft_export(&x, e);
out:
    free(list);
    arena_release(&memory);
    paper_close(&paper);
    return st;
}
