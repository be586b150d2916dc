#!/usr/bin/env bash
# Everything about many ranks that needs several GPUs: NCCL's calls and what the links carry, losses of each mesh against one GPU, bits of
# each schedule against the plain one, and step times. Prints the tables of docs/PARALLEL.md; --write puts them there. With more ranks than
# GPUs, ranks share them (parallel.comm=ipc): everything is checked as well, but times say nothing. tests/gpu/ranks.sh compares with the CPU.
#
#   tools/multi_gpu.sh [--write] [BUILD]        a machine with GPUs and a built tree (make, make gpu-tests)
#
#   GPUS=4          ranks; default: all GPUs, at most 8, a power of two; 4 on a machine with one GPU
#   DEVICE=cpu      without GPUs, small models: a rehearsal of this script
#   CONFIG=FILE     the model whose steps are timed (default configs/h200/moe-3.6b.ini); STEPS=10
set -u
cd "$(dirname "$0")/.." || exit 1
write=no
[ "${1:-}" = --write ] && { write=yes; shift; }
build=${1:-build}
device=${DEVICE:-cuda}
braid=$build/braid check=$build/tests/gpu/check_comm
for program in "$braid" "$check"; do
    [ -x "$program" ] || { echo "no $program: run make and make gpu-tests first" >&2; exit 2; }
done
found=$([ "$device" = cuda ] && nvidia-smi -L 2>/dev/null | grep -c '^GPU' || echo 4)
[ "$found" -ge 1 ] || { echo "no GPU was found; DEVICE=cpu rehearses this script" >&2; exit 2; }
gpus=${GPUS:-$([ "$found" -gt 1 ] && echo "$found" || echo 4)}
for n in 8 4 2 0; do
    [ "$gpus" -ge $n ] && { gpus=$n; break; }
