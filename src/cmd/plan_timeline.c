/* braid plan --timeline, --predict: what a step of all ranks takes, as a picture and as tables. */
#include "cmd/cmd.h"
#include "sim/search.h"
#include "sim/timeline.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* ---- words ----------------------------------------------------------------------------------- */

static int take_number(const char *name, const char *text, double unit, double least, double *out, struct err *e)
{
    double v;
    if (text == NULL)
        return ST_OK;
    if (!parse_f64(text, &v) || !(v >= least) || v > 1e9)
        return err_set(e, ST_USAGE, "--%s=%s is not a number of at least %g", name, text, least);
    *out = v * unit;
    return ST_OK;
}

static int machine_from(struct machine *m, const struct timeline_words *w, struct err *e)
{
    double gpus;
    *m = machine_h200();
    gpus = m->gpus;
    TRY(take_number("flops", w->flops, 1e12, 1e-6, &m->flops, e));
    TRY(take_number("attention", w->attention, 1e12, 1e-6, &m->attention, e));
    if (w->attention != NULL) { /* one rate, whatever the length */
        m->attention_back = m->attention;
        m->attention_ramp = 0;
    }
    TRY(take_number("bandwidth", w->bandwidth, 1e12, 1e-6, &m->bandwidth, e));
    TRY(take_number("link_gbps", w->link_gbps, 1e9, 1e-6, &m->link, e));
    TRY(take_number("link_us", w->link_us, 1e-6, 0, &m->link_delay, e));
    TRY(take_number("node_gbps", w->node_gbps, 1e9, 1e-6, &m->inner, e));
    TRY(take_number("node_gpus", w->node_gpus, 1, 1, &gpus, e));
    TRY(take_number("beside", w->beside, 1, 0, &m->beside, e));
    TRY(take_number("host_gbps", w->host_gbps, 1e9, 1e-6, &m->host, e));
    if (w->memory != NULL && !config_memory(w->memory, &m->memory))
        return err_set(e, ST_USAGE, "--memory=%s is no amount of memory such as 80 or 74GiB", w->memory);
    m->gpus = (int)gpus;
    return ST_OK;
}

static int set_number(struct config *c, const char *name, int64_t v, struct err *e)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)v);
    return config_set(c, name, text, NULL, e);
}

/* ---- measuring ------------------------------------------------------------------------------- */

/* The same model on one rank, one microbatch a step. */
static int config_alone(struct config *alone, const struct config *c, struct err *e)
{
    struct buf text;
    buf_init(&text, 0);
    config_write(c, &text, false);
    int st = buf_check(&text, e);
    if (st == ST_OK)
        st = config_init(alone, e);
    if (st == ST_OK)
        st = config_read_ini_text(alone, text.text, text.len, "the configuration", e);
    buf_release(&text);
    TRY(st);
    static const char *const ones[] = {"parallel.tp",  "parallel.cp", "parallel.pp",
                                       "parallel.vpp", "parallel.ep", "parallel.etp"};
    for (int i = 0; i < countof(ones); i++)
        TRY(config_set(alone, ones[i], "1", NULL, e));
    TRY(config_set(alone, "parallel.overlap", "none", NULL, e));
    TRY(config_set(alone, "parallel.ranks", "1", NULL, e));
    TRY(set_number(alone, "train.global_batch", c->train.micro_batch, e));
    TRY(config_set(alone, "run.device",
                   c->run.device == CFG_DEVICE_CUDA  ? "cuda"
                   : c->run.device == CFG_DEVICE_REF ? "ref"
                                                     : "cpu",
                   NULL, e));
    TRY(set_number(alone, "run.threads", c->run.threads, e));
    return config_finish(alone, e);
}

