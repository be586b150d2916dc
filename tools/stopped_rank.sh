#!/usr/bin/env bash
# Shows what a run of two processes says when one of them stops answering: rank 1 is halted (SIGSTOP) in the middle of training, and
# rank 0 ends after parallel.timeout = 3 seconds with the name of the missing rank. Usage: tools/stopped_rank.sh [BRAID]
set -u
cd "$(dirname "$0")/.." || exit 1
braid=${1:-build/braid}
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 20000)) WORLD_SIZE=2 OMP_NUM_THREADS=1
pids=()
for rank in 0 1; do
    RANK=$rank LOCAL_RANK=$rank "$braid" train configs/tiny.ini --data.train=README.md --run.dir="$dir/run" --train.steps=1000000 \
        --train.schedule=constant --parallel.timeout=3 --run.quiet=on --run.tensorboard=off --run.report=off 2>"$dir/$rank" &
    pids+=($!)
done
until grep -qs '"step":20,' "$dir/run/metrics.jsonl"; do
    kill -0 "${pids[0]}" 2>/dev/null || { cat "$dir"/[01] >&2; exit 1; }
    sleep 0.05
done
kill -STOP "${pids[1]}"
echo "rank 1 (process ${pids[1]}) is halted"
wait "${pids[0]}"
echo "rank 0 ended with exit code $? and said:"
cat "$dir/0"
disown "${pids[1]}" # no message of the shell about its end
kill -KILL "${pids[1]}"
