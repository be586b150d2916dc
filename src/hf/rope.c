/* Rotary embedding in config.json: rope_parameters as transformers 5 writes them, rope_theta and rope_scaling as 4
 * does. */
#include "hf/hf_int.h"

#include <math.h>
#include <string.h>

struct number {
    const char *field, *option;
    double absent;
};
static const struct number llama3[] = {{"factor", "model.rope_factor", 1},
                                       {"low_freq_factor", "model.rope_low", 1},
                                       {"high_freq_factor", "model.rope_high", 4},
                                       {NULL, NULL, 0}};
static const struct number linear[] = {{"factor", "model.rope_factor", 1}, {NULL, NULL, 0}};
static const struct number yarn[] = {{"factor", "model.rope_factor", 1},
                                     {"beta_fast", "model.rope_beta_fast", 32},
                                     {"beta_slow", "model.rope_beta_slow", 1},
                                     {"mscale", "model.rope_mscale", 0},
                                     {"mscale_all_dim", "model.rope_mscale_all_dim", 0},
                                     {NULL, NULL, 0}};
static const struct {
    const char *type;
    const struct number *numbers;
    bool original;
} kinds[] = {[CFG_ROPE_SCALING_NONE] = {"default", NULL, false},
             [CFG_ROPE_SCALING_LINEAR] = {"linear", linear, false},
             [CFG_ROPE_SCALING_LLAMA3] = {"llama3", llama3, true},
             [CFG_ROPE_SCALING_YARN] = {"yarn", yarn, true}};
static const char *const kind_options[] = {"none", "linear", "llama3", "yarn"};

/* ---- reading --------------------------------------------------------------------------------- */

int hf_rope_scaling(const struct hf_json *j, struct config *c, const char *field, json_t *o, struct err *e)
{
    struct hf_json part = {.root = o, .text = o, .label = j->label};
    const json_t *named =
        hf_json_get(&part, "rope_type") != NULL ? hf_json_get(&part, "rope_type") : hf_json_get(&part, "type");
    const char *type = json_string_value(named);
    int64_t original;
    if (named == NULL || (type != NULL && strcmp(type, "default") == 0))
        return ST_OK;
    for (int k = 0; k < countof(kinds) && type != NULL; k++) {
        if (strcmp(type, kinds[k].type) != 0)
            continue;
        TRY(hf_set_text(j, c, "model.rope_scaling", kind_options[k], e));
        for (const struct number *n = kinds[k].numbers; n->field != NULL; n++) {
            double v;
            TRY(hf_json_real(&part, n->field, n->absent, &v, e));
            TRY(hf_set_real(j, c, n->option, v, e));
        }
        if (kinds[k].original) {
            TRY(hf_json_int(j, "max_position_embeddings", 4096, &original, e));
            TRY(hf_json_int(&part, "original_max_position_embeddings", original, &original, e));
            TRY(hf_set_int(j, c, "model.rope_original", original, e));
        }
        if (k == CFG_ROPE_SCALING_YARN)
            TRY(hf_set_text(j, c, "model.rope_truncate", json_is_false(json_object_get(o, "truncate")) ? "off" : "on",
                            e));
        return ST_OK;
    }
    return hf_refuse(j, field, "this kind of rotary scaling is not in braid (default, linear, llama3 and yarn are)", e);
}

/* transformers drops both numbers unless both are there; mscale = 1 alone is what it then takes. */
static int check_mscales(const struct hf_json *j, const struct config *c, const char *field, struct err *e)
{
    double one = c->model.rope_mscale, all = c->model.rope_mscale_all_dim;
    if (c->model.rope_scaling != CFG_ROPE_SCALING_YARN || (one == 0) == (all == 0) || (one == 1 && all == 0))
        return ST_OK;
    return hf_refuse(j, field, "of mscale and mscale_all_dim only one is given", e);
}

