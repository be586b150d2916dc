/* config.json of DeepSeek-V4 beyond its plain fields. The release says with compress_ratios and num_hash_layers what
 * transformers says with layer_types, compress_rates and mlp_layer_types: both are read, and both are written, so that
 * programs of either kind read the folder. */
#include "hf/family_config_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct kind {
    const char *name, *layer; /* of transformers; ours */
} kinds[] = {
    {"sliding_attention", "WE"}, {"compressed_sparse_attention", "CE"}, {"heavily_compressed_attention", "HE"}};
enum { SLIDING, SPARSE, HEAVY };

static const char *const allowed[] = {"WE", "CE", "HE", NULL};

/* ---- reading --------------------------------------------------------------------------------- */

struct rates {
    int64_t csa, hca;
};

static int read_rates(const struct hf_json *j, struct config *c, struct rates *r, struct err *e)
{
    json_t *map = hf_json_get(j, "compress_rates");
    struct hf_json part = {.root = map, .text = map, .label = j->label};
    *r = (struct rates){4, 128};
    if (map != NULL && !json_is_object(map))
        return hf_refuse(j, "compress_rates", "a rate for each kind of layer is expected", e);
    if (map != NULL) {
        TRY(hf_json_int(&part, kinds[SPARSE].name, r->csa, &r->csa, e));
        TRY(hf_json_int(&part, kinds[HEAVY].name, r->hca, &r->hca, e));
    }
    TRY(hf_json_int(j, "compress_rate_csa", r->csa, &r->csa, e));
    TRY(hf_json_int(j, "compress_rate_hca", r->hca, &r->hca, e));
    TRY(hf_set_int(j, c, "model.compress_rate_csa", r->csa, e));
    return hf_set_int(j, c, "model.compress_rate_hca", r->hca, e);
}

/* The kind of a layer by the name that transformers has for it, or by its ratio in the release; -1: neither. */
static int kind_of(const json_t *one, const struct rates *r)
{
    const char *name = json_string_value(one);
    int64_t ratio = json_integer_value(one);
    for (int k = 0; name != NULL && k < countof(kinds); k++)
        if (strcmp(name, kinds[k].name) == 0)
            return k;
    if (!json_is_integer(one))
        return -1;
    return ratio == 0 || ratio == 1 ? SLIDING : ratio == r->csa ? SPARSE : ratio == r->hca ? HEAVY : -1;
}

static int read_layers(const struct hf_json *j, struct config *c, const struct rates *r, struct err *e)
{
    const char *field = hf_json_get(j, "layer_types") != NULL ? "layer_types" : "compress_ratios";
    json_t *list = hf_json_get(j, field);
    size_t named = json_array_size(list);
    int64_t n;
    struct buf text;
    TRY(hf_count_layers(j, &n, e));
    if (named < (size_t)n)
        return hf_refuse(j, field, "the kind of every layer is expected", e);
    for (size_t i = 0; i < named; i++) {
        int kind = kind_of(json_array_get(list, i), r);
        if (kind < 0)
            return hf_refuse(j, field,
                             "layers are sliding_attention (ratio 0), compressed_sparse_attention or "
                             "heavily_compressed_attention (the ratios of compress_rates, else 4 and 128)",
                             e);
        if (i >= (size_t)n && kind != SLIDING)
            return hf_refuse(j, field, "a depth of multi-token prediction has only sliding attention in braid", e);
    }
    buf_init(&text, 0);
    for (int64_t i = 0; i < n; i++)
        buf_addf(&text, "[%s]", kinds[kind_of(json_array_get(list, (size_t)i), r)].layer);
    int st = buf_check(&text, e);
    if (st == ST_OK)
        st = hf_set_text(j, c, "model.pattern", text.text, e);
    buf_release(&text);
    return st;
}

/* Layers that look their experts up come first. braid counts attention and experts as a layer each. */
static int read_hash_layers(const struct hf_json *j, struct config *c, struct err *e)
{
    json_t *types = hf_json_get(j, "mlp_layer_types");
    int64_t n, hashed = 0;
    TRY(hf_count_layers(j, &n, e));
    if (types == NULL) {
        TRY(hf_json_int(j, "num_hash_layers", min_i64(3, n), &hashed, e));
        hashed = min_i64(hashed, n);
    }
    for (int64_t i = 0; types != NULL && i < n; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        bool hash = type != NULL && strcmp(type, "hash_moe") == 0;
        if (type == NULL || (!hash && strcmp(type, "moe") != 0))
            return hf_refuse(j, "mlp_layer_types", "hash_moe or moe is expected for every layer", e);
        if (hash && hashed < i)
            return hf_refuse(j, "mlp_layer_types", "layers of hash_moe must come before all others", e);
        hashed += hash;
    }
    if (hashed < 0)
        return hf_refuse(j, "num_hash_layers", "a number of layers is expected", e);
    TRY(hf_set_int(j, c, "model.router_hash_layers", 2 * hashed, e));
    return hf_set_text(j, c, "model.router_bias", "on", e); /* read by layers, and depths, that choose */
}

