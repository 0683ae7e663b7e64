"""Real models: compiled by the daemon for one host, loaded by a second without a compiler, equal to eager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon, running_daemon
from tests.e2e.host import TOLERANCE, run_host
from tests.models import KINDS, MODELS

# What `make test` runs; the whole cross is slow.
QUICK = (
    ("llama", "float32", "static_cache"),
    ("qwen3", "bfloat16", "dynamic"),
    ("gpt2", "float32", "static"),
)
WHOLE = tuple((model, dtype, kind) for model in MODELS for dtype in ("float32", "bfloat16") for kind in KINDS)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("daemon"), "--workers", "2") as running:
        yield running


def _job(daemon: Daemon, model: str, dtype: str, kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {"endpoint": daemon.endpoint, "mode": "remote"}
    shapes = [[2, 8]]
    if kind == "dynamic":
        shapes = [[2, 8], [3, 5], [1, 1]]
        # Two symbolic sizes, batch and sequence: the range is about the sequence.
        options |= {"range_dim": "input_ids:1", "compile_ranges": [[1, 128]]}
    return {"model": model, "dtype": dtype, "kind": kind, "options": options, "shapes": shapes}


def _check(outcomes: list[dict[str, Any]], source: str) -> None:
    for outcome in outcomes:
        name = "{model} {dtype} {kind}".format_map(outcome["job"])
        assert outcome["worst"] <= TOLERANCE[outcome["job"]["dtype"]], f"{name}: {outcome['worst']}"
        assert outcome["graphs"], name
        for graph in outcome["graphs"]:
            assert graph["source"] == source, f"{name}: {graph}"
            assert graph["used"], name


def _through_two_hosts(daemon: Daemon, cases: tuple[tuple[str, str, str], ...], tmp_path: Path) -> None:
    jobs = [_job(daemon, *case) for case in cases]
    _check(run_host(jobs, tmp_path / "first", env=daemon.env, timeout_s=3000), "compiled")
    compiles = daemon.stats()["compiles"]
    without_compiler = {
        **daemon.env,
        "PATH": str(tmp_path / "empty"),
        "CXX": "/nonexistent",
        "CC": "/nonexistent",
    }
    _check(run_host(jobs, tmp_path / "second", env=without_compiler), "daemon")
    assert daemon.stats()["compiles"] == compiles == len(cases)


def test_three_models_compile_once_and_load_without_a_compiler(daemon: Daemon, tmp_path: Path) -> None:
    _through_two_hosts(daemon, QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_model_dtype_and_kind_compiles_once_and_loads_without_a_compiler(
    daemon: Daemon, tmp_path: Path
) -> None:
    _through_two_hosts(daemon, tuple(case for case in WHOLE if case not in QUICK), tmp_path)
