#!/usr/bin/env bash
# Weights from files whose keys have another layout: one step after loading is the same bits.
. "$(dirname "$0")/lib.sh"
convert() { "$BRAID" ckpt convert "$@"; }
step() { train --train.steps=1 --train.warmup=0 "$@"; } # one step from given weights

# ---- layers: flat, logical, stacked ----------------------------------------------------------------
ok "a run to load from" runs train --train.steps=3 --run.dir="$dir/flat"
weights=$dir/flat/checkpoints/step-00000003/model.safetensors
ok "one step from its weights" runs step --run.load_weights="$dir/flat" --run.dir="$dir/want"
ok "begins at step 0" grep -q '^{"step":1,' "$dir/want/metrics.jsonl"
ok "and moves them" test "$("$BRAID" ckpt diff "$weights" "$dir/want/checkpoints/step-00000001/model.safetensors" >/dev/null; echo $?)" -eq 1
ok "a checkpoint folder will do" runs step --run.load_weights="$(dirname "$weights")" --run.dir="$dir/folder"
ok "with the same bits" same "$dir/want" "$dir/folder"
ok "a bare file will do" runs step --run.load_weights="$weights" --run.dir="$dir/bare"
ok "with the same bits as the run" same "$dir/want" "$dir/bare"
for layout in logical stacked; do
    ok "$layout: convert" prints 'tensors' convert "$dir/flat" "$dir/$layout.safetensors" --layout=$layout
    ok "$layout: load and step" runs step --run.load_weights="$dir/$layout.safetensors" --run.dir="$dir/from-$layout"
    ok "$layout: the same bits" same "$dir/want" "$dir/from-$layout"
    ok "$layout: back to flat" runs convert "$dir/$layout.safetensors" "$dir/$layout-back.safetensors" --layout=flat
    ok "$layout: is what it was" same "$weights" "$dir/$layout-back.safetensors"
    ok "$layout: load and step as a grouped model" runs step --model.pattern='[*-][*-]' \
        --run.load_weights="$dir/$layout.safetensors" --run.dir="$dir/grouped-$layout"
    ok "$layout: under flat keys" runs convert "$dir/grouped-$layout" "$dir/grouped-$layout-flat" --layout=flat
    ok "$layout: the same bits, moments included" same "$dir/want" "$dir/grouped-$layout-flat"
done
ok "a hybrid's step" runs step --model.pattern='[*-][*-]' --run.load_weights="$dir/flat" --run.dir="$dir/grouped"
ok "back into a flat model" runs step --run.load_weights="$dir/grouped" --run.dir="$dir/again"
ok "is two steps" runs step --run.load_weights="$dir/want" --run.dir="$dir/twice"
ok "of the same bits" same "$dir/twice" "$dir/again"

# ---- a whole checkpoint: moments and counters go with it ----------------------------------------------
ok "the checkpoint as stacked" runs convert "$dir/flat" "$dir/stacked" --layout=stacked
ok "is whole" prints 'ok, step 3' "$BRAID" ckpt verify "$dir/stacked"
ok "it holds stacked moments" prints 'optim  exp_avg.decoder.layers.mlp.linear_fc1.weight ' "$BRAID" ckpt ls "$dir/stacked/checkpoints/step-00000003"
ok "continues" says 'at step 3' train --train.steps=5 --run.dir="$dir/stacked"
ok "as the run itself" says 'at step 3' train --train.steps=5 --run.dir="$dir/flat"
ok "to the same bits" same "$dir/flat" "$dir/stacked"

