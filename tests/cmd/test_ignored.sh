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

finish
