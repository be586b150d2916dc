#!/usr/bin/env bash
# Real tokens from the command line: a vocabulary is trained, text is tokenised, a model trains, is evaluated and writes text;
# a checkpoint needs nothing but itself.
. "$(dirname "$0")/lib.sh"
cd "$dir" || exit 1
mkdir other
golden=$root/tests/token/golden
export TMPDIR=$dir # tokens of runs without a folder
corpus=$golden/corpus.txt
refuses() { fails 1 "$@"; } # text, command...: braid data ends every error with 1

# ---- the vocabulary and the token file ---------------------------------------------------------------------------------
ok "a vocabulary is trained" prints '500 tokens, 243 merges' "$BRAID" data train-tokenizer --in "$corpus" --out tok --vocab=500 --run.threads=2
ok "a vocabulary split as cl100k" runs "$BRAID" data train-tokenizer --in "$corpus" --out cl --vocab=300 --pattern=cl100k
ok "is written without '{1,3}+', which tokenizers reads as any number of digits" grep -qF '|\\p{N}{1,3}| ?[' cl.json
ok "and read as the same pattern" runs "$BRAID" data tokenize --in "$corpus" --out cl1 --data.tokenizer=cl.json
ok "by the .tiktoken" runs "$BRAID" data tokenize --in "$corpus" --out cl2 --data.tokenizer=cl.tiktoken --data.token_pattern=cl100k --data.token_special='<|endoftext|>'
ok "which gives the same tokens" cmp -s cl1.bin cl2.bin
ok "a pattern that others would read otherwise" refuses "'{n,m}+'" "$BRAID" data train-tokenizer --in "$corpus" --out own --vocab=300 --pattern='\p{N}{1,3}+|\P{N}'
ok "an old one is kept" refuses 'exists already' "$BRAID" data train-tokenizer --in "$corpus" --out tok --vocab=500
ok "text is tokenised with it" prints 'vocabulary 500, eod 499' "$BRAID" data tokenize --in "$corpus" --out t --data.tokenizer=tok.json --append-eod
ok "the manifest names the tokenizer" grep -q '"name": "tok.json"' t.tokens.json
ok "info shows the text" prints 'begins .*The quick brown fox' "$BRAID" data info t
ok "info refuses another tokenizer" refuses 'made with the tokenizer tok.json' "$BRAID" data info t --data.tokenizer="$golden/tekken.json"
ok "the .tiktoken gives the same tokens" runs "$BRAID" data tokenize --in "$corpus" --out r --data.tokenizer=tok.tiktoken --data.token_pattern=gpt2 \
    --data.token_special='<|endoftext|>' --append-eod
ok "to the byte" cmp -s t.bin r.bin
ok "a tiktoken file needs a pattern" refuses 'data.token_pattern' "$BRAID" data tokenize --in "$corpus" --out x --data.tokenizer=tok.tiktoken

# ---- lines of JSON -------------------------------------------------------------------------------------------------------
for i in $(seq 60); do printf '{"id": %d, "text": "the theme of the thesis %d is there, these others bother the brothers"}\n' "$i" "$i"; done >d.jsonl
gzip -k d.jsonl
ok "lines of JSON are documents" prints '60 documents' "$BRAID" data tokenize --in d.jsonl --out j --data.tokenizer=tok.json
ok "compressed ones too" prints '60 documents' "$BRAID" data tokenize --in d.jsonl.gz --out z --data.tokenizer=tok.json
ok "with the same tokens" cmp -s j.bin z.bin
{ printf '\357\273\277'; cat d.jsonl; } >mark.jsonl
ok "a byte order mark in front of them is no error" prints '60 documents' "$BRAID" data tokenize --in mark.jsonl --out mark --data.tokenizer=tok.json
{
    head -2 d.jsonl
    echo '{"text": 5}'
    echo 'nonsense'
} >bad.jsonl
ok "a bad line is named" refuses 'bad.jsonl, line 3: field "text" is not a string' "$BRAID" data tokenize --in bad.jsonl --out b
ok "nothing is left of it" test ! -e b.bin
ok "or left out and counted" prints '2 bad lines, the first: bad.jsonl, line 3' "$BRAID" data tokenize --in bad.jsonl --out b --skip-bad
ok "another field" refuses 'no field "body"' "$BRAID" data tokenize --in d.jsonl --out x --field=body

