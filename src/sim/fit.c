/* The fastest plan that fits; see fit.h.
 *
 * For each size of microbatch the activations that are kept are the items of a knapsack. Each one that can be
 * recomputed is tried alone, which gives its price in seconds for a byte; then they are recomputed in the order of that
 * price, one more at a time, and where that is not enough the largest of the others wait in host memory. The last item
 * of each list is cut to the number of layers that are needed. Models with more kinds of activations than MOST_ITEMS
 * have the largest tried so. Where nothing fits, everything is recomputed. Memory is that of the planner, to the byte.
 * */
#include "sim/fit.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_ITEMS = 24, MOST_LISTED = 256, MOST_TAG = 64, MOST_MICROS = 16, MANY_MICROS = 2 };

struct item {
    char tag[MOST_TAG];
    bool blocks;    /* not a tag: plan.recompute_block = auto */
    int64_t bytes;  /* saved, of one microbatch */
    bool recompute; /* can be recomputed */
    double price;   /* seconds for a byte */
};
struct search {
    struct fit *f;
    const struct fit_opts *o;
    const struct machine *m;
    struct config c;    /* a copy that candidates are set in */
    int64_t dp, micros; /* data-parallel ranks; microbatches of the configuration's global batch, of one sample each */
    int layers;
    struct item item[MOST_LISTED + 1]; /* of a plan; then the MOST_ITEMS largest, and blocks of streams */
    int n_items, n_cheap;              /* items; of those, the first n_cheap are recomputed in this order */
    struct err *e;
};

/* ---- one candidate --------------------------------------------------------------------------- */

static int set_number(struct config *c, const char *name, int64_t v, struct err *e)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)v);
    return config_set(c, name, text, NULL, e);
}

int fit_apply(const struct fit_row *r, struct config *c, struct err *e)
{
    TRY(set_number(c, "train.global_batch", c->train.global_batch, e));
    TRY(set_number(c, "train.micro_batch", r->micro_batch, e));
    TRY(set_number(c, "train.loss_chunk", r->loss_chunk, e));
    TRY(config_set(c, "plan.recompute_granularity", "none", NULL, e));
    TRY(config_set(c, "plan.recompute", r->recompute, NULL, e));
    TRY(config_set(c, "plan.offload", r->offload, NULL, e));
    return config_set(c, "plan.recompute_block", r->blocks ? "auto" : "off", NULL, e);
}

int fit_copy_config(struct config *to, const struct config *c, struct err *e)
{
    struct buf text;
    buf_init(&text, 0);
    config_write(c, &text, false);
    int st = buf_check(&text, e);
    if (st == ST_OK)
        st = config_init(to, e);
    if (st == ST_OK)
        st = config_read_ini_text(to, text.text, text.len, "the configuration", e);
    buf_release(&text);
    TRY(st);
    TRY(config_set(to, "run.device",
                   c->run.device == CFG_DEVICE_CUDA  ? "cuda"
                   : c->run.device == CFG_DEVICE_REF ? "ref"
                                                     : "cpu",
                   NULL, e));
    TRY(set_number(to, "run.threads", c->run.threads, e));
    TRY(config_set(to, "plan.fit", "off", NULL, e));
    return config_finish(to, e);
}

/* What one rank and one step take. Microbatches that run one after the other are alike but for the first, which may
 * have an update beside it: two are simulated. */
static void measure(const struct search *s, const struct timeline *tl, int64_t all, struct fit_row *r)
{
    const struct trainer *t = &tl->rank[0].t;
    r->bytes = r->host = 0;
    for (int k = 0; k < tl->n; k++) {
        const struct memory *mem = &tl->rank[k].t.model.mem;
        int64_t bytes = memory_total(mem, mem->planned, false);
        if (s->o->counts_host)
            bytes += tl->rank[k].host;
        r->bytes = max_i64(r->bytes, bytes);
        r->host = max_i64(r->host, tl->rank[k].host);
    }
    double first = tl->train.sim.makespan / (double)t->n_micro; /* seconds of the first microbatch */
    for (int i = 0; i < tl->train.sim.rank[0].n; i++) {
        const struct sim_task *k = &tl->train.sim.rank[0].task[i];
        if (k->lane == LANE_COMPUTE && k->name != NULL && strcmp(k->name, "join") == 0) {
            first = k->end;
            break;
        }
    }
    double others = t->n_micro > 1 ? (tl->train.sim.makespan - first) / (double)(t->n_micro - 1) : first;
    r->seconds = tl->train.sim.makespan + others * (double)(all - t->n_micro) + tl->update.sim.makespan;
    r->fits = (double)r->bytes <= s->o->budget && (s->o->host <= 0 || (double)r->host <= s->o->host);
}

