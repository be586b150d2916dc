/* Models of other programs: import into a checkpoint, export of a checkpoint. */
#ifndef BRAID_TRAIN_INTEROP_H
#define BRAID_TRAIN_INTEROP_H

#include "hf/gguf.h"
#include "hf/hf.h"
#include "train/train.h"

/* The parameters of a model of these options, without memory for any of them. */
struct paper {
    const struct param **params;
    int n;
    /* private */
    struct dev dev;
    struct model model;
    struct model_plan plan;
};
int paper_open(struct paper *p, const struct config *c, struct err *e);
void paper_close(struct paper *p);

struct interop_progress {
    void (*fn)(void *ctx, int64_t done_bytes, int64_t all_bytes);
    void *ctx;
};
/* data.tokenizer becomes the folder's tokenizer.json, unless the user named another one; a note says why it cannot be
 * read. */
int import_tokenizer(struct config *c, const char *folder, struct buf *notes, struct err *e);
/* Writes checkpoint 0 of run_dir. c: the folder's options (hf_options), completed. */
int import_hf(struct hf_folder *f, struct config *c, const char *run_dir, const struct interop_progress *progress,
              struct buf *notes, struct err *e);

struct export_opts {
    const char *path, *family; /* family NULL: the first that fits */
    enum dtype dtype;
    int64_t shard_bytes;
    const char *const *extra_files;
    int n_extra_files;
    const struct interop_progress *progress;
};
int export_hf(const struct ckpt *from, const struct config *c, const struct export_opts *o, struct err *e);
int export_gguf(const struct ckpt *from, const struct config *c, const struct export_opts *o, enum gguf_type type,
                struct err *e);

/* LoRA adapters for PEFT; base: its name for the base, or NULL (adapters.c). */
int export_peft(const struct ckpt *from, const struct config *c, const struct export_opts *o, const char *base,
                struct err *e);
/* Writes a checkpoint without adapters, with what they add included in the weights, as the only one of run_dir. files:
 * what it carries. */
int merge_checkpoint(const struct ckpt *from, const struct config *c, const struct ckpt_file *files, int n_files,
                     const char *run_dir, struct err *e);

/* layout: flat, logical or stacked; NULL: what Megatron's hybrid models have for the pattern. */
int export_megatron(const struct ckpt *from, const struct config *c, const struct export_opts *o, const char *layout,
                    struct buf *notes, struct err *e);

#endif
