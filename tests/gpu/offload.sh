#!/usr/bin/env bash
# Activations and optimizer state in host memory change nothing: losses, norms and parameters of 20 steps have the same bits with and
# without, for every kind of layer, hyper-connections of both profiles with 2 and 4 streams, recomputed blocks and multi-token prediction.
#
#   [BRAID=build/braid] [AT_ONCE=4] [OPTIONS="--run.device=cuda"] tests/gpu/offload.sh [MODEL...]
#
# Small models, AT_ONCE of them side by side. OPTIONS go to every command; --run.device=cpu runs it without a GPU. The last line is "N passed, N
# failed".
set -u
braid=$(realpath -s "${BRAID:-build/braid}")
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp tests/gpu/curves.txt "$work/text.txt"
read -ra options <<<"${OPTIONS:---run.device=cuda}"
common=(--data.train="$work/text.txt" --train.seq=64 --train.micro_batch=2 --train.global_batch=4 --train.lr=2e-3 --train.warmup=5
    --model.hidden=64 --model.heads=4 --model.kv_heads=2 --model.ffn=96 --model.vocab=256 --model.mtp_scale=0.3 --run.threads=2
    --model.experts=4 --model.topk=2 --model.expert_ffn=48 --model.mamba_heads=4 --model.mamba_head_dim=32 --model.mamba_state=16
    --model.mamba_groups=2 --model.gdn_key_heads=2 --model.gdn_value_heads=4 --model.gdn_key_dim=16 --model.gdn_value_dim=32
    --model.mla_nope=16 --model.mla_rope=16 --model.mla_v=16 --model.mla_kv_rank=32)
# name, then options
models=(
    "attention --model.pattern=*-*-*-"
    "mamba --model.pattern=M-M-M*"
    "gdn --model.pattern=G-G-G*"
    "mla --model.pattern=+-+-"
    "experts --model.pattern=*E*E*E --model.aux_loss=0.01"
    "mtp --model.pattern=*-*-/*-/*-"
    "groups --model.pattern=[*-][M-][*E] --model.dropout=0.1"
    "mhc_d_2 --model.pattern=*-*-M- --model.mhc_streams=2"
    "mhc_d_4 --model.pattern=*-*-M- --model.mhc_streams=4"
    "mhc_s_2 --model.pattern=*-*-G- --model.mhc_streams=2 --model.mhc_profile=s"
    "mhc_s_4 --model.pattern=*-*-*E --model.mhc_streams=4 --model.mhc_profile=s"
    "mhc_blocks --model.pattern=*-*-*-*- --model.mhc_streams=4 --plan.recompute_block=2"
    "mhc_mtp --model.pattern=*-*-/*- --model.mhc_streams=4 --plan.recompute=norm"
)
# Settings that must agree with the first of their line.
settings=(
    "|--plan.offload=* --plan.offload_min=0|--optim.offload=all|--optim.offload=all --optim.overlap=off|--optim.offload=moments --plan.offload=* --plan.offload_min=0"
    "--optim.state=bf16|--optim.state=bf16 --optim.offload=all"
)
bits() { # log options...
    timeout 300 "$braid" bench train --steps=18 --bits=on "${common[@]}" "${options[@]}" "${@:2}" >"$1" 2>&1 # and two to warm up
    sed -nE 's/^bits: ([0-9a-f]+).*/\1/p' "$1"
}
one_model() { # name options...
    local name=$1 line first got setting words
    local -a list
    for line in "${settings[@]}"; do
        IFS='|' read -ra list <<<"$line"
        first=
        for setting in "${list[@]}"; do
            read -ra words <<<"$setting"
            got=$(bits "$work/log.$name" "${@:2}" "${words[@]}")
            if [ -z "$first" ]; then
                first=$got
                [ -n "$got" ] || echo "not ok $name: $(grep -m1 error "$work/log.$name")" >>"$work/verdicts.$name"
            elif [ "$got" = "$first" ]; then
                echo pass >>"$work/verdicts.$name"
            else
                echo "not ok $name: $setting gives ${got:-$(grep -m1 error "$work/log.$name")} instead of $first" >>"$work/verdicts.$name"
            fi
        done
    done
    echo "$name done after $SECONDS s"
}
set -f
for line in "${models[@]}"; do
    read -ra words <<<"$line"
    [ $# -eq 0 ] || [[ " $* " == *" ${words[0]} "* ]] || continue
    while [ "$(jobs -rp | wc -l)" -ge "${AT_ONCE:-4}" ]; do
        wait -n
    done
    one_model "${words[@]}" &
done
wait
set +f
cat "$work"/verdicts.* >"$work/all" 2>/dev/null
grep '^not ok' "$work/all"
passed=$(grep -c '^pass' "$work/all") failed=$(grep -c '^not ok' "$work/all")
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
