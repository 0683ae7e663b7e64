"""Where values lie after reshapes, permutations and padding: digits of their indices, for any size.

A dimension is a list of digits. Each belongs to an axis of the tensor that was followed and counts `stride`
of its elements, so that an element's place on an axis is the sum of its digits times their strides. Splitting
a dimension splits digits, permuting permutes them; nothing is assumed of a symbolic size.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.passes.reading import RESHAPES, aten, is_call, number, only_user, tensor
from fuse_cache.passes.round_up import without_min

Size = int | torch.SymInt

_SAME = frozenset({aten.clone.default, aten.alias.default, aten.contiguous.default})
_FRESH = frozenset(
    {
        aten.full.default,
        aten.zeros.default,
        aten.empty.memory_format,
        aten.new_zeros.default,
        aten.new_empty.default,
        aten.new_full.default,
        aten.zeros_like.default,
        aten.empty_like.default,
        aten.full_like.default,
    }
)


@dataclass(frozen=True, slots=True)
class Digit:
    """Part of an index: `size` values, each `stride` elements of `axis` apart."""

    axis: int
    size: Size
    stride: Size


Dim = tuple[Digit, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A node that holds what was followed, and how: its dimensions, and the padded size of each axis.

    `origin` is what the axes had at first. `packed` says that four neighbours of the last axis became one
    int32.
    """

    node: fx.Node
    dims: tuple[Dim, ...]
    extents: tuple[Size, ...]
    origin: tuple[Size, ...]
    packed: bool = False


def same(one: Size, other: Size) -> bool:
    """Return whether two sizes are known to be equal. Adds no guard."""
    return bool(statically_known_true(one == other)) or _plain(one) == _plain(other)


def _plain(size: Size) -> object:
    """Return a size such that the end of a slice, which cannot be beyond the end, is compared as what it
    is."""
    return without_min(size.node.expr if isinstance(size, torch.SymInt) else size)


def followed(node: fx.Node) -> Iterator[Placed]:
    """Yield every place to which the values of a node are moved, each being the only reader of the last."""
    shape = node.meta["val"].shape
    dims = tuple(_digits(axis, size) for axis, size in enumerate(shape))
    placed: Placed | None = Placed(node, dims, tuple(shape), tuple(shape))
    while placed is not None:
        yield placed
        user = only_user(placed.node)
        placed = None if user is None or tensor(user) is None else _moved(placed, user)


def _has_sizes_of(node: fx.Node, other: fx.Node) -> bool:
    sizes, others = node.meta["val"].shape, other.meta["val"].shape
    return len(sizes) == len(others) and all(map(same, sizes, others))


def _digits(axis: int, size: Size) -> Dim:
    return () if same(size, 1) else (Digit(axis, size, 1),)


def _moved(at: Placed, user: fx.Node) -> Placed | None:
    """Return where one reader moves the values, None if it does anything else with them."""
    value = user.meta["val"]
    dims: Sequence[Dim] | None = None
    if is_call(user, RESHAPES):
        dims = _reshaped(at.dims, value.shape)
    elif is_call(user, aten.permute.default):
        order = user.args[1]
        assert isinstance(order, (list, tuple))
        dims = [at.dims[place] for place in order if isinstance(place, int)]
    elif is_call(user, _SAME):
        dims = at.dims
    elif is_call(user, aten.expand.default):
        dims = at.dims if _has_sizes_of(user, at.node) else None
    elif is_call(user, (aten.copy.default, aten.copy_.default)):
        is_copied = user.args[1] is at.node and user.args[0] is not at.node
        dims = at.dims if is_copied and _has_sizes_of(user, at.node) else None
    elif is_call(user, aten.view.dtype):
        return _viewed(at, user)
    elif is_call(user, (aten.constant_pad_nd.default, aten.slice_scatter.default, aten.cat.default)):
        return _padded(at, user)
    elif is_call(user, aten.slice.Tensor):
        return _cut(at, user)
    return None if dims is None else replace(at, node=user, dims=tuple(dims))


def _reshaped(dims: Sequence[Dim], shape: Sequence[Size]) -> list[Dim] | None:
    """Distribute the digits over new dimensions, splitting them where a dimension ends inside of one."""
    waiting = [digit for dim in dims for digit in dim]
    found: list[Dim] = []
    for size in shape:
        taken: list[Digit] = []
        have: Size = 1
        while not same(have, size):
            if not waiting:
                return None
            digit = waiting.pop(0)
            if same(have * digit.size, size) or not _exceeds(have * digit.size, size):
                taken.append(digit)
                have = have * digit.size
                continue
            outer = size // have
            inner = digit.size // outer
            if not same(outer * inner, digit.size) or not same(have * outer, size):
                return None
            taken.append(Digit(digit.axis, outer, digit.stride * inner))
            waiting.insert(0, Digit(digit.axis, inner, digit.stride))
            have = size
        found.append(tuple(taken))
    return None if waiting else found


def _exceeds(one: Size, other: Size) -> bool:
    """Return whether a product of sizes is more than what a dimension holds: as multiples of it are."""
    return bool(statically_known_true(one > other)) or not same(operator.mod(other, one), 0)


