"""braid_kernels: the kernels of the braid trainer for PyTorch. See README.md.

Importing this loads torch, not the library; that happens at the first call. library() loads it and says what it is.
"""

from ._lib import BraidError, BraidUnsupported, BraidValueError, library
from ._replay import binding
from .experts import expert_mlp, moe_mlp, offsets_of_ends, router_topk
from .loss import cross_entropy
from .mhc import (
    join_coef,
    mhc_boundary,
    mhc_boundary_coef,
    mhc_post,
    mhc_post_coef,
    mhc_pre,
    mhc_pre_coef,
    mhc_supported,
    split_coef,
)
from .scans import gated_delta_rule, ssd

__version__ = "0.2.0"
__all__ = [
    "BraidError",
    "BraidUnsupported",
    "BraidValueError",
    "binding",
    "cross_entropy",
    "expert_mlp",
    "gated_delta_rule",
    "join_coef",
    "library",
    "mhc_boundary",
    "mhc_boundary_coef",
    "mhc_post",
    "mhc_post_coef",
    "mhc_pre",
    "mhc_pre_coef",
    "mhc_supported",
    "moe_mlp",
    "offsets_of_ends",
    "router_topk",
    "split_coef",
    "ssd",
]
