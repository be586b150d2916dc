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
 * last rows of the convolution's input and the state of each head.
 * With parallel.cp the convolution takes the last rows of the rank before (halo), and the rule starts from its state
 * and passes its own on (context.h). Nodes then: in, tail, halo, conv, passes, the rule, passes, norm, out; in the
 * backward pass norm and the rule are nodes of their own, whose parts of din (dz, drest) conv puts together. */
#ifndef BRAID_LAYERS_MIXER_INT_H
#define BRAID_LAYERS_MIXER_INT_H

#include "layers/context.h"

/* Sizes that declarations need: the first member of the core's own struct. */
struct mixer;
struct mixer_slots;
struct mixer_decl;
typedef void (*mixer_rule)(struct build *b, int node, const struct mixer *m, const struct mixer_decl *d,
                           const struct mixer_slots *s);
struct mixer {
    int64_t batch, seq, heads, inner, conv, chunk;
    int64_t mixed, width;           /* of mixed, and of in */
    int64_t mixed_at, z_at;         /* their first columns in in */
    int64_t state_rows, state_cols; /* of a head */
    int64_t norm_group;             /* channels that share one mean square */
    double norm_eps;
    bool norm_first, norm_zero_centered;
    /* the rule's op call in the forward phase of its node; in the backward phase of all three */
    mixer_rule rule_fwd, rule_bwd;
};
struct mixer_slots {
    slot_id in, mixed, y, states, n, rstd;
    slot_id din, dmixed, dy, dn;
    slot_id conv_state; /* decoding */
    /* the rule's: of decoding both are one, with parallel.cp those of the neighbours; else absent */
    struct context_state state;
    bool divided;             /* parallel.cp; then what follows exists, as far as there is a neighbour */
    struct context_edge edge; /* of the convolution's input: real [batch * (conv - 1), mixed] */
    slot_id dz, drest;        /* columns of din: the gate's, and all but those of gate and convolution */
};

/* What a core states once, while it declares itself. */
struct mixer_decl {
    const char *in, *mixed, *y, *state, *rule;                          /* names of slots, and of the rule's node */
    struct weight w_in, conv_w, conv_b, dt_bias, a_log, d, norm, w_out; /* conv_b, d: may be no_weight() */
    double fwd_flops, bwd_flops;                                        /* of the rule */
};
int mixer_declare(struct build *b, const struct mixer *m, const struct mixer_decl *d, struct core_io *io);
struct param conv_param(const char *name, const struct mixer *m);

/* Columns of a row matrix as [B, S, n], and as [B, S, heads, dim]; where documents begin, as [B, S]. */
struct tensor mixer_cols(const struct mixer *m, struct tensor rows, int64_t first, int64_t n);
struct tensor mixer_heads(const struct mixer *m, struct tensor rows, int64_t first, int64_t heads, int64_t dim);
struct tensor mixer_docs(const struct build *b); /* absent stays absent */
/* Columns of in behind those of the convolution and the gate, in its gradient: [B, S, n]. */
struct tensor mixer_drest(const struct graph *g, const struct mixer *m, const struct mixer_slots *s, int64_t first,
                          int64_t n);

#endif
