/* Private to train/: what verify compares of the checkpoint that ranks would save: parameters and both moments under
 * their keys, as rank 0 gathers them. */
#ifndef BRAID_TRAIN_VERIFY_SAVED_INT_H
#define BRAID_TRAIN_VERIFY_SAVED_INT_H

#include "train/train.h"

enum saved_kind { SAVED_VALUE, SAVED_MOMENT, SAVED_SQUARE, SAVED_KINDS };
struct saved_tensor {
    char *key;
    enum saved_kind kind;
    double *value;
    int64_t n;
};
struct saved {
    struct saved_tensor *list;
    int n;
    size_t cap;
    double largest[SAVED_KINDS]; /* of all tensors */
};
/* Every rank of t calls these; rank 0 has the result. */
int saved_keep(struct saved *s, struct trainer *t, struct err *e);
/* Largest difference over the largest value of the tensor; INFINITY where keys or sizes differ. key: of that tensor.
 * Gradients that nearly cancel keep only the rounding errors of their terms, so moments are compared with a millionth
 * of the largest gradient of the model where they are smaller than that. */
struct saved_difference {
    double most;
    char key[128];
};
int saved_compare(const struct saved *plain, struct trainer *t, struct saved_difference *out, struct err *e);
void saved_release(struct saved *s);

#endif
