#!/usr/bin/env bash
# Little address space: a message and an end, at every limit, never a process that spins. OpenBLAS would try for ever to get its buffers.
. "$(dirname "$0")/lib.sh"
limited() { # KiB, command...: within a minute it ends by itself, well or with one error
    local limit=$1
    shift
    (ulimit -v "$limit" && exec timeout -s KILL 60 "$@") >"$dir/out" 2>"$dir/err"
    rc=$?
    [ $rc -ne 137 ] || { echo "  $limit KiB: killed after a minute"; return 1; }
    [ $rc -eq 0 ] || grep -qE 'error|libgomp|error while loading' "$dir/err" || show $rc
}
if ! (ulimit -v 16000000 && "$BRAID" help) >/dev/null 2>&1; then
    echo "ok skipped: this build (a sanitizer's) does not start with 16 GB of address space"
    finish
fi
# Beside the program itself, which with CUDA kernels is larger than all its libraries.
own=$(($(stat -c %s "$BRAID") / 1024))
for more in 40000 86000 186000 286000; do ok "help in $more KiB beside the program ends" limited $((own + more)) "$BRAID" help; done
limited $((own + 86000)) "$BRAID" help
ok "it says what is missing" grep -q 'no address space for the buffers of OpenBLAS' "$dir/err"
# Between what loading takes and what training takes, whatever the number of cores.
each=$((132 * 1024)) cores=$(nproc)
for extra in 0 60000 100000 140000 200000 300000 500000; do
    ok "training in $cores buffers and $extra KiB ends" limited $((each * cores + extra + 100000)) "${train_tiny[@]}" --train.steps=3 --train.warmup=0
done
ok "training in enough does" limited $((each * cores * 3 + 2000000)) "${train_tiny[@]}" --train.steps=3 --train.warmup=0
ok "well" test $rc -eq 0
finish
