"""Recognises RMSNorm around an rsqrt, and reads off where the graph rounds."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.passes.base import Reason
from fuse_cache.passes.raised import Found, Miss
from fuse_cache.passes.reading import (
    FLOATS,
    aten,
    cast_source,
    dtype,
    is_call,
    number,
    only_user,
    split_operands,
    tensor,
    widened_from,
)

# A power of -0.5 is what PyTorch computes as rsqrt.
ANCHORS = (aten.rsqrt.default, aten.sqrt.default, aten.pow.Tensor_Scalar)


def recognise(rsqrt: fx.Node) -> Found | Miss | None:
    """Read the norm around this rsqrt. None: no mean of squares, so no norm at all."""
    shifted = rsqrt.args[0]
    if is_call(rsqrt, aten.pow.Tensor_Scalar) and number(rsqrt.args[1]) != -0.5:
        return None
    if not is_call(shifted, (aten.add.Tensor, aten.add.Scalar)):
        return None
    mean, eps = shifted.args[0], number(shifted.args[1])
    if is_call(mean, aten.div.Tensor) and is_call(mean.args[0], aten.sum.dim_IntList):
        sums = mean.args[0].args[0]
        return None if _squared(sums) is None else Miss(Reason.OTHER_SPELLING, "the mean is a sum, divided")
    if not is_call(mean, aten.mean.dim):
        return None
    squares = mean.args[0]
    wide = _squared(squares)
    if wide is None:
        return None
    if is_call(rsqrt, aten.sqrt.default):
        return Miss(Reason.OTHER_SPELLING, "a root that is divided by rounds twice: rsqrt rounds once")
    if eps is None or shifted.kwargs:  # Such as alpha, by which eps is multiplied.
        return Miss(Reason.OTHER_SPELLING, "eps is not a constant")
    value = tensor(wide)
    # The mean may name a dtype of its own.
    computed = next((kind for kind in (dtype(wide), dtype(rsqrt)) if kind != torch.float32), None)
    if value is None or computed is not None:
        return Miss(Reason.DTYPE, f"the variance is computed in {computed}, not in float32")
    dims = mean.args[1]
    keepdim = len(mean.args) > 2 and mean.args[2] is True
    if dims not in ([-1], [value.dim() - 1]) or not keepdim:
        return Miss(
            Reason.OTHER_SPELLING, f"the mean is over {dims}, keepdim {keepdim}: not the last dimension"
        )
    if len(shifted.users) > 1 or len(mean.users) > 1:
        return Miss(Reason.EXTRA_USER, "something else reads the variance")
    product = only_user(rsqrt)
    if product is None:
        return Miss(Reason.EXTRA_USER, "something else reads the reciprocal of the root")
    x = widened_from(wide)
    if not is_call(product, aten.mul.Tensor):
        return Miss(Reason.OTHER_SPELLING, f"the reciprocal of the root goes into {product.target}")
    factor = split_operands(product, rsqrt)
    # Multiplied as it is, a narrow x is widened by the multiplication.
    if not isinstance(factor, fx.Node) or widened_from(factor) is not x or dtype(product) != torch.float32:
        return Miss(Reason.OTHER_SPELLING, "what is scaled is not what was squared")
    return _read_tail(product, x, eps)


def _squared(node: object) -> fx.Node | None:
    """Return h of h.pow(2) or h * h."""
    by_power = is_call(node, aten.pow.Tensor_Scalar) and number(node.args[1]) == 2.0
    by_product = is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]
    base = node.args[0] if isinstance(node, fx.Node) and (by_power or by_product) else None
    return base if isinstance(base, fx.Node) else None


def _read_tail(norm: fx.Node, x: fx.Node, eps: float) -> Found | Miss:
    """Follow the normalised rows through [a cast], [the weight], [a cast]: as far as each has one reader."""
    rounded = norm
    norm_dtype = None
    user = only_user(norm)
    if user is not None and cast_source(user) is norm and dtype(user) in FLOATS:
        rounded, norm_dtype = user, dtype(user)
    operand = rounded
    user = only_user(rounded)
    if norm_dtype is not None and user is not None and widened_from(user) is rounded:
        operand = user  # Rounded, but multiplied in float32.
    product = only_user(operand)
    weight = _weight(product, operand, x)
    if product is None or weight is None:
        # No weight follows: a cast, if any, is the last rounding.
        return _found(rounded, x, None, eps, 0.0, None, None, norm_dtype)
    source, bias, weight_dtype = weight
    promoted = torch.promote_types(norm_dtype or torch.float32, weight_dtype or source.meta["val"].dtype)
    if dtype(product) != promoted:
        return Miss(Reason.DTYPE, f"the weight is multiplied in {dtype(product)}, not in {promoted}")
    last, out_dtype = product, None
    user = only_user(product)
    if user is not None and cast_source(user) is product and dtype(user) in FLOATS:
        last, out_dtype = user, dtype(user)
    return _found(last, x, source, eps, bias, weight_dtype, norm_dtype, out_dtype)


def _found(last: fx.Node, *arguments: object) -> Found:
    return Found(RMS_NORM, arguments, (last,))


def _weight(
    product: fx.Node | None, rounded: fx.Node, x: fx.Node
) -> tuple[fx.Node, float, torch.dtype | None] | None:
    """Read [H] weights with an optional cast and an optional bias out of a multiplication by them."""
    if not is_call(product, aten.mul.Tensor):
        return None
    node = split_operands(product, rounded)
    value, rows = tensor(node), tensor(x)
    if not isinstance(node, fx.Node) or value is None or rows is None:
        return None
    if (
        value.dim() != 1
        or value.dtype not in FLOATS
        or not statically_known_true(value.shape[0] == rows.shape[-1])
    ):
        return None
    bias = 0.0
    if is_call(node, (aten.add.Tensor, aten.add.Scalar)) and not node.kwargs:
        added, inner = number(node.args[1]), node.args[0]
        # A bias of the bias-free form would be lost; one that rounds differently as a float64 cannot be told
        # from it.
        if added and isinstance(inner, fx.Node) and dtype(inner) == value.dtype:
            node, bias = inner, added
    source = cast_source(node)
    if source is not None and dtype(source) in FLOATS:
        return source, bias, dtype(node)
    return node, bias, None
