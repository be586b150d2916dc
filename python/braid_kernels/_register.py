"""How an op becomes known to torch: schema, an implementation for CPU and CUDA tensors, a fake one that only computes shapes, and
autograd, whose backward pass is an op of its own. All of it through torch.library, so that torch.compile, CUDA graphs, activation
checkpointing and FSDP see ordinary functional operators.

A call through torch's dispatcher enters Python several times, which costs more than the launch of the kernels. Where nothing watches (plain
tensors, no compilation, no dispatch or functorch mode), calls therefore go to the implementation directly, or repeat a recorded one
(_replay.py), with an autograd function that does the same. Transforms of torch.func, which know nothing of autograd that was registered with
an op, get an autograd function of the form that they know."""

import torch

from ._replay import Replay

NAMESPACE = "braid_kernels"
_library = torch.library.Library(NAMESPACE, "DEF")
_PLAIN = (torch.Tensor, torch.nn.Parameter)

try:
    from torch._C import _len_torch_dispatch_stack as _modes
    from torch._C._functorch import peek_interpreter_stack as _transforms

    _modes(), _transforms()
except (ImportError, AttributeError, TypeError):  # another torch: always through the dispatcher

    def _modes():
        return 1

    def _transforms():
        return None


def _unwatched(tensor):
    """Not one of a subclass, of a device without kernels (meta among them), or inside of something that watches."""
    return type(tensor) in _PLAIN and (tensor.is_cuda or tensor.is_cpu) and not torch.compiler.is_compiling() and _modes() == 0 and _transforms() is None


def _one_by_one(op):
    """vmap of an op, as calls one behind the other."""

    def vmap(info, in_dims, *args):
        calls = []
        for i in range(info.batch_size):
            out = op(*[a if d is None else a.select(d, i) for a, d in zip(args, in_dims)])
            calls.append(out if isinstance(out, tuple) else (out,))
        outs = tuple([torch.stack(parts) for parts in zip(*calls)])
        return (outs, (0,) * len(outs)) if isinstance(out, tuple) else (outs[0], 0)

    return vmap


class Operator:
    """An operator of torch.ops.braid_kernels; calling it takes the shortest path."""

    def __init__(self, name, schema, run, fake):
        kinds = [part.split()[0] for part in schema.split("->")[0].strip(" ()").split(", ")]
        tensors = sum(kind.startswith("Tensor") for kind in kinds)
        assert all(kind.startswith("Tensor") for kind in kinds[:tensors]), schema  # tensors come first
        self.name, self.run, self.function, self.transformed = name, Replay(run, tensors), None, None
        _library.define(name + schema)
        for key in ("CPU", "CUDA"):
            _library.impl(name, run, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        self.op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def differentiate(self, setup, backward):
        torch.library.register_autograd(f"{NAMESPACE}::{self.name}", backward, setup_context=setup, lib=_library)

        def forward(ctx, *args):
            out = self.run(*args)
            setup(ctx, args, out)
            return out

        self.function = self._function(forward=forward, backward=backward)
        self.transformed = self._function(forward=self.op, setup_context=setup, backward=backward, vmap=_one_by_one(self))

    def _function(self, **methods):
        return type(self.name, (torch.autograd.Function,), {name: staticmethod(f) for name, f in methods.items()})

    def differentiate_never(self):
        """For backward passes: a second derivative is an error, and not zero."""

        def refuse(ctx, *grads):
            raise RuntimeError(f"{NAMESPACE}::{self.name} has no derivative: second derivatives are not computed")

        def nothing(ctx, inputs, output):
            pass

        torch.library.register_autograd(f"{NAMESPACE}::{self.name}", refuse, lib=_library)
        self.transformed = self._function(forward=self.op, setup_context=nothing, backward=refuse, vmap=_one_by_one(self))

    def __call__(self, *args):
        watched = not _unwatched(args[0] if args[0] is not None else args[1])
        if watched and not torch.compiler.is_compiling() and _transforms() is not None:
            return self.transformed.apply(*args)
        if watched:
            return self.op(*args)
        if not torch.is_grad_enabled():
            return self.run(*args)
        if self.function is None:
            return self.op(*args)
        return self.function.apply(*args)


def define(name, schema, run, fake):
    """run and fake take what the schema says. An op never returns one of its inputs, or a view of one."""
    op = Operator(name, schema, run, fake)
    if name.endswith("_bwd"):
        op.differentiate_never()
    return op