static int measure(struct node_times **out, const struct config *c, struct err *e)
{
    struct config alone = {0};
    char data[64] = "";
    int st = config_alone(&alone, c, e);
    if (st == ST_OK && alone.data.train[0] == '\0') {
        st = cmd_random_data(&alone, data, sizeof data, e);
        if (st == ST_OK)
            st = config_set(&alone, "data.train", data, NULL, e);
    }
    if (st == ST_OK)
        st = node_times_measure(out, &alone, e);
    if (data[0] != '\0')
        remove(data);
    config_release(&alone);
    return st;
}

/* ---- one mesh -------------------------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), k = strlen(end);
    return n >= k && strcmp(text + n - k, end) == 0;
}

static int show(const struct timeline *tl, const char *file, struct err *e)
{
    struct buf text, picture;
    buf_init(&text, 0);
    buf_init(&picture, 0);
    timeline_print(tl, &text);
    (ends_with(file, ".json") ? timeline_trace : timeline_svg)(tl, &picture);
    int st = buf_check(&text, e);
    if (st == ST_OK)
        st = buf_check(&picture, e);
    if (st == ST_OK)
        st = file_write_atomic(file, picture.text, picture.len, e);
    if (st == ST_OK)
        printf("%s\n%s: %s\n", text.text, file,
               ends_with(file, ".json") ? "open it in ui.perfetto.dev" : "open it in a browser");
    buf_release(&text);
    buf_release(&picture);
    return st;
}

static int one_mesh(struct config *c, const struct timeline_words *w, const struct machine *m, struct err *e)
{
    struct timeline tl = {0};
    struct node_times *times = NULL;
    bool on = false;
    if (w->measure != NULL && !parse_bool(w->measure, &on))
        return err_set(e, ST_USAGE, "--measure takes on or off");
    if (!ends_with(w->file, ".svg") && !ends_with(w->file, ".json"))
        return err_set(e, ST_USAGE,
                       "--timeline=%s: the name must end in .svg (a picture) or .json (a trace for Perfetto)", w->file);
    int st = on ? measure(&times, c, e) : ST_OK;
    if (st == ST_OK)
        st = timeline_open(&tl, c, m, times, e);
    if (st == ST_OK)
        st = show(&tl, w->file, e);
    timeline_close(&tl);
    node_times_close(times);
    return st;
}

/* ---- a table of meshes ----------------------------------------------------------------------- */

enum { MOST_MESHES = 32, MOST_STAGES = 64, VARIANTS = 4 };
struct shape {
    int gpus, pp, vpp, ep, tp, cp, etp, zero;
};
/* Sizes of a mesh as --predict names them, and the options that they are. */
static const struct shape_word {
    const char *word, *option;
    size_t at;
    int least, most;
} shape_words[] = {
    {"pp", "parallel.pp", offsetof(struct shape, pp), 1, MOST_STAGES},
    {"vpp", "parallel.vpp", offsetof(struct shape, vpp), 1, 1 << 16},
    {"ep", "parallel.ep", offsetof(struct shape, ep), 1, 1 << 16},
    {"tp", "parallel.tp", offsetof(struct shape, tp), 1, 1 << 16},
    {"cp", "parallel.cp", offsetof(struct shape, cp), 1, 1 << 16},
    {"etp", "parallel.etp", offsetof(struct shape, etp), 1, 1 << 16},
    {"zero", "parallel.zero", offsetof(struct shape, zero), 0, 3},
};

static int *size_at(struct shape *s, const struct shape_word *w) { return (int *)(void *)((char *)s + w->at); }
/* overlap: of rows between tensor-parallel ranks, too, where the mesh has any. */
struct variant {
    const char *name;
    bool overlap;
    const char *delay;
};
static const struct variant variants[VARIANTS] = {{"none", false, "off"},
                                                  {"none, dW delayed", false, "on"},
                                                  {"overlap", true, "off"},
                                                  {"overlap, dW delayed", true, "on"}};

