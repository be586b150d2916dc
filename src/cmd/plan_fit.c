/* plan.fit, and the verdict at the end of braid plan: does it fit, and what would? The search is in sim/fit.c. */
#include "cmd/cmd.h"
#include "sim/fit.h"

#include <string.h>
#include <unistd.h>

/* What a GPU keeps for itself beside a plan: contexts of libraries, the largest kernels' local memory. */
static const double RESERVE = 0x1p30;

static bool on_host(const struct config *c) { return c->run.device != CFG_DEVICE_CUDA; }

/* The memory of the device that a run would use. Whole gibibytes, so that the same machine gives the same answer. */
static int device_memory(const struct config *c, double *bytes, struct err *e)
{
    struct rank_place place = place_alone();
    struct dev dev = {0};
    double room;
    if (on_host(c)) {
        long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
        room = pages > 0 && page > 0 ? 0.8 * (double)pages * (double)page : 0;
    } else {
        TRY(device_open_on(&dev, c, &place, e));
        room = (double)dev.vt->available(&dev) - RESERVE;
        dev_close(&dev);
    }
    *bytes = 0x1p30 * (double)(int64_t)(room / 0x1p30);
    return *bytes > 0 ? ST_OK
                      : err_set(e, ST_UNSUPPORTED, "plan.fit=auto, but the memory of this machine cannot be found out");
}

/* Host memory that offloaded activations may take: most of this machine's, where the run will be. */
static double host_memory(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? 0.8 * (double)pages * (double)page : 0;
}

int cmd_fit(struct config *c, int processes, struct buf *out, struct err *e)
{
    bool automatic = strcmp(c->plan.fit, "auto") == 0;
    struct fit_opts o = {.counts_host = on_host(c)};
    struct machine m = machine_h200();
    struct fit f;
    char need[32], have[32];
    if (strcmp(c->plan.fit, "off") == 0)
        return ST_OK;
    if (automatic && processes > 1) { /* each would see another GPU, and all must choose the same */
        err_set(e, ST_USAGE, "plan.fit=auto, but a launcher started %d processes", processes);
        return err_hint(e, "state the memory of one GPU, such as --plan.fit=80GB");
    }
    if (automatic) {
        TRY(device_memory(c, &o.budget, e));
        o.host = host_memory();
    } else if (!config_memory(c->plan.fit, &o.budget)) {
        return err_set(e, ST_USAGE, "plan.fit=%s is no amount of memory", c->plan.fit);
    }
    int st = fit_search(&f, c, &m, &o, e);
    if (st == ST_OK && f.n == 0) {
        struct buf options;
        buf_init(&options, 0);
        fit_options(&f.smallest, c, &options);
        st = err_set(e, ST_NOMEM,
                     "plan.fit=%s: no plan of this model fits into %s; the smallest memory that works is %s",
                     c->plan.fit, human_bytes(o.budget, have, sizeof have),
                     human_bytes((double)f.smallest.bytes, need, sizeof need));
        err_hint(e, "with%s", options.len > 0 ? options.text : " the options as they are");
        buf_release(&options);
    }
    if (st == ST_OK && out != NULL)
        fit_print(&f, c, &o, out);
    if (st == ST_OK)
        st = fit_apply(&f.row[0], c, e);
    fit_release(&f);
    return st;
}

int cmd_fit_again(struct config *c, const char *saved, const char *label, bool *kept, struct err *e)
{
    static const char *const chosen[] = {"train.micro_batch", "train.loss_chunk",     "plan.recompute_granularity",
                                         "plan.recompute",    "plan.recompute_block", "plan.offload"};
    struct config was = {0};
    struct buf text;
    *kept = false;
    if (strcmp(c->plan.fit, "off") == 0) /* the saved configuration is not read for nothing */
        return ST_OK;
    buf_init(&text, 0);
    int st = config_init(&was, e);
    if (st == ST_OK)
        st = config_read_ini_text(&was, saved, strlen(saved), label, e);
    *kept = st == ST_OK && strcmp(was.plan.fit, c->plan.fit) == 0;
    for (int i = 0; *kept && st == ST_OK && i < countof(chosen); i++) {
        buf_clear(&text);
        const char *value = config_value_text(&was, chosen[i], &text);
        st = value != NULL ? config_set(c, chosen[i], value, NULL, e) : err_set(e, ST_NOMEM, "out of memory");
    }
    buf_release(&text);
    config_release(&was);
    return st;
}

/* The memory that a verdict is about: what was asked for, that of plan.fit, or 80 GB. */
static int verdict_memory(const struct config *c, const char *given, struct fit_opts *o, char *name, size_t size,
                          struct err *e)
{
    const char *text = given != NULL ? given : config_memory(c->plan.fit, &o->budget) ? c->plan.fit : "80";
    if (!config_memory(text, &o->budget))
        return err_set(e, ST_USAGE, "--memory=%s is no amount of memory such as 80 or 74GiB", text);
    size_t digits = strspn(text, "0123456789.");
    snprintf(name, size, "%.*s %s", (int)digits, text, text[digits] != '\0' ? text + digits : "GB");
    o->name = name;
    return ST_OK;
}

/* The microbatch stays as it is if a policy can do it: then the results do, to the bit. */
static int look_for_change(struct fit *f, const struct config *c, struct fit_opts *o, struct err *e)
{
    struct machine m = machine_h200();
    TRY(fit_search(f, c, &m, o, e));
    if (f->as_given.fits || f->n > 0)
        return ST_OK;
    fit_release(f);
    o->keep_micro = false;
    return fit_search(f, c, &m, o, e);
}

/* Looking for a change means a hundred plans: only where one of them takes no time. */
int plan_verdict(const struct config *c, const char *memory, const struct trainer *t, const struct fullest_rank *most,
                 struct buf *out, struct err *e)
{
    enum { FEW_STEPS = 6000 };
    struct fit_opts o = {.counts_host = on_host(c), .keep_micro = true};
    struct fit f = {0};
    char text[32], name[48], where[32] = "";
    int64_t bytes = most->device + (o.counts_host ? most->host : 0);
    TRY(verdict_memory(c, memory, &o, name, sizeof name, e));
    if (t->model.mesh.world > 1)
        snprintf(where, sizeof where, " on rank %d", most->rank);
    if ((double)bytes <= o.budget || t->train.p.n_steps > FEW_STEPS || t->model.mesh.world > 1) {
        bool fits = (double)bytes <= o.budget;
        buf_addf(out, "\nfits %s: %s (%s%s)%s\n", name, fits ? "yes" : "no",
                 human_bytes((double)bytes, text, sizeof text), where,
                 fits ? "" : "; --plan.fit=MEMORY looks for a plan that does");
        return ST_OK;
    }
    int st = look_for_change(&f, c, &o, e);
    buf_add(out, "\n");
    if (st == ST_OK)
        fit_verdict(&f, c, &o, out);
    fit_release(&f);
    return st;
}
