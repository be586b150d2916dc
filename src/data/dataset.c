/* Datasets: open every path of a blend, take the part, lay out samples, and answer "tokens of
 * sample i". Nothing changes after opening. */
#include "data/data_int.h"

#include <stdlib.h>
#include <string.h>

struct member {
    struct source src;
    bool from_text; /* a cached token file of the text that was named */
    struct part part;
    struct samples samples;
    double weight;     /* share of the blend */
    int64_t one_epoch; /* samples */
};

struct dataset {
    struct data_opts opts; /* strings are copies below */
    char *paths, *split;
    int n;
    struct member *members;
    bool by_size;
    int64_t n_samples;
    uint16_t *which;  /* of a blend: which member gives sample i, */
    uint32_t *sample; /* and which of its samples that is; NULL with one member */
};

static int check_opts(const struct data_opts *o, struct err *e)
{
    if (o->paths == NULL)
        return err_set(e, ST_INVALID, "no data path was given");
    if (o->seq < 1 || o->seq > 1 << 30)
        return err_set(e, ST_INVALID, "sequence length %lld is not in 1..2^30", (long long)o->seq);
    if (o->seed < 0 || o->seed > UINT32_MAX)
        return err_set(e, ST_INVALID, "data seed %lld is not in 0..2^32-1", (long long)o->seed);
    if (o->vocab < 1 || o->vocab > INT32_MAX)
        return err_set(e, ST_INVALID, "vocabulary of %lld is not in 1..2^31-1", (long long)o->vocab);
    if (o->eod < -1 || o->eod >= o->vocab)
        return err_set(e, ST_INVALID, "end-of-document id %d is outside the vocabulary of %lld", o->eod,
                       (long long)o->vocab);
    if (o->n_samples < 0 || o->n_samples > UINT32_MAX)
        return err_set(e, ST_INVALID, "%lld samples wanted, 0..2^32-1 can be laid out", (long long)o->n_samples);
    if ((unsigned)o->part > DATA_TEST)
        return err_set(e, ST_INVALID, "no data part %d", (int)o->part);
    return ST_OK;
}

static int open_member(struct dataset *ds, const char *path, struct err *e)
{
    const struct data_opts *o = &ds->opts;
    struct member *m = &ds->members[ds->n];
    char *cached;
    TRY(text_cache(o, path, &cached, e));
    int st = source_open(&m->src, cached != NULL ? cached : path, o->tokenizer, o->eod, e);
    m->from_text = cached != NULL;
    free(cached);
    TRY(st);
    ds->n++; /* from here on dataset_close closes it */
    if (m->src.kind == SOURCE_MEGATRON) {
        struct token_manifest about;
        TRY(token_manifest_read(m->src.path, &about, e));
        TRY(token_manifest_check(&about, m->src.path, m->src.n_tokens, o->tokenizer, e));
        TRY(token_manifest_check_chat(&about, m->src.path, m->src.loss_path != NULL, o->chat, o->loss_roles, e));
    }
    TRY(part_make(&m->part, &m->src, o->split, o->part, e));
    m->one_epoch = m->part.tokens > 0 ? (m->part.tokens - 1) / o->seq : 0;
    if (m->src.loss_path != NULL && m->part.n > 0) { /* how many samples there are shows when they are packed */
        TRY(samples_open(&m->samples, &m->src, &m->part, o->seq, 0, (uint32_t)o->seed, e));
        m->one_epoch = m->samples.n;
        samples_close(&m->samples);
    }
    return ST_OK;
}

static int layout_member(struct dataset *ds, struct member *m, int64_t wanted, struct err *e)
{
    int st = samples_open(&m->samples, &m->src, &m->part, ds->opts.seq, wanted, (uint32_t)ds->opts.seed, e);
    if (st != ST_OK)
        err_in(e, "laying out %s samples (split '%s')", part_name(ds->opts.part), ds->split ? ds->split : "none");
    if (st == ST_OK && m->samples.cut > 0 && ds->opts.note != NULL) {
        char line[512];
        snprintf(line, sizeof line,
                 "note: %.200s: %lld of %lld conversations have more than %lld tokens and lose their end (train.seq)",
                 m->src.path, (long long)m->samples.cut, (long long)m->part.n, (long long)ds->opts.seq + 1);
        ds->opts.note(ds->opts.note_ctx, line);
    }
    return st;
}

/* Without weights every member counts by its size, and one epoch of each is laid out while that is
 * enough; with no number of samples wanted either, each sample of each is used exactly once. */
