/* llm.c shards: a header of 256 int32 (magic, version, token count), then the tokens. */
#include "data/data_int.h"

#include <string.h>

enum { LLMC_HEADER = 1024 };

struct llmc_format {
    int32_t magic, version;
    enum dtype dtype;
};
static const struct llmc_format formats[] = {
    {20240520, 1, DT_U16}, /* GPT-2 */
    {20240801, 7, DT_U32}, /* Llama-3 */
};

static int32_t load_i32(const uint8_t *p)
{
    int32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static const struct llmc_format *format_of(const uint8_t *bytes, size_t n)
{
    for (int i = 0; i < countof(formats); i++)
        if (n >= 4 && load_i32(bytes) == formats[i].magic)
            return &formats[i];
    return NULL;
}

bool llmc_is_shard(const uint8_t *bytes, size_t n) { return format_of(bytes, n) != NULL; }

int source_check_shard(struct source_file *f, struct err *e)
{
    uint8_t head[12] = {0};
    TRY(file_map_read(&f->map, f->path, 0, head, f->map.size < sizeof head ? f->map.size : sizeof head, e));
    const struct llmc_format *format = format_of(head, f->map.size);
    if (format == NULL)
        return err_set(e, ST_CORRUPT, "%s: does not start with the magic of an llm.c shard", f->path);
    if (f->map.size < LLMC_HEADER)
        return err_set(e, ST_CORRUPT, "%s: %zu bytes, the header of a shard alone has %d", f->path, f->map.size,
                       LLMC_HEADER);
    int32_t version = load_i32(head + 4), count = load_i32(head + 8);
    if (version != format->version)
        return err_set(e, ST_UNSUPPORTED, "%s: version %d of magic %d, this program reads %d", f->path, version,
                       format->magic, format->version);
    uint64_t bytes = f->map.size - LLMC_HEADER;
    if (count < 0 || (uint64_t)count * dtype_bytes(format->dtype) != bytes)
        return err_set(e, ST_CORRUPT,
                       "%s: the header names %d tokens of %zu bytes, %llu bytes follow it "
                       "(truncated?)",
                       f->path, count, dtype_bytes(format->dtype), (unsigned long long)bytes);
    f->dtype = format->dtype;
    f->skip = LLMC_HEADER;
    f->n_tokens = count;
    return ST_OK;
}
