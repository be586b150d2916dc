/* Which bytes a run trains on. A path says nothing: the same one may hold other data on another machine, or tomorrow.
 * Size and hash of every data file (base/file_id.c) are recorded in each checkpoint, and compared over the ranks and
 * with the checkpoint that a run continues from. Names and times do not count, so data may move. */
#include "train/ranks_int.h"

#include <stdlib.h>
#include <string.h>

static int add_part(struct trainer *t, const struct dataset *ds, const char *part, size_t *cap, struct err *e)
{
    struct file_id *list = NULL;
    int n = 0;
    if (ds == NULL)
        return ST_OK;
    TRY(dataset_identify(ds, &list, &n, e));
    int st = mem_grow((void **)&t->data, cap, (size_t)(t->n_data + n), sizeof *t->data, e);
    for (int i = 0; i < n; i++) {
        if (st == ST_OK)
            t->data[t->n_data++] = (struct ckpt_data){.part = part, .file = list[i]};
        else
            free((char *)(uintptr_t)list[i].path);
    }
    free(list);
    return st;
}

static int identify(struct trainer *t, struct err *e)
{
    size_t cap = 0;
    TRY(add_part(t, t->train_data, "train", &cap, e));
    return add_part(t, t->valid_data, "valid", &cap, e);
}

/* One line for each file, without its name. */
static int same_on_all_ranks(struct trainer *t, struct err *e)
{
    struct buf text;
    buf_init(&text, 0);
    for (int i = 0; i < t->n_data; i++)
        buf_addf(&text, "data.%s file %d: %lld bytes with hash %016llx\n", t->data[i].part, i,
                 (long long)t->data[i].file.bytes, (unsigned long long)t->data[i].file.xxh3);
    buf_add(&text, "");
    int st = ranks_agree(t, "data files", buf_check(&text, e), e);
    if (st == ST_OK && t->world != NULL)
        st = world_same(t->world, "data files", text.text, e);
    buf_release(&text);
    return st;
}

/* The i-th file of a part; NULL: it has fewer. Files of a part stand together. */
static const struct file_id *now_at(const struct trainer *t, const char *part, int i)
{
    int first = 0;
    while (first < t->n_data && strcmp(t->data[first].part, part) != 0)
        first++;
    int k = first + i;
    return k < t->n_data && strcmp(t->data[k].part, part) == 0 ? &t->data[k].file : NULL;
}

static int count_now(const struct trainer *t, const char *part)
{
    int n = 0;
    for (int k = 0; k < t->n_data; k++)
        n += strcmp(t->data[k].part, part) == 0;
    return n;
}

/* What differs first, as a sentence; empty: nothing. Parts that only one of the two has are not compared. */
static void first_change(const struct trainer *t, const struct ckpt *from, const char *part, struct buf *out)
{
    int n = count_now(t, part), at = 0;
    for (int k = 0; k < ckpt_data_count(from) && n > 0; k++) {
        struct ckpt_data was = ckpt_data_at(from, k);
        if (strcmp(was.part, part) != 0)
            continue;
        const struct file_id *now = now_at(t, part, at++);
        if (now == NULL) {
            buf_addf(out, "data.%s has %d files, and at step %lld it also had %s", part, n, (long long)ckpt_step(from),
                     was.file.path);
            return;
        }
        if (now->bytes == was.file.bytes && now->xxh3 == was.file.xxh3)
            continue;
        buf_addf(
            out,
            "data.%s: %s (%lld bytes, hash %016llx) is not what the run had at step %lld: %s%s%lld bytes, hash %016llx",
            part, now->path, (long long)now->bytes, (unsigned long long)now->xxh3, (long long)ckpt_step(from),
            strcmp(now->path, was.file.path) != 0 ? was.file.path : "",
            strcmp(now->path, was.file.path) != 0 ? ", " : "", (long long)was.file.bytes,
            (unsigned long long)was.file.xxh3);
        return;
    }
    if (at > 0 && at < n)
        buf_addf(out, "data.%s has %d files, and at step %lld it had %d; new is %s", part, n,
                 (long long)ckpt_step(from), at, now_at(t, part, at)->path);
}

static int same_as_saved(struct trainer *t, const struct ckpt *from, struct err *e)
{
    static const char *const parts[] = {"train", "valid"};
    struct buf change;
    buf_init(&change, 0);
    for (int i = 0; i < countof(parts) && change.len == 0; i++)
        first_change(t, from, parts[i], &change);
    int st = change.len > 0 || change.failed ? buf_check(&change, e) : ST_OK;
    if (st == ST_OK && change.len > 0 && t->cfg->data.accept_change) {
        t->data_note = change.text;
        return ST_OK; /* the text is the trainer's now */
    }
    if (st == ST_OK && change.len > 0) {
        st = err_set(e, ST_CONFLICT, "%s", change.text);
        err_hint(e, "put the data back, or accept the change with --data.accept_change=on, which is logged");
    }
    buf_release(&change);
    return st;
}

int trainer_identify_data(struct trainer *t, const struct ckpt *from, struct err *e)
{
    TRY(ranks_agree(t, "data files", identify(t, e), e));
    TRY(same_on_all_ranks(t, e));
    return from != NULL ? ranks_agree(t, "data files", same_as_saved(t, from, e), e) : ST_OK;
}
