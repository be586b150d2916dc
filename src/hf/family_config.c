/* config.json beyond its plain fields: patterns of layers, routing, rotary embedding of each family. A pattern is read
 * from and written as one string for each layer of transformers, such as "*-" or "GE". */
#include "hf/family_config_int.h"

#include <stdlib.h>
#include <string.h>

/* ---- patterns -------------------------------------------------------------------------------- */

int hf_count_layers(const struct hf_json *j, int64_t *n, struct err *e)
{
    TRY(hf_json_int(j, "num_hidden_layers", 0, n, e));
    if (*n == 0)
        TRY(hf_json_int(j, "n_layer", 0, n, e)); /* GPT-2's name */
    return *n >= 1 && *n <= HF_MAX_LAYERS
               ? ST_OK
               : hf_refuse(j, "num_hidden_layers", "between 1 and 4096 layers are expected", e);
}

typedef const char *(*layer_fn)(const void *ctx, int64_t i); /* symbols of layer i */

static int set_pattern(const struct hf_json *j, struct config *c, layer_fn layer, const void *ctx, struct err *e)
{
    int64_t n;
    struct buf text;
    TRY(hf_count_layers(j, &n, e));
    buf_init(&text, 0);
    for (int64_t i = 0; i < n; i++) {
        const char *symbols = layer(ctx, i);
        buf_addf(&text, symbols[1] ? "[%s]" : "%s", symbols);
    }
    int st = buf_check(&text, e);
    if (st == ST_OK)
        st = hf_set_text(j, c, "model.pattern", text.text, e);
    buf_release(&text);
    return st;
}

static const char *same_layer(const void *ctx, int64_t i)
{
    (void)i;
    return ctx;
}

int hf_split_pattern(const struct config *c, struct hf_layers *out, struct err *e)
{
    *out = (struct hf_layers){.n = 0};
    TRY(mem_array((void **)&out->list, strlen(c->model.pattern) + 1, sizeof *out->list, e));
    for (const char *p = c->model.pattern; *p && *p != '/'; p++) {
        size_t n = 1;
        if (strchr("|: ", *p) != NULL)
            continue;
        if (*p == '[')
            n = strcspn(++p, "]");
        if (n >= sizeof *out->list) {
            free(out->list);
            return err_set(e, ST_UNSUPPORTED, "a group of %zu layers is no layer of transformers", n);
        }
        memcpy(out->list[out->n++], p, n);
        p += p[n] == ']' ? n : n - 1;
    }
    return ST_OK;
}

int hf_put_layers(json_t *out, const struct hf_layers *l, const char *const *allowed, struct err *e)
{
    for (int64_t i = 0; i < l->n; i++) {
        bool known = false;
        for (int k = 0; allowed[k] != NULL; k++)
            known |= strcmp(l->list[i], allowed[k]) == 0;
        if (!known)
            return err_set(e, ST_UNSUPPORTED, "model.pattern: layer %lld is '%s', which this family does not have",
                           (long long)i, l->list[i]);
    }
    return hf_put(out, "num_hidden_layers", json_integer(l->n), e);
}

int hf_put_depths(const struct config *c, json_t *out, const char *symbols, int64_t most, struct err *e)
{
    size_t n = strlen(symbols);
    int64_t depths = hf_pattern_depths(c);
    for (const char *p = strchr(c->model.pattern, '/'); p != NULL; p = strchr(p + 1, '/'))
        if (strncmp(p + 1, symbols, n) != 0 || (p[n + 1] != '/' && p[n + 1] != '\0'))
            return err_set(e, ST_UNSUPPORTED,
                           "model.pattern: depths of multi-token prediction can only be %s in this family", symbols);
    if (depths > most)
        return err_set(e, ST_UNSUPPORTED,
                       "model.pattern: this family has at most %lld depths of multi-token prediction", (long long)most);
    return hf_put(out, "num_nextn_predict_layers", json_integer(depths), e);
}

static int put_plain_pattern(const struct config *c, json_t *out, const char *symbols, struct err *e)
{
    const char *const allowed[] = {symbols, NULL};
    struct hf_layers l;
    TRY(hf_split_pattern(c, &l, e));
    int st = hf_put_layers(out, &l, allowed, e);
    free(l.list);
    return st;
}