done
[ "$gpus" -ge 2 ] || { echo "GPUS=$gpus: this needs 2 ranks at least" >&2; exit 2; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
tables=$dir/tables.md
failed=0
port=$((20000 + RANDOM % 20000))

# Ranks as torchrun starts them; the output is rank 0's. The last to fail gives the exit code.
launch() { # ranks command...
    local n=$1 r status=0 pids=()
    shift
    port=$((port + 1))
    for ((r = 0; r < n; r++)); do
        RANK=$r WORLD_SIZE=$n LOCAL_RANK=$r LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 MASTER_PORT=$port OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
            timeout 900 "$@" >"$dir/rank$r" 2>"$dir/err$r" &
        pids+=($!)
    done
    for r in "${pids[@]}"; do
        wait "$r" || status=$?
    done
    cat "$dir/rank0"
    [ $status = 0 ] || { cat "$dir"/err* | head -n 5 >&2; }
    return $status
}
note() { # text: to the terminal and to the tables
    echo "$*"
    echo "$*" >>"$tables"
}
verdict() { # ok|not text
    [ "$1" = ok ] || failed=1
    echo "$1 $2"
}

# ---- the links ------------------------------------------------------------------------------------------------------------
name=$([ "$device" = cuda ] && nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 || uname -m)
note "Machine: $found x $name, $gpus ranks, $(date +%F), $("$braid" --version 2>/dev/null | head -n 1)"
note ""
note "| call | ranks | size, KiB | us | GB/s out of each rank |"
note "|---|---|---|---|---|"
for ((n = 2; n <= gpus; n *= 2)); do
    launch "$n" "$check" "$([ "$device" = cuda ] || echo cpu)" >"$dir/links" && verdict ok "every call on $n ranks" || verdict not "every call on $n ranks"
    awk '/^link/ { print "| " $2 " | " $3 " | " $5 " | " $7 " | " $9 " |" }' "$dir/links" | tee -a "$tables"
done

# ---- losses and bits ------------------------------------------------------------------------------------------------------------
# A small model with every kind of layer that matters to a mesh, in fp32: losses depend on the order of sums alone.
head -c 400000 "$braid" | base64 -w 76 >"$dir/text"
small=(--data.train="$dir/text" --model.pattern='[*-]|[*E]|[M-]|[*E]/*E' --model.hidden=128 --model.heads=4 --model.ffn=256 --model.experts=8 --model.topk=2
       --model.expert_ffn=128 --model.mamba_head_dim=32 --model.mamba_state=32 --model.mamba_groups=1 --model.mamba_chunk=32 --train.seq=128
       --train.micro_batch=1 --train.global_batch=16 --train.steps=10 --train.lr=1e-3 --run.device="$device" --gpu.precision=fp32 --run.quiet=on
       --train.log_every=1 --run.report=off --run.tensorboard=off)
losses() { # run folder
    sed -n 's/.*"step":\([0-9]*\).*"loss":\([0-9.e+-]*\).*/\1 \2/p' "$1/metrics.jsonl"
}
apart() { # run folder, run folder: largest relative difference of the losses, or "?"
    paste -d' ' <(losses "$1") <(losses "$2") | awk 'NF == 4 && $1 == $3 { d = ($2 - $4) / $2; if (d < 0) d = -d; if (d > most) most = d; n++ }
        END { if (n >= 10) printf "%.1e\n", most; else print "?" }'
}
"$braid" train "${small[@]}" --run.dir="$dir/one" >"$dir/log" 2>&1 || { tail -n 3 "$dir/log"; verdict not "one rank"; }
note ""
note "| mesh | losses of 10 steps against one rank, fp32 | bits against the plain schedule of this mesh |"
note "|---|---|---|"
meshes=("DP$gpus|$gpus|" "DP$gpus, zero 2|$gpus|--parallel.zero=2" "DP$gpus, zero 3|$gpus|--parallel.zero=3" "EP$gpus|$gpus|--parallel.ep=$gpus" "ETP2|2|--parallel.etp=2" "CP$gpus|$gpus|--parallel.cp=$gpus" "PP2xVPP2|2|--parallel.pp=2" "EP2 overlap|2|--parallel.ep=2 --parallel.overlap=ep"
        "EP2 overlap, dW delayed|2|--parallel.ep=2 --parallel.overlap=ep --plan.delay_dw=on")
[ "$gpus" -ge 4 ] && meshes+=("PP4|4|--parallel.pp=4" "DP2xEP2|4|--parallel.ep=2" "EP2xETP2|4|--parallel.ep=2 --parallel.etp=2" "PP2xVPP2xEP2|4|--parallel.pp=2 --parallel.ep=2"
                             "PP2xVPP2xEP2 overlap|4|--parallel.pp=2 --parallel.ep=2 --parallel.overlap=ep")
declare -A plain
for line in "${meshes[@]}"; do
    IFS='|' read -r mesh n options <<<"$line"
    launch "$n" "$braid" train "${small[@]}" $options --run.dir="$dir/$mesh" >/dev/null || verdict not "$mesh trains"
    d=$(apart "$dir/one" "$dir/$mesh" 2>/dev/null)
    awk "BEGIN { exit !(\"$d\" != \"?\" && $([ "$d" = '?' ] && echo 1 || echo "$d") < 1e-5) }" && verdict ok "$mesh: losses within 1e-5 of one rank ($d)" || verdict not "$mesh: losses differ by $d"
    bits=$(launch "$n" "$braid" bench train "${small[@]}" $options --bits=on | awk '$1 == "bits:" { print $2 }')
    key="$n $(sed -e 's/--parallel.overlap=[a-z]*//; s/--plan.delay_dw=on//; s/ *$//' <<<"$options")"
    if [[ $mesh == *overlap* ]]; then
        [ -n "${plain[$key]:-}" ] || plain[$key]=$(launch "$n" "$braid" bench train "${small[@]}" ${key#* } --bits=on | awk '$1 == "bits:" { print $2 }')
        [ -n "$bits" ] && [ "$bits" = "${plain[$key]}" ] && same=equal || same=DIFFERENT
        [ $same = equal ] && verdict ok "$mesh: the plain bits" || verdict not "$mesh: not the plain bits"
    else
        plain[$key]=$bits same="(plain)"
    fi
    note "| $mesh | $d | $same |"
done

# ---- step times ----------------------------------------------------------------------------------------------------------------------
config=${CONFIG:-configs/h200/moe-3.6b.ini} steps=${STEPS:-10}
big=(bench train "$config" --run.device="$device" --train.micro_batch=1 --train.steps="$steps")
whole= cut='--model.pattern=*E*E|*E*E|*E*E|*E*E'
if [ "$device" != cuda ]; then
    config=configs/tiny.ini whole='--model.pattern=*E*E*E*E' cut='--model.pattern=*E|*E|*E|*E'
    big=(bench train $config --model.experts=8 --train.micro_batch=1 --train.steps=3 --run.threads=1)
fi
note ""
note "Steps of \`$config\`, microbatches of one sequence, 8 of them on each data-parallel rank, expert rows in buffers of 1.25 times an even share:"
note ""
note "| mesh | overlap | ms/step | tokens/s | GiB |"
note "|---|---|---|---|---|"
timed() { # name, ranks, data-parallel ranks, overlap, options
    local out=$dir/timed
    launch "$2" "$braid" "${big[@]}" --train.global_batch=$((8 * $3)) --parallel.ep_capacity=1.25 $5 >"$out" || { verdict not "$1 $4"; return; }
    note "| $1 | $4 | $(awk '$1 == "ms_per_step:" { print $2 }' "$out") | $(awk '$1 == "tokens_per_second:" { print $2 }' "$out") | $(awk '$1 == "memory_gib:" { print $2 }' "$out") |"
}
overlaps=("none|" "ep|--parallel.overlap=ep" "ep, dW delayed|--parallel.overlap=ep --plan.delay_dw=on")
timed "DP$gpus" "$gpus" "$gpus" none "$whole"
for o in "${overlaps[@]}"; do
    timed "EP$gpus" "$gpus" "$gpus" "${o%%|*}" "$whole --parallel.ep=$gpus ${o#*|}"
done
if [ "$gpus" -ge 4 ]; then
    half=$((gpus / 2))
    for o in "${overlaps[@]}"; do
        timed "PP2xVPP2xEP$half" "$gpus" "$half" "${o%%|*}" "$cut --parallel.pp=2 --parallel.ep=$half ${o#*|}"
    done
fi

if [ $write = yes ] && [ $failed = 0 ] && [ "$device" = cuda ] && [ "$found" -ge "$gpus" ]; then
    awk -v tables="$tables" '/<!-- multi_gpu: begin -->/ { print; while ((getline line < tables) > 0) print line; skip = 1 }
        /<!-- multi_gpu: end -->/ { skip = 0 } !skip && !/<!-- multi_gpu: begin -->/ { print }' docs/PARALLEL.md >"$dir/doc" && cp "$dir/doc" docs/PARALLEL.md
    echo "written to docs/PARALLEL.md"
fi
[ $failed = 0 ] && echo "all passed" || echo "something failed"
exit $failed