/* Results for the microbatches of a step, which depend on the stage but not on how many others do the same. */
struct found {
    bool refused; /* this schedule is not possible on the mesh */
    double seconds, exposed, bubble;
    int64_t working[MOST_STAGES];
};
struct result {
    bool refused;
    double seconds, exposed, bubble; /* shares of the step */
    int64_t memory;
};

/* "tp8.pp4.zero1", in any order; what is not named stays. Returns how many characters that is, 0: it is no such list.
 * */
static int parse_words(const char *text, struct shape *s)
{
    const char *p = text;
    for (;;) {
        size_t n = strspn(p, "abcdefghijklmnopqrstuvwxyz");
        const struct shape_word *w = NULL;
        for (int i = 0; i < countof(shape_words); i++)
            if (strlen(shape_words[i].word) == n && strncmp(shape_words[i].word, p, n) == 0)
                w = &shape_words[i];
        char *end;
        long v = w != NULL && p[n] >= '0' && p[n] <= '9' ? strtol(p + n, &end, 10) : -1;
        if (w == NULL || v < w->least || v > w->most)
            return 0;
        *size_at(s, w) = (int)v;
        p = end;
        if (*p != '.')
            return (int)(p - text);
        p++;
    }
}

/* What a list does not name: one stage, and for the rest the given options. */
static struct shape given_shape(const struct config *c)
{
    return (struct shape){.pp = 1,
                          .vpp = 1,
                          .ep = 1,
                          .tp = (int)c->parallel.tp,
                          .cp = (int)c->parallel.cp,
                          .etp = (int)c->parallel.etp,
                          .zero = (int)c->parallel.zero};
}

static int parse_shapes(const struct config *c, const char *text, struct shape *list, int *n, struct err *e)
{
    *n = 0;
    for (const char *p = text; *p != '\0' && *n < MOST_MESHES;) {
        struct shape s = given_shape(c);
        int used = 0, head = 0;
        bool plain = sscanf(p, "%d:%dx%dx%d%n", &s.gpus, &s.pp, &s.vpp, &s.ep, &used) == 4 && used > 0;
        if (!plain && sscanf(p, "%d:%n", &s.gpus, &head) == 1 && head > 0)
            used = (used = parse_words(p + head, &s)) > 0 ? head + used : 0;
        if (used == 0 || (p[used] != ',' && p[used] != '\0') || s.gpus < 1 || s.pp < 1 || s.vpp < 1 || s.ep < 1 ||
            s.pp > MOST_STAGES) {
            err_set(e, ST_USAGE, "--predict=%s: '%s' is neither GPUS:PPxVPPxEP nor GPUS:tp8.pp4", text, p);
            return err_hint(e, "for instance --predict=64:4x2x16,64:tp8.pp4.zero1; words: pp vpp ep tp cp etp zero");
        }
        list[(*n)++] = s;
        p += used;
        p += *p == ',';
    }
    return *n > 0 ? ST_OK : err_set(e, ST_USAGE, "--predict names no mesh");
}

/* 8 to 4096 GPUs; large models over more stages, experts over up to 64 GPUs. */
static int default_shapes(const struct config *c, struct shape *list, int *n, struct err *e)
{
    struct pattern p;
    TRY(pattern_parse(&p, c->model.pattern, e));
    int stages = p.n_items >= 48 ? 16 : p.n_items >= 24 ? 8 : 4;
    *n = 0;
    for (int gpus = 8; gpus <= 4096; gpus *= 2) {
        int pp = gpus < 8 * stages ? 1 : stages;
        while (pp > 1 && p.n_items < 2 * pp)
            pp /= 2;
        int ep = (int)min_i64(min_i64(gpus / pp, 64), max_i64(c->model.experts, 1));
        if (gpus == 8 || pp > 1) {
            struct shape *s = &list[(*n)++];
            *s = given_shape(c);
            s->gpus = gpus;
            s->pp = pp;
            s->vpp = pp > 1 ? 2 : 1;
            s->ep = ep;
        }
    }
    return ST_OK;
}