# ---- experts ---------------------------------------------------------------------------------------------
mix="--model.pattern=*E*E --model.expert_ffn=16"
moe="$mix --model.experts=4"
ok "a mixture of experts" runs train $moe --train.steps=3 --run.dir="$dir/moe"
ok "experts: one step" runs step $moe --run.load_weights="$dir/moe" --run.dir="$dir/moe-want"
ok "experts: one tensor each" runs convert "$dir/moe" "$dir/indexed.safetensors" --layout=indexed
ok "experts: named by number" prints 'mlp.experts.linear_fc2.weight3 ' "$BRAID" ckpt ls "$dir/indexed.safetensors"
ok "experts: load and step" runs step $moe --run.load_weights="$dir/indexed.safetensors" --run.dir="$dir/moe-indexed"
ok "experts: the same bits" same "$dir/moe-want" "$dir/moe-indexed"
ok "experts: one tensor for all again" runs convert "$dir/indexed.safetensors" "$dir/grouped.safetensors" --layout=grouped
ok "experts: is what it was" same "$dir/moe/checkpoints/step-00000003/model.safetensors" "$dir/grouped.safetensors"
ok "experts: stacked" runs convert "$dir/indexed.safetensors" "$dir/both.safetensors" --layout=stacked
ok "experts: stacked and single, load and step" runs step $moe --run.load_weights="$dir/both.safetensors" --run.dir="$dir/moe-both"
ok "experts: the same bits, too" same "$dir/moe-want" "$dir/moe-both"
ok "experts: another number is refused" fails 1 'mlp.router.weight of the model needs F32 [8, 32]' \
    step $mix --model.experts=8 --run.load_weights="$dir/indexed.safetensors"

# ---- gate and up rows in blocks ------------------------------------------------------------------------------
blocks="$moe --model.glu_interleave=4"
moe_weights=$dir/moe/checkpoints/step-00000003/model.safetensors
ok "blocks: a model that has them loads halves" runs step $blocks --run.load_weights="$dir/moe" --run.dir="$dir/blocks"
ok "blocks: the same first loss" test "$(grep -o '"loss":[^,]*' "$dir/moe-want/metrics.jsonl")" = "$(grep -o '"loss":[^,]*' "$dir/blocks/metrics.jsonl")"
ok "blocks: into a file" runs convert "$dir/moe" "$dir/blocks.safetensors" --layout=grouped --glu-interleave=4
ok "blocks: they are there" test "$("$BRAID" ckpt diff "$moe_weights" "$dir/blocks.safetensors" >/dev/null; echo $?)" -eq 1
ok "blocks: load and step" runs step $moe --run.load_weights="$dir/blocks.safetensors" --run.dir="$dir/moe-blocks"
ok "blocks: the same bits" same "$dir/moe-want" "$dir/moe-blocks"
ok "blocks: load and step in blocks" runs step $blocks --run.load_weights="$dir/blocks.safetensors" --run.dir="$dir/blocks-blocks"
ok "blocks: the same bits in blocks" same "$dir/blocks" "$dir/blocks-blocks"
ok "blocks: of single experts, other size" runs convert "$dir/blocks.safetensors" "$dir/blocks2.safetensors" --layout=indexed --glu-interleave=2
ok "blocks: back to halves" runs convert "$dir/blocks2.safetensors" "$dir/halves.safetensors" --layout=grouped --glu-interleave=0
ok "blocks: are what they were" same "$moe_weights" "$dir/halves.safetensors"
ok "blocks: kept unless asked" runs convert "$dir/blocks.safetensors" "$dir/kept.safetensors" --layout=grouped
ok "blocks: are kept" same "$dir/blocks.safetensors" "$dir/kept.safetensors"
ok "blocks: a foreign file does not say" runs convert "$moe_weights" "$dir/foreign.safetensors" --layout=grouped --from-interleave=4 --glu-interleave=4
ok "blocks: so they stay" same "$moe_weights" "$dir/foreign.safetensors"
ok "blocks: two that do not agree" fails 1 'says itself' convert "$dir/blocks.safetensors" "$dir/y.safetensors" --layout=grouped --from-interleave=2
ok "blocks: that do not divide" fails 1 'in blocks of 5' convert "$dir/moe" "$dir/y.safetensors" --layout=grouped --glu-interleave=5
ok "blocks: no number" fails 1 'needs a number' convert "$dir/moe" "$dir/y.safetensors" --layout=grouped --glu-interleave=four
ok "blocks: not in a checkpoint" fails 1 'cannot be interleaved' convert "$dir/moe" "$dir/y" --layout=grouped --glu-interleave=4
ok "blocks: refusals left nothing" test ! -e "$dir/y.safetensors" -a ! -e "$dir/y"

