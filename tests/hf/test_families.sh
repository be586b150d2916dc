#!/usr/bin/env bash
# Folders of Hugging Face models (tools/golden_hf.py made them with transformers): imported, they give transformers' logits and
# gradients; exported, they are the same bits under the same names; a folder that lies is refused and leaves nothing behind.
. "$(dirname "$0")/../cmd/lib.sh"
fixtures=$root/tests/hf/fixtures
variants=$root/tests/hf/variants

for folder in "$fixtures"/*/; do
    name=$(basename "$folder")
    family=$(sed -n 's/.*"model_type": "\([a-z0-9_]*\)".*/\1/p' "$folder/config.json")
    ok "$name: logits and gradients of transformers" prints '^verify: ' "$BRAID" import "$folder" "$dir/$name" --verify="$folder/golden.safetensors"
    ok "$name: export" prints '^exported as' "$BRAID" export "$dir/$name" "$dir/$name-hf" --dtype=f32 --family="$family"
    ok "$name: the same tensors" same "$folder/model.safetensors" "$dir/$name-hf/model.safetensors"
    ok "$name: import of the export" prints '^verify: ' "$BRAID" import "$dir/$name-hf" "$dir/$name-again" --verify="$folder/golden.safetensors"
    ok "$name: the same bits" same "$dir/$name" "$dir/$name-again"
done