/* Microbatches of a data-parallel rank: those of train.global_batch where it was given (batch), else enough to fill the
 * pipeline. An error where the mesh does not divide. */
static int micros_of(const struct config *c, const struct shape *s, int64_t batch, int *micros, struct err *e)
{
    struct mesh mesh;
    const struct mesh_sizes sizes = {.pp = s->pp, .vpp = s->vpp, .ep = s->ep, .tp = s->tp, .cp = s->cp, .etp = s->etp};
    TRY(mesh_place(&mesh, &sizes, s->gpus, 0, e));
    int64_t at_once = c->train.micro_batch * mesh.dp;
    *micros = batch > 0 ? (int)(batch / at_once) : s->pp > 1 ? 4 * s->pp : 8;
    if (batch > 0 && batch % at_once != 0)
        return err_set(e, ST_USAGE,
                       "train.global_batch = %lld does not divide into microbatches of %lld on %d data-parallel ranks",
                       (long long)batch, (long long)c->train.micro_batch, mesh.dp);
    return ST_OK;
}

/* What the two all-to-alls of a layer's forward pass take, as FLOPs of a token; half of it, since
 * schedules hide some. */
static double exchange_work(const struct config *c, const struct machine *m, int ep)
{
    double tokens = (double)(c->train.micro_batch * c->train.seq),
           bytes = tokens * ep * tokens_on_rank(&c->model, ep) * (double)c->model.hidden * 2;
    return machine_exchange(m, ep, 1, bytes) * m->flops / tokens;
}

/* Ranks that share the batch. */
static int batch_ranks(const struct shape *s) { return s->gpus / (s->pp * s->tp * s->cp); }

static int set_shape(struct config *c, const char *pattern, const struct machine *m, const struct shape *s, int micros,
                     struct err *e)
{
    struct buf cut;
    buf_init(&cut, 0);
    int st = config_set(c, "model.pattern", pattern, NULL, e);
    if (st == ST_OK && s->pp * s->vpp > 1)
        st = timeline_cut_pattern(c, s->pp, s->vpp, exchange_work(c, m, s->ep), &cut, e);
    if (st == ST_OK && cut.len > 0)
        st = config_set(c, "model.pattern", cut.text, NULL, e);
    buf_release(&cut);
    TRY(st);
    TRY(set_number(c, "parallel.ranks", s->gpus, e));
    struct shape copy = *s;
    for (int i = 0; i < countof(shape_words); i++)
        TRY(set_number(c, shape_words[i].option, *size_at(&copy, &shape_words[i]), e));
    TRY(set_number(c, "train.global_batch", c->train.micro_batch * micros * batch_ranks(s), e));
    return config_finish(c, e); /* a rule may refuse the mesh */
}

/* Means over ranks. */
static void add_up(const struct timeline *tl, double *exposed, double *bubble)
{
    for (int r = 0; r < tl->n; r++) {
        for (int k = KIND_DISPATCH; k < KIND_COUNT; k++)
            *exposed += tl->rank[r].exposed[k] / tl->n;
        *bubble += tl->rank[r].bubble / tl->n;
    }
}

static int predict_train(struct config *c, const struct variant *variant, const struct machine *m, struct found *f,
                         struct err *e)
{
    struct timeline tl = {0};
    *f = (struct found){0};
    const char *overlap = !variant->overlap ? "none" : c->parallel.tp > 1 ? "tp" : "ep";
    TRY(config_set(c, "parallel.overlap", overlap, NULL, e));
    TRY(config_set(c, "plan.delay_dw", variant->delay, NULL, e));
    int st = timeline_open_train(&tl, c, m, e);
    for (int r = 0; st == ST_OK && r < tl.n && r < MOST_STAGES; r++)
        f->working[tl.rank[r].t.model.mesh.pp_rank] = tl.rank[r].working;
    if (st == ST_OK) {
        f->seconds = tl.seconds;
        add_up(&tl, &f->exposed, &f->bubble);
    }
    timeline_close(&tl);
    return st;
}

