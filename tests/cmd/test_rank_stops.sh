#!/usr/bin/env bash
# Ranks that stop or are killed in the middle of training: every survivor names the rank, the job ends, and the run goes on afterwards
# with the bits of one that was left alone. And launches that cannot work: one clear error, no hang. Under mpirun where there is
# one, then with torchrun's variables (RANKS_BY=tcp: these alone).
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
n=4
by=${RANKS_BY:-mpi}
if [ "$by" = mpi ] && { ! command -v mpirun >/dev/null || mpirun --oversubscribe --allow-run-as-root -np 2 "$BRAID" train --no.such=1 2>&1 | grep -q 'without MPI'; }; then
    echo "no mpirun, or built without MPI: ranks meet over TCP in this test"
    by=tcp
fi
# One process that ends when all ranks have; its exit code is not 0 if one of theirs is not.
if [ "$by" = mpi ]; then
    # A build with ASan looks for leaks where ranks are threads only: Open MPI itself has some.
    launch() { ASAN_OPTIONS=detect_leaks=0 exec mpirun --oversubscribe --allow-run-as-root -np $n "$@"; }
    variable=OMPI_COMM_WORLD_RANK
else
    launch() {
        local r pids=() worst=0
        export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 20000)) WORLD_SIZE=$n
        for ((r = 0; r < n; r++)); do
            RANK=$r LOCAL_RANK=$r "$@" &
            pids+=($!)
        done
        for ((r = 0; r < n; r++)); do wait "${pids[$r]}" || worst=$?; done
        exit $worst
    }
    variable=RANK
fi
options=(--model.pattern='*E*-' --model.experts=4 --train.micro_batch=1 --train.global_batch=4 --parallel.ep=2 --parallel.timeout=3
    --train.schedule=constant --run.tensorboard=off --run.report=off --run.save_every=5)
job() { # seconds, options...: a whole run; output in $dir/err
    (launch timeout "$1" "${train_tiny[@]}" "${options[@]}" "${@:2}") >"$dir/out" 2>"$dir/err"
}
rank_pid() { # the process of a rank of the job in $job
    local p
    for p in $(pgrep -x "$(basename "$BRAID")"); do
        { tr '\0' '\n' <"/proc/$p/environ"; } 2>/dev/null | grep -qx "$variable=$1" && grep -qz -- "--run.dir=$run" "/proc/$p/cmdline" 2>/dev/null && echo "$p" && return
    done
    return 1
}
reached() { # step: the log has it
    [ -f "$run/metrics.jsonl" ] && grep -q "\"step\":$1," "$run/metrics.jsonl"
}
wait_for() { # seconds, command...
    local end=$((SECONDS + $1))
    while ! "${@:2}"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}
ended() { ! kill -0 "$job" 2>/dev/null; }
names() { # rank: this survivor's error names rank 2, its step and the last collective it was seen at
    grep -E "^braid: error on rank $1: .* rank 2 \(process [0-9]+ on [^ ]+\): step [0-9]+, (past|in) collective [0-9]+ '[^']+' of group [a-z]+ since" "$dir/err" >/dev/null ||
        { sed 's/^/  err: /' "$dir/err" | grep -v 'loss' | tail -20; return 1; }
}

# A run without end, one of whose ranks gets a signal after a dozen steps.
disturb() {
    run=$dir/run-$1
    (launch "${train_tiny[@]}" "${options[@]}" --run.dir="$run" --train.steps=100000) >"$dir/out" 2>"$dir/err" &
    job=$!
    wait_for 120 reached 12 || { echo "not ok step 12 was not reached"; tail -5 "$dir/err"; kill $job; exit 1; }
    victim=$(rank_pid 2)
    kill "-$1" "$victim"
    begin=$SECONDS
}

(launch "${train_tiny[@]}" "${options[@]}" --run.dir="$dir/whole" --train.steps=20) >"$dir/out" 2>"$dir/err"
ok "$by: $n ranks train" test $? -eq 0
[ $failed -eq 0 ] || { head -5 "$dir/err"; finish; }

disturb STOP
survivors_reported() { [ "$(grep -cE '^braid: error on rank [013]:' "$dir/err")" -eq 3 ]; }
ok "$by: a stopped rank: every survivor reports soon" wait_for 60 survivors_reported
for r in 0 1 3; do ok "$by: rank $r names the stopped rank, its step and collective" names $r; done
[ "$by" = mpi ] || kill -CONT "$victim" # nobody else would end it
ok "$by: ... and the job ends" wait_for 60 ended
kill -CONT "$victim" 2>/dev/null
wait $job
ok "$by: ... with an error" test $? -ne 0
ok "$by: the last checkpoint is whole" runs "$BRAID" ckpt verify "$run"

disturb KILL
ok "$by: a killed rank: the job ends soon" wait_for 60 ended
wait $job
ok "$by: ... with an error" test $? -ne 0
ok "$by: ... and the rank is named, by the launcher or by survivors" grep -qE 'rank 2 ' "$dir/err"

# Go on from the newest checkpoint and compare with a run of as many steps that was left alone.
last=$(grep -oE '"step":[0-9]+' "$run/metrics.jsonl" | tail -1 | grep -oE '[0-9]+')
goal=$((last + 10))
job 120 --run.dir="$run" --train.steps=$goal
ok "$by: the run goes on" test $? -eq 0
job 120 --run.dir="$dir/alone" --train.steps=$goal
ok "$by: ... and ends with the bits of one that was left alone" same "$dir/alone" "$run"

# ---- launches that cannot work ----------------------------------------------------------------------------------------------
refused() { # text, options...: one error, with this text, before long
    local begin=$SECONDS rc
    (launch timeout 90 "${train_tiny[@]}" --parallel.timeout=3 "${@:2}") >"$dir/out" 2>"$dir/err"
    rc=$?
    if [ $rc -eq 0 ] || [ $((SECONDS - begin)) -ge 80 ] || [ "$(grep -c '^braid: error' "$dir/err")" -ne 1 ] || ! grep -qF -- "$1" "$dir/err"; then
        echo "  wanted one error with: $1"
        show $rc
    fi
}
ok "$by: ranks that do not divide into stages" refused "4 ranks do not divide into parallel.pp = 3" --parallel.pp=3
ok "$by: ranks that do not divide by ep" refused "do not divide by parallel.ep = 3" --model.pattern="*E" --parallel.ep=3 --model.experts=6
ok "$by: experts that do not divide by ep" refused "model.experts must be a multiple of parallel.ep" --model.pattern="*E" --parallel.ep=4 --model.experts=6
ok "$by: segments that do not divide by pp" refused "3 segments" --parallel.pp=2 --model.pattern='*-|*-|*-'
ok "$by: another number of ranks than asked for" refused "the number of ranks differs" --parallel.ranks=3
ok "$by: a batch that does not divide" refused "train.global_batch = 6 does not divide" --train.global_batch=6 --train.micro_batch=1
ok "$by: a file that is not there" refused "/no/such/folder" --run.load=/no/such/folder
ok "$by: an option that is not known" refused "unknown option" --no.such=1
[ "$by" = tcp ] || RANKS_BY=tcp bash "$0" || failed=1
finish
