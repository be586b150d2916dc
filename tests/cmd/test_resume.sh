#!/usr/bin/env bash
# Stopping and continuing a run: the result is the same bits as without a stop.
. "$(dirname "$0")/lib.sh"
long="--train.steps=2000 --train.log_every=1"

# ---- straight on, for comparison ---------------------------------------------------------------
ok "20 steps straight on" runs train --run.dir="$dir/straight"
ok "the run folder holds a report" test -s "$dir/straight/report.html"
ok "it holds TensorBoard events" test -n "$(find "$dir/straight/tb" -name 'events.out.tfevents.*' -size +0)"
ok "it holds one line per step" test "$(steps_done "$dir/straight")" -eq 20
ok "nothing half-written is left" no_leftovers "$dir/straight"
ok "a finished run has nothing to do" says 'nothing to do: 20 of 20 steps' train --run.dir="$dir/straight"

# ---- stopped by steps ------------------------------------------------------------------------------
constant=--train.schedule=constant
ok "20 steps at a constant rate" runs train $constant --run.dir="$dir/constant"
ok "10 steps" runs train $constant --train.steps=10 --run.dir="$dir/tenth"
ok "10 more" says 'continuing .* at step 10' train $constant --train.steps=20 --run.dir="$dir/tenth"
ok "are the same bits as 20" same "$dir/constant" "$dir/tenth"
ok "another schedule gives other bits" test "$("$BRAID" ckpt diff "$dir/constant" "$dir/straight" >/dev/null; echo $?)" -eq 1
ok "the log went on" test "$(steps_done "$dir/tenth")" -eq 20
ok "and holds the same losses" cmp <(losses "$dir/constant") <(losses "$dir/tenth")

# ---- options that may and may not change --------------------------------------------------------------
cp -r "$dir/tenth" "$dir/other"
ok "another width is refused, naming both" fails 1 '48' train $constant --model.hidden=48 --run.dir="$dir/other"
ok "with the checkpoint's value" grep -q 'model.hidden.*32' "$dir/err"
ok "another pattern is refused" fails 1 'model.pattern' train --model.pattern='*-' --run.dir="$dir/other"
ok "the refusals changed nothing" same "$dir/other" "$dir/tenth"
ok "run options may change" says 'train.lr: 0.003 -> 0.0001' train $constant --train.steps=22 --train.lr=1e-4 --run.keep=5 --run.dir="$dir/other"
ok "an option left out is the run's own" runs "$BRAID" train --run.dir="$dir/other" --train.steps=23 --run.threads=1 --run.quiet=on
ok "also in the config it leaves" grep -q '^schedule = constant' "$dir/other/config.ini"

# ---- run.resume -----------------------------------------------------------------------------------------
cp -r "$dir/tenth" "$dir/used"
ok "run.resume=must needs a checkpoint" fails 2 'run.resume=must' train --run.resume=must --run.dir="$dir/fresh"
ok "and makes no folder" test ! -e "$dir/fresh"
ok "run.resume=never starts over in a used folder" says "moved 2 earlier checkpoints" train --run.resume=never --train.steps=3 --run.dir="$dir/used"
ok "it starts in a fresh one" runs train --run.resume=never --train.steps=3 --run.dir="$dir/fresh"
ok "run.resume=must continues" says 'at step 20' train $constant --run.resume=must --train.steps=21 --run.dir="$dir/tenth"

# ---- run.load: the weights of another run -------------------------------------------------------------
ok "weights of another run start a new one" runs train --run.load="$dir/straight" --train.warmup=0 --train.steps=1 --train.lr=0 --run.dir="$dir/warm"
ok "at step 0" grep -q '^{"step":1,' "$dir/warm/metrics.jsonl"
weights() { echo "$1"/checkpoints/step-*/model.safetensors; }
ok "with these weights" same "$(weights "$dir/straight")" "$(weights "$dir/warm")"

# ---- configs that a run leaves behind -------------------------------------------------------------------
ok "the config of the run folder reloads" runs "$BRAID" train "$dir/straight/config.ini" --run.dir="$dir/again" --run.threads=1 --run.quiet=on
ok "and gives the same bits" same "$dir/straight" "$dir/again"
ok "the config in the checkpoint reloads" prints 'parameters' "$BRAID" plan "$dir/straight/checkpoints/step-00000020/config.ini"

# ---- stopped by signals and by time -------------------------------------------------------------------
ok "2000 steps straight on" runs train $long --run.dir="$dir/long"
for signal in INT TERM; do
    run=$dir/stop-$signal
    start $long --run.dir="$run"
    wait_for_step "$run" 5 $pid
    kill -$signal $pid
    wait $pid
    rc=$?
    ok "SIG$signal ends with exit code 130" test $rc -eq 130
    ok "SIG$signal: it says what was saved" grep -q 'stopped after step [0-9]* of 2000; a checkpoint was saved' "$dir/err"
    ok "SIG$signal: it says how to go on" grep -q 'the same command continues' "$dir/err"
    ok "SIG$signal: in one line" test "$(wc -l <"$dir/err")" -eq 1
    ok "SIG$signal: the checkpoint is whole" prints 'ok, step' "$BRAID" ckpt verify "$run"
    at=$(cat "$run/checkpoints/latest")
    ok "SIG$signal: before the end" test "$at" != step-000002000
    ok "SIG$signal: the same command continues" says 'continuing' train $long --run.dir="$run"
    ok "SIG$signal: to the same bits" same "$dir/long" "$run"
    ok "SIG$signal: every step is in the log once" test "$(losses "$run" | wc -l) $(steps_done "$run")" = '2000 2000'
done

try train $long --run.minutes=0.000001 --run.dir="$dir/minutes"
ok "run.minutes ends with exit code 130" test $rc -eq 130
ok "run.minutes saves" grep -q 'a checkpoint was saved' "$dir/err"
ok "run.minutes is not inherited by the next command" runs train $long --run.dir="$dir/minutes"
ok "run.minutes: the same bits" same "$dir/long" "$dir/minutes"

train_tiny=("${train_tiny[@]/--run.quiet=on/--run.quiet=off}")
start --train.steps=1000000 --train.log_every=1
ok "without a run folder a step is seen" wait_for_text "loss" "$dir/err" $pid
kill -INT $pid
wait $pid
ok "without a run folder a signal says that nothing was saved" grep -q 'nothing was saved' "$dir/err"

# ---- a plan that was chosen to fit stays, whatever the config file says ---------------------------------------
fit="--plan.fit=0.00053GB --train.global_batch=4 $constant"
ok "plan.fit chooses a smaller microbatch" says 'micro_batch=1' train $fit --train.steps=3 --run.dir="$dir/fit"
ok "and its run goes on with it" says 'goes on with the plan it was started with' \
    train $fit --train.steps=6 --run.dir="$dir/fit"
ok "with the microbatch of its start" grep -q '^micro_batch = 1 ' "$dir/fit/config.ini"
try train $constant --train.steps=6 --train.micro_batch=1 --train.global_batch=4 --run.dir="$dir/whole"
ok "bit for bit as a run that was told so by hand" same "$dir/fit" "$dir/whole"
ok "another budget asks for another plan" says 'plan.fit: .* plans tried for' train ${fit/0.00053GB/2GB} --train.steps=7 --run.dir="$dir/fit"
ok "which is the one of a new run" grep -q '^micro_batch = 4 ' "$dir/fit/config.ini"
finish
