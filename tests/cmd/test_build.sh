#!/usr/bin/env bash
# What a build takes in: CUDA only where a GPU is visible or it is asked for, and never objects of two settings in one folder.
. "$(dirname "$0")/lib.sh"
cd "$root" || exit 1
unset CUDA GPU NVCC MAKEFLAGS MFLAGS B CC SAN

# A compiler that is only named stands in for nvcc: nothing is compiled here but one small file.
found() { try make --no-print-directory found B="$dir/none" NVCC=/usr/local/cuda/bin/nvcc "$@"; grep -q "$want" "$dir/out" || show "$rc"; }
want='^CUDA: no (.*make CUDA=yes' ok "no GPU, nvcc there: for the CPU, and how to get more" found GPU=no
want='^CUDA: yes' ok "a visible GPU: with CUDA" found GPU=yes
want='^CUDA: yes' ok "no GPU, but asked for: with CUDA" found GPU=no CUDA=yes
want='^CUDA: no' ok "a GPU, but declined: for the CPU" found GPU=yes CUDA=no
want='^CUDA: no (no nvcc)' ok "a GPU without nvcc: for the CPU" found GPU=yes NVCC=
mkdir -p "$dir/none" && echo "CC=gcc CUDA=yes MPI=no SAN= OPT=-O2 EXTRA_CFLAGS=" >"$dir/none/settings-cuda"
want='^CUDA: yes' ok "a folder built with CUDA stays so" found GPU=no
rm "$dir/none/settings-cuda"
try make --no-print-directory found CUDA=yes NVCC=
ok "CUDA=yes without nvcc is an error that says what is missing" test $rc -ne 0
ok "in words" grep -q 'there is no nvcc' "$dir/err"
ok "the demo leaves the choice to make" test "$(grep -c 'CUDA=' <(grep '^make' demo))" -eq 0

ok "braid needs no cmocka" make -s needs CMOCKA=no
try make -s needs-tests CMOCKA=no
ok "tests do" test $rc -ne 0
ok "and say so" grep -q 'missing library: cmocka' "$dir/out"
make -n -B V=1 B="$dir/two" CUDA=no "$dir/two/tests/base/$(basename "$(ls tests/base/test_*.c | head -1)" .c)" "$dir/two/tests/token/$(basename "$(ls tests/token/test_*.c | head -1)" .c)" >"$dir/out" 2>&1
links_pcre() { grep -A3 -- "-o $dir/two/tests/$1/" "$dir/out" | grep -q pcre2; }
ok "a program with tokenizers links PCRE2" links_pcre token
links_only() { grep -q -- "-o $dir/two/tests/$1/" "$dir/out" && ! links_pcre "$1"; }
ok "one without does not" links_only base

one=$dir/one/base/version.o
build() { make -s B="$dir/one" CUDA=no "$@" "$one" >"$dir/out" 2>&1; }
stamp() { stat -c %Y%n%z "$one" 2>/dev/null; }
ok "one object is built" build
before=$(stamp)
ok "and again" build
ok "which changes nothing" test "$before" = "$(stamp)"
ok "another optimisation level" build OPT=-O1
ok "builds it anew" test "$before" != "$(stamp)"
finish
