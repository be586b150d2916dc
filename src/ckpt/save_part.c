/* The files that one writer adds to a checkpoint: every tensor lies whole in the file of one part, so that readers need
 * no more than the manifest, which says in which. */
#include "ckpt/ckpt_int.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

const char *part_file(int section, int part, int parts, char out[PART_NAME])
{
    const char *name = ckpt_section_name((enum ckpt_section)section);
    if (parts > 1)
        snprintf(out, PART_NAME, "%s-%05d-of-%05d.safetensors", name, part + 1, parts);
    else
        snprintf(out, PART_NAME, "%s.safetensors", name);
    return out;
}

int ckpt_item_order(const struct ckpt_item *a, const struct ckpt_item *b)
{
    const struct st_item x = {.name = a->key, .host = a->host}, y = {.name = b->key, .host = b->host};
    return a->section != b->section ? a->section - b->section : st_item_order(&x, &y);
}

/* Listing its folder makes a client of a network file system ask the server for new names. */
static void look_around(const char *path)
{
    char **names = NULL, *parent = strdup(path), *slash = parent != NULL ? strrchr(parent, '/') : NULL;
    int n = 0;
    if (slash != NULL)
        *slash = '\0';
    if (slash != NULL && file_list_dir(parent, &names, &n, NULL) == ST_OK)
        file_free_list(names, n);
    free(parent);
}

int ckpt_part_sees(const char *path, struct err *e)
{
    enum { TRIES = 20 };
    const struct timespec moment = {.tv_nsec = 100000000};
    for (int i = 0; i < TRIES && !file_exists(path); i++) {
        nanosleep(&moment, NULL);
        look_around(path);
    }
    if (file_exists(path))
        return ST_OK;
    err_set(e, ST_IO, "%s, which rank 0 has created, is not there on this rank", path);
    return err_hint(e, NOT_SHARED);
}

static int write_section(const char *folder, const struct ckpt_save_args *a, int section, int part,
                         struct st_item *items, struct ckpt_sums *sums, struct err *e)
{
    static const struct st_meta meta[] = {{"format", "pt"}, {"writer", "braid"}};
    char name[PART_NAME];
    struct file_sum sum;
    int n = 0;
    for (int i = 0; i < a->n_items; i++) {
        const struct ckpt_item *item = &a->items[i];
        if (item->section == section && item->part == part)
            items[n++] = (struct st_item){item->key, item->host, item->param};
    }
    if (n == 0)
        return ST_OK;
    char *path = path_join(folder, part_file(section, part, a->n_parts, name));
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = st_write_from(path, items, n, a->source, meta, countof(meta), &sum, e);
    free(path);
    if (st == ST_OK) {
        sums->bytes[section] = sum.bytes;
        sums->xxh3[section] = sum.xxh3;
    }
    return st;
}

int ckpt_write_part(const char *folder, const struct ckpt_save_args *args, int part, struct ckpt_sums *sums,
                    struct err *e)
{
    struct st_item *items = NULL; /* of one section at a time */
    int st = ST_OK;
    *sums = (struct ckpt_sums){0};
    TRY(mem_array((void **)&items, (size_t)args->n_items, sizeof *items, e));
    for (int section = 0; section < CKPT_SECTIONS && st == ST_OK; section++)
        st = write_section(folder, args, section, part, items, sums, e);
    free(items);
    return st;
}