/* The update of this mesh after the microbatches of any of its size. */
static int predict_update(struct config *c, const struct machine *m, const struct found *train, struct result *out,
                          struct err *e)
{
    struct timeline tl = {0};
    TRY(config_set(c, "parallel.overlap", "none", NULL, e));
    int st = timeline_open_update(&tl, c, m, e);
    for (int w = 0; st == ST_OK && w < VARIANTS; w++) {
        double exposed = train[w].exposed, bubble = train[w].bubble, total = train[w].seconds + tl.seconds;
        add_up(&tl, &exposed, &bubble);
        out[w] = (struct result){
            .refused = train[w].refused, .seconds = total, .exposed = exposed / total, .bubble = bubble / total};
        for (int r = 0; r < tl.n; r++)
            out[w].memory =
                max_i64(out[w].memory, tl.rank[r].persistent + train[w].working[tl.rank[r].t.model.mesh.pp_rank]);
    }
    timeline_close(&tl);
    return st;
}

static double model_tflops(const struct config *c, double seconds, int gpus, struct err *e)
{
    struct pattern p;
    if (pattern_parse(&p, c->model.pattern, e) != ST_OK)
        return 0;
    return 3 * model_flops_per_token(c, &p, c->train.seq) * (double)(c->train.global_batch * c->train.seq) / seconds /
           gpus * 1e-12;
}

static void print_mesh(const struct shape *s)
{
    char mesh[96];
    int n = snprintf(mesh, sizeof mesh, "PP%d VPP%d", s->pp, s->vpp);
    const struct {
        const char *name;
        int size;
    } others[] = {{"TP", s->tp}, {"CP", s->cp}, {"ETP", s->etp}};
    for (int i = 0; i < countof(others); i++)
        if (others[i].size > 1)
            n += snprintf(mesh + n, sizeof mesh - (size_t)n, " %s%d", others[i].name, others[i].size);
    n += snprintf(mesh + n, sizeof mesh - (size_t)n, " EP%d DP%d", s->ep, batch_ranks(s));
    if (s->zero != 1)
        snprintf(mesh + n, sizeof mesh - (size_t)n, " zero %d", s->zero);
    printf("%5d  %-30s", s->gpus, mesh);
}

static void print_row(const struct config *c, const struct machine *m, const struct shape *s, int micros,
                      const struct result *r, struct err *e)
{
    double first = 0, last = 0;
    print_mesh(s);
    printf(" %3d", micros);
    for (int w = 0; w < VARIANTS; w++) {
        if (r[w].refused) {
            printf(" | %-31s", "not possible");
            continue;
        }
        first = first > 0 ? first : r[w].seconds;
        last = r[w].seconds;
        printf(" | %8.0f %5.0f %4.0f%% %4.0f%% %4.0f%s", r[w].seconds * 1e3, model_tflops(c, r[w].seconds, s->gpus, e),
               100 * r[w].exposed, 100 * r[w].bubble, (double)r[w].memory * 1e-9,
               (double)r[w].memory > m->memory ? "!" : " ");
    }
    printf(" | %.2fx\n", first / last);
    fflush(stdout);
}

