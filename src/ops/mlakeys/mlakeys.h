/* mlakeys: the keys of multi-latent attention, put together from what each head has of its own and the
 * rotary part that all heads share.
 *   kv [T, H, nope + v] real (strided), shared [T, rope] real (strided), k [T, H, nope + rope] real:
 *   k[t, h] = [ kv[t, h, 0..nope) | shared[t] ].
 * backward, from dk: dkv[t, h, 0..nope) = dk[t, h, 0..nope) (the value part of dkv is not touched);
 *   dshared[t] = sum over h of dk[t, h, nope..), in order of h. Each output is optional. */
#ifndef BRAID_OPS_MLAKEYS_H
#define BRAID_OPS_MLAKEYS_H

#include "dev/dev.h"

struct mlakeys_fwd_args {
    struct tensor kv, shared, k;
};
struct mlakeys_bwd_args {
    struct tensor dk, dkv, dshared;
    int64_t nope;
};
int mlakeys_fwd_check(const struct mlakeys_fwd_args *a, struct err *e);
int mlakeys_bwd_check(const struct mlakeys_bwd_args *a, struct err *e);

#endif
