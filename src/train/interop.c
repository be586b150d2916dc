/* Whole models to and from folders of other programs: what the import and export commands and run.load_weights call.
 * The model is laid out on paper only, for its list of parameters; values pass through one tensor at a time. */
#include "train/adapters_int.h"

#include <stdlib.h>
#include <string.h>

int paper_open(struct paper *p, const struct config *c, struct err *e)
{
    struct model_plan_opts o = {.name = "paper", .mode = BUILD_TRAIN, .batch = 1, .seq = c->train.seq};
    int st;
    *p = (struct paper){.n = 0};
    TRY(dev_open(&p->dev, DEV_CPU, 1, e));
    TRY_OUT(model_init(&p->model, c, &p->dev, e));
    TRY_OUT(model_plan_build(&p->model, &p->plan, &o, e));
    TRY_OUT(mem_array((void **)&p->params, (size_t)p->model.params.n, sizeof *p->params, e));
    for (int i = 0; i < p->model.params.n; i++)
        p->params[p->n++] = &p->model.params.list[i].p;
    return ST_OK;
out:
    paper_close(p);
    return st;
}

void paper_close(struct paper *p)
{
    free(p->params);
    model_plan_release(&p->plan);
    model_release(&p->model);
    dev_close(&p->dev);
    *p = (struct paper){.n = 0};
}

/* ---- tokenizers ------------------------------------------------------------------------------ */

int import_tokenizer(struct config *c, const char *folder, struct buf *notes, struct err *e)
{
    char *path = path_join(folder, "tokenizer.json");
    struct err why = {0};
    struct tokenizer tok;
    enum config_source from = config_source_of(c, "data.tokenizer").source;
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = ST_OK;
    if (file_exists(path) && from == CFG_FROM_DEFAULT) {
        if (tokenizer_open(&tok, path, true, &why) == ST_OK) {
            tokenizer_close(&tok);
            st = config_set(c, "data.tokenizer", path, folder, e);
        } else if (notes != NULL) {
            buf_addf(notes, "tokenizer.json is left out: %s\n", why.msg);
        }
    }
    free(path);
    return st;
}

/* Names that llama.cpp has for ways of splitting text. */
static const char *pre_tokenizer(const char *pattern)
{
    static const struct {
        const char *ours, *theirs;
    } names[] = {{"gpt2", "gpt-2"},    {"r50k", "gpt-2"},    {"llama3", "llama-bpe"},      {"qwen2", "qwen2"},
                 {"qwen35", "qwen35"}, {"tekken", "tekken"}, {"deepseek3", "deepseek-v3"}, {"o200k", "gpt-4o"}};
    for (int i = 0; pattern != NULL && i < countof(names); i++)
        if (str_starts(pattern, names[i].ours))
            return names[i].theirs;
    return NULL;
}

/* Where a vocabulary has no end of document, llama.cpp takes token 11 for it, most often a comma, and stops there. So
 * one is named that is never written: an id that stands for nothing, else the byte 255, which no UTF-8 text has. */
static int64_t end_token(const struct token_listing *l, int64_t n, const struct tokenizer *tok)
{
    if (tok->eod >= 0 || n > l->n)
        return tok->eod >= 0 ? tok->eod : l->n;
    for (int64_t i = 0; i < l->n; i++)
        if (strcmp(l->tokens[i], "\xc3\xbf") == 0) /* the character that stands for that byte */
            return i;
    return -1;
}

/* The vocabulary of a GGUF file has as many tokens as the model. */
static int fill_vocab(struct token_listing *l, const struct config *c, const struct tokenizer *tok,
                      struct gguf_vocab *v, struct err *e)
{
    int64_t n = c->model.vocab;
    const char **tokens = arena_alloc(&l->memory, (size_t)n * sizeof *tokens);
    int32_t *kinds = arena_alloc(&l->memory, (size_t)n * sizeof *kinds);
    if (tokens == NULL || kinds == NULL)
        return err_set(e, ST_NOMEM, "out of memory for a vocabulary");
    for (int64_t i = 0; i < n; i++) {
        tokens[i] = i < l->n ? l->tokens[i] : arena_printf(&l->memory, "<|unused_%lld|>", (long long)i);
        kinds[i] = i < l->n ? l->types[i] : TOKEN_UNUSED;
        if (tokens[i] == NULL)
            return err_set(e, ST_NOMEM, "out of memory for a vocabulary");
    }
    *v = (struct gguf_vocab){.model = "gpt2",
                             .pre = pre_tokenizer(l->pattern),
                             .n = n,
                             .n_merges = l->n_merges,
                             .tokens = tokens,
                             .types = kinds,
                             .merges = l->merges,
                             .bos = l->bos,
                             .eos = end_token(l, n, tok),
                             .add_bos = l->bos >= 0};
    if (v->pre == NULL)
        return err_set(e, ST_UNSUPPORTED, "llama.cpp has no name for the way this tokenizer splits text (%s)",
                       tokenizer_kind(tok));
    return ST_OK;
}

