#!/usr/bin/env python3
"""Megatron's torch_dist checkpoints to safetensors that braid reads, and back. Needs torch.

    python3 tools/megatron_dist.py to-safetensors CHECKPOINT OUT      CHECKPOINT: iter_0000100, or the folder above it
    python3 tools/megatron_dist.py to-torch-dist FOLDER OUT           FOLDER: of braid export --format=megatron
    python3 tools/megatron_dist.py --self-test                        round trips of folders made here

A torch_dist checkpoint is a folder of torch.distributed.checkpoint: its index (.metadata) and its arguments (common.pt) are
pickles, which can run any code when they are read. Convert only checkpoints whose origin you trust. Values never change;
tensors pass through memory one by one. docs/MEGATRON.md says what to do with the results.
"""
import argparse
import json
import math
import mmap
import os
import shutil
import struct
import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

warnings.filterwarnings("ignore", category=UserWarning)
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
         "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
NAMES = {v: k for k, v in TYPES.items()}
STATES = ("exp_avg", "exp_avg_sq", "fp32_param")


class Problem(Exception):
    """Something a user can do something about."""


# ---- safetensors ----------------------------------------------------------------------------------------------------


def write_safetensors(path, shapes, fetch):
    """shapes: name -> (dtype, shape); fetch(name) gives the tensor. One tensor is in memory at a time."""
    header, at = {"__metadata__": {"format": "megatron"}}, 0
    for name in sorted(shapes):
        dtype, shape = shapes[name]
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(shapes):
            tensor = fetch(name).detach().cpu().contiguous()
            if tensor.numel() > 0:
                f.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        f.flush()
        os.fsync(f.fileno())


