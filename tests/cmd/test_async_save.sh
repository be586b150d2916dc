#!/usr/bin/env bash
# run.async_save: checkpoints written while training goes on have the bits of those that training waits for, on one rank, on thread ranks and
# on processes; a stop signal and the end wait for them; an error ends the run. Kills are in test_kill.sh, faults in tests/torture.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
saves=(--run.save_every=3 --run.keep=0 --train.steps=11)
ranks() { # n, training options...: processes with torchrun's variables; exit code of the worst
    local n=$1 r pids=() worst=0 port=$((10000 + RANDOM % 20000))
    shift
    for ((r = 0; r < n; r++)); do
        MASTER_ADDR=127.0.0.1 MASTER_PORT=$port WORLD_SIZE=$n RANK=$r LOCAL_RANK=$r timeout 120 "${train_tiny[@]}" "$@" >"$dir/out$r" 2>"$dir/err$r" &
        pids+=($!)
    done
    for r in "${pids[@]}"; do wait "$r" || worst=$?; done
    cat "$dir"/err? >&2
    return $worst
}
all_same() { # A B: every checkpoint of two runs
    local step
    for step in 3 6 9 11; do
        same "$1/checkpoints/step-$(printf %08d $step)" "$2/checkpoints/step-$(printf %08d $step)" || return 1
    done
}
pair() { # name, command and options...: with and without
    local name=$1
    shift
    ok "$name: waiting for checkpoints" runs "$@" "${saves[@]}" --run.dir="$dir/$name"
    ok "$name: not waiting for them" runs "$@" "${saves[@]}" --run.async_save=on --run.dir="$dir/$name-async"
    ok "$name: the same bits in all" all_same "$dir/$name" "$dir/$name-async"
    ok "$name: all are in the log" test "$(grep -c '"saved step' "$dir/$name-async/metrics.jsonl")" -eq "$(grep -c '"saved step' "$dir/$name/metrics.jsonl")"
    ok "$name: nothing half-written is left" no_leftovers "$dir/$name-async"
}
pair one train
pair threads train --parallel.ranks=2
pair processes ranks 2
ok "--async-save is Megatron's name" runs train "${saves[@]}" --async-save --run.dir="$dir/alias"
ok "with the same effect" all_same "$dir/one" "$dir/alias"
ok "without a folder it is said to have no effect" says 'run.async_save = on .* has no effect' "$BRAID" train "$tiny" --data.train="$book" --run.threads=1 --train.steps=5 --run.async_save=on

start --train.steps=100000 --run.save_every=1 --run.async_save=on --train.log_every=1 --run.dir="$dir/stop"
wait_for_step "$dir/stop" 5 $pid
kill -TERM $pid
wait $pid
ok "SIGTERM ends the run with exit code 130" test $? -eq 130
ok "after a checkpoint of its last step" prints 'ok, step' "$BRAID" ckpt verify "$dir/stop"
ok "which the next run continues" says 'continuing .* at step' train --run.dir="$dir/stop" --train.steps=5
ok "nothing half-written is left" no_leftovers "$dir/stop"

mkdir "$dir/full" && : >"$dir/full/checkpoints"
ok "an error of the thread ends the run" fails 1 "$dir/full/checkpoints" train --train.steps=100000 --run.save_every=1 --run.async_save=on --run.dir="$dir/full"
rm -r "$dir/full" && mkdir "$dir/full" && : >"$dir/full/checkpoints"
try ranks 2 --train.steps=100000 --run.save_every=1 --run.async_save=on --run.dir="$dir/full"
ok "and all its ranks" test $rc -ne 0 -a $rc -ne 124
ok "with one message" test "$(grep -c 'braid: error' "$dir/err")" -eq 1
finish