# ---- prediction depths -----------------------------------------------------------------------------------
mtp="--model.pattern=*-*-/*-"
ok "a model with a prediction depth" runs train $mtp --train.steps=3 --run.dir="$dir/mtp"
ok "depths: one step" runs step $mtp --run.load_weights="$dir/mtp" --run.dir="$dir/mtp-want"
ok "depths: as a Transformer's" runs convert "$dir/mtp" "$dir/mtp.safetensors" --layout=stacked
ok "depths: by its name" prints 'mtp.layers.0.transformer_layer.mlp' "$BRAID" ckpt ls "$dir/mtp.safetensors"
ok "depths: load and step" runs step $mtp --run.load_weights="$dir/mtp.safetensors" --run.dir="$dir/mtp-gpt"
ok "depths: the same bits" same "$dir/mtp-want" "$dir/mtp-gpt"
ok "depths: are not needed to generate" runs "$BRAID" generate "$dir/mtp" --generate.prompt=a --generate.tokens=4 --run.threads=1

# ---- what is missing or left over ---------------------------------------------------------------------------
hybrid="--model.pattern=M*-*- --model.mamba_head_dim=16 --model.mamba_state=8"
ok "new Mamba layers are missing" fails 1 'missing: decoder.layers.0.mixer.' step $hybrid --run.load_weights="$dir/stacked.safetensors"
ok "with a way out" grep -q 'run.load_allow' "$dir/err"
ok "unexpected does not forgive them" fails 1 'missing' step $hybrid --run.load_weights="$dir/stacked.safetensors" --run.load_allow=unexpected
ok "missing does, and says so" says 'note: .* missing: decoder.layers.0.mixer' step $hybrid --run.load_weights="$dir/stacked.safetensors" --run.load_allow=missing
ok "left over depths are unexpected" fails 1 'unexpected: mtp.layers.0.' step --run.load_weights="$dir/mtp"
ok "missing does not forgive that" fails 1 'unexpected' step --run.load_weights="$dir/mtp" --run.load_allow=missing
ok "unexpected does" says 'note: .*unexpected: mtp' step --run.load_weights="$dir/mtp" --run.load_allow=unexpected
ok "another width is refused" fails 1 'of the model needs' step --model.hidden=48 --run.load_weights="$dir/flat"
ok "more layers are refused" fails 1 'it has 2 attention layers, the model has 3' step --model.pattern='*-*-*-' --run.load_weights="$dir/stacked.safetensors"
ok "a missing file is named" fails 1 'nowhere' step --run.load_weights="$dir/nowhere"
ok "both loads are refused" fails 2 'run.load_weights' step --run.load="$dir/flat" --run.load_weights="$dir/flat"
ok "allow alone is refused" fails 2 'run.load_allow needs' step --run.load_allow=both

# ---- the command ------------------------------------------------------------------------------------------------
ok "convert needs a layout" fails 1 'needs a source' convert "$dir/flat" "$dir/x.safetensors"
ok "a known one" fails 1 "no layout 'flatt'" convert "$dir/flat" "$dir/x.safetensors" --layout=flatt
ok "and says which was meant" grep -q "did you mean 'flat'" "$dir/err"
ok "convert replaces nothing" fails 1 'is there already' convert "$dir/flat" "$weights" --layout=flat
ok "a file becomes a file" fails 1 'must be one, too' convert "$weights" "$dir/x" --layout=flat
ok "strange words are refused" fails 1 'unexpected word' convert "$dir/flat" "$dir/x.safetensors" --layout=flat --mode=7
ok "a bad pattern is refused" fails 1 'model.pattern' convert "$dir/flat" "$dir/x.safetensors" --layout=logical --pattern='[*-'
ok "a wrong one, too" fails 1 'pattern differs' convert "$dir/flat" "$dir/x.safetensors" --layout=logical --pattern='[-*][-*]'
ok "nothing was left behind" test ! -e "$dir/x.safetensors" -a ! -e "$dir/x"
ok "nothing half-written is left" no_leftovers "$dir"
finish
