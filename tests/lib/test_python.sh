#!/usr/bin/env bash
# python/braid_kernels on the CPU, where a python3 has torch (BRAID_PYTHON names another one than that of PATH).
. "$(dirname "$0")/../cmd/lib.sh"
cd "$root" || exit 1
build=$(dirname "$BRAID")
lib=$(realpath "$build/libbraidk.so")
python=${BRAID_PYTHON:-python3}
command -v "$python" >/dev/null || { echo "ok skipped: no python3"; finish; }
if grep -qE 'SAN=[a-z]' "$build/settings" 2>/dev/null; then echo "ok skipped: a library with sanitizers needs a program with them"; finish; fi

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

# A wheel, made without auditwheel and unpacked: it has its own library, and its list of files with their checksums is right.
wheel_is_whole() {
    PATH=/usr/bin:/bin "$python" tools/wheel.py "$lib" "$dir/wheel" "$@" && "$python" -m zipfile -e "$dir"/wheel/*.whl "$dir/site" &&
        env -u BRAIDK_LIB "$python" - "$dir/site" <<'P'
import base64, hashlib, importlib.util, os, sys
site = sys.argv[1]
info = next(n for n in os.listdir(site) if n.endswith(".dist-info"))
rows = [r.split(",") for r in open(os.path.join(site, info, "RECORD")).read().split()]
for name, digest, size in rows:
    data = open(os.path.join(site, name), "rb").read()
    want = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert name.endswith("RECORD") or (digest == want and int(size) == len(data)), name
assert sum(len(files) for _, _, files in os.walk(site)) == len(rows)
spec = importlib.util.spec_from_file_location("braidk_lib", os.path.join(site, "braid_kernels", "_lib.py"))
m = importlib.util.module_from_spec(spec)
spec.loader.exec_module(m)
assert m.library().path.startswith(site)
P
}
ok "a wheel brings its library along" wheel_is_whole
if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "ok skipped: $python has no torch; BRAID_PYTHON may name one that has"
    finish
fi
kernels() { # BRAID_KERNELS_BINDING, file
    BRAID_KERNELS_BINDING=$1 BRAIDK_LIB=$lib OMP_NUM_THREADS=2 PYTHONDONTWRITEBYTECODE=1 "$python" -W ignore "tests/lib/$2.py" cpu
}
ok "the tests of the package pass" kernels 0 kernels
ok "programs can use it in all their ways" kernels 0 uses
ok "the modules equal those they replace" env BRAID_KERNELS_BINDING=0 BRAIDK_LIB="$lib" OMP_NUM_THREADS=2 PYTHONDONTWRITEBYTECODE=1 "$python" tests/lib/modules.py

# Native calls: the binding is used where it is named or beside the package, and a path that is wrong is an error.
binding=$dir/native/libbraid_torch.so
headers=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')/include/torch/csrc/stable/library.h
if [ ! -f "$headers" ] || ! command -v "${CXX:-c++}" >/dev/null; then
    echo "ok skipped: no C++ compiler, or a torch before 2.10: no native calls"
    finish
fi
ok "the binding builds" make -s CUDA=no B="$dir/native" BRAID_PYTHON="$python" "$binding"
ok "the tests of the package pass with native calls" kernels "$binding" kernels
ok "programs can use native calls in all their ways" kernels "$binding" uses
ask() { # BRAID_KERNELS_BINDING, folder of the package: how ops are called
    env BRAID_KERNELS_BINDING="$1" PYTHONPATH="$2" PYTHONDONTWRITEBYTECODE=1 "$python" -c 'import braid_kernels as bk; print(bk.binding())'
}
missing_is_named() {
    ! ask "$dir/none.so" python 2>"$dir/err" && grep -q "BRAID_KERNELS_BINDING names $dir/none.so, which does not exist" "$dir/err"
}
broken_is_named() {
    echo "no library" >"$dir/broken.so"
    ! ask "$dir/broken.so" python 2>"$dir/err" && grep -q "broken.so, which BRAID_KERNELS_BINDING names, cannot be loaded" "$dir/err"
}
ok "a binding that is missing is named" missing_is_named
ok "a binding that cannot be loaded is named" broken_is_named
rm -rf "$dir/wheel" "$dir/site"
ok "a wheel brings the binding along" wheel_is_whole "$binding"
ok "the wheel calls natively" prints "native calls through $dir/site" ask "" "$dir/site"
finish
