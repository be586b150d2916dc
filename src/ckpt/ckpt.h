/* Checkpoints: safetensors files, and folders of them with a manifest that are complete or absent.
 *
 *   <run>/checkpoints/latest                 name of the newest checkpoint, for people and scripts
 *   <run>/checkpoints/step-00000100/
 *       model.safetensors                    parameters under their canonical keys
 *       optim.safetensors                    optimizer state: exp_avg.<key>, exp_avg_sq.<key>, ...
 *                                            of several writers: model-00001-of-00008.safetensors, ...
 *       config.ini                           the resolved configuration
 *       manifest.json                        counters; every file with size and XXH3; every tensor
 *
 * Rows of fused projections are in Megatron's order on disk and in section order in memory (struct
 * row_layout); pass the parameter and both directions convert. The newest checkpoint is found by scanning, so a missing
 * or stale `latest` does no harm. One process may save into a run folder at a time, which holds its lock (base/lock.h);
 * any number may read. */
#ifndef BRAID_CKPT_H
#define BRAID_CKPT_H

#include "tensor/tensor.h"

/* ---- safetensors files ----------------------------------------------------------------------- */

struct st_file;
struct st_entry {
    const char *name;
    struct tensor view; /* on the read-only map; may be unaligned for its dtype: use st_read */
};

/* The whole header is validated here: after this every entry lies inside the file. */
int st_open(struct st_file **out, const char *path, struct err *e);
/* The same on bytes the caller keeps alive; label names them in errors. */
int st_open_bytes(struct st_file **out, const void *bytes, size_t n, const char *label, struct err *e);
void st_close(struct st_file *f); /* NULL is allowed */
int st_count(const struct st_file *f);
const struct st_entry *st_entry(const struct st_file *f, int i);           /* in the order of the data */
const struct st_entry *st_find(const struct st_file *f, const char *name); /* NULL: not there */
const char *st_metadata(const struct st_file *f, const char *key);         /* NULL: not there */
/* Copy into a dense host tensor of the same shape. Reals convert to reals, integers to integers
 * that hold every value and to reals; anything else is ST_UNSUPPORTED. On any error but an integer
 * out of range, dst is untouched. */
int st_read(const struct st_entry *entry, const struct tensor *dst, struct err *e);
/* Says that the entry's bytes are not needed again soon, so that large files are read in little memory. */
void st_forget(const struct st_file *f, const struct st_entry *entry);

struct st_item {
    const char *name;
    struct tensor host;        /* dense, on the host, any dtype */
    const struct param *param; /* NULL, or whose row layout the memory has (disk: Megatron order) */
};
struct st_meta {
    const char *key, *value;
};
/* Write a file and rename it into place: a kill leaves the old file or the new one. */
int st_write_file(const char *path, const struct st_item *items, int n, const struct st_meta *meta, int n_meta,
                  struct err *e);

/* How two tensors of one shape differ: by bits when the dtypes agree, else by value. */
struct st_difference {
    int64_t count;  /* elements that differ; 0: the tensors are equal */
    int64_t first;  /* flat index of the first */
    double max_abs; /* largest |a - b|; NaN when a difference is not a number */
    int64_t max_at; /* flat index of that */
};
int st_compare(const struct tensor *a, const struct tensor *b, struct st_difference *out, struct err *e);

/* ---- saving ---------------------------------------------------------------------------------- */

enum ckpt_section { CKPT_MODEL, CKPT_OPTIM, CKPT_SECTIONS };
const char *ckpt_section_name(enum ckpt_section s); /* "model", "optim" */

struct ckpt_item {
    const char *key;
    struct tensor host;        /* dense, on the host */
    const struct param *param; /* NULL, or whose row layout applies */
    int section;               /* enum ckpt_section */
    int part;                  /* the writer whose file holds it, below ckpt_save_args.n_parts */
};
/* The order in which the items of one part are fetched and written; compares like strcmp. */
int ckpt_item_order(const struct ckpt_item *a, const struct ckpt_item *b);
struct ckpt_number { /* one value of the training loop's own state, such as a loss average */
    const char *name;
    double value;
};
struct ckpt_counters {
    int64_t samples, tokens; /* consumed */
    uint64_t seed;
    double wall_seconds; /* spent training so far */
    double saved_at;     /* seconds since 1970; set by ckpt_save */
};
struct ckpt_data { /* a file that the run trains ("train") or evaluates ("valid") on, in the order they are read */
    const char *part;
    struct file_id file;
};
/* A file that the checkpoint carries along, such as a tokenizer; its name has no folder and is none of the names
 * above. */
enum { CKPT_MAX_FILES = 6 };
struct ckpt_file {
    const char *name;
    const void *bytes;
    size_t n;
};
/* Where values come from when memory cannot hold them all: they are fetched one by one while the files are written. */
struct ckpt_source {
    /* host has the item's shape and no data; fetch sets its data, which stays valid until the next call. */
    int (*fetch)(void *ctx, const char *key, struct tensor *host, struct err *e);
    void *ctx;
};
/* Writes and syncs a new file (path must not exist) whose values are fetched one tensor at a time. On error it is
 * removed. */
int st_write_stream(const char *path, const struct st_item *items, int n, const struct ckpt_source *from,
                    const struct st_meta *meta, int n_meta, struct err *e);

