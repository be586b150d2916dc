#!/usr/bin/env bash
# Expert communication that overlap hides, on one GPU: the rank exchanges its rows with itself over a loop (parallel.comm=loop) that
# takes what a link of 400 GB/s would. Exposed is what a step takes longer than the same nodes over a loop without limits. All
# schedules must give the same bits. Usage: tests/gpu/overlap.sh [BRAID] [option ...]; OUT=folder keeps the output of each run.
#
#   WAYS="none ep"  schedules to run (default: none ep ep-dw);  SMS=124  multiprocessors for the products of experts, where overlapped
#   AXIS=tp         rows between tensor-parallel ranks instead: one of 8 ranks of a Llama shape of 70 B parameters, four layers (none tp)
braid=${1:-build/braid}
shift
out=${OUT:-$(mktemp -d)}
sms=${SMS:-0}
case ${AXIS:-ep} in
    ep) model=("${CONFIG:-configs/h200/moe-3.6b.ini}") ;;
    tp) # hidden is whole, heads, channels and vocabulary are those of one rank
        model=("${CONFIG:-configs/parallel/llama-70b.ini}" --parallel.loop_axis=tp)
        [ -n "${CONFIG:-}" ] || model+=(--model.pattern='(*-)x4' --model.heads=8 --model.kv_heads=1 --model.ffn=3584 --model.vocab=16032)
        WAYS=${WAYS:-none tp} ;;
    *) echo "overlap.sh: AXIS is ep or tp, not $AXIS"; exit 2 ;;
esac
common=(bench train "${model[@]}" --parallel.comm=loop --train.micro_batch=1 --train.global_batch=8 --train.steps=5 "$@")
declare -A options=([none]="--parallel.overlap=none" [dw]="--parallel.overlap=dw" [ep]="--parallel.overlap=ep --gpu.sms=$sms"
                    [tp]="--parallel.overlap=tp"
                    [ep-dw]="--parallel.overlap=ep --plan.delay_dw=on --gpu.sms=$sms" [ep-all]="--parallel.overlap=ep --plan.delay_dw=on")
link=(--parallel.loop_gbps="${GBPS:-400}")
free=(--parallel.loop_gbps=1000000 --parallel.loop_us=0)

one() { # name, options...
    local name=$1
    shift
    "$braid" "${common[@]}" "$@" >"$out/$name.txt" 2>&1 || { tail -3 "$out/$name.txt"; return 1; }
}
value() { awk -v key="$2:" '$1 == key { print $2 }' "$out/$1.txt"; }

failed=0
printf '%-8s %12s %12s %12s %9s  %s\n' schedule "link ms" "free ms" "exposed ms" "of none" bits
for way in ${WAYS:-none ep ep-dw}; do
    one "$way-link" "${link[@]}" ${options[$way]} && one "$way-free" "${free[@]}" ${options[$way]} || { failed=1; continue; }
    a=$(value "$way-link" ms_per_step) b=$(value "$way-free" ms_per_step) bits=$(value "$way-link" bits)
    exposed=$(awk "BEGIN { print $a - $b }")
    base=${base:-$exposed}
    same=${same:-$bits}
    [ "$bits" = "$same" ] && [ "$(value "$way-free" bits)" = "$same" ] || failed=1
    printf '%-8s %12s %12s %12.2f %8.1f%%  %s\n' "$way" "$a" "$b" "$exposed" "$(awk "BEGIN { print 100 * $exposed / $base }")" "$bits"
done
[ $failed = 0 ] && echo "all bits are equal" || echo "NOT all bits are equal, or a run failed"
exit $failed
