/* Private to train/: text that a run writes at its evaluations, for the report (samples.c). */
#ifndef BRAID_TRAIN_SAMPLES_INT_H
#define BRAID_TRAIN_SAMPLES_INT_H

#include "train/train.h"

/* Decode plans on the trainer's own model, where run.sample_tokens asks for text; before the model
 * is committed. */
int samples_plan(struct trainer *t, struct err *e);
int samples_bind(struct trainer *t, struct err *e);
void samples_release(struct trainer *t);
/* Continues generate.prompt and logs the text. What fails here never ends a run: it is noted once,
 * and no more text is written. */
void samples_write(struct trainer *t);

#endif
