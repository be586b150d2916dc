#!/usr/bin/env bash
# Ranks under torchrun: its agent keeps MASTER_PORT for itself and sets these variables. Stand-ins for the agent hold the port here; with
# TORCHRUN=/path/to/torchrun the real one starts the ranks too, in each of its ways to meet (static, c10d, standalone).
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
waiting=() # processes to end at the end
trap 'for p in "${waiting[@]}"; do kill -KILL "$p" 2>/dev/null && wait "$p" 2>/dev/null; done; rm -rf "$dir"' EXIT

random_port() { echo $((10000 + RANDOM % 20000)); }
listens() { cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -iE "^ *[0-9]+: [0-9A-F]+:$(printf %04X "$1") [0-9A-F:]+ 0A" >/dev/null; }
wait_for() { # seconds, command...
    local end=$((SECONDS + $1))
    until "${@:2}"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}
ended() { ! kill -0 "$1" 2>/dev/null; }
# The port is held by rank 0 of another job, which waits for a rank that never comes; and, where there is perl, by one that never answers.
hold_by_braid() {
    port=$(random_port)
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port TORCHELASTIC_RUN_ID=another train >"$dir/holder" 2>&1 &
    waiting+=($!)
    wait_for 30 listens "$port"
}
hold_by_perl() {
    port=$(random_port)
    perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(Listen => 5, LocalAddr => "0.0.0.0", LocalPort => $ARGV[0]) or die; push @c, $s->accept while 1' "$port" &
    waiting+=($!)
    wait_for 30 listens "$port"
}
launch() { # training options...: two ranks as an agent starts them; exit code of the worse one
    local r pids=() worst=0
    for r in 0 1; do
        MASTER_ADDR=127.0.0.1 MASTER_PORT=$port WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 RANK=$r LOCAL_RANK=$r timeout 120 "${train_tiny[@]}" "$@" >"$dir/out$r" 2>"$dir/err$r" &
        pids+=($!)
    done
    for r in 0 1; do wait "${pids[$r]}" || worst=$?; done
    cat "$dir/out0" "$dir/out1" >"$dir/out"
    cat "$dir/err0" "$dir/err1" >"$dir/err"
    return $worst
}
launched() { launch "$@" || show $?; }

ok "two threads" runs train --parallel.ranks=2 --run.dir="$dir/two"
ok "another job holds MASTER_PORT" hold_by_braid
ok "ranks meet beside it" launched --run.dir="$dir/beside"
ok "the same bits as two threads" same "$dir/two" "$dir/beside"
export TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=this
ok "an agent that says it holds the port" launched --run.dir="$dir/agent"
ok "the same bits again" same "$dir/two" "$dir/agent"
ok "ranks that read each other's memory" launched --parallel.comm=ipc --run.dir="$dir/ipc"
ok "give the same bits too" same "$dir/two" "$dir/ipc"
ok "without a launcher there are none" fails 2 'parallel.comm=ipc' train --parallel.comm=ipc --parallel.ranks=2
unset TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_RUN_ID
if command -v perl >/dev/null; then
    ok "a listener that never answers holds the port" hold_by_perl
    ok "ranks meet beside it" launched --run.dir="$dir/silent"
    ok "the same bits once more" same "$dir/two" "$dir/silent"
fi
launch --parallel.port="$port" --parallel.timeout=5
ok "parallel.port that is taken fails" test $? -ne 0
ok "and is named, with what to do" grep -qE "port $port: Address already in use" "$dir/err"
ok "a wrong option is said although the others never come, after parallel.timeout" fails 2 'the number of ranks differs' \
    env RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT="$(random_port)" timeout 20 "${train_tiny[@]}" --parallel.ranks=4 --parallel.timeout=2

# ---- secrets ------------------------------------------------------------------------------------------------------------------
head -c 32 /dev/urandom | base64 >"$dir/secret"
ok "a secret from a file" launched --parallel.secret="$dir/secret" --train.steps=5
JOB_SECRET=$(cat "$dir/secret") ok "a secret from the environment" launched --parallel.secret=env:JOB_SECRET --train.steps=5
echo short >"$dir/short"
launch --parallel.secret="$dir/short" --parallel.timeout=5
ok "a short one is refused" grep -q 'at least 16' "$dir/err"

# ---- signals -------------------------------------------------------------------------------------------------------------------
catches() { ((0x$(sed -n 's/^SigCgt:\t*//p' "/proc/$1/status" 2>/dev/null || echo 0) & 0x4002)); } # process: it handles SIGINT or SIGTERM
alone() { # signal, text: rank 1 waits for a rank 0 that never comes, and gets the signal
    set -m
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$(random_port) "${train_tiny[@]}" 2>"$dir/err" >"$dir/out" &
    pid=$!
    set +m
    waiting+=($pid)
    wait_for 30 catches $pid
    sleep 0.5
    kill "-$1" $pid
    wait_for 20 ended $pid || return 1
    wait $pid
    [ $? -eq 130 ] && grep -q -- "$2" "$dir/err" || show $?
}
ok "a waiting rank ends on SIGTERM" alone TERM 'told to stop before the first step'
ok "a waiting rank ends on SIGINT" alone INT 'interrupted before the first step'

