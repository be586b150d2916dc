/* verify: does every mesh and every schedule that a config allows train the same model? A small model of the same kind
 * is run by one plain rank and by thread ranks on every mesh and schedule, in double precision, and the results are
 * compared. */
#ifndef BRAID_TRAIN_VERIFY_H
#define BRAID_TRAIN_VERIFY_H

#include "train/train.h"

enum { VERIFY_STEPS = 2, VERIFY_BATCH = 8 };
#define VERIFY_ALLOWED 1e-9 /* difference over the largest value of the tensor; sums in another order give 1e-15 */
/* The same with FP8 where ranks divide tokens, rows of experts or layers: scale blocks may hold other values. */
#define VERIFY_ALLOWED_FP8 1e-2

struct verify_case {
    const char *name;
    int ranks, pp, vpp, ep;
    const char *options; /* beside those: "parallel.overlap=ep plan.delay_dw=on" */
    int cp, tp, etp;     /* 0 counts as 1 */
};
static inline int verify_tp(const struct verify_case *v) { return v->tp > 0 ? v->tp : 1; }
static inline int verify_etp(const struct verify_case *v) { return v->etp > 0 ? v->etp : 1; }
static inline int verify_cp(const struct verify_case *v) { return v->cp > 0 ? v->cp : 1; }
/* All variants; those that need experts do not apply to models without experts. */
const struct verify_case *verify_cases(int *n);

/* Combinations of stages, virtual stages, tensor, context, expert and expert tensor parallelism, copies, parallel.zero,
 * overlap, delayed weight gradients and recompute on up to eight ranks: enough of them to contain every legal pair of
 * values, or all legal ones. */
struct verify_list {
    struct verify_case *list;
    int n;
    size_t cap;
    struct arena text;
};
int verify_combinations(struct verify_list *l, const struct config *small, bool all, struct err *e);
void verify_list_release(struct verify_list *l);

enum verify_outcome { VERIFY_SAME_BITS, VERIFY_CLOSE, VERIFY_DIFFERS, VERIFY_REFUSED };
struct verify_row {
    const struct verify_case *variant;
    enum verify_outcome outcome;
    double loss, norm;  /* relative differences, the worst step */
    double grad, param; /* largest differences: first moments after one step, parameters at the end */
    double saved;       /* of parameters and both moments in the checkpoint at the end */
    char where[160];    /* parameter with the largest, and the rank that has it */
    double seconds;
    struct err why; /* refused: the reason */
};

/* For tests: deliberate mistakes. Called on the rank's own config, and on its trainer before the first step. */
struct verify_sabotage {
    void (*config)(struct config *c, int rank);
    void (*trainer)(struct trainer *t);
};

/* The small config: the user's kinds of layers, options and joints, small numbers. dir: a folder for data. */
int verify_config(struct config *small, const struct config *user, const char *dir, struct err *e);
/* Every option of from; to was initialised. */
int verify_copy(struct config *to, const struct config *from, struct err *e);
/* Whether a variant makes sense for the model. */
bool verify_applies(const struct config *small, const struct verify_case *variant);

struct verify; /* the results of the plain rank */
int verify_open(struct verify **out, const struct config *small, struct err *e);
int verify_run(struct verify *v, const struct verify_case *variant, const struct verify_sabotage *wrong,
               struct verify_row *row, struct err *e);
void verify_close(struct verify *v);

#endif
