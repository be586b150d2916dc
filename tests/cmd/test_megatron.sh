#!/usr/bin/env bash
# From a run script of Megatron's to a model, and with its checkpoint to Megatron and back.
. "$(dirname "$0")/lib.sh"
ls_of() { "$BRAID" ckpt ls "$1"; }

# ---- a run script --------------------------------------------------------------------------------------------
gpt=(--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope --rotary-base 10000 --rotary-percent 1.0
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02 --use-mcore-models --attention-backend fused)
training=(--micro-batch-size 2 --global-batch-size 4 --train-samples 12 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --lr-warmup-samples 4 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16 --seed 5
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --sequence-parallel --cross-entropy-loss-fusion --manual-gc)
files=(--data-path "$book" --split 99,1,0 --num-workers 1 --data-cache-path "$dir/cache" --save-interval 10 --log-interval 1
    --eval-interval 100 --eval-iters 1 --ckpt-format torch_dist --log-throughput --tensorboard-dir "$dir/tb")
script() { "$BRAID" train "${gpt[@]}" "${training[@]}" "${files[@]}" --run.threads=1 "$@"; }
ok "a script of a GPT model runs" runs script --save "$dir/gpt" --load "$dir/gpt"
ok "it has the steps of its samples" test "$(steps_done "$dir/gpt")" -eq 3
ok "flags without effect are noted" grep -q 'note: --tensorboard-dir has no effect' "$dir/err"
ok "nothing was written there" test ! -e "$dir/tb" -a ! -e "$dir/cache"
ok "the warm-up is in steps" grep -q '^warmup = 1' "$dir/gpt/config.ini"
older=(--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 40 --normalization LayerNorm
    --position-embedding-type learned_absolute --openai-gelu --attention-dropout 0.1 --hidden-dropout 0.1)
ok "a script with LayerNorm and learned positions runs" runs "$BRAID" train "${older[@]}" "${training[@]}" "${files[@]}" --run.threads=1 --save "$dir/older"
ok "and has its positions" prints 'position_embeddings.weight  F32 .40, 32' ls_of "$dir"/older/checkpoints/step-*/model.safetensors
ok "and its biases of norms" prints 'linear_fc1.layer_norm_bias  F32 .32' ls_of "$dir"/older/checkpoints/step-*/model.safetensors
ok "another norm is refused" fails 2 'norms are RMSNorm' "$BRAID" train --normalization ScaleNorm
# shellcheck disable=SC2046 # words of options
ok "tensor parallelism runs" runs "$BRAID" train "${gpt[@]}" "${files[@]}" --run.threads=1 --save "$dir/tp" --parallel.ranks=2 \
    $(echo "${training[@]}" | sed 's/tensor-model-parallel-size 1/tensor-model-parallel-size 2/')
ok "with the losses of one rank" test "$(losses "$dir/tp" | cut -c1-6)" = "$(losses "$dir/gpt" | cut -c1-6)"
ok "tensor parallelism needs its ranks" fails 2 'start a multiple of 4 ranks' "$BRAID" train --tensor-model-parallel-size 4
ok "stages of unequal size" runs train --model.pattern='*-*-' --train.steps=3 --train.global_batch=4 --parallel.ranks=2 --parallel.pp=2 \
    --parallel.first_layers=1 --run.dir="$dir/uneven"
ok "of equal size" runs train --model.pattern='*-*-' --train.steps=3 --train.global_batch=4 --parallel.ranks=2 --parallel.pp=2 --run.dir="$dir/even"
ok "give the same losses" test "$(losses "$dir/uneven" | cut -c1-8)" = "$(losses "$dir/even" | cut -c1-8)"
ok "sizes beside cuts are refused" fails 2 "layer" train --model.pattern='*-|*-' --train.global_batch=4 --parallel.ranks=2 --parallel.pp=2 --parallel.first_layers=1

# ---- to Megatron and back -----------------------------------------------------------------------------------
sizes="--model.mamba_head_dim=16 --model.mamba_state=8 --model.gdn_key_dim=8 --model.gdn_value_dim=8 --model.experts=4
    --model.expert_ffn=8 --model.mla_kv_rank=8 --model.mla_nope=8 --model.mla_rope=4 --model.mla_v=8 --train.warmup=0 --train.steps=2"