# ---- training ----------------------------------------------------------------------------------------------------------------
train() { "$BRAID" train "$tiny" --run.threads=1 --train.warmup=0 --data.eod=on "$@"; }
ok "a model trains on the token file" runs train --data.train=t --data.split=90,10 --data.tokenizer=tok.json --run.dir=run --train.steps=4 \
    --train.eval_every=2
ok "a run does not go on with another tokenizer" fails 1 'is not the tokenizer that' train --data.train="$corpus" --data.tokenizer="$golden/gpt2style.json" \
    --run.dir=run --train.steps=5 --model.vocab=0
ok "with bits per byte" grep -q bits_per_byte run/metrics.jsonl
ok "another tokenizer is refused" fails 1 'was made with the tokenizer tok.json' train --data.train=t --data.tokenizer="$golden/gpt2style.json" --train.steps=3
ok "bytes are refused" fails 1 'was made with the tokenizer tok.json' train --data.train=t --train.steps=3
ok "lines of JSON train at once" says 'tokenizing once into lines/tokens' train --data.train=d.jsonl --data.tokenizer=tok.json --run.dir=lines --train.steps=3
ok "and are tokenised once" says 'd.jsonl: tokens from lines/tokens' train --data.train=d.jsonl --data.tokenizer=tok.json --run.dir=lines --train.steps=4
ok "bytes of lines of JSON are those of their text" says '60 documents, 4' train --data.train=d.jsonl --train.steps=3
ok "text trains at once" says 'tokenizing once' train --data.train="$corpus" --data.tokenizer=tok.json --train.steps=3
ok "ranks share what one of them tokenises" says 'tokenizing once\|tokens from' train --data.train="$corpus" --data.tokenizer=tok.json --run.dir=two --parallel.ranks=2 \
    --train.steps=3
ok "one of them did" test "$(ls two/tokens/*.bin | wc -l)" -eq 1

# ---- evaluation, generation, and a checkpoint alone ------------------------------------------------------------------------------
ok "eval uses the run's own split" prints '^bits_per_byte: ' "$BRAID" eval run --train.eval_batches=all --run.threads=1
ok "and says what it covered" grep -q '^tokens: [0-9]* of [0-9]* (' out
cp -r run/checkpoints/step-00000004 other/ckpt
mkdir away && mv tok.json tok.tiktoken run away
cd other || exit 1
ok "the checkpoint carries its tokenizer" test -s ckpt/tokenizer.json
generate() { "$BRAID" generate ckpt --generate.tokens=12 --run.threads=1 "$@"; }
ok "generate needs nothing else" prints '^the fox' generate --generate.prompt='the fox'
ok "eval neither" prints '^bits_per_byte: ' "$BRAID" eval ckpt --data.valid="$corpus" --run.threads=1
printf 'the lazy dog' >prompt
ok "a prompt from a file" prints '^the lazy dog' generate --generate.prompt_file=prompt
from_stdin() { generate --generate.prompt_file=- <prompt; }
ok "a prompt from standard input" prints '^the lazy dog' from_stdin
ok "two prompts are one too many" fails 2 'both set' generate --generate.prompt=a --generate.prompt_file=prompt
generate --generate.prompt='the fox' >whole 2>/dev/null
word=$(tail -c +8 whole | tr -d '\n' | cut -c5-6)
generate --generate.prompt='the fox' --generate.stop="zzzz|$word" >stopped 2>/dev/null
ok "a stop text ends the sample before it" cmp -s <(head -c $(($(stat -c %s stopped) - 1)) whole) <(head -c -1 stopped)
ok "which is shorter for it" test "$(stat -c %s stopped)" -lt "$(stat -c %s whole)"
ok "special tokens are read in prompts and printed on request" prints '<|endoftext|>' generate --generate.prompt='a<|endoftext|>' --generate.special=on
finish
