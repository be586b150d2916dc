#!/usr/bin/env bash
# Every command does what its help says, on a tiny model.
. "$(dirname "$0")/lib.sh"
cd "$dir" || exit 1

# ---- help --------------------------------------------------------------------------------------------------
for word in train generate eval plan gradcheck bench op grads ckpt data; do
    ok "$word --help" prints "^usage: braid $word" "$BRAID" $word --help
done
for word in eval gradcheck bench op grads ckpt; do
    ok "help $word is the same" cmp <("$BRAID" help $word) <("$BRAID" $word --help)
done
for section in model train data run plan generate; do
    ok "help $section explains its options" prints "^  --$section\\." "$BRAID" help $section
    ok "and no others" test "$(grep '^  --' out | grep -vc "^  --$section\\.")" -eq 0
done
ok "the list of commands" prints '^  gradcheck ' "$BRAID" help
ok "--help is the same" prints '^  gradcheck ' "$BRAID" --help
try "$BRAID"
ok "no command at all is a usage error" test $rc -eq 2
ok "that lists them" grep -q '^  gradcheck ' err
ok "all options" prints 'model.hidden' "$BRAID" help options
if [ -e "$root/docs/options.md" ]; then
    ok "docs/options.md is up to date (braid help docs)" cmp <("$BRAID" help docs) "$root/docs/options.md"
else
    ok "the options' manual is written" prints 'model.hidden' "$BRAID" help docs
fi

# ---- plan ---------------------------------------------------------------------------------------------------
ok "plan counts parameters" prints 'parameters' "$BRAID" plan "$tiny"
ok "plan prints steps of training, evaluation and update" grep -q "plan 'eval'" out
for arena in parameters gradients optimizer state frames workspace; do
    ok "plan prints the $arena arena" grep -q "^$arena  *[0-9]" out
done
ok "plan counts FLOPs" grep -q 'FLOP per token' out
ok "plan --params=on lists parameters" prints 'decoder.layers.3.mlp.linear_fc2.weight' "$BRAID" plan "$tiny" --params=on
ok "plan --steps=on lists steps" prints 'decoder\|layer\|attn' "$BRAID" plan "$tiny" --steps=on
ok "more of them" test "$(wc -l <out)" -gt 60
ok "plan ends with a verdict" prints '^fits 80 GB: yes (' "$BRAID" plan "$tiny"
ok "which is its last line" sh -c 'tail -1 out | grep -q "^fits"'
ok "a plan that does not fit gets the smallest change that does" \
    prints '^fits 0.0006 GB: no .*the smallest change that fits: --plan.recompute=' "$BRAID" plan "$tiny" --memory=0.0006
ok "or the smallest memory that works" prints '^fits 0.0001 GB: no .*the smallest memory that works is' \
    "$BRAID" plan "$tiny" --memory=0.0001
ok "smaller microbatches are a change, too" prints '^fits 0.000535 GB: no .*the smallest change that fits: --train.micro_batch=' \
    "$BRAID" plan "$tiny" --memory=0.000535
ok "a verdict is about the memory of plan.fit" prints '^fits 0.6 MB: yes' "$BRAID" plan "$tiny" --plan.fit=0.6MB
ok "an amount of memory has known units" fails 2 "is no amount of memory" "$BRAID" plan "$tiny" --memory=80KB
ok "plan.fit prints the choice and what else fits" prints '^ *[0-9.]* .* --plan.recompute=' \
    "$BRAID" plan "$tiny" --plan.fit=0.0006
ok "and plans it" test "$(sed -n 's/^total  *\([0-9]*\) .*/\1/p' out)" -le 600000
ok "a budget that nothing fits is refused with the smallest that works" \
    fails 1 'the smallest memory that works is' "$BRAID" plan "$tiny" --plan.fit=0.0001
ok "offloaded slots are listed with their host memory" prints 'in host memory' \
    "$BRAID" plan "$tiny" --plan.offload=joint.stream --plan.offload_min=0
ok "and the copies are steps" prints ' copy .* replay .*joint.stream' \
    "$BRAID" plan "$tiny" --plan.offload=joint.stream --plan.offload_min=0 --steps=on
ok "optimizer state in host memory is not the device's" prints '^optimizer .* in host memory' \
    "$BRAID" plan "$tiny" --optim.offload=moments
ok "a search for meshes prints the best" prints 'tokens/s' \
    "$BRAID" plan "$tiny" --search --gpus=4 --train.global_batch=8 --tokens=1B