static void print_head(const struct config *c, const struct machine *m)
{
    struct buf out;
    buf_init(&out, 0);
    buf_addf(&out, "PREDICTION for %s\n", c->model.pattern);
    machine_print(m, false, &out);
    buf_addf(&out,
             "each step: microbatches (mb) of %lld x %lld on every data-parallel rank, then the update; one rank of "
             "each stage is planned and simulated node by\n"
             "node, the others do the same beside it. The program's own schedules and messages: gradients of a unit "
             "are\n"
             "reduced under the backward pass of the last microbatch, its weights gathered under the forward pass of "
             "the first (parallel.zero\n"
             "= 1); of levels 2 and 3 in every microbatch. Keys and values that parallel.cp gathers, and without\n"
             "overlap rows between tensor-parallel ranks, travel while nothing else can run; in a ring the next block "
             "travels while one is computed.\n"
             "columns of each schedule: ms/step, model TFLOP/s of a GPU, exposed communication, bubble, GB of the "
             "fullest GPU (!: more than %.0f)\n\n%5s  %-30s %3s",
             (long long)c->train.micro_batch, (long long)c->train.seq, m->memory * 1e-9, "GPUs", "mesh", "mb");
    for (int w = 0; w < VARIANTS; w++)
        buf_addf(&out, " | %-31s", variants[w].name);
    buf_add(&out, " | gain\n");
    if (out.text != NULL)
        fputs(out.text, stdout);
    buf_release(&out);
}

/* The microbatches are those of the mesh before where only the number of data-parallel ranks differs, and is so large,
 * for experts too, that a rank sends and receives about the whole of what is reduced and gathered. */
static bool same_train(const struct machine *m, const struct shape *a, const struct shape *b)
{
    const struct shape *least = a->gpus < b->gpus ? a : b;
    return a->pp == b->pp && a->vpp == b->vpp && a->ep == b->ep && a->tp == b->tp && a->cp == b->cp &&
           a->etp == b->etp && a->zero == b->zero && least->gpus / least->pp / least->ep / least->tp >= m->gpus;
}

static bool is_refusal(int st) { return st == ST_USAGE || st == ST_INVALID; }

/* Every schedule that the mesh allows; the first refusal is the error where it allows none. */
static int predict_schedules(struct config *c, const struct machine *m, struct found *train, struct err *e)
{
    int possible = 0;
    struct err why = {0};
    for (int w = 0; w < VARIANTS; w++) {
        int st = predict_train(c, &variants[w], m, &train[w], e);
        train[w].refused = is_refusal(st);
        possible += st == ST_OK;
        if (st != ST_OK && !train[w].refused)
            return st;
        if (st != ST_OK && why.code == ST_OK)
            why = *e;
        if (st != ST_OK)
            err_clear(e);
    }
    if (possible > 0)
        return ST_OK;
    *e = why;
    return why.code;
}

static int predict_mesh(struct config *c, const char *pattern, const struct machine *m, const struct shape *s,
                        int micros, bool known, struct found *train, struct err *e)
{
    struct result row[VARIANTS];
    TRY(set_shape(c, pattern, m, s, micros, e));
    if (!known)
        TRY(predict_schedules(c, m, train, e));
    TRY(set_shape(c, pattern, m, s, 1, e)); /* the update is the same, and planned quickly */
    TRY(predict_update(c, m, train, row, e));
    TRY(set_shape(c, pattern, m, s, micros, e));
    print_row(c, m, s, micros, row, e);
    return ST_OK;
}

