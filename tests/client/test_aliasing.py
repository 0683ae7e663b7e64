"""Inputs that share memory otherwise than when traced: the compiled code is asked only where it is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from fuse_cache.client.aliasing import SharedMemory

# Torch's own, when Inductor is first imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

Pair = tuple[Tensor, Tensor]


def step(x: Tensor, y: Tensor) -> Tensor:
    """Write to one input and read another."""
    x.add_(1)
    return x * 2 + y


def memory(size: int = 16) -> Tensor:
    return torch.arange(float(size))


def apart() -> Pair:
    return memory()[:8], memory(8) + 100


def beside() -> Pair:
    shared = memory()
    return shared[:8], shared[8:]


def over() -> Pair:
    shared = memory()
    return shared[:8], shared[4:12]


def shifted() -> Pair:
    shared = memory()
    return shared[2:10], shared[6:14]


def onto() -> Pair:
    shared = memory()
    return shared[:8], shared[:8]


def whole() -> Pair:
    shared = memory(8)
    return shared, shared.view(8)


WAYS = (apart, beside, over, shifted, onto, whole)


def traced(function: Callable[..., Any], *args: Any) -> SharedMemory:
    """Trace a call and look at what its graph assumes."""
    found: list[SharedMemory] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
        found.append(SharedMemory(gm))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=False)(*args)
    return found[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_runs_compiled_where_its_inputs_lie_as_when_traced(way: Callable[[], Pair]) -> None:
    shared = traced(step, *way())
    # What does not overlap is one case, wherever it lies; else every byte counts.
    same = {apart, beside} if way in (apart, beside) else {way}
    for _ in range(2):  # The second time it is remembered.
        assert {other for other in WAYS if shared.same(other())} == same


def test_inference_tensors_run_compiled_only_where_the_trace_saw_all_of_their_memory() -> None:
    """Such views do not know their base. Of `over` the trace sees 12 of 16 elements: torch's own fails."""
    with torch.inference_mode():
        assert [way for way in WAYS if traced(step, *shifted()).same(way())] == [shifted]
        assert [way for way in WAYS if traced(step, *over()).same(way())] == []


def test_calls_that_share_otherwise_run_uncompiled_and_say_so_once() -> None:
    shared = traced(step, *apart())
    told: list[str] = []

    def never(*args: Any) -> Any:
        raise AssertionError("compiled code was asked")

    call = shared.checked(never, step, told.append)
    for _ in range(2):
        assert torch.equal(call(*over()), step(*over()))
    assert len(told) == 1


def test_a_graph_that_writes_to_no_input_is_not_checked() -> None:
    assert not traced(lambda x, y: x + y, *over())
    assert not traced(lambda x: x.add_(1), memory())


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, cache: Tensor, x: Tensor) -> Tensor:
        cache.add_(x)
        return cache * self.weight


def test_a_parameter_in_the_memory_of_a_written_input_is_noticed() -> None:
    layers = _Layer(), _Layer()
    shared = traced(layers[0], memory(8), memory(8))
    for layer in (*layers, *layers):  # One graph serves all layers.
        own = layer.weight.detach()
        args = {id(layer.weight): layer.weight, 1: memory(8), 2: memory(8)}
        assert shared.same(_in_order(shared, layer.weight, args[1], args[2]))
        assert not shared.same(_in_order(shared, layer.weight, own, args[2]))


def _in_order(shared: SharedMemory, weight: Tensor, cache: Tensor, x: Tensor) -> list[Tensor]:
    """Put the arguments where the graph has them: the parameter is where it is not looked at each time."""
    (place,) = shared._fixed
    args = [cache, x]
    args.insert(place, weight)
    return args


def test_sizes_that_vary_are_held_apart_too() -> None:
    def dynamic(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * 2 + y.sum()

    found: list[SharedMemory] = []
    arguments: list[list[Any]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
        found.append(SharedMemory(gm))

        def run(*args: Any) -> Any:
            arguments.append([found[-1].same(args)])
            return gm(*args)

        return run

    torch._dynamo.reset()
    compiled = torch.compile(dynamic, backend=backend)
    base, other = memory(64), memory(64)
    with torch.no_grad():
        for number, y in enumerate((other[:8], other[8:20], base[8:28], base[4:24])):
            if number == 0:
                torch._dynamo.mark_dynamic(y, 0)
            compiled(base[:8], y)
    assert len(found) == 1
    assert arguments == [[True], [True], [True], [False]]


@pytest.mark.parametrize("first", [apart, over])
def test_a_local_build_is_right_however_inputs_share_memory(
    first: Callable[[], Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options: Any = {"mode": "local"}
    with fresh_cache(), torch.no_grad():
        for traced_with in (apart, first):  # The second graph is not the first one's, out of torch's cache.
            torch._dynamo.reset()
            compiled = torch.compile(
                step, backend="fuse_cache", fullgraph=True, dynamic=False, options=options
            )
            for way in (traced_with, *WAYS):
                args, expected = way(), way()
                assert torch.equal(compiled(*args), step(*expected)), way
                assert torch.equal(args[0], expected[0])
                assert torch.equal(args[1], expected[1])