ok "with options that plan" grep -q -- '--parallel.pp=.* --parallel.zero=' out
ok "its options are all that it takes" prints '^total ' "$BRAID" plan "$tiny" --parallel.ranks=4 $(sed -n '/ms\/step/{n;s/.* MiB[^-]*\|.* KiB[^-]*//p}' out)
searched=(--search --gpus=4 --train.global_batch=8 --plan.recompute=norm --parallel.pp=2 --parallel.ranks=2 --model.pattern='*-|*-')
ok "what a search chooses itself is said" says 'note: --search chooses parallel.ranks, parallel.pp, plan.recompute; what is set is not used' "$BRAID" plan "$tiny" "${searched[@]}"
ok "a policy of the configuration that it takes away is in its rows" grep -q -- '--plan.recompute=$' out
ok "plan.fit is for one mesh" fails 2 "both choose a plan" "$BRAID" plan "$tiny" --search --gpus=4 --plan.fit=80GB
ok "the verdict is about the fullest rank" prints '^fits 80 GB: yes (.* on rank [1-9]' "$BRAID" plan "$tiny" --parallel.ranks=2 --parallel.pp=2 --model.pattern='*-|*-*-*-'
ok "a search needs a number of GPUs" fails 2 "needs --gpus" "$BRAID" plan "$tiny" --search
ok "and they need a search" fails 2 "belong to --search" "$BRAID" plan "$tiny" --gpus=4
ok "recomputing shows as replays" prints "plan 'train': .* [1-9][0-9]* replays" "$BRAID" plan "$tiny" --plan.recompute=full

# ---- train: schedules change nothing --------------------------------------------------------------------------
ok "train" runs train --run.dir=a
ok "its result is two moments and a value per parameter" prints '42 tensors' "$BRAID" ckpt ls a/checkpoints/step-00000020
for change in --plan.recompute=full --plan.recompute=mlp.* --plan.delay_dw=on --plan.random_lanes=7 --plan.poison=on --plan.sync=on --plan.find_nan=on; do
    ok "train $change" runs train "$change" --run.dir=b
    ok "is the same bits" same a b
    rm -rf b
done
ok "train with another seed" runs train --run.seed=2 --run.dir=b
ok "is not" test "$("$BRAID" ckpt diff a b >/dev/null; echo $?)" -eq 1
ok "train with a trace" runs train --plan.trace=trace.json --train.steps=5
ok "that Perfetto reads" grep -q '"ph":"X"' trace.json
ok "train with evaluation" runs train --data.split=90,10 --train.eval_every=10 --run.dir=split
ok "at steps 10 and 20" test "$(grep -c 'bits_per_byte' split/metrics.jsonl)" -eq 2
ok "train without a run folder writes nothing" runs train --train.steps=3

# ---- eval and generate --------------------------------------------------------------------------------------------
ok "eval" prints '^bits_per_byte: [0-9]' "$BRAID" eval --run.threads=1 a --data.valid="$book"
cp out eval.txt
ok "loss and perplexity, too" grep -qE '^(loss|perplexity): [0-9.]+$' out
ok "twice the same" prints bits "$BRAID" eval --run.threads=1 a --data.valid="$book"
ok "to the last digit" cmp out eval.txt
ok "eval takes a checkpoint folder" prints '^step: 20$' "$BRAID" eval --run.threads=1 a/checkpoints/step-00000020 --data.valid="$book"
ok "eval on the reference device" prints '^loss: ' "$BRAID" eval --run.threads=1 a --data.valid="$book" --run.device=ref --train.eval_batches=2
loss=$(sed -n 's/^loss: //p' out)
ok "eval on the fast one" prints '^loss: ' "$BRAID" eval --run.threads=1 a --data.valid="$book" --train.eval_batches=2
ok "agree" awk -v a="$loss" -v b="$(sed -n 's/^loss: //p' out)" 'BEGIN { d = a - b; exit !(d < 1e-4 && d > -1e-4) }'
gen() { "$BRAID" generate a --generate.prompt='line 7' --generate.tokens=50 --run.threads=1 "$@"; }
ok "generate continues the prompt" prints '^line 7' gen
cp out one.txt
ok "with as many tokens" test "$(wc -c <out)" -eq 57
ok "the same again" runs gen
ok "with the same seed" cmp out one.txt
ok "something else" runs gen --generate.seed=2
ok "with another" test "$(cmp -s out one.txt; echo $?)" -eq 1
ok "temperature 0" runs gen --generate.temperature=0
cp out greedy.txt
ok "does not draw" runs gen --generate.temperature=0 --generate.seed=9
ok "at all" cmp out greedy.txt
ok "top_k=1 takes the likeliest, too" runs gen --generate.top_k=1
ok "likewise" cmp out greedy.txt
ok "several samples" prints 'sample 3' gen --generate.samples=3
cp out three.txt
ok "two of them side by side" prints "sample 3" gen --generate.samples=3 --generate.batch=2
ok "the same text" cmp out three.txt
ok "no prompt" runs "$BRAID" generate a --generate.tokens=5 --run.threads=1
ok "a prompt longer than the training sequence" prints plum "$BRAID" generate a --generate.prompt="$(head -c 400 "$book" | tr '\n' ' ')" --generate.tokens=3 --run.threads=1

