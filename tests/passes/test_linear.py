"""The cost of the passes grows with the layers and no faster (`tests/bench/passes.py` measures it)."""

from __future__ import annotations

import pytest

from fuse_cache.passes.order import Stage
from tests.bench.passes import BAR_S, llama, run_passes

FEW, MANY = 8, 64
ALLOWANCE = 4.0  # For a machine that does other things.


@pytest.fixture(scope="module")
def measured() -> dict[int, tuple[float, dict[str, int]]]:
    """Layers -> CPU seconds of raising and fusing, and matches by pass."""
    run_passes(llama(1))  # Loads everything.
    found = {}
    for layers in (FEW, MANY):
        seconds, matches = run_passes(llama(layers))
        found[layers] = seconds[Stage.JOINT] + seconds[Stage.FUSE], matches
    return found


def test_eight_times_the_layers_take_eight_times_as_long(
    measured: dict[int, tuple[float, dict[str, int]]],
) -> None:
    few, many = measured[FEW][0], measured[MANY][0]
    assert many / few < ALLOWANCE * MANY / FEW


def test_many_layers_keep_their_share_of_the_bar(measured: dict[int, tuple[float, dict[str, int]]]) -> None:
    assert measured[MANY][0] < ALLOWANCE * BAR_S * MANY / 80


@pytest.mark.parametrize("layers", [FEW, MANY])
def test_every_layer_is_fused(measured: dict[int, tuple[float, dict[str, int]]], layers: int) -> None:
    matches = measured[layers][1]
    assert matches["norm_quant"] == 2 * layers
    assert matches["act_quant"] == layers
