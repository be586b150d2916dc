/* What the cores with a recurrent state share (Mamba-2, gated delta net): a projection in, a causal convolution of
 * most of its columns, a rule with a state for each head, a gated norm, a projection out.
 *
 *   in     [T, width]  = h Win^T               its sections are the core's own
 *   mixed  [T, mixed]  = silu(conv(columns of in) + bias), each channel by itself (ops/conv1d)
 *   y      [T, inner]  = the core's rule; states: what enters each chunk, for the backward pass
 *   n      [T, inner]  = RMSNorm of y gated by the columns z of in (ops/gatednorm)
 *   f      [T, hidden] = n Wout^T
 * Nodes: in, conv, the rule, norm, out. The three in the middle are undone by one backward phase (of conv), because
 * together they write one row of din: norm its z, the rule what it reads of in, conv the rest. Decoding keeps the
 * last rows of the convolution's input and the state of each head. */
#ifndef BRAID_LAYERS_MIXER_H
#define BRAID_LAYERS_MIXER_H

#include "layers/layer.h"

/* Sizes that the steps need: the first member of the core's own struct, so that a rule finds that in c->self. */
struct mixer {
    int64_t batch, seq, heads, inner, conv, chunk;
    int64_t mixed, width;           /* of mixed, and of in */
    int64_t mixed_at, z_at;         /* their first columns in in */
    int64_t state_rows, state_cols; /* of a head */
    int64_t norm_group;             /* channels that share one mean square */
    double norm_eps;
    bool norm_first, norm_zero_centered;
    step_fn rule_fwd, rule_bwd;
};

/* The tensors of rule_fwd, and of rule_bwd (those of all three middle nodes; y's gradient is dy). */
enum { RULE_IN, RULE_MIXED, RULE_A_LOG, RULE_DT_BIAS, RULE_D, RULE_DOC, RULE_START, RULE_Y, RULE_STATES, RULE_STATE, RULE_WORK };
enum {
    MIX_DN, MIX_IN, MIX_MIXED, MIX_Y, MIX_STATES, MIX_RSTD, MIX_NORM, MIX_A_LOG, MIX_DT_BIAS, MIX_D, MIX_CONV_W,
    MIX_CONV_B, MIX_DOC, MIX_DIN, MIX_DMIXED, MIX_DY, MIX_DNORM, MIX_DA_LOG, MIX_DDT_BIAS, MIX_DD, MIX_DCONV_W,
    MIX_DCONV_B, MIX_WORK
};

/* What a core says once, while it declares itself. */
struct mixer_decl {
    const char *in, *mixed, *y, *state, *rule;                        /* names of slots, and of the rule's node */
    struct weight w_in, conv_w, conv_b, dt_bias, a_log, d, norm, w_out; /* conv_b, d: may be no_weight() */
    int64_t fwd_work, bwd_work;                                       /* bytes the rule asks for */
    double fwd_flops, bwd_flops;                                      /* of the rule */
};
int mixer_declare(struct build *b, const struct mixer *m, const struct mixer_decl *d, struct core_io *io);
struct param conv_param(const char *name, const struct mixer *m);

/* Columns of a row matrix as [B, S, n], and as [B, S, heads, dim]. */
struct tensor mixer_cols(const struct mixer *m, const struct tensor *rows, int64_t first, int64_t n);
struct tensor mixer_heads(const struct mixer *m, const struct tensor *rows, int64_t first, int64_t heads, int64_t dim);
struct tensor mixer_docs(const struct mixer *m, const struct tensor *doc); /* absent stays absent */

#endif