def _viewed(at: Placed, user: fx.Node) -> Placed | None:
    """Follow a view of the bytes: of as many, or of four bytes as one word."""
    before, after = at.node.meta["val"], user.meta["val"]
    if before.element_size() == after.element_size():
        return replace(at, node=user)
    last = at.dims[-1] if at.dims else ()
    if before.element_size() != 1 or after.element_size() != 4 or at.packed or not last:
        return None
    digit = last[-1]
    if digit.axis != len(at.extents) - 1 or digit.stride != 1 or not same(digit.size % 4, 0):
        return None
    words = Digit(digit.axis, digit.size // 4, 4)
    kept = last[:-1] if same(words.size, 1) else (*last[:-1], words)
    return replace(at, node=user, dims=(*at.dims[:-1], kept), packed=True)


def _padded(at: Placed, user: fx.Node) -> Placed | None:
    """Follow padding behind the end: by a pad, into a fresh tensor, or by concatenation with one."""
    value, before = user.meta["val"], at.node.meta["val"]
    if is_call(user, aten.constant_pad_nd.default):
        amounts = user.args[1]
        assert isinstance(amounts, (list, tuple))
        fill = number(user.args[2]) if len(user.args) > 2 else 0.0
        if fill != 0.0 or any(amount != 0 for amount in amounts[::2] if isinstance(amount, int)):
            return None
        if any(not isinstance(amount, int) for amount in amounts[::2]):
            return None
    elif is_call(user, aten.slice_scatter.default):
        base, source = user.args[:2]
        start = user.args[3] if len(user.args) > 3 else 0
        step = user.args[5] if len(user.args) > 5 else 1
        if source is not at.node or start not in (0, None) or step != 1 or not _is_zero(base):
            return None
    else:
        parts = user.args[0]
        assert isinstance(parts, (list, tuple))
        if parts[0] is not at.node or not all(_is_zero(part) for part in parts[1:]):
            return None
    dims, extents = list(at.dims), list(at.extents)
    for place, (size, old) in enumerate(zip(value.shape, before.shape, strict=True)):
        if same(size, old):
            continue
        if len(dims[place]) != 1 or not _is_axis(dims[place][0], extents):
            return None
        axis = dims[place][0].axis
        dims[place], extents[axis] = (Digit(axis, size, 1),), size
    return replace(at, node=user, dims=tuple(dims), extents=tuple(extents))


def _is_axis(digit: Digit, extents: Sequence[Size]) -> bool:
    return digit.stride == 1 and same(digit.size, extents[digit.axis])


def _is_zero(node: object) -> bool:
    """Return whether a tensor is fresh: zeros, or whatever was in memory."""
    while is_call(node, RESHAPES | {aten.slice.Tensor, aten.permute.default, aten.alias.default}):
        node = node.args[0]
    if not is_call(node, _FRESH):
        return False
    fills = (aten.full.default, aten.full_like.default), (aten.new_full.default,)
    for place, targets in ((1, fills[0]), (2, fills[1])):
        if is_call(node, targets):
            return number(node.args[place]) == 0.0 or node.args[place] is False
    return True


def _cut(at: Placed, user: fx.Node) -> Placed | None:
    """Follow a slice from the start that cuts all padding off an axis, and nothing else."""
    arguments = (*user.args[1:], *(0, 0, None, 1)[len(user.args) - 1 :])
    dim, start, _, step = arguments
    if not isinstance(dim, int) or start not in (0, None) or step != 1 or user.kwargs:
        return None
    dim %= len(at.dims)
    size = user.meta["val"].shape[dim]
    if same(size, at.node.meta["val"].shape[dim]):
        return replace(at, node=user)
    if len(at.dims[dim]) != 1 or not _is_axis(at.dims[dim][0], at.extents):
        return None
    axis = at.dims[dim][0].axis
    if not same(size, at.origin[axis]):
        return None
    dims = (*at.dims[:dim], _digits(axis, size), *at.dims[dim + 1 :])
    extents = (*at.extents[:axis], size, *at.extents[axis + 1 :])
    return replace(at, node=user, dims=dims, extents=extents)


def same_digits(dims: Sequence[Dim], expected: Sequence[Dim]) -> bool:
    """Return whether two lists of dimensions have the same digits in the same order. Adds no guard."""
    found, wanted = flat(dims), flat(expected)
    return len(found) == len(wanted) and all(
        axis == other and same(size, size2) and same(stride, stride2)
        for (axis, size, stride), (other, size2, stride2) in zip(found, wanted, strict=True)
    )


def flat(dims: Sequence[Dim]) -> list[tuple[int, Size, Size]]:
    """Return the digits of all dimensions in order, what belongs together merged."""
    merged: list[Digit] = []
    for digit in (digit for dim in dims for digit in dim if not same(digit.size, 1)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.axis == digit.axis
            and same(last.stride, operator.mul(digit.stride, digit.size))
        ):
            merged[-1] = Digit(digit.axis, last.size * digit.size, digit.stride)
        else:
            merged.append(digit)
    return [(digit.axis, digit.size, digit.stride) for digit in merged]