def open_safetensors(path):
    """name -> tensor on the mapped file."""
    with open(path, "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        size = os.fstat(f.fileno()).st_size
        if n > size - 8:
            raise Problem(f"{path}: its header is longer than the file")
        header = json.loads(f.read(n))
        data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        dtype, shape = TYPES[entry["dtype"]], entry["shape"]
        count = math.prod(shape)
        if first < 0 or end > size - 8 - n or end - first != count * dtype.itemsize:
            raise Problem(f"{path}: {name} does not lie in the file")
        raw = torch.frombuffer(data, dtype=torch.uint8, count=end - first, offset=8 + n + first) if count else torch.empty(0, dtype=torch.uint8)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        out[name] = raw.view(dtype).reshape(shape)
    return out


# ---- torch_dist to safetensors -----------------------------------------------------------------------------------------


def find_checkpoint(path):
    """The folder of one iteration."""
    latest = os.path.join(path, "latest_checkpointed_iteration.txt")
    if not os.path.exists(os.path.join(path, ".metadata")) and os.path.exists(latest):
        with open(latest) as f:
            name = f.read().strip()
        path = os.path.join(path, name if not name.isdigit() else f"iter_{int(name):07d}")
    if not os.path.exists(os.path.join(path, ".metadata")):
        raise Problem(f"{path} is no torch_dist checkpoint: it has no .metadata")
    return path


def kind_of(key):
    """'model', 'optimizer', or None for what braid has no use for."""
    rest = key.split(".", 1)[1] if key.startswith("chained_") and "." in key else key
    if rest.startswith("optimizer."):
        return "optimizer" if any(rest.startswith(f"optimizer.state.{s}.") for s in STATES) else None
    return None if "_extra_state" in rest or rest.startswith(("rng_state", "rerun_state")) else "model"


def covered(meta):
    """Do the pieces of a tensor fill it?"""
    return sum(math.prod(c.sizes) for c in meta.chunks) >= math.prod(meta.size)


def read_common(path):
    """Iteration and arguments, as far as they can be read without running code of the file's."""
    common = os.path.join(path, "common.pt")
    if not os.path.exists(common):
        return {}, {}
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(common, map_location="cpu", weights_only=True)
    except Exception as problem:  # pylint: disable=broad-except  # whatever torch says about it
        print(f"note: common.pt holds more than plain values, its arguments are left out ({str(problem).splitlines()[0]})", file=sys.stderr)
        return {}, {}
    args = state.get("args")
    args = vars(args) if isinstance(args, argparse.Namespace) else args or {}
    return state, {k: v for k, v in args.items() if isinstance(v, (bool, int, float, str, type(None)))}


def to_safetensors(source, out):
    source = find_checkpoint(source)
    reader = dcp.FileSystemReader(source)
    index = reader.read_metadata().state_dict_metadata
    parts, left = {"model": {}, "optimizer": {}}, []
    for key, meta in index.items():
        kind = kind_of(key) if isinstance(meta, TensorStorageMetadata) else None
        if kind is None:
            left.append(key)
            continue
        if meta.properties.dtype not in NAMES:
            raise Problem(f"{key} is {meta.properties.dtype}, which safetensors of braid do not hold")
        if not covered(meta):
            raise Problem(f"{key} is not whole: some of its pieces are missing")
        parts[kind][key] = (meta.properties.dtype, tuple(meta.size))
    if not parts["model"]:
        raise Problem(f"{source} holds no tensors of a model")

    def fetch(key):
        dtype, shape = index[key].properties.dtype, tuple(index[key].size)
        state = {key: torch.empty(shape, dtype=dtype)}
        dcp.load(state, storage_reader=dcp.FileSystemReader(source),
                 planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
        return state[key]

    state, args = read_common(source)
    with new_folder(out) as tmp:
        write_safetensors(os.path.join(tmp, "model.safetensors"), parts["model"], fetch)
        if parts["optimizer"]:
            write_safetensors(os.path.join(tmp, "optimizer.safetensors"), parts["optimizer"], fetch)
        about = {"version": 1, "iteration": state.get("iteration", 0), "optimizer": bool(parts["optimizer"]), "args": args,
                 "consumed_train_samples": args.get("consumed_train_samples", 0)}
        with open(os.path.join(tmp, "megatron.json"), "x") as f:
            json.dump(about, f, indent=2, sort_keys=True)
    print(f"{out}: {len(parts['model'])} tensors of the model, {len(parts['optimizer'])} of the optimizer")
    if left:
        print(f"note: {len(left)} entries are left out (such as {left[0]})", file=sys.stderr)


# ---- safetensors to torch_dist -----------------------------------------------------------------------------------------


def to_torch_dist(source, out):
    if not os.path.exists(os.path.join(source, "megatron.json")):
        raise Problem(f"{source} has no megatron.json: `braid export CHECKPOINT OUT --format=megatron` writes such folders")
    with open(os.path.join(source, "megatron.json")) as f:
        about = json.load(f)
    state = open_safetensors(os.path.join(source, "model.safetensors"))
    optimizer = os.path.join(source, "optimizer.safetensors")
    if os.path.exists(optimizer):
        state.update(open_safetensors(optimizer))
    iteration = int(about.get("iteration", 0))
    with new_folder(out) as tmp:
        folder = os.path.join(tmp, f"iter_{iteration:07d}")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
        args = argparse.Namespace(**(about.get("args") or {}))
        args.consumed_train_samples = about.get("consumed_train_samples", 0)
        torch.save({"iteration": iteration, "checkpoint_version": 3.0, "args": args}, os.path.join(folder, "common.pt"))
        with open(os.path.join(folder, "metadata.json"), "x") as f:
            json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}, f)
        with open(os.path.join(tmp, "latest_checkpointed_iteration.txt"), "x") as f:
            f.write(str(iteration))
    print(f"{out}: {len(state)} tensors, iteration {iteration}")