/* Plans the row; what it saves is listed where items is set. A row that cannot be (a name that means nothing beside the
 * others) is one that does not fit. */
static int try_row(struct search *s, struct fit_row *r, bool list_items);

/* Remembers a row that fits, and the smallest of all. */
static int note(struct search *s, const struct fit_row *r)
{
    struct fit *f = s->f;
    if (f->tried == 1 || r->bytes < f->smallest.bytes)
        f->smallest = *r;
    if (!r->fits)
        return ST_OK;
    TRY(mem_grow((void **)&f->row, &f->cap, (size_t)f->n + 1, sizeof *f->row, s->e));
    f->row[f->n++] = *r;
    return ST_OK;
}

/* ---- items ----------------------------------------------------------------------------------- */

static struct item *item_of(struct search *s, const char *tag)
{
    for (int i = 0; i < s->n_items; i++)
        if (strcmp(s->item[i].tag, tag) == 0)
            return &s->item[i];
    if (s->n_items == MOST_LISTED || strlen(tag) >= MOST_TAG)
        return NULL;
    struct item *x = &s->item[s->n_items++];
    *x = (struct item){0};
    snprintf(x->tag, sizeof x->tag, "%s", tag);
    return x;
}

/* FP8 codes go by the name of their slot, in policies as here. */
static void list_saved(struct search *s, const struct plan *p)
{
    for (int i = 0; i < p->n_inst; i++) {
        const struct instance *x = &p->inst[i];
        const struct slot *slot = &p->g->slots[x->slot];
        if (x->mb != 0 || x->arena != ARENA_FRAME || x->merged >= 0 ||
            p->g->nodes[p->steps[x->first_step].ref.node].host)
            continue;
        struct item *k = item_of(s, slot->tag);
        if (k == NULL)
            continue;
        k->bytes += x->bytes;
        k->recompute |= slot->replay >= 0 && !slot->weight;
        s->layers = slot->layer + 1 > s->layers ? slot->layer + 1 : s->layers;
    }
}

static int try_row(struct search *s, struct fit_row *r, bool list_items)
{
    struct timeline tl = {0};
    int64_t all = s->micros / r->micro_batch, shown = all;
    struct err why = {0};
    TRY(fit_apply(r, &s->c, s->e));
    if (s->c.parallel.pp == 1 && s->c.parallel.vpp == 1 && s->c.parallel.overlap == CFG_OVERLAP_NONE)
        shown = min_i64(all, MANY_MICROS);
    TRY(set_number(&s->c, "train.global_batch", shown * r->micro_batch * s->dp, s->e));
    int st = timeline_open(&tl, &s->c, s->m, NULL, &why);
    TRY(set_number(&s->c, "train.global_batch", s->micros * s->dp, s->e));
    if (st == ST_OK) {
        measure(s, &tl, all, r);
        for (int k = 0; list_items && k < tl.n; k++)
            list_saved(s, &tl.rank[k].t.train.p);
    }
    timeline_close(&tl);
    s->f->tried++;
    if (st == ST_USAGE && !list_items) { /* these names mean nothing together */
        r->fits = false;
        r->bytes = INT64_MAX;
        return ST_OK;
    }
    if (st != ST_OK) {
        *s->e = why;
        return st;
    }
    return note(s, r);
}

static int by_price(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    int order = (x->price > y->price) - (x->price < y->price);
    return order != 0 ? order : strcmp(x->tag, y->tag);
}

static int by_bytes(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    int order = (x->bytes < y->bytes) - (x->bytes > y->bytes);
    return order != 0 ? order : strcmp(x->tag, y->tag);
}

