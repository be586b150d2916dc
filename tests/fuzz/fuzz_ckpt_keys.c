/* Any bytes as a file of weights: its keys are mapped to a small model and converted into every
 * layout. Whatever is accepted loads, and what was converted has as many
 * elements as it had before. */
#include "ckpt/keys/keymap.h"
#include "config/config.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void need(bool condition)
{
    if (!condition)
        abort();
}

/* Two pairs of attention and MLP, numbered one by one or in pairs, one layer of
 * experts, one depth. */
static int model(struct param *p, bool grouped)
{
    static const struct param flat[] = {
        {.key = "embedding.word_embeddings.weight", .rank = 2, .dim = {5, 4}, .layer = -1},
        {.key = "decoder.layers.0.self_attention.linear_qkv.weight", .rank = 2, .dim = {8, 4}},
        {.key = "decoder.layers.1.mlp.linear_fc1.weight", .rank = 2, .dim = {6, 4}, .layer = 1},
        {.key = "decoder.layers.2.self_attention.linear_qkv.weight", .rank = 2, .dim = {8, 4}, .layer = 2},
        {.key = "decoder.layers.3.mlp.experts.linear_fc1.weight", .rank = 3, .dim = {3, 6, 4}, .layer = 3},
        {.key = "decoder.final_norm.weight", .rank = 1, .dim = {4}, .layer = -1},
        {.key = "mtp.layers.0.mtp_model_layer.layers.1.mlp.linear_fc1.weight", .rank = 2, .dim = {6, 4}, .layer = 6},
    };
    static const char *const names[] = {"decoder.layers.0.mlp.linear_fc1.weight",
                                        "decoder.layers.1.self_attention.linear_qkv.weight",
                                        "decoder.layers.1.mlp.experts.linear_fc1.weight"};
    memcpy(p, flat, sizeof flat);
    for (int i = 0; grouped && i < countof(names); i++)
        p[2 + i].key = names[i];
    return countof(flat);
}

static void map(const struct key_file *f, bool grouped, enum key_space space)
{
    struct param p[8];
    const struct param *list[8];
    struct keymap *m;
    struct err e = {0};
    float values[128];
    int n = model(p, grouped);
    for (int i = 0; i < n; i++)
        list[i] = &p[i];
    if (keymap_open(&m, f, space, list, n, DT_F32, &e) != ST_OK) {
        need(m == NULL && e.msg[0] != '\0');
        return;
    }
    int missing = 0;
    for (int i = 0; i < n; i++) {
        struct tensor dst = tensor_shape(DT_F32, p[i].rank, p[i].dim);
        dst.data = values;
        missing += !keymap_has(m, i);
        need((keymap_load(m, i, &dst, &e) == ST_OK) == keymap_has(m, i));
    }
    need(missing == keymap_missing(m));
    need((keymap_check(m, 0, &e) == ST_OK) == (missing + keymap_unexpected(m) == 0));
    keymap_close(m);
}

static void convert(const struct key_file *f, enum key_layout layout, const struct key_layers *layers)
{
    struct key_output out;
    struct err e = {0};
    int64_t before = 0, after = 0;
    static const struct config ones = {.model = {.mamba_heads = 1,
                                                 .mamba_head_dim = 1,
                                                 .mamba_groups = 1,
                                                 .mamba_state = 1,
                                                 .gdn_key_heads = 1,
                                                 .gdn_key_dim = 1,
                                                 .gdn_value_heads = 1,
                                                 .gdn_value_dim = 1}};
    struct key_target to = {
        .layout = layout, .layers = layers, .glu_interleave = f->n % 3, .distributed = f->n % 2 ? &ones : NULL};
    if (key_convert(&out, f, KEYS_MODEL, &to, &e) != ST_OK) {
        need(e.msg[0] != '\0');
        return;
    }
    for (int i = 0; i < f->n; i++)
        if (f->list[i].space == KEYS_MODEL && strstr(f->list[i].key, "_extra_state") == NULL)
            before += tensor_bytes(&f->list[i].view);
    for (int i = 0; i < out.n; i++)
        after += strstr(out.items[i].name, "_extra_state") == NULL ? tensor_bytes(&out.items[i].host) : 0;
    need(before == after);
    key_output_release(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint16_t item[] = {0, 0, 1, 1};
    static const struct key_layers layers = {.n = 4, .symbols = "*-*-", .item = item};
    struct st_file *f;
    struct key_file k = {.label = "fuzz"};
    if (st_open_bytes(&f, data, size, "fuzz", NULL) != ST_OK)
        return 0;
    k.list = calloc((size_t)st_count(f) + 1, sizeof *k.list);
    for (int i = 0; i < st_count(f); i++)
        k.list[k.n++] = (struct key_tensor){
            .key = st_entry(f, i)->name, .stored = st_entry(f, i)->name, .view = st_entry(f, i)->view};
    k.glu_interleave = (int64_t)(size % 4); /* rows of experts in blocks, or not */
    map(&k, false, KEYS_MODEL);
    map(&k, true, KEYS_MODEL);
    for (int l = 0; l < KEYS_LAYOUTS; l++) {
        convert(&k, (enum key_layout)l, NULL);
        convert(&k, (enum key_layout)l, &layers);
    }
    free(k.list);
    st_close(f);
    return 0;
}
