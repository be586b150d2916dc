/* A checkpoint as Megatron's distributed checkpoints name and cut it, in safetensors: model.safetensors, the state of
 * the optimizer beside it, and megatron.json with what Megatron stores about the model. tools/megatron_dist.py makes a
 * torch_dist folder of it. Values pass through one tensor at a time. */
#include "ckpt/keys/keymap.h"
#include "train/interop.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct writer {
    const struct ckpt *from;
    const struct config *cfg;
    const struct export_opts *opts;
    enum key_layout layout;
    const char *tmp; /* the folder while it is written */
    struct key_file file;
    struct pattern *pattern;
    struct key_output out[KEYS_SPACES];
    int64_t done, all;
};

/* ---- tensors --------------------------------------------------------------------------------- */

/* One file: tensors of one or several spaces, under names of their own. */
struct part {
    struct writer *w;
    struct st_item *items;    /* shapes and types as they are written */
    const struct tensor **at; /* where their values are */
    int n, next;
    void *raw, *converted;
    size_t raw_cap, converted_cap;
    struct arena names;
};

static int fetch(void *ctx, const char *key, struct tensor *host, struct err *e)
{
    struct part *p = ctx;
    int i = p->next;
    for (int k = 0; k < p->n && strcmp(p->items[i % p->n].name, key) != 0; k++)
        i++;
    i %= p->n;
    if (strcmp(p->items[i].name, key) != 0)
        return err_set(e, ST_INTERNAL, "there is no rule to export %s", key);
    p->next = i + 1;
    const struct tensor *from = p->at[i];
    int64_t bytes = tensor_bytes(from);
    TRY(mem_grow(&p->raw, &p->raw_cap, (size_t)bytes + 1, 1, e)); /* values on the map may be unaligned */
    if (bytes > 0)
        memcpy(p->raw, from->data, (size_t)bytes);
    host->data = p->raw;
    if (host->dtype != from->dtype) {
        struct tensor dense = *from;
        dense.data = p->raw;
        TRY(mem_grow(&p->converted, &p->converted_cap, (size_t)tensor_bytes(host) + 1, 1, e));
        host->data = p->converted;
        tensor_convert(host, &dense);
    }
    p->w->done += bytes;
    if (p->w->opts->progress != NULL)
        p->w->opts->progress->fn(p->w->opts->progress->ctx, p->w->done, p->w->all);
    return ST_OK;
}

/* What Megatron keeps in fp32 in a bf16 model, tables apart. */
static bool stays_fp32(const char *key)
{
    static const char *const ends[] = {".A_log", "mixer.D", "router.expert_bias"};
    for (int i = 0; i < countof(ends); i++)
        if (str_ends(key, ends[i]))
            return true;
    return false;
}

static int add_tensor(struct part *p, const char *prefix, const struct st_item *item, enum dtype dtype, struct err *e)
{
    char *name = arena_printf(&p->names, "%s%s", prefix, item->name);
    if (name == NULL)
        return err_set(e, ST_NOMEM, "out of memory naming %s", item->name);
    bool convert = item->host.dtype == DT_F32 && !stays_fp32(item->name);
    struct st_item out = {.name = name,
                          .host = tensor_shape(convert ? dtype : item->host.dtype, item->host.rank, item->host.dim)};
    p->items[p->n] = out;
    p->at[p->n++] = &item->host;
    return ST_OK;
}

static int write_part(struct part *p, const char *name, struct err *e)
{
    const struct st_meta meta[] = {{"format", "braid"}};
    const struct ckpt_source source = {fetch, p};
    char *path = path_join(p->w->tmp, name);
    int st = path ? ST_OK : err_set(e, ST_NOMEM, "out of memory writing %s", name);
    if (st == ST_OK)
        st = st_write_stream(path, p->items, p->n, &source, meta, countof(meta), e);
    free(path);
    return st;
}

