#!/usr/bin/env bash
# Communication that schedules hide, on one GPU: the rank acts as one of 8 and exchanges with itself over a loop (parallel.comm=loop)
# that takes what a link of 400 GB/s would. *Exposed* is what a step takes longer than the same nodes over a loop without limits;
# *whole* is the same with a wait after every node, where nothing can hide. Each line is one process (braid bench train
# --exposed=on); all must have the same bits. Usage: tests/gpu/overlap.sh [BRAID] [option ...]
#
#   AXIS=ep     rows of experts (configs/h200/moe-3.6b.ini, 8 microbatches of 1 x 4096 tokens)
#   AXIS=dp     gradients and weights of copies (configs/h200/dense-1b.ini, 8 x 4096 tokens in one microbatch); also the bits of a
#               rank without a loop (PLAIN=off: not)
#   AXIS=tp     rows between tensor-parallel ranks (one of 8 ranks of a Llama shape of 70 B parameters, four layers, 8 microbatches
#               of 1 x 4096 tokens; hidden is whole, and so are the rows; heads, channels and vocabulary are those of one rank)
#   WAYS="none ep"  lines to print, by the names below;  CONFIG=FILE  BATCH=8  GBPS=400  STEPS=4  steps of each kind
#   SMS=124     multiprocessors for kernels that keep theirs (products of experts, attention), where overlapped;  OUT=folder  keeps the output of each run
braid=${1:-build/braid}
shift
axis=${AXIS:-ep} out=${OUT:-$(mktemp -d)} sms=${SMS:-0} steps=${STEPS:-4} batch=${BATCH:-8} micro=1 plain=off
declare -A options=([none]="--parallel.overlap=none" [dw]="--parallel.overlap=dw" [ep]="--parallel.overlap=ep --gpu.sms=$sms"
                    [ep-dw]="--parallel.overlap=ep --plan.delay_dw=on --gpu.sms=$sms" [ep-all]="--parallel.overlap=ep --plan.delay_dw=on"
                    [tp]="--parallel.overlap=tp --gpu.sms=$sms"
                    [zero1]="--parallel.zero=1" [zero2]="--parallel.zero=2" [zero3]="--parallel.zero=3")
case $axis in
    ep) model=("${CONFIG:-configs/h200/moe-3.6b.ini}") ways="none ep ep-dw" ;;
    dp) model=("${CONFIG:-configs/h200/dense-1b.ini}") ways="zero1 zero2 zero3" micro=$batch plain=on ;;
    tp)
        model=("${CONFIG:-configs/parallel/llama-70b.ini}") ways="none tp"
        [ -n "${CONFIG:-}" ] || model+=(--model.pattern='(*-)x4' --model.heads=8 --model.kv_heads=1 --model.ffn=3584 --model.vocab=16032)
        ;;
    *)
        echo "overlap.sh: AXIS is ep, dp or tp, not $axis"
        exit 2
        ;;
esac
common=(bench train "${model[@]}" --train.micro_batch="$micro" --train.global_batch="$batch" "$@")
loop=(--parallel.comm=loop --parallel.loop_axis="$axis" --parallel.loop_gbps="${GBPS:-400}" --exposed=on --steps="$steps")

one() { # name, options...
    "$braid" "${common[@]}" "${@:2}" >"$out/$1.txt" 2>&1 || { tail -n 3 "$out/$1.txt"; return 1; }
}
value() { awk -v key="$2:" '$1 == key { print $2 }' "$out/$1.txt"; }

failed=0
if [ "${PLAIN:-$plain}" = on ]; then # as many steps as --exposed takes: two to warm up and $steps of two kinds, twice
    one plain --steps=$((4 * steps + 2)) || failed=1
    same=$(value plain bits)
fi
printf '%-8s %10s %10s %11s %10s %8s  %s\n' schedule "link ms" "free ms" "exposed ms" "whole ms" hidden bits
for way in ${WAYS:-$ways}; do
    one "$way" "${loop[@]}" ${options[$way]} || { failed=1; continue; }
    bits=$(value "$way" bits)
    same=${same:-$bits}
    [ "$bits" = "$same" ] || failed=1
    printf '%-8s %10s %10s %11s %10s %7s%%  %s\n' "$way" "$(value "$way" link_ms)" "$(value "$way" free_ms)" "$(value "$way" exposed_ms)" \
        "$(value "$way" whole_ms)" "$(value "$way" hidden_percent)" "$bits"
done
[ $failed = 0 ] && echo "all bits are equal" || echo "NOT all bits are equal, or a run failed"
exit $failed
