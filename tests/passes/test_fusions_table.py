"""On every listed model every RMSNorm and every gated activation is raised, and FUSIONS.md says so."""

from __future__ import annotations

import pytest
import torch

from tests.models import DTYPES, MODELS, Kind
from tests.passes.fusions_table import PATH, count, row

# Dynamo's and the models' own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]


def check(name: str, dtype: torch.dtype, kind: Kind) -> None:
    counts = count(name, dtype, kind)
    assert counts.is_complete, counts
    assert counts.named == 0
    assert row(name, counts) in PATH.read_text().splitlines()


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_all_of_a_model_is_raised(name: str) -> None:
    check(name, torch.bfloat16, "dynamic")


# The dtype alternates, so that each model and each kind meets both.
CELLS: list[tuple[str, torch.dtype, Kind]] = [
    (name, DTYPES[(number + (kind == "dynamic")) % 2], kind)
    for number, name in enumerate(MODELS)
    for kind in ("static", "dynamic")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "kind"), CELLS, ids=str)
def test_all_of_every_model_is_raised(name: str, dtype: torch.dtype, kind: Kind) -> None:
    check(name, dtype, kind)


def test_the_table_has_a_row_for_every_model() -> None:
    lines = PATH.read_text().splitlines()
    for name in MODELS:
        assert sum(line.startswith(f"| {name} |") for line in lines) == 1
