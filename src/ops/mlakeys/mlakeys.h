/* mlakeys: the keys of multi-latent attention, put together from what each head has of its own and the
 * rotary part that all heads share.
 *   kv [T, H, nope + v] real (strided), shared [T, rope] real (strided), k [T, H, nope + rope] real:
 *   k[t, h] = [ kv[t, h, 0..nope) | shared[t] ].
 * backward, from dk: dkv[t, h, 0..nope) = dk[t, h, 0..nope) (the value part of dkv is not touched);
 *   dshared[t] = sum over h of dk[t, h, nope..), in order of h. Each output is optional. */
#ifndef BRAID_OPS_MLAKEYS_H
#define BRAID_OPS_MLAKEYS_H

#include "ops/op.h"

#define MLAKEYS_FWD_FIELDS(T, N, S, op)                                                                                \
    T(op, kv, IN, REAL, "tokens heads nope|*")                                                                         \
    T(op, shared, IN, REAL, "tokens rope")                                                                             \
    T(op, k, OUT, REAL, "tokens heads nope+rope")
OP_ARGS(mlakeys_fwd, MLAKEYS_FWD_FIELDS);
#define MLAKEYS_BWD_FIELDS(T, N, S, op)                                                                                \
    T(op, dk, IN, REAL, "tokens heads nope+rope")                                                                      \
    T(op, dkv, OPT_OUT, REAL, "tokens heads nope|*")                                                                   \
    T(op, dshared, OPT_OUT, REAL, "tokens rope")                                                                       \
    N(op, int64_t, nope, 6)
OP_ARGS(mlakeys_bwd, MLAKEYS_BWD_FIELDS);

#endif
