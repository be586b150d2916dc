#!/usr/bin/env bash
# How the binary is built: position independent, tables read-only before main, no executable stack, guarded stacks, checked copies.
. "$(dirname "$0")/lib.sh"
command -v readelf >/dev/null || { echo "ok skipped: no readelf"; finish; }
has() { readelf -W "$1" "$BRAID" | grep -qE -- "$2"; }
has_not() { ! has "$@"; }
ok "it is position independent" has -h 'Type: +DYN'
ok "it has a read-only table of addresses" has -l 'GNU_RELRO'
ok "bound before main" has -d 'BIND_NOW|FLAGS_1.*NOW'
ok "its stack is not executable" has -l 'GNU_STACK.* RW '
ok "stacks are guarded" has --dyn-syms '__stack_chk_fail'
if readelf -W --dyn-syms "$BRAID" | grep -qE '__(asan|tsan|ubsan)'; then
    echo "ok skipped: sanitizers check copies themselves"
else
    ok "copies and prints are checked" has --dyn-syms '__(memcpy|memset|snprintf|vsnprintf|printf|fprintf|read)_chk'
fi
finish
