/* Any bytes as the config.json of a Hugging Face folder, read as every family that its model_type names. What is
 * accepted has legal options, and what is written back is accepted again. */
#include "hf/hf_int.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void need(bool condition)
{
    if (!condition)
        abort();
}

static void read_as(const struct hf_family *fam, json_t *root)
{
    struct hf_json j = {.root = root, .text = root, .label = "fuzz"}, again = {.label = "again"};
    struct config c, d;
    struct err e = {0};
    struct buf notes;
    json_t *inner = json_object_get(root, "text_config");
    if (json_is_object(inner))
        j.text = inner;
    buf_init(&notes, 1 << 16);
    need(config_init(&c, &e) == ST_OK && config_init(&d, &e) == ST_OK);
    if (hf_config_read(fam, &j, &c, &notes, &e) == ST_OK && config_finish(&c, &e) == ST_OK &&
        hf_config_write(fam, &c, DT_BF16, &again.root, &e) == ST_OK) {
        again.text = again.root;
        need(hf_config_read(fam, &again, &d, NULL, &e) == ST_OK);
        need(config_finish(&d, &e) == ST_OK);
        need(strcmp(c.model.pattern, d.model.pattern) == 0 && c.model.hidden == d.model.hidden);
        json_decref(again.root);
    }
    buf_release(&notes);
    config_release(&c);
    config_release(&d);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_error_t je;
    json_t *root = size < HF_CONFIG_BYTES ? json_loadb((const char *)data, size, JSON_REJECT_DUPLICATES, &je) : NULL;
    const char *type = json_string_value(json_object_get(root, "model_type"));
    for (int i = 0; type != NULL && hf_families[i] != NULL; i++)
        if (strcmp(type, hf_families[i]->model_type) == 0)
            read_as(hf_families[i], root);
    json_decref(root);
    return 0;
}
