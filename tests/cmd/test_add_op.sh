#!/usr/bin/env bash
# Adds an op as CONTRIBUTING.md says, one folder and a line in ops.def for each direction, to a copy of the tree that reuses
# this build's objects, and checks that tests, `braid op`, gradcheck and bench find it without anything else being touched.
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
braid=${BRAID:-$root/build/braid}
build=$(cd "$(dirname "$braid")" && pwd)
[ ! -x "$build-nocuda/braid" ] || build=$build-nocuda braid=$build/braid # kernels know every op: nvcc would take minutes
copy=$(mktemp -d) || exit 1
trap 'rm -rf "$copy"' EXIT
failed=0
check() { # "sentence" command...
    local sentence=$1
    shift
    if "$@" >"$copy/log" 2>&1; then echo "ok $sentence"; else
        echo "not ok $sentence"
        tail -5 "$copy/log" | sed 's/^/  /'
        failed=1
    fi
}
found() { grep -q "$1" "$copy/out"; }

# Times are kept, so that make finds the objects up to date; programs and tests stay behind.
cp -a Makefile src tests "$copy" && mkdir "$copy/b" && (cd "$build" && find . -path ./tests -prune -o \( -name '*.o' -o -name '*.d' \) -print0 | tar -c --null -T - | tar -xC "$copy/b") || exit 1
find "$copy/b" -name '*.d' -exec sed -i "s#$(basename "$build")/#b/#g" {} + # dependencies name the build folder
cd "$copy" || exit 1
patch -p1 -s <tests/patches/add_op.patch || exit 1
find b -name '*.cu.o' -exec touch {} + # kernels do not see the table of ops
cuda=$(nm "$braid" 2>/dev/null | grep -q ops_cuda_bf16 && echo yes || echo no)
check "a tree with one more op builds" make -s -j2 CUDA="$cuda" B=b b/braid b/tests/ops/test_ops
check "the patch is one folder and lines of ops.def" test -z "$(sed -n 's/^+++ b\///p' tests/patches/add_op.patch | grep -v '^src/ops/wave/\|^src/ops/ops.def$')"
check "its gradient and its fast version agree with the reference" b/tests/ops/test_ops wave
b/braid op list >out 2>&1
check "braid op lists it" found '^wave_fwd'
b/braid op wave_fwd >out 2>&1
check "and describes its fields" found 'attribute amplitude'
check "braid gradcheck finds it" b/braid gradcheck --only=wave_fwd
check "braid bench times it" b/braid bench wave_fwd --seconds=0.01
exit $failed
