#!/usr/bin/env bash
# Ranks as processes: the collectives of test_comm.c under mpirun and with torchrun's variables, ranks that stop, die and fail, and bad
# launches, each of which is to give one clear error and no hang. BRAID=build/braid finds the test program.
set -u
test_comm=$(dirname "${BRAID:-build/braid}")/tests/comm/test_comm
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
export OMP_NUM_THREADS=1
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
failed=0
ok() { # "sentence" command...: it succeeds
    if "${@:2}"; then echo "ok $1"; else
        echo "not ok $1"
        sed 's/^/  /' "$tmp/out" | head -30
        failed=1
    fi
}
has() { grep -qF -- "$1" "$tmp/out"; }
says() { local n; n=$(grep -cF -- "$1" "$tmp/out"); [ "$n" -eq "$2" ]; } # so often
# Runs a job; its output goes to $tmp/out. 124 is a hang.
job() { timeout 120 "$@" >"$tmp/out" 2>&1; rc=$?; }
ended_badly() { [ "$rc" -ne 0 ] && [ "$rc" -ne 124 ]; }

# ---- torchrun's variables: no launcher at all -----------------------------------------------------------------------------
# ranks N: starts them, RANK_OF[i] instead of i where set; rc is that of rank 0, hung whether one had to be stopped.
declare -A RANK_OF SIZE_OF
torch() { # n what timeout [transport]
    local n=$1 pids=() i r=0
    export MASTER_ADDR=${ADDR:-127.0.0.1} MASTER_PORT=$((20000 + RANDOM % 20000))
    hung=no
    : >"$tmp/out"
    for ((i = 0; i < n; i++)); do
        RANK=${RANK_OF[$i]-$i} LOCAL_RANK=$i WORLD_SIZE=${SIZE_OF[$i]-$n} timeout -k 1 100 "$test_comm" ranks "$2" "$tmp/board" "$3" ${4:-} >>"$tmp/out" 2>&1 &
        pids+=($!)
    done
    for ((i = 0; i < n; i++)); do
        wait "${pids[$i]}" 2>/dev/null
        r=$?
        [ "$i" -gt 0 ] || rc=$r
        [ "$r" -ne 124 ] || hung=yes
    done
    unset MASTER_ADDR MASTER_PORT
    RANK_OF=() SIZE_OF=()
}
no_hang() { [ "$hung" = no ] && [ "$rc" -ne 0 ]; }
torch 3 all 20
ok "tcp: every collective, 3 ranks" has "done: 3 ranks by tcp"
torch 4 same 20
ok "tcp: a config that differs is named once" says "rank 2 has another config than rank 0: 'lr = 2' instead of 'lr = 1'" 1
torch 4 kill 5
ok "tcp: a killed rank is named by every survivor" eval '[ "$(grep -cE "error on rank [013]: .*rank 2 " "$tmp/out")" -eq 3 ]'
ok "tcp: a killed rank ends the job" no_hang
for n in 2 3 4; do
    torch $n all 20 ipc
    ok "ipc: every collective, $n ranks" has "done: $n ranks by ipc"
done
torch 4 kill 5 ipc
ok "ipc: a killed rank is named by every survivor" eval '[ "$(grep -cE "error on rank [013]: .*rank 2 " "$tmp/out")" -eq 3 ]'
ok "ipc: a killed rank ends the job" no_hang
torch 4 fail 20 ipc
ok "ipc: a rank that fails says why, and the others say who failed" eval 'has "error on rank 2: a NaN in layer 5" && says "rank 2 failed at step 3: a NaN in layer 5" 3'
# The reason once. A rank that comes after rank 0 has given up finds nobody there, and says that.
said_once() { no_hang && [ "$(grep 'braid: error' "$tmp/out" | grep -vc 'rank 0 ended during the start')" -eq 1 ]; }
RANK_OF=([2]=1)
torch 3 all 5
ok "tcp: two processes with one rank" has "two processes say RANK=1"
ok "tcp: ... said once, no hang" said_once
RANK_OF=([2]=7)
torch 3 all 5
ok "tcp: a rank that is too large" has "says RANK=7, which is not below WORLD_SIZE=3"
ok "tcp: ... said once, no hang" said_once
SIZE_OF=([2]=4)
torch 3 all 5
ok "tcp: sizes that differ" has "says WORLD_SIZE=4, rank 0 says 3"
ok "tcp: ... said once, no hang" said_once
SIZE_OF=([0]=3 [1]=3)
torch 2 all 2
ok "tcp: a rank that does not come is named" has "of 3 ranks these did not come to rank 0 in time: 2"
ok "tcp: ... and nobody hangs" no_hang
RANK_OF=([0]=1) SIZE_OF=([0]=2)
torch 1 all 2
ok "tcp: an unreachable rank 0" eval 'no_hang && has "rank 1 cannot reach rank 0 at 127.0.0.1, port"'
RANK_OF=([0]=1) SIZE_OF=([0]=2)
ADDR=no-such-host.invalid torch 1 all 2
ok "tcp: an unknown MASTER_ADDR" eval 'no_hang && has "the host of MASTER_ADDR=no-such-host.invalid is not known here"'
RANK=0 WORLD_SIZE=2 job "$test_comm" ranks all "$tmp/board" 2
ok "tcp: MASTER_ADDR is asked for" eval 'ended_badly && has "MASTER_ADDR is not set"'
RANK=3 job "$test_comm" ranks all "$tmp/board" 2
ok "tcp: RANK without WORLD_SIZE" eval 'ended_badly && has "RANK is set, but WORLD_SIZE is not"'
RANK=x WORLD_SIZE=2 job "$test_comm" ranks all "$tmp/board" 2
ok "tcp: RANK is a number" eval "ended_badly && has \"RANK='x' is not a rank\""

