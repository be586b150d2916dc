#!/usr/bin/env bash
# Nothing that a user asks for is ignored without a word, and a metric that cannot be computed never ends a run.
. "$(dirname "$0")/lib.sh"
cd "$dir" || exit 1

# ---- token files whose ids the tokenizer does not know --------------------------------------------------------------
byte() { printf "\\x$(printf %02x "$1")"; }
number() { # value, bytes: little-endian
    local v=$1 i
    for ((i = 0; i < $2; i++)); do
        byte $((v & 255))
        v=$((v >> 8))
    done
}
shard() { # file, first id, ids: an llm.c shard of 600 tokens that cycle through them
    local i
    {
        number 20240520 4
        number 1 4
        number 600 4
        head -c 1012 /dev/zero
        for ((i = 0; i < 600; i++)); do number $(($2 + i * 7 % $3)) 2; done
    } >"$1"
}
shard large.bin 200 200
shard small.bin 0 90
tokens() { "$BRAID" train "$tiny" --run.threads=1 --train.steps=4 "$@"; }

ok "token files with ids above 255 train and evaluate" says 'bits per byte are left out: token id [0-9]* is outside' \
    tokens --data.train=large.bin --data.split=80,20 --train.eval_every=2 --model.vocab=400 --run.dir=large
ok "the note stands there once" test "$(grep -c 'bits per byte are left out' err)" -eq 1
ok "both evaluations have their loss" test "$(grep -c val_loss large/metrics.jsonl)" -eq 2
ok "and no bits per byte" test "$(grep -c bits_per_byte large/metrics.jsonl)" -eq 0
ok "the model is saved" test -d large/checkpoints/step-00000004
ok "eval of it prints the loss" prints '^loss: [0-9.]*$' "$BRAID" eval large --data.valid=large.bin --run.threads=1
ok "and says what it leaves out" grep -q 'note: bits_per_byte is left out' err
ok "not as a number" test "$(grep -c bits_per_byte out)" -eq 0
ok "options of training say that they have no effect where nothing trains" says 'note: train.lr (command line) has no effect: braid eval does not train' \
    "$BRAID" eval large --data.valid=large.bin --run.threads=1 --train.lr=3 --parallel.ranks=2
ok "each of them" grep -q 'note: parallel.ranks (command line) has no effect' err
ok "generate prints unknown ids as numbers" prints '<[0-9][0-9]*>' "$BRAID" generate large --generate.tokens=60 --generate.temperature=5 --run.threads=1
ok "with one note" test "$(grep -c 'printed as <id>' err)" -eq 1

ok "a vocabulary below 256 trains on token files" runs tokens --data.train=small.bin --data.split=80,20 --train.eval_every=2 --model.vocab=90 --run.dir=small
ok "and has bits per byte" grep -q bits_per_byte small/metrics.jsonl
ok "a prompt outside of it is refused" fails 2 'the prompt needs token' "$BRAID" generate small --generate.prompt=z --run.threads=1
ok "one inside is not" runs "$BRAID" generate small --generate.prompt=A --generate.tokens=4 --run.threads=1
ok "text still needs the tokenizer's vocabulary" fails 2 'model.vocab is 90' tokens --data.train="$book" --model.vocab=90
ok "text to validate on, too" fails 2 'model.vocab is 90' tokens --data.train=small.bin --data.valid="$book" --model.vocab=90
ok "an id outside the vocabulary names file and id" fails 1 'large.bin: token' tokens --data.train=large.bin --model.vocab=210

ok "validation data that cannot be read does not end the run" says 'validation loss is left out: large.bin: token' \
    tokens --data.train=small.bin --data.valid=large.bin --train.eval_every=2 --model.vocab=210 --run.dir=bad
ok "said once" test "$(grep -c 'left out' err)" -eq 1
ok "which is saved" test -d bad/checkpoints/step-00000004
ok "on several ranks either" says 'validation loss is left out' tokens --data.train=small.bin --data.valid=large.bin --train.eval_every=2 \
    --model.vocab=210 --parallel.ranks=2 --parallel.pp=2
ok "eval of such data is an error" fails 1 'large.bin: token' "$BRAID" eval bad --data.valid=large.bin --run.threads=1

# ---- options without effect -------------------------------------------------------------------------------------------
ok "an option that no layer reads is a note" says 'note: model.gdn_conv = 3 (command line) has no effect: .* no gated delta net (G) layer' \
    tokens --data.train="$book" --model.gdn_conv=3
ok "with what is missing" says 'note: model.router_drop = position (command line) has no effect: it needs model.router_capacity' \
    tokens --data.train="$book" --model.pattern='*E' --model.router_drop=position
