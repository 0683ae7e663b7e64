"""Recognises gated activations: SiLU or GELU of one tensor times another, and where the graph rounds."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.act_and_mul.op import ACT_AND_MUL
from fuse_cache.passes.base import Reason
from fuse_cache.passes.raised import Found, Miss
from fuse_cache.passes.read_activation import ANCHORS, Activation, read_activation
from fuse_cache.passes.reading import (
    FLOATS,
    LOW_PRECISION,
    aten,
    cast_source,
    dtype,
    is_call,
    number,
    only_user,
    tensor,
    widened_from,
)

__all__ = ["ANCHORS", "recognise"]


def recognise(anchor: fx.Node) -> Found | Miss | None:
    """Read the gated activation around this function. None: no activation, or nothing that it gates."""
    found = read_activation(anchor)
    if found is None:
        return None
    if isinstance(found, Miss):
        return found
    last = found.last
    user = only_user(last)
    if user is not None and dtype(last) in LOW_PRECISION and widened_from(user) is last:
        last = user  # Rounded, but multiplied in float32.
    products = [user for user in last.users if _gated(user, last) is not None]
    if not products:
        return None
    if len(last.users) > 1:
        readers = ", ".join(sorted(user.name for user in last.users))
        return Miss(Reason.EXTRA_USER, f"the activation is read by {readers}")
    if found.obstacle is not None:
        return found.obstacle
    (product,) = products
    up = _gated(product, last)
    value, gate = tensor(up), tensor(found.gate)
    if up is None or value is None or gate is None or value.dtype not in FLOATS:
        return Miss(Reason.DTYPE, f"what the activation gates is {dtype(up)}")
    if not _same_sizes(value, gate):
        sizes = f"{list(value.shape)} and {list(gate.shape)}"
        return Miss(Reason.SHAPE, f"the activation and what it gates have the sizes {sizes}")
    return _read_tail(product, up, found)


def _gated(product: fx.Node, activation: fx.Node) -> fx.Node | None:
    """Return what a product multiplies the activation by, if that is a tensor with more than one element."""
    if not is_call(product, aten.mul.Tensor):
        return None
    other = product.args[1] if product.args[0] is activation else product.args[0]
    value = tensor(other)
    if not isinstance(other, fx.Node) or other is activation or value is None or value.dim() == 0:
        return None
    # A factor of one element a row is a router's, not a gate's.
    widths = (value.shape[-1], activation.meta["val"].shape[-1])
    is_router = statically_known_true(widths[0] == 1) and not statically_known_true(widths[1] == 1)
    return None if is_router else other


def _read_tail(product: fx.Node, up: fx.Node, found: Activation) -> Found | Miss:
    act_dtype = found.act_dtype
    promoted = torch.promote_types(act_dtype or torch.float32, tensor(up).dtype)  # type: ignore[union-attr]  # read by the caller
    if dtype(product) != promoted:
        return Miss(Reason.DTYPE, f"the product is {dtype(product)}, not {promoted}")
    if promoted == torch.float32:
        narrow = widened_from(up)
        # An activation that is rounded is multiplied in its own dtype: the widening is what makes it float32.
        if act_dtype in (None, torch.float32):
            up = narrow
    last, out_dtype = product, None
    if len(product.users) == 1:
        (user,) = product.users
        if cast_source(user) is product and dtype(user) in FLOATS:
            last, out_dtype = user, dtype(user)
    gate: fx.Node = found.gate
    pair: tuple[fx.Node, fx.Node | None] = (gate, up)
    if (whole := _whole_of_halves(gate, up)) is not None:
        pair = (whole, None)
    arguments = (*pair, found.name, found.sigmoid_dtype, act_dtype, out_dtype)
    return Found(ACT_AND_MUL, arguments, (last,))


def _same_sizes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dim() == other.dim() and all(
        statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True)
    )


def _whole_of_halves(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """Return the tensor of whose last dimension `gate` is the first half and `up` the second."""
    first, second = _part(gate), _part(up)
    if first is None or second is None or first[0] is not second[0]:
        return None
    whole, value = first[0], tensor(first[0])
    half, size = tensor(gate), None if value is None else value.shape[-1]
    if value is None or half is None or size is None:
        return None
    is_halved = (
        statically_known_true(first[1] == 0)
        and statically_known_true(second[1] == half.shape[-1])
        and statically_known_true(half.shape[-1] * 2 == size)
    )
    return whole if is_halved else None


def _part(node: fx.Node) -> tuple[fx.Node, int | torch.SymInt] | None:
    """Return of what a node is a piece along the last dimension, and where the piece starts."""
    if node.target is operator.getitem and isinstance(split := node.args[0], fx.Node):
        return _piece_of_split(node, split)
    if not is_call(node, aten.slice.Tensor):
        return None
    base, dim, start = node.args[0], *([*node.args[1:3], 0, 0][:2])
    value, begin = tensor(base), number(start)
    steps = len(node.args) > 4 and node.args[4] != 1
    if not isinstance(base, fx.Node) or value is None or begin is None or steps or node.kwargs:
        return None
    return (base, int(begin)) if dim in (-1, value.dim() - 1) else None


def _piece_of_split(node: fx.Node, split: fx.Node) -> tuple[fx.Node, int | torch.SymInt] | None:
    if not is_call(split, (aten.split.Tensor, aten.split_with_sizes.default)):
        return None
    base = split.args[0]
    dim = split.args[2] if len(split.args) > 2 else 0
    value, place = tensor(base), node.args[1]
    if not isinstance(base, fx.Node) or value is None or not isinstance(place, int):
        return None
    if dim not in (-1, value.dim() - 1):
        return None
    pieces = split.meta["val"]
    return base, sum(piece.shape[-1] for piece in pieces[:place])
