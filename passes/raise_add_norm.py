"""Recognises the addition of a residual whose sum an RMSNorm reads, and where the sum is rounded."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.fused_add_rms_norm.op import FUSED_ADD_RMS_NORM
from fuse_cache.passes.raised import Found
from fuse_cache.passes.reading import (
    FLOATS,
    LOW_PRECISION,
    aten,
    cast_source,
    dtype,
    is_call,
    tensor,
    widened_from,
)


def recognise(norm: fx.Node) -> Found | None:
    """Read the addition in front of a raised norm. None: the norm reads no sum of two tensors of its size."""
    x = norm.args[0]
    assert isinstance(x, fx.Node)
    sum_dtype = dtype(x)
    total, rounded, normed_is_rounded = x, x, True
    if not is_call(x, aten.add.Tensor):
        # (a + b).to(bfloat16), added in float32.
        source = cast_source(x)
        if source is None or not is_call(source, aten.add.Tensor) or dtype(source) != torch.float32:
            return None
        total = source
    operands = _operands(total)
    if operands is None or sum_dtype is None or sum_dtype not in FLOATS:
        return None
    if total is x and sum_dtype == torch.float32:
        # What other layers read is often the sum, rounded.
        casts = [user for user in x.users if user is not norm and dtype(user) in LOW_PRECISION]
        others = [user for user in x.users if user is not norm and user not in casts]
        if len(casts) == 1 and not others and cast_source(casts[0]) is x:
            rounded, normed_is_rounded = casts[0], False
            sum_dtype = dtype(rounded)
    elif total is not x and len(total.users) > 1:
        return None  # The exact sum is read too: there is nothing to save.
    return Found(
        FUSED_ADD_RMS_NORM,
        (*operands, *norm.args[1:], sum_dtype, normed_is_rounded),
        (norm, rounded),
    )


def _operands(total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return what is added: the newer value first, then what was there before (the residual)."""
    if total.kwargs or len(total.args) != 2:
        return None
    value = tensor(total)
    found: list[fx.Node] = []
    for argument in total.args:
        operand = tensor(argument)
        if not isinstance(argument, fx.Node) or operand is None or value is None:
            return None
        if operand.dim() != value.dim() or operand.dtype not in FLOATS:
            return None
        if not all(statically_known_true(a == b) for a, b in zip(operand.shape, value.shape, strict=True)):
            return None
        found.append(widened_from(argument) if value.dtype == torch.float32 else argument)
    first, second = found
    return (second, first) if first < second else (first, second)
