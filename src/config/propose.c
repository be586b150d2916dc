/* A value that satisfies a broken rule, found by trying: on a copy of the config, one option of the rule after the
 * other is set to likely values until every rule holds. What is proposed therefore works. */
#include "config/config_int.h"

#include <string.h>

/* Tried first, where the likeliest wish is not the first option's default. */
static const struct {
    const char *rule, *option, *value;
} preferred[] = {
    {"eval-needs-data", "data.split", "99,1"},
    {"split-format", "data.split", "99,1"},
    {"saving-needs-dir", "run.dir", "runs/a"},
    {"eod-mask-needs-eod", "data.eod", "on"},
    {"mtp-layers-need-pattern", "model.mtp_pattern", "*-"},
    {"mtp-pattern-needs-layers", "model.mtp_layers", "1"},
    {"ratios-need-layers", "model.layers", "24"},
    {"one-expert-needs-pre-softmax", "model.router_pre_softmax", "on"},
    {"router-bias-needs-sigmoid", "model.router_score", "sigmoid"},
    {"rope-scaling-needs-factor", "model.rope_factor", "8"},
    {"rope-factor-needs-scaling", "model.rope_scaling", "yarn"},
    {"window-skip-needs-window", "model.attn_window", "512"},
    {"wsd-options-need-wsd", "train.schedule", "wsd"},
    {"mhc-options-need-streams", "model.mhc_streams", "4"},
    {"recompute-block-needs-streams", "model.mhc_streams", "4"},
    {"recompute-mhc-needs-streams", "model.mhc_streams", "4"},
    {"recompute-block-format", "plan.recompute_block", "auto"},
    {"fit-format", "plan.fit", "80GB"},
    {"zero3-without-stages", "parallel.zero", "2"},
};

static int copy_config(struct config *to, const struct config *from, struct err *e)
{
    TRY(config_init(to, e));
    struct buf text;
    int st = ST_OK;
    buf_init(&text, 0);
    for (int i = 0; i < config_n_options && st == ST_OK; i++) {
        buf_clear(&text);
        option_text(from, &config_options[i], &text);
        st = buf_check(&text, e);
        if (st == ST_OK)
            st = option_set(to, &config_options[i], text.text != NULL ? text.text : "", from->origin[i], e);
    }
    buf_release(&text);
    if (st != ST_OK)
        config_release(to);
    return st;
}

static bool all_rules_hold(const struct config *c, const struct option *o, const char *value)
{
    struct config copy;
    struct err e = {0};
    if (copy_config(&copy, c, &e) != ST_OK)
        return false;
    bool holds = option_set(&copy, o, value, (struct config_origin){.source = CFG_FROM_COMMAND}, &e) == ST_OK &&
                 config_finish(&copy, NULL) == ST_OK; /* its error is not used, so no proposal is searched for */
    config_release(&copy);
    return holds;
}

struct search {
    const struct config *c;
    const struct rule *r;
    const struct option *o; /* the option that is tried */
    struct buf *out;
};

static bool works(const struct search *s, const char *value)
{
    struct buf now;
    buf_init(&now, 0);
    option_text(s->c, s->o, &now);
    bool same = now.text != NULL && strcmp(now.text, value) == 0;
    buf_release(&now);
    if (same || !all_rules_hold(s->c, s->o, value))
        return false;
    buf_addf(s->out, "for example --%s=%s", s->o->name, value[0] ? value : "''");
    return true;
}

static bool int_works(const struct search *s, int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return value >= 0 && works(s, text);
}

static int64_t int_of(const struct config *c, const struct option *o)
{
    return *(const int64_t *)((const char *)c + o->offset);
}

/* The nearest multiples, divisors and neighbours of the rule's other numbers. */
static bool near_numbers(const struct search *s)
{
    int64_t v = int_of(s->c, s->o);
    for (int i = 0; i < countof(s->r->options) && s->r->options[i] != NULL; i++) {
        const struct option *other = option_find(s->r->options[i]);
        if (other == s->o || other->type != OPT_INT || int_of(s->c, other) <= 0)
            continue;
        int64_t w = int_of(s->c, other);
        const int64_t tries[] = {v > w / 10 ? w / 10 : -1, ceil_div(v, w) * w, v / w * w, w, w - 1};
        for (int k = 0; k < countof(tries); k++)
            if (int_works(s, tries[k]))
                return true;
        for (int64_t d = v; d > 1 && d > v - 64; d--)
            if (w % d == 0 && int_works(s, d))
                return true;
    }
    return int_works(s, v + 1) || int_works(s, v / 2) || int_works(s, 2 * v);
}

static bool try_option(const struct search *s)
{
    const struct option *o = s->o;
    if (strcmp(o->name, "model.pattern") == 0)
        return false; /* which layers are meant only the user knows */
    if (o->type == OPT_INT && near_numbers(s))
        return true;
    if (works(s, o->def))
        return true;
    for (int i = 0; o->type == OPT_ENUM && o->values[i] != NULL; i++)
        if (works(s, o->values[i]))
            return true;
    return o->type == OPT_BOOL && (works(s, "on") || works(s, "off"));
}

bool propose_value(const struct config *c, const struct rule *r, struct buf *out)
{
    struct search s = {.c = c, .r = r, .out = out};
    for (int i = 0; i < countof(preferred); i++) {
        if (strcmp(preferred[i].rule, r->name) != 0)
            continue;
        s.o = option_find(preferred[i].option);
        if (s.o != NULL && works(&s, preferred[i].value))
            return true;
    }
    for (int i = 0; i < countof(r->options) && r->options[i] != NULL; i++) {
        s.o = option_find(r->options[i]);
        if (try_option(&s))
            return true;
    }
    return false;
}