# ---- MPI ------------------------------------------------------------------------------------------------------------------------
if ! command -v mpirun >/dev/null; then
    echo "no mpirun: ranks under MPI are not tested here (Debian: openmpi-bin)"
    exit "$failed"
fi
mpi=(mpirun --oversubscribe --allow-run-as-root)
job "${mpi[@]}" -np 1 "$test_comm" ranks all "$tmp/board" 20
if grep -q "built without MPI" "$tmp/out"; then
    echo "built without MPI: ranks under MPI are not tested"
    exit "$failed"
fi
job "${mpi[@]}" -np 2 "$test_comm" ranks all "$tmp/board" 20 ipc
ok "ipc beside mpi: every collective, 2 ranks" has "done: 2 ranks by ipc"
for n in 2 4; do
    job "${mpi[@]}" -np $n "$test_comm" ranks all "$tmp/board" 20
    if grep -q "built without MPI" "$tmp/out"; then
        echo "built without MPI: ranks under MPI are not tested"
        exit "$failed"
    fi
    ok "mpi: every collective, $n ranks" has "done: $n ranks by mpi"
done
job "${mpi[@]}" -np 4 "$test_comm" ranks same "$tmp/board" 20
ok "mpi: a config that differs is named once" eval "ended_badly && says \"rank 2 has another config than rank 0: 'lr = 2' instead of 'lr = 1'\" 1"
job "${mpi[@]}" -np 4 "$test_comm" ranks fail "$tmp/board" 20
ok "mpi: a rank that fails says why" eval 'ended_badly && has "error on rank 2: a NaN in layer 5"'
ok "mpi: ... and the others say who failed" says "rank 2 failed at step 3: a NaN in layer 5" 3
job "${mpi[@]}" -np 4 "$test_comm" ranks kill "$tmp/board" 5
ok "mpi: a killed rank ends the job, and is named" eval 'ended_badly && has "rank 2"'

# A stopped rank: the survivors name it and end; the launcher cannot end what is stopped, so it is woken afterwards.
"${mpi[@]}" -np 4 "$test_comm" ranks stop "$tmp/board" 2 >"$tmp/out" 2>&1 &
launcher=$!
for ((i = 0; i < 100; i++)); do
    sleep 0.2
    [ "$(grep -c 'error on rank' "$tmp/out")" -lt 3 ] || break
done
stopped=$(sed -nE 's/.*for rank 2 \(process ([0-9]+) on .*/\1/p' "$tmp/out" | head -n 1)
for r in 0 1 3; do
    ok "mpi: rank $r names the stopped rank, its step and its last collective" eval \
        "grep -E \"error on rank $r: rank $r waited 2.0 s at step [34] .* for rank 2 .process [0-9]+ on .*: step 3, past collective [0-9]+ '4.moe.dispatch' of group all since\" '$tmp/out' >/dev/null"
done
[ -z "$stopped" ] || kill -CONT "$stopped" 2>/dev/null
wait "$launcher"
rc=$?
ok "mpi: ... and the job ends" ended_badly

job "${mpi[@]}" -np 1 -x RANK=0 -x WORLD_SIZE=2 "$test_comm" ranks all "$tmp/board" 5 : -np 1 -x RANK=0 -x WORLD_SIZE=2 "$test_comm" ranks all "$tmp/board" 5
ok "mpi: duplicate ranks: one error, no hang" eval 'ended_badly && has "mpirun says rank 1 of 2, but RANK=0 and WORLD_SIZE=2 say otherwise" && says "braid: error" 1'
job "${mpi[@]}" -np 2 -x RANK=5 -x WORLD_SIZE=2 "$test_comm" ranks all "$tmp/board" 5
ok "mpi: a rank that is too large: one error, no hang" eval 'ended_badly && has "RANK=5 is not below WORLD_SIZE=2" && says "braid: error" 1'
exit "$failed"
