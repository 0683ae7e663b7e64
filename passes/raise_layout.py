"""Recognises scales that are moved to columns behind a quantisation: the kernel can write them so at once."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_dynamic.reference import COLUMN, COLUMN_TMA, ROW, TMA_ROWS
from fuse_cache.passes.raised import Found
from fuse_cache.passes.reading import aten, is_call, only_user


def candidates(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield every quantisation by groups whose scales are written row by row."""
    for node in graph.find_nodes(op="call_function", target=QUANT_DYNAMIC):
        if isinstance(node.args[2], int) and node.args[2] > 0 and node.args[-1] == ROW:
            yield node


def recognise(quant: fx.Node) -> Found | None:
    """Read how the scales are moved. None: not to columns, or something reads them as they are."""
    items = {user.args[1]: user for user in quant.users if user.target is operator.getitem}
    scales = items.get(1)
    if scales is None or scales.meta["val"].dim() != 2:
        return None
    moved = _column(scales) or _column_tma(scales)
    if moved is None:
        return None
    last, layout = moved
    return Found(QUANT_DYNAMIC, (*quant.args[:-1], layout), (items.get(0), last))


def _column(scales: fx.Node) -> tuple[fx.Node, str] | None:
    """scales.t().contiguous().t()"""
    turned = _turn_of(scales)
    copied = None if turned is None else only_user(turned)
    if copied is None or not is_call(copied, aten.clone.default) or not copied.meta["val"].is_contiguous():
        return None
    back = _turn_of(copied)
    return None if back is None else (back, COLUMN)


def _column_tma(scales: fx.Node) -> tuple[fx.Node, str] | None:
    """pad(scales.t(), (0, p))[:, :T].t(): each column starts at a multiple of 16 bytes."""
    turned = _turn_of(scales)
    padded = None if turned is None else only_user(turned)
    if padded is None or not is_call(padded, aten.constant_pad_nd.default):
        return None
    amounts = padded.args[1]
    if not isinstance(amounts, (list, tuple)) or len(amounts) != 2 or amounts[0] != 0:
        return None
    cut = only_user(padded)
    if cut is None or not is_call(cut, aten.slice.Tensor) or cut.args[1:3] not in ((1, 0), (-1, 0)):
        return None
    back = _turn_of(cut)
    if back is None or len(cut.args) > 4:
        return None
    rows = scales.meta["val"].shape[0]
    if not statically_known_true(back.meta["val"].stride(1) == (rows + TMA_ROWS - 1) // TMA_ROWS * TMA_ROWS):
        return None
    now, before = back.meta["val"].shape, scales.meta["val"].shape
    is_whole = all(statically_known_true(a == b) for a, b in zip(now, before, strict=True))
    return (back, COLUMN_TMA) if is_whole else None


def _turn_of(node: fx.Node) -> fx.Node | None:
    """Return the only reader of a node if it exchanges the two dimensions."""
    user = only_user(node)
    if not is_call(user, aten.permute.default):
        return None
    order = user.args[1]
    return user if isinstance(order, (list, tuple)) and list(order) == [1, 0] else None
