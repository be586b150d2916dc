#!/usr/bin/env bash
# The bad day: damaged checkpoints, two jobs in one folder, data that change or shrink, closed descriptors, full disks,
# hangups. Nothing is lost, nothing happens in silence.
. "$(dirname "$0")/lib.sh"
step() { printf '%s/checkpoints/step-%08d' "$1" "$2"; }
holds_step() { [ -d "$(step "$1" "$2")" ]; }
copy() { rm -rf "$dir/$2" && cp -r "$dir/$1" "$dir/$2"; }
few="--run.tensorboard=off --run.report=off"

ok "20 steps, four checkpoints" runs train $few --run.save_every=5 --run.keep=0 --run.dir="$dir/run"

# ---- item 2: damaged checkpoints and run.resume=auto ----------------------------------------------------------------
damage() { # name, what to do in folder $c of step 20
    copy run "$1"
    (c=$(step "$dir/$1" 20) && eval "$2")
}
again="--train.steps=20 $few --run.keep=0"
check_damage() { # name, reason
    says "continuing .* at step 15" train $again --run.dir="$dir/$1" && grep -q "step-00000020 cannot be used: .*$2" "$dir/err" &&
        same "$dir/run" "$dir/$1"
}
damage manifest 'truncate -s 100 $c/manifest.json'
ok "a truncated manifest: named, the newest intact one is used, to the same bits" check_damage manifest "manifest.json: it is not a JSON object"
damage version 'sed -i "s/\"version\":1/\"version\":7/" $c/manifest.json'
ok "a newer version: the same" check_damage version "format version is 7"
damage lost 'rm $c/optim.safetensors'
ok "a lost file: the same" check_damage lost "optim.safetensors is missing"
damage cut 'truncate -s 5000 $c/model.safetensors'
ok "a cut file: the same" check_damage cut "has 5000 bytes"
damage flipped 'printf "\377" | dd bs=1 conv=notrunc status=none seek=3000 of=$c/model.safetensors'
ok "a flipped byte: the same" check_damage flipped "checksum"
damage loop 'rm -r $c && ln -s step-00000020 $c'
ok "a folder that cannot be looked at: the same up to there" fails 1 'step-00000020' train $again --run.dir="$dir/loop" --run.load_step=20
copy run all
for s in 5 10 15 20; do truncate -s 100 "$(step "$dir/all" $s)/manifest.json"; done
before=$(cd "$dir/all" && find . -name '*.safetensors' -exec cksum {} + | sort)
ok "only damaged ones: refused, with a reason and the way out" fails 1 'none of the 4 checkpoints' train $again --run.dir="$dir/all"
ok "it names run.resume=never" grep -q 'run.resume=never' "$dir/err"
ok "run.resume=must refuses them too" fails 1 'none of the 4 checkpoints' train $again --run.resume=must --run.dir="$dir/all"
ok "nothing was touched" test "$(cd "$dir/all" && find . -name '*.safetensors' -exec cksum {} + | sort)" = "$before"
limited() { (ulimit -n 4 && "$@"); }
try limited "${train_tiny[@]}" $again --run.dir="$dir/run"
ok "without descriptors it is refused, not begun at step 0" test $rc -ne 0
ok "and every checkpoint is there" test "$(ls -d "$dir"/run/checkpoints/step-* | wc -l)" -eq 4

ok "run.resume=never starts over" says 'moved 4 earlier checkpoints to' train $few --train.steps=3 --run.resume=never --run.dir="$dir/all"
ok "at step 0" holds_step "$dir/all" 3
ok "earlier checkpoints lie aside" test "$(find "$dir"/all/checkpoints-set-aside-*/ -name '*.safetensors' | wc -l)" -eq 8

copy run back
ok "run.load_step=10 continues from there" says 'at step 10' train $again --run.load_step=10 --run.dir="$dir/back"
ok "to the same bits" same "$dir/run" "$dir/back"
ok "later checkpoints lie aside" test "$(ls -d "$dir"/back/checkpoints-set-aside-*/step-* | wc -l)" -eq 2
ok "a step that is not there is refused, naming those that are" fails 2 'it holds steps 20, 15, 10, 5' train $again --run.load_step=12 --run.dir="$dir/back"
ok "run.load_step needs a run" fails 2 'run.dir is not set' train --run.load_step=12
ok "run.load_step and run.resume=never clash" fails 2 'run.load_step' train $again --run.load_step=10 --run.resume=never --run.dir="$dir/back"
ok "eval reads the step that is named" prints '^step: 10$' "$BRAID" eval "$dir/run" --run.load_step=10 --data.valid="$book" --run.threads=1
ok "generate refuses one that is not there" fails 2 'run.load_step=11' "$BRAID" generate "$dir/run" --run.load_step=11 --run.threads=1

