#!/usr/bin/env bash
# braid data: exit codes, messages and files, through the program itself. $BRAID is the binary.
set -u
dir=$(mktemp -d /tmp/braid-test-XXXXXX) || exit 1
trap 'rm -rf "$dir"' EXIT
failed=0

ok() { # ok "sentence" command...
    local name=$1
    shift
    if "$@"; then echo "ok $name"; else echo "not ok $name"; failed=1; fi
}
fails_with() { # text, command...: exit code 1 and the text on stderr
    local text=$1 rc
    shift
    "$@" >"$dir/out" 2>"$dir/err"
    rc=$?
    [ $rc -eq 1 ] && grep -q -- "$text" "$dir/err" || { echo "rc $rc: $(cat "$dir/err")"; return 1; }
}
prints() { # text, command...
    local text=$1
    shift
    "$@" >"$dir/out" 2>"$dir/err" && grep -q -- "$text" "$dir/out" || { cat "$dir/out" "$dir/err"; return 1; }
}
no_output() { [ -z "$(find "$dir/o" -type f)" ] || { find "$dir/o"; return 1; }; }

mkdir "$dir/t" "$dir/o"
printf 'hello' >"$dir/t/a.txt"
printf 'bye' >"$dir/t/b.txt"
printf 'x\0y' >"$dir/t/picture"

ok "help is printed" prints 'usage: braid data tokenize' "$BRAID" data --help
ok "a subcommand is needed" fails_with 'needs a subcommand' "$BRAID" data
ok "an unknown subcommand is named" fails_with 'subcommand frob' "$BRAID" data frob
ok "an unknown option is named" fails_with '--frob' "$BRAID" data tokenize --in "$dir/t" --frob
ok "tokenize needs --out" fails_with '--out PREFIX' "$BRAID" data tokenize --in "$dir/t"
ok "a missing input is named" fails_with 'nothing-here' "$BRAID" data tokenize --in "$dir/nothing-here" --out "$dir/o/p"
ok "a missing output folder is named" fails_with 'does not exist' "$BRAID" data tokenize --in "$dir/t" --out "$dir/o/no/p"
full() { # command...: no file may get a byte; what it says goes through a pipe
    (set -o pipefail; (trap '' XFSZ; ulimit -f 0; exec "$@") 2>&1 >/dev/null | cat >&2)
}
ok "a full disk is an error" fails_with 'File too large' full "$BRAID" data tokenize --in "$dir/t" --out "$dir/o/p"
ok "nothing is left of all that" no_output
ok "a folder is tokenized" prints '2 documents, 10 tokens (U16' "$BRAID" data tokenize --in "$dir/t" --out "$dir/o/p" --eod
ok "the binary file was counted" grep -q '1 binary' "$dir/out"
ok "only the pair and its manifest are left" test "$(ls "$dir/o" | tr '\n' ' ')" = "p.bin p.idx p.tokens.json "
ok "an old pair is kept" fails_with 'exists already' "$BRAID" data tokenize --in "$dir/t" --out "$dir/o/p"
ok "info reads the pair" prints 'U16, 98 to 256' "$BRAID" data info "$dir/o/p" --scan
ok "force replaces it" prints '8 tokens (U8' "$BRAID" data tokenize --in "$dir/t" --out "$dir/o/p" --force
printf x >>"$dir/o/p.idx"
ok "info refuses a damaged pair" fails_with 'p.idx' "$BRAID" data info "$dir/o/p"
exit $failed