int hf_put_positions(const struct config *c, json_t *out, struct err *e)
{
    return hf_put(out, "max_position_embeddings",
                  json_integer(max_i64(max_i64(c->model.max_position, c->train.seq), 1)), e);
}

static int put_common(const struct config *c, json_t *out, struct err *e)
{
    TRY(hf_rope_write(c, out, e));
    TRY(hf_put(out, "use_cache", json_true(), e));
    return hf_put_positions(c, out, e);
}

/* ---- dense ----------------------------------------------------------------------------------- */

/* Layers that slide where the family's options say none does. */
static int check_full_attention(const struct hf_json *j, struct err *e)
{
    json_t *types = hf_json_get(j, "layer_types"), *one;
    size_t i;
    json_array_foreach(types, i, one)
    {
        const char *type = json_string_value(one);
        if (type == NULL || strcmp(type, "full_attention") != 0)
            return hf_refuse(j, "layer_types", "only layers of full_attention are expected here", e);
    }
    return ST_OK;
}

/* Layers that slide and layers that see everything: every k-th of the latter kind is what braid can say. */
static int read_layer_types(const struct hf_json *j, struct config *c, struct err *e)
{
    json_t *types = hf_json_get(j, "layer_types"), *one;
    size_t i, n = json_array_size(types);
    int64_t every = types == NULL ? 2 : 0;
    json_array_foreach(types, i, one)
    {
        const char *type = json_string_value(one);
        bool full = type != NULL && strcmp(type, "full_attention") == 0;
        if (type == NULL || (!full && strcmp(type, "sliding_attention") != 0))
            return hf_refuse(j, "layer_types", "only full_attention and sliding_attention are expected here", e);
        if (full && every == 0)
            every = (int64_t)i + 1;
        if (full != (every > 0 && ((int64_t)i + 1) % every == 0))
            return hf_refuse(j, "layer_types",
                             "the layers with full attention must be every k-th one (model.attn_window_skip)", e);
    }
    if (c->model.attn_window > 0 && every == 1) { /* none slides */
        TRY(hf_set_int(j, c, "model.attn_window", 0, e));
        every = 0;
    }
    return hf_set_int(j, c, "model.attn_window_skip",
                      c->model.attn_window > 0 && (n == 0 || every <= (int64_t)n) ? every : 0, e);
}

int dense_read(const struct hf_json *j, struct config *c, struct err *e)
{
    TRY(set_pattern(j, c, same_layer, "*-", e));
    TRY(hf_set_text(j, c, "model.act", "swiglu", e));
    return hf_rope_read(j, c, 10000, 0, e);
}
int dense_write(const struct config *c, json_t *out, struct err *e)
{
    TRY(put_plain_pattern(c, out, "*-", e));
    return put_common(c, out, e);
}

/* Windows in all layers. With layer_types the folder is one of transformers' Ministral: some layers may see everything,
 * which is read only, since programs that know Mistral alone would take no notice. */
int mistral_read(const struct hf_json *j, struct config *c, struct err *e)
{
    TRY(dense_read(j, c, e));
    return hf_json_get(j, "layer_types") == NULL ? ST_OK : read_layer_types(j, c, e);
}
int mistral_write(const struct config *c, json_t *out, struct err *e) { return dense_write(c, out, e); }

int qwen2_read(const struct hf_json *j, struct config *c, struct err *e)
{
    TRY(check_full_attention(j, e));
    TRY(hf_set_text(j, c, "model.qkv_bias", "on", e));
    return dense_read(j, c, e);
}
int qwen2_write(const struct config *c, json_t *out, struct err *e) { return dense_write(c, out, e); }

int qwen3_read(const struct hf_json *j, struct config *c, struct err *e)
{
    TRY(check_full_attention(j, e));
    TRY(hf_set_text(j, c, "model.qk_norm", "on", e));
    return dense_read(j, c, e);
}
int qwen3_write(const struct config *c, json_t *out, struct err *e) { return dense_write(c, out, e); }

/* ---- mixtures of experts --------------------------------------------------------------------- */

struct sparse { /* which layers of a Qwen model are mixtures, and which are linear attention */
    int64_t step;
    json_t *dense, *types;
    int64_t interval;
};

static bool is_sparse(const struct sparse *s, int64_t i)
{
    size_t k;
    json_t *one;
    json_array_foreach(s->dense, k, one) if (json_integer_value(one) == i) return false;
    return (i + 1) % s->step == 0;
}

