"""Compiled through a real daemon by one process, loaded by another: the whole way, in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon, run_cli
from tests.e2e import small_host
from tests.e2e.host import TOLERANCE, run_host

RANGES = [[1, 4], [5, 16]]
DUMPED = ("manifest.json", "report.json", "passes.txt")


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Daemon:
    """The folder's daemon; each test keeps to a namespace of its own."""
    return shared_daemon


def _options(daemon: Daemon, namespace: str, **options: Any) -> dict[str, Any]:
    return {"endpoint": daemon.endpoint, "mode": "remote", "namespace": namespace, **options}


def test_a_network_with_ranges_is_compiled_once_loaded_elsewhere_and_then_found_on_disk(
    daemon: Daemon, tmp_path: Path
) -> None:
    options = _options(daemon, "ranges", compile_ranges=RANGES)
    dumped = tmp_path / "dump"
    first = small_host.run("mlp", {**options, "dump_dir": str(dumped)}, tmp_path / "first", daemon.env)
    second = small_host.run("mlp", options, tmp_path / "second", daemon.env)
    third = small_host.run("mlp", options, tmp_path / "second", daemon.env)
    for outcome, source in ((first, "compiled"), (second, "daemon"), (third, "disk")):
        assert outcome["worst"] < 1e-5
        assert [graph["compile_range"] for graph in outcome["graphs"]] == RANGES
        assert [(graph["source"], graph["used"]) for graph in outcome["graphs"]] == [(source, True)] * 2
    assert [path.read_text().count("def forward") for path in dumped.glob("graph.*.py")] == [1]
    for graph in first["graphs"]:
        files = {kind: dumped / f"artifact.{graph['key'][:16]}.{kind}" for kind in DUMPED}
        assert json.loads(files["manifest.json"].read_text())["key"] == graph["key"]
        assert json.loads(files["report.json"].read_text())["source"] == "compiled"
        assert graph["passes"][0]["name"] in files["passes.txt"].read_text()
    entries = {entry["key"]: entry for entry in daemon.entries()}
    for graph in second["graphs"]:
        entry = entries[graph["key"]]
        assert entry["compile_range"] == graph["compile_range"]
        assert entry["hits"] >= 1
        shown = json.loads(
            run_cli("show", graph["key"][:16], "--json", "--endpoint", daemon.endpoint, env=daemon.env)
        )
        assert shown["key"] == graph["key"]
        assert shown["parts"]["target"] == graph["target"]
        assert {"graph", "range"} <= set(shown["parts"])


def test_a_size_outside_every_range_is_compiled_locally_and_counted(daemon: Daemon, tmp_path: Path) -> None:
    options = _options(daemon, "outside", compile_ranges=RANGES, mode="auto", max_queue_s=300)
    outcome = small_host.run("mlp", options, tmp_path / "host", daemon.env)
    assert outcome["worst"] < 1e-5
    assert [graph["source"] for graph in outcome["graphs"]][2:] == ["local"]
    assert "size 20 is outside every compile range" in outcome["graphs"][2]["reason"]


def test_a_range_of_one_size_is_static_and_its_own_entry(daemon: Daemon, tmp_path: Path) -> None:
    options = _options(daemon, "static", compile_ranges=[[1, 1], [4, 4], [5, 5], [16, 16]])
    outcome = small_host.run("mlp", options, tmp_path / "host", daemon.env)
    assert outcome["worst"] < 1e-5
    assert [graph["compile_range"] for graph in outcome["graphs"]] == [[1, 1], [4, 4], [5, 5], [16, 16]]
    assert len({graph["key"] for graph in outcome["graphs"]}) == 4


def test_optional_arguments_and_renamed_weights_work_in_both_orders_from_one_store(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Case 50, second half. Names are no part of a key: the wrapped weight has the plain one's artifacts."""
    first = small_host.run("optional", _options(daemon, "optional"), tmp_path / "first", daemon.env)
    second = small_host.run(
        "optional_reversed", _options(daemon, "optional"), tmp_path / "second", daemon.env
    )
    assert first["worst"] == second["worst"] == 0
    assert [graph["source"] for graph in first["graphs"]] == ["compiled", "compiled", "memory", "memory"]
    assert [graph["source"] for graph in second["graphs"]] == ["daemon", "daemon", "memory", "memory"]


def test_sizes_among_the_results_are_served_too(daemon: Daemon, tmp_path: Path) -> None:
    for host, source in (("first", "compiled"), ("second", "daemon")):
        outcome = small_host.run("sizes", _options(daemon, "sizes"), tmp_path / host, daemon.env)
        assert outcome["worst"] < 1e-6
        assert [graph["source"] for graph in outcome["graphs"]] == [source]


@pytest.mark.slow  # test_models.py has the quick ones
def test_a_tiny_llama_with_dynamic_batch_and_sequence_goes_the_whole_way(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Two artifacts: attention asks whether the length is 1, so that a single token is a graph of its own."""
    options = _options(daemon, "llama", range_dim="input_ids:1", compile_ranges=[[1, 32]])
    job = {"model": "llama", "kind": "dynamic", "options": options, "shapes": [[2, 8], [1, 1], [3, 32]]}
    for folder, source in (("first", "compiled"), ("second", "daemon")):
        (outcome,) = run_host([job], tmp_path / folder, env=daemon.env)
        assert outcome["worst"] <= TOLERANCE["float32"]
        graphs = [(graph["source"], graph["used"], graph["compile_range"]) for graph in outcome["graphs"]]
        assert graphs == [(source, True, [2, 32]), (source, True, None)]