/* Tries every item alone and puts those that give memory back in front, cheapest first; the others by size. */
static int price_items(struct search *s, const struct fit_row *base)
{
    qsort(s->item, (size_t)s->n_items, sizeof *s->item, by_bytes);
    s->n_items = s->n_items < MOST_ITEMS ? s->n_items : MOST_ITEMS;
    if (s->c.model.mhc_streams > 0)
        s->item[s->n_items++] = (struct item){.blocks = true, .recompute = true, .tag = "blocks of streams"};
    for (int i = 0; i < s->n_items; i++) {
        struct fit_row r = *base;
        struct item *x = &s->item[i];
        x->price = 1e30;
        if (!x->recompute)
            continue;
        r.blocks = x->blocks;
        if (!x->blocks)
            snprintf(r.recompute, sizeof r.recompute, "%s", x->tag);
        TRY(try_row(s, &r, false));
        if (r.bytes < base->bytes)
            x->price = (r.seconds > base->seconds ? r.seconds - base->seconds : 0) / (double)(base->bytes - r.bytes);
    }
    qsort(s->item, (size_t)s->n_items, sizeof *s->item, by_price);
    s->n_cheap = 0;
    while (s->n_cheap < s->n_items && s->item[s->n_cheap].price < 1e29)
        s->n_cheap++;
    qsort(s->item + s->n_cheap, (size_t)(s->n_items - s->n_cheap), sizeof *s->item, by_bytes);
    return ST_OK;
}

/* ---- lists of words -------------------------------------------------------------------------- */

/* One more word, for the first `layers` layers; 0: for all. */
static void add_word(char *out, const char *tag, int layers)
{
    size_t n = strlen(out);
    char count[16] = "";
    if (layers > 0)
        snprintf(count, sizeof count, ":%d", layers);
    if (n + strlen(tag) + strlen(count) + 2 < FIT_WORDS)
        snprintf(out + n, FIT_WORDS - n, "%s%s%s", n > 0 ? "," : "", tag, count);
}

/* The first n_recompute of the cheap items are recomputed, the last of them in `cut` layers only (0: all). Of the
 * others, the n_offload largest wait in host memory, likewise. */
struct lists {
    int n_recompute, n_offload, cut_recompute, cut_offload;
};

static int rest_by_size(const struct search *s, int n_recompute, struct item *rest)
{
    int n = 0;
    for (int i = n_recompute; i < s->n_items; i++)
        if (!s->item[i].blocks)
            rest[n++] = s->item[i];
    if (n > 0)
        qsort(rest, (size_t)n, sizeof *rest, by_bytes);
    return n;
}

static struct fit_row row_of(const struct search *s, const struct fit_row *base, const struct lists *l)
{
    struct fit_row r = *base;
    struct item rest[MOST_ITEMS + 1];
    int n = rest_by_size(s, l->n_recompute, rest);
    r.recompute[0] = r.offload[0] = '\0';
    r.blocks = false;
    for (int i = 0; i < l->n_recompute; i++)
        if (s->item[i].blocks)
            r.blocks = true;
        else
            add_word(r.recompute, s->item[i].tag, i == l->n_recompute - 1 ? l->cut_recompute : 0);
    for (int i = 0; i < l->n_offload && i < n; i++)
        add_word(r.offload, rest[i].tag, i == l->n_offload - 1 ? l->cut_offload : 0);
    return r;
}

/* The smallest value in [low, high] for which the row fits, given that it does for high: the fewer, the faster. */
static int least(struct search *s, const struct fit_row *base, struct lists *l, int *value, int low, int high)
{
    while (low < high) {
        *value = (low + high) / 2;
        struct fit_row r = row_of(s, base, l);
        TRY(try_row(s, &r, false));
        if (r.fits)
            high = *value;
        else
            low = *value + 1;
    }
    *value = high;
    return ST_OK;
}

/* ---- the search ------------------------------------------------------------------------------ */

/* With the first n of the cheap items recomputed: the fewest offloaded ones that make it fit. */
static int try_offload(struct search *s, const struct fit_row *base, int n)
{
    struct item rest[MOST_ITEMS + 1];
    int most = rest_by_size(s, n, rest);
    struct lists l = {.n_recompute = n, .n_offload = most};
    struct fit_row r = row_of(s, base, &l);
    if (most == 0)
        return ST_OK;
    TRY(try_row(s, &r, false));
    if (!r.fits)
        return ST_OK;
    TRY(least(s, base, &l, &l.n_offload, 1, most));
    return least(s, base, &l, &l.cut_offload, 1, s->layers);
}

static int try_micro(struct search *s, const struct fit_row *base, bool *fits_plainly)
{
    struct fit_row plain = *base;
    s->n_items = 0;
    TRY(try_row(s, &plain, true));
    *fits_plainly = plain.fits;
    if (plain.fits)
        return ST_OK;
    TRY(price_items(s, &plain));
    TRY(try_offload(s, base, 0));
    for (int n = 1; n <= s->n_cheap; n++) {
        struct lists l = {.n_recompute = n};
        struct fit_row r = row_of(s, base, &l);
        TRY(try_row(s, &r, false));
        if (r.fits) /* more would only take longer */
            return s->item[n - 1].blocks ? ST_OK : least(s, base, &l, &l.cut_recompute, 1, s->layers);
        TRY(try_offload(s, base, n));
    }
    return ST_OK;
}

