#!/usr/bin/env bash
# plan.fit against policies made by hand, on one GPU in one call of at most four minutes.
#
#   [BRAID=build/braid] [MODELS="A.ini B.ini"] [BUDGETS="24GiB ..."] [STEPS=3] [LIMIT=230] [OPTIONS="--run.device=cpu ..."] tests/gpu/fit.sh
#
# For each model: 12 policies are measured; for each budget plan.fit chooses a plan, which is measured under that budget as an artificial
# limit (allocated = planned, or the run fails). Its time must be within 5 % of the best policy that fits. Searches run side by side first, on
# the host; what is measured runs alone. Policies come in turns over the models, so that a run that reaches LIMIT seconds has some of each; what
# was left out is counted. OPTIONS go to every command: a dry run without a GPU takes --run.device=cpu and small sizes. The last line is
# "N passed, N failed".
set -u
braid=$(realpath -s "${BRAID:-build/braid}")
cd "$(dirname "$0")/../.." || exit 1
read -ra models <<<"${MODELS:-configs/h200/dense-1b.ini configs/h200/dense-1b-mhc.ini configs/h200/hybrid-2.8b.ini}"
read -ra budgets <<<"${BUDGETS:-24GiB 40GiB 80GiB 141GiB}"
read -ra options <<<"${OPTIONS:-}"
steps=${STEPS:-3} limit=${LIMIT:-230}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 left_out=0

batch_of() { # model: sequences of a step
    awk -F= '/^ *(micro|global)_batch *=/ {n = $2 + 0; if (n > b) b = n} END {print b ? b : 1}' "$1"
}
# Options of policy k for a step of n sequences.
policy() { # k n
    local half=$(($2 > 1 ? $2 / 2 : 1))
    local all=--train.micro_batch=$2 two=--train.micro_batch=$half one=--train.micro_batch=1
    case $1 in
    0) echo "$all --plan.recompute=" ;;
    1) echo "$all --plan.recompute=norm" ;;
    2) echo "$all --plan.recompute=full" ;;
    3) echo "$all --plan.recompute=full:8" ;;
    4) echo "$two --plan.recompute=" ;;
    5) echo "$two --plan.recompute=norm" ;;
    6) echo "$two --plan.recompute=full" ;;
    7) echo "$one --plan.recompute=" ;;
    8) echo "$one --plan.recompute=full" ;;
    9) echo "$all --plan.recompute=norm --plan.offload=joint.stream" ;;
    10) echo "$two --plan.recompute=norm --plan.offload=*:8" ;;
    11) echo "$one --plan.recompute=full --train.loss_chunk=256" ;;
    esac
}
# Writes "ms bytes", or "- reason", to the file, and says so: a run that is cut short has said what it knows.
measure() { # file model options...
    measure_one "$@"
    echo "after $SECONDS s: $(basename "$2"): $(cat "$1") (ms, bytes) ${*:3}"
}
measure_one() { # file model options...
    if [ "$SECONDS" -ge "$limit" ]; then
        left_out=$((left_out + 1))
        echo "- left out after $limit s" >"$1"
        return
    fi
    if timeout 45 "$braid" bench train "$2" --steps="$steps" --json="$work/json" "${options[@]}" "${@:3}" >"$work/out" 2>"$work/err"; then
        sed -E 's/.*"memory_bytes":([0-9]+).*"ms_per_step":([0-9.]+).*/\2 \1/' "$work/json" >"$1"
    else
        echo "- $(grep -m1 -E 'error|hint' "$work/err" | cut -c1-110)" >"$1"
    fi
    rm -f "$work/json"
}
bytes_of() { # 24GiB or 0.5GiB
    awk -v text="$1" 'BEGIN {n = text + 0; printf "%.0f\n", n * (text ~ /GiB/ ? 1073741824 : 1e9)}'
}

# The choices: options of the first row of each table.
for m in "${!models[@]}"; do
    n=$(batch_of "${models[m]}")
    for b in "${!budgets[@]}"; do
        (
            "$braid" plan "${models[m]}" --train.global_batch="$n" "${options[@]}" --plan.fit="${budgets[b]}" >"$work/fit.$m.$b" 2>&1
            # The host's column is a number with a unit or a dash: options begin at the first word with --. The batch is given anyway.
            awk '/options \(the first is chosen\)/ {getline; s = ""; for (i = 1; i <= NF; i++) if ($i ~ /^--/ && $i !~ /global_batch/) s = s " " $i; print $1; print s; exit}' \
                "$work/fit.$m.$b" >"$work/row.$m.$b"
        ) &
    done