static const char *qwen_moe_layer(const void *ctx, int64_t i) { return is_sparse(ctx, i) ? "*E" : "*-"; }

static const char *qwen_next_layer(const void *ctx, int64_t i)
{
    const struct sparse *s = ctx;
    const char *type = json_string_value(json_array_get(s->types, (size_t)i));
    bool full = type != NULL ? strcmp(type, "full_attention") == 0 : (i + 1) % s->interval == 0;
    return full ? (is_sparse(s, i) ? "*E" : "*-") : (is_sparse(s, i) ? "GE" : "G-");
}

static int read_sparse(const struct hf_json *j, struct sparse *s, struct err *e)
{
    TRY(hf_json_int(j, "decoder_sparse_step", 1, &s->step, e));
    TRY(hf_json_int(j, "full_attention_interval", 4, &s->interval, e));
    if (s->step < 1)
        return hf_refuse(j, "decoder_sparse_step", "at least 1 is expected", e);
    if (s->interval < 1)
        return hf_refuse(j, "full_attention_interval", "at least 1 is expected", e);
    s->dense = hf_json_get(j, "mlp_only_layers");
    s->types = hf_json_get(j, "layer_types");
    return ST_OK;
}

/* Softmax routers: over all experts and then divided by the sum of the chosen is the softmax of the chosen. */
static int read_topk_norm(const struct hf_json *j, struct config *c, bool absent, struct err *e)
{
    json_t *v = hf_json_get(j, "norm_topk_prob");
    bool norm = v == NULL ? absent : json_is_true(v);
    TRY(hf_set_text(j, c, "model.router_score", "softmax", e));
    return hf_set_text(j, c, "model.router_pre_softmax", norm ? "off" : "on", e);
}

static int put_sparse(const struct config *c, json_t *out, const char *const *allowed, bool types, struct err *e)
{
    struct hf_layers l;
    json_t *dense = json_array(), *names = types ? json_array() : NULL;
    int st = hf_split_pattern(c, &l, e);
    if (st == ST_OK)
        st = hf_put_layers(out, &l, allowed, e);
    for (int64_t i = 0; st == ST_OK && i < l.n; i++) {
        if (l.list[i][1] == '-' && json_array_append_new(dense, json_integer(i)) != 0)
            st = err_set(e, ST_NOMEM, "out of memory");
        if (types &&
            json_array_append_new(names, json_string(l.list[i][0] == 'G' ? "linear_attention" : "full_attention")) != 0)
            st = err_set(e, ST_NOMEM, "out of memory");
    }
    free(l.list);
    if (st != ST_OK) {
        json_decref(dense);
        json_decref(names);
        return st;
    }
    st = hf_put(out, "mlp_only_layers", dense, e);
    if (types)
        TRY(hf_put(out, "layer_types", names, e));
    TRY(st);
    TRY(hf_put(out, "decoder_sparse_step", json_integer(1), e));
    return hf_put(out, "norm_topk_prob", json_boolean(!c->model.router_pre_softmax), e);
}

int qwen3_moe_read(const struct hf_json *j, struct config *c, struct err *e)
{
    struct sparse s;
    TRY(check_full_attention(j, e));
    TRY(read_sparse(j, &s, e));
    TRY(set_pattern(j, c, qwen_moe_layer, &s, e));
    TRY(hf_set_text(j, c, "model.act", "swiglu", e));
    TRY(hf_set_text(j, c, "model.qk_norm", "on", e));
    TRY(read_topk_norm(j, c, false, e));
    return hf_rope_read(j, c, 10000, 0, e);
}
int qwen3_moe_write(const struct config *c, json_t *out, struct err *e)
{
    static const char *const allowed[] = {"*E", "*-", NULL};
    TRY(put_sparse(c, out, allowed, false, e));
    return put_common(c, out, e);
}

int mixtral_read(const struct hf_json *j, struct config *c, struct err *e)
{
    if (json_is_false(hf_json_get(j, "norm_topk_prob")))
        return hf_refuse(j, "norm_topk_prob", "this family always divides by the sum of the chosen", e);
    TRY(set_pattern(j, c, same_layer, "*E", e));
    TRY(hf_set_text(j, c, "model.act", "swiglu", e));
    TRY(read_topk_norm(j, c, true, e));
    return hf_rope_read(j, c, 1e6, 0, e);
}
int mixtral_write(const struct config *c, json_t *out, struct err *e)
{
    TRY(put_plain_pattern(c, out, "*E", e));
    return put_common(c, out, e);
}

