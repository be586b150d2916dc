/* A small model of the kind a config describes; see verify.h. */
#include "train/verify.h"

#include <stdlib.h>
#include <string.h>

/* ---- the pattern: every kind of item the user's has, about eight of them --------------------- */

enum { ITEMS = 8 };

static bool same_item(const struct pattern *p, int a, int b)
{
    const struct pattern_item *x = &p->items[a], *y = &p->items[b];
    return x->n == y->n && x->grouped == y->grouped && memcmp(p->symbols + x->first, p->symbols + y->first, x->n) == 0;
}

static bool seen_before(const struct pattern *p, int item)
{
    for (int i = 0; i < item; i++)
        if (same_item(p, i, item))
            return true;
    return false;
}

/* The first eight items and whatever kinds come only later; repeated until four stages have something to do. */
static void small_pattern(struct buf *out, const struct pattern *p)
{
    int n = 0;
    for (int round = 0; n < 4 && p->n_items > 0; round++)
        for (int i = 0; i < p->n_items; i++)
            if ((round == 0 || n < 4) && (i < ITEMS || !seen_before(p, i))) {
                pattern_add_item(p, i, out);
                n++;
            }
    for (int k = 0; k < p->n_mtp_depths; k++)
        buf_addf(out, "/%.*s", p->n_mtp_layers, p->mtp_symbols);
}

/* ---- numbers --------------------------------------------------------------------------------- */

static int64_t user_value(const struct config *user, const char *name)
{
    struct buf b;
    buf_init(&b, 0);
    const char *text = config_value_text(user, name, &b);
    int64_t v = text != NULL ? strtoll(text, NULL, 10) : 0;
    buf_release(&b);
    return v;
}

static int set_sizes(struct config *c, const struct config *user, const struct tiny_size *sizes, int n, struct err *e)
{
    for (int i = 0; i < n; i++)
        if (sizes[i].always || user_value(user, sizes[i].name) > sizes[i].value)
            TRY(config_set_i64(c, sizes[i].name, sizes[i].value, e));
    return ST_OK;
}

/* Sizes that fit together, those of every layer kind from its definition. */
static int small_numbers(struct config *c, const struct tiny_model *m, struct err *e)
{
    static const struct tiny_size general[] = {
        {"model.hidden", 32, true},
        {"model.vocab", 0, true},
        {"model.vocab_multiple", 8, true}, /* parallel.tp divides it, also with an end-of-document token */
        {"model.layers", 0, true},
        {"model.mtp_layers", 0, true},
        {"train.seq", 16, true},
        {"model.max_position", 0, true},
        {"train.micro_batch", 1, true},
        {"train.global_batch", VERIFY_BATCH, true},
        {"train.steps", VERIFY_STEPS, true},
        {"train.warmup", 0, true},
        {"train.decay_steps", 0, true},
        {"train.wsd_steps", 0, true},
        {"train.loss_chunk", 0, true},
        {"train.eval_every", 0, true},
        {"run.threads", 1, true},
        {"run.save_every", 0, true},
        {"parallel.ranks", 0, true},
        {"parallel.tp", 1, true},
        {"parallel.cp", 1, true},
        {"parallel.etp", 1, true},
        {"parallel.pp", 1, true},
        {"parallel.vpp", 0, true},
        {"parallel.ep", 1, true},
        {"parallel.pp_group", 0, true},
        {"parallel.first_layers", 0, true},
        {"parallel.last_layers", 0, true},
    };
    /* Two ranks of parallel.tp get whole blocks of scales. */
    static const struct tiny_size coded[] = {
        {"model.heads", 2, true},          {"model.kv_heads", 2, true},
        {"model.head_dim", 128, true},     {"model.ffn", 256, true},
        {"model.expert_ffn", 256, true},   {"model.mla_nope", 128, true},
        {"model.mla_rope", 128, true},     {"model.mla_v", 128, true},
        {"model.mla_kv_rank", 32, true},   {"model.mla_q_rank", 16, false},
        {"model.shared_ffn", 256, false},  {"model.mamba_head_dim", 64, true},
        {"model.gdn_value_dim", 64, true}, {"model.dsa_indexer_head_dim", 128, true},
        {"model.o_lora_rank", 64, true},
    };
    struct kind_at at;
    TRY(set_sizes(c, m->user, general, countof(general), e));
    for (int i = 0; kind_at(i, &at); i++) {
        TRY(set_sizes(c, m->user, at.options->tiny, at.options->n_tiny, e));
        if (at.options->shrink != NULL)
            TRY(at.options->shrink(c, m, e));
    }
    if (m->user->gpu.precision != CFG_PRECISION_FP8)
        return ST_OK;
    TRY(set_sizes(c, m->user, coded, countof(coded), e));
    return strchr(m->symbols, 'E') != NULL ? config_set_i64(c, "model.hidden", 128, e) : ST_OK;
}

