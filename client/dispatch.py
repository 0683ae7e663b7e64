"""The callable that Dynamo gets: picks the artifact by the call's size, and costs next to nothing.

A call pays for reading one number and comparing it; everything that can be done at the first call of an
artifact is done there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fuse_cache.client.checker import OutsideRangeError
from fuse_cache.client.graph import SymbolSource
from fuse_cache.proto.request import Range

Call = Callable[..., Any]
UNBOUNDED = 2**63 - 1


class Slot:
    """What serves the sizes from `lower` to `upper`. `run` is replaced after the first call, so it is read at
    every call."""

    __slots__ = ("lower", "run", "upper")

    def __init__(self, lower: int, upper: int, run: Call) -> None:
        self.lower, self.upper, self.run = lower, upper, run


def on_first_call(
    slot: Slot, run: Call, called: Callable[[float], None], failed: Callable[[Exception], Call]
) -> None:
    """Make `slot` serve `run`: after the first good call `called(seconds)` is told, once.

    A first call that raises goes to `failed`, which returns what is to serve the slot instead, or raises.
    OutsideRangeError is no
    failure: the artifact refused a size before it ran, and goes on to serve the others.
    """

    def first(*args: Any) -> Any:
        began_s = time.monotonic()
        try:
            result = run(*args)
        except OutsideRangeError:
            raise
        except Exception as error:
            slot.run = failed(error)
            return slot.run(*args)
        slot.run = run
        called(time.monotonic() - began_s)
        return result

    slot.run = first


def dispatch(
    slots: Sequence[Slot], source: SymbolSource | None, outside: Callable[[int | None], Call]
) -> Call:
    """Return the callable over `slots`, which are in order.

    `source` tells where the size stands in the arguments; None: the one slot serves every call.
    `outside(size)` gives what serves a size that no slot has, or that an artifact turned down.
    """
    if source is None:
        (only,) = slots

        def single(*args: Any) -> Any:
            try:
                return only.run(*args)
            except OutsideRangeError:
                return outside(None)(*args)

        return single
    index, dim = source.input, source.dim
    table = tuple(slots)

    def by_size(*args: Any) -> Any:
        size = args[index] if dim is None else args[index].shape[dim]
        for slot in table:
            if slot.lower <= size <= slot.upper:
                try:
                    return slot.run(*args)
                except OutsideRangeError:
                    break
        return outside(int(size))(*args)

    return by_size


def slot_for(compile_range: Range) -> Slot:
    """Return an empty slot for a range; one without a symbol takes every size."""
    if compile_range.symbol is None:
        return Slot(0, UNBOUNDED, _unset)
    return Slot(compile_range.lower, compile_range.upper, _unset)


def _unset(*args: Any) -> Any:
    raise AssertionError("a slot was called before it was filled")


def neighbourhood(slots: Sequence[Slot], size: int | None) -> tuple[int, int, bool]:
    """Return the slot that holds `size`, or the gap between slots that does, and whether it is a slot."""
    if size is None:
        return 0, UNBOUNDED, True
    lower, upper = 0, UNBOUNDED
    for slot in slots:
        if slot.lower <= size <= slot.upper:
            return slot.lower, slot.upper, True
        if slot.upper < size:
            lower = slot.upper + 1
        else:
            upper = min(upper, slot.lower - 1)
    return lower, upper, False
