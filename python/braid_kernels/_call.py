"""Calls of libbraidk with torch tensors. A call costs little: the arguments of one kind of call (shapes, types, options) are laid out
once and kept; then only addresses are filled in."""

import ctypes
import threading

import torch

from . import _lib

DTYPES = {
    torch.float32: _lib.F32,
    torch.bfloat16: _lib.BF16,
    torch.float64: _lib.F64,
    torch.int32: _lib.I32,
    torch.int64: _lib.I64,
    torch.uint8: _lib.U8,
}
WORK_STEP = 96 // 8  # tensors are 96 bytes apart; addresses are the first 8

try:
    from torch._C import _cuda_getCurrentRawStream as raw_stream
except ImportError:  # a torch without CUDA

    def raw_stream(index):
        return torch.cuda.current_stream(index).cuda_stream


class _Recording(threading.local):
    """made: a list that takes what calls of this thread do (_replay.py), or None."""

    made = None


recording = _Recording()


def never_repeat():
    """By a function of an op that does more than call the library: its calls are not repeated from a record."""
    if recording.made is not None:
        recording.made.append(None)


def wide_of(dtype):
    """Type of parameters, coefficients and statistics beside activations of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- what is refused before a call of the library, by the caller's names ---------------------------------------------------------


def cast(op, name, t, dtype):
    """t in this type; absent stays absent. Only types that kernels take are cast: half precision is refused, as are integers."""
    if t is None or t.dtype == dtype:
        return t
    if t.dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise _lib.BraidValueError(f"{op}: argument {name} has dtype {t.dtype}, which no kernel takes")
    return t.to(dtype)


def integers(op, name, t):
    """t as int32."""
    if t.dtype == torch.int32:
        return t
    if t.dtype not in (torch.int64, torch.int16, torch.int8, torch.uint8):
        raise _lib.BraidValueError(f"{op}: argument {name} has dtype {t.dtype}, expected an integer type")
    return t.to(torch.int32)


def need_rank(op, *pairs):
    """pairs: name, tensor, rank."""
    for name, t, rank in pairs:
        if t.dim() != rank:
            raise _lib.BraidValueError(f"{op}: argument {name} has shape {tuple(t.shape)}, expected {rank} dimensions")


def need_shape(op, name, t, *shape):
    if tuple(t.shape) != shape:
        raise _lib.BraidValueError(f"{op}: argument {name} has shape {tuple(t.shape)}, expected {shape}")


def under_autocast(x):
    """x as autocast has it in front of a linear layer. Custom operators are not cast by torch."""
    if x.dtype == torch.float32 and x.is_cuda and torch.is_autocast_enabled("cuda"):
        return x.to(torch.get_autocast_dtype("cuda"))
    return x


class _Plan:
    __slots__ = ("template", "slots", "work_slot", "work_bytes", "raw")

    def __init__(self, library, op, handle, tensors, options):
        metas = []
        for name, t in zip(op.names, tensors):
            if t is None:
                metas.append(None)
                continue
            shape, dtype = t
            if len(shape) == 0:  # which the library would take for an absent one
                raise _lib.BraidValueError(f"{op.name}: argument {name} has no dimensions")
            if dtype not in DTYPES:
                raise _lib.BraidValueError(f"{op.name}: argument {name} has dtype {dtype}, which no kernel takes")
            metas.append((shape, DTYPES[dtype]))
        self.template = op.pack(metas, options)
        self.slots = tuple(1 + WORK_STEP * i for i, t in enumerate(tensors) if t is not None)
        self.work_slot = (op.bytes - 16) // 8
        self.raw = ctypes.c_char * op.bytes
        need, text = ctypes.c_int64(), library.errors()
        buffer = ctypes.create_string_buffer(self.template, op.bytes)
        library.check(op.work(handle, buffer, ctypes.byref(need), text, len(text)), text)
        self.work_bytes = need.value


class Caller:
    """An op of the library, called with tensors."""

    def __init__(self, name):
        self.name = name
        self.plans = {}

    def __call__(self, like, tensors, shapes, options):
        """tensors in the order of the library, None: absent; all contiguous, on one device. shapes: what the library is to see, a tuple with
        None for what is absent."""
        library = _lib.library()
        op = library.ops[self.name]
        index = like.get_device()  # -1: the CPU, which is HOST
        handle = library.handles.get(index) or library.open(index)
        given = [t for t in tensors if t is not None]
        key = (index, options, shapes, tuple([t.dtype for t in given]), tuple([t.get_device() for t in given]))
        plan = self.plans.get(key)
        if plan is None:
            plan = self._plan(library, op, handle, tensors, shapes, options, key)
        buffer = bytearray(plan.template)
        words = memoryview(buffer).cast("Q")
        bits = 0
        for slot, t in zip(plan.slots, given):
            address = t.data_ptr()
            words[slot] = address
            bits |= address
        work_bytes = plan.work_bytes
        raw = plan.raw.from_buffer(buffer)
        text = library.errors()
        if bits & 15:  # other kernels, which may need more scratch
            need = ctypes.c_int64()
            library.check(op.work(handle, raw, ctypes.byref(need), text, len(text)), text)
            work_bytes = need.value
        if work_bytes:
            # memory of the CPU is aligned to 64 bytes only
            work = torch.empty(work_bytes + 256, dtype=torch.uint8, device=like.device)
            words[plan.work_slot] = (work.data_ptr() + 255) & ~255
            words[plan.work_slot + 1] = work_bytes
        stream = raw_stream(index) if index >= 0 else None
        status = op.run(handle, raw, stream, text, len(text))
        if status:
            library.check(status, text)
        if recording.made is not None:
            recording.made.append((plan, op, handle, index, given))

    def _same_device(self, op, tensors, index):
        for name, t in zip(op.names, tensors):
            if t is not None and t.get_device() != index:
                raise _lib.BraidValueError(
                    f"{op.name}: argument {name} is on {t.device}, others are on {'cuda:%d' % index if index >= 0 else 'cpu'}"
                )

    def _plan(self, library, op, handle, tensors, shapes, options, key):
        self._same_device(op, tensors, index=key[0])
        metas = [None if t is None else (s, t.dtype) for t, s in zip(tensors, shapes)]
        plan = _Plan(library, op, handle, metas, options)
        if len(self.plans) >= 4096:  # shapes that change all the time: keep the memory bounded
            self.plans.clear()
        self.plans[key] = plan
        return plan

    def supported(self, device, metas, options):
        """Which kernels a call would run, and why; metas: (shape, dtype) or None."""
        library = _lib.library()
        op = library.ops[self.name]
        handle = library.open(device)
        buffer = ctypes.create_string_buffer(
            op.pack([None if m is None else (m[0], DTYPES[m[1]]) for m in metas], options), op.bytes
        )
        text = library.errors()
        status = op.supported(handle, buffer, text, len(text))
        library.check(status, text)
        return text.value.decode()


CALLERS = {name: Caller(name) for name in _lib.OPS}


def dense(t):
    return t if t is None or t.is_contiguous() else t.contiguous()
