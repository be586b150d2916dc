/* Private to train/: texts about the machine and the process for logs (facts.c). */
#ifndef BRAID_TRAIN_FACTS_INT_H
#define BRAID_TRAIN_FACTS_INT_H

#include "train/train.h"

/* The command line of this process, quoted so that a shell reads it again. */
void facts_command(struct buf *out);
/* Version, host, device, ranks, memory by arena. */
void facts_machine(const struct trainer *t, struct buf *out);
/* Bytes planned and allocated on this rank. */
int64_t facts_memory(const struct trainer *t);

#endif
