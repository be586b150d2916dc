"""The head of a language model: linear layer and cross entropy in one op, in chunks of rows, so that the logits of all tokens never
exist. Gradients are computed with the loss, in place of the logits of each chunk."""

import torch

from ._call import CALLERS, dense, wide_of
from ._register import define


def _loss(h, w, label, grads):
    h, w, label = dense(h), dense(w), dense(label)
    by = w if w.dtype == h.dtype else w.to(h.dtype)
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


def _setup(ctx, inputs, output):
    _, dh, dw = output
    ctx.mark_non_differentiable(dh, dw)
    ctx.save_for_backward(dh, dw)
    ctx.w_dtype = inputs[1].dtype


def _backward(ctx, g, *unused):
    dh, dw = ctx.saved_tensors
    return dh * g.to(dh.dtype), (dw * g).to(ctx.w_dtype), None, None


loss_op.differentiate(_setup, _backward)


def cross_entropy(h, w, label, *, ignore_index=-100):
    """Mean over the labels that are not ignore_index of the cross entropy of h w^T. h [..., d], w [vocabulary, d], label int [...]. w may be
    fp32 while h is bf16: it is rounded inside, and its gradient is the fp32 sum itself."""
    rows = h.reshape(-1, h.shape[-1])
    flat = label.reshape(-1)
    flat = torch.where(flat == ignore_index, torch.full_like(flat, -1), flat).to(torch.int32)
    grads = torch.is_grad_enabled() and (h.requires_grad or w.requires_grad)
    return loss_op(rows, w, flat, grads)[0]
