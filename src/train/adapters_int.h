/* Private to train/: LoRA adapters of a checkpoint. */
#ifndef BRAID_TRAIN_ADAPTERS_INT_H
#define BRAID_TRAIN_ADAPTERS_INT_H

#include "hf/peft.h"
#include "train/interop.h"

/* Has parameter `index` of the paper model adapters? */
bool adapters_of(const struct paper *p, int index);
/* Adds them to the values of the parameter, F32 in the row order of files. */
int adapters_merge(const struct ckpt *from, const struct config *c, const struct paper *p, int index, float *values,
                   struct err *e);

#endif
