#!/usr/bin/env bash
# Fine-tuning a tiny Llama with LoRA: PEFT's losses (stored; tools/parity_peft.py compares with PEFT itself), the base bit for bit
# afterwards, adapters and merged models exported, groups of parameters in an INI file, several ranks.
. "$(dirname "$0")/lib.sh"
base=$root/tests/hf/fixtures/llama

le() { # bytes value: little-endian
    local i v=$2
    for ((i = 0; i < $1; i++)); do
        printf "\\x$(printf %02x $((v & 255)))"
        v=$((v >> 8))
    done
}
{ # an llm.c shard: 16 samples of 8 tokens, and one more token
    le 4 20240520; le 4 1; le 4 129
    head -c 1012 /dev/zero
    for ((i = 0; i < 129; i++)); do le 2 $((i * i % 37)); done
} >"$dir/shard.bin"
# Every step sees all samples, so that their order does not matter.
tune() {
    "$BRAID" train --init="$base" --data.train="$dir/shard.bin" --train.steps="${steps:-20}" --train.seq=8 --train.micro_batch=4 --train.global_batch=16 \
        --train.schedule=constant --train.warmup=0 --train.lr=1e-2 --train.weight_decay=0.1 --train.clip=1 --train.eval_every=0 --train.log_every=1 \
        --run.quiet=on --run.threads=1 --lora.rank=4 --lora.alpha=8 "$@"
}
losses() { sed -n 's/.*"loss":\([0-9.eE+-]*\).*/\1/p' "$1/metrics.jsonl"; }
near() { # run, losses...: within 1e-4 of each other, and as many
    local run=$1
    shift
    paste <(losses "$run") <(printf '%s\n' "$@") | awk -v n=$# '{ d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || d > 1e-4) bad++; rows++ }
        END { if (bad || rows != n) { print "  " bad + 0 " of " rows " losses differ"; exit 1 } }'
}

# ---- PEFT's losses: tools/parity_peft.py --golden ------------------------------------------------------------------
ok "20 steps" runs tune --run.dir="$dir/all"
ok "have PEFT's losses" near "$dir/all" 3.948909 3.816292 3.677924 3.543323 3.417582 3.304805 3.205348 3.121298 3.047494 2.976473 \
    2.908521 2.842224 2.782983 2.724338 2.659217 2.595320 2.531447 2.467067 2.405914 2.341785
ok "the base is imported" runs "$BRAID" import "$base" "$dir/base"
try "$BRAID" ckpt diff "$dir/base" "$dir/all"
ok "frozen tensors are the base's, bit for bit" test "$(grep '^model ' "$dir/out" | grep -vc 'adapter.*: only in B')" = 0
ok "and there are adapters" test "$(grep -c '^model .*adapter.*: only in B' "$dir/out")" = 28
ok "moments are those of adapters" test "$("$BRAID" ckpt ls "$dir/all" | grep -c 'exp_avg\.' )" = 0 -o \
    "$("$BRAID" ckpt ls "$dir/all"/checkpoints/step-* | grep 'exp_avg\.' | grep -vc adapter)" = 0

# ---- what follows --------------------------------------------------------------------------------------------------
steps=10
ok "half of it" runs tune --run.dir="$dir/half"
steps=20
ok "goes on" runs tune --run.dir="$dir/half"
ok "to the same bits" same "$dir/all" "$dir/half"
ok "on two ranks" runs tune --run.dir="$dir/ranks" --parallel.ranks=2
ok "the losses are those of one" near "$dir/ranks" $(losses "$dir/all")
ok "on two stages" runs tune --run.dir="$dir/stages" --parallel.ranks=2 --parallel.pp=2
ok "the losses are those of one rank" near "$dir/stages" $(losses "$dir/all")
ok "everything recomputed" runs tune --run.dir="$dir/again" --plan.recompute=full
ok "gives the same bits" same "$dir/all" "$dir/again"
ok "other adapters on resume are refused" fails 1 'lora.targets is q_proj' tune --run.dir="$dir/all" --lora.targets=q_proj
ok "start from an imported base" runs "$BRAID" train --run.load="$dir/base" --data.train="$dir/shard.bin" --train.steps=2 --train.seq=8 --train.warmup=0 \
    --train.eval_every=0 --run.quiet=on --lora.rank=2 --lora.targets=q_proj,v_proj --run.dir="$dir/loaded"