/* Sizes of microbatches, largest first. */
static int micro_sizes(const struct search *s, int64_t *out)
{
    int n = 0;
    for (int64_t b = s->micros; b >= 1; b--)
        if (s->micros % b == 0) {
            if (n == MOST_MICROS) { /* the large ones are the least likely to fit */
                memmove(out, out + 1, (size_t)(n - 1) * sizeof *out);
                n--;
            }
            out[n++] = b;
        }
    return n;
}

static int by_seconds(const void *a, const void *b)
{
    const struct fit_row *x = a, *y = b;
    if (x->seconds != y->seconds)
        return x->seconds < y->seconds ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* Everything is recomputed, also what has no name of its own in the lists, with offload of the rest and without. */
static int try_extremes(struct search *s, int64_t micro_batch, int64_t chunk)
{
    static const char *const words[] = {"full", "*"};
    for (int i = 0; i < countof(words); i++)
        for (int blocks = 0; blocks <= (s->c.model.mhc_streams > 0); blocks++)
            for (int offload = 0; offload <= !s->o->counts_host; offload++) {
                struct fit_row r = {.micro_batch = micro_batch, .loss_chunk = chunk, .blocks = blocks};
                snprintf(r.recompute, sizeof r.recompute, "%s", words[i]);
                snprintf(r.offload, sizeof r.offload, "%s", offload ? "*" : "");
                TRY(try_row(s, &r, false));
            }
    return ST_OK;
}

static int search_all(struct search *s)
{
    static const int64_t chunks[] = {0, 2048, 256};
    int64_t sizes[MOST_MICROS];
    int n = s->o->keep_micro ? 0 : micro_sizes(s, sizes);
    bool plainly = false;
    if (s->o->keep_micro)
        sizes[n++] = s->c.train.micro_batch;
    for (int k = 0; k < countof(chunks) && s->f->n == 0; k++) {
        int64_t chunk = s->o->keep_micro && k == 0 ? s->f->as_given.loss_chunk : chunks[k];
        for (int i = 0; i < n && !plainly; i++) /* smaller microbatches than one that fits as it is gain nothing */
            TRY(try_micro(s, &(struct fit_row){.micro_batch = sizes[i], .loss_chunk = chunk}, &plainly));
        if (s->f->n == 0)
            TRY(try_extremes(s, sizes[n - 1], chunk));
    }
    return ST_OK;
}

static int given(struct search *s, const struct config *c)
{
    struct fit_row *r = &s->f->as_given;
    struct timeline tl = {0};
    *r = (struct fit_row){.micro_batch = c->train.micro_batch,
                          .loss_chunk = c->train.loss_chunk,
                          .blocks = strcmp(c->plan.recompute_block, "off") != 0};
    snprintf(r->recompute, sizeof r->recompute, "%s", c->plan.recompute);
    snprintf(r->offload, sizeof r->offload, "%s", c->plan.offload);
    int st = timeline_open(&tl, &s->c, s->m, NULL, s->e);
    if (st == ST_OK) {
        measure(s, &tl, tl.rank[0].t.n_micro, r);
        s->dp = tl.rank[0].t.model.mesh.dp;
        s->micros = c->train.global_batch / s->dp;
    }
    timeline_close(&tl);
    return st;
}

int fit_search(struct fit *f, const struct config *c, const struct machine *m, const struct fit_opts *o, struct err *e)
{
    struct search s = {.f = f, .o = o, .m = m, .e = e};
    *f = (struct fit){0};
    int st = fit_copy_config(&s.c, c, e);
    if (st == ST_OK)
        st = given(&s, c);
    if (st == ST_OK && !(o->keep_micro && f->as_given.fits))
        st = search_all(&s);
    if (f->n > 0)
        qsort(f->row, (size_t)f->n, sizeof *f->row, by_seconds);
    config_release(&s.c);
    return st;
}

void fit_release(struct fit *f)
{
    free(f->row);
    *f = (struct fit){0};
}

/* ---- showing --------------------------------------------------------------------------------- */

void fit_options(const struct fit_row *r, const struct config *c, struct buf *out)
{
    if (r->micro_batch != c->train.micro_batch)
        buf_addf(out, " --train.micro_batch=%lld --train.global_batch=%lld", (long long)r->micro_batch,
                 (long long)c->train.global_batch);
    if (r->loss_chunk != c->train.loss_chunk)
        buf_addf(out, " --train.loss_chunk=%lld", (long long)r->loss_chunk);
    if (strcmp(r->recompute, c->plan.recompute) != 0)
        buf_addf(out, " --plan.recompute=%s", r->recompute);
    if (c->plan.recompute_granularity != CFG_GRANULARITY_NONE)
        buf_add(out, " --plan.recompute_granularity=none");
    if (strcmp(r->blocks ? "auto" : "off", c->plan.recompute_block) != 0)
        buf_addf(out, " --plan.recompute_block=%s", r->blocks ? "auto" : "off");
    if (strcmp(r->offload, c->plan.offload) != 0)
        buf_addf(out, " --plan.offload=%s", r->offload);
}

static void print_row(const struct fit_row *r, const struct config *c, struct buf *out)
{
    char a[32], b[32];
    struct buf options;
    buf_init(&options, 0);
    fit_options(r, c, &options);
    buf_addf(out, "%10.1f %12s %12s %s\n", r->seconds * 1e3, human_bytes((double)r->bytes, a, sizeof a),
             r->host > 0 ? human_bytes((double)r->host, b, sizeof b) : "-",
             options.len > 0 ? options.text : " as configured");
    buf_release(&options);
}

/* The same words, whatever the number of layers behind a colon. */
static bool same_words(const char *a, const char *b)
{
    while (*a != '\0' && *a == *b) {
        a++, b++;
        if (*a == ':' || *b == ':') {
            a += *a == ':' ? strcspn(a, ",") : 0;
            b += *b == ':' ? strcspn(b, ",") : 0;
        }
    }
    return *a == *b;
}

static bool same_names(const struct fit_row *a, const struct fit_row *b)
{
    return a->micro_batch == b->micro_batch && a->loss_chunk == b->loss_chunk && a->blocks == b->blocks &&
           same_words(a->recompute, b->recompute) && same_words(a->offload, b->offload);
}

static void print_smallest(const struct fit *f, const struct config *c, struct buf *out)
{
    char a[32];
    struct buf options;
    buf_init(&options, 0);
    fit_options(&f->smallest, c, &options);
    buf_addf(out, "nothing fits; the smallest memory that works is %s, with%s",
             human_bytes((double)f->smallest.bytes, a, sizeof a), options.len > 0 ? options.text : " these options");
    buf_release(&options);
}

void fit_print(const struct fit *f, const struct config *c, const struct fit_opts *o, struct buf *out)
{
    enum { SHOWN = 6 };
    char a[32];
    int shown = 0;
    buf_addf(out, "plan.fit: %d plans tried for %s; times PREDICTED\n", f->tried, human_bytes(o->budget, a, sizeof a));
    if (f->n == 0) {
        print_smallest(f, c, out);
        buf_add(out, "\n");
        return;
    }
    buf_addf(out, "%10s %12s %12s  %s\n", "ms/step", "memory", "host", "options (the first is chosen)");
    for (int i = 0; i < f->n && shown < SHOWN; i++) { /* rows that differ in numbers of layers only are one */
        bool seen = false;
        for (int k = 0; k < i && !seen; k++)
            seen = same_names(&f->row[i], &f->row[k]);
        if (seen)
            continue;
        print_row(&f->row[i], c, out);
        shown++;
    }
    buf_addf(out, "%s", f->as_given.fits ? "" : "as configured it does not fit:\n");
    print_row(&f->as_given, c, out);
}

void fit_verdict(const struct fit *f, const struct config *c, const struct fit_opts *o, struct buf *out)
{
    char a[32];
    buf_addf(out, "fits %s: %s (%s)", o->name, f->as_given.fits ? "yes" : "no",
             human_bytes((double)f->as_given.bytes, a, sizeof a));
    if (!f->as_given.fits && f->n > 0) {
        buf_add(out, "; the smallest change that fits:");
        fit_options(&f->row[0], c, out);
        buf_addf(out, " (%s, predicted time x %.2f)", human_bytes((double)f->row[0].bytes, a, sizeof a),
                 f->row[0].seconds / f->as_given.seconds);
    } else if (!f->as_given.fits) {
        buf_add(out, "; ");
        print_smallest(f, c, out);
    }
    buf_add(out, "\n");
}
