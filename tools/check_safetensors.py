#!/usr/bin/env python3
"""Cross-check our safetensors files with the safetensors package, 0.8 or later.

  check_safetensors.py golden FILE     write the fixture tests/ckpt/golden.safetensors
  check_safetensors.py read FILE...    read files written by braid; print name, dtype, shape, sum
  check_safetensors.py ckpt DIR        read a checkpoint folder and compare it with its manifest
"""
import ctypes
import json
import os
import struct
import sys

from safetensors import TensorSpec, deserialize, serialize

GOLDEN = {
    "d": ("float64", [2], struct.pack("<2d", 0.1, -2.5)),
    "a.weight": ("float32", [2, 3], struct.pack("<6f", 0, 1, -2, 3.5, 1e-30, 65504)),
    "b.scalar": ("float32", [], struct.pack("<f", -7.25)),
    "empty": ("float32", [0, 4], b""),
    "h": ("bfloat16", [3], struct.pack("<3H", 0x3F80, 0xC000, 0x7F80)),  # 1, -2, infinity
    "u\u00e9": ("uint8", [5], bytes([1, 2, 3, 254, 255])),
}


def golden(path):
    specs, buffers = {}, []
    for name, (dtype, shape, data) in GOLDEN.items():
        buffers.append(ctypes.create_string_buffer(data, max(len(data), 1)))
        specs[name] = TensorSpec(
            dtype=dtype, shape=shape, data_ptr=ctypes.addressof(buffers[-1]), data_len=len(data)
        )
    with open(path, "wb") as f:
        f.write(bytes(serialize(specs, {"maker": "the python package"})))


def header(blob):
    (n,) = struct.unpack("<Q", blob[:8])
    assert (8 + n) % 8 == 0, "the data are not aligned"
    return json.loads(blob[8 : 8 + n])


def read(path):
    with open(path, "rb") as f:
        blob = f.read()
    plain = header(blob)
    found = {name: info for name, info in deserialize(blob)}
    plain.pop("__metadata__", None)
    assert set(plain) == set(found), "the package sees other names"
    for name, info in found.items():
        assert plain[name]["shape"] == list(info["shape"]), name
        assert plain[name]["dtype"] == info["dtype"], name
    return found


def checkpoint(folder):
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as f:
        manifest = json.load(f)
    seen = 0
    files = {}
    for name, info in manifest["files"].items():
        path = os.path.join(folder, name)
        assert os.path.getsize(path) == info["bytes"], name
        if name.endswith(".safetensors"):
            files[name] = read(path)
    for section in manifest["tensors"].values():
        for key, info in section.items():
            tensor = files[info["file"]][key]
            assert tensor["dtype"] == info["dtype"] and list(tensor["shape"]) == info["shape"], key
            seen += 1
    print(f"{folder}: step {manifest['step']}, {seen} tensors agree")


def main(args):
    if len(args) == 2 and args[0] == "golden":
        golden(args[1])
    elif len(args) >= 2 and args[0] == "read":
        for path in args[1:]:
            for name, info in read(path).items():
                print(path, name, info["dtype"], list(info["shape"]), sum(info["data"]))
    elif len(args) == 2 and args[0] == "ckpt":
        checkpoint(args[1])
    else:
        sys.exit(__doc__)


main(sys.argv[1:])
