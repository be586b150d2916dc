/* `braid ckpt convert`: the same tensors under the keys of another layout. */
#include "ckpt/keys/keymap.h"
#include "cmd/cmd.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct convert_args {
    const char *src, *dst, *pattern;
    enum key_layout layout;
    bool has_layout;
    int64_t glu_interleave, from_interleave; /* -1: as it is, as the file says */
};

static int parse_layout(struct convert_args *a, const char *text, struct err *e)
{
    const char *names[KEYS_LAYOUTS];
    a->has_layout = key_layout_from_name(text, &a->layout);
    if (a->has_layout)
        return ST_OK;
    for (int i = 0; i < KEYS_LAYOUTS; i++)
        names[i] = key_layout_name((enum key_layout)i);
    const char *near = nearest_name(text, names, KEYS_LAYOUTS);
    err_set(e, ST_USAGE, "there is no layout '%s'", text);
    return near ? err_hint(e, "did you mean '%s'?", near)
                : err_hint(e, "flat, logical, stacked, indexed or grouped; see braid ckpt --help");
}

static int parse_blocks(const char *word, int64_t *out, struct err *e)
{
    enum { MOST = 1 << 20 };
    const char *digits = strchr(word, '=') + 1;
    char *end = NULL;
    errno = 0;
    *out = digits[0] >= '0' && digits[0] <= '9' ? strtoll(digits, &end, 10) : -1;
    if (end != NULL && *end == '\0' && errno == 0 && *out <= MOST)
        return ST_OK;
    err_set(e, ST_USAGE, "ckpt convert: %s needs a number from 0 to %d", word, MOST);
    return err_hint(e, "rows of a block, as in model.glu_interleave; 0: all gate rows, then all up rows");
}

static int parse_words(struct convert_args *a, int argc, char **argv, struct err *e)
{
    for (int i = 0; i < argc; i++) {
        const char *word = argv[i];
        if (str_starts(word, "--layout="))
            TRY(parse_layout(a, word + strlen("--layout="), e));
        else if (str_starts(word, "--pattern="))
            a->pattern = word + strlen("--pattern=");
        else if (str_starts(word, "--glu-interleave="))
            TRY(parse_blocks(word, &a->glu_interleave, e));
        else if (str_starts(word, "--from-interleave="))
            TRY(parse_blocks(word, &a->from_interleave, e));
        else if (word[0] == '-' || a->dst != NULL) {
            err_set(e, ST_USAGE, "ckpt convert: unexpected word '%s'", word);
            return err_hint(e, "see braid ckpt --help");
        } else
            *(a->src ? &a->dst : &a->src) = word;
    }
    if (a->dst == NULL || !a->has_layout) {
        err_set(e, ST_USAGE, "ckpt convert needs a source, a destination and --layout=");
        return err_hint(e, "braid ckpt convert RUN NEW.safetensors --layout=stacked");
    }
    bool free_name;
    TRY(cmd_free_name(a->dst, &free_name, e));
    if (free_name)
        return ST_OK;
    err_set(e, ST_USAGE, "%s is there already", a->dst);
    return err_hint(e, "name a new folder or file; nothing is replaced");
}

/* The groups of the pattern that was given, or of the checkpoint's own configuration. */
static int find_pattern(struct pattern *p, const struct convert_args *a, const struct ckpt *c, struct err *e)
{
    const char *text = c != NULL ? ckpt_config_text(c) : "";
    if (a->pattern != NULL)
        return pattern_parse(p, a->pattern, e);
    if (text[0] == '\0')
        return ST_OK;
    struct config cfg = {0};
    int st = config_init(&cfg, e);
    if (st == ST_OK)
        st = config_load_saved(&cfg, text, strlen(text), ckpt_path(c), CFG_SAVED_MODEL, NULL, e);
    if (st == ST_OK)
        st = pattern_parse(p, cfg.model.pattern, e);
    config_release(&cfg);
    return st;
}

static int write_file(const char *dst, const struct key_output *out, int64_t blocks, struct err *e)
{
    char text[24];
    const struct st_meta meta[] = {{"format", "braid"}, {KEY_GLU_INTERLEAVE, text}};
    snprintf(text, sizeof text, "%lld", (long long)blocks);
    TRY(st_write_file(dst, out->items, out->n, meta, blocks > 0 ? 2 : 1, e));
    printf("%s: %d tensors\n", dst, out->n);
    return ST_OK;
}

