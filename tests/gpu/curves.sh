#!/usr/bin/env bash
# Loss curves on a GPU against the CPU's, and runs that must agree bit for bit. Needs a GPU.
#
#   BRAID=build/braid [MODELS_AT_ONCE=3] tests/gpu/curves.sh [MODEL...]
#
# For each small model: 50 steps on the CPU in fp32, on the GPU in fp32 (every loss within 1e-4 of the CPU's, relative) and
# in bf16 (within 1 %; mhc_wide has the width that Hopper's fused boundary wants), with experts the GPU runs replay the CPU's routes, since a near tie that falls differently sends a token
# elsewhere and the curves part from there; the bf16 run twice, and with plan.graphs=off: the same parameters bit for bit after 20 steps; a run
# resumed at step 10 gives the same bits; a GPU checkpoint goes on on the CPU. Prints "N passed, N failed" last.
set -u
braid=$(realpath -s "${BRAID:-build/braid}") # links as they are: gpu-set goes by its name
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Verdicts of a model go to its own file: models run side by side.
verdict() { # name ok?
    if [ "$2" = yes ]; then echo pass; else echo "not ok $1"; fi >>"$work/$name.verdicts"
}
# A text of its own: with some texts and this rate fp32 on the CPU moves by 1 % when the rate changes by 0.2 % (docs/LOG.md); with this one
# by 0.05 %.
cp tests/gpu/curves.txt "$work/text.txt"
common=(--data.train="$work/text.txt" --train.seq=64 --train.micro_batch=4 --train.global_batch=8 --train.lr=2e-3 --train.warmup=5
    --model.hidden=64 --model.heads=4 --model.kv_heads=2 --model.ffn=96 --train.log_every=1 --run.threads=4)
