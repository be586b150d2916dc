#!/usr/bin/env bash
# Adds an op as CONTRIBUTING.md says, one folder and a line in ops.def for each direction, and checks that tests, `braid op`,
# gradcheck and bench find it without anything else being touched.
patch=add_op.patch
. "$(dirname "$0")/added.sh"

check "a tree with one more op builds" make_copy b/braid b/tests/ops/test_ops
check "what only calls ops is not compiled again" test "$(objects_made)" -le $((74 + aware))
check "the patch is one folder and lines of ops.def" touches_only '^src/ops/wave/\|^src/ops/ops.def$'
check "its gradient and its fast version agree with the reference" b/tests/ops/test_ops wave
b/braid op list >out 2>&1
check "braid op lists it" found '^wave_fwd'
b/braid op wave_fwd >out 2>&1
check "and describes its fields" found 'attribute amplitude'
check "braid gradcheck finds it" b/braid gradcheck --only=wave_fwd
check "braid bench times it" b/braid bench wave_fwd --seconds=0.01
exit $failed