# ---- item 3: two jobs in one folder --------------------------------------------------------------------------------------
start --train.steps=1000000 $few --run.dir="$dir/locked"
wait_for_step "$dir/locked" 3 $pid
ok "a second job is refused and told who works there" fails 1 "held by process $pid on host $(hostname)" train $few --run.dir="$dir/locked"
ok "reading a run in use is allowed" prints 'no checkpoint\|step' bash -c "\"$BRAID\" ckpt ls \"$dir/locked\" || echo no checkpoint"
kill -9 $pid
wait $pid 2>/dev/null
ok "after a kill the lock is free, and its holder is named" says "left by process $pid" train --train.steps=4 $few --run.dir="$dir/locked"
ok "a finished job leaves no lock" test ! -e "$dir/locked/lock"

# ---- item 4: identity of data -----------------------------------------------------------------------------------------------
cp "$book" "$dir/data.txt"
cp "$book" "$dir/moved.txt"
mine=("$BRAID" train "$tiny" --run.quiet=on --run.threads=1 $few --train.schedule=constant)
ok "a run on some data" runs "${mine[@]}" --data.train="$dir/data.txt" --train.steps=3 --run.dir="$dir/data"
ok "the manifest records size and hash" grep -q '"data":\[{"part":"train","path":"[^"]*data.txt","bytes":[0-9]*,"xxh3":"[0-9a-f]*"}\]' "$(step "$dir/data" 3)/manifest.json"
ok "the same bytes under another name continue" says 'at step 3' "${mine[@]}" --data.train="$dir/moved.txt" --train.steps=4 --run.dir="$dir/data"
touch -d 2001-01-01 "$dir/data.txt"
ok "another time does not count" says 'at step 4' "${mine[@]}" --data.train="$dir/data.txt" --train.steps=5 --run.dir="$dir/data"
sed -i '1s/apples/lemons/' "$dir/data.txt"
ok "other bytes under the same path are refused" fails 1 "data.txt" "${mine[@]}" --data.train="$dir/data.txt" --train.steps=6 --run.dir="$dir/data"
ok "with the way to accept them" grep -q 'data.accept_change=on' "$dir/err"
ok "data.accept_change=on continues" says 'at step 5' "${mine[@]}" --data.train="$dir/data.txt" --train.steps=6 --run.dir="$dir/data" --data.accept_change=on
ok "and is logged" grep -q '"event":"note".*data.txt' "$dir/data/metrics.jsonl"
ok "from then on they are the run's data" says 'at step 6' "${mine[@]}" --data.train="$dir/data.txt" --train.steps=7 --run.dir="$dir/data"
mkdir "$dir/files" && cp "$book" "$dir/files/a.txt"
ok "a folder of text" runs "${mine[@]}" --data.train="$dir/files" --train.steps=3 --run.dir="$dir/folder"
cp "$book" "$dir/files/b.txt"
ok "one more file is refused" fails 1 "new is $dir/files/b.txt" "${mine[@]}" --data.train="$dir/files" --train.steps=4 --run.dir="$dir/folder"

