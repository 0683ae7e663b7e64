"""A warm run against a daemon whose builds are fakes: what it asks for, as which hosts, and what it tells."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuse_cache.client.errors import DaemonUnavailableError, OptionError
from fuse_cache.client.warm.hosts import toolchains_for
from fuse_cache.client.warm.manifest import InputPlan, ModelPlan
from fuse_cache.client.warm.outcome import Outcome, Summary
from fuse_cache.client.warm.run import run
from fuse_cache.proto.compile_pb2 import ToolchainOffer
from fuse_cache.proto.toolchain import Toolchain
from tests.client.warm import its_models
from tests.server.harness import FakeDaemon
from tests.server.test_toolchains import other_python

X = InputPlan(name="x", shape=("tokens", 16), dtype="float32")
PLAN = ModelPlan(
    name="broken", factory=f"{its_models.__name__}:broken", hf_config=None, dtype=None, inputs=(X,),
    targets=(), options={"compile_ranges": [[1, 4], [5, 8]]},
)  # fmt: skip


class Told:
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def tracing(self, model: str, device: str) -> None:
        self.lines.append(("tracing", model, device))

    def traced(self, model: str, artifacts: int, stored: int) -> None:
        self.lines.append(("traced", model, artifacts, stored))

    def heard(self, outcome: Outcome) -> None:
        self.lines.append(("heard", outcome.model, outcome.state))

    def failed(self, model: str, reason: str) -> None:
        self.lines.append(("failed", model, reason))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    """One with two toolchains of the release that runs here, and one of another."""
    folder = tmp_path_factory.mktemp("warm")
    same, _ = other_python(folder / "same", same_release=True)
    older, _ = other_python(folder / "older")
    toolchains = {"same": {"python": str(same)}, "older": {"python": str(older)}}
    with FakeDaemon(folder / "daemon", toolchain=toolchains) as running:
        yield running


def warm(daemon: FakeDaemon, folder: Path, *plans: ModelPlan, dry_run: bool = False) -> tuple[Summary, Told]:
    values = {"endpoint": f"unix:{daemon.socket}", "mode": "remote", "cache_dir": str(folder)}
    told = Told()
    return run(plans, values, dry_run=dry_run, listener=told), told


def test_all_that_hosts_of_this_release_ask_for_is_compiled_once_and_told(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    summary, _ = warm(daemon, tmp_path, PLAN, dry_run=True)
    assert not summary.complete
    # Two graphs of one form, so one graph; two ranges of it; two toolchains.
    assert summary.count("missing") == len(summary.outcomes) == 4
    summary, told = warm(daemon, tmp_path, PLAN)
    assert summary.complete
    assert summary.count("compiled") == 4
    assert [line for line in told.lines if line[0] != "heard"] == [
        ("tracing", "broken", "cpu"), ("traced", "broken", 2, 0), ("traced", "broken", 2, 0)
    ]  # fmt: skip
    by_toolchain = {
        name: {outcome.key for outcome in summary.outcomes if outcome.toolchain == name}
        for name in ("own", "same")
    }
    assert len(by_toolchain["own"] | by_toolchain["same"]) == 4
    again, told = warm(daemon, tmp_path, PLAN)
    assert again.count("stored") == 4
    assert {outcome.key for outcome in again.outcomes} == {outcome.key for outcome in summary.outcomes}
    assert ("traced", "broken", 2, 2) in told.lines


def test_a_model_that_cannot_be_made_is_told_and_the_others_go_on(daemon: FakeDaemon, tmp_path: Path) -> None:
    fails = dataclasses.replace(PLAN, name="fails", factory=f"{its_models.__name__}:fails")
    summary, told = warm(daemon, tmp_path, fails, PLAN)
    assert set(summary.failures) == {"fails"}
    assert not summary.complete
    assert "no layers to share the width" in summary.failures["fails"]
    assert ("failed", "fails", summary.failures["fails"]) in told.lines
    assert {outcome.model for outcome in summary.outcomes} == {"broken"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"targets": ("h200",)},
            "model broken: the daemon does not build for h200, but for cpu-avx2: start it",
        ),
        ({"options": {"level": "O9"}}, "model broken: option level='O9' is wrong"),
    ],
)
def test_what_no_daemon_or_backend_takes_is_refused_before_anything_is_traced(
    daemon: FakeDaemon, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    told = Told()
    values = {"endpoint": f"unix:{daemon.socket}", "mode": "remote", "cache_dir": str(tmp_path)}
    with pytest.raises(OptionError, match=message):
        run([PLAN, dataclasses.replace(PLAN, **change)], values, dry_run=False, listener=told)
    assert told.lines == []


def test_a_daemon_that_was_there_once_is_not_taken_at_its_word(tmp_path: Path) -> None:
    told = Told()
    with pytest.raises(DaemonUnavailableError, match="the connection was refused"):
        run([PLAN], {"endpoint": f"unix:{tmp_path}/none", "mode": "remote"}, dry_run=False, listener=told)
    assert told.lines == []


CPU = Toolchain(python="3.11", torch="2.13.0+cpu", torch_sources=b"s" * 32)
OFFERS = [
    ToolchainOffer(name=name, toolchain=dataclasses.replace(CPU, **change).to_message())  # type: ignore[arg-type]
    for name, change in {
        "cpu": {},
        "cuda": {"torch": "2.13.0+cu130", "cuda": "13.0"},
        "cuda 3.12": {"torch": "2.13.0+cu130", "cuda": "13.0", "python": "3.12"},
        "older": {"torch": "2.11.0+cu130", "cuda": "13.0", "torch_sources": b"o" * 32},
        "patched": {"torch_sources": b"p" * 32},
    }.items()
]


@pytest.mark.parametrize(
    ("device", "any_wheel", "names"),
    [
        ("cpu", False, ["cpu", "cuda", "cuda 3.12"]),
        ("cuda", False, ["cuda", "cuda 3.12"]),
        ("cuda", True, ["cpu", "cuda", "cuda 3.12"]),
    ],
)
def test_the_hosts_of_a_release_are_all_that_its_toolchains_serve(
    device: str, any_wheel: bool, names: list[str]
) -> None:
    found = toolchains_for(CPU, OFFERS, device, any_wheel=any_wheel)
    assert [offer.name for offer in found] == names
    alone = toolchains_for(CPU, OFFERS[:1], device, any_wheel=any_wheel)
    assert [offer.name for offer in alone] == ["cpu"]


def test_a_release_that_no_toolchain_has_is_told_with_those_there_are() -> None:
    with pytest.raises(OptionError, match=r"no torch of this release .*older: .*2\.11\.0.* run warm with"):
        toolchains_for(CPU, OFFERS[3:], "cpu", any_wheel=True)


TRACES = """
import json
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.warm.run import for_device
from fuse_cache.client.warm.tracing import trace
from fuse_cache.client.warm.manifest import InputPlan
from tests.client.warm.test_tracing import plan
ids = InputPlan(name="ids", shape=("tokens",), dtype="int64")
with for_device("h200"):
    traced = trace(plan("tied", ids), CompileOptions(), ["h200", "sm_90", "h100-pcie", "sm_80"], "cuda")
wants = [[want.fields.target, dict(want.fields.target_facts)] for want in traced.wants]
print(json.dumps([wants, traced.refused]))
"""


def test_a_model_is_traced_for_gpus_that_are_not_here() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRACES], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wants, refused = json.loads(done.stdout.splitlines()[-1])
    assert refused == []
    # An H200 and the first GPU of sm_90 ask for the same; a card with fewer multiprocessors does not.
    assert wants == [
        ["sm_90", {"multiprocessors": 132, "threads": 2048}],
        ["sm_90", {"multiprocessors": 114, "threads": 2048}],
        ["sm_80", {"multiprocessors": 108, "threads": 2048}],
    ]