there_and_back() { # name layout pattern options...
    local name=$1 layout=$2 pattern=$3
    shift 3
    rm -rf "$dir/home" "$dir/mega" "$dir/a" "$dir/b"
    ok "$name: train" runs train $sizes --model.pattern="$pattern" --run.dir="$dir/home" "$@"
    ok "$name: export" prints 'exported for Megatron' "$BRAID" export "$dir/home" "$dir/mega" --format=megatron $layout
    ok "$name: its tensors are whole" runs ls_of "$dir/mega/optimizer.safetensors"
    ok "$name: a step from the run" runs train $sizes --model.pattern="$pattern" "$@" --run.load_weights="$dir/home" --run.dir="$dir/a"
    ok "$name: a step from the export" runs train $sizes --model.pattern="$pattern" "$@" --run.load_weights="$dir/mega" --run.dir="$dir/b"
    ok "$name: the same bits" same "$dir/a" "$dir/b"
}
there_and_back "every core" "" '[M*E]G[M-]/*E' --model.tied=off
for key in decoder.layers.0.mixer.in_proj.weight.dt decoder.layers.0.mlp.experts.experts.linear_fc1.weight \
    decoder.layers.1.self_attention.in_proj.weight.beta decoder.final_layernorm.weight mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight; do
    ok "it has $key" prints "model  $key  BF16" ls_of "$dir/mega/model.safetensors"
done
ok "states stay in fp32" prints 'mixer.A_log  F32' ls_of "$dir/mega/model.safetensors"
ok "master weights are there" prints 'fp32_param.decoder.layers.0.mixer.in_proj.weight.z  F32' ls_of "$dir/mega/optimizer.safetensors"
ok "the arguments are there" grep -q '"hybrid_layer_pattern": "\[M\*E\]G\[M-\]/\*E"' "$dir/mega/megatron.json"
ok "prediction depths are counted" grep -q '"mtp_num_layers": 1' "$dir/mega/megatron.json"
ok "weights alone are rounded" runs train $sizes --model.pattern='[M*E]G[M-]/*E' --model.tied=off --run.load_weights="$dir/mega/model.safetensors" --run.dir="$dir/rounded"
ok "so a step from them differs" test "$("$BRAID" ckpt diff "$dir/a" "$dir/rounded" >/dev/null; echo $?)" -eq 1
there_and_back "a flat hybrid with hyper-connections" "" 'M*-E' --model.mhc=on
ok "its layers are inside them" prints 'decoder.layers.1.inner_layer.self_attention.linear_qkv.weight  BF16' ls_of "$dir/mega/model.safetensors"
ok "which have one name" prints 'decoder.layers.2.hyper_connection.alpha_pre  ' ls_of "$dir/mega/model.safetensors"
there_and_back "a GPT model" --layout=stacked '[*-][*-]'
ok "its layers are stacked" prints 'decoder.layers.mlp.linear_fc2.weight  BF16 \[2, ' ls_of "$dir/mega/model.safetensors"
there_and_back "latent attention, first layer dense" --layout=stacked '[+-][+E]/+E' --model.router_score=sigmoid --model.router_bias=on
ok "its depth is a Transformer's" prints 'mtp.layers.0.transformer_layer.self_attention.linear_kv_down_proj.weight  ' ls_of "$dir/mega/model.safetensors"
ok "the bias of routers stays in fp32" prints 'mlp.router.expert_bias  F32' ls_of "$dir/mega/model.safetensors"

ok "nothing is replaced" fails 1 'exists' "$BRAID" export "$dir/home" "$dir/mega" --format=megatron
ok "a layout of experts is none of Megatron's" fails 2 'flat, logical and stacked' "$BRAID" export "$dir/home" "$dir/x" --format=megatron --layout=indexed
ok "a layout belongs to it" fails 2 'belongs to --format=megatron' "$BRAID" export "$dir/home" "$dir/x" --layout=flat
ok "refusals left nothing" test ! -e "$dir/x"
head -c 700 "$dir/mega/model.safetensors" >"$dir/cut" && mv "$dir/cut" "$dir/mega/model.safetensors"
ok "a cut file is refused" fails 1 'model.safetensors' train $sizes --model.pattern='[+-][+E]/+E' --run.load_weights="$dir/mega"
ok "nothing half-written is left" no_leftovers "$dir"
finish
