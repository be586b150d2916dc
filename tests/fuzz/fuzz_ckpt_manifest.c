/* Any text as a manifest: refused, or written again and parsed again it says the same. */
#include "ckpt/ckpt_int.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void need(bool condition)
{
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct err e = {0};
    struct manifest m, again;
    char *text;
    if (manifest_parse(&m, (const char *)data, size, false, &e) != ST_OK) {
        need(e.msg[0] != '\0');
        return 0;
    }
    need(manifest_dump(&m, &text, &e) == ST_OK);
    need(manifest_parse(&again, text, strlen(text), true, &e) == ST_OK);
    need(again.step == m.step && again.counters.seed == m.counters.seed);
    need(again.n_files == m.n_files && again.n_tensors == m.n_tensors && again.n_train == m.n_train);
    for (int i = 0; i < m.n_tensors; i++) {
        const struct manifest_tensor *t = &m.tensors[i];
        need(manifest_find(&m, t->key, t->section) == t);
        need(manifest_find(&again, t->key, t->section) != NULL);
        need(t->file >= 0 && t->file < m.n_files);
    }
    free(text);
    manifest_release(&m);
    manifest_release(&again);
    return 0;
}
