#!/usr/bin/env bash
# Checkpoint folders in every layout of keys: a conversion loses nothing, and what is converted back is the same bits,
# moments of the optimizer included.
. "$(dirname "$0")/lib.sh"
convert() { "$BRAID" ckpt convert "$@"; }
sizes="--model.mamba_head_dim=16 --model.mamba_state=8 --model.gdn_key_dim=8 --model.gdn_value_dim=8 --model.experts=4
    --model.expert_ffn=8 --model.mla_kv_rank=8 --model.mla_nope=8 --model.mla_rope=4 --model.mla_v=8 --train.warmup=0"

round_trips() { # name pattern options...: all layouts, from each to each and home again
    local name=$1 pattern=$2 from to
    shift 2
    ok "$name: train" runs train $sizes --model.pattern="$pattern" --train.steps=2 --run.dir="$dir/home" "$@"
    for from in flat logical stacked indexed; do
        ok "$name: home to $from" runs convert "$dir/home" "$dir/$from" --layout=$from
        for to in flat logical stacked; do
            ok "$name: $from to $to" runs convert "$dir/$from" "$dir/$to-2" --layout=$to
            ok "$name: $to to logical" runs convert "$dir/$to-2" "$dir/named" --layout=logical
            ok "$name: experts together" runs convert "$dir/named" "$dir/back" --layout=grouped
            ok "$name: home, $from, $to, home: the same bits" same "$dir/home" "$dir/back"
            rm -rf "$dir/$to-2" "$dir/named" "$dir/back"
        done
        ok "$name: $from continues" runs train $sizes --model.pattern="$pattern" "$@" --train.steps=3 --run.dir="$dir/$from"
        [ "$from" = flat ] || ok "$name: as the flat one does" same_step "$dir/flat" "$dir/$from"
    done
    rm -rf "$dir"/home "$dir"/flat "$dir"/logical "$dir"/stacked "$dir"/indexed
}
same_step() { same "$1/checkpoints/step-00000003" "$2/checkpoints/step-00000003"; }

round_trips "dense" '[*-][*-]'
round_trips "every core" '[M*E]G[M-]' --model.tied=off
round_trips "latent attention, a depth" '[+-][+E]/+E' --model.tied=off
round_trips "groups of one" '[*][-]'
round_trips "biases, router state, a depth" '[*E][*E]/*E' --model.shared_ffn=8 --model.router_score=sigmoid --model.router_bias=on \
    --model.bias=on --model.expert_bias=on
round_trips "hyper-connections, two mixers in a group" '[G*-]M[GE]/G-' --model.mhc=on
round_trips "hyper-connections, two MLPs in a group" '[M+-E]' --model.mhc=on --model.mhc_profile=s
round_trips "two depths of three layers" 'M[*-][M*E]/M*-/M*-'

# ---- a Transformer's layout, where layers are not all alike ------------------------------------------------
ok "first layers dense" runs train $sizes --model.pattern='[+-][+E]/+E' --train.steps=1 --run.dir="$dir/ds"
ok "layers stay numbered, with a note" says 'note: layers stay numbered: layer 0 has no' convert "$dir/ds" "$dir/ds.safetensors" --layout=stacked
ok "by number" prints 'decoder.layers.1.mlp.experts.linear_fc1.weight ' "$BRAID" ckpt ls "$dir/ds.safetensors"
ok "latent attention of a depth has a Transformer's key" prints 'mtp.layers.0.transformer_layer.self_attention.linear_kv_down_proj.weight ' \
    "$BRAID" ckpt ls "$dir/ds.safetensors"
ok "and its norm" prints 'mtp.layers.0.transformer_layer.input_layernorm.weight ' "$BRAID" ckpt ls "$dir/ds.safetensors"
ok "it loads" runs train $sizes --model.pattern='[+-][+E]/+E' --train.steps=1 --run.load_weights="$dir/ds.safetensors"
ok "a depth that is none of a Transformer's" runs train $sizes --model.pattern='[*-]/M-' --train.steps=1 --run.dir="$dir/md"
ok "keeps its layers, with a note" says 'note: prediction depth 0 stays in numbered layers' convert "$dir/md" "$dir/md.safetensors" --layout=stacked
finish
