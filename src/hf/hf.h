/* Hugging Face model folders: config.json and safetensors files under transformers' names.
 *
 *     hf_open        reads config.json and every header of a folder; nothing is loaded
 *     hf_options     sets the [model] options that the config describes, or says which field cannot be expressed
 *     hf_bind        finds, for each parameter of a model with these options, the tensors that make it up
 *     hf_load        one parameter, converted, dequantised and in the row order of our files
 *     hf_export      writes such a folder from a model's options and parameters
 *
 * A family (families.c) is a table: which option comes from which field, which of our parameters is made of which
 * tensors. Both directions read the same rows, so what is exported is what would be imported. */
#ifndef BRAID_HF_H
#define BRAID_HF_H

#include "ckpt/ckpt.h"
#include "config/config.h"

struct hf_folder;
/* True where path is a folder that holds a config.json. */
bool hf_is_folder(const char *path);
int hf_open(struct hf_folder **out, const char *path, struct err *e);
/* The config of a folder with gradients of its tensors, named grad.NAME in one file: loaded as the weights they belong
 * to are. Tables that are not trained may be absent. */
int hf_open_gradients(struct hf_folder **out, const char *path, const char *file, struct err *e);
void hf_close(struct hf_folder *f);                    /* NULL is allowed */
const char *hf_family_name(const struct hf_folder *f); /* transformers' model_type */

/* Sets options as if they were in a file of the folder's name, among them train.seq where the user gave none. notes
 * (may be NULL) gets a line for every field that was ignored and might matter. */
int hf_options(struct hf_folder *f, struct config *c, struct buf *notes, struct err *e);

/* params: those of the whole model, in any order. Everything is checked here: names, shapes, dtypes, tensors that
 * nothing uses. c and params must outlive the folder's use. notes lists what was left out on purpose. */
int hf_bind(struct hf_folder *f, const struct config *c, const struct param *const *params, int n, struct buf *notes,
            struct err *e);
/* Fill dst, dense and F32 on the host with the shape of parameter i, in the row order of our files. */
int hf_load(struct hf_folder *f, int i, const struct tensor *dst, struct err *e);

/* Are parameters i and k parts of one tensor? */
bool hf_same_tensor(const struct hf_folder *f, int i, int k);

struct hf_export {
    const char *path; /* must not exist; written beside and renamed */
    const struct config *config;
    const struct param *const *params;
    int n_params;
    /* host gets the values of parameter i, F32 in the row order of our files, valid until the next call. */
    int (*fetch)(void *ctx, int i, struct tensor *host, struct err *e);
    void *ctx;
    const char *family; /* NULL: the first that can express the model */
    enum dtype dtype;   /* DT_BF16, DT_F32, or DT_F8_E4M3: projections in blocks of FP8, the rest BF16 */
    int64_t shard_bytes;
    const char *const *extra_files; /* copied into the folder under their own names: tokenizer files */
    int n_extra_files;
    void (*progress)(void *ctx, int64_t done_bytes, int64_t all_bytes); /* may be NULL */
};
int hf_export(const struct hf_export *x, struct err *e);
/* The family that would be written; with a reason in e if none can express the model. */
int hf_family_of(const struct config *c, const char *family, const char **name, struct err *e);

/* The config that is written for this one: the same, or, if only that belongs to a family, with its pairs of layers in
 * brackets. A layer of most families is a pair of ours, [*-]; without brackets, *-, the model is the same under other
 * numbers in its keys. `pattern` holds the new pattern's text; all other strings stay the original's. */
void hf_as_written(const struct config *given, const char *family, struct config *out, struct buf *pattern);

#endif