# ---- folders that are only read: quantised weights, other names --------------------------------------------------
for folder in "$variants"/*/; do
    name=$(basename "$folder")
    ok "$name: logits and gradients of transformers" prints '^verify: ' "$BRAID" import "$folder" "$dir/$name" --verify="$folder/golden.safetensors"
done
ok "GPT-2 under the names of its base class: the same bits" same "$dir/gpt2" "$dir/gpt2_bare"

# ---- another program beside it: one that stands for Python with transformers -----------------------------------------
cat >"$dir/python" <<END
#!/bin/sh
# -c SCRIPT FOLDER OUT TOKENS
[ -f "\$3/config.json" ] && cp "$fixtures/gpt2/golden.safetensors" "\$4"
END
printf '#!/bin/sh\necho "line one" >&2; echo "No module named torch" >&2; exit 1\n' >"$dir/poor"
chmod +x "$dir/python" "$dir/poor"
ok "an import is compared with what a program says" prints '^verify: transformers: logits differ by' "$BRAID" import "$fixtures/gpt2" "$dir/asked" --verify="$dir/python"
cp -r "$fixtures/gpt2" "$dir/other-hf"
printf '\x40' | dd of="$dir/other-hf/model.safetensors" bs=1 seek=$(($(stat -c %s "$dir/other-hf/model.safetensors") - 1)) conv=notrunc 2>/dev/null
ok "another model is found out" fails 1 'differs from transformers by more than fp32 rounding' "$BRAID" import "$dir/other-hf" "$dir/other" --verify="$dir/python"
ok "an export is" prints 'KL .* (weights rounded to bf16)' "$BRAID" export "$dir/gpt2" "$dir/asked-hf" --verify="$dir/python"
ok "or with a stored file" prints '^verify: .*golden.safetensors: .*28 gradients' "$BRAID" export "$dir/gpt2" "$dir/stored-hf" --dtype=f32 --verify="$fixtures/gpt2/golden.safetensors"
ok "a program that cannot: its last words" fails 1 'could not run the model: No module named torch' "$BRAID" export "$dir/gpt2" "$dir/poor-hf" --verify="$dir/poor"
ok "a program that is not there" fails 1 'cannot run' "$BRAID" export "$dir/gpt2" "$dir/absent-hf" --verify="$dir/absent"
ok "nothing is left beside" no_leftovers "$dir"
ok "other formats are not verified" fails 2 'belongs to --format=hf' "$BRAID" export "$dir/gpt2" "$dir/x.gguf" --format=gguf --verify

# ---- what the model's longest sequence is for ----------------------------------------------------------------------
ok "train.seq is the model's longest sequence" grep -q '^seq = 24' "$dir"/gpt2/checkpoints/*/config.ini
ok "which is exported again" grep -q '"n_positions": 24' "$dir/gpt2-hf/config.json"
cp -r "$fixtures/llama" "$dir/dropped-hf"
sed -i 's/"attention_dropout": 0.0/"attention_dropout": 0.1/' "$dir/dropped-hf/config.json"
ok "dropout is left to the user, with a note" says 'attention_dropout: dropout is not imported' "$BRAID" import "$dir/dropped-hf" "$dir/dropped"
ok "a user's train.seq wins" runs "$BRAID" import "$fixtures/gpt2" "$dir/short" --train.seq=10
ok "and is kept" grep -q '^seq = 10' "$dir"/short/checkpoints/*/config.ini
ok "beyond learned positions it is refused" fails 2 'model.max_position' "$BRAID" import "$fixtures/gpt2" "$dir/none" --train.seq=25
ok "a model with learned positions" runs train --model.pattern='[*-]' --model.norm=layer --model.position=learned --model.max_position=40 --train.seq=32 \
    --train.steps=1 --train.warmup=0 --run.dir="$dir/learned"
ok "writes as far as they reach" runs "$BRAID" generate "$dir/learned" --generate.prompt=abc --generate.tokens=30
ok "and not beyond" fails 2 'the 40 positions that the model has learned' "$BRAID" generate "$dir/learned" --generate.prompt=abc --generate.tokens=100

# ---- pairs of layers without brackets ------------------------------------------------------------------------------
valid_loss() { "$BRAID" eval "$1" --data.valid="$book" --run.threads=1 2>/dev/null | grep '^loss'; }
same_loss() { [ -n "$(valid_loss "$1")" ] && [ "$(valid_loss "$1")" = "$(valid_loss "$2")" ]; }
ok "a model of pairs without brackets" runs train --model.pattern='*-*-' --train.steps=2 --train.warmup=0 --run.dir="$dir/pairs"
ok "is written as llama" prints 'exported as llama' "$BRAID" export "$dir/pairs" "$dir/pairs-hf" --dtype=f32
ok "with as many layers as pairs" grep -q '"num_hidden_layers": 2' "$dir/pairs-hf/config.json"
ok "which is read again" runs "$BRAID" import "$dir/pairs-hf" "$dir/pairs-again"
ok "as the same model" same_loss "$dir/pairs" "$dir/pairs-again"
ok "pairs and single layers" runs train --model.pattern='*-*' --train.steps=1 --train.warmup=0 --run.dir="$dir/odd"
ok "are still refused" fails 1 "layer 0 is '*'" "$BRAID" export "$dir/odd" "$dir/odd-hf" --family=llama

# ---- a vocabulary without an end of document ------------------------------------------------------------------------
has_text() { grep -qaF -- "$2" "$1"; }
ok "GGUF of a model of bytes" runs "$BRAID" export "$dir/pairs" "$dir/pairs.gguf" --format=gguf --dtype=f32
ok "names an end, since llama.cpp would stop at token 11 without one" has_text "$dir/pairs.gguf" tokenizer.ggml.eos_token_id

# ---- shards, bf16, the family by itself ------------------------------------------------------------------------
ok "a family is found" prints 'exported as llama' "$BRAID" export "$dir/llama" "$dir/found"
ok "in bf16" prints 'BF16' "$BRAID" ckpt ls "$dir/found/model.safetensors"
ok "bf16 imports" runs "$BRAID" import "$dir/found" "$dir/narrow"
ok "in blocks of FP8" prints 'exported as llama' "$BRAID" export "$dir/llama" "$dir/codes" --dtype=fp8
ok "as codes" prints 'down_proj.weight .*F8_E4M3' "$BRAID" ckpt ls "$dir/codes/model.safetensors"
ok "with scales" prints 'down_proj.weight_scale_inv .*F32' "$BRAID" ckpt ls "$dir/codes/model.safetensors"
ok "said in config.json" grep -q '"weight_block_size"' "$dir/codes/config.json"
ok "FP8 imports" runs "$BRAID" import "$dir/codes" "$dir/decoded"
ok "and is exported again" runs "$BRAID" export "$dir/decoded" "$dir/codes2" --dtype=fp8
ok "imported again" runs "$BRAID" import "$dir/codes2" "$dir/decoded2"
ok "with the same values" same "$dir/decoded" "$dir/decoded2"
ok "FP8 is for folders of Hugging Face" fails 2 'with --format=hf' "$BRAID" export "$dir/llama" "$dir/none" --format=megatron --dtype=fp8
ok "shards" runs "$BRAID" export "$dir/qwen3_next" "$dir/shards" --dtype=f32 --shard=20k
ok "are several" test "$(ls "$dir/shards"/model-*-of-*.safetensors | wc -l)" -gt 3
ok "with an index" grep -q '"weight_map"' "$dir/shards/model.safetensors.index.json"
ok "and import to the same bits" runs "$BRAID" import "$dir/shards" "$dir/unsharded"
ok "as one file does" same "$dir/qwen3_next" "$dir/unsharded"
ok "an export never replaces" fails 1 'exists' "$BRAID" export "$dir/llama" "$dir/found"
ok "what Megatron cannot say is refused" fails 1 'model.qk_norm = row' "$BRAID" export "$dir/olmoe" "$dir/none" --format=megatron
ok "what it can is written" runs "$BRAID" export "$dir/gpt2" "$dir/gpt2-megatron" --format=megatron --layout=stacked --dtype=f32
ok "with its names" grep -q '"learned_absolute"' "$dir/gpt2-megatron/megatron.json"
ok "and loads again" runs "$BRAID" grads --in="$fixtures/gpt2/golden.safetensors" --out="$dir/c.safetensors" --run.load_weights="$dir/gpt2-megatron/model.safetensors" \
    --model.pattern='[*-][*-]' --model.hidden=16 --model.heads=4 --model.ffn=64 --model.vocab=40 --model.norm=layer --model.position=learned \
    --model.max_position=24 --train.seq=24 --model.act=gelu --model.bias=on
ok "gradients of the import" runs "$BRAID" grads --in="$fixtures/gpt2/golden.safetensors" --ckpt="$dir/gpt2" --out="$dir/d.safetensors"
ok "are the same bits" same "$dir/c.safetensors" "$dir/d.safetensors"
ok "a model that no family has" runs train --model.pattern="[*-]" --model.mhc_streams=2 --train.steps=1 --train.warmup=0 --run.dir="$dir/mhc"
ok "is refused with the option" fails 1 'mhc_streams' "$BRAID" export "$dir/mhc" "$dir/none" --family=llama

# ---- on the fly ------------------------------------------------------------------------------------------------
grads() { "$BRAID" grads --in="$fixtures/qwen3/golden.safetensors" "$@"; }
options=(--model.pattern='[*-][*-]' --model.hidden=16 --model.heads=4 --model.kv_heads=2 --model.head_dim=8 --model.ffn=24 --model.vocab=40
    --model.tied=off --model.qk_norm=on --model.norm_eps=1e-6)
ok "gradients of the imported model" runs grads --ckpt="$dir/qwen3" --out="$dir/a.safetensors"
ok "gradients with run.load_weights" runs grads "${options[@]}" --run.load_weights="$fixtures/qwen3" --out="$dir/b.safetensors"
ok "are the same bits" same "$dir/a.safetensors" "$dir/b.safetensors"

# ---- training from a folder --------------------------------------------------------------------------------------
le() { # bytes value: little-endian
    local i v=$2
    for ((i = 0; i < $1; i++)); do
        printf "\\x$(printf %02x $((v & 255)))"
        v=$((v >> 8))
    done
}
{ # an llm.c shard of 600 tokens below 40
    le 4 20240520; le 4 1; le 4 600
    head -c 1012 /dev/zero
    for ((i = 0; i < 600; i++)); do le 2 $((i * i % 37)); done
} >"$dir/shard.bin"
tuned() { "$BRAID" train --data.train="$dir/shard.bin" --train.steps="${steps:-2}" --train.warmup=0 --train.seq=8 --train.micro_batch=2 --train.eval_every=0 \
    --run.threads=1 --run.quiet=on "$@"; }
ok "training from a folder" runs tuned --init="$fixtures/qwen3" --run.dir="$dir/from-folder"
ok "training from its import" runs tuned --run.load="$dir/qwen3" --run.dir="$dir/from-import"
ok "gives the same bits" same "$dir/from-folder" "$dir/from-import"
steps=3
ok "the run goes on under the same command" runs tuned --init="$fixtures/qwen3" --run.dir="$dir/from-folder"
steps=2
ok "a folder and data are all that training needs" runs "$BRAID" train --init="$fixtures/gpt2" --data.train="$dir/shard.bin" --train.steps=1 \
    --train.warmup=0 --run.threads=1 --run.quiet=on --run.dir="$dir/gpt2-run"
ok "sequences are as long as the model's" grep -q '^seq = 24' "$dir/gpt2-run/config.ini"
ok "an option against the folder is refused" fails 1 'model.hidden = 32 (command line), but' tuned --init="$fixtures/qwen3" --model.hidden=32

# ---- folders that lie --------------------------------------------------------------------------------------------
broken() { # name: a copy of a folder to be damaged
    rm -rf "$dir/bad"
    cp -r "$fixtures/$1" "$dir/bad"
}
refused() { # text: import says it, and leaves nothing
    fails 1 "$1" "$BRAID" import "$dir/bad" "$dir/made" && ! ls -d "$dir"/made* 2>/dev/null
}
broken llama
truncate -s -100 "$dir/bad/model.safetensors"
ok "a truncated file" refused 'model.safetensors'
broken llama
sed -i 's/"intermediate_size": 24/"intermediate_size": 32/' "$dir/bad/config.json"
ok "another width: the tensor is named" refused "mlp.gate_proj.weight' is F32 [24, 16], but config.json makes it F32 [32, 16]"
broken llama
sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 3/' "$dir/bad/config.json"
ok "a missing layer: the tensor is named" refused "no tensor 'model.layers.2."
broken llama
sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 1/' "$dir/bad/config.json"
ok "a layer too many: the tensor is named" refused "model.layers.1."
broken llama
sed -i 's/"hidden_act": "silu"/"hidden_act": "gelu"/' "$dir/bad/config.json"
ok "what cannot be expressed: the field is named" refused 'hidden_act = "gelu"'
broken llama
sed -i 's/"rope_type": "llama3"/"rope_type": "longrope"/' "$dir/bad/config.json"
ok "rotary scaling that braid has not: the field is named" refused 'rope_parameters'
broken llama
sed -i 's/"rope_type": "llama3"/"rope_type": 3/' "$dir/bad/config.json"
ok "a kind of rotary scaling that is no word" refused 'rope_parameters'
broken mistral
sed -i 's/"model_type"/"rope_scaling": "yarn", "model_type"/' "$dir/bad/config.json"
ok "rotary scaling that is no object" refused 'rope_scaling = "yarn": an object is expected'
broken deepseek_v4
sed -i 's/"compress": {/"compressed": {/' "$dir/bad/config.json"
ok "one rotary embedding where there are two" refused 'main and compress are expected'
for family in deepseek_v4 gpt_oss; do
    broken $family
    sed -i 's/"swiglu_limit": [0-9.]*/"swiglu_limit": 0.0/' "$dir/bad/config.json"
    grep -q swiglu_limit "$dir/bad/config.json" || sed -i 's/"model_type"/"swiglu_limit": 0.0, "model_type"/' "$dir/bad/config.json"
    ok "$family: a limit of 0, which transformers clamps at and braid does not" refused 'this family always limits its gates'