# name, then options
models=(
    "dense --model.pattern=*-*-"
    "dense_bias_dropout --model.pattern=*-*- --model.bias=on --model.dropout=0.1 --model.qk_norm=on"
    "fp32_residual --model.pattern=*-*-/*- --model.fp32_residual=on --model.dropout=0.1"
    "fp32_residual_layernorm --model.pattern=*-*- --model.fp32_residual=on --model.norm=layer --model.position=learned --model.max_position=64 --model.rope=none"
    "mamba --model.pattern=M-M* --model.mamba_heads=4 --model.mamba_head_dim=32 --model.mamba_state=16 --model.mamba_groups=2 --model.mamba_chunk=32"
    "gdn --model.pattern=G-G* --model.gdn_key_heads=2 --model.gdn_value_heads=4 --model.gdn_key_dim=16 --model.gdn_value_dim=32 --model.gdn_chunk=16"
    "mla --model.pattern=+-+- --model.mla_nope=16 --model.mla_rope=16 --model.mla_v=16 --model.mla_kv_rank=32"
    # All entries are read: a near tie that falls differently would select others, and the curves part from there. At 2e-3 differences grow
    # tenfold in five steps where the loss rises, on the CPU as well.
    "compressed --train.lr=1e-3 --model.pattern=W-C-H- --model.mla_q_rank=32 --model.mla_v=32 --model.mla_rope=16 --model.csa_window_size=16 --model.compress_rate_hca=16 --model.o_groups=2 --model.o_lora_rank=16 --model.dsa_indexer_n_heads=4 --model.dsa_indexer_head_dim=16 --model.dsa_indexer_topk=16"
    "moe_hash --model.pattern=*E*E --model.router_hash_layers=4 --model.experts=4 --model.topk=2 --model.expert_ffn=48 --model.aux_loss=0.01"
    "moe --model.pattern=*E*E --model.experts=4 --model.topk=2 --model.expert_ffn=48 --model.aux_loss=0.01"
    "mhc --model.pattern=*-M- --model.mhc_streams=4 --model.mamba_heads=4 --model.mamba_head_dim=32 --model.mamba_state=16 --model.mamba_groups=2 --model.mamba_chunk=32"
    "mhc_wide --model.pattern=*-*- --model.hidden=256 --model.ffn=256 --model.mhc_streams=4"
    "all --model.pattern=[M-][*E][G-][*E]/*E --model.experts=4 --model.topk=2 --model.expert_ffn=48 --model.aux_loss=0.01 --model.mhc_streams=2 --model.dropout=0.1 --plan.recompute=joint.* --model.mamba_heads=4 --model.mamba_head_dim=32 --model.mamba_state=16 --model.mamba_groups=2 --model.gdn_key_heads=2 --model.gdn_value_heads=4 --model.gdn_key_dim=16 --model.gdn_value_dim=32"
)
train() { # name steps options...
    local name=$1 steps=$2 option rest=()
    shift 2
    for option in "${common[@]}"; do # what the model says itself counts
        [[ " $* " == *" ${option%%=*}="* ]] || rest+=("$option")
    done
    "$braid" train "${rest[@]}" --train.steps="$steps" --run.dir="$work/$name" "$@" >"$work/$name.out" 2>&1 ||
        { echo "# $name:"; tail -n 3 "$work/$name.out"; return 1; }
}
losses() { sed -n 's/^{"step".*"loss":\([0-9.eE+-]*\).*/\1/p' "$work/$1"/metrics.jsonl; }
# Largest relative difference of two curves.
apart() {
    paste <(losses "$1") <(losses "$2") | awk '{d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > m) m = d; n++} END {print n ? m + 0 : 9}'
}
within() { awk -v a="$1" -v b="$2" 'BEGIN {exit !(a <= b)}' && echo yes || echo no; }
same_bits() { # runs: the newest checkpoint of each
    local a b
    a=$(cd "$work/$1" && find . -name '*.safetensors' -exec sha256sum {} + | sort)
    b=$(cd "$work/$2" && find . -name '*.safetensors' -exec sha256sum {} + | sort)
    [ -n "$a" ] && [ "$a" = "$b" ] && echo yes || echo no
}
check_model() { # name options
    local name=$1 options=$2 o record replay f32 b16 short ok
    read -ra o <<<"$options"
    record=() replay=()
    if [[ $options == *--model.experts=* && $options != *--model.router_hash_layers=* ]]; then
        record=(--train.record_routes="$work/$name.routes") replay=(--train.replay_routes="$work/$name.routes")
    fi
    train "$name.cpu" 50 "${o[@]}" "${record[@]}" --run.device=cpu
    train "$name.f32" 50 "${o[@]}" "${replay[@]}" --run.device=cuda --gpu.precision=fp32
    train "$name.b16" 50 "${o[@]}" "${replay[@]}" --run.device=cuda
    f32=$(apart "$name.cpu" "$name.f32") b16=$(apart "$name.cpu" "$name.b16")
    verdict "$name: fp32 follows the CPU to 1e-4 (apart $f32)" "$(within "$f32" 1e-4)"
    verdict "$name: bf16 stays within 1 % (apart $b16)" "$(within "$b16" 1e-2)"
    short=(--train.schedule=constant --run.device=cuda)
    train "$name.once" 20 "${o[@]}" "${short[@]}"
    train "$name.twice" 20 "${o[@]}" "${short[@]}"
    train "$name.eager" 20 "${o[@]}" "${short[@]}" --plan.graphs=off
    train "$name.resumed" 10 "${o[@]}" "${short[@]}"
    rm -rf "$work/$name.first" && cp -r "$work/$name.resumed" "$work/$name.first"
    train "$name.resumed" 20 "${o[@]}" "${short[@]}" --run.resume=must
    verdict "$name: the same run twice" "$(same_bits "$name.once" "$name.twice")"
    verdict "$name: captured graphs or not" "$(same_bits "$name.once" "$name.eager")"
    if [[ $options == *--model.mhc_streams=* ]]; then
        [[ $options == *--plan.recompute=* ]] || short+=('--plan.recompute=joint.*')
        train "$name.again" 20 "${o[@]}" "${short[@]}" --plan.recompute_block=2 --plan.delay_dw=on
        verdict "$name: recomputed by blocks, weight gradients delayed" "$(same_bits "$name.once" "$name.again")"
    fi
    rm -rf "$work/$name.resumed"/checkpoints/*10
    verdict "$name: resumed at step 10" "$(same_bits "$name.once" "$name.resumed")"
    train "$name.first" 20 "${o[@]}" --train.schedule=constant --run.device=cpu --run.resume=must
    verdict "$name: a GPU checkpoint goes on on the CPU" "$(within "$(apart "$name.once" "$name.first")" 1e-2)"
    "$braid" generate "$work/$name.once" --run.device=cuda --generate.tokens=16 >"$work/$name.text" 2>&1 && [ -s "$work/$name.text" ] && ok=yes || ok=no
    [ "$ok" = yes ] || tail -n 2 "$work/$name.text"
    verdict "$name: generates text on the GPU" "$ok"
    printf '%-20s fp32 %s  bf16 %s\n' "$name" "$f32" "$b16"
}
ran=()
for row in "${models[@]}"; do
    read -r name options <<<"$row"
    [ $# -gt 0 ] && [[ " $* " != *" $name "* ]] && continue
    while [ "$(jobs -rp | wc -l)" -ge "${MODELS_AT_ONCE:-3}" ]; do
        wait -n
    done
    ran+=("$work/$name.verdicts")
    check_model "$name" "$options" &
done
wait
passed=$(cat "${ran[@]}" | grep -c '^pass')
failed=$(cat "${ran[@]}" | grep -c '^not ok')
grep -h '^not ok' "${ran[@]}"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