static int layout_blend(struct dataset *ds, const double *weights, struct err *e)
{
    int64_t total = 0, wanted = ds->opts.n_samples;
    double *shares;
    int64_t *counts;
    int st;
    for (int k = 0; k < ds->n; k++)
        total += ds->members[k].one_epoch;
    ds->by_size = weights == NULL;
    ds->n_samples = wanted > 0 ? wanted : total;
    bool exhaust = ds->by_size && wanted == 0, one_epoch = ds->by_size && wanted <= total;
    if (ds->n_samples > UINT32_MAX)
        return err_set(e, ST_UNSUPPORTED, "a blend of %lld samples, at most 2^32-1 are supported",
                       (long long)ds->n_samples);
    TRY(mem_array((void **)&shares, (size_t)ds->n * 2, sizeof *shares, e));
    counts = (int64_t *)(void *)(shares + ds->n);
    for (int k = 0; k < ds->n; k++) {
        struct member *m = &ds->members[k];
        m->weight = weights ? weights[k] : (double)m->one_epoch / (double)max_i64(total, 1);
        shares[k] = m->weight;
        counts[k] = m->one_epoch;
        TRY_OUT(layout_member(ds, m, one_epoch ? 0 : blend_need(ds->n_samples, m->weight), e));
    }
    TRY_OUT(mem_array((void **)&ds->which, (size_t)ds->n_samples, sizeof *ds->which, e));
    TRY_OUT(mem_array((void **)&ds->sample, (size_t)ds->n_samples, sizeof *ds->sample, e));
    st = blend_fill(shares, exhaust ? counts : NULL, ds->n, ds->which, ds->sample, ds->n_samples, e);
out:
    free(shares);
    return st;
}

static int open_all(struct dataset *ds, const struct blend_spec *spec, struct err *e)
{
    bool talks = false;
    TRY(mem_array((void **)&ds->members, (size_t)spec->n, sizeof *ds->members, e));
    for (int k = 0; k < spec->n; k++) {
        TRY(open_member(ds, spec->paths[k], e));
        talks = talks || ds->members[k].src.loss_path != NULL;
    }
    if (ds->opts.chat != NULL && !talks) {
        err_set(e, ST_INVALID, "data.chat is set, but %s holds no conversations", ds->paths);
        return err_hint(e, "conversations are lines of JSON (*.jsonl), or token files that `braid data tokenize "
                           "--data.chat` made; an empty data.chat reads other text");
    }
    if (ds->n > 1 || spec->weights != NULL)
        return layout_blend(ds, spec->weights, e);
    ds->members[0].weight = 1;
    TRY(layout_member(ds, &ds->members[0], ds->opts.n_samples, e));
    ds->n_samples = ds->members[0].samples.n;
    return ST_OK;
}

int dataset_open(struct dataset **out, const struct data_opts *o, struct err *e)
{
    *out = NULL;
    TRY(check_opts(o, e));
    struct blend_spec spec;
    TRY(blend_parse(&spec, o->paths, e));
    struct dataset *ds = calloc(1, sizeof *ds);
    int st = ST_OK;
    if (ds != NULL) {
        ds->opts = *o;
        ds->paths = strdup(o->paths);
        ds->split = o->split ? strdup(o->split) : NULL;
        ds->opts.paths = ds->paths;
        ds->opts.split = ds->split;
    }
    if (ds == NULL || ds->paths == NULL || (o->split && ds->split == NULL))
        st = err_set(e, ST_NOMEM, "out of memory opening a dataset");
    else
        st = open_all(ds, &spec, e);
    blend_spec_release(&spec);
    if (st != ST_OK)
        dataset_close(ds);
    else
        *out = ds;
    return st;
}

void dataset_close(struct dataset *ds)
{
    if (ds == NULL)
        return;
    for (int k = 0; k < ds->n; k++) {
        samples_close(&ds->members[k].samples);
        source_close(&ds->members[k].src);
    }
    free(ds->members);
    free(ds->which);
    free(ds->sample);
    free(ds->paths);
    free(ds->split);
    free(ds);
}

int64_t dataset_n_samples(const struct dataset *ds) { return ds->n_samples; }
int64_t dataset_seq(const struct dataset *ds) { return ds->opts.seq; }

bool dataset_has_text(const struct dataset *ds)
{
    for (int k = 0; k < ds->n; k++)
        if (ds->members[k].src.kind == SOURCE_TEXT || ds->members[k].from_text)
            return true;
    return false;
}

int64_t dataset_tokens(const struct dataset *ds)
{
    int64_t total = 0;
    for (int k = 0; k < ds->n; k++)
        total += ds->members[k].part.tokens;
    return total;
}

