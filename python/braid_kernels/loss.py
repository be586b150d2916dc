"""The head of a language model: linear layer and cross entropy in one op, in chunks of rows, so that the logits of all tokens never
exist. Gradients are computed with the loss, in place of the logits of each chunk."""

import torch

from ._call import CALLERS, cast, dense, integers, need_rank, need_shape, under_autocast, wide_of
from ._register import define


def _loss(h, w, label, grads):
    h, w, label = dense(h), dense(w), dense(label)
    by = cast("cross_entropy", "w", w, h.dtype)
    loss = h.new_empty([2], dtype=torch.float64)
    count = (label >= 0).sum().to(torch.float64).clamp_min(1).reshape(1)
    dh = h.new_empty(h.shape) if grads else h.new_empty([0])
    dw = w.new_empty(w.shape, dtype=wide_of(h.dtype)) if grads else w.new_empty([0], dtype=wide_of(h.dtype))
    CALLERS["cross_entropy"](
        h,
        (h, by, label, 1 / count if grads else None, loss, dh if grads else None, dw if grads else None),
        (h.shape, w.shape, label.shape, (1,) if grads else None, (2,), h.shape if grads else None, w.shape if grads else None),
        (),
    )
    return (loss[0] / count[0]).to(wide_of(h.dtype)), dh, dw


def _loss_fake(h, w, label, grads):
    wide = wide_of(h.dtype)
    return (
        h.new_empty([], dtype=wide),
        h.new_empty(h.shape if grads else [0]),
        w.new_empty(w.shape if grads else [0], dtype=wide),
    )


loss_op = define("linear_cross_entropy", "(Tensor h, Tensor w, Tensor label, bool grads) -> (Tensor, Tensor, Tensor)", _loss, _loss_fake)


# Gradients were computed with the loss: what is left is an op, so that a second derivative is refused and not silently incomplete.
def _scaled(g, dh, dw, real):
    return dh * g.to(dh.dtype), (dw * g).to(dh.dtype if real else dw.dtype)


def _scaled_fake(g, dh, dw, real):
    return torch.empty_like(dh), torch.empty_like(dw, dtype=dh.dtype if real else dw.dtype)


loss_bwd_op = define("linear_cross_entropy_bwd", "(Tensor g, Tensor dh, Tensor dw, bool real) -> (Tensor, Tensor)", _scaled, _scaled_fake)


def _setup(ctx, inputs, output):
    _, dh, dw = output
    ctx.mark_non_differentiable(dh, dw)
    ctx.save_for_backward(dh, dw)
    ctx.real = inputs[1].dtype == inputs[0].dtype


def _backward(ctx, g, *unused):
    return (*loss_bwd_op(g, *ctx.saved_tensors, ctx.real), None, None)


loss_op.differentiate(_setup, _backward)


def cross_entropy(h, w, label, *, ignore_index=-100):
    """Mean over the labels that are not ignore_index of the cross entropy of h w^T; 0 where none is left. h [..., d], w [vocabulary, d], label
    int [...]. w may be fp32 while h is bf16: it is rounded inside, and its gradient is the fp32 sum itself. A label outside of the vocabulary is an
    error on the CPU, and makes the loss not a number on a GPU, which cannot be asked without waiting."""
    need_rank("cross_entropy", ("w", w, 2))
    need_shape("cross_entropy", "label", label, *h.shape[:-1])
    h, flat = under_autocast(h), label.reshape(-1)
    if flat.dtype != torch.int64:
        flat = integers("cross_entropy", "label", flat)
    wrong = (flat < 0) | (flat >= w.shape[0])  # -2 stays wrong, -1 is ignored
    flat = torch.where(flat == ignore_index, -1, torch.where(wrong, -2, flat)).to(torch.int32)
    grads = torch.is_grad_enabled() and (h.requires_grad or w.requires_grad)
    return loss_op(h.reshape(-1, h.shape[-1]), w, flat, grads)[0]
