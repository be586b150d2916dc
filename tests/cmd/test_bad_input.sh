#!/usr/bin/env bash
# Bad input of every kind: the exit code, one error line that says what is wrong, no crash, nothing lost
# and nothing left lying about.
. "$(dirname "$0")/lib.sh"
mkdir "$dir/work" && cd "$dir/work" || exit 1
bad=0

# ---- what the table needs -----------------------------------------------------------------------------
printf '[model]\nhidden = 8\nhidden = 16\n' >double.ini
printf '[modle]\nhidden = 8\n' >section.ini
printf '[model]\nhiden = 8\n' >key.ini
printf 'hidden\n' >nonsense.ini
head -c 4096 /dev/zero >binary.ini
: >empty.txt
echo short >short.txt
head -c 100 /dev/zero >binary.txt
mkdir nothing docs notarun
touch notarun/file
for i in $(seq 200); do head -c 60 "$book" >docs/$i.txt; done
runs "$BRAID" data tokenize --in docs --out eod --eod || bad=1
runs "$BRAID" data tokenize --in "$book" --out tokens || bad=1
runs train --run.save_every=10 --run.dir=run || bad=1
ckpt=run/checkpoints/step-00000020
# A safetensors file: a header of this text, and that many zero bytes.
tensors() { # file, header, bytes
    local header=$2
    while [ $((${#header} % 8)) -ne 0 ]; do header="$header "; done
    { printf "\\x$(printf %02x $((${#header} % 256)))\\x$(printf %02x $((${#header} / 256)))\\0\\0\\0\\0\\0\\0%s" "$header"; head -c "$3" /dev/zero; } >"$1"
}
shape() { printf '"%s":{"dtype":"%s","shape":[%s],"data_offsets":[%s]}' "$@"; }
tensors tokens.st "{$(shape tokens I32 2,8 0,64)}" 64
tensors flat.st "{$(shape tokens I32 16 0,64)}" 64
tensors floats.st "{$(shape tokens F32 2,8 0,64)}" 64
tensors none.st "{$(shape tokens I32 0,8 0,0)}" 0
tensors labels.st "{$(shape tokens I32 2,8 0,64),$(shape labels I32 2,4 64,96)}" 96
tensors large.st "{$(shape tokens I32 1,2 0,8)}" 0
printf '\001\000\000\000\000\004\000\000' >>large.st # ids 1 and 1024
tensors negative.st "{$(shape tokens I32 1,2 0,8)}" 0
printf '\001\000\000\000\377\377\377\377' >>negative.st # ids 1 and -1
tensors ab.st "{$(shape a F32 2,3 0,24),$(shape b F32 2,3 24,48)}" 48
tensors a.st "{$(shape a F32 2,3 0,24)}" 24
tensors overlap.st "{$(shape a F32 2,3 0,24),$(shape b F32 3,2 8,32)}" 32
tensors huge.st "{$(shape a F32 4294967296,4294967296 0,24),$(shape b F32 3,2 24,48)}" 48
tensors past.st "{$(shape a F32 2,3 0,24),$(shape b F32 3,2 24,48)}" 10
tensors scalar.st "{$(shape a F32 '' 0,4),$(shape b F32 '' 4,8)}" 8
head -c 5 ab.st >cut.st
damaged() { # name, what to do to $c: a copy of the run with that damage in its newest checkpoint
    local c=$1/checkpoints/step-00000020
    cp -r run "$1" && eval "$2"
}
flip='printf "\377" | dd bs=1 conv=notrunc status=none seek='
damaged flipped "${flip}3000 of=\$c/model.safetensors"
damaged optim "${flip}3000 of=\$c/optim.safetensors"
damaged header "${flip}9 of=\$c/model.safetensors"
damaged cut 'truncate -s 5000 $c/model.safetensors'
damaged lost 'rm $c/model.safetensors'
damaged manifest 'truncate -s 100 $c/manifest.json'
damaged nomanifest 'rm $c/manifest.json'
damaged notjson 'echo hello >$c/manifest.json'
damaged config 'echo "[model]" >$c/config.ini'
damaged empty ': >$c/model.safetensors'
cp -r tokens.bin bits.bin && cp tokens.idx bits.idx && printf '\377' | dd of=bits.idx bs=1 seek=20 conv=notrunc status=none
cp tokens.bin cutidx.bin && head -c 30 tokens.idx >cutidx.idx
head -c 1000 tokens.bin >cutbin.bin && cp tokens.idx cutbin.idx
cp tokens.bin magic.bin && { printf XXXX; tail -c +5 tokens.idx; } >magic.idx
cp tokens.idx alone.idx
ok "the inputs are made" test $bad -eq 0
before=$(find . | sort | cksum)

# ---- the table: exit code | phrase of the error | command (after braid; run by eval) --------------------
t=$tiny
d=--data.train=$book
count=0
while IFS='|' read -r code phrase command; do
    case "$code" in '' | '#'*) continue ;; esac
    code=$((code)) phrase=$(sed -E 's/^ +| +$//g' <<<"$phrase") command=${command# }
    count=$((count + 1))
    eval "try timeout 60 \"\$BRAID\" $command" </dev/null
    if [ $rc -ne $code ]; then why="exit code $rc, not $code"
    elif [ "$(grep -c '^braid: error: ' "$dir/err")" -ne 1 ]; then why="not one error line"
    elif ! grep -qF -- "$phrase" "$dir/err"; then why="no word of '$phrase'"
    elif [ "$(find . | sort | cksum)" != "$before" ]; then
        why="it left or took files"
        before=$(find . | sort | cksum)
    else
        echo "ok braid $command"
        continue
    fi
    echo "not ok braid $command: $why"
    show $rc
    failed=1
done <<'TABLE'
# commands and words
2 | unknown command 'trian'            | trian
2 | did you mean 'train'               | trian
2 | unexpected word 'more'             | train $t $d more
2 | unexpected word 'more'             | plan $t more
2 | unexpected word 'more'             | generate run more
2 | unexpected word 'more'             | gradcheck $t more
2 | there is no help on 'frob'         | help frob
# options
2 | did you mean --model.hidden?       | train $t $d --model.hiden=8
2 | unknown option --frobnicate        | train $t $d --frobnicate=8
2 | given twice                        | train $t $d --train.lr=1 --train.lr=2
2 | given twice                        | train $t $d --train.lr=1 --lr 2
2 | abc is not an integer              | train $t $d --model.hidden=abc
2 | 12x is not an integer              | train $t $d --model.hidden=12x
2 | is not                             | train $t $d --model.hidden=
2 | nan is not a number                | train $t $d --train.lr=nan
2 | is out of range                    | train $t $d --train.lr=-1
2 | is out of range                    | train $t $d --model.hidden=99999999
2 | is out of range                    | train $t $d --train.seq=0
2 | swiglu                             | train $t $d --model.act=swigl
2 | model.tied                         | train $t $d --model.tied=perhaps
2 | multiple of model.heads            | train $t $d --model.heads=3
2 | model.kv_heads                     | train $t $d --model.heads=4 --model.kv_heads=3
2 | multiple of train.micro_batch      | train $t $d --train.global_batch=3
2 | train.min_lr must not be above     | train $t $d --train.min_lr=1
2 | run.dir                            | train $t $d --run.save_every=5
2 | data.split or data.valid, not both | train $t $d --data.split=9,1 --data.valid=$book
2 | data.split                         | train $t $d --data.split=9,x
2 | evaluation needs data.valid        | train $t $d --train.eval_every=5
2 | --steps and --params take on or off | plan $t --steps=perhaps
# config files
1 | nothing.ini                        | train nothing.ini $d
2 | double.ini:3: model.hidden was already set in line 2 | train double.ini $d
2 | did you mean [model]?              | train section.ini $d
2 | key.ini:2                          | train key.ini $d
2 | nonsense.ini:1                     | train nonsense.ini $d
2 | binary.ini                         | train binary.ini $d
1 | cannot open ./gone.ini             | plan ./gone.ini
# patterns, with a caret under the place
2 | model.pattern                      | plan $t --model.pattern='*-X'
2 | without a matching ']' at position 2 | plan $t --model.pattern='*[-'
2 | ^                                  | plan $t --model.pattern='*[-'
2 | this ']' was not opened at position 2 | plan $t --model.pattern='*]'
2 | model.pattern                      | plan $t --model.pattern=
2 | model.pattern                      | plan $t --model.pattern='[]'
# plans and devices
2 | 'frob' names no slot               | plan $t --plan.recompute=frob
2 | valid here: joint.norm,            | train $t $d --plan.recompute=frob
2 | --dev=tpu:                         | op gemm --in=ab.st --out=c.st --dev=tpu
# data
2 | data.train is not set              | train $t
1 | gone: no such file                 | train $t --data.train=gone
1 | empty.txt holds no text            | train $t --data.train=empty.txt
1 | one sample needs 33                | train $t --data.train=short.txt
1 | binary.txt                         | train $t --data.train=binary.txt
1 | nothing                            | train $t --data.train=nothing
1 | 256                                | train $t --data.train=eod --model.vocab=256
2 | model.vocab is 100                 | train $t $d --model.vocab=100
1 | bits                               | train $t --data.train=bits
1 | cutidx                             | train $t --data.train=cutidx
1 | cutbin                             | train $t --data.train=cutbin
1 | magic.idx                          | train $t --data.train=magic
1 | alone.bin                          | train $t --data.train=alone
1 | gone.json                          | train $t $d --data.tokenizer=gone.json
1 | weight                             | train $t '--data.train=-1 tokens 2 tokens'
# run folders
1 | Not a directory                    | train $t $d --run.dir=short.txt/run
2 | is a file, and a run is a folder   | train $t $d --run.dir=short.txt
1 | cannot create folder /proc/        | train $t $d --run.dir=/proc/braid
1 | model.hidden is 64                 | train $t $d --run.dir=run --model.hidden=64
1 | was made with 32                   | train $t $d --run.dir=run --model.hidden=64
1 | model.pattern                      | train $t $d --run.load=run --model.pattern='*-'
1 | gone                               | train $t $d --run.load=gone
1 | notarun                            | train $t $d --run.load=notarun
# checkpoints
1 | there is no checkpoint or run folder gone | generate gone
2 | no checkpoint was named            | generate
1 | is not a braid checkpoint          | generate notarun
1 | is not a braid checkpoint          | ckpt ls notarun
1 | short.txt                          | generate short.txt
1 | model.hidden is 64                 | generate run --model.hidden=64
2 | is out of range                    | generate run --generate.tokens=0
1 | checksum                           | generate flipped/checkpoints/step-00000020
1 | checksum                           | eval optim/checkpoints/step-00000020 --data.valid=$book
1 | model.safetensors                  | generate header/checkpoints/step-00000020
1 | has 5000 bytes, the manifest says  | generate cut/checkpoints/step-00000020
1 | model.safetensors is missing       | generate lost/checkpoints/step-00000020
1 | manifest.json                      | generate manifest/checkpoints/step-00000020
1 | manifest.json                      | generate nomanifest/checkpoints/step-00000020
1 | manifest.json                      | generate notjson/checkpoints/step-00000020
1 | config.ini                         | generate config/checkpoints/step-00000020
1 | has 0 bytes                        | ckpt verify empty/checkpoints/step-00000020
1 | checksum                           | ckpt verify flipped/checkpoints/step-00000020
1 | gone                               | ckpt diff run gone
1 | no subcommand 'frob'               | ckpt frob
1 | takes 2 arguments                  | ckpt diff run
1 | cut.st                             | ckpt ls cut.st
# evaluation
2 | data.valid is not set              | eval run
1 | one sample needs 33                | eval run --run.threads=1 --data.valid=short.txt
1 | gone: no such file                 | eval run --run.threads=1 --data.valid=gone
# ops
2 | there is no op 'frob'              | op frob
2 | no op was named                    | op
2 | needs --in and --out               | op gemm --in=ab.st
2 | has no attribute 'frob'            | op gemm frob=1 --in=ab.st --out=c.st
2 | is not attribute=number            | op gemm alpha=much --in=ab.st --out=c.st
2 | --dev=moon                         | op gemm --in=ab.st --out=c.st --dev=moon
1 | gone.st                            | op gemm --in=gone.st --out=c.st
1 | holds no tensor 'b'                | op gemm --in=a.st --out=c.st
1 | gemm                               | op gemm --in=ab.st --out=c.st
1 | gemm                               | op gemm --in=scalar.st --out=c.st
1 | overlap.st                         | op gemm --in=overlap.st --out=c.st
1 | huge.st                            | op gemm --in=huge.st --out=c.st
1 | past.st                            | op gemm --in=past.st --out=c.st
1 | cut.st                             | op gemm --in=cut.st --out=c.st
1 | empty.txt                          | op gemm --in=empty.txt --out=c.st
1 | nowhere                            | op gemm trans_b=1 --in=ab.st --out=nowhere/c.st
# gradients
2 | needs --in and --out               | grads $t
2 | routes are recorded and replayed   | grads $t --in=tokens.st --out=g.st --train.replay_routes=gone
1 | cannot open gone.st                | grads $t --run.threads=1 --in=gone.st --out=g.st
1 | data.eod_mask = on has no effect   | grads $t --run.threads=1 --data.eod=on --data.eod_mask=on --in=gone.st --out=g.st
1 | holds no tensor 'tokens'           | grads $t --run.threads=1 --in=ab.st --out=g.st
1 | of shape [batch, seq]              | grads $t --run.threads=1 --in=flat.st --out=g.st
1 | tokens                             | grads $t --run.threads=1 --in=floats.st --out=g.st
1 | are empty                          | grads $t --run.threads=1 --in=none.st --out=g.st
1 | labels                             | grads $t --run.threads=1 --in=labels.st --out=g.st
1 | 1024                               | grads $t --run.threads=1 --in=large.st --out=g.st
1 | -1                                 | grads $t --run.threads=1 --in=negative.st --out=g.st
1 | gone                               | grads $t --run.threads=1 --in=tokens.st --out=g.st --ckpt=gone
1 | nowhere                            | grads $t --run.threads=1 --in=tokens.st --out=nowhere/g.st
# measuring and checking
2 | no op's name starts with 'frob'    | bench frob --seconds=0.01
2 | --seconds=x is not                 | bench gemm --seconds=x
2 | --only=frob                        | gradcheck $t --only=frob
1 | nowhere                            | bench colsum --run.threads=1 --seconds=0.001 --json=nowhere/b.json
1 | needs a subcommand                 | data
TABLE
ok "the table was read" test "$count" -gt 100

# ---- a build without CUDA says so --------------------------------------------------------------------------
if "$BRAID" plan "$tiny" --run.device=cuda >/dev/null 2>"$dir/err"; then
    echo "this build has CUDA: its refusal is not tested"
else
    ok "a build without CUDA says so" grep -q 'CUDA' "$dir/err"
fi

# ---- damage in the newest checkpoint: the one before it is taken ----------------------------------------------
ok "a run continues from the checkpoint before a damaged one" says 'at step 10' train --run.dir=cut --train.steps=20
ok "to the same bits" same run cut

# ---- a full disk while saving ------------------------------------------------------------------------------
full=$dir/full
mkdir "$full"
if mount -t tmpfs -o size=1200k braid-test "$full" 2>/dev/null; then
    trap 'umount "$full"; rm -rf "$dir"' EXIT
    how='No space left on device'
    limited() { "$@"; }
else # a limit on the size of each file stands in for it
    how='File too large'
    limited() { (ulimit -f 150 && "$@"); }
fi
options="--train.schedule=constant --run.tensorboard=off --run.report=off --run.keep=0"
ok "a run on a small disk" runs train $options --train.steps=10 --run.dir="$full/run"
cp -r "$full/run" "$dir/kept"
wide="--model.hidden=64 --model.pattern=*-*-*-*-"
ok "a checkpoint that does not fit is an error" fails 1 "$how" limited train $wide $options --run.dir="$full/wide"
ok "that names the file" grep -q 'safetensors' "$dir/err"
ok "nothing half-written is left" no_leftovers "$full"
if [ "$how" = 'No space left on device' ]; then
    ok "and says what to do" grep -q 'hint: free some space' "$dir/err"
    room=$(($(stat -f -c '%a * %S' "$full") / 1024))
    head -c $((room - 100))K /dev/zero >"$full/filler"
fi
ok "so is one later in a run" fails 1 "$how" limited train $options --train.steps=15 --run.dir="$full/run"
ok "the checkpoint before it survives" same "$dir/kept" "$full/run"
ok "and is whole" runs "$BRAID" ckpt verify "$full/run"
ok "nothing half-written is left then either" no_leftovers "$full"
rm -f "$full/filler"
rm -rf "$full/wide"
ok "with room the run goes on" says 'at step 10' train $options --train.steps=15 --run.dir="$full/run"
cd / && finish
