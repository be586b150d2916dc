"""libbraidk.so through ctypes: loading, handles, structs of arguments, errors. Nothing here needs torch.

The library is looked for in BRAIDK_LIB (a path), then beside this file, where a wheel has it.
"""

import ctypes
import os
import struct
import threading

VERSION = 1  # of braidk.h
OK, INVALID, UNSUPPORTED, NOMEM, FAILED = range(5)
F32, BF16, F64, I32, I64, U8 = range(1, 7)
HOST = -1
MAX_RANK = 5

_TENSOR = struct.Struct("<Q5q5qii")
_WORK = struct.Struct("<Qq")

# Arguments of each op in the order of braidk.h, and the format of the options behind them.
MHC, ACT, CHUNK, ROUTER, NONE = "<iiiidd", "<iiddd", "<q", "<iiiii4xd", "<"
OPS = {
    "mhc_pre": ("x fn base scale norm_weight h coef stat", MHC),
    "mhc_pre_bwd": ("dh dcoef x fn base scale norm_weight coef stat dx dfn dbase dscale dnorm_weight", MHC),
    "mhc_post": ("x f coef bias y", MHC),
    "mhc_post_bwd": ("dy x f coef bias dx df dcoef dbias", MHC),
    "mhc_boundary": ("x f coef_in bias fn base scale norm_weight y h coef stat", MHC),
    "mhc_boundary_bwd": (
        "dy dh dcoef x f coef_in bias fn base scale norm_weight y coef stat dx df dcoef_in dbias dfn dbase dscale dnorm_weight",
        MHC,
    ),
    "expert_mlp": ("x w13 w2 offsets prob z pre", ACT),
    "expert_mlp_bwd": ("dz x w13 w2 offsets prob pre dx dw13 dw2 dprob", ACT),
    "moe_mlp": ("x idx probs w13 w2 z offsets row src pre", ACT),
    "moe_mlp_bwd": ("dz x probs w13 w2 offsets row src pre dx dprobs dw13 dw2", ACT),
    "ssd": ("x dt A_log dt_bias D B C doc_start y states", CHUNK),
    "ssd_bwd": ("dy x dt A_log dt_bias D B C doc_start states dx ddt dA_log ddt_bias dD dB dC", CHUNK),
    "gated_delta_rule": ("q k v alpha beta A_log dt_bias doc_start o states", CHUNK),
    "gated_delta_rule_bwd": (
        "d_o q k v alpha beta A_log dt_bias doc_start states dq dk dv dalpha dbeta dA_log ddt_bias",
        CHUNK,
    ),
    "router_topk": ("logits bias probs idx", ROUTER),
    "router_topk_bwd": ("dprobs logits idx dlogits", ROUTER),
    "cross_entropy": ("h w label scale loss dh dw", NONE),
}


class BraidError(RuntimeError):
    """What libbraidk refuses or fails at; the text names the argument or the reason."""


class BraidUnsupported(BraidError):
    """This build, GPU or driver cannot do it."""


class BraidValueError(BraidError, ValueError):
    """An argument is wrong."""


_KINDS = {INVALID: BraidValueError, UNSUPPORTED: BraidUnsupported}


def _find():
    named = os.environ.get("BRAIDK_LIB")
    if named:
        return named
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "libbraidk.so")


class Op:
    """One op of the library: its three functions, and the layout of its arguments."""

    __slots__ = ("name", "names", "options", "bytes", "run", "work", "supported")

    def __init__(self, dll, name, names, options):
        self.name = name
        self.names = names.split()
        self.options = struct.Struct(options)
        self.bytes = 8 + _TENSOR.size * len(self.names) + self.options.size + _WORK.size
        known = dll.braidk_args_bytes(name.encode())
        if known != self.bytes:
            raise BraidUnsupported(
                f"libbraidk has {known} bytes of arguments for {name}, this package {self.bytes}: they are of different versions"
            )
        self.run = getattr(dll, "braidk_" + name)
        self.work = getattr(dll, "braidk_" + name + "_work")
        self.supported = getattr(dll, "braidk_" + name + "_supported")
        p, n = ctypes.c_void_p, ctypes.c_size_t
        self.run.argtypes = [p, p, p, p, n]
        self.work.argtypes = [p, p, p, p, n]
        self.supported.argtypes = [p, p, p, n]

    def pack(self, tensors, options):
        """The arguments without data: tensors are (shape, dtype) or None, options numbers."""
        out = [struct.pack("<Q", self.bytes)]
        for t in tensors:
            if t is None:
                out.append(bytes(_TENSOR.size))
                continue
            shape, dtype = t
            if len(shape) > MAX_RANK:
                raise BraidValueError(f"{self.name}: a tensor has rank {len(shape)}, at most {MAX_RANK} are known")
            stride, step = [], 1
            for n in reversed(shape):
                stride.insert(0, step)
                step *= n
            pad = [0] * (MAX_RANK - len(shape))
            out.append(_TENSOR.pack(0, *shape, *pad, *stride, *pad, len(shape), dtype))
        out.append(self.options.pack(*options))
        out.append(bytes(_WORK.size))
        return b"".join(out)


class Library:
    def __init__(self, path):
        if not os.path.exists(path):
            raise BraidUnsupported(f"{path} does not exist: build it with 'make lib' and set BRAIDK_LIB, or install a wheel")
        try:
            self.dll = ctypes.CDLL(path)
        except OSError as e:
            raise BraidUnsupported(f"{path} cannot be loaded: {e}") from None
        self.path = path
        self.dll.braidk_build.restype = self.dll.braidk_device.restype = ctypes.c_char_p
        self.dll.braidk_device.argtypes = [ctypes.c_void_p]
        self.dll.braidk_args_bytes.restype = ctypes.c_size_t
        self.dll.braidk_args_bytes.argtypes = [ctypes.c_char_p]
        self.dll.braidk_open.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self.version = self.dll.braidk_version()
        if self.version < VERSION:
            raise BraidUnsupported(f"{path} is version {self.version} of libbraidk, this package needs {VERSION}")
        self.build = self.dll.braidk_build().decode()
        self.ops = {name: Op(self.dll, name, *spec) for name, spec in OPS.items()}
        self.lock = threading.Lock()
        self.handles = {}
        self.text = threading.local()

    def errors(self):
        """A buffer for the text of an error, one for each thread."""
        try:
            return self.text.buffer
        except AttributeError:
            self.text.buffer = ctypes.create_string_buffer(1024)
            return self.text.buffer

    def check(self, status, buffer):
        if status != OK:
            raise _KINDS.get(status, BraidError)(buffer.value.decode(errors="replace"))

    def open(self, device):
        """The handle of a device: HOST, or the number of a GPU. Opened once, kept until the process ends."""
        handle = self.handles.get(device)
        if handle is None:
            with self.lock:
                if device not in self.handles:
                    out, text = ctypes.c_void_p(), self.errors()
                    self.check(self.dll.braidk_open(device, ctypes.byref(out), text, len(text)), text)
                    self.handles[device] = out.value
                handle = self.handles[device]
        return handle


_library = None
_library_lock = threading.Lock()


def library():
    """The library, loaded at its first use."""
    global _library
    if _library is None:
        with _library_lock:
            if _library is None:
                _library = Library(_find())
    return _library
