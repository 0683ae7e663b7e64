"""Recognises NVFP4 quantisation around the cast of its groups' scales to e4m3.

Groups of 16 share a scale in e4m3, on top of one global scale in float32 or of none; codes are e2m1, packed
in pairs. How a value becomes a code is recognised by what comes out (`read_e2m1.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fuse_cache.kernels.quant_nvfp4.op import QUANT_NVFP4
from fuse_cache.kernels.quant_nvfp4.reference import (
    E2M1_MAX,
    E4M3_MAX,
    GROUP,
    GUARD_RECIPROCALS,
    GUARD_SCALE,
    NO_GUARD,
    NO_SCALING,
)
from fuse_cache.kernels.scaling import DIVIDE, MULTIPLY, RECIPROCAL
from fuse_cache.passes.base import Reason
from fuse_cache.passes.raise_quant import grouped, reciprocal_of
from fuse_cache.passes.raised import Found, Miss
from fuse_cache.passes.read_codes import read_codes
from fuse_cache.passes.read_e2m1 import packed_codes, read_encoding
from fuse_cache.passes.read_scale import Scale, amax_of, group_amax_behind, moved_from
from fuse_cache.passes.reading import (
    LOW_PRECISION,
    aten,
    cast_source,
    dtype,
    has_one_element,
    is_call,
    number,
    tensor,
    widened_from,
)

_MAX_READERS = 400


def candidates(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield every cast to e4m3 of what comes from the largest absolute values of groups of 16."""
    for node in list(graph.nodes):
        source = cast_source(node)
        if source is not None and dtype(node) == torch.float8_e4m3fn and group_amax_behind(source, GROUP):
            yield node


@dataclass(frozen=True, slots=True)
class _BlockScale:
    """How a group's scale comes from its largest value."""

    amax: Scale
    factor: fx.Node | None  # The global scale.
    amax_scaling: str
    amax_dtype: torch.dtype | None
    global_scaling: str
    scale_min: float | None


@dataclass(frozen=True, slots=True)
class _Total:
    """How values are scaled: by what, and what happens where a reciprocal would be infinite."""

    total_scaling: str
    scaling: str
    zero_guard: str


def recognise(cast: fx.Node) -> Found | Miss:
    """Read the quantisation whose scales this cast gives."""
    block = _read_block_scale(cast)
    if isinstance(block, Miss):
        return block
    readers = _readers(cast)
    scaled = next((node for node in readers if _scales_values(node, set(readers))), None)
    if scaled is None:
        return Miss(Reason.OTHER_SPELLING, "nothing is scaled by the scales of the groups of 16")
    x, factor = scaled.args
    if isinstance(x, fx.Node) and x in readers:
        x, factor = factor, x
    assert isinstance(x, fx.Node)
    assert isinstance(factor, fx.Node)
    total = _read_total(scaled, factor, cast, block.factor)
    if isinstance(total, Miss):
        return total
    whole = grouped(widened_from(x), block.amax)
    if whole is None or whole[1] != GROUP:
        return Miss(Reason.OTHER_SPELLING, "the scales of the groups come from another tensor's values")
    if dtype(scaled) != torch.float32:
        return Miss(Reason.DTYPE, f"values are scaled in {dtype(scaled)}")
    packed = next((found for node in _readers(scaled) if (found := packed_codes(node)) is not None), None)
    if packed is None:
        return Miss(Reason.OTHER_SPELLING, "scales in e4m3 for groups of 16, whose codes are not packed")
    if isinstance(packed, Miss):
        return packed
    encoding = read_encoding(packed[1], scaled)
    if isinstance(encoding, Miss):
        return encoding
    attributes = (
        block.amax_scaling,
        block.amax_dtype,
        block.global_scaling,
        block.scale_min,
        total.total_scaling,
        total.scaling,
        total.zero_guard,
        encoding.nan_code,
        encoding.nan_sign,
        encoding.zero_sign,
        False,
    )
    return Found(QUANT_NVFP4, (whole[0], block.factor, *attributes), (packed[0], cast))


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return all that is computed from a node, in order, as far as one looks."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting and len(found) < _MAX_READERS:
        for user in waiting.pop(0).users:
            if user not in found and user.op == "call_function":
                found.add(user)
                waiting.append(user)
    return sorted(found)