done
wait
echo "searches done after $SECONDS s"

for k in {0..11}; do
    for m in "${!models[@]}"; do
        n=$(batch_of "${models[m]}")
        read -ra words <<<"$(set -f; policy "$k" "$n")"
        measure "$work/hand.$m.$k" "${models[m]}" --train.global_batch="$n" "${words[@]}"
    done
    [ "$k" != 5 ] || for m in "${!models[@]}"; do # before the rest of the policies: a limit must not leave out the choices
        n=$(batch_of "${models[m]}")
        for b in "${!budgets[@]}"; do
            [ -s "$work/row.$m.$b" ] || continue
            chosen=$(sed -n 2p "$work/row.$m.$b")
            same=
            for other in $(seq 0 $((b - 1))); do # one measurement for budgets with the same choice
                [ -s "$work/row.$m.$other" ] && [ "$(sed -n 2p "$work/row.$m.$other")" = "$chosen" ] && same=$other
            done
            if [ -n "$same" ]; then
                cp "$work/chosen.$m.$same" "$work/chosen.$m.$b"
                continue
            fi
            read -ra words <<<"$chosen"
            measure "$work/chosen.$m.$b" "${models[m]}" --train.global_batch="$n" "${words[@]}"
        done
    done
done

for m in "${!models[@]}"; do
    n=$(batch_of "${models[m]}")
    echo
    echo "${models[m]}, $n sequences a step"
    printf '%10s %10s  %s\n' ms/step GiB policy
    for k in {0..11}; do
        read -r ms bytes <"$work/hand.$m.$k"
        if [ "$ms" = - ]; then
            printf '%10s %10s  %s (%s)\n' - - "$(set -f; policy "$k" "$n")" "$bytes"
        else
            printf '%10.1f %10.2f  %s\n' "$ms" "$(awk -v b="$bytes" 'BEGIN {print b / 1073741824}')" "$(set -f; policy "$k" "$n")"
        fi
    done
    printf '%10s %10s %10s %10s %8s  %s\n' budget chosen GiB best ratio "options that plan.fit chose"
    for b in "${!budgets[@]}"; do
        room=$(bytes_of "${budgets[b]}")
        best=$(for k in {0..11}; do cat "$work/hand.$m.$k"; done | awk -v room="$room" '$1 != "-" && $2 <= room && (best == "" || $1 < best) {best = $1} END {print best}')
        if [ ! -s "$work/row.$m.$b" ]; then
            why=$(grep -m1 'smallest memory' "$work/fit.$m.$b" | cut -c1-150)
            # Right where no policy fits either.
            if [ -z "$best" ] && [ -n "$why" ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
            printf '%10s %10s %10s %10s %8s  %s\n' "${budgets[b]}" - - "${best:--}" - "${why:-the search failed: $(tail -n 1 "$work/fit.$m.$b")}"
            continue
        fi
        read -r ms bytes <"$work/chosen.$m.$b"
        if [ "$ms" = - ]; then
            failed=$((failed + 1))
            printf '%10s %10s %10s %10s %8s  %s\n' "${budgets[b]}" - - "${best:--}" - "$bytes"
            continue
        fi
        verdict=$(awk -v ms="$ms" -v best="$best" -v bytes="$bytes" -v room="$room" \
            'BEGIN {fits = bytes <= room; ratio = best == "" ? 0 : ms / best; printf "%s %.3f\n", fits && ratio <= 1.05 ? "ok" : "bad", ratio}')
        if [ "${verdict% *}" = ok ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
        printf '%10s %10.1f %10.2f %10s %8s  %s%s\n' "${budgets[b]}" "$ms" "$(awk -v b="$bytes" 'BEGIN {print b / 1073741824}')" "${best:--}" "${verdict#* }" \
            "$(sed -n 2p "$work/row.$m.$b")" "$([ "${verdict% *}" = ok ] || echo '  <- NOT within 5 % of the best that fits')"
    done
done
echo
echo "after $SECONDS s; $left_out measurements left out"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
