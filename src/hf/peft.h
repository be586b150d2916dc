/* LoRA adapters as the PEFT library stores them: adapter_model.safetensors and adapter_config.json. */
#ifndef BRAID_HF_PEFT_H
#define BRAID_HF_PEFT_H

#include "hf/hf.h"

/* The adapters of one weight of ours. A weight that holds several projections has one for each of its parts. */
struct peft_adapter {
    const char *key;          /* of the weight */
    int64_t rows, in;         /* of the weight */
    const float *part_of;     /* [rows], in the row order of files: the number of the part, -1: without an adapter */
    const float *up;          /* [rows, rank], in the same order */
    const float *const *down; /* [rank, in] of each part */
};
struct peft_export {
    const char *path; /* must not exist; written beside and renamed */
    const struct config *config;
    const struct peft_adapter *list;
    int n;
    const char *family; /* of the base; NULL: the first that can express it */
    const char *base;   /* name or path of the base for adapter_config.json; NULL: none */
    enum dtype dtype;
};
int peft_export(const struct peft_export *x, struct err *e);

#endif
