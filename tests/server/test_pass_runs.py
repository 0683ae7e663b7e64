"""What a worker tells of the passes goes through one message, or without its drawings."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.artifact_pb2 import PassRecord
from fuse_cache.server.daemon import OPTIONS
from fuse_cache.server.pass_runs import MOST_BYTES, fitting


def answer(sites: int) -> bytes:
    node = wire.DumpNode(name="n" * 50, call="c" * 100)
    dump = wire.GraphDump(sites=[wire.DumpSite(before=[node] * 20, times=1)] * sites)
    return wire.ExplainResponse(passes=[PassRecord(name="p")], dumps=[dump]).SerializeToString()


def test_an_answer_that_fits_comes_whole() -> None:
    response = fitting(answer(10), 1 << 20)
    assert len(response.dumps[0].sites) == 10
    assert response.graphs_missing == ""


def test_one_that_does_not_keeps_its_table_and_says_what_to_do_for_the_drawings() -> None:
    response = fitting(answer(1000), 1 << 20)
    assert [record.name for record in response.passes] == ["p"]
    assert not response.dumps
    assert "graph file" in response.graphs_missing


def test_what_is_no_answer_is_told_from_one() -> None:
    with pytest.raises(DecodeError):
        fitting(b"\xff\xff\xff")


def test_the_limit_is_below_what_the_daemon_sends() -> None:
    assert dict(OPTIONS)["grpc.max_send_message_length"] > MOST_BYTES
