"""The callable: which slot serves which size, and what a call may cost."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuse_cache.client.checker import OutsideRangeError
from fuse_cache.client.dispatch import UNBOUNDED, Slot, dispatch, neighbourhood, on_first_call
from fuse_cache.client.graph import SymbolSource


def _named(name: str) -> Callable[..., Any]:
    return lambda *args: (name, args)


def _slots() -> list[Slot]:
    return [Slot(1, 256, _named("small")), Slot(257, 4096, _named("large"))]


@pytest.mark.parametrize(
    ("size", "name"),
    [(1, "small"), (256, "small"), (257, "large"), (4096, "large"), (0, "outside 0"), (4097, "outside 4097")],
)
def test_each_end_of_each_range_goes_where_it_belongs(size: int, name: str) -> None:
    outside: Callable[[int | None], Any] = lambda size: _named(f"outside {size}")  # noqa: E731
    by_argument = dispatch(_slots(), SymbolSource(1, None), outside)
    assert by_argument("x", size) == (name, ("x", size))
    x = torch.empty(3, size)
    assert dispatch(_slots(), SymbolSource(0, 1), outside)(x)[0] == name


def test_a_size_that_an_artifact_turns_down_goes_outside_and_the_artifact_stays() -> None:
    def picky(size: int) -> str:
        if size == 7:
            raise OutsideRangeError("an assumption")
        return "artifact"

    slot = Slot(1, 10, picky)
    on_first_call(slot, picky, lambda seconds: None, lambda error: pytest.fail(str(error)))
    call = dispatch([slot], SymbolSource(0, None), lambda size: lambda *args: f"local {size}")
    assert [call(7), call(8), call(7), call(9)] == ["local 7", "artifact", "local 7", "artifact"]


def test_the_first_call_is_told_once_and_leaves_no_trace() -> None:
    told: list[float] = []

    def run(x: int) -> int:
        return x + 1

    slot = Slot(0, UNBOUNDED, run)
    on_first_call(slot, run, told.append, lambda error: pytest.fail(str(error)))
    call = dispatch([slot], None, lambda size: pytest.fail("outside"))
    assert [call(1), call(2)] == [2, 3]
    assert len(told) == 1
    assert slot.run is run


def test_a_first_call_that_fails_is_answered_by_what_takes_its_place() -> None:
    def broken(x: int) -> int:
        raise RuntimeError("no")

    slot = Slot(0, UNBOUNDED, broken)
    on_first_call(slot, broken, lambda seconds: pytest.fail("called"), lambda error: lambda x: x * 10)
    call = dispatch([slot], None, lambda size: pytest.fail("outside"))
    assert [call(1), call(2)] == [10, 20]


def test_gaps_between_ranges_are_found_with_their_ends() -> None:
    slots = [Slot(2, 4, _named("a")), Slot(8, 9, _named("b"))]
    assert neighbourhood(slots, 3) == (2, 4, True)
    assert neighbourhood(slots, 1) == (0, 1, False)
    assert neighbourhood(slots, 5) == (5, 7, False)
    assert neighbourhood(slots, 10) == (10, UNBOUNDED, False)


def test_picking_costs_microseconds() -> None:
    def run(*args: Any) -> None:
        return None

    slots = [Slot(n * 10, n * 10 + 9, run) for n in range(4)]
    call = dispatch(slots, SymbolSource(1, None), lambda size: run)
    arguments = (None, 35, *[None] * 300)
    bare = min(timeit.repeat(lambda: run(*arguments), number=2000, repeat=5)) / 2000
    ours = min(timeit.repeat(lambda: call(*arguments), number=2000, repeat=5)) / 2000
    assert ours - bare < 10e-6