/* ---- import ---------------------------------------------------------------------------------- */

struct importer {
    struct hf_folder *folder;
    const struct param *const *params;
    int n;
    void *values;
    size_t cap;
    const struct interop_progress *progress;
    int64_t done, all;
};

static int fetch_param(void *ctx, const char *key, struct tensor *host, struct err *e)
{
    struct importer *m = ctx;
    for (int i = 0; i < m->n; i++)
        if (strcmp(m->params[i]->key, key) == 0) {
            TRY(mem_grow(&m->values, &m->cap, (size_t)tensor_elems(host), sizeof(float), e));
            struct tensor wide = tensor_shape(DT_F32, host->rank, host->dim);
            wide.data = host->data = m->values;
            TRY(hf_load(m->folder, i, &wide, e));
            if (host->dtype != DT_F32) /* a table: elements of the same size */
                tensor_convert(host, &wide);
            m->done += tensor_bytes(host);
            if (m->progress != NULL)
                m->progress->fn(m->progress->ctx, m->done, m->all);
            return ST_OK;
        }
    return err_set(e, ST_INTERNAL, "there is no rule to import %s", key);
}

int import_hf(struct hf_folder *f, struct config *c, const char *run_dir, const struct interop_progress *progress,
              struct buf *notes, struct err *e)
{
    struct paper paper;
    struct ckpt_item *items = NULL;
    struct buf text;
    int st;
    TRY(paper_open(&paper, c, e));
    buf_init(&text, 0);
    struct importer m = {.folder = f, .params = paper.params, .n = paper.n, .progress = progress};
    struct tokenizer tok = {.eod = -1};
    struct ckpt_file files[CKPT_MAX_FILES];
    int n_files = 0;
    TRY_OUT(hf_bind(f, c, paper.params, paper.n, notes, e));
    TRY_OUT(mem_array((void **)&items, (size_t)paper.n, sizeof *items, e));
    for (int i = 0; i < paper.n; i++) {
        const struct param *p = paper.params[i];
        items[i] = (struct ckpt_item){
            .key = p->key, .host = tensor_shape(param_dtype(p, DT_F32), p->rank, p->dim), .section = CKPT_MODEL};
        m.all += tensor_bytes(&items[i].host);
    }
    TRY_OUT(tokenizer_for(c, &tok, e));
    TRY_OUT(tokenizer_pack(&tok, files, &n_files, e));
    config_write(c, &text, false);
    TRY_OUT(buf_check(&text, e));
    struct ckpt_source source = {fetch_param, &m};
    struct ckpt_save_args args = {.run_dir = run_dir,
                                  .items = items,
                                  .n_items = paper.n,
                                  .source = &source,
                                  .config_text = text.text,
                                  .files = files,
                                  .n_files = n_files,
                                  .counters = {.seed = (uint64_t)c->run.seed}};
    st = ckpt_save(&args, e);
out:
    tokenizer_unpack(files, n_files);
    tokenizer_close(&tok);
    free(m.values);
    free(items);
    buf_release(&text);
    paper_close(&paper);
    return st;
}

/* ---- export ---------------------------------------------------------------------------------- */

struct exporter {
    const struct ckpt *from;
    const struct config *config;
    const struct paper *paper;   /* the model as it was saved */
    const struct param **params; /* those of the model without adapters, as they are written */
    int *index;                  /* of each in the paper model */
    int n;
    void *values;
    size_t cap;
    int held; /* parameter whose values these are; -1: none */
    const struct interop_progress *progress;
};