int qwen3_next_read(const struct hf_json *j, struct config *c, struct err *e)
{
    static const char *const on[] = {"model.qk_norm", "model.attn_gate", "model.norm_zero_centered",
                                     "model.shared_gate"};
    struct sparse s;
    TRY(read_sparse(j, &s, e));
    TRY(set_pattern(j, c, qwen_next_layer, &s, e));
    TRY(hf_set_text(j, c, "model.act", "swiglu", e));
    for (int i = 0; i < countof(on); i++)
        TRY(hf_set_text(j, c, on[i], "on", e));
    TRY(read_topk_norm(j, c, true, e));
    return hf_rope_read(j, c, 10000, 0.25, e);
}
int qwen3_next_write(const struct config *c, json_t *out, struct err *e)
{
    static const char *const allowed[] = {"*E", "*-", "GE", "G-", NULL};
    TRY(put_sparse(c, out, allowed, true, e));
    TRY(hf_put_depths(c, out, "*E", 1, e));
    TRY(put_common(c, out, e));
    return hf_put(out, "partial_rotary_factor", json_real(c->model.rope_percent), e);
}

/* ---- DeepSeek-V3 and V3.2 -------------------------------------------------------------------- */

static const char *deepseek_layer(const void *ctx, int64_t i) { return i < *(const int64_t *)ctx ? "+-" : "+E"; }
static const char *deepseek_v32_layer(const void *ctx, int64_t i) { return i < *(const int64_t *)ctx ? "D-" : "DE"; }

/* The class scores a group by its two best experts, whatever a token takes of it. */
static int read_group_score(const struct hf_json *j, struct config *c, struct err *e)
{
    if (c->model.router_groups > 0 && c->model.router_group_topk < 1)
        return hf_refuse(j, "topk_group", "at least 1 is expected", e);
    return c->model.router_groups == 0 ? hf_set_int(j, c, "model.router_group_topk", 0, e)
                                       : hf_set_int(j, c, "model.router_group_best", 2, e);
}

/* Scores that are no softmax: divided by their sum, that of a single expert would be 1, which braid's router leaves
 * out. */
int hf_check_single_expert(const struct hf_json *j, const struct config *c, struct err *e)
{
    if (c->model.topk != 1 || !c->model.router_norm || strchr(c->model.pattern, 'E') == NULL)
        return ST_OK;
    hf_refuse(j, "num_experts_per_tok",
              "with norm_topk_prob the one expert of a token has the weight 1, whatever its score", e);
    return err_hint(e, "braid has only norm_topk_prob = false for it");
}

static int put_single_expert(const struct config *c, json_t *out, struct err *e)
{
    return c->model.topk == 1 ? hf_put(out, "norm_topk_prob", json_false(), e) : ST_OK;
}

static int read_latent(const struct hf_json *j, struct config *c, const char *(*layer)(const void *, int64_t),
                       int64_t dense, struct err *e)
{
    int64_t shared;
    TRY(hf_json_int(j, "n_shared_experts", 1, &shared, e));
    if (shared < 0 || shared > 1024)
        return hf_refuse(j, "n_shared_experts", "between 0 and 1024 are expected", e);
    TRY(set_pattern(j, c, layer, &dense, e));
    TRY(hf_set_text(j, c, "model.act", "swiglu", e));
    TRY(hf_set_int(j, c, "model.shared_ffn", shared * c->model.expert_ffn, e));
    TRY(hf_set_text(j, c, "model.router_score", "sigmoid", e));
    TRY(hf_set_text(j, c, "model.router_bias", "on", e));
    /* The class gives its two latent norms no epsilon of the config. */
    TRY(hf_set_text(j, c, "model.mla_norm_eps", "1e-6", e));
    if (c->model.router_groups == 1)
        TRY(hf_set_int(j, c, "model.router_groups", 0, e));
    TRY(read_group_score(j, c, e));
    TRY(hf_check_single_expert(j, c, e));
    return hf_rope_read(j, c, 10000, 0, e);
}

