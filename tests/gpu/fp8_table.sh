#!/usr/bin/env bash
# FP8 on one Hopper GPU in one call of about five minutes: the new kernels are checked (also under compute-sanitizer), then whole steps, experts and quantisers
# are timed one after the other. Prints a table of what docs/FP8.md and docs/SPEED.md state, each row with its bar.
#
#   [TOOLS="memcheck ..."] [CHECKS=no] tests/gpu/fp8_table.sh [BUILD]      TOOLS: of compute-sanitizer, all four by default; CHECKS=no: times alone
#
# PEER=path/to/train_peer.py (and PEERS, the folder with torchao) also times PyTorch with torchao's tensorwise FP8: its kernels are compiled during the checks, so that
# its timed run finds them in the cache (TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR, where they are set).
set -u
cd "$(dirname "$0")/../.." || exit 1
build=${1:-build}
braid=$build/braid
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$out/inductor} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/triton}
dense='*-*-*-*-*-*-*-*-*-*-*-*-*-*-*-*-'
failed=0
say() { printf '%s\n' "# $* (after $SECONDS s)"; }

peer=
if [ -n "${PEER-}" ]; then
    python3 "$PEER" "$dense" --fp8 tensorwise --steps 1 >"$out/peer.warm" 2>&1 &
    peer=$!
fi

check_kernels() {
    local p line tool
    say checks
    for p in "check_f8 200000" "bench_experts8 check" check_attention "check_ops --op=norm8" "check_ops --op=addnorm_fwd" "check_ops --op=adamw" "check_ops --op=attention_bwd"; do
        # shellcheck disable=SC2086 # a program and its arguments
        line=$("$build"/tests/gpu/$p 2>&1 | tee "$out/log" | grep -E '^[0-9]+ passed' | tail -n 1)
        grep '^not ok' "$out/log"
        echo "$p: ${line:-no result}"
        case $line in *' 0 failed') ;; *) failed=1 ;; esac
    done
    if command -v compute-sanitizer >/dev/null; then
        for tool in ${TOOLS-memcheck racecheck initcheck synccheck}; do
            for p in "check_f8 500" "check_ops --op=norm8 --sms=2"; do
                # shellcheck disable=SC2086
                timeout 60 compute-sanitizer --tool $tool "$build"/tests/gpu/$p >"$out/log" 2>&1
                echo "$tool $p: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/log" | tail -n 1)"
            done
        done
    fi
}
[ "${CHECKS-yes}" = no ] || check_kernels
[ -z "$peer" ] || { wait "$peer"; say "the peer has compiled: $(grep RESULT "$out/peer.warm" || tail -n 1 "$out/peer.warm")"; }

# Milliseconds a step and GiB of `braid bench train`.
step() { # name bar options...
    local name=$1 bar=$2 log ms gib
    shift 2
    log=$("$braid" bench train "$@" --steps=10 2>&1) || failed=1
    ms=$(sed -nE 's/^ms_per_step: ([0-9.]+).*/\1 ms/p' <<<"$log")
    gib=$(sed -nE 's/^memory_gib: ([0-9.]+).*/\1 GiB/p' <<<"$log")
    printf '%-44s %-12s %-12s bar %s  %s\n' "$name" "${ms:-failed}" "${gib:-}" "$bar" "$(grep -oE '^bits: [0-9a-f]+' <<<"$log")"
}
say "whole steps"
fp8="--gpu.precision=fp8 --plan.recompute="
# shellcheck disable=SC2086 # options
{
    step "dense-1b, bf16" - configs/h200/dense-1b.ini
    step "dense-1b, FP8" "158 ms, 32 GiB" configs/h200/dense-1b.ini $fp8
    step "dense-1b, FP8, --fast" "152 ms" configs/h200/dense-1b.ini $fp8 --fast
    step "dense-1b, FP8, mlp.act recomputed" "30 GiB" configs/h200/dense-1b.ini --gpu.precision=fp8 --plan.recompute=mlp.act
    step "dense-1b, FP8, again" "158 ms, 32 GiB" configs/h200/dense-1b.ini $fp8
    step "dense-1b-mhc, FP8" "174 ms" configs/h200/dense-1b-mhc.ini $fp8
    step "hybrid-2.8b, FP8" "137 ms" configs/h200/hybrid-2.8b.ini --gpu.precision=fp8
    step "moe-3.6b, FP8" "145 ms" configs/h200/moe-3.6b.ini --gpu.precision=fp8
}
say "where a step of dense-1b in FP8 goes: before, AdamW took 7.9 ms and codes of weights 1.5"
# shellcheck disable=SC2086
"$braid" bench train configs/h200/dense-1b.ini $fp8 --steps=4 --profile=on 2>&1 | head -n 40
if [ -n "$peer" ]; then
    timeout 100 python3 "$PEER" "$dense" --fp8 tensorwise 2>&1 | grep -E 'RESULT|Error' || { echo "the peer failed"; failed=1; }
fi
say experts
"$build"/tests/gpu/bench_experts8 time 20 || failed=1
echo "bars, TFLOP/s forward / backward: OLMoE 780 / 700, Qwen3-30B 700 / 620, DSv3 950 / 820"
say quantisers
"$build"/tests/gpu/bench_quantise 20 || failed=1
"$braid" bench quantise,act8_fwd,act8_bwd,norm8,adamw,addnorm_fwd --run.device=cuda || failed=1
echo "bar: 90 % of the copy rate"
say "end"
exit $failed
