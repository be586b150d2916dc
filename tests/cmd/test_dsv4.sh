#!/usr/bin/env bash
# A model of the shape of DeepSeek-V4 (configs/dsv4-tiny.ini): it trains, is exported under the release's names, imported again, and
# refused by formats that have nothing for it.
. "$(dirname "$0")/lib.sh"

losses() { grep -oE '"loss":[0-9.eE+-]+' "$1/metrics.jsonl" | sed 's/.*://'; }
falls() { # run: the last loss is at least a nat below the first
    losses "$1" | awk 'NR == 1 { first = $1 } { last = $1 } END { print "  " first " to " last; exit !(NR > 5 && last < first - 1) }'
}

ok "it trains" runs "$BRAID" train "$root/configs/dsv4-tiny.ini" --data.train="$book" --run.threads=1 --run.quiet=on --run.tensorboard=off \
    --run.report=off --train.log_every=1 --train.eval_every=0 --run.dir="$dir/run"
ok "the loss falls" falls "$dir/run"
ok "indexers report what they keep" grep -q 'indexer recall' "$dir/run/metrics.jsonl"
ok "it writes text longer than the window" runs "$BRAID" generate "$dir/run" --generate.tokens=40 --generate.temperature=0 --generate.prompt="line 1: "

ok "ranks that share heads and sequences train the same model" prints 'TP2 x CP2 .*equal but for the order of sums' \
    "$BRAID" verify "$root/configs/dsv4-tiny.ini" --only='TP2 x CP2'
plan_on() { "$BRAID" plan "$root/configs/dsv4-tiny.ini" --run.device=cpu --train.global_batch=8 --parallel.ranks=4 "$@"; }
ok "groups of outputs that do not divide are refused" fails 2 'for example --parallel.tp=2; rule compressed-heads-over-ranks' plan_on --parallel.tp=4
ok "parts that cut an entry too" fails 2 'rule hca-parts-are-entries' plan_on --parallel.cp=4
ok "a part that is shorter than the window" fails 2 'rule window-within-parts' plan_on --parallel.cp=2 --model.csa_window_size=60
ok "meshes that are refused are skipped with the reason" prints 'TP4 .*skipped: parallel.tp divides compressed attention' \
    "$BRAID" plan "$root/configs/dsv4-tiny.ini" --train.global_batch=8 --predict=4:tp4,4:cp2

ok "export" prints '^exported as deepseek_v4' "$BRAID" export "$dir/run" "$dir/hf" --dtype=f32
ok "names are the release's" prints 'layers.1.attn.indexer.compressor.ape' "$BRAID" ckpt ls "$dir/hf/model.safetensors"
ok "tables are integers" prints 'layers.0.ffn.gate.tid2eid .*I64' "$BRAID" ckpt ls "$dir/hf/model.safetensors"
ok "import" runs "$BRAID" import "$dir/hf" "$dir/again"
ok "export of the import" runs "$BRAID" export "$dir/again" "$dir/hf2" --dtype=f32
ok "the same tensors" same "$dir/hf/model.safetensors" "$dir/hf2/model.safetensors"
ok "the same config" cmp "$dir/hf/config.json" "$dir/hf2/config.json"
ok "bf16 keeps what the release has in f32" prints 'layers.0.hc_attn_fn .*F32' sh -c "'$BRAID' export '$dir/run' '$dir/narrow' >/dev/null && '$BRAID' ckpt ls '$dir/narrow/model.safetensors'"

ok "a table in every layer but the prediction's" runs "$BRAID" train "$root/configs/dsv4-tiny.ini" --model.pattern='[WE]/WE' --data.train="$book" --train.steps=1 \
    --train.warmup=0 --run.threads=1 --run.quiet=on --run.tensorboard=off --run.report=off --run.dir="$dir/tables"
ok "is exported" prints '^exported as deepseek_v4' "$BRAID" export "$dir/tables" "$dir/tables-hf" --dtype=f32
ok "and imported" runs "$BRAID" import "$dir/tables-hf" "$dir/tables-again"