int deepseek_read(const struct hf_json *j, struct config *c, struct err *e)
{
    int64_t rotated, dense;
    TRY(hf_json_int(j, "head_dim", c->model.mla_rope, &rotated, e));
    if (rotated != c->model.mla_rope) /* the class takes its frequencies from it */
        return hf_refuse(j, "head_dim", "the rotary channels, qk_rope_head_dim, are expected", e);
    TRY(hf_json_int(j, "first_k_dense_replace", 3, &dense, e));
    return read_latent(j, c, deepseek_layer, dense, e);
}

/* Layers before the first mixture of experts. Where the folder names the kind of each layer, the class of V3.2 goes by
 * that, whatever first_k_dense_replace says. */
static int count_dense(const struct hf_json *j, int64_t *dense, struct err *e)
{
    json_t *types = hf_json_get(j, "mlp_layer_types");
    int64_t n;
    if (types == NULL)
        return hf_json_int(j, "first_k_dense_replace", 3, dense, e);
    TRY(hf_count_layers(j, &n, e));
    *dense = 0;
    for (int64_t i = 0; i < n; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        bool plain = type != NULL && strcmp(type, "dense") == 0;
        if (type == NULL || (!plain && strcmp(type, "sparse") != 0) || (plain && *dense < i))
            return hf_refuse(j, "mlp_layer_types", "dense or sparse is expected for every layer, dense ones first", e);
        *dense += plain;
    }
    return ST_OK;
}

/* Every layer selects keys for itself. The class knows neither indices shared over layers nor another epsilon. */
int deepseek_v32_read(const struct hf_json *j, struct config *c, struct err *e)
{
    int64_t dense;
    TRY(hf_set_text(j, c, "model.dsa_indexer_k_norm_epsilon", "1e-6", e));
    if (c->model.mla_q_rank == 0)
        return hf_refuse(j, "q_lora_rank", "this family always has a latent of queries (model.mla_q_rank)", e);
    TRY(count_dense(j, &dense, e));
    return read_latent(j, c, deepseek_v32_layer, dense, e);
}

static int write_latent(const struct config *c, json_t *out, const char *const *allowed, struct err *e)
{
    const struct config_model *m = &c->model;
    struct hf_layers l;
    int64_t dense = 0;
    TRY(hf_split_pattern(c, &l, e));
    int st = hf_put_layers(out, &l, allowed, e);
    while (dense < l.n && l.list[dense][1] == '-')
        dense++;
    for (int64_t i = dense; st == ST_OK && i < l.n; i++)
        if (l.list[i][1] == '-')
            st = err_set(e, ST_UNSUPPORTED,
                         "model.pattern: a dense layer behind a mixture of experts is not in this family");
    free(l.list);
    TRY(st);
    TRY(hf_put(out, "first_k_dense_replace", json_integer(dense), e));
    if (m->expert_ffn < 1 || m->shared_ffn % m->expert_ffn != 0)
        return err_set(e, ST_UNSUPPORTED, "model.shared_ffn %lld is not a multiple of model.expert_ffn %lld",
                       (long long)m->shared_ffn, (long long)m->expert_ffn);
    TRY(hf_put(out, "n_shared_experts", json_integer(m->shared_ffn / m->expert_ffn), e));
    TRY(hf_put(out, "num_key_value_heads", json_integer(m->heads), e));
    TRY(hf_put(out, "n_group", json_integer(max_i64(m->router_groups, 1)), e));
    TRY(hf_put(out, "topk_group", json_integer(m->router_groups > 0 ? m->router_group_topk : 1), e));
    TRY(hf_put_depths(c, out, allowed[1], 16, e));
    TRY(put_single_expert(c, out, e));
    return put_common(c, out, e);
}

int deepseek_write(const struct config *c, json_t *out, struct err *e)
{
    static const char *const allowed[] = {"+-", "+E", NULL};
    return write_latent(c, out, allowed, e);
}

int deepseek_v32_write(const struct config *c, json_t *out, struct err *e)
{
    static const char *const allowed[] = {"D-", "DE", NULL};
    return write_latent(c, out, allowed, e);
}

/* ---- Mamba-2 and hybrids --------------------------------------------------------------------- */

static int check_step_limit(const struct hf_json *j, struct config *c, struct err *e)
{
    json_t *limit = hf_json_get(j, "time_step_limit"), *low = json_array_get(limit, 0),
           *high = json_array_get(limit, 1);
    /* {"__float__": "Infinity"} */
    bool open = json_is_object(high) || (json_is_number(high) && json_number_value(high) > 1e30);
    if (limit == NULL)
        return ST_OK;
    if (!json_is_number(low) || json_array_size(limit) != 2 || !(open || json_is_number(high)))
        return hf_refuse(j, "time_step_limit", "two numbers are expected", e);
    TRY(hf_set_real(j, c, "model.mamba_dt_min", json_number_value(low), e));
    return open ? ST_OK : hf_set_real(j, c, "model.mamba_dt_max", json_number_value(high), e);
}