/* percent: what the family's class rotates where the field is absent; 0: it always rotates whole heads. */
static int read_percent(const struct hf_json *j, const struct hf_json *part, double percent, double *out, struct err *e)
{
    static const char field[] = "partial_rotary_factor";
    const struct hf_json *in = hf_json_get(part, field) != NULL ? part : j;
    TRY(hf_json_real(in, field, percent > 0 ? percent : 1, out, e));
    return percent > 0 || *out == 1 ? ST_OK : hf_refuse(in, field, "this family rotates whole heads", e);
}

int hf_rope_read(const struct hf_json *j, struct config *c, double base, double share, struct err *e)
{
    json_t *now = hf_json_get(j, "rope_parameters"), *old = hf_json_get(j, "rope_scaling");
    struct hf_json part = {.root = now, .text = now, .label = j->label};
    double percent, theta;
    if ((now != NULL && !json_is_object(now)) || (old != NULL && !json_is_object(old)))
        return hf_refuse(j, json_is_object(now) || now == NULL ? "rope_scaling" : "rope_parameters",
                         "an object is expected", e);
    TRY(hf_json_real(j, "rope_theta", base, &theta, e));
    if (json_is_object(now))
        TRY(hf_json_real(&part, "rope_theta", theta, &theta, e));
    TRY(read_percent(j, json_is_object(now) ? &part : j, share, &percent, e));
    TRY(hf_set_text(j, c, "model.rope", "half", e));
    TRY(hf_set_real(j, c, "model.rope_base", theta, e));
    TRY(hf_set_real(j, c, "model.rope_percent", percent, e));
    TRY(hf_set_text(j, c, "model.rope_scaling", "none", e));
    const char *field = json_is_object(now) ? "rope_parameters" : "rope_scaling";
    json_t *scaling = json_is_object(now) ? now : old, *factor = json_object_get(scaling, "attention_factor");
    if (!json_is_object(scaling))
        return ST_OK;
    TRY(hf_rope_scaling(j, c, field, scaling, e));
    TRY(check_mscales(j, c, field, e));
    return c->model.rope_scaling == CFG_ROPE_SCALING_NONE || factor == NULL || json_is_null(factor)
               ? ST_OK
               : hf_refuse(j, field, "an attention_factor of its own has no option in braid", e);
}

/* ---- writing --------------------------------------------------------------------------------- */

static int put_number(json_t *o, const struct config *c, const struct number *n, struct err *e)
{
    double v;
    TRY(hf_number(c, n->option, &v, e));
    /* transformers takes an mscale of 0 for one that is given. */
    return v == n->absent && n->absent == 0 ? ST_OK : hf_put(o, n->field, json_real(v), e);
}

int hf_rope_scaling_write(const struct config *c, json_t *o, struct err *e)
{
    int k = c->model.rope_scaling;
    TRY(hf_put(o, "rope_type", json_string(kinds[k].type), e));
    for (const struct number *n = kinds[k].numbers; n != NULL && n->field != NULL; n++)
        TRY(put_number(o, c, n, e));
    if (k == CFG_ROPE_SCALING_YARN && !c->model.rope_truncate)
        TRY(hf_put(o, "truncate", json_false(), e));
    return kinds[k].original ? hf_put(o, "original_max_position_embeddings", json_integer(c->model.rope_original), e)
                             : ST_OK;
}

int hf_rope_write(const struct config *c, json_t *out, struct err *e)
{
    const struct config_model *m = &c->model;
    bool scaled = m->rope_scaling != CFG_ROPE_SCALING_NONE;
    json_t *now = json_object();
    TRY(hf_put(out, "rope_parameters", now, e));
    TRY(hf_put(now, "rope_theta", json_real(m->rope_base), e));
    TRY(hf_rope_scaling_write(c, now, e));
    TRY(hf_put(out, "rope_theta", json_real(m->rope_base), e));
    if (scaled) {
        json_t *old = json_object();
        TRY(hf_put(out, "rope_scaling", old, e));
        TRY(hf_rope_scaling_write(c, old, e));
    }
    if (m->rope_percent == 1)
        return ST_OK;
    TRY(hf_put(now, "partial_rotary_factor", json_real(m->rope_percent), e));
    return hf_put(out, "partial_rotary_factor", json_real(m->rope_percent), e);
}