# Rank 1 is stopped in the middle; rank 0, which waits for it, is told to end long before parallel.timeout.
port=$(random_port)
rank() { # rank: starts it in the background
    RANK=$1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "${train_tiny[@]}" --train.steps=100000 --train.log_every=1 --run.dir="$dir/stuck" >"$dir/out$1" 2>"$dir/err$1" &
    waiting+=($!)
}
rank 0
first=${waiting[-1]}
rank 1
second=${waiting[-1]}
ok "two ranks train" wait_for_step "$dir/stuck" 3 "$first"
kill -STOP "$second"
sleep 0.5
kill -TERM "$first"
ok "a rank that waits for a stopped one ends on SIGTERM" wait_for 20 ended "$first"
ok "and says for whom it waited" grep -qE 'rank 0 was told to stop at step [0-9]+ while it waited in .* for rank 1 ' "$dir/err0"
kill -KILL "$second"
wait "$second" 2>/dev/null

# ---- elastic restart --------------------------------------------------------------------------------------------------------------
# A stand-in for torchrun --max-restarts: when a rank has ended badly, all are ended, and all are started again, perhaps fewer of them.
long=(--train.micro_batch=1 --train.steps=400 --train.log_every=1 --run.save_every=20 --train.schedule=constant --run.report=off --run.tensorboard=off)
elastic() { # run folder, rank to kill -9 in the first start, ranks of each start...
    local run=$1 victim=$2 n r start=0 pids status
    shift 2
    port=$(random_port)
    for n in "$@"; do
        pids=()
        for ((r = 0; r < n; r++)); do
            MASTER_ADDR=127.0.0.1 MASTER_PORT=$port WORLD_SIZE=$n LOCAL_WORLD_SIZE=$n RANK=$r LOCAL_RANK=$r GROUP_RANK=0 TORCHELASTIC_USE_AGENT_STORE=True \
                TORCHELASTIC_RUN_ID=elastic TORCHELASTIC_RESTART_COUNT=$start TORCHELASTIC_MAX_RESTARTS=3 \
                timeout 120 "${train_tiny[@]}" "${long[@]}" --run.dir="$run" >>"$dir/out$r" 2>>"$dir/err$r" &
            pids+=($!)
        done
        waiting+=("${pids[@]}")
        if [ $start = 0 ]; then
            wait_while_running "${pids[0]}" test -e "$run/checkpoints/latest" || return 1
            kill -KILL "$(pgrep -P "${pids[$victim]}")" # the rank itself, below its timeout
        fi
        status=0
        for r in "${pids[@]}"; do wait "$r" 2>/dev/null || status=$?; done
        start=$((start + 1))
        [ $status != 0 ] || return 0
    done
    return 1
}
restarted() { # run folder, victim, ranks of each start...
    : >"$dir/err0" && : >"$dir/out0"
    elastic "$@" || { cp "$dir/err0" "$dir/err" && cp "$dir/out0" "$dir/out" && show $?; }
}
ok "400 steps on two threads" runs train "${long[@]}" --parallel.ranks=2 --run.dir="$dir/long"
ok "rank 1 is killed, and two ranks are started again" restarted "$dir/again1" 1 2 2
ok "they continued" grep -q 'continuing .* at step [1-9]' "$dir/err0"
ok "with the bits of a run that was left alone" same "$dir/long" "$dir/again1"
ok "rank 0 is killed, and two ranks are started again" restarted "$dir/again0" 0 2 2
ok "with the bits of a run that was left alone" same "$dir/long" "$dir/again0"
ok "rank 1 is killed, and one rank is started" restarted "$dir/fewer" 1 2 1
close_to() { # A B: losses of 400 steps agree; sums of one rank round differently, and the difference grows with the steps after the restart
    paste -d' ' <(losses "$1") <(losses "$2" | awk '!seen[$1]++') |
        awk '{ d = $2 - $4; if (d < 0) d = -d; if (NF != 4 || d > ($1 <= 100 ? 1e-3 : 0.02) * $2) bad = 1 } END { exit bad || NR != 400 }'
}
ok "it learns like two" close_to "$dir/long" "$dir/fewer"
ok "rank 0 is killed, and four ranks are started" restarted "$dir/more" 0 2 4
ok "nothing half-written is left" no_leftovers "$dir/again0"