struct ckpt_save_args {
    const char *run_dir;
    int64_t step;
    const struct ckpt_item *items;
    int n_items;
    int n_parts;                      /* writers; 0 and 1: one */
    const struct ckpt_source *source; /* NULL: items have their data */
    const char *config_text;          /* NULL: none */
    const struct ckpt_file *files;
    int n_files; /* at most CKPT_MAX_FILES */
    struct ckpt_counters counters;
    const struct ckpt_number *train;
    int n_train;
    const struct ckpt_data *data;
    int n_data;
    int keep;              /* checkpoints to keep, this one included; 0: all */
    struct dir_lock *lock; /* of run_dir; NULL: it is taken while the checkpoint is written */
    /* NULL, or gets what could not be tidied up although the checkpoint is saved; code ST_OK: nothing */
    struct err *note;
};
/* Write, sync, read back, rename. A kill at any moment, or an error, leaves every earlier checkpoint as it
 * was; saving a step again replaces it. After success older checkpoints beyond keep are removed
 * (later ones, left by a run that was resumed from an earlier step, are not: they stay the newest). */
int ckpt_save(const struct ckpt_save_args *args, struct err *e);

/* The same in steps, for several writers that see one folder. The first calls ckpt_begin and tells the others its
 * folder; every writer calls ckpt_write_part; when all are done, the first calls ckpt_finish with what they wrote, or
 * ckpt_abandon. args must outlive the call that ends it. */
struct ckpt_saving;
struct ckpt_sums { /* of the files of one part; bytes 0: it has no file of that section */
    int64_t bytes[CKPT_SECTIONS];
    uint64_t xxh3[CKPT_SECTIONS];
};
int ckpt_begin(struct ckpt_saving **out, const struct ckpt_save_args *args, struct err *e);
const char *ckpt_saving_folder(const struct ckpt_saving *s); /* readers ignore it */
/* Does this process see what the first writer has created (its folder, or a file)? Waits a moment, because network file
 * systems may show it late. */
int ckpt_part_sees(const char *path, struct err *e);
/* The files of one part, synced. Of args only the items with that part, the source and n_parts matter. */
int ckpt_write_part(const char *folder, const struct ckpt_save_args *args, int part, struct ckpt_sums *sums,
                    struct err *e);
/* sums of every part. Writes the rest and the manifest, reads back, renames. Releases s, also after an error. */
int ckpt_finish(struct ckpt_saving *s, const struct ckpt_sums *sums, struct err *e);
void ckpt_abandon(struct ckpt_saving *s); /* removes what was written; NULL is allowed */

/* At the start of a run, by the holder of the folder's lock: completes or removes what a killed process left of saving
 * and tidying up, and removes checkpoints beyond keep that are older than step. Never an error. */
void ckpt_tidy(const char *run_dir, int64_t step, int keep);
/* Moves the checkpoints of steps after `after` (-1: all) to a new folder beside checkpoints/, for a run that starts
 * over or goes back. *moved counts them; *to is that folder (malloc'd), NULL: there were none. */
int ckpt_set_aside(const char *run_dir, int64_t after, char **to, int *moved, struct err *e);

/* ---- loading --------------------------------------------------------------------------------- */

struct ckpt;
enum { CKPT_NO_CHECKSUM = 1 }; /* flags of ckpt_open_with: trust the bytes of the files */

/* path: a checkpoint folder, or a run folder (its newest checkpoint). Everything is
 * checked, checksums included, so that loading does not fail halfway through. */
int ckpt_open(struct ckpt **out, const char *path, struct err *e);
int ckpt_open_with(struct ckpt **out, const char *path, unsigned flags, struct err *e);
/* The checkpoint to continue a run from: that of `step`, or with step -1 the newest that is intact to the last byte. A
 * folder without checkpoints gives ST_OK and *out NULL. damage (may be NULL) gets a line for each checkpoint that was
 * passed over, with the reason; where none is intact, that is the error. */
int ckpt_open_intact(struct ckpt **out, const char *run_dir, int64_t step, struct buf *damage, struct err *e);
void ckpt_close(struct ckpt *c); /* NULL is allowed */

const char *ckpt_path(const struct ckpt *c);
const char *ckpt_config_text(const struct ckpt *c); /* "" when none was saved */
int64_t ckpt_step(const struct ckpt *c);
const struct ckpt_counters *ckpt_counters(const struct ckpt *c);
bool ckpt_train_number(const struct ckpt *c, const char *name, double *out);
int ckpt_data_count(const struct ckpt *c);
struct ckpt_data ckpt_data_at(const struct ckpt *c, int i);
bool ckpt_has(const struct ckpt *c, const char *key, enum ckpt_section section);

/* All tensors, sorted by section and key. */
struct ckpt_tensor {
    const char *key;
    enum ckpt_section section;
    const char *file;
    struct tensor view; /* as st_entry's: on the map, in disk row order */
};
int ckpt_count(const struct ckpt *c);
struct ckpt_tensor ckpt_at(const struct ckpt *c, int i);

/* Fill dst, a dense host tensor of exactly the stored shape; F64, F32, F16 and BF16 convert. */
int ckpt_load(const struct ckpt *c, const char *key, enum ckpt_section section, const struct tensor *dst,
              const struct param *param, struct err *e);

enum { CKPT_ALLOW_MISSING = 1, CKPT_ALLOW_UNEXPECTED = 2 };
/* Read every file again and compare its checksum; the error names the damaged one. */
int ckpt_verify(const struct ckpt *c, struct err *e);

/* What a run folder holds, oldest first. A checkpoint is complete when its manifest is valid and
 * all its files have their sizes; why says what is wrong with one that is not. */
struct ckpt_info {
    char *path;
    int64_t step;
    bool complete;
    char why[256];
    struct ckpt_counters counters;
    int64_t bytes;
    int n_tensors;
};
int ckpt_list(const char *run_dir, struct ckpt_info **out, int *n, struct err *e);
void ckpt_list_free(struct ckpt_info *list, int n);

#endif
