/* What the files of the n-stream joint share: joint_mhc.c has the joints between sublayers, joint_mhc_last.c the last
 * one. */
#ifndef BRAID_LAYERS_JOINT_MHC_INT_H
#define BRAID_LAYERS_JOINT_MHC_INT_H

#include "layers/layer.h"
#include "ops/dropout/dropout.h"
#include "ops/mhc/mhc.h"

/* In sublayer.aux; the last three are numbers: layer within its part; 1 + node of the joint in front, if its health is
 * still to be requested, else 0; the same, if its backward pass can begin before its turn. */
enum { AUX_COEF, AUX_DCOEF, AUX_PRODUCT = AUX_CARRY, AUX_INDEX, AUX_HEALTH, AUX_READY };

/* Parameters of one mapping. */
struct mapping {
    struct weight w, a_pre, a_post, a_res, beta;
};

struct joint {
    struct mhc_rule rule;
    double eps;
    bool zero_centered;
    double dropout;
    uint64_t key;
    int64_t seq, first; /* first: row of the microbatch that this rank's rows begin with */
    /* Health is asked for after several joints: what it needs of this one, and the ones before it that wait too. */
    slot_id coef, stream, health[MHC_HEALTH_ITEMS];
    const struct joint *before;
    int waiting; /* with this one */
};

struct parts {
    struct joint *j;
    struct mapping map;
    struct weight gain;
    slot_id stream, coef, stat, norm, info;
};

static inline struct dropout_rule drop_rule(const struct graph *g, const struct parts *p)
{
    return (struct dropout_rule){.p = p->info != NO_SLOT ? p->j->dropout : 0,
                                 .key = p->j->key,
                                 .seq = p->j->seq,
                                 .first = p->j->first,
                                 .info = of(g, p->info)};
}

static inline struct tensor columns(const struct tensor *t, int64_t first, int64_t n)
{
    return t->data ? tensor_cols(t, first, n) : (struct tensor){0};
}
static inline struct tensor post_of(const struct joint *j, const struct tensor *coef)
{
    return columns(coef, j->rule.streams, j->rule.streams);
}
static inline struct tensor res_of(const struct joint *j, const struct tensor *coef)
{
    return columns(coef, 2 * j->rule.streams, j->rule.streams * j->rule.streams);
}

/* A stream from the one before it, as a forward phase or to make it again. */
void mhc_declare_combine(struct build *b, const struct parts *p, const struct sublayer *prev, int node,
                         enum phase_id ph);

/* A matrix with the initial values of a mapping. */
struct param mhc_matrix(const char *key, int64_t out, int64_t in);

/* ---- joint_mhc_last.c ------------------------------------------------------------------------ */

/* The sublayer before is closed, and nothing opened; g_stream: the gradient of the streams. */
void mhc_declare_close(struct build *b, const struct parts *p, const struct sublayer *prev, slot_id g_stream);
/* Combine, contract once, final norm. */
int mhc_declare_last(struct build *b, struct parts *p, const struct sublayer *prev, struct sublayer *next,
                     const char *norm_key);

#endif