done
broken deepseek_v32
sed -i 's/"q_lora_rank": [0-9]*/"q_lora_rank": null/' "$dir/bad/config.json"
ok "deepseek_v32 without a latent of queries" refused 'q_lora_rank = null: this family always has a latent of queries'
ok "what the family with these layers cannot say is the only reason" fails 1 'hint: deepseek_v32: a deepseek_v32 model cannot say model.dsa_indexer_scoring_relu = off' \
    sh -c '"$0" train "$1" --data.train="$1" --train.steps=3 --run.quiet=on --model.dsa_indexer_scoring_relu=off --run.dir="$2/relu" >"$2/relu.log" 2>&1 && "$0" export "$2/relu" "$2/relu-hf"' \
    "$BRAID" "$root/configs/dsv32-tiny.ini" "$dir"
broken llama
sed -i 's/"model_type": "llama"/"model_type": "opt"/' "$dir/bad/config.json"
ok "an unknown family: those known are listed" refused "model_type 'opt'"
broken llama
echo '{' >"$dir/bad/config.json"
ok "a config that is no JSON" refused 'config.json'
broken llama
rm "$dir/bad/model.safetensors"
ok "no weights" refused 'no model*.safetensors'
shards() {
    rm -rf "$dir/bad"
    cp -r "$dir/shards" "$dir/bad"
    first=$(ls "$dir/bad"/model-00001-of-*) second=$(ls "$dir/bad"/model-00002-of-*)
}
shards
mv "$first" "$dir/exchanged"
mv "$second" "$first"
mv "$dir/exchanged" "$second"
ok "exchanged shards: a tensor and both files are named" refused "by the index, but model-0000"
shards
sed -i '0,/"lm_head.weight"/s//"lm_head.wight"/' "$dir/bad/model.safetensors.index.json"
ok "an index that lies: the tensor is named" refused "'lm_head.wight'"
shards
sed -i '/"lm_head.weight"/d' "$dir/bad/model.safetensors.index.json"
ok "a tensor beside the index is named" refused "'lm_head.weight' in model-"
shards
truncate -s -8 "$second"
ok "a truncated shard is named" refused 'model-00002-of-'
broken deepseek_v3_mtp
sed -i 's/"vocab_size": 40/"vocab_size": 40, "topk_method": "greedy"/' "$dir/bad/config.json"
ok "another way to choose experts: the field is named" refused 'topk_method'
broken gpt_oss
sed -i 's/"sliding_attention"/"chunked_attention"/' "$dir/bad/config.json"
ok "other layers: the field is named" refused 'layer_types'
broken gpt2
sed -i 's/"n_positions": 24/"n_positions": 23/' "$dir/bad/config.json"
ok "another number of positions: the tensor is named" refused "wpe.weight' is F32 [24, 16], but config.json makes it F32 [23, 16]"
shards
rm "$second"
ok "a missing shard: the tensor and its file are named" refused 'should be in model-00002-of-'

