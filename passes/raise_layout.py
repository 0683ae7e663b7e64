"""Recognises scales that are moved to another layout behind a quantisation: the kernel can write them so."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_dynamic.reference import (
    CLAMPED_POWER,
    COLUMN,
    COLUMN_TMA,
    EXACT_POWER,
    LOG2_POWER,
    PACKED,
    ROW,
    TMA_ROWS,
)
from fuse_cache.kernels.quant_nvfp4.op import QUANT_NVFP4
from fuse_cache.kernels.quant_nvfp4.reference import TILE_GROUPS, TILE_ROWS
from fuse_cache.passes.moves import Digit, Placed, followed, same, same_digits
from fuse_cache.passes.raised import Found
from fuse_cache.passes.reading import aten, cast_source, dtype, is_call, number, only_user

_MIN_NORMAL = 2.0**-126


def candidates(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield every quantisation by groups whose scales are written row by row."""
    for node in graph.find_nodes(op="call_function", target=QUANT_DYNAMIC):
        if isinstance(node.args[2], int) and node.args[2] > 0 and node.args[-1] == ROW:
            yield node
    for node in graph.find_nodes(op="call_function", target=QUANT_NVFP4):
        if node.args[-1] is False:
            yield node


def recognise(quant: fx.Node) -> Found | None:
    """Read how the scales are moved. None: to no layout that is ours, or something reads them as they are."""
    items = {user.args[1]: user for user in quant.users if user.target is operator.getitem}
    scales = items.get(1)
    if scales is None or scales.meta["val"].dim() != 2 or quant.args[0].meta["val"].dim() != 2:  # type: ignore[union-attr]  # x is a node
        return None
    if quant.target == QUANT_NVFP4:
        last = _last(scales, _is_swizzled)
        return None if last is None else Found(QUANT_NVFP4, (*quant.args[:-1], True), (items.get(0), last))
    exponents = _exponents(scales, quant)
    if exponents is not None:
        last, layout = _last(exponents, _is_packed), PACKED
    else:
        last, layout = _last(scales, _is_column_tma), COLUMN_TMA
        if last is None:
            last, layout = _last(scales, _is_column), COLUMN
    return None if last is None else Found(QUANT_DYNAMIC, (*quant.args[:-1], layout), (items.get(0), last))


def _last(scales: fx.Node, is_there: object) -> fx.Node | None:
    """Return the last node to which the scales are moved in which they have a layout."""
    assert callable(is_there)
    return next((at.node for at in reversed(list(followed(scales))) if is_there(at)), None)


def _is_whole(at: Placed) -> bool:
    """Return whether [T, G] is [T, G] still, whatever its strides."""
    rank = len(at.origin)
    shape = at.node.meta["val"].shape
    return (
        not at.packed
        and same_digits(at.dims, [(Digit(axis, at.origin[axis], 1),) for axis in range(rank)])
        and len(shape) == rank
        and all(map(same, shape, at.origin))
        and at.node.meta["val"].dtype == torch.float32
    )


def _has_strides(at: Placed, column: int | torch.SymInt) -> bool:
    strides = at.node.meta["val"].stride()
    return same(strides[0], 1) and same(strides[1], column)


def _is_column(at: Placed) -> bool:
    return _is_whole(at) and _has_strides(at, at.origin[0])


def _aligned(rows: int | torch.SymInt) -> int | torch.SymInt:
    return (rows + TMA_ROWS - 1) // TMA_ROWS * TMA_ROWS


def _is_column_tma(at: Placed) -> bool:
    return _is_whole(at) and _has_strides(at, _aligned(at.origin[0]))


def _is_packed(at: Placed) -> bool:
    rows, groups = at.origin
    words = (groups + 3) // 4
    expected = [(Digit(0, rows, 1),), (Digit(1, words, 4),)]
    shape = at.node.meta["val"].shape
    return (
        at.packed
        and same_digits(at.dims, expected)
        and len(shape) == 2
        and same(shape[0], rows)
        and same(shape[1], words)
        and dtype(at.node) == torch.int32
        and _has_strides(at, _aligned(rows))
    )


def _is_swizzled(at: Placed) -> bool:
    rows, groups = at.origin
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS, (groups + TILE_GROUPS - 1) // TILE_GROUPS
    order = ((0, tiles[0], TILE_ROWS), (1, tiles[1], TILE_GROUPS), (0, 32, 1), (0, 4, 32), (1, 4, 1))
    return (
        dtype(at.node) == torch.float8_e4m3fn
        and same_digits(at.dims, [tuple(Digit(*digit) for digit in order)])
        and at.node.meta["val"].is_contiguous()
    )


def _exponents(scales: fx.Node, quant: fx.Node) -> fx.Node | None:
    """Return the exponents of scales that are powers of two, if they are all that is read: one byte each."""
    bits = only_user(scales)
    if not is_call(bits, aten.view.dtype) or dtype(bits) != torch.int32:
        return None
    shifted = only_user(bits)
    while is_call(shifted, aten.alias.default):  # As AOTAutograd leaves behind a view of the bits.
        shifted = only_user(shifted)
    right = (aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Scalar)
    if not is_call(shifted, right) or number(shifted.args[1]) != 23:
        return None
    last = only_user(shifted)
    if is_call(last, (aten.bitwise_and.Scalar, aten.bitwise_and.Tensor)) and number(last.args[1]) == 255:
        shifted, last = last, only_user(last)
    if last is None or cast_source(last) is not shifted or dtype(last) != torch.uint8:
        return None
    return last if _has_no_mantissa(quant) else None


def _has_no_mantissa(quant: fx.Node) -> bool:
    """Return whether every scale is 0, infinite, NaN or a power of two that is a normal number.

    Where it is subnormal, PACKED rounds up and a shift rounds down.
    """
    _, _, _, amax_min, _, _, divisor, _, scale_min, power, *_ = quant.args
    if power in (EXACT_POWER, CLAMPED_POWER):
        return True
    least, low, by = number(scale_min) or 0.0, number(amax_min) or 0.0, number(divisor)
    assert by is not None
    return power == LOG2_POWER and max(least, low / max(by, 1.0)) >= 2 * _MIN_NORMAL