def _scales_values(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Return whether a node scales values by what comes from the scales."""
    if not is_call(node, (aten.mul.Tensor, aten.div.Tensor)) or len(node.args) != 2:
        return False
    one, other = node.args
    if is_call(node, aten.div.Tensor) and one in readers:
        return False
    outside = [argument for argument in (one, other) if argument not in readers]
    value = tensor(outside[0]) if len(outside) == 1 else None
    return value is not None and not has_one_element(value)


def _read_block_scale(cast: fx.Node) -> _BlockScale | Miss:
    source = cast_source(cast)
    assert source is not None
    bounded = read_codes(source, is_integer=False)
    if isinstance(bounded, Miss):
        return bounded
    node, lower, upper = bounded
    if upper != E4M3_MAX:
        return Miss(Reason.OTHER_SPELLING, f"the scale of a group is bounded by {upper}, not by {E4M3_MAX}")
    whole: fx.Node | None = None
    global_scaling = NO_SCALING
    if is_call(node, (aten.mul.Tensor, aten.div.Tensor)) and number(node.args[1]) is None:
        is_quotient = is_call(node, aten.div.Tensor)
        inner, factor = node.args
        if not is_quotient and (value := tensor(inner)) is not None and has_one_element(value):
            inner, factor = factor, inner
        global_scaling = DIVIDE if is_quotient else MULTIPLY
        if not isinstance(factor, fx.Node) or not isinstance(inner, fx.Node) or dtype(node) != torch.float32:
            return Miss(Reason.OTHER_SPELLING, f"{node.name} combines no scale of a group with a global one")
        whole, node = moved_from(factor), inner
        if dtype(whole) != torch.float32 or not has_one_element(whole.meta["val"]):
            return Miss(Reason.DTYPE, f"the global scale is {dtype(whole)} {list(whole.meta['val'].shape)}")
    node = moved_from(node)
    rounded = moved_from(widened_from(node))
    amax_dtype = dtype(rounded) if dtype(rounded) in LOW_PRECISION else None
    inner_source = cast_source(rounded)
    if amax_dtype is not None and inner_source is not None and dtype(inner_source) == torch.float32:
        rounded = inner_source
    by = number(rounded.args[1]) if len(rounded.args) > 1 else None
    if is_call(rounded, aten.div.Tensor) and by == E2M1_MAX:
        amax_scaling = DIVIDE
    elif is_call(rounded, aten.mul.Tensor) and by == 1.0 / E2M1_MAX:
        amax_scaling = RECIPROCAL
    else:
        return Miss(Reason.OTHER_SPELLING, f"{rounded.name} does not divide the largest value by {E2M1_MAX}")
    inner = rounded.args[0]
    amax = None
    if isinstance(inner, fx.Node):
        amax = amax_of(moved_from(widened_from(moved_from(inner))))
    if amax is None:
        return Miss(Reason.OTHER_SPELLING, f"{rounded.name} does not read the largest value of a group")
    return _BlockScale(amax, whole, amax_scaling, amax_dtype, global_scaling, lower)


def _read_total(scaled: fx.Node, factor: fx.Node, cast: fx.Node, whole: fx.Node | None) -> _Total | Miss:
    """Read what values are scaled by, back to the cast."""
    factor = moved_from(factor)
    guarded_by: fx.Node | None = None
    scaling = DIVIDE
    if is_call(scaled, aten.mul.Tensor):
        scaling = RECIPROCAL
        factor, guarded_by = _unguarded(factor)
        inverted = reciprocal_of(moved_from(factor))
        if inverted is None:
            return Miss(Reason.OTHER_SPELLING, f"{scaled.name} multiplies by no reciprocal of a scale")
        factor = moved_from(inverted)
    total = factor
    total_scaling, is_guarded = NO_SCALING, False
    if whole is not None:
        if not is_call(total, (aten.mul.Tensor, aten.div.Tensor)):
            return Miss(Reason.OTHER_SPELLING, "the codes are scaled without the global scale")
        one, other = (moved_from(a) for a in total.args if isinstance(a, fx.Node))
        if not _is_widened(one, cast):
            one, other = other, one
        if is_call(total, aten.div.Tensor):
            total_scaling = DIVIDE
            if one is total.args[1]:
                return Miss(Reason.OTHER_SPELLING, "the global scale is divided by the scale of a group")
        elif other is whole:
            total_scaling = MULTIPLY
        else:
            total_scaling = RECIPROCAL
            inner, guard = _unguarded(other)
            is_guarded = guard is not None
            inverse = reciprocal_of(moved_from(inner))
            other = other if inverse is None else moved_from(inverse)
            if guard is not None and moved_from(guard) is not whole:
                return Miss(Reason.OTHER_SPELLING, "the reciprocal of the global scale depends on another")
        if other is not whole:
            return Miss(Reason.OTHER_SPELLING, f"{total.name} reads another global scale")
        factor = one
    if not _is_widened(factor, cast):
        return Miss(Reason.OTHER_SPELLING, "the codes are scaled by another scale than the one in e4m3")
    guard_kind = NO_GUARD
    if guarded_by is not None:
        by = moved_from(guarded_by)
        guard_kind = GUARD_RECIPROCALS if by is total else GUARD_SCALE
        if by is not total and not _is_widened(by, cast):
            return Miss(Reason.OTHER_SPELLING, "a reciprocal is 0 where something else is")
    if total_scaling == RECIPROCAL and is_guarded != (guard_kind == GUARD_RECIPROCALS):
        return Miss(Reason.OTHER_SPELLING, "one reciprocal of 0 is 0 and the other infinite")
    return _Total(total_scaling, scaling, guard_kind)


def _is_widened(node: fx.Node, cast: fx.Node) -> bool:
    """Return whether a node is the scale in e4m3, as float32."""
    source = cast_source(node)
    return source is not None and dtype(node) == torch.float32 and moved_from(source) is cast


def _unguarded(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Read where(t == 0, 0, v) or where(t != 0, v, 0): return v, and t; other nodes as they are, and None."""
    if not is_call(node, aten.where.self):
        return node, None
    condition, one, other = node.args
    if not is_call(condition, (aten.eq.Scalar, aten.ne.Scalar)) or number(condition.args[1]) != 0.0:
        return node, None
    if is_call(condition, aten.ne.Scalar):
        one, other = other, one
    is_zero = is_call(one, (aten.full.default, aten.scalar_tensor.default)) and (
        number(one.args[-1]) == 0.0 or (is_call(one, aten.full.default) and number(one.args[1]) == 0.0)
    )
    inner = condition.args[0]
    if is_zero and isinstance(other, fx.Node) and isinstance(inner, fx.Node):
        return moved_from(other), inner
    return node, None
