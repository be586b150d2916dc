#!/usr/bin/env bash
# Sparse attention (D) on one Hopper GPU in one call of at most 150 seconds: kernels that no GPU has timed are compared with the reference, with the
# others and with themselves, then both families are timed beside dense latent attention at 65,536 and 131,072 tokens. Ends with what is to be decided:
# SPARSE_HOPPER_TIMED and INDEX_HOPPER_TIMED in src/ops/sparse/sparse_path.c. Needs 120 GB of GPU memory.
#
#   tests/gpu/sparse_table.sh [BUILD]
set -u
cd "$(dirname "$0")/../.." || exit 1
programs=${1:-build}/tests/gpu
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
failed=0

for p in "check_ops --untimed sparse" "check_ops --untimed index_topk" "check_ops --untimed index_loss_bwd" "bench_sparse check"; do
    # shellcheck disable=SC2086 # a program and its arguments
    line=$(timeout 30 "$programs"/$p 2>&1 | tee "$out/log" | grep -E '^[0-9]+ passed' | tail -n 1)
    grep -E '^not ok|distance|other entries' "$out/log"
    echo "$p: ${line:-no result} (after $SECONDS s)"
    case $line in *' 0 failed') ;; *) failed=1 ;; esac
done
timeout $((148 - SECONDS)) "$programs/bench_sparse" 2>&1 | tee "$out/table" || failed=1
# A table of a GPU whose kernels gave wrong results says nothing.
[ "$failed" -eq 0 ] || { echo "failed after $SECONDS s: nothing is to be changed"; exit 1; }
awk '/indexer scores/ { index_slower = index_slower + ($0 ~ / 0\.[0-9]+ times as fast/) } /sparse_[fb]wd/ { sparse_slower = sparse_slower + ($0 ~ / 0\.[0-9]+ times as fast/) }
     END { print "INDEX_HOPPER_TIMED = " (index_slower == 0) ", SPARSE_HOPPER_TIMED = " (sparse_slower == 0) }' "$out/table"
