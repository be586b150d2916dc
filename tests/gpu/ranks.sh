#!/usr/bin/env bash
# Meshes as real processes that share one GPU (parallel.comm=ipc, chosen by itself): ten steps of a small model in fp32. For each mesh the
# losses must be those of the same mesh on the CPU (1e-5), a second run must give the same bits, and every rank must allocate what `braid
# plan` says. A table, then "N passed, N failed".
#
#   tests/gpu/ranks.sh [BRAID]      JOBS=2: meshes at a time, each with both its runs and the one on the CPU side by side
#
#   ONLY=regex   meshes whose line matches: ONLY='^(TP2|PP2 TP2)\|'; ONLY=main: a mesh of each kind, and rings
#   DEVICE=cpu   a rehearsal, ipc over host memory;  LIMIT=120: seconds that a run may take
#
# A mesh is a line of the table below: name | ranks | pattern | options of parallel; those of other sections with their section.
set -u
braid=${1:-build/braid} device=${DEVICE:-cuda} jobs=${JOBS:-2}
flat='[*-][*E][M-][*E]/*E' cut2='[*-][*E]|[M-][*E]/*E' cut4='[*-]|[*E]|[M-]|[*E]/*E'
sparse='[D-][DE]/DE' lists='model.dsa_indexer_topk=48 model.dsa_indexer_n_heads=4' groups=model.mamba_groups=4
meshes=(
    "DP2 zero 0|2|$flat|zero=0"
    "DP2 zero 1|2|$flat|zero=1"
    "DP2 zero 2|2|$flat|zero=2"
    "DP2 zero 3|2|$flat|zero=3"
    "EP2|2|$flat|ep=2"
    "ETP2|2|$flat|etp=2"
    "PP2|2|$cut2|pp=2"
    "PP2 VPP2|2|$cut4|pp=2"
    "CP2|2|$flat|cp=2"
    "CP2 ring|2|$flat|cp=2 cp_comm=ring"
    "CP2 delta net|2|[G-][*E]/*E|cp=2"
    "CP2 latent|2|[+-][+E]/+E|cp=2"
    "CP2 sparse|2|$sparse|cp=2 $lists"
    "TP2|2|$flat|tp=2 $groups"
    "TP2 overlap|2|$flat|tp=2 overlap=tp $groups"
    "TP2 delta net|2|[G-][*E]/*E|tp=2 model.gdn_key_heads=2 model.gdn_value_heads=4 model.gdn_value_dim=64"
    "TP2 latent|2|[+-][+E]/+E|tp=2"
    "TP2 sparse|2|$sparse|tp=2 $lists"
    "TP2 adapters|2|$flat|tp=2 lora.rank=8 $groups"
    "DP4 zero 3|4|$flat|zero=3"
    "TP4|4|$flat|tp=4 $groups"
    "TP2 DP2 zero 3|4|$flat|tp=2 zero=3 $groups"
    "EP2 TP2|4|$flat|ep=2 tp=2 $groups"
    "PP2 TP2|4|$cut2|pp=2 tp=2 $groups"
    "TP2 CP2|4|$flat|tp=2 cp=2 $groups"
    "TP2 CP2 sparse|4|$sparse|tp=2 cp=2 $lists"
    "CP4|4|$flat|cp=4"
    "CP4 ring|4|$flat|cp=4 cp_comm=ring"
    "TP2 CP2 ring|4|$flat|tp=2 cp=2 cp_comm=ring $groups"
    "CP2 EP4 zero 2|4|$flat|cp=2 ep=4 zero=2"
    "CP2 PP2|4|$cut2|cp=2 pp=2"
    "DP2 EP2 zero 3|4|$flat|ep=2 zero=3"
    "ETP2 EP2 zero 3|4|$flat|etp=2 ep=2 zero=3"
    "PP2 DP2 zero 2|4|$cut2|pp=2 zero=2"
    "PP2 VPP2 EP2 overlap|4|$cut4|pp=2 ep=2 overlap=ep"
    "CP2 DP2 EP4 zero 3|4|$flat|cp=2 ep=4 zero=3"
    "DP8 zero 3|8|$flat|zero=3"
    "EP4 DP2 zero 1|8|$flat|ep=4 zero=1"
    "PP4 EP2|8|$cut4|pp=4 ep=2"
    "TP2 CP2 EP4 zero 2|8|$flat|tp=2 cp=2 ep=4 zero=2 $groups"
    "PP2 VPP2 EP2 DP2 overlap|8|$cut4|pp=2 ep=2 overlap=ep zero=2"
)
only=${ONLY:-.}
[ "$only" = main ] && only='^(DP4 zero 3|CP2|CP2 ring|TP2|TP2 overlap|TP4|EP2 TP2|PP2 TP2|TP2 CP2|PP2 VPP2 EP2 DP2 overlap)\|'
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
# A text of its own: with others two scores of a router may be so near each other that fp32 and double take different experts, and the losses of
# a GPU are 3e-5 from those of the CPU.
model=(--data.train="$(dirname "$0")/curves.txt" --model.hidden=128 --model.heads=4 --model.ffn=256 --model.experts=8 --model.topk=2 --model.expert_ffn=128
       --model.mamba_head_dim=32 --model.mamba_state=32 --model.mamba_chunk=32 --model.mtp_scale=0.3 --train.seq=128
       --train.micro_batch=1 --train.global_batch=16 --train.steps=10 --train.lr=1e-3 --gpu.precision=fp32 --train.log_every=1 --run.report=off
       --run.tensorboard=off --parallel.timeout="${LIMIT:-120}")

