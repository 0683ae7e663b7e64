"""Every quantisation key behind a norm, behind a sum with its norm, behind a gated activation: the fused pair
in an artifact, built as a worker builds and loaded as a host loads, with eager's bits.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.client.loader import load
from tests.captured import copied
from tests.compiled import Compiled, compile_captured
from tests.models import capture
from tests.passes.graphs import same_results
from tests.passes.spellings import divide_wide, llama, rows, weights
from tests.passes.spellings_dynamic import (
    group_column,
    group_flat,
    group_packed,
    group_power,
    group_power_exp2,
    group_row,
    group_tma,
    group_tma_assigned,
    int8_multiplied,
    per_token,
    per_token_bounded,
)
from tests.passes.spellings_more import add_llama, silu
from tests.passes.spellings_nvfp4 import NVFP4

pytestmark = [
    pytest.mark.slow,
    # Torch's own, when Inductor is first imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.skipif(
        torch.__version__ < "2.13", reason="Inductor drops casts inside a loop on 2.11 whatever it is told"
    ),
]
BF16 = torch.bfloat16
WIDTH = 256
ROWS = 6
NAN_ROWS = range(3, 5)  # An infinity and a NaN in `rows`.


def fnuz(x: Tensor, scale: Tensor) -> Tensor:
    """Static, in the format of gfx94x."""
    return (x.float() / scale).clamp(-240.0, 240.0).to(torch.float8_e4m3fnuz)


# What each takes beside the value: nothing, or a scale.
QUANTS: tuple[Any, ...] = (
    divide_wide,
    fnuz,
    per_token,
    per_token_bounded,
    group_row,
    group_flat,
    group_column,
    group_tma,
    group_tma_assigned,
    group_power,
    group_power_exp2,
    group_packed,
    int8_multiplied,
    *NVFP4.values(),
)
KEYS: dict[str, Callable[..., Any]] = {one.__name__: one for one in QUANTS}


def quantised(key: str, value: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    quant = KEYS[key]
    result = quant(value) if len(inspect.signature(quant).parameters) == 1 else quant(value, scale)
    return result if isinstance(result, tuple) else (result,)


def after_norm(key: str, x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return quantised(key, llama(x, w), s)


def after_sum(key: str, x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    norm, total = add_llama(x, y, w)
    return (*quantised(key, norm, s), total)


def after_activation(key: str, x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return quantised(key, silu(x, y), s)


PRODUCERS = {one.__name__: one for one in (after_norm, after_sum, after_activation)}
# The producers in turn, and each of them before both layouts of NVFP4.
CELLS = [(list(PRODUCERS)[place % 3], key) for place, key in enumerate(KEYS)]
CELLS += [cell for cell in itertools.product(PRODUCERS, ("divided", "multiplied")) if cell not in CELLS]


def program(xs: list[Tensor], ys: list[Tensor], w: Tensor, s: Tensor) -> list[tuple[Tensor, ...]]:
    """Return what each cell gives, of a pair of tensors of its own: else cells would share a producer."""
    return [PRODUCERS[name](key, x, y, w, s) for (name, key), x, y in zip(CELLS, xs, ys, strict=True)]


def given(count: int) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Return rows with zeros, infinities and NaN among them; finite ones for INT8, which has no code for
    those."""
    xs, ys = (
        [rows(count, WIDTH, BF16, seed=first + place) for place in range(len(CELLS))] for first in (0, 100)
    )
    for values in (xs, ys):
        for place, (_, key) in enumerate(CELLS):
            if key == "int8_multiplied":
                values[place] = values[place].nan_to_num(0.0, 3.0, -3.0).clamp(-100, 100)
    return xs, ys, weights(WIDTH, BF16), torch.tensor(0.0371)


@functools.cache
def artifact() -> Compiled:
    """Build the program once for any number of rows."""
    xs, ys, w, s = given(ROWS)
    for x in (*xs, *ys):
        torch._dynamo.mark_dynamic(x, 0)
    with tempfile.TemporaryDirectory(prefix="fuse-cache-test-") as folder:
        return compile_captured(capture(program, xs, ys, w, s), Path(folder))


@functools.cache
def results(count: int) -> list[tuple[Tensor, ...]]:
    """Load the artifact, call it with this many rows, and return what it gives by cell."""
    compiled = artifact()
    xs, ys, w, s = given(count)
    traced = given(ROWS)
    known = dict(zip(map(_identity, (*traced[0], *traced[1], *traced[2:])), (*xs, *ys, w, s), strict=True))
    arguments = [
        known[_identity(one)] if isinstance(one, Tensor) else count for one in compiled.captured.arguments
    ]
    with torch.no_grad():
        found = list(load(compiled.built.content)(*copied(tuple(arguments))))
    ends: list[tuple[Tensor, ...]] = []
    for expected in program(xs, ys, w, s):
        ends.append(tuple(found[: len(expected)]))
        del found[: len(expected)]
    assert not found
    return ends


def _identity(value: Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else b"scale"


def test_every_pair_is_fused_in_the_artifact() -> None:
    built = artifact().built
    rows_of_passes: Any = built.passes
    matches = {row["name"]: row["matches"] for row in rows_of_passes if row["is_fusion"] and row["matches"]}
    gated = sum(name == "after_activation" for name, _ in CELLS)
    assert matches == {"norm_quant": len(CELLS) - gated, "act_quant": gated}
    assert list(built.near_misses) == []


@pytest.mark.parametrize("count", [ROWS, 17])
@pytest.mark.parametrize(("producer", "key"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_a_fused_pair_in_an_artifact_has_eagers_bits(producer: str, key: str, count: int) -> None:
    place = CELLS.index((producer, key))
    xs, ys, w, s = given(count)
    expected = PRODUCERS[producer](key, xs[place], ys[place], w, s)
    for one, other in zip(results(count)[place], expected, strict=True):
        assert same_results(unsigned_nan(key, one), unsigned_nan(key, other))


def unsigned_nan(key: str, result: Tensor) -> Tensor:
    """Take the signs of NaN, which IEEE 754 leaves open, out of the codes of a format that has no NaN."""
    if key not in NVFP4 or result.dtype != torch.uint8:
        return result
    unsigned = result.clone()
    unsigned[NAN_ROWS.start : NAN_ROWS.stop] &= 0x77
    return unsigned
