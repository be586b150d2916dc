#!/usr/bin/env bash
# Killed with SIGKILL at any moment, also in the middle of a save, and continued until it is done, a run
# ends with the same bits as one that was left alone. KILL_ROUNDS (or the first argument) runs, 3 unless
# told; KILL_SEED repeats the moments of an earlier test as far as a machine allows.
. "$(dirname "$0")/lib.sh"
rounds=${1:-${KILL_ROUNDS:-3}}
kills=6 # per run
RANDOM=${KILL_SEED:-$$}
echo "seed ${KILL_SEED:-$$}"
options="--train.steps=40 --run.keep=2 --run.tensorboard=off --run.report=off"
micros() { echo "${EPOCHREALTIME//[.,]/}"; }

begin=$(micros)
ok "a run that is left alone" runs train $options --run.save_every=1 --run.dir="$dir/whole"
length=$((($(micros) - begin) / 1000)) # ms
[ $failed -eq 0 ] || finish

saving() { compgen -G "$1/checkpoints/*.tmp-*" >/dev/null; }
wait_random() { # up to that many ms
    local ms=$((RANDOM % ($1 + 1)))
    sleep "$(printf '%d.%03d' $((ms / 1000)) $((ms % 1000)))"
}

# Every other kill waits for a save to be under way, then for a moment more; of two in a row the second hits a save beside the steps.
kill_one() { # run folder, number of the kill
    start $options --run.save_every=$((1 + $2 % 2)) --run.async_save=$([ $(($2 / 2 % 2)) -eq 1 ] && echo on || echo off) --run.dir="$1"
    wait_random $((length / kills))
    if [ $(($2 % 2)) -eq 1 ]; then
        while kill -0 $pid 2>/dev/null && ! saving "$1"; do :; done
        wait_random 2
    fi
    kill -9 $pid 2>/dev/null
    wait $pid 2>/dev/null
    [ $? -eq 137 ] && killed=$((killed + 1))
    saving "$1" && in_save=$((in_save + 1))
    [ ! -e "$1/checkpoints/latest" ] || runs "$BRAID" ckpt verify "$1"
}

killed=0 in_save=0
for round in $(seq "$rounds"); do
    run=$dir/run-$round
    for k in $(seq $kills); do
        kill_one "$run" "$k" || { ok "round $round: after kill $k every checkpoint is whole" false; break; }
    done
    ok "round $round: the run ends" runs train $options --run.save_every=1 --run.dir="$run"
    ok "round $round: with the same bits" same "$dir/whole" "$run"
    ok "round $round: nothing half-written is left" no_leftovers "$run"
    # Steps after the checkpoint that a kill left are done again, and logged again with the same loss.
    ok "round $round: the log holds the losses of the whole run" cmp <(losses "$dir/whole") <(losses "$run")
    ok "round $round: no line of the log is torn" test "$(grep -vc '^{.*}$' "$run/metrics.jsonl")" -eq 0
    rm -rf "$run"
done
echo "$killed runs were killed, $in_save of them while saving"
ok "kills hit" test "$killed" -ge "$rounds"
ok "kills hit saves" test "$in_save" -gt 0

# ---- ranks that write together: one of two processes is killed, the other ends, and both go on ------------------------------
export OMP_NUM_THREADS=1
start_ranks() { # options...: sets $pids
    local r port=$((10000 + RANDOM % 20000))
    pids=()
    for r in 0 1; do
        MASTER_ADDR=127.0.0.1 MASTER_PORT=$port WORLD_SIZE=2 RANK=$r LOCAL_RANK=$r exec_train "$@" >"$dir/out$r" 2>"$dir/err$r" &
        pids+=($!)
    done
}
exec_train() { exec timeout -s KILL 120 "${train_tiny[@]}" --parallel.timeout=10 $options --run.save_every=1 "$@"; }
run_ranks() {
    start_ranks "$@"
    wait "${pids[0]}" && wait "${pids[1]}" || { cat "$dir"/err? >&2; return 1; }
}
rank_kill() { # run folder, number of the kill: rank 0 and rank 1 in turn, in the middle of a save
    start_ranks --run.async_save=$([ $(($2 / 2 % 2)) -eq 1 ] && echo on || echo off) --run.dir="$1"
    wait_random $((length / kills))
    while kill -0 "${pids[0]}" 2>/dev/null && ! saving "$1"; do sleep 0.002; done
    wait_random 2
    # timeout starts braid as its child: that one is killed, and timeout ends with it
    pkill -9 -P "${pids[$(($2 % 2))]}" 2>/dev/null && killed=$((killed + 1))
    saving "$1" && in_save=$((in_save + 1))
    wait "${pids[@]}" 2>/dev/null
    [ ! -e "$1/checkpoints/latest" ] || runs "$BRAID" ckpt verify "$1"
}
killed=0 in_save=0
ok "ranks: a run that is left alone" runs run_ranks --run.dir="$dir/whole-ranks"
for k in $(seq $kills); do
    rank_kill "$dir/ranks" "$k" || { ok "ranks: after kill $k every checkpoint is whole" false; break; }
done
ok "ranks: the run ends" runs run_ranks --run.dir="$dir/ranks"
ok "ranks: with the same bits" same "$dir/whole-ranks" "$dir/ranks"
ok "ranks: nothing half-written is left" no_leftovers "$dir/ranks"
ok "ranks: the log holds the losses of the whole run" cmp <(losses "$dir/whole-ranks") <(losses "$dir/ranks")
echo "$killed ranks were killed, $in_save of them while saving"
ok "ranks: kills hit saves" test "$killed" -gt 0 -a "$in_save" -gt 0
finish