ok "no GGUF" fails 1 'braid writes no GGUF of a deepseek_v4 model' "$BRAID" export "$dir/run" "$dir/x.gguf" --format=gguf
ok "no FP8" fails 1 'a deepseek_v4 model is written in bf16 or f32 only' "$BRAID" export "$dir/run" "$dir/x" --dtype=fp8
ok "adapters train" runs "$BRAID" train "$root/configs/dsv4-tiny.ini" --lora.rank=2 --data.train="$book" --train.steps=1 --train.warmup=0 --run.threads=1 \
    --run.quiet=on --run.tensorboard=off --run.report=off --run.dir="$dir/lora"
ok "and are exported merged" runs "$BRAID" export "$dir/lora" "$dir/lora-hf" --dtype=f32
ok "not for PEFT, which has other names" fails 1 'a deepseek_v4 folder does not have' "$BRAID" export "$dir/lora" "$dir/x" --format=peft
ok "no rates that Megatron does not have" fails 1 'model.compress_rate_hca = 16' "$BRAID" export "$dir/run" "$dir/x" --format=megatron
ok "its rates are written" runs "$BRAID" train "$root/configs/dsv4-tiny.ini" --model.pattern='[WE][CE]' --data.train="$book" --train.steps=1 --train.warmup=0 \
    --run.threads=1 --run.quiet=on --run.tensorboard=off --run.report=off --run.dir="$dir/two"
ok "for Megatron" runs "$BRAID" export "$dir/two" "$dir/megatron" --format=megatron --dtype=f32
ok "with its arguments" grep -q '"csa_window_size": 16' "$dir/megatron/megatron.json"
ok "nothing is left beside" no_leftovers "$dir"

# ---- a table that names experts which do not exist ---------------------------------------------------------------------
cp -r "$dir/hf" "$dir/table"
file=$dir/table/model.safetensors
begins=$(head -c 65536 "$file" | grep -aoE '"layers.0.ffn.gate.tid2eid":\{[^}]*' | sed -E 's/.*"data_offsets":\[([0-9]+).*/\1/')
printf '\x08' | dd of="$file" bs=1 seek=$((8 + $(od -An -t u8 -N 8 "$file") + begins)) conv=notrunc 2>/dev/null
ok "an expert too many: the table is named" fails 1 "layers.0.ffn.gate.tid2eid' holds 8 at element 0, but only experts 0 to 7 exist" "$BRAID" import "$dir/table" "$dir/made"

# ---- what config.json says that braid cannot ------------------------------------------------------------------------
refused() { # what sed makes of config.json, and the field that is named
    rm -rf "$dir/bad"
    cp -r "$dir/hf" "$dir/bad"
    sed -i "$1" "$dir/bad/config.json"
    cmp -s "$dir/hf/config.json" "$dir/bad/config.json" && { echo "  nothing was changed by $1"; return 1; }
    fails 1 "$2" "$BRAID" import "$dir/bad" "$dir/made" && ! ls -d "$dir"/made* 2>/dev/null
}
ok "another router" refused 's/"sqrtsoftplus"/"softmax"/' 'scoring_func = "softmax"'
ok "another epsilon of hyper-connections" refused 's/"hc_eps": [0-9.e-]*/"hc_eps": 1e-5/' 'hc_eps = 1'
ok "another epsilon of norms" refused 's/"rms_norm_eps": [0-9.e-]*/"rms_norm_eps": 1e-5/' 'rms_norm_eps = 1'
ok "several key-value heads" refused 's/"num_key_value_heads": 1/"num_key_value_heads": 2/' 'num_key_value_heads = 2'
ok "two shared experts" refused 's/"n_shared_experts": 1/"n_shared_experts": 2/' 'n_shared_experts = 2'
ok "another kind of layer" refused '0,/"sliding_attention"/s//"full_attention"/' 'layer_types'
ok "hash layers behind others" refused 's/"hash_moe",/"moe",/; s/"moe"$/"hash_moe"/' 'mlp_layer_types'
ok "yarn that scales its rotation" refused 's/"attention_factor": 1.0/"attention_factor": 1.5/' 'attention_factor must be 1'
ok "rotary parameters that are none" refused 's/"rope_parameters": {/"rope_parameters": 3, "rope_other": {/' 'rope_parameters = 3'
ok "another activation" refused 's/"hidden_act": "silu"/"hidden_act": "gelu"/' 'hidden_act = "gelu"'
ok "another number of streams: the tensor is named" refused 's/"hc_mult": 4/"hc_mult": 2/' 'hc_'
finish
