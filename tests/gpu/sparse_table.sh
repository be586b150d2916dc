#!/usr/bin/env bash
# Sparse attention (D) on one Hopper GPU in one call of at most 150 seconds: Hopper's kernels are compared with the reference, with the others and with themselves, then
# both families are timed beside dense latent attention at 65,536 and 131,072 tokens. Fails where a result is wrong, or where Hopper's kernels are not the
# faster ones, which src/ops/sparse/sparse_path.c takes for granted. Needs 120 GB of GPU memory.
#
#   tests/gpu/sparse_table.sh [BUILD]
set -u
cd "$(dirname "$0")/../.." || exit 1
programs=${1:-build}/tests/gpu
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
failed=0

for p in "check_ops sparse" "check_ops index_topk" "check_ops index_loss_bwd" "bench_sparse check"; do
    # shellcheck disable=SC2086 # a program and its arguments
    line=$(timeout 30 "$programs"/$p 2>&1 | tee "$out/log" | grep -E '^[0-9]+ passed' | tail -n 1)
    grep -E '^not ok|distance|other entries' "$out/log"
    echo "$p: ${line:-no result} (after $SECONDS s)"
    case $line in *' 0 failed') ;; *) failed=1 ;; esac
done
timeout $((148 - SECONDS)) "$programs/bench_sparse" 2>&1 | tee "$out/table" || failed=1
[ "$failed" -eq 0 ] || { echo "failed after $SECONDS s"; exit 1; }
# "0.9 times as fast" of any kernel of Hopper's but the sums against dense attention.
slower=$(grep -E 'indexer scores|index_topk|sparse_[fb]wd|index_loss' "$out/table" | grep -E ' 0\.[0-9]+ times as fast')
[ -z "$slower" ] || { echo "slower than the kernels on tensor cores: $slower"; exit 1; }