/* Channels that are rotated: the last ones of a head. */
static int read_rotary_channels(const struct hf_json *j, struct config *c, double *share, struct err *e)
{
    int64_t channels;
    TRY(hf_json_int(j, "qk_rope_head_dim", 0, &channels, e));
    *share = channels > 0 ? (double)channels / (double)c->model.mla_v : 64.0 / 512.0;
    TRY(hf_json_real(j, "partial_rotary_factor", *share, share, e));
    if (!(*share > 0 && *share <= 1))
        return hf_refuse(j, "partial_rotary_factor", "more than 0 and at most 1 is expected", e);
    return hf_set_int(j, c, "model.mla_rope", (int64_t)((double)c->model.mla_v * *share), e);
}

/* One of the two rotary embeddings in rope_parameters. */
static int read_rotary(const struct hf_json *j, json_t *o, double share, double absent, double *theta, struct err *e)
{
    struct hf_json part = {.root = o, .text = o, .label = j->label};
    double own;
    TRY(hf_json_real(&part, "rope_theta", absent, theta, e));
    TRY(hf_json_real(&part, "partial_rotary_factor", share, &own, e));
    return own == share ? ST_OK
                        : hf_refuse(j, "rope_parameters", "all layers rotate equally many channels in braid", e);
}

static bool is_default(const json_t *o)
{
    const json_t *type = json_object_get(o, "rope_type");
    return type == NULL || (json_is_string(type) && strcmp(json_string_value(type), "default") == 0);
}

/* Sliding layers have a rotary embedding without scaling, the others one of their own. */
static int read_rope(const struct hf_json *j, struct config *c, struct err *e)
{
    json_t *now = hf_json_get(j, "rope_parameters"), *old = hf_json_get(j, "rope_scaling");
    json_t *plain = json_object_get(now, "main"), *scaled = json_object_get(now, "compress");
    bool nested = json_is_object(plain) && json_is_object(scaled);
    const char *field = now != NULL ? "rope_parameters" : "rope_scaling";
    double theta, compress, share, factor;
    if ((now != NULL || old != NULL) && !json_is_object(now != NULL ? now : old))
        return hf_refuse(j, field, "an object is expected", e);
    if (!nested && (plain != NULL || scaled != NULL))
        return hf_refuse(j, field, "main and compress are expected, both of them objects", e);
    TRY(hf_json_real(j, "rope_theta", 10000, &theta, e));
    TRY(hf_json_real(j, "compress_rope_theta", 160000, &compress, e));
    TRY(read_rotary_channels(j, c, &share, e));
    if (nested) {
        if (!is_default(plain))
            return hf_refuse(j, field, "sliding layers have no rotary scaling in braid", e);
        TRY(read_rotary(j, plain, share, theta, &theta, e));
        TRY(read_rotary(j, scaled, share, compress, &compress, e));
    } else {
        scaled = now != NULL ? now : old;
    }
    TRY(hf_set_text(j, c, "model.rope", "half", e));
    TRY(hf_set_real(j, c, "model.rope_base", theta, e));
    TRY(hf_set_real(j, c, "model.csa_compress_rotary_base", compress, e));
    TRY(hf_set_text(j, c, "model.rope_scaling", "none", e));
    if (scaled == NULL)
        return ST_OK;
    TRY(hf_rope_scaling(j, c, field, scaled, e));
    /* transformers computes a factor of yarn's own where the nested form does not say 1. */
    struct hf_json part = {.root = scaled, .text = scaled, .label = j->label};
    TRY(hf_json_real(&part, "attention_factor", nested ? 0 : 1, &factor, e));
    return c->model.rope_scaling != CFG_ROPE_SCALING_YARN || factor == 1
               ? ST_OK
               : hf_refuse(j, field, "attention_factor must be 1: braid has no other for these layers", e);
}

int deepseek_v4_read(const struct hf_json *j, struct config *c, struct err *e)
{
    static const char *const fixed[][2] = {{"model.act", "swiglu"},     {"model.router_score", "sqrtsoftplus"},
                                           {"model.router_norm", "on"}, {"model.mhc_profile", "d"},
                                           {"model.mla_norm_eps", "0"}, {"model.mhc_norm_eps_inside", "on"}};
    struct rates r;
    TRY(read_rates(j, c, &r, e));
    TRY(read_layers(j, c, &r, e));
    TRY(read_hash_layers(j, c, e));
    for (int i = 0; i < countof(fixed); i++)
        TRY(hf_set_text(j, c, fixed[i][0], fixed[i][1], e));
    TRY(hf_set_int(j, c, "model.shared_ffn", c->model.expert_ffn, e));
    TRY(hf_check_single_expert(j, c, e));
    TRY(hf_check_limit(j, c, e));
    /* What is added to the gates that contract the streams, hc_eps, is the norms' epsilon in braid. */
    if (fabs(c->model.norm_eps - 1e-6) > 1e-15)
        return hf_refuse(j, "rms_norm_eps", "1e-6, which hc_eps is too, is expected", e);
    TRY(hf_set_real(j, c, "model.mhc_norm_eps", c->model.norm_eps, e));
    return read_rope(j, c, e);
}

