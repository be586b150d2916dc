#!/usr/bin/env bash
# python/braid_kernels on the CPU, where a python3 has torch (BRAID_PYTHON names another one than that of PATH).
. "$(dirname "$0")/../cmd/lib.sh"
cd "$root" || exit 1
lib=$(realpath "$(dirname "$BRAID")/libbraidk.so")
python=${BRAID_PYTHON:-python3}
command -v "$python" >/dev/null || { echo "ok skipped: no python3"; finish; }
if readelf -d "$lib" | grep -qE 'asan|ubsan'; then echo "ok skipped: a library with sanitizers needs a program with them"; finish; fi

# Without torch: the library loads through ctypes, and the layouts of arguments agree with the header.
layouts_agree() {
    BRAIDK_LIB=$lib "$python" -c "
import importlib.util, sys
spec = importlib.util.spec_from_file_location('braidk_lib', 'python/braid_kernels/_lib.py')
m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
library = m.library()
assert library.open(m.HOST)
print(library.build, len(library.ops), 'ops')"
}
ok "ctypes and braidk.h agree" layouts_agree
if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "ok skipped: $python has no torch; BRAID_PYTHON may name one that has"
    finish
fi
ok "the tests of the package pass" env BRAIDK_LIB="$lib" OMP_NUM_THREADS=2 PYTHONDONTWRITEBYTECODE=1 "$python" tests/lib/kernels.py cpu
ok "the modules equal those they replace" env BRAIDK_LIB="$lib" OMP_NUM_THREADS=2 PYTHONDONTWRITEBYTECODE=1 "$python" tests/lib/modules.py
finish