# ---- checkpoints ------------------------------------------------------------------------------------------------------
ok "ckpt ls of a run" prints '^step-00000020 ' "$BRAID" ckpt ls a
ok "ckpt ls of a file" prints 'embedding.word_embeddings.weight' "$BRAID" ckpt ls a/checkpoints/step-00000020/model.safetensors
ok "ckpt verify" prints 'ok, step 20' "$BRAID" ckpt verify a
ok "ckpt diff with itself" prints '42 tensors equal, 0 differ' "$BRAID" ckpt diff a a

# ---- data ----------------------------------------------------------------------------------------------------------------
ok "data tokenize" prints 'vocabulary 256' "$BRAID" data tokenize --in "$book" --out tokens
ok "data info" prints "tokens     $(wc -c <"$book")" "$BRAID" data info tokens
ok "training on the token file" runs "$BRAID" train "$tiny" --data.train=tokens --run.threads=1 --run.quiet=on --run.dir=c
ok "is training on the text" same a c
ok "text with documents' ends" prints 'vocabulary 257' "$BRAID" data tokenize --in "$book" --out ends --eod
ok "trains with a vocabulary of 257" runs "$BRAID" train "$tiny" --data.train=ends --data.eod=on --run.threads=1 --run.quiet=on --run.dir=d
ok "so the checkpoint says" grep -q '^vocab = 257' d/checkpoints/step-00000020/config.ini

