"""Real models: compiled by the daemon for one host, loaded by a second without a compiler, equal to eager."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon, running_daemon
from tests.e2e.host import TOLERANCE, run_host
from tests.models import whole_way_cells

pytestmark = pytest.mark.apart

# What `make test` runs. Qwen3's call of one token is a second graph: Hugging Face branches on it.
QUICK = (
    ("llama", "float32", "static_cache"),
    ("qwen3", "bfloat16", "dynamic"),
    ("gpt2", "float32", "static"),
)
REST = tuple(
    case
    for model, dtype, kind in whole_way_cells()
    if (case := (model, str(dtype).removeprefix("torch."), kind)) not in QUICK
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    # In fp32, Mixtral's experts call an operator of transformers' own.
    env = {"FUSE_CACHE_OP_MODULES": "transformers.integrations.moe"}
    with running_daemon(tmp_path_factory.mktemp("daemon"), "--workers", "2", env=env) as running:
        yield running


# Their layers differ: sliding and full attention take turns. Elsewhere a second layer is the first again, and
# costs a minute a cell; the quick cells have two.
UNLIKE_LAYERS = ("gemma2", "gemma3")


def _job(daemon: Daemon, model: str, dtype: str, kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {"endpoint": daemon.endpoint, "mode": "remote"}
    shapes = [[2, 8]]
    if kind == "dynamic":
        shapes = [[2, 8], [3, 5], [1, 1] if model == "qwen3" else [1, 5]]
        # Two symbolic sizes, batch and sequence: the range is about the sequence.
        options |= {"range_dim": "input_ids:1", "compile_ranges": [[1, 128]]}
    layers = 2 if model in UNLIKE_LAYERS or (model, dtype, kind) in QUICK else 1
    return {
        "model": model, "dtype": dtype, "kind": kind, "options": options, "shapes": shapes, "layers": layers
    }  # fmt: skip


def _check(outcomes: list[dict[str, Any]], source: str) -> None:
    for outcome in outcomes:
        name = "{model} {dtype} {kind}".format_map(outcome["job"])
        assert outcome["worst"] <= TOLERANCE[outcome["job"]["dtype"]], f"{name}: {outcome['worst']}"
        assert outcome["graphs"], name
        for graph in outcome["graphs"]:
            assert graph["source"] == source, f"{name}: {graph}"
            assert graph["used"], name


def _hosts(
    jobs: list[dict[str, Any]], folder: Path, env: dict[str, str], timeout_s: float
) -> list[dict[str, Any]]:
    """Run the jobs on two hosts side by side, as many as there are workers."""
    with ThreadPoolExecutor(2) as threads:
        halves = threads.map(
            lambda number: run_host(jobs[number::2], folder / str(number), env=env, timeout_s=timeout_s),
            range(min(2, len(jobs))),
        )
        return [outcome for half in halves for outcome in half]


def _through_two_hosts(daemon: Daemon, cases: tuple[tuple[str, str, str], ...], tmp_path: Path) -> None:
    jobs = [_job(daemon, *case) for case in cases]
    before = daemon.stats()["compiles"]
    first = _hosts(jobs, tmp_path / "first", daemon.env, 3000)
    _check(first, "compiled")
    graphs = sum(len(outcome["graphs"]) for outcome in first)
    no_compiler = {**daemon.env, "PATH": str(tmp_path / "empty"), "CXX": "/nonexistent", "CC": "/nonexistent"}
    _check(_hosts(jobs, tmp_path / "second", no_compiler, 1500), "daemon")
    assert daemon.stats()["compiles"] - before == graphs >= len(cases)


def test_three_models_compile_once_and_load_without_a_compiler(daemon: Daemon, tmp_path: Path) -> None:
    _through_two_hosts(daemon, QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_model_and_kind_compiles_once_and_loads_without_a_compiler(
    daemon: Daemon, tmp_path: Path
) -> None:
    _through_two_hosts(daemon, REST, tmp_path)