/* ---- writing --------------------------------------------------------------------------------- */

static int append(json_t *list, json_t *value, struct err *e)
{
    return json_array_append_new(list, value) == 0 ? ST_OK : err_set(e, ST_NOMEM, "out of memory for config.json");
}

static int put_kinds(const struct config *c, json_t *out, const struct hf_layers *l, struct err *e)
{
    const struct config_model *m = &c->model;
    int64_t hashed = m->router_hash_layers / 2, depths = hf_pattern_depths(c);
    json_t *types, *ratios, *mlps;
    TRY(hf_put(out, "layer_types", types = json_array(), e));
    TRY(hf_put(out, "compress_ratios", ratios = json_array(), e));
    TRY(hf_put(out, "mlp_layer_types", mlps = json_array(), e));
    for (int64_t i = 0; i < l->n; i++) {
        int k = l->list[i][0] == 'C' ? SPARSE : l->list[i][0] == 'H' ? HEAVY : SLIDING;
        TRY(append(types, json_string(kinds[k].name), e));
        TRY(append(ratios,
                   json_integer(k == SPARSE  ? m->compress_rate_csa
                                : k == HEAVY ? m->compress_rate_hca
                                             : 0),
                   e));
        TRY(append(mlps, json_string(i < hashed ? "hash_moe" : "moe"), e));
    }
    for (int64_t i = 0; i < depths; i++)
        TRY(append(ratios, json_integer(0), e));
    TRY(hf_put(out, "num_hash_layers", json_integer(min_i64(hashed, l->n)), e));
    return hf_put(out, "compress_rates",
                  json_pack("{s:I, s:I}", kinds[SPARSE].name, (json_int_t)m->compress_rate_csa, kinds[HEAVY].name,
                            (json_int_t)m->compress_rate_hca),
                  e);
}

static int put_rope(const struct config *c, json_t *out, struct err *e)
{
    const struct config_model *m = &c->model;
    bool yarn = m->rope_scaling == CFG_ROPE_SCALING_YARN;
    double share = (double)m->mla_rope / (double)m->mla_v;
    if ((int64_t)((double)m->mla_v * share) != m->mla_rope)
        return err_set(e, ST_UNSUPPORTED, "model.mla_rope %lld of %lld channels is no share that config.json can say",
                       (long long)m->mla_rope, (long long)m->mla_v);
    json_t *both, *plain, *scaled;
    TRY(hf_put(out, "rope_parameters", both = json_object(), e));
    TRY(hf_put(both, "main", plain = json_object(), e));
    TRY(hf_put(both, "compress", scaled = json_object(), e));
    TRY(hf_put(plain, "rope_type", json_string("default"), e));
    TRY(hf_put(plain, "rope_theta", json_real(m->rope_base), e));
    TRY(hf_put(plain, "partial_rotary_factor", json_real(share), e));
    TRY(hf_put(scaled, "rope_theta", json_real(m->csa_compress_rotary_base), e));
    TRY(hf_put(scaled, "partial_rotary_factor", json_real(share), e));
    TRY(hf_rope_scaling_write(c, scaled, e));
    if (yarn)
        TRY(hf_put(scaled, "attention_factor", json_real(1), e));
    TRY(hf_put(out, "rope_theta", json_real(m->rope_base), e));
    TRY(hf_put(out, "compress_rope_theta", json_real(m->csa_compress_rotary_base), e));
    TRY(hf_put(out, "partial_rotary_factor", json_real(share), e));
    return hf_put(out, "qk_rope_head_dim", json_integer(m->mla_rope), e);
}

int deepseek_v4_write(const struct config *c, json_t *out, struct err *e)
{
    struct hf_layers l;
    TRY(hf_split_pattern(c, &l, e));
    int st = hf_put_layers(out, &l, allowed, e);
    if (st == ST_OK)
        st = put_kinds(c, out, &l, e);
    free(l.list);
    TRY(st);
    TRY(hf_put_depths(c, out, "WE", 16, e));
    TRY(put_rope(c, out, e));
    TRY(hf_put(out, "use_cache", json_true(), e));
    return hf_put_positions(c, out, e);
}