static int put_step_limit(const struct config *c, json_t *out, struct err *e)
{
    const struct config_model *m = &c->model;
    json_t *high = m->mamba_dt_max > 0 ? json_real(m->mamba_dt_max) : json_pack("{s:s}", "__float__", "Infinity");
    return hf_put(out, "time_step_limit", json_pack("[f, o]", m->mamba_dt_min, high), e);
}

/* The epsilon of the gated norm inside a Mamba-2 layer is no option. */
static int check_mamba_epsilon(const struct hf_json *j, const struct config *c, const char *field, struct err *e)
{
    return strchr(c->model.pattern, 'M') == NULL || c->model.norm_eps == 1e-5
               ? ST_OK
               : hf_refuse(j, field, "the gated norm of Mamba-2 layers has 1e-5 in braid", e);
}

/* The gated norm is taken by groups, as mamba_ssm does and transformers from 5.23 on. */
static int read_mamba(const struct hf_json *j, struct config *c, const char *epsilon, struct err *e)
{
    TRY(check_mamba_epsilon(j, c, epsilon, e));
    TRY(hf_set_text(j, c, "model.mamba_norm", "group", e));
    return check_step_limit(j, c, e);
}

int mamba2_read(const struct hf_json *j, struct config *c, struct err *e)
{
    TRY(set_pattern(j, c, same_layer, "M", e));
    TRY(hf_set_text(j, c, "model.heads", "1", e)); /* of attention, which there is none of */
    return read_mamba(j, c, "layer_norm_epsilon", e);
}
int mamba2_write(const struct config *c, json_t *out, struct err *e)
{
    TRY(put_plain_pattern(c, out, "M", e));
    TRY(hf_put(out, "expand",
               json_integer(max_i64(c->model.mamba_heads * c->model.mamba_head_dim / c->model.hidden, 1)), e));
    TRY(hf_put(out, "use_cache", json_true(), e));
    return put_step_limit(c, out, e);
}

struct blocks {
    json_t *list;
    const char *pattern;
};

static const char *nemotron_layer(const void *ctx, int64_t i)
{
    static const struct {
        const char *name, *symbol;
    } kinds[] = {{"mamba", "M"}, {"linear_attention", "M"}, {"attention", "*"}, {"full_attention", "*"}, {"mlp", "-"},
                 {"moe", "E"}};
    const struct blocks *b = ctx;
    const char *name = json_string_value(json_array_get(b->list, (size_t)i));
    if (b->list == NULL) {
        static const char *const plain[] = {"M", "*", "-", "E"};
        for (int k = 0; k < countof(plain); k++)
            if (b->pattern[i] == plain[k][0])
                return plain[k];
    }
    for (int k = 0; name != NULL && k < countof(kinds); k++)
        if (strcmp(name, kinds[k].name) == 0)
            return kinds[k].symbol;
    return "?"; /* the pattern's reader refuses it with its place */
}

int nemotron_read(const struct hf_json *j, struct config *c, struct err *e)
{
    struct blocks b = {.list = hf_json_get(j, "layers_block_type"),
                       .pattern = json_string_value(hf_json_get(j, "hybrid_override_pattern"))};
    size_t n = b.list != NULL ? json_array_size(b.list) : b.pattern != NULL ? strlen(b.pattern) : 0;
    struct buf text;
    if (n == 0 || n > HF_MAX_LAYERS)
        return hf_refuse(j, "layers_block_type", "the kinds of at least one and at most 4096 layers are expected", e);
    buf_init(&text, 0);
    for (size_t i = 0; i < n; i++)
        buf_add(&text, nemotron_layer(&b, (int64_t)i));
    int st = buf_check(&text, e);
    if (st == ST_OK)
        st = hf_set_text(j, c, "model.pattern", text.text, e);
    buf_release(&text);
    TRY(st);
    TRY(hf_set_text(j, c, "model.act", "relu2", e));
    TRY(hf_set_text(j, c, "model.rope", "none", e));
    TRY(hf_set_text(j, c, "model.router_score", "sigmoid", e));
    TRY(hf_set_text(j, c, "model.router_bias", strchr(c->model.pattern, 'E') ? "on" : "off", e));
    if (c->model.router_groups <= 1)
        TRY(hf_set_int(j, c, "model.router_groups", 0, e));
    TRY(check_mamba_epsilon(j, c, "layer_norm_epsilon", e));
    TRY(hf_check_single_expert(j, c, e));
    return read_group_score(j, c, e);
}

