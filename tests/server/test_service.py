"""The Compile service over the wire, with fake builds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.compile_pb2 import (
    CapabilitiesRequest,
    CompileRequest,
    ErrorReason,
    ExplainRequest,
    FetchRequest,
    GraphChunk,
    LookupRequest,
    ReportItem,
    ReportRequest,
    Verdict,
    WaitRequest,
)
from fuse_cache.proto.content import verify_content
from fuse_cache.proto.limits import CHUNK_BYTES, GRAPH_LIMITS
from fuse_cache.proto.request import Range
from fuse_cache.proto.signing import TrustSet, verify
from fuse_cache.proto.toolchain import local_toolchain
from fuse_cache.proto.trust import open_trust_folder
from tests.server.harness import (
    CALL_S,
    Call,
    FakeDaemon,
    compile_piece,
    fake_daemons,
    lookup,
    piece,
    reason_of,
    tiny_graph,
    until,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    yield from fake_daemons(tmp_path_factory.mktemp("daemon"))


def test_a_compiled_piece_is_signed_stored_and_found_again(daemon: FakeDaemon) -> None:
    stub, wanted = daemon.stub(), piece(number=11)
    assert not lookup(stub, wanted).results[0].found
    done = compile_piece(stub, wanted).done
    assert not done.was_stored
    trust = open_trust_folder(False, {"FUSE_CACHE_TRUST_DIR": str(daemon.folder / "trust")})
    manifest = verify(done.manifest, TrustSet(keys=frozenset(trust.trusted_keys())))
    assert manifest.request_digest == wanted.request.request_digest()
    assert manifest.graph_digest == wanted.request.graph_digest
    assert manifest.target == "cpu-avx2"
    assert manifest.nodes == 7
    verify_content(manifest.content, done.inline_content)
    assert [p.matches for p in manifest.passes if p.name == "norm_quant"] == [2]
    assert getattr(manifest.near_misses[0], "pass") == "norm_quant"
    assert {"request_digest", "torch_fingerprint", "graph"} <= {field.name for field in manifest.key_fields}

    response = lookup(stub, wanted)
    (result,) = response.results
    assert result.found
    assert result.tier == "memory"
    assert result.manifest == done.manifest
    assert result.inline_content == done.inline_content
    assert response.epoch == manifest.epoch
    again = compile_piece(stub, wanted).done
    assert again.was_stored
    assert again.manifest == done.manifest


def test_a_lookup_answers_in_order_and_never_compiles(daemon: FakeDaemon) -> None:
    stub = daemon.stub()
    known, unknown = piece(number=12), piece(number=13)
    compile_piece(stub, known)
    found = [result.found for result in lookup(stub, unknown, known, unknown).results]
    assert found == [False, True, False]
    assert not lookup(stub, known, inline=0).results[0].inline_content


def test_another_namespace_sees_nothing(daemon: FakeDaemon) -> None:
    stub = daemon.stub()
    ours = piece(number=14, namespace="ours")
    done = compile_piece(stub, ours).done
    theirs = piece(number=14, namespace="theirs")
    assert not lookup(stub, theirs).results[0].found
    manifest = Manifest.FromString(done.manifest.manifest)
    digest = manifest.content.digest
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Fetch(FetchRequest(namespace="theirs", content_digest=digest), timeout=CALL_S))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    fetched = list(stub.Fetch(FetchRequest(namespace="ours", content_digest=digest), timeout=CALL_S))
    assert b"".join(chunk.data for chunk in fetched) == done.inline_content
    (event,) = stub.Wait(WaitRequest(namespace="theirs", key=manifest.key), timeout=CALL_S)
    assert event.WhichOneof("event") == "unknown"


def test_large_content_is_fetched_in_chunks_and_from_an_offset(daemon: FakeDaemon) -> None:
    """Case 10: 5 MiB do not go through one message."""
    stub = daemon.stub()
    done = compile_piece(stub, piece("bytes:5242880", number=15)).done
    assert not done.inline_content
    content = Manifest.FromString(done.manifest.manifest).content
    assert content.size_bytes > 5 << 20
    chunks = list(stub.Fetch(FetchRequest(content_digest=content.digest), timeout=CALL_S))
    assert max(len(chunk.data) for chunk in chunks) == CHUNK_BYTES
    whole = b"".join(chunk.data for chunk in chunks)
    verify_content(content, whole)
    offset = 3 * CHUNK_BYTES
    rest = list(stub.Fetch(FetchRequest(content_digest=content.digest, offset=offset), timeout=CALL_S))
    assert b"".join(chunk.data for chunk in rest) == whole[offset:]
    for bad in (7, 100 * CHUNK_BYTES):
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Fetch(FetchRequest(content_digest=content.digest, offset=bad), timeout=CALL_S))
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


def test_a_covering_lookup_takes_a_wider_range_under_the_same_passes(daemon: FakeDaemon) -> None:
    stub = daemon.stub()
    wide = piece(number=16, bounds=Range(symbol=0, lower=1, upper=2048))
    narrow = piece(number=16, bounds=Range(symbol=0, lower=1, upper=512))
    beyond = piece(number=16, bounds=Range(symbol=0, lower=1, upper=4096))
    done = compile_piece(stub, wide).done
    assert not lookup(stub, narrow).results[0].found
    (result,) = lookup(stub, narrow, covering=True).results
    assert result.manifest == done.manifest
    assert not lookup(stub, beyond, covering=True).results[0].found


def test_a_call_without_a_deadline_is_refused(daemon: FakeDaemon) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        daemon.stub().Lookup(LookupRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(caught.value) == "DEADLINE_REQUIRED"


@pytest.mark.parametrize(
    ("field", "value", "code", "reason"),
    [
        ("request_digest", b"short", "INVALID_ARGUMENT", "REQUEST_MALFORMED"),
        ("request_digest", bytes(32), "INVALID_ARGUMENT", "DIGEST_MISMATCH"),
        ("graph_digest", bytes(32), "INVALID_ARGUMENT", "DIGEST_MISMATCH"),
        ("request", b"\x80garbage", "INVALID_ARGUMENT", "REQUEST_MALFORMED"),
        ("request", bytes(100_000), "INVALID_ARGUMENT", "REQUEST_MALFORMED"),
        ("namespace", "../x\n", "INVALID_ARGUMENT", "REQUEST_MALFORMED"),
        ("model", "x" * 300, "INVALID_ARGUMENT", "REQUEST_MALFORMED"),
        ("graph_bytes", GRAPH_LIMITS.size_bytes + 1, "INVALID_ARGUMENT", "GRAPH_TOO_LARGE"),
        ("graph_bytes", 0, "INVALID_ARGUMENT", "GRAPH_TOO_LARGE"),
    ],
)
def test_a_malformed_start_is_refused_by_name(
    daemon: FakeDaemon, field: str, value: object, code: str, reason: str
) -> None:
    start = piece(number=17).start
    setattr(start, field, value)
    call = Call(daemon.stub(), start)
    with pytest.raises(grpc.RpcError) as caught:
        call.next()
    assert (caught.value.code().name, reason_of(caught.value)) == (code, reason)
    call.close()


def test_an_unknown_target_and_another_toolchain_are_refused_with_what_is_on_offer(
    daemon: FakeDaemon,
) -> None:
    """Case 57: a host with another torch learns it before it sends a graph."""
    start = piece(number=18).start
    start.toolchain.torch = "2.11.0"
    start.toolchain.torch_fingerprint = bytes(32)
    call = Call(daemon.stub(), start)
    with pytest.raises(grpc.RpcError) as caught:
        call.next()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(caught.value) == "TOOLCHAIN_MISMATCH"
    details = str(caught.value.details())
    assert "2.11.0" in details
    assert f"on offer: {local_toolchain()}" in details
    call.close()


def test_the_upload_is_checked_against_its_announcement(daemon: FakeDaemon) -> None:
    stub, wanted = daemon.stub(), piece(number=19)

    def refused(*chunks: GraphChunk, end: bool = False) -> tuple[str, str]:
        call = Call(stub, wanted.start)
        call.next_of("need_graph")
        for chunk in chunks:
            call.send(CompileRequest(chunk=chunk))
        if end:
            call._outgoing.put(None)
        with pytest.raises(grpc.RpcError) as caught:
            call.next_of("done", "failed")
        call.close()
        return caught.value.code().name, reason_of(caught.value)

    size = len(wanted.graph)
    damaged = bytes([wanted.graph[0] ^ 1]) + wanted.graph[1:]
    assert refused(GraphChunk(data=damaged, last=True)) == ("DATA_LOSS", "DIGEST_MISMATCH")
    assert refused(GraphChunk(data=wanted.graph[:-1], last=True)) == ("DATA_LOSS", "DIGEST_MISMATCH")
    assert refused(GraphChunk(data=wanted.graph + b"x")) == ("DATA_LOSS", "DIGEST_MISMATCH")
    assert refused(GraphChunk(data=b"x", offset=5)) == ("INVALID_ARGUMENT", "REQUEST_MALFORMED")
    assert refused(GraphChunk(data=bytes(CHUNK_BYTES + 1))) == ("INVALID_ARGUMENT", "REQUEST_MALFORMED")
    assert refused(GraphChunk()) == ("INVALID_ARGUMENT", "REQUEST_MALFORMED")
    assert refused(GraphChunk(data=wanted.graph[: size // 2]), end=True) == ("DATA_LOSS", "DIGEST_MISMATCH")
    # None of them did harm to those who come after.
    assert compile_piece(stub, wanted).WhichOneof("event") == "done"


@pytest.mark.parametrize("graph", [b"not a graph at all", tiny_graph(20)[:-3], tiny_graph(20) + b"\0"])
def test_bytes_that_are_no_graph_are_refused_and_remembered(daemon: FakeDaemon, graph: bytes) -> None:
    stub, wanted = daemon.stub(), piece(graph=graph)
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as caught:
            compile_piece(stub, wanted)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(caught.value) == "GRAPH_MALFORMED"


def test_a_build_that_fails_is_an_event_with_reason_and_stage(daemon: FakeDaemon) -> None:
    stub = daemon.stub()
    wanted = piece("fail:NOT_CACHEABLE", number=21)
    failed = compile_piece(stub, wanted).failed
    assert failed.reason == ErrorReason.ERROR_REASON_NOT_CACHEABLE
    assert failed.stage == "inductor"
    assert failed.deterministic
    call = Call(stub, wanted.start)
    again = call.next()  # At once, without asking for the graph.
    assert again.failed.deterministic
    assert 0 < again.failed.retry_after_s <= 60
    call.close()


def test_a_death_is_never_remembered(daemon: FakeDaemon, tmp_path: Path) -> None:
    stub, notes = daemon.stub(), tmp_path / "notes"
    wanted = piece(f"note:{notes} die", number=22)
    for _ in range(2):
        failed = compile_piece(stub, wanted).failed
        assert failed.reason == ErrorReason.ERROR_REASON_WORKER_DIED
        assert not failed.deterministic
    assert len(notes.read_text().splitlines()) == 2


def test_events_come_at_least_once_a_second(daemon: FakeDaemon) -> None:
    stub, wanted = daemon.stub(), piece("sleep:2.5", number=23)
    call = Call(stub, wanted.start)
    call.next_of("need_graph")
    call.send_graph(wanted.graph)
    times = [time.monotonic()]
    while call.next().WhichOneof("event") != "done":
        times.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) < 4.0  # Four times the promise.
    assert any(event.compiling.stage == "inductor" for event in call.events)
    call.close()


def test_wait_re_attaches_and_answers_what_is_stored(daemon: FakeDaemon, tmp_path: Path) -> None:
    stub, gate = daemon.stub(), tmp_path / "gate"
    wanted = piece(f"wait:{gate}", number=24)
    call = Call(stub, wanted.start)
    key = call.next_of("need_graph").key
    call.send_graph(wanted.graph)
    call.next_of("compiling")
    waiting = stub.Wait(WaitRequest(key=key, inline_limit_bytes=1 << 20), timeout=CALL_S)
    assert next(waiting).WhichOneof("event") == "compiling"
    assert lookup(stub, wanted).results[0].running
    gate.touch()
    last = list(waiting)[-1]
    assert last.done.inline_content
    assert call.next_of("done").done.manifest == last.done.manifest
    call.close()
    (stored,) = stub.Wait(WaitRequest(key=key), timeout=CALL_S)
    assert stored.done.was_stored


def test_capabilities_say_what_is_spoken_built_and_trusted(daemon: FakeDaemon) -> None:
    answer = daemon.stub().Capabilities(CapabilitiesRequest(), timeout=CALL_S)
    assert list(answer.targets) == ["cpu-avx2"]
    assert answer.limits.chunk_bytes == CHUNK_BYTES
    assert answer.status == "SERVING"
    assert len(answer.builder_keys[0]) == 32
    until(lambda: daemon.stub().Capabilities(CapabilitiesRequest(), timeout=CALL_S).toolchains[0].ready)


def test_a_miss_is_explained_by_the_fields_that_differ(daemon: FakeDaemon) -> None:
    stub = daemon.stub()
    compile_piece(stub, piece("sleep:0", number=25))
    other = piece("sleep:0.0", number=25)
    compile_piece(stub, other)
    answer = stub.Explain(ExplainRequest(miss_request_digest=other.request.request_digest()), timeout=CALL_S)
    (miss,) = answer.misses
    nearest = miss.nearest[0] if miss.nearest[0].differences else miss.nearest[1]
    assert [difference.name for difference in nearest.differences] == ["inductor_options.fake"]
    assert nearest.differences[0].stored == "script=sleep:0;"


def test_a_bad_report_alone_removes_nothing(daemon: FakeDaemon) -> None:
    stub, wanted = daemon.stub(), piece(number=26)
    manifest = Manifest.FromString(compile_piece(stub, wanted).done.manifest.manifest)
    item = ReportItem(key=manifest.key, verdict=Verdict.VERDICT_BAD_DIGEST, detail="liar")
    stub.Report(ReportRequest(items=[item]), timeout=CALL_S)
    assert lookup(stub, wanted).results[0].found
    with pytest.raises(grpc.RpcError) as caught:
        stub.Report(ReportRequest(items=[ReportItem(key=manifest.key)]), timeout=CALL_S)
    assert reason_of(caught.value) == "REQUEST_MALFORMED"
