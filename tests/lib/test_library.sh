#!/usr/bin/env bash
# libbraidk.so as other programs see it: what it shows, what it needs, the header from C and C++, the example on the CPU, and what it
# says where the driver of a GPU is missing or too old.
. "$(dirname "$0")/../cmd/lib.sh"
lib=$(dirname "$BRAID")/libbraidk.so
build=$(dirname "$BRAID")
if grep -qE 'SAN=[a-z]' "$build/settings" 2>/dev/null; then echo "ok skipped: a library with sanitizers needs a program with them"; finish; fi
[ -e "$lib" ] || { echo "not ok $lib was built"; exit 1; }
cd "$root" || exit 1

only_its_interface() { ! nm -D --defined-only "$lib" | awk '{ print $3 }' | grep -v '^braidk_' | grep .; }
all_of_its_interface() { # every op of the header has its three functions
    local op n=0
    for op in $(sed -nE 's/^    OP\(([a-z_0-9]+)\).*/\1/p' src/lib/braidk.h); do
        for f in "$op" "${op}_work" "${op}_supported"; do
            nm -D --defined-only "$lib" | grep -q " braidk_$f\$" || { echo "braidk_$f is missing"; return 1; }
            n=$((n + 1))
        done
    done
    [ "$n" -ge 50 ]
}
needs_only() { # libraries that every system has, and those of the compiler
    ! readelf -d "$lib" | sed -nE 's/.*NEEDED.*\[(.*)\]/\1/p' |
        grep -vE '^(libc|libm|libdl|librt|libpthread)\.so|^libgomp|^libomp|^ld-linux|^libgcc_s|^libopenblas' | grep .
}
header_in() { # compiler standard
    printf '#include "braidk.h"\nint main(void) { struct braidk_mhc_boundary_args a = {sizeof a}; return a.size == 0; }\n' >"$dir/h.$1"
    "$2" "-std=$3" -Wall -Wextra -Wno-missing-field-initializers -Werror -Isrc/lib -fsyntax-only "$dir/h.$1"
}
ok "only braidk_* is visible" only_its_interface
ok "every op has its three functions" all_of_its_interface
ok "it needs only libc and the compiler's libraries" needs_only
ok "the header is C11" header_in c "${CC:-gcc}" c11
ok "and C++17" header_in cc g++ c++17
ok "the example runs on the CPU" "$build/lib_example_cpu"

# A driver that knows CUDA 11 only: what the runtime asks it is answered, and nothing else.
cat >"$dir/driver.c" <<'C'
int cuInit(unsigned flags) { return flags == 0 ? 0 : 1; }
int cuDriverGetVersion(int *version) { return *version = 11040, 0; }
C
cat >"$dir/open.c" <<'C'
#include "braidk.h"
#include <stdio.h>
int main(void)
{
    struct braidk *k;
    char why[512];
    int st = braidk_open(0, &k, why, sizeof why);
    printf("%d %s\n", st, why);
    return st == BRAIDK_OK;
}
C
opening_says() { # folder with libcuda, text
    LD_LIBRARY_PATH=$1 "$dir/open" | tee "$dir/said" | grep -q "$2" || { cat "$dir/said"; return 1; }
}
if ! "${CC:-gcc}" -o "$dir/open" "$dir/open.c" -Isrc/lib "$lib" -Wl,-rpath,"$(realpath "$build")"; then
    echo "not ok a program links with it"
    exit 1
elif nm "$lib" 2>/dev/null | grep -q cuda_describe; then
    mkdir "$dir/stub" && "${CC:-gcc}" -shared -fPIC -o "$dir/stub/libcuda.so.1" "$dir/driver.c"
    ok "a driver that is too old is named" opening_says "$dir/stub" 'driver is too old: it knows CUDA 11.4'
    [ -e /dev/nvidia0 ] || ok "a driver that is missing is named" opening_says "$dir" 'no NVIDIA driver'
    python_says() {
        BRAIDK_LIB=$(realpath "$lib") LD_LIBRARY_PATH=$dir/stub python3 - <<'P'
import importlib.util
spec = importlib.util.spec_from_file_location("braidk_lib", "python/braid_kernels/_lib.py")
m = importlib.util.module_from_spec(spec)
spec.loader.exec_module(m)
try:
    m.library().open(0)
except m.BraidUnsupported as e:
    assert "driver is too old" in str(e), str(e)
else:
    raise SystemExit("GPU 0 was opened")
P
    }
    if command -v python3 >/dev/null; then ok "and is an exception of Python" python_says; fi
else
    ok "a build without CUDA says so" opening_says "$dir" 'built without CUDA'
fi
finish
