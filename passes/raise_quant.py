"""Recognises quantisation at a cast to float8 or int8: how it scales, rounds and clamps.

The scale is a tensor from outside (static) or comes from the values themselves (dynamic, `read_scale.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_dynamic.reference import PER_TENSOR, PER_TOKEN, ROW
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.quant_nvfp4.reference import GROUP as NVFP4_GROUP
from fuse_cache.kernels.scaling import DIVIDE, MULTIPLY, RECIPROCALS
from fuse_cache.passes.base import Reason
from fuse_cache.passes.raised import Found, Miss
from fuse_cache.passes.read_codes import read_codes
from fuse_cache.passes.read_scale import Scale, comes_from_amax, group_amax_behind, moved_from, read_scale
from fuse_cache.passes.reading import (
    FLOAT8,
    FLOATS,
    aten,
    cast_source,
    dtype,
    has_one_element,
    is_call,
    is_exact_in,
    number,
    reshape_source,
    tensor,
    widened_from,
)


def candidates(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield every cast to float8, and to int8 of what was rounded. Scales of NVFP4 are `raise_nvfp4`'s."""
    for node in list(graph.nodes):
        source = cast_source(node)
        if source is None or dtype(source) not in FLOATS:
            continue
        if dtype(node) == torch.float8_e4m3fn and group_amax_behind(source, NVFP4_GROUP):
            continue
        if dtype(node) in FLOAT8 or (dtype(node) == torch.int8 and _is_rounded(source)):
            yield node


def _is_rounded(node: fx.Node) -> bool:
    """Return whether codes of int8 were rounded, before they were clamped or after."""
    for _ in range(6):
        if is_call(node, aten.round.default):
            return True
        is_clamp = is_call(node, (aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default))
        # Where PyTorch clamps bfloat16 it widens first and narrows last.
        if not is_clamp and dtype(cast_source(node)) not in FLOATS:
            return False
        node = node.all_input_nodes[0]
    return False


def recognise(cast: fx.Node) -> Found | Miss:
    """Read the quantisation that ends in this cast."""
    codes = dtype(cast)
    node = cast_source(cast)
    assert codes is not None
    assert node is not None
    clamp = read_codes(node, is_integer=codes == torch.int8)
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
    encoding = (scaled_dtype, bounds[0], bounds[1], codes)
    if comes_from_amax(scaled.scale):
        dynamic = _read_dynamic(cast, scaled, encoding)
        if dynamic is not None:
            return dynamic
    return _read_static(cast, scaled, encoding)


@dataclass(frozen=True, slots=True)
class _Scaling:
    """x and a scale, in the sizes in which they meet, and how they do."""

    x: fx.Node
    scale: fx.Node
    how: str
    broadcast: torch.Tensor  # The scale as it meets x.


def _read_scaling(node: fx.Node) -> _Scaling | Miss:
    """Read x and the scale out of a division or a multiplication whose result is rounded at most once."""
    wide = cast_source(node)
    if wide is not None and dtype(wide) == torch.float32:
        node = wide
    if is_call(node, aten.div.Tensor):
        (x, scale), how = node.args, DIVIDE
    elif is_call(node, aten.mul.Tensor):
        (x, scale), how = node.args, MULTIPLY
        if isinstance(x, fx.Node) and isinstance(scale, fx.Node) and _is_scale_of(x, scale):
            x, scale = scale, x
    else:
        if cast_source(node) is not None:
            return Miss(Reason.CAST_BETWEEN, f"{node.name} casts between the scaling and the codes")
        return Miss(Reason.OTHER_SPELLING, f"no scaling before the cast, but {node.target}")
    if not isinstance(x, fx.Node) or not isinstance(scale, fx.Node):
        return Miss(Reason.OTHER_SPELLING, "the scale is a constant, not a tensor")
    value, factor = tensor(x), tensor(scale)
    if value is None or factor is None or value.dtype not in FLOATS:
        return Miss(Reason.DTYPE, f"what is scaled is {dtype(x)}")
    if how == MULTIPLY and (inverted := reciprocal_of(moved_from(scale), tuple(RECIPROCALS))) is not None:
        scale, how = inverted, RECIPROCALS[inverted.meta["val"].dtype]
    return _Scaling(widened_from(x), scale, how, factor)


def _is_scale_of(node: fx.Node, other: fx.Node) -> bool:
    """Return whether `node` scales `other` rather than the other way round."""
    one, two = tensor(node), tensor(other)
    if one is None or two is None or not one.dtype.is_floating_point:
        return False
    if has_one_element(one) != has_one_element(two):
        return has_one_element(one)
    return comes_from_amax(node) and not comes_from_amax(other)


