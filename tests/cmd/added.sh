# Shared by the tests that add something to the sources as CONTRIBUTING.md says: a copy of the tree with a patch of
# tests/patches applied, which reuses the objects of the build under test. Source it with the patch's name in $patch.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
root=$PWD
braid=${BRAID:-$root/build/braid}
build=$(cd "$(dirname "$braid")" && pwd)
copy=$(mktemp -d) || exit 1
trap 'rm -rf "$copy"' EXIT
failed=0

check() { # "sentence" command...
    local sentence=$1
    shift
    if "$@" >"$copy/log" 2>&1; then echo "ok $sentence"; else
        echo "not ok $sentence"
        tail -5 "$copy/log" | sed 's/^/  /'
        failed=1
    fi
}
found() { grep -q -- "$1" "$copy/out"; }
fails_with() { # text, command...
    local text=$1
    shift
    ! "$@" >"$copy/out" 2>&1 && found "$text"
}

# Times are kept to the nanosecond (posix), so that make finds what it does not have to build again; programs and tests stay behind. Dependencies
# name the build folder, and its settings must be the same.
cp -a Makefile src tests configs "$copy" && mkdir "$copy/b" &&
    (cd "$build" && find . \( -path ./tests -o -path ./fuzz -o -path ./emu \) -prune -o \
        \( -name '*.[oda]' -not -name '*.cu.o' -o -name 'settings*' \) -print0 | tar -c --format=posix --null -T - | tar -xC "$copy/b") || exit 1
named=$(sed -n '1s#/layers/cores\.o:.*##p' "$copy/b/layers/cores.d")
[ -n "$named" ] || { echo "not ok the dependencies of $build name their folder"; exit 1; }
find "$copy/b" -name '*.d' -exec sed -i "s#\(^\| \)$named/#\1b/#g" {} +
find "$copy/b" -name '*.d' -exec touch -r "$copy/b/settings" {} +
cd "$copy" || exit 1
patch -p1 -s <"tests/patches/$patch" || exit 1
settings=$(cat b/settings)
aware=$(grep -qs yes b/settings-cuda && grep -rlE 'BRAID_CUDA|comm/gpu_int\.h' --include='*.c' src | wc -l || echo 0) # compiled again without CUDA
make_copy() { # target...: without kernels, which take long to link; what was compiled is in $copy/made
    # shellcheck disable=SC2086
    make -j2 B=b V=1 CUDA=no ${settings%% EXTRA_CFLAGS=*} EXTRA_CFLAGS="${settings#* EXTRA_CFLAGS=}" "$@" >"$copy/made" 2>&1 || { cat "$copy/made"; return 1; }
}
objects_made() { grep -c -- ' -c src/' "$copy/made"; }
touches_only() { # pattern of paths, which begin like src/
    ! sed -n 's/^+++ b\///p' "tests/patches/$patch" | grep -v "$1"
}
