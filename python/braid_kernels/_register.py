"""How an op becomes known to torch: schema, an implementation for CPU and CUDA tensors, a fake one that only computes shapes, and
autograd, whose backward pass is an op of its own. All of it through torch.library, so that torch.compile, CUDA graphs, activation
checkpointing and FSDP see ordinary functional operators."""

import torch

NAMESPACE = "braid_kernels"
_library = torch.library.Library(NAMESPACE, "DEF")


def define(name, schema, run, fake):
    """run and fake take what the schema says. An op never returns one of its inputs, or a view of one."""
    _library.define(name + schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def differentiate(name, setup, backward):
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library)
