/* Checks over op descriptors: gradients in double, and one table against the reference. Used by the
 * tests and by `braid gradcheck`. */
#ifndef BRAID_OPS_OPCHECK_H
#define BRAID_OPS_OPCHECK_H

#include "ops/opdesc.h"

struct op_check_result {
    double worst;   /* relative error */
    char where[96]; /* tensor and index of it */
    int compared;   /* tensors compared; 0: nothing to check */
};

/* Central differences on the reference against the backward op; only forward ops with .backward. */
int op_gradcheck(const struct op_desc *d, const struct op_sample *s, uint64_t seed, struct op_check_result *out,
                 struct err *e);
/* Run with this table and on the reference with the same inputs; relative to each output's largest
 * magnitude. Guard bytes round every output and scratch are checked. */
int op_compare(const struct op_desc *d, const struct op_sample *s, struct dev *dev, const struct ops *ops,
               uint64_t seed, struct op_check_result *out, struct err *e);

/* The same on a GPU, whose storage may be bf16: inputs are rounded first, and each output's relative Frobenius error is
 * compared with what is allowed: twice the error of rounding the exact result, plus the op's own allowance. worst is
 * error / allowed. The op runs twice; different bits are an error. */
int op_compare_gpu(const struct op_desc *d, const struct op_sample *s, struct dev *dev, uint64_t seed,
                   struct op_check_result *out, struct err *e);

/* The same inputs `times` times while another lane keeps the GPU busy and kernels that stay on their multiprocessors
 * get fewer and fewer of them: an error unless every output has the same bits. */
int op_repeat_gpu(const struct op_desc *d, const struct op_sample *s, struct dev *dev, int times, struct err *e);

/* Memory of one call: every tensor in one block with guards; free with op_call_free. */
struct op_block {
    char *base;
    size_t bytes;
};
/* Allocate all tensors of c (host), fill inputs and outputs from key; `strided` pads rows. */
int op_call_alloc(struct op_call *c, struct op_block *b, uint64_t key, bool strided, struct err *e);
/* The same for timing: faster, because large tensors repeat their first million values. */
int op_call_alloc_fast(struct op_call *c, struct op_block *b, uint64_t key, struct err *e);
/* Copies the block to the device and makes `there` the call on the copy; op_fetch copies it back. */
int op_send(const struct op_call *c, const struct op_block *b, struct dev *dev, struct op_call *there, void **base,
            struct err *e);
int op_fetch(const struct op_block *b, struct dev *dev, const void *base, struct err *e);
bool op_guards_intact(const struct op_call *c, const struct op_block *b);
void op_call_free(struct op_block *b);
/* Does the text of a sample hold the setting name=1? */
bool op_sample_flag(const struct op_sample *s, const char *name);

#endif
