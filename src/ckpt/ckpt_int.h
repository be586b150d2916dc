/* Private to ckpt/: element conversion, the streaming writer, the manifest, folder names. */
#ifndef BRAID_CKPT_INT_H
#define BRAID_CKPT_INT_H

#include "ckpt/ckpt.h"

#include <jansson.h>

/* ---- convert.c ------------------------------------------------------------------------------- */

/* Bytes of a dense tensor. False when a dimension is negative or a product overflows; dimensions
 * beside a zero count too, because strides are computed from them. */
bool shape_bytes(enum dtype dtype, int rank, const int64_t *dim, int64_t *bytes);
bool dtype_converts(enum dtype to, enum dtype from);
/* n elements; neither side need be aligned. Fails only for an integer that does not fit. */
int convert_elems(void *dst, enum dtype to, const void *src, enum dtype from, int64_t n, struct err *e);
/* The rows that a layout orders: dim 0, or of several matrices all rows. param may be NULL. */
int64_t count_rows(const struct param *param, const struct tensor *t);
/* The layout must cover exactly the rows of t. param may be NULL. */
int check_rows(const struct param *param, const struct tensor *t, const char *key, struct err *e);
/* How many disk rows from `row` on (of n_rows) are consecutive in memory, and where they start. */
int64_t row_run(const struct param *param, int64_t row, int64_t n_rows, int64_t *mem_row);
/* Disk order (src, maybe unaligned) into memory order (dst). Shapes are equal and checked. */
int copy_rows_from_disk(const struct tensor *dst, const struct tensor *src, const struct param *param, struct err *e);
/* A name for a message: cut to size, control characters replaced. Returns out. */
const char *shown(const char *name, char *out, size_t size);

/* Did parsing fail for want of memory, and not because of the text? Jansson says so by a code or by no text at all. */
static inline bool json_ran_out(const json_error_t *je)
{
    return je->text[0] == '\0' || json_error_code(je) == json_error_out_of_memory;
}

/* ---- safetensors_write.c --------------------------------------------------------------------- */

struct file_sum {
    int64_t bytes;
    uint64_t xxh3;
};
/* A JSON array of the dimensions; NULL: out of memory. */
json_t *json_shape(int rank, const int64_t *dim);
/* Create path (which must not exist), write, sync, close. On error the file is removed. */
int st_write_new(const char *path, const struct st_item *items, int n, const struct st_meta *meta, int n_meta,
                 struct file_sum *sum, struct err *e);
/* With values that come from elsewhere, one tensor at a time in the order of the file; from may be NULL. */
int st_write_from(const char *path, const struct st_item *items, int n, const struct ckpt_source *from,
                  const struct st_meta *meta, int n_meta, struct file_sum *sum, struct err *e);
/* The same for plain bytes. */
int bytes_write_new(const char *path, const void *bytes, size_t n, struct file_sum *sum, struct err *e);
int file_checksum(const char *path, struct file_sum *sum, struct err *e);

/* Order in a file: by falling element size, then by name; like strcmp. */
int st_item_order(const struct st_item *a, const struct st_item *b);

/* ---- save_part.c ----------------------------------------------------------------------------- */

enum { PART_NAME = 64 };
/* "model.safetensors", or with several parts "model-00001-of-00008.safetensors". Returns out. */
const char *part_file(int section, int part, int parts, char out[PART_NAME]);
#define NOT_SHARED                                                                                                     \
    "every rank writes files of a checkpoint: run.dir must be one folder that all of them see; with "                  \
    "run.save_ranks=1 rank 0 writes everything"

/* ---- manifest.c ------------------------------------------------------------------------------ */

#define MANIFEST_NAME "manifest.json"
#define MANIFEST_FORMAT "braid-checkpoint"
enum { MANIFEST_VERSION = 1, MANIFEST_MAX_BYTES = 256 << 20, NAME_TEXT = 160 };

struct manifest_file {
    const char *name;
    struct file_sum sum;
};
struct manifest_tensor {
    const char *key;
    int section;
    enum dtype dtype;
    int rank;
    int64_t dim[TENSOR_MAX_RANK];
    int file; /* index into files */
};
struct manifest {
    int64_t step;
    struct ckpt_counters counters;
    struct manifest_file *files;
    struct manifest_tensor *tensors; /* after parsing: sorted by section, key */
    struct ckpt_number *train;
    struct ckpt_data *data;
    int n_files, n_tensors, n_train, n_data;
    struct arena memory; /* everything above, after parsing */
};
/* malloc'd text with a checksum over itself. */
int manifest_dump(const struct manifest *m, char **text, struct err *e);
/* check_sum false is for the fuzzer, which could never guess it. */
int manifest_parse(struct manifest *m, const char *text, size_t n, bool check_sum, struct err *e);
void manifest_release(struct manifest *m);
const struct manifest_tensor *manifest_find(const struct manifest *m, const char *key, int section);

/* ---- folder.c -------------------------------------------------------------------------------- */

enum folder_kind { FOLDER_FINAL, FOLDER_OLD, FOLDER_TMP };
struct folder {
    char *path; /* malloc'd */
    int64_t step;
    enum folder_kind kind;
    uint64_t id; /* random, of one save; 0 for FOLDER_FINAL */
};
/* "step-00000100", "step-00000100.old-<id>", "step-00000100.tmp-<id>", an id being up to 16 hexadecimal digits (earlier
 * versions wrote their process number); false: none of ours. */
bool folder_parse_name(const char *name, struct folder *f);
char *folder_path(const char *dir, int64_t step, enum folder_kind kind, uint64_t id);
/* Ours in dir, highest step first, and for one step the final one first. */
int folder_scan(const char *dir, struct folder **out, int *n, struct err *e);
void folder_scan_free(struct folder *list, int n);
/* Read and check the manifest, and that each file is there with its size. */
int folder_manifest(const char *path, struct manifest *m, struct err *e);
int folder_checksums(const char *path, const struct manifest *m, struct err *e);
bool folder_complete(const struct folder *f);
const struct st_entry *ckpt_entry(const struct ckpt *c, const char *key, int section); /* NULL: not there */
const char *path_tail(const char *path);                                               /* the part after the last '/' */

#endif
