#!/usr/bin/env bash
# The meters of the tree measure: register spills from a build's logs, the format of sources, banned phrases. Needs no binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
failed=0
say() { # condition sentence
    if [ "$1" -eq 0 ]; then echo "ok $2"; else echo "not ok $2" && failed=1; fi
}
holds() { grep -qF -- "$1" "$dir/out" || { echo "  no '$1' in:" && sed 's/^/    /' "$dir/out" && false; }; }

# ---- spills
mkdir -p "$dir/b/ops/x"
cat >"$dir/b/ops/x/x.cu.o.log" <<'LOG'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5quietv' for 'sm_80'
ptxas info    : Function properties for _Z5quietv
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function '_Z6spillsi' for 'sm_90a'
ptxas info    : Function properties for _Z6spillsi
    240 bytes stack frame, 128 bytes spill stores, 96 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 360 bytes cmem[0]
LOG
tools/spills "$dir/b" >"$dir/out"
holds "128      96   255 sm_90a   ops/x/x.cu" && holds "1 kernels spill registers" && ! grep -q quiet "$dir/out"
say $? "a kernel that spills is listed with its bytes, one that does not is not"
tools/spills --short "$dir/b" >"$dir/out"
holds "1 kernels spill registers, the worst 128 bytes"
say $? "the short form is one line"
rm "$dir/b/ops/x/x.cu.o.log"
[ -z "$(tools/spills --short "$dir/b")" ]
say $? "without logs the short form is silent"

# ---- format: a small tree of its own
mkdir -p "$dir/tree/src" "$dir/tree/tests" "$dir/tree/tools"
cp .clang-format "$dir/tree/" && cp tools/format "$dir/tree/tools/"
{
    printf '/* What this file is. */\n'
    printf '/* ---- first'
    printf '\n * ------------------------------------------------------------------------------ */\n'
    printf '/* A sentence that is much too wide for one line, because it goes on and on and on, and takes another clause, and then still one more.\n'
    printf ' * It goes on here.\n *   x    = sum of y      stays where it is\n */\n'
    printf 'int  f( int a ){ return a ;}\n'
} >"$dir/tree/src/a.c"
if "$dir/tree/tools/format" --check >"$dir/out" 2>&1; rc=$?; grep -q 'needs clang-format' "$dir/out"; then
    [ $rc -eq 0 ]
    say $? "without the right clang-format the check passes with a message"
else
    [ $rc -eq 1 ] && holds "src/a.c is not formatted"
    say $? "an unformatted file is named"
    "$dir/tree/tools/format" && "$dir/tree/tools/format" --check >"$dir/out"
    say $? "formatted once, the check passes"
    cp "$dir/tree/src/a.c" "$dir/out"
    holds "int f(int a) { return a; }" && holds "/* ---- first -----" && holds " *   x    = sum of y      stays where it is" &&
        [ "$(awk 'length > 120' "$dir/out" | wc -l)" -eq 0 ] && holds "It goes on here."
    say $? "headings are joined, wide comments wrapped, tables left alone"
    sed -i '1s/.*/# clang-format 3/' "$dir/tree/.clang-format" && printf 'int  x ;\n' >>"$dir/tree/src/a.c"
    "$dir/tree/tools/format" --check >"$dir/out"
    [ $? -eq 0 ] && holds "needs clang-format 3"
    say $? "another version of clang-format is not used"
fi

# ---- language
cd "$root" || exit 1
printf '%s\n' '/* Of a row. */' '/* The sum of now is taken again on the way back. */' 'int stop_wish;' >"$dir/a.c"
tools/language.sh "$dir/a.c" >"$dir/out"
[ $? -eq 1 ] && holds "language: 5 places" && holds 'say "backward pass"' && holds 'say "a sentence with a subject"'
say $? "banned phrases are found, with what to say instead"
printf '%s\n' '/* It goes all the way' ' * back. */' >"$dir/a.c"
tools/language.sh "$dir/a.c" >"$dir/out"
[ $? -eq 1 ] && holds "a.c: way back"
say $? "also over a line break"
printf '%s\n' '/* The sum of a row. Letters, ways and now are words. */' >"$dir/a.c"
tools/language.sh "$dir/a.c" >"$dir/out"
say $? "single words are not banned"
exit $failed
