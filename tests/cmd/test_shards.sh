#!/usr/bin/env bash
# Checkpoints that ranks write together: the tensors are those that rank 0 alone would write, on every mesh, with and without run.async_save; all readers
# take them; a rank that fails is named and leaves nothing half-written; ranks that do not see one folder are told before the first step. Kills
# are in test_kill.sh and test_rank_stops.sh, faults of single calls in tests/torture.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
shards() { find "$1/checkpoints" -path "*step-00000005/$2-*.safetensors" | wc -l; }
options=(--train.global_batch=8 --train.micro_batch=1 --run.tensorboard=off --run.report=off)
pair() { # name, least files of weights and of moments, options...: all ranks write, and rank 0 alone
    local name=$1 files=$2
    shift 2
    ok "$name: all ranks write" runs train "${options[@]}" "$@" --train.steps=5 --run.save_every=2 --run.async_save=on --run.dir="$dir/$name"
    ok "$name: each its own file" test "$(shards "$dir/$name" model)" -ge "$files" -a "$(shards "$dir/$name" optim)" -ge "$files"
    ok "$name: rank 0 writes" runs train "${options[@]}" "$@" --train.steps=5 --run.save_ranks=1 --run.dir="$dir/$name-alone"
    ok "$name: one file" test -s "$dir/$name-alone/checkpoints/step-00000005/model.safetensors"
    ok "$name: the same tensors" same "$dir/$name" "$dir/$name-alone"
    ok "$name: nothing half-written is left" no_leftovers "$dir/$name"
}
pair copies 4 --parallel.ranks=4 --parallel.zero=0
pair pieces 4 --parallel.ranks=4 --parallel.zero=3
pair stages 6 --parallel.ranks=8 --parallel.pp=2 --parallel.tp=2 --parallel.zero=2
pair experts 4 --parallel.ranks=4 --parallel.ep=2 --model.pattern='*E*-' --model.experts=4
ok "the first two of four" runs train "${options[@]}" --train.steps=5 --parallel.ranks=4 --parallel.zero=0 --run.save_ranks=2 --run.dir="$dir/two"
ok "write two files" test "$(shards "$dir/two" model)" -eq 2 -a -s "$dir/two/checkpoints/step-00000005/model-00002-of-00002.safetensors"
ok "with the same tensors" same "$dir/two" "$dir/copies"
ok "more than there are: all" runs train "${options[@]}" --train.steps=5 --parallel.ranks=2 --run.save_ranks=9 --run.dir="$dir/nine"
ok "two files" test "$(shards "$dir/nine" model)" -eq 2

# ---- readers ----------------------------------------------------------------------------------------------------------------
ok "ckpt verify reads every file" prints 'ok, step 5' "$BRAID" ckpt verify "$dir/stages"
ok "ckpt ls lists the tensors of all" prints 'step 5, 42 tensors' "$BRAID" ckpt ls "$dir/stages/checkpoints/step-00000005"
ok "ckpt convert" runs "$BRAID" ckpt convert "$dir/stages" "$dir/stacked" --layout=stacked
ok "and of one file" runs "$BRAID" ckpt convert "$dir/stages-alone" "$dir/stacked-alone" --layout=stacked
ok "give the same" same "$dir/stacked" "$dir/stacked-alone"
ok "export" runs "$BRAID" export "$dir/stages" "$dir/hf"
ok "and of one file" runs "$BRAID" export "$dir/stages-alone" "$dir/hf-alone"
ok "give the same" same "$dir/hf/model.safetensors" "$dir/hf-alone/model.safetensors"
cp -r "$dir/stages" "$dir/more" && cp -r "$dir/stages-alone" "$dir/more-alone"
ok "another mesh continues it" says 'at step 5' train "${options[@]}" --train.steps=7 --parallel.ranks=2 --parallel.tp=1 --parallel.pp=1 --parallel.zero=3 --run.dir="$dir/more"
ok "as it continues one file" runs train "${options[@]}" --train.steps=7 --parallel.ranks=2 --parallel.tp=1 --parallel.pp=1 --parallel.zero=3 --run.dir="$dir/more-alone"
ok "with the same bits" same "$dir/more" "$dir/more-alone"
rm "$dir/more/checkpoints/step-00000007/model-00002-of-00002.safetensors"
ok "a lost file is named" fails 1 'model-00002-of-00002.safetensors is missing' "$BRAID" ckpt verify "$dir/more/checkpoints/step-00000007"