int nemotron_write(const struct config *c, json_t *out, struct err *e)
{
    static const char *const allowed[] = {"M", "*", "-", "E", NULL};
    struct hf_layers l;
    char text[HF_MAX_LAYERS + 1];
    json_t *kinds = json_array();
    int st = hf_split_pattern(c, &l, e);
    if (st == ST_OK)
        st = hf_put_layers(out, &l, allowed, e);
    if (st == ST_OK && l.n > HF_MAX_LAYERS)
        st = err_set(e, ST_UNSUPPORTED, "more than 4096 layers");
    for (int64_t i = 0; st == ST_OK && i < l.n; i++) {
        const char *name = l.list[i][0] == 'M'   ? "linear_attention"
                           : l.list[i][0] == '*' ? "full_attention"
                           : l.list[i][0] == '-' ? "mlp"
                                                 : "moe";
        text[i] = l.list[i][0];
        if (json_array_append_new(kinds, json_string(name)) != 0)
            st = err_set(e, ST_NOMEM, "out of memory");
    }
    text[st == ST_OK ? l.n : 0] = '\0';
    free(l.list);
    if (st != ST_OK) {
        json_decref(kinds);
        return st;
    }
    TRY(hf_put(out, "layers_block_type", kinds, e));
    TRY(hf_put(out, "hybrid_override_pattern", json_string(text), e));
    TRY(hf_put(out, "n_group", json_integer(max_i64(c->model.router_groups, 1)), e));
    TRY(hf_put(out, "topk_group", json_integer(max_i64(c->model.router_group_topk, 1)), e));
    TRY(hf_put(out, "n_shared_experts", json_integer(c->model.shared_ffn > 0), e));
    TRY(put_single_expert(c, out, e));
    TRY(hf_put(out, "use_cache", json_true(), e));
    return hf_put_positions(c, out, e);
}

static const char *bamba_layer(const void *ctx, int64_t i)
{
    size_t k;
    json_t *one;
    json_array_foreach((json_t *)(uintptr_t)ctx, k, one) if (json_integer_value(one) == i) return "*-";
    return "M-";
}

int bamba_read(const struct hf_json *j, struct config *c, struct err *e)
{
    TRY(set_pattern(j, c, bamba_layer, hf_json_get(j, "attn_layer_indices"), e));
    TRY(hf_set_text(j, c, "model.act", "swiglu", e));
    TRY(read_mamba(j, c, "rms_norm_eps", e));
    return hf_rope_read(j, c, 10000, 0.5, e);
}

int bamba_write(const struct config *c, json_t *out, struct err *e)
{
    static const char *const allowed[] = {"*-", "M-", NULL};
    struct hf_layers l;
    json_t *list = json_array();
    int st = hf_split_pattern(c, &l, e);
    if (st == ST_OK)
        st = hf_put_layers(out, &l, allowed, e);
    for (int64_t i = 0; st == ST_OK && i < l.n; i++)
        if (l.list[i][0] == '*' && json_array_append_new(list, json_integer(i)) != 0)
            st = err_set(e, ST_NOMEM, "out of memory");
    free(l.list);
    if (st != ST_OK) {
        json_decref(list);
        return st;
    }
    TRY(hf_put(out, "attn_layer_indices", list, e));
    TRY(hf_put(out, "mamba_expand",
               json_integer(max_i64(c->model.mamba_heads * c->model.mamba_head_dim / c->model.hidden, 1)), e));
    TRY(put_step_limit(c, out, e));
    TRY(put_common(c, out, e));
    /* The class reads it here only, and rotates half of a head where it is absent. */
    return hf_put(json_object_get(out, "rope_parameters"), "partial_rotary_factor", json_real(c->model.rope_percent),
                  e);
}

/* ---- GPT-2 ----------------------------------------------------------------------------------- */

