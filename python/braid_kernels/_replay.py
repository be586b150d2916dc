"""Calls that repeat one before. The first call of an op with tensors of some shapes and some options runs the op's own function, which lays
everything out; what it did is recorded: which words of the library's arguments take the address of which input, and which outputs and scratch
were made. A call with tensors like those only makes outputs and scratch and fills in addresses, natively where the binding is there
(binding.cpp, torch 2.10 and later), else in Python.

A function is not recorded where it hands the library something that is neither an input nor one of its results, or computes results by
other means: then every call runs it. The binding is looked for in BRAID_KERNELS_BINDING (a path; 0: none), then beside this file."""

import ctypes
import os
import threading

import torch

from . import _call, _lib

MOST = 1024  # records of an op in Python


class Binding:
    """libbraid_torch.so."""

    def __init__(self, path):
        torch.ops.load_library(path)
        dll = ctypes.CDLL(path)
        self.path = path
        self.call = torch.ops.braid_kernels_native.call.default._op
        self.new_group, self.add = dll.braid_binding_group, dll.braid_binding_add
        self.new_group.restype = ctypes.c_void_p
        self.add.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]


def _load():
    """The binding, or None and the reason."""
    named = os.environ.get("BRAID_KERNELS_BINDING", "")
    if named == "0":
        return None, "BRAID_KERNELS_BINDING is 0"
    path = named or os.path.join(os.path.dirname(os.path.abspath(__file__)), "libbraid_torch.so")
    if not os.path.exists(path):
        if named:
            raise _lib.BraidUnsupported(f"BRAID_KERNELS_BINDING names {path}, which does not exist: make binding builds it")
        return None, f"{path} does not exist"
    try:
        return Binding(path), ""
    except (OSError, AttributeError, RuntimeError) as e:  # a torch before 2.10
        if named:
            raise _lib.BraidUnsupported(f"{path}, which BRAID_KERNELS_BINDING names, cannot be loaded with torch {torch.__version__}: {e}") from None
        return None, f"{path} cannot be loaded with torch {torch.__version__}: {e}"


BINDING, WHY_NOT = _load()


def binding():
    """How ops are called: a sentence."""
    return f"native calls through {BINDING.path}" if BINDING else f"calls through ctypes: {WHY_NOT}"


class Record:
    """What a call did: its plan (the library's arguments without addresses), the slots of each input, and outputs as (slots, shape, dtype)."""

    __slots__ = ("plan", "op", "handle", "index", "device", "inputs", "outputs", "single", "slots")

    def __init__(self, made, args, n, out):
        self.plan, self.op, self.handle, self.index, tensors = made
        self.single = isinstance(out, torch.Tensor)
        out = (out,) if self.single else out
        given = [id(t) for t in args[:n] if t is not None]
        where = {}
        for slot, t in zip(self.plan.slots, tensors):
            where.setdefault(id(t), []).append(slot)
        self.inputs = [None if t is None else where.pop(id(t), []) for t in args[:n]]
        self.outputs = [(where.pop(id(t), []), tuple(t.shape), t.dtype) for t in out]
        self.device = out[0].device
        self.slots = [(i, s) for i, slots in enumerate(self.inputs) if slots for s in slots]
        if where or len(set(given)) < len(given) or [] in self.inputs:
            # the library got something else; an input came twice, so that its slots cannot be told apart; one was used by other means
            raise LookupError
        for slots, shape, dtype in self.outputs:
            if not slots and 0 not in shape:
                raise LookupError  # a result that the library does not write

    def numbers(self, args):
        """For the binding."""
        run = ctypes.cast(self.op.run, ctypes.c_void_p).value
        out = [run, self.handle, self.index, self.plan.work_slot, self.plan.work_bytes, len(self.inputs), len(self.outputs)]
        for t, slots in zip(args, self.inputs):
            out += [0, 0, 0, 0] if t is None else [1, _call.DTYPES[t.dtype], len(slots), *slots, t.dim(), *t.shape]
        for slots, shape, dtype in self.outputs:
            out += [1, _call.DTYPES[dtype], len(slots), *slots, len(shape), *shape]
        return (ctypes.c_int64 * len(out))(*out)

    def __call__(self, args, text):
        """The call again; None where addresses are such that other kernels run, or the library refuses."""
        plan = self.plan
        buffer = bytearray(plan.template)
        words = memoryview(buffer).cast("Q")
        bits = 0
        for i, slot in self.slots:
            words[slot] = address = args[i].data_ptr()
            bits |= address
        if bits & 15:
            return None
        out = []
        for slots, shape, dtype in self.outputs:
            t = torch.empty(shape, dtype=dtype, device=self.device)
            for slot in slots:
                words[slot] = t.data_ptr()
            out.append(t)
        if plan.work_bytes:
            work = torch.empty(plan.work_bytes + 256, dtype=torch.uint8, device=self.device)
            words[plan.work_slot] = (work.data_ptr() + 255) & ~255
            words[plan.work_slot + 1] = plan.work_bytes
        stream = _call.raw_stream(self.index) if self.index >= 0 else None
        if self.op.run(self.handle, plan.raw.from_buffer(buffer), stream, text, len(text)):
            return None
        return out[0] if self.single else tuple(out)


class Replay:
    """An op's function, called as it is, repeated where it can be."""

    def __init__(self, run, n):
        """n: arguments of run that are tensors or None; options follow them."""
        self.run, self.n = run, n
        self.groups, self.records = {}, {}
        self.lock = threading.Lock()

    def __call__(self, *args):
        return self._native(args) if BINDING is not None else self._python(args)

    def _native(self, args):
        n = self.n
        tensors = args[:n]
        group = self.groups.get(args[n:])
        if group is not None:
            index = (tensors[0] if tensors[0] is not None else tensors[1]).get_device()
            out = BINDING.call(group, _call.raw_stream(index) if index >= 0 else 0, tensors)
            if out:
                return out[0] if len(out) == 1 else tuple(out)
        record, out = self._record(args)
        if record is not None:
            self._keep(args, record)
        return out

    def _keep(self, args, record):
        with self.lock:
            group = self.groups.get(args[self.n :])
            if group is None and len(self.groups) < MOST:
                group = self.groups[args[self.n :]] = BINDING.new_group()
        if group is None:  # too many sets of options: those that come now take the long way
            return
        numbers, template = record.numbers(args), record.plan.template
        if BINDING.add(group, template, len(template), numbers, len(numbers)):
            raise _lib.BraidError(f"{record.op.name}: the binding {BINDING.path} does not take a record: it is of another version")

    def _python(self, args):
        n = self.n
        key = (args[n:], tuple([None if t is None else (t.shape, t.dtype, t.get_device(), t.is_contiguous()) for t in args[:n]]))
        record = self.records.get(key)
        if record is not None:
            out = record(args, _lib.library().errors())
            if out is not None:
                return out
        record, out = self._record(args)
        if record is not None:
            if len(self.records) >= MOST:
                self.records.clear()
            self.records[key] = record
        return out

    def _record(self, args):
        """run, and its record; None for what cannot be repeated: tensors that were copied first, or a function of another kind."""
        made = _call.recording.made = []
        try:
            out = self.run(*args)
        finally:
            _call.recording.made = None
        if not all(t is None or t.is_contiguous() for t in args[: self.n]):
            return None, out
        if len(made) != 1 or made[0] is None or any(t.data_ptr() & 15 for t in made[0][4]):
            return None, out
        try:
            return Record(made[0], args, self.n, out), out
        except LookupError:
            return None, out