static int set_words(struct config *c, const char *const (*words)[2], int n, struct err *e)
{
    for (int i = 0; i < n; i++)
        TRY(config_set(c, words[i][0], words[i][1], NULL, e));
    return ST_OK;
}

/* Text that repeats itself a little: enough for a loss that falls and routers that differ. */
static int write_data(const char *path, struct err *e)
{
    enum { BYTES = 4096 };
    char text[BYTES];
    for (int i = 0; i < BYTES; i++)
        text[i] = (char)('a' + (int)rng_below(5, (uint64_t)i / 3 * (uint64_t)(i % 7 + 1), 24));
    return file_write_atomic(path, text, sizeof text, e);
}

int verify_copy(struct config *to, const struct config *from, struct err *e)
{
    struct buf b;
    buf_init(&b, 0);
    config_write(from, &b, false);
    int st = buf_check(&b, e);
    if (st == ST_OK)
        st = config_read_ini_text(to, b.text, b.len, "config", e);
    buf_release(&b);
    return st;
}

/* Weights that have no codes under parallel.tp, whatever their size (linear8.c), have none on one rank either. */
static int keep_out_of_codes(struct config *small, const char *pattern, struct err *e)
{
    const char *keep = small->gpu.fp8_keep;
    char globs[1024];
    const char *const parts[] = {keep, strpbrk(pattern, "+DCHW") != NULL ? "*_down_proj*" : "",
                                 strpbrk(pattern, "CHW") != NULL ? "*linear_kv_proj*" : "",
                                 strpbrk(pattern, "MG") != NULL ? "*in_proj*" : ""};
    size_t n = 0;
    if (small->gpu.precision != CFG_PRECISION_FP8)
        return ST_OK;
    globs[0] = '\0';
    for (int i = 0; i < countof(parts); i++)
        if (parts[i][0] != '\0' && n < sizeof globs)
            n += (size_t)snprintf(globs + n, sizeof globs - n, "%s%s", n > 0 ? "," : "", parts[i]);
    return config_set(small, "gpu.fp8_keep", globs, NULL, e);
}

static int shrink(struct config *small, const struct config *user, const char *data, struct err *e)
{
    static const char *const words[][2] = {
        {"run.device", "ref"},
        {"run.resume", "never"},
        {"run.load", ""},
        {"run.load_weights", ""},
        {"run.load_allow", "none"},
        {"run.quiet", "on"},
        {"run.tensorboard", "off"},
        {"run.report", "off"},
        {"run.dir", ""},
        {"data.valid", ""},
        {"data.split", ""},
        {"data.tokenizer", "bytes"},
        {"plan.trace", ""},
        {"plan.find_nan", "off"},
        {"train.schedule", "constant"},
        {"train.record_routes", ""},
        {"train.replay_routes", ""},
        {"train.min_lr", "0"},
        {"parallel.comm", "auto"},
        {"parallel.overlap", "none"},
        {"parallel.reduce", "fp32"},
        {"parallel.ep_fp8", "off"}, /* one rank sends nothing that could be rounded */
        {"parallel.zero", "1"},
        {"parallel.ep_capacity", "0"},
        {"parallel.bucket_mb", "0.01"},
        {"model.init_std", "0.1"},
        {"model.mtp_pattern", ""},
        {"model.softmax_scale", "0"},
        {"model.attn_ratio", "0"},
        {"model.mlp_ratio", "0"},
    };
    struct pattern p, made;
    struct buf b;
    int st;
    buf_init(&b, 0);
    TRY_OUT(verify_copy(small, user, e));
    TRY_OUT(pattern_parse(&p, user->model.pattern, e));
    small_pattern(&b, &p);
    TRY_OUT(buf_check(&b, e));
    TRY_OUT(pattern_parse(&made, b.text, e));
    TRY_OUT(small_numbers(small, &(struct tiny_model){.user = user, .user_symbols = p.symbols, .symbols = made.symbols},
                          e));
    TRY_OUT(set_words(small, words, countof(words), e));
    TRY_OUT(config_set(small, "data.train", data, NULL, e));
    TRY_OUT(config_set(small, "model.pattern", b.text, NULL, e));
    TRY_OUT(keep_out_of_codes(small, b.text, e));
out:
    buf_release(&b);
    return st;
}

int verify_config(struct config *small, const struct config *user, const char *dir, struct err *e)
{
    char *data = path_join(dir, "verify.txt");
    if (data == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = write_data(data, e);
    if (st == ST_OK)
        st = shrink(small, user, data, e);
    free(data);
    return st;
}
