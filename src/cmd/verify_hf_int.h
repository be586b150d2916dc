/* A model beside the same model in another program: --verify of import and export. */
#ifndef BRAID_CMD_VERIFY_HF_INT_H
#define BRAID_CMD_VERIFY_HF_INT_H

#include "ckpt/ckpt.h"
#include "config/config.h"

struct hf_check {
    const char *with;        /* a file of golden values (*.safetensors), or a Python that has transformers */
    const char *folder;      /* the model as a Hugging Face folder */
    const struct ckpt *from; /* the same model here; NULL: the folder itself, as braid reads it */
    const char *scratch;     /* files go beside this path and are removed */
    bool rounded;            /* the folder's weights are those of the checkpoint in bf16 */
};
/* Prints the largest difference of logits and the KL divergence; an error where they are too large. */
int verify_hf(const struct config *given, const struct hf_check *k, struct err *e);

#endif