# Two processes of a launcher that sets variables; each in a folder of its own, where the same relative path holds other bytes.
port=$((20000 + $$ % 20000))
two_processes() { # options...: exit codes in $codes
    local rank pids=()
    for rank in 0 1; do
        mkdir -p "$dir/rank$rank"
        (cd "$dir/rank$rank" && MASTER_ADDR=127.0.0.1 MASTER_PORT=$port RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 \
            timeout 100 "${mine[@]}" --data.train=data.txt "$@" >"$dir/out$rank" 2>"$dir/err$rank") &
        pids+=($!)
    done
    codes=
    for rank in 0 1; do wait "${pids[$rank]}"; codes+="$? "; done
    port=$((port + 1))
}
mkdir "$dir/rank0" "$dir/rank1"
cp "$book" "$dir/rank0/data.txt"
cp "$book" "$dir/rank1/data.txt"
two_processes --train.steps=3 --run.dir="$dir/two"
ok "two processes with the same bytes train" test "$codes" = '0 0 '
sed -i '1s/apples/lemons/' "$dir/rank1/data.txt"
two_processes --train.steps=3 --run.dir="$dir/other"
ok "a rank with other bytes under the same path is refused" test "$codes" = '1 1 '
ok "and the difference is shown" grep -q 'data files.*data.train file 0: [0-9]* bytes with hash' "$dir/err0"
cp "$book" "$dir/rank1/data.txt"
(
    wait_for_step "$dir/shrink2" 3 $$ && truncate -s 100 "$dir/rank1/data.txt"
) &
two_processes --train.steps=1000000 --run.dir="$dir/shrink2"
ok "data that shrink on one rank end the run on all" test "$codes" = '1 1 '
ok "after a checkpoint" runs "$BRAID" ckpt verify "$dir/shrink2"
ok "and the file is named" grep -q 'data.txt became shorter' "$dir/err0"

# ---- item 6: descriptors, pipes, hangups, full disks -------------------------------------------------------------------------
long="--train.steps=1000000 --train.log_every=1 $few"
noisy=("$BRAID" train "$tiny" --data.train="$book" --run.threads=1)
ok "a closed pipe on stderr does not end training" test "$({ "${noisy[@]}" $few --train.steps=30 --run.dir="$dir/pipe" 2>&1; echo $? >"$dir/rc"; } | head -c 1 | wc -c) $(sleep 1; cat "$dir/rc")" = '1 0'
ok "it trained to the end" holds_step "$dir/pipe" 30
"${noisy[@]}" $few --train.steps=5 --run.dir="$dir/closed" <&- >&- 2>&-
ok "with closed descriptors training ends well" test $? -eq 0
ok "and its log holds records only" test "$(grep -vc '^{.*}$' "$dir/closed/metrics.jsonl")" -eq 0
ok "the checkpoint is whole" runs "$BRAID" ckpt verify "$dir/closed"
set -m
# These tests may themselves run under nohup, whose ignored signal a program would inherit.
env --default-signal=HUP "${train_tiny[@]}" $long --run.dir="$dir/hup" >"$dir/out" 2>"$dir/err" &
pid=$!
set +m
wait_for_step "$dir/hup" 3 $pid
kill -HUP $pid
wait $pid
ok "SIGHUP saves and stops like SIGTERM" test $? -eq 130
ok "with a checkpoint" runs "$BRAID" ckpt verify "$dir/hup"
set -m
nohup "${train_tiny[@]}" $long --run.minutes=0.05 --run.dir="$dir/nohup" >"$dir/out" 2>"$dir/err" &
pid=$!
set +m
wait_for_step "$dir/nohup" 3 $pid
kill -HUP $pid
wait $pid
ok "under nohup a hangup is ignored" grep -q 'run.minutes is up' "$dir/nohup/metrics.jsonl"
if [ -w /dev/full ]; then
    full() { # command...: exit code not 0, and a message
        "$@" >/dev/full 2>"$dir/err"
        [ $? -eq 1 ] && grep -q 'cannot write to standard output' "$dir/err" || { cat "$dir/err"; false; }
    }
    ok "generate into a full disk" full "$BRAID" generate "$dir/run" --generate.tokens=5 --run.threads=1
    ok "eval into a full disk" full "$BRAID" eval "$dir/run" --data.valid="$book" --run.threads=1
    ok "plan into a full disk" full "$BRAID" plan "$tiny"
    ok "help into a full disk" full "$BRAID" help docs
    ok "ckpt ls into a full disk" full "$BRAID" ckpt ls "$dir/run"
    ok "data info into a full disk" full "$BRAID" data info "$book"
    ok "train --help into a full disk" full "$BRAID" train --help
fi
"$BRAID" plan "$tiny" >&- 2>"$dir/err"
ok "plan with a closed stdout is an error" test $? -eq 1
{ sleep 0.5 && "$BRAID" plan "$tiny" 2>"$dir/err"; echo $? >"$dir/rc"; } | true
ok "a reader that goes away ends plan quietly, not with 0" test "$(cat "$dir/rc") $(wc -c <"$dir/err")" = '141 0'