# ---- fields that change what a model computes, absent or unusual ---------------------------------------------------
changed() { # name sed-script: its config.json
    broken "$1"
    sed -i "$2" "$dir/bad/config.json"
}
gives() { # option = value: what an import of $dir/bad makes of it
    rm -rf "$dir/given"
    runs "$BRAID" import "$dir/bad" "$dir/given" && grep -q "^$1\$" "$dir"/given/checkpoints/*/config.ini
}
for name in mixtral olmoe gpt_oss bamba llama; do
    changed $name '/"rms_norm_eps"/d'
    rm -rf "$dir/given"
    ok "$name without rms_norm_eps has its class's" prints '^verify: ' "$BRAID" import "$dir/bad" "$dir/given" --verify="$fixtures/$name/golden.safetensors"
done
changed mistral '/"sliding_window"/d'
ok "Mistral slides where nothing is said" gives 'attn_window = 4096'
changed mistral 's/"sliding_window": 5/"sliding_window": null/'
ok "and does not where null is" gives 'attn_window = 0'
changed mistral 's/"sliding_window": 5/"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]/'
ok "or only some of its layers do" gives 'attn_window_skip = 2'
changed deepseek_v3 '/"routed_scaling_factor"/d'
ok "DeepSeek-V3 scales what its experts give" gives 'router_scale = 2.5'
changed deepseek_v3 '/"first_k_dense_replace"/d'
ok "and has three dense layers" refused 'model.layers.1.mlp.gate_proj.weight'
changed deepseek_v32 's/"first_k_dense_replace": 1/"first_k_dense_replace": 3/'
ok "V3.2 goes by the kinds of its layers, not by their number" gives 'pattern = \[D-\]\[DE\]'
changed deepseek_v32 's/"sparse"/"moe"/'
ok "which are two" refused 'dense or sparse is expected for every layer'
changed deepseek_v3 's/"num_experts_per_tok": 2/"num_experts_per_tok": 1/'
ok "one expert with the weight 1" refused 'num_experts_per_tok = 1'
changed deepseek_v3 's/"rope_interleave": true/"rope_interleave": null/'
ok "null is no switch" refused 'rope_interleave = null'
changed deepseek_v3 '/"mscale"/d'
ok "one mscale of two" refused 'only one is given'
changed qwen3 's/"vocab_size": 40/"vocab_size": 40, "partial_rotary_factor": 0.5/'
ok "parts of heads that the class would rotate whole" refused 'partial_rotary_factor = 0.5'
changed mixtral 's/"vocab_size": 40/"vocab_size": 40, "norm_topk_prob": false/'
ok "a router that the class does not have" refused 'norm_topk_prob = false'
changed gpt_oss '/"rope_parameters"/,/}/d'
ok "gpt-oss without rotary scaling" refused 'rope_parameters = (absent)'
changed mamba2 's/"layer_norm_epsilon": 1e-05/"layer_norm_epsilon": 1e-06/'
ok "another epsilon in Mamba-2 layers" refused 'layer_norm_epsilon = 1'
ok "a model that rotates half of each head" runs train --model.pattern='[*-]' --model.rope_percent=0.5 --train.steps=1 --train.warmup=0 --run.dir="$dir/half"
ok "is no llama" fails 1 'this family rotates whole heads' "$BRAID" export "$dir/half" "$dir/none" --family=llama

ok "a run whose embedding has rows that no text needs" runs train --train.steps=2 --train.warmup=0 --model.vocab=257 --model.vocab_multiple=8 --run.dir="$dir/rows"
ok "is exported with all of them" runs "$BRAID" export "$dir/rows" "$dir/rows-hf" --dtype=f32
ok "as a folder that is read again" prints '^imported llama' "$BRAID" import "$dir/rows-hf" "$dir/rows-again"
loss_of() { "$BRAID" eval "$1" --data.valid="$book" --train.seq=32 --train.micro_batch=2 --run.threads=1 | grep loss; }
ok "with the same loss" test "$(loss_of "$dir/rows")" = "$(loss_of "$dir/rows-again")"
ok "and for Megatron, which counts them, too" sh -c "'$BRAID' export '$dir/rows' '$dir/rows-m' --format=megatron >/dev/null && grep -q '\"padded_vocab_size\": 264' '$dir/rows-m/megatron.json'"
finish
