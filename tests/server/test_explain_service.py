"""Explaining a stored artifact: its table always, what needs its graph while the daemon has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.compile_pb2 import ExplainRequest
from tests.server.harness import CALL_S, FakeDaemon, compile_piece, fake_daemons, piece


def test_a_daemon_that_was_restarted_tells_the_table_and_how_to_get_the_rest(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        done = compile_piece(daemon.stub(), piece(number=1)).done
        manifest = Manifest.FromString(done.manifest.manifest)
    with FakeDaemon(tmp_path) as daemon:
        asked = ExplainRequest(key=manifest.key, with_graphs=True)
        answer = daemon.stub().Explain(asked, timeout=CALL_S)
        assert list(answer.passes) == list(manifest.passes)
        assert list(answer.near_misses) == list(manifest.near_misses)
        assert (answer.target, answer.nodes) == (manifest.target, manifest.nodes)
        assert not answer.dumps
        assert "dump_dir" in answer.graphs_missing
        asked.with_graphs = False
        assert daemon.stub().Explain(asked, timeout=CALL_S).graphs_missing == ""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    yield from fake_daemons(tmp_path_factory.mktemp("daemon"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"graph": b"not a graph", "request": piece().request.encode()}, "another graph"),
        ({"graph": piece().graph, "request": b"\x80"}, "request"),
        ({"graph": piece().graph}, "request"),
        ({}, "name a miss, a key or a graph"),
    ],
)
def test_what_cannot_be_explained_is_refused_before_a_worker_starts(
    daemon: FakeDaemon, fields: dict[str, bytes], words: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        daemon.stub().Explain(ExplainRequest(**fields), timeout=CALL_S)  # type: ignore[arg-type]  # bytes alone
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(caught.value.details())
