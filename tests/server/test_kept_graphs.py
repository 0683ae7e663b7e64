"""Graphs of finished jobs: found by key, bounded in bytes, the oldest gone first."""

from __future__ import annotations

from pathlib import Path

from fuse_cache.server.kept_graphs import KeptGraphs


def finished_job(folder: Path, size_bytes: int, mark: bytes = b"g") -> Path:
    folder.mkdir()
    (folder / "graph").write_bytes(mark * size_bytes)
    (folder / "request").write_bytes(b"r" + mark)
    return folder


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_a_kept_graph_is_found_with_its_request_and_an_unknown_key_is_not(tmp_path: Path) -> None:
    kept = KeptGraphs(tmp_path / "graphs")
    kept.keep(key(1), finished_job(tmp_path / "job", 3))
    assert kept.find(key(1)) == (b"ggg", b"rg")
    assert kept.find(key(2)) is None


def test_the_oldest_go_when_there_are_too_many_bytes(tmp_path: Path) -> None:
    kept = KeptGraphs(tmp_path / "graphs", limit_bytes=100)
    for number in range(4):
        kept.keep(key(number), finished_job(tmp_path / f"job{number}", 40))
    assert [kept.find(key(number)) is not None for number in range(4)] == [False, False, True, True]
    assert len(list((tmp_path / "graphs").iterdir())) == 2


def test_one_that_is_larger_than_all_is_not_kept(tmp_path: Path) -> None:
    kept = KeptGraphs(tmp_path / "graphs", limit_bytes=100)
    kept.keep(key(1), finished_job(tmp_path / "job", 101))
    assert kept.find(key(1)) is None


def test_a_key_built_again_replaces_its_graph(tmp_path: Path) -> None:
    kept = KeptGraphs(tmp_path / "graphs", limit_bytes=100)
    for number in range(5):
        kept.keep(key(1), finished_job(tmp_path / f"job{number}", 60, b"%d" % number))
    assert kept.find(key(1)) == (b"4" * 60, b"r4")


def test_a_job_without_files_costs_nothing_but_the_graph(tmp_path: Path) -> None:
    kept = KeptGraphs(tmp_path / "graphs")
    kept.keep(key(1), tmp_path / "nowhere")
    assert kept.find(key(1)) is None
    assert list((tmp_path / "graphs").iterdir()) == []
