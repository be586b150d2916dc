#!/usr/bin/env bash
# Sparse attention (D) from the command line: its indexer learns and reports, short sequences are dense latent attention bit
# for bit, the dense warm-up trains nothing else, decoding with caches, what is refused.
. "$(dirname "$0")/lib.sh"

sizes=(--model.hidden=32 --model.heads=2 --model.ffn=48 --model.mla_kv_rank=16 --model.mla_nope=8 --model.mla_rope=4 --model.mla_v=8
    --train.seq=48 --train.micro_batch=2 --train.global_batch=2 --train.lr=5e-3 --train.warmup=0 --run.threads=1 --run.device=cpu
    --run.tensorboard=off --run.report=off --run.quiet=on --train.log_every=1 --train.eval_every=0 --data.train="$book")
sparse=("${sizes[@]}" --model.dsa_indexer_n_heads=2 --model.dsa_indexer_loss_coeff=1)
twelve=("${sparse[@]}" --model.pattern=D-D- --model.dsa_indexer_head_dim=8 --model.dsa_indexer_topk=12)

# The first and the last value of a metric.
ends() { grep -oE "\"$2\":[0-9.eE+-]+" "$1/metrics.jsonl" | sed 's/.*://' | sed -n '1p;$p' | tr '\n' ' '; }
between() { # low, value, high
    awk -v a="$1" -v x="$2" -v b="$3" 'BEGIN { exit !(x != "" && a < x && x <= b) }' || { echo "  $2 is not in ($1, $3]"; return 1; }
}
falls() { # run, metric: to 0.8 of its first value or less
    read -r first last <<<"$(ends "$1" "$2")"
    between 0 "$last" "$(awk -v a="$first" 'BEGIN { print 0.8 * a }')"
}

ok "a small model trains" runs "$BRAID" train "${twelve[@]}" --train.steps=60 --run.dir="$dir/sparse"
read -r first last <<<"$(ends "$dir/sparse" "indexer recall\/layer 2")"
ok "the share of attention that is kept is reported" between 0.2 "$last" 1
ok "it generates text longer than what is selected" runs "$BRAID" generate "$dir/sparse" --generate.tokens=40 --generate.temperature=0 --generate.prompt="line 1: "

# Keys of indexers are all that differs below topk tokens.
ok "latent attention trains" runs "$BRAID" train "${sizes[@]}" --model.pattern=+-+- --train.steps=3 --train.clip=0 --run.dir="$dir/dense"
ok "so does sparse attention with room for all keys" runs "$BRAID" train "${sparse[@]}" --model.pattern=D-D- --model.dsa_indexer_head_dim=8 --model.dsa_indexer_topk=48 --train.steps=3 --train.clip=0 --run.dir="$dir/room"
ok "their losses are the same" cmp <(losses "$dir/dense") <(losses "$dir/room")

ok "a dense warm-up trains" runs "$BRAID" train "${twelve[@]}" --train.steps=60 --run.load_weights="$dir/sparse" --model.dsa_dense_warmup=on --run.dir="$dir/warm"
ok "the loss of its indexers falls" falls "$dir/warm" "indexer loss\/layer 0"
ok "in each layer" falls "$dir/warm" "indexer loss\/layer 2"
try "$BRAID" ckpt diff "$dir/sparse" "$dir/warm"
ok "it changes indexers" grep -q 'indexer.linear_wk.weight' "$dir/out"
ok "and nothing else" test -z "$(grep -E '^ *(decoder|embedding|output)' "$dir/out" | grep -v indexer)"

ok "a run that warmed indexers up cannot go on to train the rest" fails 1 "word_embeddings.weight was frozen when" \
    "$BRAID" train --run.dir="$dir/warm" --train.steps=61 --model.dsa_dense_warmup=off --run.quiet=on
ok "nor the other way round" fails 1 "word_embeddings.weight was trained when" \
    "$BRAID" train --run.dir="$dir/sparse" --train.steps=61 --model.dsa_dense_warmup=on --run.quiet=on
ok "another run trains the rest from its weights" runs "$BRAID" train --run.load="$dir/warm" --run.dir="$dir/stage2" --data.train="$book" --train.steps=2 \
    --model.dsa_dense_warmup=off --run.quiet=on
first=(--model.dsa_dense_warmup=on --group.all.match='*' --group.all.freeze=off)
ok "where nothing is frozen a run has both stages" runs "$BRAID" train "${twelve[@]}" "${first[@]}" --train.steps=2 --run.dir="$dir/stages"
ok "one after the other" runs "$BRAID" train --run.dir="$dir/stages" --train.steps=4 --model.dsa_dense_warmup=off --run.quiet=on

ok "a model of the shape of DeepSeek-V3.2 trains" runs "$BRAID" train "$root/configs/dsv32-tiny.ini" --data.train="$book" --run.threads=1 --run.quiet=on \
    --run.tensorboard=off --run.report=off --run.dir="$dir/dsv32"
ok "and is exported" prints '^exported as deepseek_v32' "$BRAID" export "$dir/dsv32" "$dir/dsv32-hf" --dtype=f32

ok "shared keys across a pipeline cut are refused" fails 2 "D layer 2 shares the keys that D layer 1 selects" \
    "$BRAID" plan "${sparse[@]}" --model.pattern='D-|D-' --model.dsa_indexer_head_dim=8 --model.dsa_indexer_topk=12 --model.dsa_indexer_topk_freq=2 --parallel.pp=2 --parallel.ranks=2
ok "so is an indexer head narrower than its rotary channels" fails 2 "must be at least model.mla_rope" \
    "$BRAID" plan "${sparse[@]}" --model.pattern=D- --model.dsa_indexer_head_dim=2
ok "and dropout of attention weights" fails 2 "model.attention_dropout" "$BRAID" plan "${twelve[@]}" --model.attention_dropout=0.1
finish
