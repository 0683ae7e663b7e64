"""Recognises static FP8 quantisation at a cast to float8, and reads off how it scales, rounds and clamps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.quant_fp8_static.reference import DIVIDE, MULTIPLY, RECIPROCAL
from fuse_cache.passes.base import Reason
from fuse_cache.passes.raise_norm import Miss
from fuse_cache.passes.reading import (
    FLOATS,
    LOW_PRECISION,
    aten,
    cast_source,
    dtype,
    has_one_element,
    is_call,
    is_exact_in,
    number,
    tensor,
    widened_from,
)

OPERATOR = QUANT_FP8_STATIC


@dataclass(frozen=True, slots=True)
class Quant:
    """A recognised quantisation: `last` computes the codes, the other fields are the operator's."""

    last: fx.Node
    x: fx.Node
    scale: fx.Node
    scaling: str
    scaled_dtype: torch.dtype
    clamp_min: float | None
    clamp_max: float | None
    dtype: torch.dtype

    def arguments(self) -> tuple[object, ...]:
        """Return the arguments of the operator."""
        return (
            self.x,
            self.scale,
            self.scaling,
            self.scaled_dtype,
            self.clamp_min,
            self.clamp_max,
            self.dtype,
        )


def recognise(cast: fx.Node) -> Quant | Miss:
    """Read the quantisation that ends in this cast to float8."""
    codes = dtype(cast)
    assert codes is not None
    node = cast_source(cast)
    assert node is not None
    clamp = _read_clamp(node)
    if isinstance(clamp, Miss):
        return clamp
    clamped, *bounds = clamp
    scaled_dtype = dtype(clamped)
    if scaled_dtype not in FLOATS:
        return Miss(Reason.DTYPE, f"what is quantised is {scaled_dtype}")
    if any(bound is not None and not is_exact_in(bound, scaled_dtype) for bound in bounds):
        return Miss(Reason.OTHER_SPELLING, f"a bound of {bounds} is not exact in {scaled_dtype}")
    scaled = _read_scaling(clamped)
    if isinstance(scaled, Miss):
        return scaled
    x, scale, scaling = scaled
    return Quant(cast, x, scale, scaling, scaled_dtype, bounds[0], bounds[1], codes)


def _read_clamp(node: fx.Node) -> tuple[fx.Node, float | None, float | None] | Miss:
    """Look through [a cast], [clamps], [a widening cast]; return what was clamped, and the bounds.

    Where PyTorch clamps bfloat16 it widens first and narrows last: both lose nothing, as bounds are exact.
    """
    top, rounded_to = node, None
    source = cast_source(node)
    if source is not None and dtype(node) in LOW_PRECISION and _is_clamp(source):
        top, rounded_to = source, dtype(node)
    lower: float | None = None
    upper: float | None = None
    while _is_clamp(top):
        inner = top.args[0]
        new_lower, new_upper = _bounds(top)
        twice = (new_lower is not None and lower is not None) or (new_upper is not None and upper is not None)
        if twice or not isinstance(inner, fx.Node):
            return Miss(Reason.OTHER_SPELLING, "it is clamped twice")
        lower = new_lower if lower is None else lower
        upper = new_upper if upper is None else upper
        top = inner
    if lower is not None and upper is not None and lower > upper:
        return Miss(Reason.OTHER_SPELLING, f"the bounds {lower} and {upper} are crossed")
    top = widened_from(top)
    if rounded_to is not None and dtype(top) != rounded_to:
        return Miss(Reason.CAST_BETWEEN, f"the clamped value is rounded to {rounded_to} before the cast")
    return top, lower, upper


def _is_clamp(node: fx.Node) -> bool:
    return is_call(node, (aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default)) and all(
        argument is None or number(argument) is not None
        for argument in (*node.args[1:], *node.kwargs.values())
    )


def _bounds(clamp: fx.Node) -> tuple[float | None, float | None]:
    given = (
        {"min": None, "max": None} | dict(zip(("min", "max"), clamp.args[1:], strict=False)) | clamp.kwargs
    )
    if clamp.target == aten.clamp_min.default:
        return number(given["min"]), None
    if clamp.target == aten.clamp_max.default:
        return None, number(given.get("max") if given["max"] is not None else given["min"])
    return number(given["min"]), number(given["max"])


def _read_scaling(node: fx.Node) -> tuple[fx.Node, fx.Node, str] | Miss:
    """Read x and the scale out of a division or a multiplication whose result is rounded at most once."""
    wide = cast_source(node)
    if wide is not None and dtype(wide) == torch.float32:
        node = wide
    if is_call(node, aten.div.Tensor):
        x, scale = node.args
        scaling = DIVIDE
    elif is_call(node, aten.mul.Tensor):
        x, scale = node.args
        left, right = tensor(x), tensor(scale)
        if left is not None and right is not None and _is_scale(left) and not _is_scale(right):
            x, scale = scale, x
        scaling = MULTIPLY
    else:
        if cast_source(node) is not None:
            return Miss(Reason.CAST_BETWEEN, f"{node.name} casts between the scaling and the codes")
        return Miss(Reason.OTHER_SPELLING, f"no scaling before the cast, but {node.target}")
    if not isinstance(x, fx.Node) or not isinstance(scale, fx.Node):
        return Miss(Reason.OTHER_SPELLING, "the scale is a constant, not a tensor")
    value, factor = tensor(x), tensor(scale)
    if value is None or factor is None or value.dtype not in FLOATS:
        return Miss(Reason.DTYPE, f"what is scaled is {dtype(x)}")
    if not _is_scale(factor):
        detail = f"the scale has the shape {tuple(factor.shape)}: only one scale per tensor is built"
        return Miss(Reason.OP_MISSING, detail)
    if factor.dtype != torch.float32 or factor.dim() > value.dim():
        return Miss(Reason.DTYPE, f"the scale is {factor.dtype} with {factor.dim()} dimensions")
    if scaling == MULTIPLY and (inverted := _reciprocal_of(scale)) is not None:
        scale, scaling = inverted, RECIPROCAL
    return widened_from(x), scale, scaling


def _is_scale(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point and has_one_element(value)


def _reciprocal_of(node: fx.Node) -> fx.Node | None:
    """Return s of s.reciprocal() or 1 / s (which is traced as reciprocal times one)."""
    if is_call(node, aten.mul.Tensor) and number(node.args[1]) == 1.0 and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if not is_call(node, aten.reciprocal.default):
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) and dtype(source) == torch.float32 else None