class new_folder:
    """A folder that is there whole or not at all."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        if os.path.exists(self.path):
            raise Problem(f"{self.path} exists; a new folder is written")
        parent = os.path.dirname(os.path.abspath(self.path))
        os.makedirs(parent, exist_ok=True)
        self.tmp = tempfile.mkdtemp(prefix=os.path.basename(self.path) + ".tmp-", dir=parent)
        os.chmod(self.tmp, 0o755)
        return self.tmp

    def __exit__(self, kind, value, trace):
        if kind is None:
            os.rename(self.tmp, self.path)
        else:
            shutil.rmtree(self.tmp, ignore_errors=True)


# ---- the tool checks itself --------------------------------------------------------------------------------------------


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and
                                        torch.equal(a[k].reshape(-1).view(torch.uint8), b[k].reshape(-1).view(torch.uint8)) for k in a)


def self_test():
    torch.manual_seed(1)
    layer = "decoder.layers.self_attention.linear_qkv.weight"
    state = {"embedding.word_embeddings.weight": torch.randn(10, 4).bfloat16(), layer: torch.randn(3, 12, 4).bfloat16(),
             "decoder.layers.mlp.experts.experts.linear_fc1.weight": torch.randn(3, 2, 6, 4).bfloat16(),
             "decoder.layers.0.mixer.in_proj.weight.z": torch.randn(8, 4).bfloat16(), "decoder.layers.0.mixer.A_log": torch.randn(2),
             "decoder.layers.0.mlp.router.table": torch.arange(7, dtype=torch.int32), "decoder.empty": torch.empty(0, 4)}
    state.update({f"optimizer.state.{s}.{layer}": torch.randn(3, 12, 4) for s in STATES})
    state[f"chained_1.optimizer.state.exp_avg.{layer}2"] = torch.randn(3)
    with tempfile.TemporaryDirectory() as dir:
        where = os.path.join(dir, "save", "iter_0000042")
        extra = {"optimizer.param_groups.step": torch.zeros(1), "decoder.layers._extra_state": torch.zeros(1)}
        dcp.save({**state, **extra}, storage_writer=dcp.FileSystemWriter(where))
        torch.save({"iteration": 42, "args": argparse.Namespace(hidden_size=4, consumed_train_samples=9)}, os.path.join(where, "common.pt"))
        with open(os.path.join(dir, "save", "latest_checkpointed_iteration.txt"), "w") as f:
            f.write("42")
        to_safetensors(os.path.join(dir, "save"), os.path.join(dir, "a"))
        there = {**open_safetensors(os.path.join(dir, "a", "model.safetensors")), **open_safetensors(os.path.join(dir, "a", "optimizer.safetensors"))}
        assert same(state, there), "to-safetensors changed something"
        to_torch_dist(os.path.join(dir, "a"), os.path.join(dir, "b"))
        to_safetensors(os.path.join(dir, "b", "iter_0000042"), os.path.join(dir, "c"))
        for name in ("model.safetensors", "optimizer.safetensors", "megatron.json"):
            with open(os.path.join(dir, "a", name), "rb") as x, open(os.path.join(dir, "c", name), "rb") as y:
                assert x.read() == y.read(), f"{name} came back changed"
        for call, text in ((lambda: to_safetensors(dir, os.path.join(dir, "d")), "no .metadata"),
                           (lambda: to_torch_dist(dir, os.path.join(dir, "d")), "megatron.json"),
                           (lambda: to_torch_dist(os.path.join(dir, "a"), os.path.join(dir, "b")), "exists")):
            try:
                call()
            except Problem as problem:
                assert text in str(problem), problem
            else:
                raise AssertionError(f"nothing said {text}")
        assert not os.path.exists(os.path.join(dir, "d"))
        assert not [n for n in os.listdir(dir) if ".tmp-" in n], "something half-written is left"
    print("self-test: ok")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("direction", nargs="?", choices=("to-safetensors", "to-torch-dist"))
    parser.add_argument("source", nargs="?")
    parser.add_argument("out", nargs="?")
    a = parser.parse_args()
    if a.self_test:
        return self_test()
    if a.out is None:
        parser.error("a direction, a source and a folder to write are needed")
    try:
        (to_safetensors if a.direction == "to-safetensors" else to_torch_dist)(a.source, a.out.rstrip("/"))
    except (Problem, OSError, ValueError, KeyError) as problem:
        sys.exit(f"megatron_dist: {problem}")


if __name__ == "__main__":
    main()
