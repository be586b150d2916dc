#!/usr/bin/env bash
# Several ranks from the command line: threads of one process, and processes of mpirun where there is one. Whatever the ranks, the
# files are those of one, and ranks of either kind give the same bits.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
dp=(--parallel.ranks=2)

# ---- threads -----------------------------------------------------------------------------------------------------------
ok "20 steps on one rank" runs train --run.dir="$dir/one"
ok "20 steps on two threads" runs train "${dp[@]}" --run.dir="$dir/two"
ok "the log has each step once" test "$(steps_done "$dir/two")" -eq 20
ok "one report, one config" test -s "$dir/two/report.html" -a -s "$dir/two/config.ini"
close() { # A B: losses of two runs agree to 1e-4 at every step
    paste -d' ' <(losses "$1") <(losses "$2") | awk '{ d = $2 - $4; if (d < 0) d = -d; if (NF != 4 || d > 1e-4 * $2) bad = 1 } END { exit bad || NR != 20 }'
}
ok "it learns like one rank" close "$dir/one" "$dir/two"
ok "10 steps on two" runs train "${dp[@]}" --train.schedule=constant --train.steps=10 --run.dir="$dir/half"
ok "10 more on two" says 'continuing .* at step 10' train "${dp[@]}" --train.schedule=constant --run.dir="$dir/half"
ok "20 at once" runs train "${dp[@]}" --train.schedule=constant --run.dir="$dir/whole"
ok "are the same bits" same "$dir/half" "$dir/whole"
cp -r "$dir/two" "$dir/more"
ok "one rank continues what two began" says 'at step 20' train --train.steps=22 --run.dir="$dir/more"
ok "weights go from two ranks to one" runs train --run.load_weights="$dir/two" --train.warmup=0 --train.steps=1 --train.lr=0 --run.dir="$dir/warm"
weights() { # run: the weights of its newest checkpoint as one file
    rm -rf "$1.hf" && "$BRAID" export "$1" "$1.hf" >/dev/null 2>&1
    echo "$1.hf/model.safetensors"
}
ok "unchanged" same "$(weights "$dir/two")" "$(weights "$dir/warm")"
ok "what does not divide is refused" fails 2 'train.global_batch = 4 does not divide' train --parallel.ranks=3
ok "a global batch left open has a microbatch for each" runs train --parallel.ranks=3 --train.global_batch=0 --train.steps=3
ok "plan shows every rank" prints '^   1     0     1' "$BRAID" plan "$tiny" "${dp[@]}"
optimizer() { "$BRAID" plan "$tiny" --train.global_batch=8 "$@" | awk '$1 == "optimizer" { print $2 }'; }
ok "with four ranks the optimizer takes a quarter of the memory" test $(($(optimizer --parallel.ranks=4) * 3)) -lt "$(optimizer)"

start "${dp[@]}" --train.steps=2000 --train.log_every=1 --run.dir="$dir/stop"
wait_for_step "$dir/stop" 5 $pid
kill -TERM $pid
wait $pid
ok "SIGTERM ends all ranks with exit code 130" test $? -eq 130
ok "once" test "$(grep -c 'stopped after step [0-9]* of 2000; a checkpoint was saved' "$dir/err")" -eq 1
ok "the checkpoint is whole" prints 'ok, step' "$BRAID" ckpt verify "$dir/stop"

# ---- processes that read each other's memory, as ranks on one GPU do --------------------------------------------------
shared() { DEVICE=cpu ONLY='PP2 VPP2 EP2 overlap' "$root/tests/gpu/ranks.sh" "$BRAID"; }
ok "a mesh of four processes over ipc has losses, bits and memory of thread ranks" prints '^1 passed, 0 failed' shared

# ---- processes ---------------------------------------------------------------------------------------------------------
if ! command -v mpirun >/dev/null || "$BRAID" train "$tiny" --parallel.comm=mpi 2>&1 | grep -q 'built without MPI'; then
    echo "skipped: no mpirun, or built without MPI"
    finish
fi
mpi() { # ranks, training options...
    local n=$1
    shift
    # A build with ASan looks for leaks where ranks are threads only: Open MPI itself has some.
    ASAN_OPTIONS=detect_leaks=0 timeout 120 mpirun --oversubscribe --allow-run-as-root -np "$n" "${train_tiny[@]}" "$@"
}
ok "20 steps on two processes" runs mpi 2 --run.dir="$dir/mpi"
ok "the same bits as two threads" same "$dir/two" "$dir/mpi"
ok "each step is logged once" test "$(steps_done "$dir/mpi")" -eq 20
four=(--train.global_batch=8)
ok "four threads" runs train --parallel.ranks=4 "${four[@]}" --run.dir="$dir/four"
ok "four processes" runs mpi 4 "${four[@]}" --parallel.zero=off --run.dir="$dir/mpi4"
ok "the same bits, sharded or not" same "$dir/four" "$dir/mpi4"
ok "10 steps on two processes" runs mpi 2 --train.schedule=constant --train.steps=10 --run.dir="$dir/mpihalf"
ok "10 more" runs mpi 2 --train.schedule=constant --run.dir="$dir/mpihalf"
ok "are the bits of 20 on threads" same "$dir/mpihalf" "$dir/whole"
mpi 2 --parallel.ranks=3 >"$dir/out" 2>"$dir/err"
ok "a wrong number of ranks fails" test $? -ne 0
ok "and is said" grep -q 'the number of ranks differs' "$dir/err"
no_leftovers "$dir/mpi" && echo "ok nothing half-written is left" || { echo "not ok leftovers"; failed=1; }
finish