/* model.safetensors in the wanted type; the state of the optimizer, master weights included, in fp32. */
static int write_tensors(struct writer *w, bool optimizer, struct err *e)
{
    static const char *const prefixes[KEYS_SPACES] = {"optimizer.state.fp32_param.", "optimizer.state.exp_avg.",
                                                      "optimizer.state.exp_avg_sq."};
    struct part p = {.w = w};
    int st, most = 0;
    arena_init(&p.names);
    for (int s = 0; s < KEYS_SPACES; s++)
        most += w->out[s].n;
    TRY_OUT(mem_array((void **)&p.items, (size_t)most, sizeof *p.items, e));
    TRY_OUT(mem_array((void **)&p.at, (size_t)most, sizeof *p.at, e));
    for (int s = 0; s <= (optimizer ? KEYS_EXP_AVG_SQ : KEYS_MODEL); s++)
        for (int i = 0; i < w->out[s].n; i++) {
            const struct st_item *item = &w->out[s].items[i];
            bool trained = item->host.dtype == DT_F32 && !str_ends(item->name, "router.expert_bias");
            if (!optimizer || s != KEYS_MODEL || trained)
                TRY_OUT(add_tensor(&p, optimizer ? prefixes[s] : "", item, optimizer ? DT_F32 : w->opts->dtype, e));
        }
    st = write_part(&p, optimizer ? "optimizer.safetensors" : "model.safetensors", e);
out:
    free(p.items);
    free(p.at);
    free(p.raw);
    free(p.converted);
    arena_release(&p.names);
    return st;
}

/* ---- what Megatron knows about a model ------------------------------------------------------- */

/* Its arguments that are options here, value for value. */
static const char *const args[][2] = {
    {"hidden_size", "model.hidden"},
    {"ffn_hidden_size", "model.ffn"},
    {"num_attention_heads", "model.heads"},
    {"num_query_groups", "model.kv_heads"},
    {"kv_channels", "model.head_dim"},
    {"padded_vocab_size", "model.vocab"},
    {"seq_length", "train.seq"},
    {"max_position_embeddings", "model.max_position"},
    {"norm_epsilon", "model.norm_eps"},
    {"qk_layernorm", "model.qk_norm"},
    {"add_qkv_bias", "model.qkv_bias"},
    {"apply_layernorm_1p", "model.norm_zero_centered"},
    {"rotary_base", "model.rope_base"},
    {"rotary_percent", "model.rope_percent"},
    {"q_lora_rank", "model.mla_q_rank"},
    {"kv_lora_rank", "model.mla_kv_rank"},
    {"qk_head_dim", "model.mla_nope"},
    {"qk_pos_emb_head_dim", "model.mla_rope"},
    {"v_head_dim", "model.mla_v"},
    {"o_groups", "model.o_groups"},
    {"o_lora_rank", "model.o_lora_rank"},
    {"csa_window_size", "model.csa_window_size"},
    {"csa_compress_rotary_base", "model.csa_compress_rotary_base"},
    {"dsa_indexer_n_heads", "model.dsa_indexer_n_heads"},
    {"dsa_indexer_head_dim", "model.dsa_indexer_head_dim"},
    {"dsa_indexer_topk", "model.dsa_indexer_topk"},
    {"mamba_num_heads", "model.mamba_heads"},
    {"mamba_head_dim", "model.mamba_head_dim"},
    {"mamba_state_dim", "model.mamba_state"},
    {"mamba_num_groups", "model.mamba_groups"},
    {"linear_num_value_heads", "model.gdn_value_heads"},
    {"linear_num_key_heads", "model.gdn_key_heads"},
    {"linear_key_head_dim", "model.gdn_key_dim"},
    {"linear_value_head_dim", "model.gdn_value_dim"},
    {"num_experts", "model.experts"},
    {"moe_router_topk", "model.topk"},
    {"moe_ffn_hidden_size", "model.expert_ffn"},
    {"moe_shared_expert_intermediate_size", "model.shared_ffn"},
    {"moe_router_score_function", "model.router_score"},
    {"moe_router_pre_softmax", "model.router_pre_softmax"},
    {"moe_router_enable_expert_bias", "model.router_bias"},
    {"moe_router_topk_scaling_factor", "model.router_scale"},
    {"num_residual_streams", "model.mhc_streams"},
};