# ---- processes --------------------------------------------------------------------------------------------------------------
ranks() { # ranks, setup of rank 1 before it starts, options...: processes with torchrun's variables; the worst exit code
    local n=$1 setup=$2 r pids=() worst=0 port=$((10000 + RANDOM % 20000))
    shift 2
    for ((r = 0; r < n; r++)); do
        ( [ $r -ne 1 ] || eval "$setup"
          export MASTER_ADDR=127.0.0.1 MASTER_PORT=$port WORLD_SIZE=$n RANK=$r LOCAL_RANK=$r
          exec timeout 120 "${train_tiny[@]}" --parallel.timeout=20 "${options[@]}" "$@" ) >"$dir/out$r" 2>"$dir/err$r" &
        pids+=($!)
    done
    for r in "${pids[@]}"; do wait "$r" || worst=$?; done
    cat "$dir"/err[0-9] >&2
    return $worst
}
for async in off on; do
    run=$dir/full-$async
    ok "async_save=$async: two processes" runs ranks 2 : --train.steps=3 --run.dir="$run"
    try ranks 2 "trap '' XFSZ; ulimit -f 40" --train.steps=4000 --run.save_every=2 --run.async_save=$async --run.dir="$run"
    ok "async_save=$async: a rank that cannot write ends the run" test $rc -ne 0 -a $rc -ne 124
    ok "async_save=$async: and is named" grep -q '^braid: error: rank 1: cannot write .*-of-00002.safetensors' "$dir/err"
    ok "async_save=$async: once" test "$(grep -c 'braid: error' "$dir/err")" -eq 1
    ok "async_save=$async: the earlier checkpoint is whole" prints 'ok, step 3' "$BRAID" ckpt verify "$run"
    ok "async_save=$async: nothing half-written is left" no_leftovers "$run"
    ok "async_save=$async: the next run continues" runs ranks 2 : --train.steps=6 --run.dir="$run"
done
try ranks 2 : --train.steps=3000 --train.lr=100 --train.schedule=constant --train.warmup=0 --train.clip=0 --run.save_every=1 --run.async_save=on --run.dir="$dir/nan"
ok "a run that stops at a bad value fails" test $rc -ne 0 -a $rc -ne 124
ok "after the checkpoint under way is complete" test "$(grep -c 'saved step' "$dir/nan/metrics.jsonl")" -eq "$(grep -c '^{"step":[0-9]*,"loss"' "$dir/nan/metrics.jsonl")"
ok "it and those before are whole" prints 'ok, step' "$BRAID" ckpt verify "$dir/nan"
ok "nothing half-written is left" no_leftovers "$dir/nan"
mkdir -p "$dir/a" "$dir/b/run"
cp -r "$book" "$dir/a" && cd "$dir/a" || exit 1
try ranks 2 "cd '$dir/b'" --train.steps=5 --run.dir=run
ok "ranks that do not see one folder end" test $rc -ne 0 -a $rc -ne 124
ok "with a reason" grep -q 'rank 1: run/ranks.tmp-.*, which rank 0 has created, is not there on this rank' "$dir/err"
ok "and a hint" grep -q 'hint: .*run.save_ranks=1' "$dir/err"
ok "before the first step" test "$(steps_done run)" = "" -o "$(steps_done run)" = 0
ok "with run.save_ranks=1 they train" runs ranks 2 "cd '$dir/b'" --train.steps=5 --run.save_ranks=1 --run.dir=run
ok "and rank 0 has it all" prints 'ok, step 5' "$BRAID" ckpt verify run
finish
