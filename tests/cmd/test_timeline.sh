#!/usr/bin/env bash
# braid plan --timeline and --predict, and braid bench train on ranks: tables, files, refusals; schedules over a loop with equal bits.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
model=(--model.pattern='*E|*E|*-|*E' --model.experts=4 --train.micro_batch=1 --run.threads=1 --train.global_batch=8)
mesh=(--parallel.ranks=4 --parallel.pp=2 --parallel.ep=2 --parallel.overlap=ep)
plan() { "$BRAID" plan "$tiny" "${model[@]}" "$@"; }
of_batch() { "$BRAID" plan "$tiny" "${model[@]:0:4}" --train.global_batch="$1" "${@:2}"; }

ok "a picture of four ranks" prints 'PREDICTED' plan "${mesh[@]}" --timeline="$dir/a.svg"
ok "with a row for each" test "$(grep -c '>rank [0-3]<' "$dir/a.svg")" -eq 4
ok "a trace" prints 'ui.perfetto.dev' plan "${mesh[@]}" --timeline="$dir/a.json"
ok "with their tasks" grep -q '"pid":3.*"kind":"dispatch"' "$dir/a.json"
ok "computing measured here" prints 'measured node by node' plan "${mesh[@]}" --timeline="$dir/b.svg" --measure=on
seconds() { plan "${mesh[@]}" --timeline="$dir/c.svg" "$@" | awk '$1 == "step:" { print $2 }'; }
ok "a slower link takes longer" awk "BEGIN { exit !($(seconds --node_gbps=0.001) > 2 * $(seconds --node_gbps=100)) }"
ok "another ending is refused" fails 2 'must end in .svg' plan "${mesh[@]}" --timeline="$dir/a.png"
ok "a rate must be one" fails 2 'link_gbps=fast is not a number' plan "${mesh[@]}" --timeline="$dir/a.svg" --link_gbps=fast
ok "a mesh that does not divide is refused" fails 2 'parallel' plan --parallel.ranks=3 --parallel.pp=2 --timeline="$dir/a.svg"

ok "predictions for two meshes" prints '^   32  PP2 VPP2 EP4 DP16 *4 |' of_batch 64 --predict=8:1x1x4,32:2x2x4
ok "train.global_batch gives the microbatches" prints '^    8  PP1 VPP1 EP4 DP8 *16 |' of_batch 128 --predict=8:1x1x4
ok "left open they fill the pipeline" prints '^   32  PP2 VPP2 EP4 DP16 *8 |' of_batch 0 --predict=32:2x2x4
ok "a mesh that does not divide is skipped with the reason" prints 'PP3 VPP1 EP1 DP2 *| skipped: 8 ranks do not divide into parallel.pp = 3' plan --predict=8:3x1x1,8:1x1x4
ok "and the next one is predicted" grep -q '^    8  PP1 VPP1 EP4 DP8  *1 |' "$dir/out"
ok "so is one on which the batch does not divide" prints 'skipped: train.global_batch = 8 does not divide' plan --predict=32:2x2x4
ok "say what they assume" prints '^PREDICTION' plan --predict=8:1x1x4
ok "a mesh is three numbers" fails 2 "is neither GPUS:PPxVPPxEP nor GPUS:tp8.pp4" plan --predict=8:2x4
ok "or words" prints '^    8  PP2 VPP1 TP2 EP1 DP2 *4 |' of_batch 8 --predict=8:tp2.pp2,8:cp2.zero3,8:pp2.zero3,8:tp3,8:tp8.ep4
ok "in any order, with levels of zero" grep -q '^    8  PP1 VPP1 CP2 EP1 DP4 zero 3 *2 |' "$dir/out"
ok "what a rule refuses is skipped with its reason" grep -q 'PP2 VPP1 EP1 DP4 zero 3 *| skipped: parallel.zero = 3 gathers' "$dir/out"
ok "so is what does not divide" grep -q 'PP1 VPP1 TP3 .*| skipped: the 8 ranks of a stage do not divide by parallel.tp = 3' "$dir/out"
ok "and heads that cannot be shared" grep -q 'TP8 .*| skipped: .*cannot be shared' "$dir/out"
ok "other words are refused" fails 2 "'8:xp2' is neither" plan --predict=8:xp2
ok "and sizes out of range" fails 2 "'8:zero4' is neither" plan --predict=8:zero4
ok "a pattern that is too short" prints "skipped: .*too few for 8 stages" of_batch 64 --predict=64:8x2x4
ok "the 14-layer model is planned" prints '^ *64  PP4 VPP2 EP16 DP16' "$BRAID" plan "$(dirname "$tiny")/parallel/dsv3-14.ini" --run.device=cpu --predict=64:4x2x16
ok "and the 61-layer one" prints '^ *128  PP16 VPP2 EP8 DP8' "$BRAID" plan "$(dirname "$tiny")/parallel/dsv3-61.ini" --run.device=cpu --predict=128:16x2x8

# --search simulates the first microbatches of a step, and what each further group of them adds; --predict all of them.
llama=(plan "$(dirname "$tiny")/parallel/llama-8b.ini" --run.device=cpu --train.global_batch=64)
searched=$("$BRAID" "${llama[@]}" --search --gpus=16 | awk '/pp=2 --parallel.vpp=2 --parallel.tp=2 .*zero=1 .*overlap=tp$/ { print $1; exit }')
predicted=$("$BRAID" "${llama[@]}" --predict=16:tp2.pp2.vpp2 | awk -F'|' '$1 ~ /PP2 VPP2 TP2/ { print $4 + 0 }')
ok "overlapped meshes take as long by --search as by --predict" awk "BEGIN { d = $searched - $predicted; exit !($searched > 0 && d * d < 0.01 * 0.01 * $predicted * $predicted) }"

bits() { "$BRAID" bench train "$tiny" "${model[@]}" --train.steps=3 --bits=on "$@" | awk '$1 == "bits:" { print $2 }'; }
ok "steps on two threads" test -n "$(bits --parallel.ranks=2)"
shared=$(bits --parallel.ranks=2 --parallel.ep=2)
ok "experts on two ranks" test -n "$shared"
ok "overlapped, with the plain bits" test "$(bits --parallel.ranks=2 --parallel.ep=2 --parallel.overlap=ep)" = "$shared"
hidden() { AXIS=$1 CONFIG=$tiny GBPS=1 STEPS=2 BATCH=4 "$(dirname "$0")/../gpu/overlap.sh" "$BRAID" --run.device=cpu "${model[@]:0:2}" --run.threads=1; }
ok "schedules of experts over a loop give the same bits" prints 'all bits are equal' hidden ep
ok "gradients and weights over a loop change no bit" prints 'all bits are equal' hidden dp
ok "nor do rows of tensor-parallel ranks" prints 'all bits are equal' hidden tp
ok "both schedules of these were measured" test "$(grep -cE '^(none|tp) .*%' "$dir/out")" -eq 2
ok "--exposed needs a loop" fails 2 'is for parallel.comm=loop' "$BRAID" bench train "$tiny" --exposed=on
finish