# ---- ops: tensors in a file the shell wrote ------------------------------------------------------------------------------
tensors() { # file, header, bytes in printf's notation
    local header=$2
    while [ $((${#header} % 8)) -ne 0 ]; do header="$header "; done
    printf "\\x$(printf %02x $((${#header} % 256)))\\x$(printf %02x $((${#header} / 256)))\\0\\0\\0\\0\\0\\0%s$3" "$header" >"$1"
}
shape() { printf '"%s":{"dtype":"%s","shape":[%s],"data_offsets":[%s]}' "$@"; }
one='\0\0\200\077' two='\0\0\0\100' three='\0\0\100\100' zero='\0\0\0\0'
tensors in.st "{$(shape a F32 2,2 0,16),$(shape b F32 2,2 16,32)}" "$one$two$three$one$one$zero$zero$one"
tensors want.st "{$(shape c F32 2,2 0,16)}" "$one$two$three$one"
tensors turned.st "{$(shape c F32 2,2 0,16)}" "$one$three$two$one"
ok "op list" prints '^gemm ' "$BRAID" op list
ok "op NAME describes it" prints 'attribute trans_a' "$BRAID" op gemm
for dev in cpu ref; do
    ok "op gemm by the identity on $dev" runs "$BRAID" op gemm --in=in.st --out=c-$dev.st --dev=$dev
done
ok "gives the matrix" same c-cpu.st want.st
ok "op gemm transposed" runs "$BRAID" op gemm trans_a=1 --in=in.st --out=t.st
ok "gives its transpose" same t.st turned.st
ok "on the reference device in double" prints 'c  F64' "$BRAID" ckpt ls c-ref.st

# ---- gradients ------------------------------------------------------------------------------------------------------------
ids=
for i in $(seq 16); do ids="$ids$(printf '\\x%02x\\0\\0\\0' $((i * 15)))"; done
tensors tokens.st "{$(shape tokens I32 2,8 0,64)}" "$ids"
ok "grads" prints '^loss: 5\.' "$BRAID" grads --run.threads=1 "$tiny" --in=tokens.st --out=g.st
ok "holds the loss, the logits, parameters and gradients" prints 'grad.decoder.layers.0.self_attention.linear_qkv.weight' "$BRAID" ckpt ls g.st
ok "of the right shape" grep -q 'logits .*\[.*256\]' out
ok "grads again" runs "$BRAID" grads --run.threads=1 "$tiny" --in=tokens.st --out=g2.st --plan.recompute=full --plan.delay_dw=on
ok "are the same bits in another schedule" same g.st g2.st
ok "grads of a checkpoint" prints '^loss: ' "$BRAID" grads --run.threads=1 "$tiny" --in=tokens.st --out=g3.st --ckpt=a
ok "gradcheck of a model" prints 'worst relative error' "$BRAID" gradcheck --run.threads=1 --model.pattern='*-' --model.hidden=8 --model.heads=2 --model.ffn=12 --model.vocab=256 --train.seq=4 --train.micro_batch=1 --only=model
ok "no gradient is wrong" test "$(grep -c FAILED out)" -eq 0
ok "gradcheck of one op" prints '^op  *rmsnorm' "$BRAID" gradcheck --run.threads=1 --only=rmsnorm

# ---- bench --------------------------------------------------------------------------------------------------------------------
ok "bench of text" prints "^step_ms: " "$BRAID" bench generate "$tiny" --run.threads=1 --prompt=5 --generate.tokens=4 --generate.batch=2
ok "bench of one op" prints '^colsum ' "$BRAID" bench colsum --run.threads=1 --seconds=0.01 --json=bench.json
ok "as JSON, too" grep -q '{"op":"colsum","shape":' bench.json
ok "that ends" test "$(tail -n1 bench.json)" = ']}'
# A baseline that this machine has just recorded, then one that claims other times, bits and ops.
ok "bench records a baseline" prints '^colsum ' "$BRAID" bench colsum --run.threads=1 --seconds=0.01 --record=base.json
ok "and training beside it" prints '^bits: ' "$BRAID" bench train "$tiny" --run.threads=1 --steps=2 --record=base.json
ok "one row a line, each once" test "$(grep -c '^{"what":' base.json)" -eq "$(($(grep -c '"what":"colsum"' base.json) + 1))"
"$BRAID" bench colsum --run.threads=1 --seconds=0.01 --record base.json >/dev/null
ok "recorded again, rows are replaced" test "$(grep -c '"what":"train"' base.json)" -eq 1
n=$(grep -c '"what":"colsum"' base.json)
ok "against itself nothing is far off" prints "^$n compared: 0 slower, 0 faster, $n within 100000 %; 0 with other bits; 0 new, 0 missing" \
    "$BRAID" bench colsum --run.threads=1 --seconds=0.01 --against=base.json --changed=100000
ok "training has its bits" prints '^1 compared: .*; 0 with other bits; 0 new' \
    "$BRAID" bench train "$tiny" --run.threads=1 --steps=2 --against=base.json
sed -E 's/("what":"colsum".*"us":)[0-9.e+-]+/\11e-3/; s/"bits":"[0-9a-f]*"/"bits":"0000000000000000"/; s/"device":"/&other /' base.json >other.json
ok "a slower op is a row of the table" prints '^colsum  *[^ ].* 0\.0 .*+[0-9.]* %$' \
    "$BRAID" bench colsum --run.threads=1 --seconds=0.01 --against=other.json
ok "another machine is noted" grep -q '^note: recorded on other ' "$dir/out"
ok "other bits are named" prints 'bits [0-9a-f]* were 0000000000000000' "$BRAID" bench train "$tiny" --run.threads=1 --steps=2 --against=other.json
ok "a new op is named" prints '^embed_fwd .* new ' "$BRAID" bench embed_fwd --run.threads=1 --seconds=0.01 --against=base.json
fails() { # text, command...: an error that has the text
    local phrase=$1
    shift
    try "$@"
    [ $rc -ne 0 ] && grep -q -- "$phrase" "$dir/err" || show $rc
}
ok "times of another machine are not mixed in" fails 'has the times of other ' \
    "$BRAID" bench colsum --run.threads=1 --seconds=0.01 --record=other.json
echo '{"format":"braid bench 1","device":"x","rows":[{"what":"a","shape":"b","us":-1}]}' >bad.json
ok "a damaged baseline is refused before anything runs" fails 'row 1 is not' "$BRAID" bench colsum --against=bad.json
ok "and what is none" fails 'is not a baseline' "$BRAID" bench train "$tiny" --against=bench.json
ok "bench train" prints '^tokens_per_second: [1-9]' "$BRAID" bench train "$tiny" --run.threads=1
ok "its parameters" grep -q '^parameters: 23712$' out
ok "nothing half-written is left" no_leftovers "$dir"
cd / && finish