# ---- the real one ------------------------------------------------------------------------------------------------------------------
if [ -n "${TORCHRUN:-}" ]; then
    real() { # arguments of torchrun...: with bits compared
        local run
        run=$(mktemp -d "$dir/real-XXXX")
        try timeout 120 "$TORCHRUN" "$@" --nproc-per-node 2 --no-python "${train_tiny[@]}" --run.dir="$run"
        [ $rc -eq 0 ] && same "$dir/two" "$run" || show $rc
    }
    ok "torchrun, static" real --master-port "$(random_port)"
    ok "torchrun --standalone" real --standalone
    ok "torchrun, c10d" real --rdzv-backend c10d --rdzv-endpoint "127.0.0.1:$(random_port)"
    two_agents() { # arguments of torchrun...: two nodes of one rank each on this host
        local run=$dir/nodes-$RANDOM other
        "$TORCHRUN" --nnodes 2 "$@" --node-rank 1 --nproc-per-node 1 --no-python "${train_tiny[@]}" --run.dir="$run" >"$dir/out1" 2>&1 &
        other=$!
        try timeout 120 "$TORCHRUN" --nnodes 2 "$@" --node-rank 0 --nproc-per-node 1 --no-python "${train_tiny[@]}" --run.dir="$run"
        wait $other && [ $rc -eq 0 ] && same "$dir/two" "$run" || show $rc
    }
    ok "torchrun, two nodes, static" two_agents --master-addr 127.0.0.1 --master-port "$(random_port)"
    ok "torchrun, two nodes, c10d" two_agents --rdzv-backend c10d --rdzv-id j --rdzv-endpoint "127.0.0.1:$(random_port)"
    rank_of() { # run folder, rank: its process
        local p
        for p in $(pgrep -x "$(basename "$BRAID")"); do
            { tr '\0' '\n' <"/proc/$p/environ"; } 2>/dev/null | grep -qx "RANK=$2" && grep -qz -- "--run.dir=$1" "/proc/$p/cmdline" 2>/dev/null && echo "$p" && return
        done
    }
    killed_once() { # rank, arguments of torchrun...: that rank is killed after the first checkpoint, the agent starts all again
        local run rank=$1 agent
        shift
        run=$(mktemp -d "$dir/killed-XXXX")
        timeout 300 "$TORCHRUN" "$@" --max-restarts 3 --nproc-per-node 2 --no-python "${train_tiny[@]}" "${long[@]}" --run.dir="$run" >"$dir/out" 2>"$dir/err" &
        agent=$!
        wait_while_running $agent test -e "$run/checkpoints/latest" && kill -KILL "$(rank_of "$run" "$rank")" || return 1
        wait $agent && grep -q 'continuing .* at step [1-9]' "$dir/err" && same "$dir/long" "$run" || show $?
    }
    ok "torchrun --max-restarts, static: rank 1 is killed" killed_once 1 --master-port "$(random_port)"
    ok "torchrun --max-restarts, static: rank 0 is killed" killed_once 0 --master-port "$(random_port)"
    ok "torchrun --max-restarts --standalone: rank 0 is killed" killed_once 0 --standalone
    ok "torchrun --max-restarts, c10d: rank 1 is killed" killed_once 1 --rdzv-backend c10d --rdzv-endpoint "127.0.0.1:$(random_port)"
    if [ -n "${ETCD:-}" ]; then # host:port of a server; torchrun needs the package python-etcd
        ok "torchrun --max-restarts, etcd-v2: rank 1 is killed" killed_once 1 --rdzv-backend etcd-v2 --rdzv-id "j$RANDOM" --rdzv-endpoint "$ETCD"
    fi
    node_is_lost() { # of two nodes one goes for good, with its agent; the other continues alone
        local run=$dir/lost a b at lost
        port=$(random_port)
        # Where both nodes are there nobody waits for last_call_timeout; the one that is left waits for it once.
        at=(--nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-id lost --rdzv-endpoint "127.0.0.1:$port" --rdzv-conf "last_call_timeout=15,join_timeout=120" --nproc-per-node 1)
        set -- --no-python "${train_tiny[@]}" "${long[@]/steps=400/steps=10000}" --run.dir="$run"
        timeout 300 "$TORCHRUN" "${at[@]}" "$@" >"$dir/out" 2>"$dir/err" &
        a=$!
        wait_for 60 listens "$port" || { kill $a; show 1; return 1; } # it keeps the store
        "$TORCHRUN" "${at[@]}" "$@" >"$dir/out1" 2>"$dir/err1" &
        b=$!
        waiting+=($a $b)
        wait_while_running $a test -e "$run/checkpoints/latest" || { show 1; return 1; }
        lost=$(pgrep -x -P "$b" "$(basename "$BRAID")") || { echo "  the second node has no rank"; show 1; return 1; }
        kill -KILL "$b" "$lost"
        wait $a && grep -qh 'continuing .* at step [1-9]' "$dir/err" && runs "$BRAID" ckpt verify "$run" || show $?
    }
    ok "torchrun --nnodes 1:2: a node is lost, and the other goes on" node_is_lost
fi
finish