ok "on several ranks once" runs tokens --data.train="$book" --model.gdn_conv=3 --parallel.ranks=2
ok "that is one line" test "$(grep -c 'note: model.gdn_conv' err)" -eq 1
ok "not when quiet" runs train --model.gdn_conv=3 --train.steps=1 --train.warmup=0
ok "that is no line" test "$(grep -c 'note:' err)" -eq 0
ok "plan says it, too" says 'note: model.gdn_conv' "$BRAID" plan "$tiny" --model.gdn_conv=3
ok "sizes of stages that are not there are no mistake beside cuts, in a plan as in a run" says 'note: parallel.first_layers' \
    "$BRAID" plan "$tiny" --model.pattern='*-|*-' --parallel.first_layers=1
ok "virtual stages without cuts say what they need" fails 2 'cut it into parallel.pp' \
    "$BRAID" plan "$tiny" --parallel.ranks=2 --parallel.pp=2 --parallel.vpp=2
ok "and without stages" fails 2 'leave parallel.vpp out' "$BRAID" plan "$tiny" --parallel.vpp=2
ok "an option that counts is none" runs "$BRAID" plan "$tiny" --model.attn_window=3
ok "that is silent" test "$(grep -c 'note:' err)" -eq 0
ok "what latent attention cannot do is an error" fails 2 'latent attention (+) cannot do what model.attn_gate = on says' \
    "$BRAID" plan "$tiny" --model.pattern=+- --model.attn_gate=on
ok "experts to share are needed" fails 2 'no layer of model.pattern has experts' "$BRAID" plan "$tiny" --parallel.ranks=2 --parallel.ep=2
# A stage that has none of what a list means asks the whole model, as a run does that writes its first checkpoint.
stages() { "$BRAID" plan "$tiny" --parallel.ranks=2 --parallel.pp=2 "$@"; }
ok "a key that FP8 keeps exists on some stage" fails 2 "gpu.fp8_keep: 'nothing' matches" stages --gpu.precision=fp8 --gpu.fp8_keep=nothing
ok "FP8 reaches a layer of some stage" fails 2 'no linear layer' stages --gpu.precision=fp8 --gpu.fp8_keep='*'
ok "one stage without it is none of a mistake" runs stages --gpu.precision=fp8 --gpu.fp8_keep='decoder.layers.0.*,decoder.layers.1.*'
ok "offloading moves something on some stage" fails 2 'moves nothing' stages --plan.offload='*'
for f in "$root"/configs/*.ini; do
    ok "$(basename "$f") asks for nothing in vain" runs "$BRAID" plan "$f"
    ok "as its plan says" test "$(grep -c 'note:' err)" -eq 0
done

# ---- kernels ------------------------------------------------------------------------------------------------------------
ok "the start of a run names the kernels" says '^  matrix products  *OpenBLAS' tokens --data.train="$book"
ok "and why experts have separate ones" says '^  experts .*: fused on a GPU only' \
    tokens --data.train="$book" --model.pattern='*E'
ok "so does a plan" prints '^  experts .*: fused on a GPU only' "$BRAID" plan "$tiny" --model.pattern='*E'

# ---- weights of a file ----------------------------------------------------------------------------------------------------
header='{"tokens":{"dtype":"I32","shape":[2,8],"data_offsets":[0,64]}}  '
{ number ${#header} 8; printf %s "$header"; for i in $(seq 16); do number $((i * 37 % 256)) 4; done; } >in.st
ok "a run" runs train --train.steps=3 --run.dir=run
ok "gradients of its checkpoint" runs "$BRAID" grads "$tiny" --run.threads=1 --in=in.st --out=ckpt.st --ckpt=run
ok "gradients of fresh weights" runs "$BRAID" grads "$tiny" --run.threads=1 --in=in.st --out=fresh.st
ok "are others" test "$("$BRAID" ckpt diff ckpt.st fresh.st >/dev/null; echo $?)" -eq 1
ok "gradients of its weights alone" runs "$BRAID" grads "$tiny" --run.threads=1 --in=in.st --out=weights.st --run.load_weights=run
ok "are those of the checkpoint" same ckpt.st weights.st
ok "both at once are refused" fails 2 'give one of them' "$BRAID" grads "$tiny" --run.threads=1 --in=in.st --out=x.st --ckpt=run --run.load_weights=run
for command in "eval run --data.valid=$book" "generate run" "gradcheck $tiny --only=model"; do
    ok "$command does not ignore run.load_weights" fails 2 'does not read it' "$BRAID" $command --run.load_weights=run
done
ok "weights of which nothing fits are no weights" fails 1 "none of the model's" \
    train --train.steps=1 --train.warmup=0 --run.load_weights=in.st --run.load_allow=both
ok "with some of them missing they are" runs train --train.steps=1 --train.warmup=0 --model.pattern='*-*-*-' --run.load_weights=run --run.load_allow=missing

finish
