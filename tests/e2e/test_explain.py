"""What the passes did, seen from every side: by the host that compiled, the next one, the daemon, a graph
file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from fuse_cache.client.channel import Endpoint
from fuse_cache.client.graph_file import read_graph_file
from fuse_cache.client.options import CompileOptions
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.artifact_pb2 import PassRecord
from tests.client.explain.test_page import checked
from tests.daemon import Daemon, run_cli
from tests.e2e import small_host

NAMESPACE = "explain"
TOKENS, HIDDEN = 6, 64
# Two norms of `normed` (small_host.py), widened to float32 to be quantised, are neither written nor read.
SAVED_BYTES = 2 * 2 * TOKENS * HIDDEN * 4


@pytest.fixture(scope="module")
def compiled(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One graph, compiled by one host and hit by another: their reports, and what the first one dumped."""
    folder = tmp_path_factory.mktemp("explain")
    options = {"endpoint": shared_daemon.endpoint, "mode": "remote", "namespace": NAMESPACE}
    dumping = {**options, "dump_dir": str(folder / "dump")}
    first = small_host.run("normed", dumping, folder / "first", shared_daemon.env)
    second = small_host.run("normed", options, folder / "second", shared_daemon.env)
    (file,) = (folder / "dump").glob("*.fcgraph")
    return {"first": first["graphs"][0], "second": second["graphs"][0], "file": file}


def numbers(rows: list[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    names = ("on", "candidates", "matches", "bytes_saved")
    return {row["name"]: tuple(row[name] for name in names) for row in rows}


def test_a_hit_of_another_process_tells_what_the_build_told(compiled: dict[str, Any]) -> None:
    first, second = compiled["first"], compiled["second"]
    assert (first["source"], second["source"]) == ("compiled", "daemon")
    assert second["fusions"]["norm_quant"] == 2
    assert second["passes"] == first["passes"]  # milliseconds too: they are the build's
    assert second["near_misses"] == first["near_misses"]
    rows = {row["name"]: row for row in second["passes"]}
    assert rows["norm_quant"]["bytes_saved"] == SAVED_BYTES
    assert all(row["milliseconds"] > 0 for row in rows.values() if row["on"])
    assert not any(row["milliseconds"] or row["matches"] for row in rows.values() if not row["on"])
    assert {"norm_quant": "extra_view"}.items() <= {
        m["pass"]: m["reason"] for m in second["near_misses"]
    }.items()


def test_a_key_is_explained_from_its_manifest_and_with_drawings_while_the_daemon_has_the_graph(
    compiled: dict[str, Any], shared_daemon: Daemon, tmp_path: Path
) -> None:
    page, key = tmp_path / "page.html", compiled["first"]["key"]
    arguments = ("explain", "fusions", key[:12], "--endpoint", shared_daemon.endpoint, "--json")
    plain = json.loads(run_cli(*arguments, "--html", str(page), env=shared_daemon.env))
    assert plain["key"] == key
    assert numbers(plain["passes"]) == numbers(compiled["second"]["passes"])
    assert [miss["reason"] for miss in plain["near_misses"]] == [
        miss["reason"] for miss in compiled["second"]["near_misses"]
    ]
    assert plain["graphs_missing"] == ""
    changed = {change["pass"]: change for change in plain["changes"]}
    assert changed["raise_ir"]["nodes_after"] < changed["raise_ir"]["nodes_before"]
    assert changed["norm_quant"]["sites"] >= 1
    checker = checked(page.read_text())
    assert "fused_quant" in plain["patterns"]["norm_quant"] or "FUSED" in plain["patterns"]["norm_quant"]
    classes = [value for name, value in checker.attributes if name == "class"]
    assert classes.count("removed") > 10
    assert classes.count("added") > 4


def test_a_graph_file_gives_the_same_table_without_any_daemon(
    compiled: dict[str, Any], tmp_path: Path
) -> None:
    dump = tmp_path / "dump"
    plain = json.loads(run_cli("explain", "fusions", str(compiled["file"]), "--json", "--dump", str(dump)))
    assert numbers(plain["passes"]) == numbers(compiled["second"]["passes"])
    assert plain["near_misses"] == compiled["second"]["near_misses"]
    (before,) = dump.glob("*.norm_quant.before.py")
    (after,) = dump.glob("*.norm_quant.after.py")
    assert "quant_fp8_static" in before.read_text()
    assert before.read_text() != after.read_text()
    assert "def _search" in (dump / "patterns.norm_quant.py").read_text()


@pytest.fixture
def stub(shared_daemon: Daemon) -> wire.ExplainResponse | Any:
    return Endpoint(shared_daemon.endpoint, CompileOptions()).stub()


def test_a_sent_graph_is_explained_and_a_wrong_one_is_refused_by_name(
    compiled: dict[str, Any], stub: Any
) -> None:
    asked = read_graph_file(compiled["file"])
    asked.namespace = NAMESPACE
    answer = stub.Explain(asked, timeout=120)
    assert {row.name: row.matches for row in answer.passes}["norm_quant"] == 2
    assert [dump for dump in answer.dumps if dump.sites]

    def refused(**fields: bytes) -> str:
        bad = wire.ExplainRequest(graph=asked.graph, request=asked.request)
        for name, value in fields.items():
            setattr(bad, name, value)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Explain(bad, timeout=120)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return str(caught.value.details())

    assert "another graph" in refused(graph=asked.graph + b"\\0")
    assert "request" in refused(request=b"")
    assert "the limit is" in refused(graph=b"")


def test_a_key_of_another_namespace_is_not_told(compiled: dict[str, Any], stub: Any) -> None:
    asked = wire.ExplainRequest(namespace="theirs", key=bytes.fromhex(compiled["first"]["key"]))
    with pytest.raises(grpc.RpcError) as caught:
        stub.Explain(asked, timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_daemon_table_is_typed_as_in_the_manifest(compiled: dict[str, Any], stub: Any) -> None:
    asked = wire.ExplainRequest(namespace=NAMESPACE, key=bytes.fromhex(compiled["first"]["key"]))
    answer = stub.Explain(asked, timeout=60)
    assert not answer.dumps
    fused = next(row for row in answer.passes if row.name == "norm_quant")
    assert isinstance(fused, PassRecord)
    assert fused.is_fusion
    assert len(fused.fingerprint) == 32
