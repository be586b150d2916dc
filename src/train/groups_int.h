/* Private to train/: groups of parameters ([group.NAME]) against the parameters of a model. */
#ifndef BRAID_TRAIN_GROUPS_INT_H
#define BRAID_TRAIN_GROUPS_INT_H

#include "train/train.h"

bool groups_given(const struct config *c);
/* Every glob matches a parameter of the whole model, every group has one, and something is trained; every word of
 * lora.targets names a layer with an adapter. After the plans are built. */
int groups_check_model(const struct model *m, struct err *e);

#endif
