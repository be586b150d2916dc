# Shared by the shell tests of this folder: a scratch folder, results, text to train on, a tiny model.
# Source it first; $BRAID is the binary. `finish` ends a script with its exit code.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
BRAID=${BRAID:-$root/build/braid}
[ -x "$BRAID" ] || { echo "not ok there is no binary $BRAID"; exit 1; }
dir=$(mktemp -d "${TMPDIR:-/tmp}/braid-test-XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
failed=0

ok() { # ok "sentence" command...
    local name=$1
    shift
    if "$@"; then echo "ok $name"; else
        echo "not ok $name"
        failed=1
    fi
}
finish() { exit $failed; }

show() { # what a command said, when it was not what a test wanted
    echo "  exit code $1"
    sed 's/^/  out: /' "$dir/out" | tail -15
    sed 's/^/  err: /' "$dir/err" | tail -15
    return 1
}
try() { # command...: its output goes to $dir/out and $dir/err, its exit code to $rc
    "$@" >"$dir/out" 2>"$dir/err"
    rc=$?
}
prints() { # text, command...: exit code 0 and the text on stdout
    local phrase=$1
    shift
    try "$@"
    [ $rc -eq 0 ] && grep -q -- "$phrase" "$dir/out" || show $rc
}
says() { # text, command...: exit code 0 and the text on stderr
    local phrase=$1
    shift
    try "$@"
    [ $rc -eq 0 ] && grep -q -- "$phrase" "$dir/err" || show $rc
}
runs() { # command...: exit code 0
    try "$@"
    [ $rc -eq 0 ] || show $rc
}
# code, text, command...: that exit code, one error line on stderr, and the text somewhere on stderr
fails() {
    local want=$1 phrase=$2
    shift 2
    try "$@"
    [ $rc -eq "$want" ] && [ "$(grep -c '^braid: error: ' "$dir/err")" -eq 1 ] &&
        grep -qF -- "$phrase" "$dir/err" || { echo "  wanted exit code $want and: $phrase"; show $rc; }
}
same() { # A B: two runs, checkpoints or safetensors files hold the same bits
    try "$BRAID" ckpt diff "$1" "$2"
    [ $rc -eq 0 ] || show $rc
}
no_leftovers() { # folder: nothing half-written lies there
    local left
    left=$(find "$1" -name '*.tmp*' -o -name '*.old-*' | head -5)
    [ -z "$left" ] || { echo "  left over: $left"; return 1; }
}

# Some text that a model can learn a little from.
book=$dir/text.txt
for i in $(seq 300); do
    echo "line $i: $((i * i % 97)) apples, $((i * 7 % 13)) pears and a plum."
done >"$book"

# The tiny model on one thread: the tests share their cores, and spinning threads wait for each other.
tiny=$root/configs/tiny.ini
train_tiny=("$BRAID" train "$tiny" --data.train="$book" --run.quiet=on --run.threads=1)
train() { "${train_tiny[@]}" "$@"; }

# Start a run in a process group of its own, so that SIGINT is not ignored as in a background job.
start() { # training options...: sets $pid
    set -m
    "${train_tiny[@]}" "$@" >"$dir/out" 2>"$dir/err" &
    pid=$!
    set +m
}
steps_done() { # run folder: training steps in its log
    grep -c '^{"step":[0-9]*,"loss"' "$1/metrics.jsonl" 2>/dev/null || true
}
losses() { # run folder: "step loss" of each step once, in order
    sed -nE 's/^\{"step":([0-9]+),"loss":([^,]*).*/\1 \2/p' "$1/metrics.jsonl" | sort -n | uniq
}
wait_while_running() { # pid, command...: until the command succeeds, or the process is gone
    for _ in $(seq 1200); do
        "${@:2}" 2>/dev/null && return 0
        kill -0 "$1" 2>/dev/null || return 1
        sleep 0.05
    done
    return 1
}
has_steps() { [ "$(steps_done "$1")" -ge "$2" ]; }
wait_for_step() { wait_while_running "$3" has_steps "$1" "$2"; } # run folder, n, pid: until the log has n steps
wait_for_text() { wait_while_running "$3" grep -q "$1" "$2"; }   # pattern, file, pid: until the file has it