# ---- item 7: a data file that shrinks ------------------------------------------------------------------------------------------
cp "$book" "$dir/shrink.txt"
train_tiny=("$BRAID" train "$tiny" --data.train="$dir/shrink.txt" --run.quiet=on --run.threads=1)
start $long --run.dir="$dir/shrunk"
wait_for_step "$dir/shrunk" 3 $pid
truncate -s 100 "$dir/shrink.txt"
wait $pid
rc=$?
ok "a data file that becomes shorter ends the run with an error" test $rc -eq 1
ok "that names the file" grep -q 'shrink.txt became shorter' "$dir/err"
ok "after a checkpoint" grep -q 'a checkpoint of step [0-9]* was saved' "$dir/err"
ok "which is whole" runs "$BRAID" ckpt verify "$dir/shrunk"
cp "$book" "$dir/shrink.txt"
at=$(sed 's/step-0*//' "$dir/shrunk/checkpoints/latest")
ok "put back, the run continues" says "at step $at" train --run.dir="$dir/shrunk" --train.steps=$((at + 1)) $few

# ---- item 9: Ctrl-C while a large step is planned ------------------------------------------------------------------------------
train_tiny=("$BRAID" train "$tiny" --data.train="$book" --run.threads=1 --parallel.pp=2 --parallel.ranks=2 '--model.pattern=[*-]x32')
start --train.micro_batch=1 --train.global_batch=8000 --train.steps=9 --train.warmup=1 --run.dir="$dir/planned"
wait_while_running $pid test -e "$dir/planned/lock" # taken before the plan is made, which takes seconds
kill -INT $pid
wait $pid
rc=$?
ok "Ctrl-C ends a run that is planning" test $rc -eq 130
ok "which says so" grep -q 'interrupted before the first step' "$dir/err"

# ---- item 11: leftovers, FIFOs, latest --------------------------------------------------------------------------------------------
copy run left
mkdir "$(step "$dir/left" 30).tmp-0123456789abcdef"
: >"$dir/left/checkpoints/latest.tmp-0123456789abcdef"
: >"$dir/left/config.ini.tmp-0123456789abcdef"
train_tiny=("$BRAID" train "$tiny" --data.train="$book" --run.quiet=on --run.threads=1)
ok "a start removes what a kill left" says 'nothing to do' train --train.steps=20 --run.keep=2 --run.dir="$dir/left"
ok "temporary files and folders" no_leftovers "$dir/left"
ok "and surplus checkpoints" test "$(ls -d "$dir"/left/checkpoints/step-* | wc -l)" -eq 2
mkdir "$dir/fifo" && mkfifo "$dir/fifo/data" "$dir/fifo/config.ini" "$dir/fifo/x.safetensors" "$dir/fifo/p.idx"
: >"$dir/fifo/p.bin"
limit=(timeout 20 "$BRAID")
ok "a FIFO as data is refused" fails 1 'neither a file nor a folder' "${limit[@]}" train "$tiny" --data.train="$dir/fifo/data"
ok "a FIFO as an index is refused" fails 1 'not a regular file' "${limit[@]}" train "$tiny" --data.train="$dir/fifo/p"
ok "a FIFO as a config is refused" fails 1 'not a regular file' "${limit[@]}" plan "$dir/fifo/config.ini"
ok "a FIFO as weights is refused" fails 1 'not a regular file' "${limit[@]}" train "$tiny" --data.train="$book" --run.load_weights="$dir/fifo/x.safetensors"
ok "a FIFO as text is refused" fails 1 'neither a file nor a folder' "${limit[@]}" data tokenize --in "$dir/fifo/data" --out "$dir/fifo/o"
mkdir -p "$dir/latest/checkpoints/latest"
ok "a latest that cannot be written does not stop training" runs train --train.steps=6 --run.save_every=2 $few --run.dir="$dir/latest"
ok "it is noted" grep -q '"event":"note".*latest' "$dir/latest/metrics.jsonl"
ok "the checkpoints are there" runs "$BRAID" ckpt verify "$dir/latest"
finish