launch() { # folder for output, ranks, command...: ranks as torchrun starts them, all with LOCAL_RANK
    local out=$1 n=$2 r status=0 pids=() port=$((20000 + (BASHPID * 37 + RANDOM) % 20000))
    shift 2
    for ((r = 0; r < n; r++)); do
        RANK=$r WORLD_SIZE=$n LOCAL_RANK=$r LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 MASTER_PORT=$port OMP_NUM_THREADS=1 \
            timeout "${LIMIT:-120}" "$@" >"$out/out$r" 2>"$out/err$r" &
        pids+=($!)
    done
    for r in "${pids[@]}"; do wait "$r" || status=$?; done
    return $status
}
losses() { sed -n 's/.*"step":\([0-9]*\).*"loss":\([0-9.e+-]*\).*/\1 \2/p' "$1/metrics.jsonl"; }
apart() { # run folder, run folder: largest relative difference of the losses
    paste -d' ' <(losses "$1") <(losses "$2") | awk 'NF == 4 && $1 == $3 { d = ($2 - $4) / $2; if (d < 0) d = -d; if (d > most) most = d; n++ }
        END { if (n >= 10) printf "%.1e\n", most; else print "?" }'
}
# Column "total" of the plan's table of ranks, as the run prints it.
planned() { awk '/ranks: .*pipeline stages/ { on = 1; next } on && $1 ~ /^[0-9]+$/ { printf "%s%s %s", n++ ? ", " : "", $(NF - 1), $NF } END { print "" }'; }

read_mesh() { # line: name, ranks, pattern, options; patterns have | too
    name=${1%%|*}
    local rest=${1#*|}
    ranks=${rest%%|*} rest=${rest#*|}
    words=${rest##*|} pattern=${rest%|*}
    options=(--model.pattern="$pattern")
    [[ $words = *mamba_groups* ]] || options+=(--model.mamba_groups=1)
    local w
    for w in $words; do
        case $w in
            *.*=*) options+=("--$w") ;;
            *) options+=("--parallel.$w") ;;
        esac
    done
}
one_mesh() { # number, line: a row of the table
    local name ranks pattern words options at=$dir/$1 d bits=different memory=different transport plan comm=() begin=$SECONDS
    read_mesh "$2"
    mkdir -p "$at/a" "$at/b"
    [ "$device" = cuda ] || comm=(--parallel.comm=ipc --run.threads=1)
    OMP_NUM_THREADS=1 "$braid" train "${model[@]}" "${options[@]}" --run.threads=1 --parallel.ranks="$ranks" --run.device=cpu --run.quiet=on \
        --run.dir="$at/cpu" >"$at/cpu.log" 2>&1 &
    local cpu=$! second
    launch "$at/b" "$ranks" "$braid" train "${model[@]}" "${options[@]}" "${comm[@]}" --run.device="$device" --run.dir="$at/two" &
    second=$!
    launch "$at/a" "$ranks" "$braid" train "${model[@]}" "${options[@]}" "${comm[@]}" --run.device="$device" --run.dir="$at/one"
    local first=$?
    wait $second
    second=$?
    if [ $second != 0 ] || [ $first != 0 ]; then
        bits="ended with $first and $second" # 124: the time limit
        cat "$at"/a/err* "$at"/b/err* 2>/dev/null | grep -m 3 'error' | sed "s/^/# $name: /"
    fi
    wait $cpu || sed "s/^/# $name on the CPU: /" "$at/cpu.log" | tail -n 2
    d=$(apart "$at/cpu" "$at/one" 2>/dev/null)
    "$braid" ckpt diff "$at/one" "$at/two" >/dev/null 2>&1 && cmp -s <(losses "$at/one") <(losses "$at/two") && [ "$bits" = different ] && bits=same
    plan=$(OMP_NUM_THREADS=1 "$braid" plan "${model[@]}" "${options[@]}" --run.device="$device" --run.threads=1 --parallel.ranks="$ranks" 2>/dev/null | planned)
    [ -n "$plan" ] && [ "$plan" = "$(sed -n 's/^allocated by each rank: //p' "$at/a/err0")" ] && memory="as planned"
    transport=$(sed -nE 's/^[0-9]+ ranks \((.*)\):.*/\1/p' "$at/a/err0")
    [ "$memory" = "as planned" ] || printf "# %s: planned %s; allocated %s\n" "$name" "$plan" "$(sed -n "s/^allocated by each rank: //p" "$at/a/err0")"
    local verdict=ok
    awk "BEGIN { exit !(\"$d\" != \"?\" && ${d/\?/1} + 0 < 1e-5) }" && [ "$bits" = same ] && [ "$memory" = "as planned" ] && [ "$transport" = ipc ] || verdict="NOT OK"
    printf '| %s | %d | %s | %s | %s | %s | %s | %s |\n' "$name" "$ranks" "${transport:-?}" "${d:-?}" "$bits" "$memory" "${plan%%,*}" "$verdict ($((SECONDS - begin)) s)"
}

echo "| mesh | processes | transport | losses against the CPU | second run | memory of every rank | of rank 0 | |"
echo "|---|---|---|---|---|---|---|---|"
n=0
for line in "${meshes[@]}"; do
    [[ $line =~ $only ]] || continue
    n=$((n + 1))
    one_mesh "$n" "$line" 2>&1 | tee "$dir/row$n" & # a run that is cut short has printed what it knows
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do sleep 0.1; done
done
wait
passed=$(cat "$dir"/row* | grep -c '| ok (')
echo "$passed passed, $((n - passed)) failed"
[ "$passed" = "$n" ]