static int write_folder(const char *dst, const struct ckpt *c, struct key_output *out, struct err *e)
{
    struct ckpt_item *items = NULL;
    int n = 0, total = 0;
    for (int s = 0; s < KEYS_SPACES; s++)
        total += out[s].n;
    TRY(mem_array((void **)&items, (size_t)total, sizeof *items, e));
    for (int s = 0; s < KEYS_SPACES; s++)
        for (int i = 0; i < out[s].n; i++) {
            const char *key = s == KEYS_MODEL ? out[s].items[i].name
                                              : arena_printf(&out[s].memory, "%s.%s", key_space_name((enum key_space)s),
                                                             out[s].items[i].name);
            items[n++] = (struct ckpt_item){.key = key ? key : "",
                                            .host = out[s].items[i].host,
                                            .section = s == KEYS_MODEL ? CKPT_MODEL : CKPT_OPTIM};
        }
    struct ckpt_data *data = NULL;
    int n_data = ckpt_data_count(c), st = mem_array((void **)&data, (size_t)n_data, sizeof *data, e);
    for (int i = 0; st == ST_OK && i < n_data; i++)
        data[i] = ckpt_data_at(c, i);
    struct ckpt_save_args args = {.run_dir = dst,
                                  .step = ckpt_step(c),
                                  .items = items,
                                  .n_items = n,
                                  .config_text = ckpt_config_text(c),
                                  .data = data,
                                  .n_data = n_data,
                                  .counters = *ckpt_counters(c)};
    if (st == ST_OK)
        st = ckpt_save(&args, e);
    if (st == ST_OK)
        printf("%s: step %lld, %d tensors\n", dst, (long long)args.step, n);
    free(data);
    free(items);
    return st;
}

static int convert(const struct convert_args *a, struct key_file *f, struct key_output *out, struct pattern *p,
                   struct err *e)
{
    bool file = str_ends(a->dst, ".safetensors");
    if (!file && f->ckpt == NULL) {
        err_set(e, ST_USAGE, "%s is a single file: the destination must be one, too", a->src);
        return err_hint(e, "name it something.safetensors");
    }
    if (a->from_interleave >= 0 && f->glu_interleave > 0 && a->from_interleave != f->glu_interleave)
        return err_set(e, ST_USAGE, "%s says itself that its blocks have %lld rows, not %lld", a->src,
                       (long long)f->glu_interleave, (long long)a->from_interleave);
    if (a->from_interleave >= 0)
        f->glu_interleave = a->from_interleave;
    int64_t blocks = a->glu_interleave >= 0 ? a->glu_interleave : file ? f->glu_interleave : 0;
    if (!file && blocks > 0) {
        err_set(e, ST_USAGE, "a checkpoint stores gate rows, then up rows; it cannot be interleaved");
        return err_hint(e, "name the destination something.safetensors");
    }
    TRY(find_pattern(p, a, f->ckpt, e));
    struct key_layers layers = {.n = p->n_layers, .symbols = p->symbols, .item = p->item_of, .grouped = p->grouped};
    struct key_target to = {.layout = a->layout, .glu_interleave = blocks, .layers = &layers};
    for (int s = 0; s < (file ? 1 : KEYS_SPACES); s++)
        TRY(key_convert(&out[s], f, (enum key_space)s, &to, e));
    if (out[KEYS_MODEL].note != NULL)
        fprintf(stderr, "note: %s\n", out[KEYS_MODEL].note);
    return file ? write_file(a->dst, &out[KEYS_MODEL], blocks, e) : write_folder(a->dst, f->ckpt, out, e);
}

int ckpt_convert(int argc, char **argv, struct err *e)
{
    struct convert_args a = {.glu_interleave = -1, .from_interleave = -1};
    struct key_output out[KEYS_SPACES] = {0};
    struct key_file f;
    struct pattern *p = NULL;
    TRY(parse_words(&a, argc, argv, e));
    TRY(key_file_open(&f, a.src, e));
    int st = mem_array((void **)&p, 1, sizeof *p, e);
    if (st == ST_OK)
        st = convert(&a, &f, out, p, e);
    for (int s = 0; s < KEYS_SPACES; s++)
        key_output_release(&out[s]);
    key_file_close(&f);
    free(p);
    return st;
}