def _read_static(cast: fx.Node, scaled: _Scaling, encoding: tuple[object, ...]) -> Found | Miss:
    factor = scaled.broadcast
    if not has_one_element(factor):
        detail = f"the scale has the shape {list(factor.shape)}, and is not computed from the values"
        return Miss(Reason.OP_MISSING, detail)
    if dtype(cast) not in FLOAT8:
        return Miss(Reason.OP_MISSING, f"no static quantisation to {dtype(cast)}")
    if dtype(scaled.scale) != torch.float32 or factor.dim() > scaled.x.meta["val"].dim():
        return Miss(Reason.DTYPE, f"the scale is {dtype(scaled.scale)} with {factor.dim()} dimensions")
    return Found(QUANT_FP8_STATIC, (scaled.x, scaled.scale, scaled.how, *encoding), (cast,))


def _read_dynamic(cast: fx.Node, scaled: _Scaling, encoding: tuple[object, ...]) -> Found | Miss | None:
    """Read a quantisation whose scale comes from a largest absolute value. None: from another tensor's."""
    scale_node = moved_from(scaled.scale)
    read = read_scale(scale_node)
    if read is None or isinstance(read, Miss):
        return read
    shape = grouped(scaled.x, read)
    if shape is None:
        if has_one_element(scaled.broadcast):
            return None  # One scale, from elsewhere: to this tensor it is static.
        return Miss(Reason.OTHER_SPELLING, "the scale comes from another tensor's values")
    x, group = shape
    if not _broadcasts_by_row(scaled.broadcast, scaled.x.meta["val"], group):
        return Miss(Reason.SHAPE, f"the scale meets the values in the shape {list(scaled.broadcast.shape)}")
    if dtype(scale_node) != torch.float32 and read.scale_dtype != dtype(scale_node):
        return Miss(Reason.DTYPE, f"the scale is {dtype(scale_node)}")
    attributes = (
        group,
        read.amax_min,
        read.amax_max,
        read.rule,
        read.divisor,
        read.scale_dtype,
        read.scale_min,
        read.power_of_two,
        scaled.how,
        *encoding,
        ROW,
    )
    return Found(QUANT_DYNAMIC, (x, read.bound, *attributes), (cast, scale_node))


def grouped(x: fx.Node, read: Scale) -> tuple[fx.Node, int] | None:
    """Return the tensor that is quantised, with its rows whole, and the group that shares a scale."""
    source, value = read.source, read.source.meta["val"]
    is_same = source is x or _same_reshape(source, x)
    # Over a whole tensor the shape makes no difference.
    if not is_same and (read.dims or moved_from(source) is not moved_from(x)):
        return None
    if not read.dims or len(read.dims) == value.dim() > 1:
        return x, PER_TENSOR
    if read.dims != (value.dim() - 1,):
        return None
    base = reshape_source(x)
    if base is None:
        return x, PER_TOKEN
    base = widened_from(base)
    rows, size = base.meta["val"], value.shape[-1]
    if not isinstance(size, int) or rows.dim() == 0 or not isinstance(rows.shape[-1], int):
        return x, PER_TOKEN
    if rows.shape[-1] != size and rows.shape[-1] % size == 0:
        return base, size
    return x, PER_TOKEN


def _same_reshape(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes are the same reshape of the same values."""
    first, second = reshape_source(one), reshape_source(other)
    if first is None or second is None or widened_from(first) is not widened_from(second):
        return False
    a, b = one.meta["val"].shape, other.meta["val"].shape
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def _broadcasts_by_row(factor: torch.Tensor, x: torch.Tensor, group: int) -> bool:
    if group == PER_TENSOR:
        return has_one_element(factor) and factor.dim() <= x.dim()
    if factor.dim() != x.dim() or not statically_known_true(factor.shape[-1] == 1):
        return False
    leading = zip(factor.shape[:-1], x.shape[:-1], strict=True)
    return all(statically_known_true(a == b) for a, b in leading)


def reciprocal_of(node: fx.Node, kinds: tuple[torch.dtype, ...] = (torch.float32,)) -> fx.Node | None:
    """Return s of s.reciprocal() or 1 / s (which is traced as reciprocal times one)."""
    if is_call(node, aten.mul.Tensor) and number(node.args[1]) == 1.0 and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if not is_call(node, aten.reciprocal.default):
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) and dtype(source) in kinds else None