int gpt2_read(const struct hf_json *j, struct config *c, struct err *e)
{
    static const char *const fixed[][2] = {{"model.act", "gelu"},
                                           {"model.norm", "layer"},
                                           {"model.position", "learned"},
                                           {"model.rope", "none"},
                                           {"model.bias", "on"}};
    TRY(set_pattern(j, c, same_layer, "*-", e));
    for (int i = 0; i < countof(fixed); i++)
        TRY(hf_set_text(j, c, fixed[i][0], fixed[i][1], e));
    return ST_OK;
}

int gpt2_write(const struct config *c, json_t *out, struct err *e)
{
    TRY(put_plain_pattern(c, out, "*-", e));
    TRY(hf_put(out, "n_layer", json_incref(json_object_get(out, "num_hidden_layers")), e));
    if (json_object_del(out, "num_hidden_layers") != 0)
        return err_set(e, ST_INTERNAL, "the number of layers was there before");
    TRY(hf_put(out, "use_cache", json_true(), e));
    TRY(hf_put(out, "resid_pdrop", json_real(c->model.dropout), e));
    TRY(hf_put(out, "embd_pdrop", json_real(c->model.dropout), e));
    return hf_put(out, "attn_pdrop", json_real(c->model.attention_dropout), e);
}

/* ---- OLMoE ----------------------------------------------------------------------------------- */

int olmoe_read(const struct hf_json *j, struct config *c, struct err *e)
{
    TRY(set_pattern(j, c, same_layer, "*E", e));
    TRY(hf_set_text(j, c, "model.act", "swiglu", e));
    TRY(hf_set_text(j, c, "model.qk_norm", "row", e));
    TRY(read_topk_norm(j, c, false, e));
    return hf_rope_read(j, c, 10000, 0, e);
}

int olmoe_write(const struct config *c, json_t *out, struct err *e)
{
    TRY(put_plain_pattern(c, out, "*E", e));
    TRY(hf_put(out, "norm_topk_prob", json_boolean(!c->model.router_pre_softmax), e));
    return put_common(c, out, e);
}

/* ---- gpt-oss --------------------------------------------------------------------------------- */

static int put_layer_types(const struct config *c, json_t *out, struct err *e)
{
    const struct config_model *m = &c->model;
    int64_t n = json_integer_value(json_object_get(out, "num_hidden_layers"));
    json_t *types = json_array();
    for (int64_t i = 0; i < n; i++) {
        bool full = m->attn_window == 0 || (m->attn_window_skip > 0 && (i + 1) % m->attn_window_skip == 0);
        if (json_array_append_new(types, json_string(full ? "full_attention" : "sliding_attention")) != 0) {
            json_decref(types);
            return err_set(e, ST_NOMEM, "out of memory");
        }
    }
    return hf_put(out, "layer_types", types, e);
}

/* transformers clamps at 0 where the field is 0; in braid that is no limit. */
int hf_check_limit(const struct hf_json *j, const struct config *c, struct err *e)
{
    return c->model.act_clamp > 0
               ? ST_OK
               : hf_refuse(j, "swiglu_limit", "this family always limits its gates (model.act_clamp), at 0 to nothing",
                           e);
}

int gpt_oss_read(const struct hf_json *j, struct config *c, struct err *e)
{
    static const char *const fixed[][2] = {{"model.act", "quick_geglu"},       {"model.act_offset", "1"},
                                           {"model.attn_sink", "learnable"},   {"model.expert_bias", "on"},
                                           {"model.router_linear_bias", "on"}, {"model.router_score", "softmax"},
                                           {"model.router_pre_softmax", "off"}};
    TRY(set_pattern(j, c, same_layer, "*E", e));
    for (int i = 0; i < countof(fixed); i++)
        TRY(hf_set_text(j, c, fixed[i][0], fixed[i][1], e));
    TRY(read_layer_types(j, c, e));
    TRY(hf_check_limit(j, c, e));
    if (hf_json_get(j, "rope_parameters") == NULL && hf_json_get(j, "rope_scaling") == NULL)
        return hf_refuse(j, "rope_parameters", "braid needs this field, or rope_scaling", e);
    return hf_rope_read(j, c, 150000, 0, e);
}

int gpt_oss_write(const struct config *c, json_t *out, struct err *e)
{
    TRY(put_plain_pattern(c, out, "*E", e));
    TRY(put_layer_types(c, out, e));
    return put_common(c, out, e);
}
