"""What `dump_dir` says of artifacts of a daemon; tests/e2e/test_round_trip.py has a real one."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from fuse_cache.client.dump import dump_graph, dump_manifest, dump_reports
from fuse_cache.client.reports import GraphReport, pass_row
from fuse_cache.proto.artifact_pb2 import Content, Manifest, PassRecord


def test_a_manifest_is_readable_json_with_its_bytes_as_hex(tmp_path: Path) -> None:
    manifest = Manifest(
        key=b"\xab" * 32,
        target="cpu-avx2",
        content=Content(digest=b"\x01\x02"),
        passes=[PassRecord(name="fuse_norm_quant", on=True, matches=3)],
    )
    dump_manifest(tmp_path / "new", manifest)
    read = json.loads((tmp_path / "new" / f"artifact.{'ab' * 8}.manifest.json").read_text())
    assert (read["key"], read["content"]["digest"]) == ("ab" * 32, "0102")
    assert read["passes"] == [{"name": "fuse_norm_quant", "on": True, "matches": 3}]


def test_an_artifacts_passes_are_a_table_and_local_builds_are_left_out(tmp_path: Path) -> None:
    did = PassRecord(candidates=6, matches=4, milliseconds=1.5, bytes_saved=2048)
    rows = [
        pass_row("noop", True, "level O2", did),
        pass_row("fuse_norm_quant", False, "not for cpu", PassRecord()),
    ]
    report = GraphReport(key="cd" * 32, source="compiled", passes=rows)
    dump_reports(tmp_path, [report, GraphReport(key="", source="local")])
    assert {path.name for path in tmp_path.iterdir()} == {
        f"artifact.{'cd' * 8}.report.json",
        f"artifact.{'cd' * 8}.passes.txt",
    }
    lines = (tmp_path / f"artifact.{'cd' * 8}.passes.txt").read_text().splitlines()
    assert lines[1].split() == ["noop", "on", "4", "6", "1.5", "2048", "level", "O2"]
    assert lines[2].split() == ["fuse_norm_quant", "off", "0", "0", "0.0", "0", "not", "for", "cpu"]


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    with caplog.at_level(logging.WARNING, "fuse_cache.client"):
        dump_graph(tmp_path / "file", b"\x07" * 32, gm)
    assert "dump_dir: graph.0707070707070707.py was not written" in caplog.text
    dump_graph(tmp_path / "folder", b"\x07" * 32, gm)
    assert "def forward" in (tmp_path / "folder" / "graph.0707070707070707.py").read_text()