int dataset_get(const struct dataset *ds, int64_t index, int32_t *tokens, struct err *e)
{
    return dataset_get_marked(ds, index, tokens, NULL, e);
}

int dataset_get_marked(const struct dataset *ds, int64_t index, int32_t *tokens, uint8_t *marks, struct err *e)
{
    if (index < 0)
        return err_set(e, ST_INVALID, "sample %lld does not exist", (long long)index);
    int64_t i = epoch_sample(ds->opts.seed, index, ds->n_samples);
    const struct member *m = &ds->members[ds->which ? ds->which[i] : 0];
    int64_t local = ds->sample ? ds->sample[i] % m->samples.n : i;
    int st = samples_get(&m->samples, local, ds->opts.vocab, tokens, marks, e);
    if (st != ST_OK)
        err_in(e, "reading %s sample %lld", part_name(ds->opts.part), (long long)index);
    return st;
}

static int identify_one(const char *path, struct file_id **list, size_t *cap, int *n, struct err *e)
{
    TRY(mem_grow((void **)list, cap, (size_t)*n + 1, sizeof **list, e));
    struct file_id *id = &(*list)[*n];
    TRY(file_identify(path, id, e));
    id->path = strdup(path);
    if (id->path == NULL)
        return err_set(e, ST_NOMEM, "out of memory identifying %s", path);
    ++*n;
    return ST_OK;
}

static int identify_pair(const struct source *s, struct file_id **list, size_t *cap, int *n, struct err *e)
{
    static const char *const suffixes[] = {".idx", ".bin", ".loss"};
    for (int i = 0; i < (s->loss_path != NULL ? 3 : 2); i++) {
        char path[4096];
        if (snprintf(path, sizeof path, "%s%s", s->path, suffixes[i]) >= (int)sizeof path)
            return err_set(e, ST_INVALID, "path too long: %.200s...", s->path);
        TRY(identify_one(path, list, cap, n, e));
    }
    return ST_OK;
}

int dataset_identify(const struct dataset *ds, struct file_id **list, int *n, struct err *e)
{
    size_t cap = 0;
    int st = ST_OK;
    *list = NULL;
    *n = 0;
    for (int k = 0; k < ds->n && st == ST_OK; k++) {
        const struct source *s = &ds->members[k].src;
        if (s->kind == SOURCE_MEGATRON)
            st = identify_pair(s, list, &cap, n, e);
        for (size_t i = 0; s->kind != SOURCE_MEGATRON && i < s->n_files && st == ST_OK; i++)
            st = identify_one(s->files[i].path, list, &cap, n, e);
    }
    if (st == ST_OK)
        return ST_OK;
    for (int i = 0; i < *n; i++)
        free((char *)(uintptr_t)(*list)[i].path);
    free(*list);
    *list = NULL;
    *n = 0;
    return st;
}

void dataset_describe(const struct dataset *ds, struct buf *out)
{
    char tokens[32], share[64];
    buf_addf(out, "%s data: %s tokens, %lld samples of %lld", part_name(ds->opts.part),
             human_count((double)dataset_tokens(ds), tokens, sizeof tokens), (long long)ds->n_samples,
             (long long)ds->opts.seq);
    if (ds->split != NULL && ds->split[0] != '\0')
        buf_addf(out, ", split %s", ds->split);
    buf_addf(out, ", seed %lld\n", (long long)ds->opts.seed);
    for (int k = 0; k < ds->n; k++) {
        const struct member *m = &ds->members[k];
        bool cut = m->part.head > 0 || m->part.tail > 0;
        share[0] = '\0';
        if (ds->n > 1)
            snprintf(share, sizeof share, ", share %.4g%s", m->weight, ds->by_size ? " (size)" : "");
        buf_addf(out, "  %s (%s): %lld tokens in %lld sequence%s%s, %lld epoch%s%s", m->src.path,
                 source_kind_name(m->src.kind), (long long)m->part.tokens, (long long)m->part.n,
                 m->part.n == 1 ? "" : "s", cut ? " (split within a sequence)" : "", (long long)m->samples.epochs,
                 m->samples.epochs == 1 ? "" : "s", share);
        if (m->samples.whole)
            buf_add(out, ", conversations packed whole");
        if (m->samples.cut > 0)
            buf_addf(out, ", %lld of them longer than a sample lose their end", (long long)m->samples.cut);
        if (m->src.skipped > 0)
            buf_addf(out, ", %lld files left out", (long long)m->src.skipped);
        buf_add(out, "\n");
    }
}
