/* Any bytes as a safetensors file: refused, or every entry is found, read and equal to itself. */
#include "ckpt/ckpt.h"

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
    struct st_file *f;
    if (st_open_bytes(&f, data, size, "fuzz", &e) != ST_OK) {
        need(f == NULL && e.msg[0] != '\0');
        return 0;
    }
    int64_t total = 0;
    for (int i = 0; i < st_count(f); i++) {
        const struct st_entry *entry = st_entry(f, i);
        struct tensor dst = entry->view;
        struct st_difference d;
        total += tensor_bytes(&dst);
        need(st_find(f, entry->name) == entry);
        dst.data = malloc((size_t)tensor_bytes(&dst) + 1);
        need(st_read(entry, &dst, &e) == ST_OK);
        need(st_compare(&entry->view, &dst, &d, &e) == ST_OK && d.count == 0);
        free(dst.data);
        dst.dtype = DT_F64;
        dst.data = malloc((size_t)tensor_bytes(&dst) + 1);
        st_read(entry, &dst, &e);
        free(dst.data);
    }
    need(total <= (int64_t)size);
    st_metadata(f, "format");
    st_close(f);
    return 0;
}
