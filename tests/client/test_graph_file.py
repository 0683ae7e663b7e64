"""Graph files: what is written is read again, and everything else is refused with how to make one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuse_cache.client.errors import OptionError
from fuse_cache.client.graph_file import graph_file, read_graph_file
from fuse_cache.proto.limits import GRAPH_LIMITS
from fuse_cache.proto.request import Range, RequestFields

REQUEST = RequestFields(graph_digest=bytes(32), pass_config=b"FCPC\x01\x00", range=Range(), target="cpu-avx2")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "request.fcgraph"
    path.write_bytes(graph_file(b"graph", REQUEST.encode(), "ours"))
    asked = read_graph_file(path)
    assert (asked.graph, asked.request, asked.namespace) == (b"graph", REQUEST.encode(), "ours")


@pytest.mark.parametrize(
    "data",
    [b"", b"no graph file", os.urandom(300), graph_file(b"graph", b""), graph_file(b"", REQUEST.encode())],
)
def test_anything_else_is_refused_with_how_to_make_one(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "request.fcgraph"
    path.write_bytes(data)
    with pytest.raises(OptionError, match="dump_dir"):
        read_graph_file(path)


def test_a_file_larger_than_any_graph_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.fcgraph"
    with path.open("wb") as file:
        file.truncate(GRAPH_LIMITS.size_bytes * 4)
    with pytest.raises(OptionError, match="larger than any graph"):
        read_graph_file(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"gone\.fcgraph: No such file"):
        read_graph_file(tmp_path / "gone.fcgraph")
