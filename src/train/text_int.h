/* Private to train/: files that a checkpoint carries beside its tensors. */
#ifndef BRAID_TEXT_INT_H
#define BRAID_TEXT_INT_H

#include "train/train.h"

#define CHAT_FILE "chat.template" /* a template file of data.chat, as a checkpoint has it */

/* Reads a file into files[*n], under this name. */
int pack_file(const char *path, const char *name, struct ckpt_file *files, int *n, struct err *e);

#endif
