#!/usr/bin/env python3
"""Packs python/braid_kernels and libbraidk.so into a wheel; `make wheel` runs it.

    tools/wheel.py LIBRARY FOLDER [BINDING]        writes FOLDER/braid_kernels-VERSION-py3-none-PLATFORM.whl

The library is reached through ctypes, so one wheel serves every Python and every torch; the binding, libbraid_torch.so, is used by those
from torch 2.10 on, and has no symbol of Python either. Where auditwheel is found (and patchelf, which it
needs), it brings libgomp along and names the oldest systems that the wheel runs on; without it the wheel is for systems like this one.

Licences of the libraries inside are taken from this system's documentation; one that is not found there is named."""

import base64
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
METADATA = """Metadata-Version: 2.1
Name: braid-kernels
Version: {version}
Summary: Kernels of the braid trainer for PyTorch: mHC, experts, Mamba-2, gated delta rule, router, loss
License: MIT
Requires-Python: >=3.8
Requires-Dist: torch>=2.4
Description-Content-Type: text/markdown

{readme}"""
WHEEL = """Wheel-Version: 1.0
Generator: braid tools/wheel.py
Root-Is-Purelib: false
Tag: py3-none-{platform}
"""


INSIDE = ("openblas", "xxhash", "gomp")  # libraries that are linked statically, or brought along


def read(path):
    with open(path, "rb") as f:
        return f.read()


def contents(library, binding, version, platform):
    package = os.path.join(ROOT, "python", "braid_kernels")
    files = {f"braid_kernels/{n}": read(os.path.join(package, n)) for n in sorted(os.listdir(package)) if n.endswith((".py", ".md"))}
    files["braid_kernels/libbraidk.so"] = read(library)
    if binding:
        files["braid_kernels/libbraid_torch.so"] = read(binding)
    info = f"braid_kernels-{version}.dist-info"
    files[f"{info}/METADATA"] = METADATA.format(version=version, readme=read(os.path.join(package, "README.md")).decode()).encode()
    files[f"{info}/WHEEL"] = WHEEL.format(platform=platform).encode()
    files[f"{info}/LICENSE"] = read(os.path.join(ROOT, "LICENSE"))
    for name in INSIDE:
        found = sorted(glob.glob(f"/usr/share/doc/lib{name}*/copyright"))
        if found:
            files[f"{info}/licenses/{name}.txt"] = read(found[0])
        else:
            print(f"no licence of {name} in /usr/share/doc: add it to the wheel before it is passed on", file=sys.stderr)
    return files, info


def pack(path, files, info):
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}")
            entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))  # the same bytes for the same contents
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            z.writestr(entry, data)
        z.writestr(zipfile.ZipInfo(f"{info}/RECORD", (2026, 1, 1, 0, 0, 0)), "\n".join(record + [f"{info}/RECORD,,", ""]))


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    library, folder, binding = (*sys.argv[1:], None)[:3]
    source = read(os.path.join(ROOT, "python", "braid_kernels", "__init__.py")).decode()
    version = re.search(r'__version__ = "(.*)"', source).group(1)
    platform = "linux_" + os.uname().machine
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"braid_kernels-{version}-py3-none-{platform}.whl")
    pack(path, *contents(library, binding, version, platform))
    tool = shutil.which("auditwheel")
    if tool is None:
        print(f"{path} (auditwheel is not here: the wheel names this system only)")
        return 0
    said = subprocess.run([tool, "repair", "--exclude", "libtorch_cpu.so", "--wheel-dir", folder, path], capture_output=True, text=True)
    made = re.findall(r"Fixed-up wheel written to (\S+)", said.stdout + said.stderr)
    if said.returncode != 0 or not made:
        print(said.stdout + said.stderr, file=sys.stderr)
        return 1
    os.remove(path)
    print(made[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