static json_t *value_json(const struct config *c, const char *option)
{
    struct buf text;
    double number;
    int64_t integer;
    buf_init(&text, 0);
    const char *is = config_value_text(c, option, &text);
    json_t *out = is == NULL                 ? NULL
                  : !config_reads(c, option) ? json_null()
                  : strcmp(is, "on") == 0    ? json_true()
                  : strcmp(is, "off") == 0   ? json_false()
                  : parse_i64(is, &integer)  ? json_integer(integer)
                  : parse_f64(is, &number)   ? json_real(number)
                                             : json_string(is);
    buf_release(&text);
    return out;
}

static const char *positions_of(const struct config_model *m)
{
    return m->position == CFG_POSITION_LEARNED ? "learned_absolute" : m->rope == CFG_ROPE_NONE ? "none" : "rope";
}

static json_t *args_json(const struct writer *w)
{
    const struct config_model *m = &w->cfg->model;
    const struct pattern *p = w->pattern;
    json_t *out = json_object();
    bool ok = out != NULL, gpt = w->layout == KEYS_STACKED;
    for (int i = 0; ok && i < countof(args); i++)
        ok = json_object_set_new(out, args[i][0], value_json(w->cfg, args[i][1])) == 0;
    bool latent = strpbrk(p->symbols, "+DCHW") != NULL;
    json_t *more =
        json_pack("{s:i, s:i, s:s?, s:b, s:b, s:b, s:b, s:b, s:s, s:s, s:b, s:b}", "num_layers",
                  gpt ? p->n_items : p->n_layers, "mtp_num_layers", p->n_mtp_depths, "hybrid_layer_pattern",
                  gpt ? NULL : m->pattern, "untie_embeddings_and_output_weights", !m->tied, "add_bias_linear",
                  m->bias || m->attn_bias || m->mlp_bias, "swiglu", m->act == CFG_ACT_SWIGLU, "squared_relu",
                  m->act == CFG_ACT_RELU2, "group_query_attention", m->kv_heads != m->heads, "normalization",
                  m->norm == CFG_NORM_LAYER ? "LayerNorm" : "RMSNorm", "position_embedding_type", positions_of(m),
                  "multi_latent_attention", latent, "enable_hyper_connections", m->mhc_streams > 1);
    ok = ok && more != NULL && json_object_update(out, more) == 0;
    json_decref(more);
    if (ok)
        return out;
    json_decref(out);
    return NULL;
}

