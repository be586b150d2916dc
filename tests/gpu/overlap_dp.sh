#!/usr/bin/env bash
# Communication of data-parallel copies that overlap hides, on one GPU: the rank reduces its gradients and gathers its weights over a loop
# (parallel.loop_axis=dp) that takes what a link would. *Exposed* is what a step takes longer than the same nodes over a loop without
# limits; *whole* is the same with a wait after every node (plan.sync), where nothing can hide. All must have the bits of a rank without
# a loop. Usage: tests/gpu/overlap_dp.sh [BRAID] [option ...]
#
#   CONFIG=FILE  default configs/h200/dense-1b.ini;  BATCH=8  sequences of a microbatch;  LEVELS="1 2 3";  GBPS=400;  STEPS=5
braid=${1:-build/braid}
shift
out=${OUT:-$(mktemp -d)}
common=(bench train "${CONFIG:-configs/h200/dense-1b.ini}" --train.micro_batch="${BATCH:-8}" --train.global_batch="${BATCH:-8}" --train.steps="${STEPS:-5}" "$@")
loop=(--parallel.comm=loop --parallel.loop_axis=dp)
link=(--parallel.loop_gbps="${GBPS:-400}")
free=(--parallel.loop_gbps=1000000 --parallel.loop_us=0)
one() { # name, options...
    "$braid" "${common[@]}" "${@:2}" >"$out/$1.txt" 2>&1 || { tail -n 3 "$out/$1.txt"; return 1; }
}
value() { awk -v key="$2:" '$1 == key { print $2 }' "$out/$1.txt"; }
failed=0
one plain || failed=1
printf '%-7s %10s %10s %12s %10s %9s  %s\n' zero "link ms" "free ms" "exposed ms" "whole ms" hidden bits
for zero in ${LEVELS:-1 2 3}; do
    z=("${loop[@]}" --parallel.zero="$zero")
    one "$zero-link" "${z[@]}" "${link[@]}" && one "$zero-free" "${z[@]}" "${free[@]}" && one "$zero-sync-link" "${z[@]}" "${link[@]}" --plan.sync=on --plan.graphs=off &&
        one "$zero-sync-free" "${z[@]}" "${free[@]}" --plan.sync=on --plan.graphs=off || { failed=1; continue; }
    a=$(value "$zero-link" ms_per_step) b=$(value "$zero-free" ms_per_step) c=$(value "$zero-sync-link" ms_per_step) d=$(value "$zero-sync-free" ms_per_step)
    for run in link free sync-link sync-free; do [ "$(value "$zero-$run" bits)" = "$(value plain bits)" ] || failed=1; done
    awk "BEGIN { e = $a - $b; w = $c - $d; printf \"%-7s %10s %10s %12.2f %10.2f %8.1f%%  %s\n\", \"$zero\", \"$a\", \"$b\", e, w, (w > 0 ? 100 * (1 - e / w) : 0), \"$(value "$zero-link" bits)\" }"
done
[ $failed = 0 ] && echo "all bits are equal" || echo "NOT all bits are equal, or a run failed"
exit $failed
