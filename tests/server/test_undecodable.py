"""Requests that cost far more to parse than to send are refused unparsed, and kept by nobody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from fuse_cache.proto.artifact_pb2 import Toolchain
from fuse_cache.proto.compile_pb2 import (
    ExplainRequest,
    LookupItem,
    LookupRequest,
    ReportItem,
    ReportRequest,
    Verdict,
)
from fuse_cache.server.misses import MAX_CHARS, MissLog
from fuse_cache.server.undecodable import CROWDED, UNDECODABLE, patient
from tests.server.harness import CALL_S, FakeDaemon, reason_of

MIB = 1 << 20
LARGEST_ITEM = LookupItem(
    request_digest=bytes(32), family_digest=bytes(32), target="t" * 64, passes=["a_name_of_a_pass"] * 64
)
LARGEST_REPORT = ReportItem(
    key=bytes(32), content_digest=bytes(32), verdict=Verdict.VERDICT_USED, detail="d" * 1024
)
GROUP = b"\xfb\x01\xfc\x01"  # An empty group of a field that no message here has.


@pytest.mark.parametrize(
    "request_",
    [
        LookupRequest(items=[LARGEST_ITEM] * 1024, client_epoch="e" * 100_000),
        ReportRequest(items=[LARGEST_REPORT] * 1024),
        ExplainRequest(graph=bytes(3 * MIB)),
    ],
)
def test_the_largest_request_that_may_be_sent_is_parsed(request_: Any) -> None:
    assert patient(type(request_).FromString)(request_.SerializeToString()) == request_


@pytest.mark.parametrize(
    "data",
    [
        LookupRequest(items=[LookupItem()] * 100_000).SerializeToString(),
        LookupRequest(items=[LookupItem(passes=[""] * 100_000)]).SerializeToString(),
        GROUP + LookupRequest(items=[LookupItem()] * 100_000).SerializeToString(),
        b"\x2a\x80\x80\x00" + LookupRequest(items=[LookupItem()] * 100_000).SerializeToString(),
    ],
    ids=["items", "strings of an item", "a group first", "a length in a long form first"],
)
def test_more_fields_than_any_request_has_are_refused_unparsed(data: bytes) -> None:
    assert LookupRequest.FromString(data)  # gRPC would have parsed it.
    assert patient(LookupRequest.FromString)(data) is CROWDED


def test_long_bytes_that_are_no_message_are_left_to_the_parser() -> None:
    assert patient(LookupRequest.FromString)(b"\xff" * MIB) is UNDECODABLE
    whole = LookupRequest(items=[LARGEST_ITEM] * 1024).SerializeToString()
    assert patient(LookupRequest.FromString)(whole[:-1]) is UNDECODABLE


def test_the_log_of_misses_is_bounded_by_its_texts_too() -> None:
    misses = MissLog()
    for number in range(64):
        misses.add("", number.to_bytes(32, "big"), [("options", "x" * (MAX_CHARS // 16))])
    kept = misses.recent("")
    assert [miss.request_digest[-1] for miss in kept] == list(range(63, 48, -1))
    misses.add("", kept[0].request_digest, [("options", "short")])
    assert len(misses.recent("")) == 15


@pytest.mark.slow
def test_what_hostile_lookups_and_reports_hold_is_bounded(tmp_path: Path) -> None:
    """Before: 90 MB for each refused one until the collector came by, and each target's name for ever."""

    def resident_bytes() -> int:
        pages = Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    long = "t" * (3 * MIB)
    hostile: list[tuple[str, bytes]] = [
        ("Lookup", LookupRequest(items=[LookupItem()] * 900_000).SerializeToString()),
        ("Report", ReportRequest(items=[ReportItem()] * 900_000).SerializeToString()),
        (
            "Lookup",
            LookupRequest(items=[LookupItem(request_digest=bytes(32), target=long)]).SerializeToString(),
        ),
        (
            "Lookup",
            LookupRequest(
                toolchain=Toolchain(torch=long), items=[LookupItem(request_digest=bytes(32))]
            ).SerializeToString(),
        ),
    ]
    with FakeDaemon(tmp_path) as daemon, daemon.channel() as channel:
        before = resident_bytes()
        for number in range(24):
            for method, data in hostile:
                call: Any = channel.unary_unary(f"/fusecache.v1.Compile/{method}")
                with pytest.raises(grpc.RpcError) as raised:
                    call(data + b"\x2a\x04" + number.to_bytes(4, "big"), timeout=CALL_S)
                assert reason_of(raised.value) == "REQUEST_MALFORMED"
        assert resident_bytes() - before < 64 * MIB