static int predict(struct config *c, const char *text, const struct machine *m, struct err *e)
{
    struct shape list[MOST_MESHES];
    struct found train[VARIANTS];
    char *pattern = strdup(c->model.pattern);
    int64_t batch = config_source_of(c, "train.global_batch").source != CFG_FROM_AUTO ? c->train.global_batch : 0;
    int n = 0, st, last = -1, last_micros = 0; /* last: the mesh that train is of */
    if (pattern == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    st = strcmp(text, "default") == 0 ? default_shapes(c, list, &n, e) : parse_shapes(c, text, list, &n, e);
    if (st == ST_OK)
        print_head(c, m);
    for (int i = 0; st == ST_OK && i < n; i++) {
        int micros = 0;
        st = micros_of(c, &list[i], batch, &micros, e);
        bool known = last >= 0 && micros == last_micros && same_train(m, &list[i], &list[last]);
        if (st == ST_OK)
            st = predict_mesh(c, pattern, m, &list[i], micros, known, train, e);
        last = st == ST_OK ? i : -1;
        last_micros = micros;
        if (is_refusal(st)) {
            print_mesh(&list[i]);
            printf("     | skipped: %s\n", e->msg);
            err_clear(e);
            st = ST_OK;
        }
    }
    free(pattern);
    return st;
}

/* ---- the best of many meshes ----------------------------------------------------------------- */

/* "1T", "300B", "1.5e12". */
static int take_tokens(const char *text, double *out, struct err *e)
{
    static const struct {
        char letter;
        double unit;
    } units[] = {{'K', 1e3}, {'M', 1e6}, {'B', 1e9}, {'G', 1e9}, {'T', 1e12}};
    char number[32];
    size_t n = text != NULL ? strlen(text) : 0;
    double unit = 1;
    if (text == NULL)
        return ST_OK;
    for (int i = 0; i < countof(units); i++)
        if (n > 1 && text[n - 1] == units[i].letter)
            unit = units[i].unit;
    snprintf(number, sizeof number, "%.*s", (int)(unit > 1 ? n - 1 : n), text);
    if (n >= sizeof number || !parse_f64(number, out) || !(*out > 0) || *out > 1e18)
        return err_set(e, ST_USAGE, "--tokens=%s is not a number of tokens such as 300B or 1T", text);
    *out *= unit;
    return ST_OK;
}

/* What a search chooses itself; the rest of the configuration stays. */
static void say_chosen(const struct config *c)
{
    static const char *const chosen[] = {"parallel.ranks", "parallel.pp",          "parallel.vpp",
                                         "parallel.tp",    "parallel.cp",          "parallel.ep",
                                         "parallel.etp",   "parallel.zero",        "parallel.overlap",
                                         "plan.recompute", "plan.recompute_block", "plan.recompute_granularity"};
    const char *before = "note: --search chooses ";
    for (int i = 0; i < countof(chosen); i++) {
        enum config_source from = config_source_of(c, chosen[i]).source;
        if (from != CFG_FROM_FILE && from != CFG_FROM_COMMAND)
            continue;
        fprintf(stderr, "%s%s", before, chosen[i]);
        before = ", ";
    }
    if (before[0] == ',')
        fprintf(stderr, "; what is set is not used\n");
}

int plan_search(struct config *c, const struct timeline_words *w, struct err *e)
{
    struct machine m;
    struct search_opts o = {.simulated = 64};
    struct buf out;
    int64_t gpus;
    TRY(machine_from(&m, w, e));
    if (w->gpus == NULL || !parse_i64(w->gpus, &gpus) || gpus < 1 || gpus > 65536) {
        err_set(e, ST_USAGE, "--search needs --gpus=N, from 1 to 65536");
        return err_hint(e, "for instance braid plan CONFIG --search --gpus=64 --memory=80 --tokens=1T");
    }
    TRY(take_tokens(w->tokens, &o.tokens, e));
    if (strcmp(c->plan.fit, "off") != 0) {
        err_set(e, ST_USAGE, "--search and plan.fit=%s both choose a plan", c->plan.fit);
        return err_hint(e, "--search takes the memory of a GPU as --memory=80");
    }
    say_chosen(c);
    o.gpus = (int)gpus;
    o.budget = m.memory;
    buf_init(&out, 0);
    int st = search_print(c, &m, &o, &out, e);
    if (st == ST_OK)
        st = buf_check(&out, e);
    if (st == ST_OK)
        fputs(out.text, stdout);
    buf_release(&out);
    return st;
}

int plan_timeline(struct config *c, const struct timeline_words *w, struct err *e)
{
    struct machine m;
    TRY(machine_from(&m, w, e));
    if (w->predict != NULL)
        TRY(predict(c, w->predict, &m, e));
    return w->file != NULL ? one_mesh(c, w, &m, e) : ST_OK;
}
