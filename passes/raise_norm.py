"""Recognises RMSNorm around an rsqrt, and reads off where the graph rounds."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.rms_norm.op import RMS_NORM
from fuse_cache.passes.base import Reason
from fuse_cache.passes.raised import Found, Miss
from fuse_cache.passes.read_variance import path_to_squares, read_variance
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


def recognise(root: fx.Node) -> Found | Miss | None:
    """Read the norm around this reciprocal root. None: of no squares that were reduced, so no norm at all."""
    if is_call(root, aten.pow.Tensor_Scalar) and number(root.args[1]) != -0.5:
        return None
    path = None if not isinstance(root.args[0], fx.Node) else path_to_squares(root.args[0])
    if path is None:
        return None
    read = read_variance(path)
    if read is None or isinstance(read, Miss):
        return read
    wide, eps = path.base, read
    if is_call(root, aten.sqrt.default):
        return Miss(Reason.OTHER_SPELLING, "a root that is divided by rounds twice: rsqrt rounds once")
    # The mean may name a dtype of its own.
    computed = next((kind for kind in (dtype(wide), dtype(root)) if kind != torch.float32), None)
    if computed is not None:
        return Miss(Reason.DTYPE, f"the variance is computed in {computed}, not in float32")
    if any(len(step.users) > 1 for step in path.steps):
        return Miss(Reason.EXTRA_USER, "something else reads the variance")
    product = only_user(root)
    if product is None:
        return Miss(Reason.EXTRA_USER, "something else reads the reciprocal of the root")
    x = widened_from(wide)
    if cast_source(product) is not None:
        return Miss(Reason.CAST_BETWEEN, f"{product.name} rounds the reciprocal of the root")
    if not is_call(product, aten.mul.Tensor):
        return Miss(Reason.OTHER_SPELLING, f"the reciprocal of the root goes into {product.target}")
    factor = split_operands(product, root)
    # Multiplied as it is, a narrow x is widened by the multiplication.
    if not isinstance(factor, fx.Node) or widened_from(factor) is not x or dtype(product) != torch.float32:
        return Miss(Reason.OTHER_SPELLING, "what is scaled is not what was squared")
    return _read_tail(product, x, eps)


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