/* Straight from the map where the file has F32 at an aligned place, else by way of a copy. */
static int fetch_stored(void *ctx, int i, struct tensor *host, struct err *e)
{
    struct exporter *x = ctx;
    const char *key = x->paper->params[x->index[i]]->key;
    bool adapted = adapters_of(x->paper, x->index[i]);
    if (x->held == i) {
        host->data = x->values;
        return ST_OK;
    }
    for (int k = 0; k < ckpt_count(x->from) && !adapted; k++) {
        struct ckpt_tensor t = ckpt_at(x->from, k);
        if (t.section != CKPT_MODEL || strcmp(t.key, key) != 0)
            continue;
        if (t.view.dtype == DT_F32 && (uintptr_t)t.view.data % sizeof(float) == 0 && tensor_same_shape(&t.view, host)) {
            host->data = t.view.data;
            return ST_OK;
        }
    }
    x->held = -1;
    TRY(mem_grow(&x->values, &x->cap, (size_t)tensor_elems(host), sizeof(float), e));
    host->data = x->values;
    TRY(ckpt_load(x->from, key, CKPT_MODEL, host, NULL, e));
    if (adapted)
        TRY(adapters_merge(x->from, x->config, x->paper, x->index[i], x->values, e));
    x->held = i;
    return ST_OK;
}

/* The layers of `as` are those of the paper model, under other numbers perhaps. */
static int list_base(struct exporter *x, const struct paper *as, struct err *e)
{
    if (as->n != x->paper->n)
        return err_set(e, ST_INTERNAL, "%d parameters in groups, %d as saved", as->n, x->paper->n);
    TRY(mem_array((void **)&x->params, (size_t)as->n, sizeof *x->params, e));
    TRY(mem_array((void **)&x->index, (size_t)as->n, sizeof *x->index, e));
    for (int i = 0; i < as->n; i++)
        if (as->params[i]->lora.of == 0) {
            x->params[x->n] = as->params[i];
            x->index[x->n++] = i;
        }
    return ST_OK;
}

static void pass_progress(void *ctx, int64_t done, int64_t all)
{
    const struct exporter *x = ctx;
    if (x->progress != NULL)
        x->progress->fn(x->progress->ctx, done, all);
}

static int write_gguf(const struct hf_export *x, enum gguf_type type, struct err *e)
{
    struct tokenizer tok = {.eod = -1};
    struct token_listing list = {.n = 0};
    struct gguf_vocab vocab;
    int st;
    TRY(tokenizer_for(x->config, &tok, e));
    TRY_OUT(token_listing_open(&list, &tok, e));
    TRY_OUT(fill_vocab(&list, x->config, &tok, &vocab, e));
    st = gguf_export(x, type, &vocab, e);
out:
    token_listing_close(&list);
    tokenizer_close(&tok);
    return st;
}

/* gguf: the type of a GGUF file's matrices; NULL: a folder. */
static int export_as(const struct ckpt *from, const struct config *c, const struct export_opts *o,
                     const enum gguf_type *gguf, struct err *e)
{
    struct paper paper, as;
    struct config written;
    struct buf pattern;
    TRY(paper_open(&paper, c, e));
    buf_init(&pattern, 0);
    hf_as_written(c, o->family, &written, &pattern);
    struct exporter x = {.from = from, .config = c, .paper = &paper, .held = -1, .progress = o->progress};
    int st = paper_open(&as, &written, e);
    bool opened = st == ST_OK;
    if (st == ST_OK)
        st = list_base(&x, &as, e);
    struct hf_export args = {.path = o->path,
                             .config = &written,
                             .params = x.params,
                             .n_params = x.n,
                             .fetch = fetch_stored,
                             .ctx = &x,
                             .family = o->family,
                             .dtype = o->dtype,
                             .shard_bytes = o->shard_bytes,
                             .extra_files = o->extra_files,
                             .n_extra_files = o->n_extra_files,
                             .progress = pass_progress};
    if (st == ST_OK)
        st = gguf != NULL ? write_gguf(&args, *gguf, e) : hf_export(&args, e);
    free(x.values);
    free(x.params);
    free(x.index);
    if (opened)
        paper_close(&as);
    buf_release(&pattern);
    paper_close(&paper);
    return st;
}

int export_hf(const struct ckpt *from, const struct config *c, const struct export_opts *o, struct err *e)
{
    return export_as(from, c, o, NULL, e);
}

int export_gguf(const struct ckpt *from, const struct config *c, const struct export_opts *o, enum gguf_type type,
                struct err *e)
{
    return export_as(from, c, o, &type, e);
}