ok "adapters of q and v alone" test "$("$BRAID" ckpt ls "$dir/loaded"/checkpoints/step-* | grep -c ' exp_avg\.\|^exp_avg\.\|exp_avg\.decoder')" = 8

# ---- exports -------------------------------------------------------------------------------------------------------
ok "for PEFT" prints '^exported for PEFT' "$BRAID" export "$dir/all" "$dir/peft" --format=peft --base=tiny-llama
ok "with its names" prints 'base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight' "$BRAID" ckpt ls "$dir/peft/adapter_model.safetensors"
ok "and its config" grep -q '"base_model_name_or_path": "tiny-llama"' "$dir/peft/adapter_config.json"
ok "a second time is refused" fails 1 'exists' "$BRAID" export "$dir/all" "$dir/peft" --format=peft
ok "merged" prints '^merged' "$BRAID" ckpt merge "$dir/all" "$dir/merged"
ok "the merged model as a folder" runs "$BRAID" export "$dir/merged" "$dir/hf-a" --dtype=f32
ok "the adapted one as a folder" runs "$BRAID" export "$dir/all" "$dir/hf-b" --dtype=f32
ok "are the same" same "$dir/hf-a/model.safetensors" "$dir/hf-b/model.safetensors"
eval_loss() { "$BRAID" eval "$1" --data.valid="$dir/shard.bin" --train.eval_batches=4 --run.threads=1 2>/dev/null | sed -n 's/^loss: //p'; }
ok "evaluation reads both" awk -v a="$(eval_loss "$dir/all")" -v b="$(eval_loss "$dir/merged")" 'BEGIN { d = a - b; exit !(a > 1 && d < 1e-4 && d > -1e-4) }'
ok "Megatron has no place for adapters" fails 1 'ckpt merge' "$BRAID" export "$dir/all" "$dir/no" --format=megatron
ok "a model without adapters has none to merge" fails 1 'nothing to merge' "$BRAID" ckpt merge "$dir/merged" "$dir/no"
ok "nor to export" fails 1 'no LoRA adapters' "$BRAID" export "$dir/merged" "$dir/no" --format=peft
ok "nothing was left behind" test ! -e "$dir/no"

# ---- groups in a file ----------------------------------------------------------------------------------------------
cat >"$dir/groups.ini" <<'INI'
[group.base]
match = *
freeze = on

[group.end]
match = output_layer.*, decoder.layers.1.mlp.*
lr = 0.5
weight_decay = 0
INI
run_groups() {
    "$BRAID" train "$dir/groups.ini" --init="$base" --data.train="$dir/shard.bin" --train.steps=2 --train.seq=8 --train.warmup=0 --train.eval_every=0 \
        --run.threads=1 "$@"
}
ok "groups are printed at the start" says 'end: learning rate x 0.5, weight decay 0, 4 tensors' run_groups --run.dir="$dir/groups"
ok "with what is frozen" grep -q 'base: frozen, .*decoder.layers.\*.self_attention.linear_qkv.weight x2' "$dir/err"
try "$BRAID" ckpt diff "$dir/base" "$dir/groups"
ok "frozen tensors keep their bits" test "$(grep '^model ' "$dir/out" | grep -vc 'output_layer\|layers.1.mlp')" = 0
ok "the others change" test "$(grep -c '^model .*differ' "$dir/out")" = 4
ok "the plan says what is not held" prints 'frozen: .* gradients, moments' "$BRAID" plan "$dir/groups.ini" --model.tied=off --model.pattern='[*-][*-]'
ok "a resumed run takes the groups of its checkpoint" runs "$BRAID" train --data.train="$dir/shard.bin" --train.steps=3 --run.dir="$dir/groups" --run.quiet=on
ok "and refuses others" fails 1 'group x' "$BRAID" train --data.train="$dir/shard.bin" --train.steps=4 --run.dir="$dir/groups" --group.x.match='*'
finish