static int write_json(const struct writer *w, bool optimizer, struct err *e)
{
    const struct ckpt_counters *n = ckpt_counters(w->from);
    json_t *a = args_json(w), *all = a ? json_pack("{s:i, s:I, s:I, s:I, s:b, s:s, s:O}", "version", 1, "iteration",
                                                   (json_int_t)ckpt_step(w->from), "consumed_train_samples",
                                                   (json_int_t)n->samples, "tokens", (json_int_t)n->tokens, "optimizer",
                                                   optimizer, "layout", key_layout_name(w->layout), "args", a)
                                       : NULL;
    char *text = all ? json_dumps(all, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL,
         *path = path_join(w->tmp, "megatron.json");
    int st = text && path ? ST_OK : err_set(e, ST_NOMEM, "out of memory writing megatron.json");
    if (st == ST_OK)
        st = file_write_atomic(path, text, strlen(text), e);
    free(text);
    free(path);
    json_decref(all);
    json_decref(a);
    return st;
}

/* ---- the folder ------------------------------------------------------------------------------ */

static int write_all(struct writer *w, struct buf *notes, struct err *e)
{
    TRY(pattern_parse(w->pattern, w->cfg->model.pattern, e));
    struct key_layers layers = {.n = w->pattern->n_layers,
                                .symbols = w->pattern->symbols,
                                .item = w->pattern->item_of,
                                .grouped = w->pattern->grouped};
    struct key_target to = {.layout = w->layout, .layers = &layers, .distributed = w->cfg};
    for (int s = 0; s <= KEYS_EXP_AVG_SQ; s++)
        TRY(key_convert(&w->out[s], &w->file, (enum key_space)s, &to, e));
    if (w->out[KEYS_MODEL].note != NULL)
        buf_addf(notes, "%s\n", w->out[KEYS_MODEL].note);
    bool optimizer = w->out[KEYS_EXP_AVG].n > 0 && w->out[KEYS_EXP_AVG_SQ].n > 0;
    for (int s = 0; s <= KEYS_EXP_AVG_SQ; s++)
        for (int i = 0; i < w->out[s].n; i++)
            w->all += tensor_bytes(&w->out[s].items[i].host) * (s == KEYS_MODEL && optimizer ? 2 : 1);
    TRY(file_make_dirs(w->tmp, e));
    TRY(write_tensors(w, false, e));
    if (optimizer)
        TRY(write_tensors(w, true, e));
    TRY(write_json(w, optimizer, e));
    TRY(file_sync_dir(w->tmp, e));
    if (rename(w->tmp, w->opts->path) != 0)
        return err_errno(e, "cannot rename %s to %s", w->tmp, w->opts->path);
    return ST_OK;
}

/* What Megatron's models cannot be told. */
static int check_expressible(const struct config_model *m, struct err *e)
{
    bool attention = strchr(m->pattern, '*') != NULL, mlp = strchr(m->pattern, '-') != NULL;
    if (attention && m->qk_norm == CFG_QK_NORM_ROW)
        return err_set(e, ST_UNSUPPORTED,
                       "Megatron norms queries and keys by head; this model has model.qk_norm = row");
    if (attention && mlp && !m->bias && m->attn_bias != m->mlp_bias)
        return err_set(e, ST_UNSUPPORTED,
                       "Megatron's linear layers have biases everywhere or nowhere; here model.attn_bias = %s and "
                       "model.mlp_bias = %s",
                       m->attn_bias ? "on" : "off", m->mlp_bias ? "on" : "off");
    if (strchr(m->pattern, 'E') != NULL && m->router_linear_bias && !m->expert_bias)
        return err_set(
            e, ST_UNSUPPORTED,
            "Megatron's routers have a bias only where experts have; this model has model.expert_bias = off");
    if ((strchr(m->pattern, 'C') != NULL && m->compress_rate_csa != 4) ||
        (strchr(m->pattern, 'H') != NULL && m->compress_rate_hca != 128))
        return err_set(e, ST_UNSUPPORTED,
                       "Megatron's C layers compress 4 tokens and its H layers 128; this model has "
                       "model.compress_rate_csa = %lld and model.compress_rate_hca = %lld",
                       (long long)m->compress_rate_csa, (long long)m->compress_rate_hca);
    return ST_OK;
}

int export_megatron(const struct ckpt *from, const struct config *c, const struct export_opts *o, const char *layout,
                    struct buf *notes, struct err *e)
{
    struct writer w = {.from = from, .cfg = c, .opts = o};
    struct buf tmp;
    int st;
    buf_init(&tmp, 0);
    if (file_exists(o->path))
        return err_set(e, ST_CONFLICT, "%s exists; export writes a new folder", o->path);
    TRY_OUT(check_expressible(&c->model, e));
    TRY_OUT(mem_array((void **)&w.pattern, 1, sizeof *w.pattern, e));
    TRY_OUT(pattern_parse(w.pattern, c->model.pattern, e));
    w.layout = w.pattern->grouped ? KEYS_LOGICAL : KEYS_FLAT;
    if (layout != NULL && (!key_layout_from_name(layout, &w.layout) || w.layout > KEYS_STACKED)) {
        st = err_set(e, ST_USAGE, "--layout=%s: flat, logical and stacked can be written", layout);
        goto out;
    }
    buf_addf(&tmp, "%s.tmp-%ld", o->path, (long)getpid());
    TRY_OUT(buf_check(&tmp, e));
    w.tmp = tmp.text;
    TRY_OUT(key_file_from(&w.file, from, e));
    st = write_all(&w, notes, e);
    if (st != ST_OK)
        file_remove_tree(w.tmp, NULL);
out:
    for (int s = 0; s < KEYS_SPACES; s++)
        key_output_release(&w.out[s]);
    key_file_close(&w.file);
    free(w.pattern);
    buf_release(&tmp);
    return st;
}
