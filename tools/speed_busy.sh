#!/usr/bin/env bash
# How fast the demo model trains beside another program that keeps one core busy, against the same machine without it. Turns alternate; on two
# cores 67 % is the most that a fair system leaves.
#
#   tools/speed_busy.sh [BRAID [ROUNDS [STEPS]]]      defaults: build/braid, 3 rounds, 60 steps
set -eu
cd "$(dirname "$0")/.."
braid=${1:-build/braid} rounds=${2:-3} steps=${3:-60}
dir=$(mktemp -d)
busy=
trap '[ -z "$busy" ] || kill "$busy" 2>/dev/null; rm -rf "$dir"' EXIT
cat src/*/*.c >"$dir/text"
rate() { # run folder: median of tokens a second over the second half of the steps
    sed -nE 's/.*"tokens_per_s":([0-9.eE+]+).*/\1/p' "$1/metrics.jsonl" | tail -n $((steps / 2)) | sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'
}
train() { # run folder
    "$braid" train configs/demo.ini --data.train="$dir/text" --run.dir="$1" --run.quiet=on --run.threads=2 --run.report=off --run.tensorboard=off \
        --train.steps="$steps" --train.warmup=5 --train.eval_every=0 --run.save_every=0 --train.log_every=1 2>"$dir/err" || { cat "$dir/err"; exit 1; }
}
for ((i = 1; i <= rounds; i++)); do
    train "$dir/idle$i"
    bash -c 'while :; do :; done' &
    busy=$!
    train "$dir/busy$i"
    kill "$busy"
    wait "$busy" 2>/dev/null || true
    busy=
    echo "$(rate "$dir/idle$i") $(rate "$dir/busy$i")" | awk -v r="$i" '{ printf "round %d: alone %.0f tokens/s, beside a busy core %.0f: %.0f %%\n", r, $1, $2, 100 * $2 / $1 }'
done
