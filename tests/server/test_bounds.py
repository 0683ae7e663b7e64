"""Memory stays bounded whatever readers and uploaders do (the memory row of the design's speed table)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import grpc
import pytest

from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.compile_pb2 import CompileRequest, FetchRequest, GraphChunk
from fuse_cache.proto.content import ContentVerifier
from fuse_cache.proto.limits import CHUNK_BYTES, GRAPH_LIMITS
from tests.server.harness import CALL_S, Call, FakeDaemon, compile_piece, lookup, piece, reason_of, until

pytestmark = pytest.mark.apart

MIB = 1 << 20
MEMORY_TIER = 32 * MIB


def peak_bytes(daemon: FakeDaemon) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_slow_readers_and_hostile_uploads_do_not_grow_the_daemon(tmp_path: Path) -> None:
    """Eight readers of 64 MiB each that read nothing, and 64 uploads of the largest graph that is none."""
    with FakeDaemon(tmp_path, memory_bytes=MEMORY_TIER) as daemon:
        stub = daemon.stub()
        contents = []
        for number in range(8):
            done = compile_piece(stub, piece(f"bytes:{64 * MIB}", number=number)).done
            contents.append(Manifest.FromString(done.manifest.manifest).content)
        built = peak_bytes(daemon)
        readers = []
        for content in contents:
            stream = daemon.stub().Fetch(FetchRequest(content_digest=content.digest), timeout=CALL_S)
            readers.append(stream)
        time.sleep(1.0)  # They have opened; nobody reads.
        errors: list[str] = []

        def upload(number: int) -> None:
            graph = number.to_bytes(8, "big") + bytes(GRAPH_LIMITS.size_bytes - 8)
            try:
                compile_piece(daemon.stub(), piece(graph=graph))
            except grpc.RpcError as error:
                errors.append(reason_of(error))

        uploads = [threading.Thread(target=upload, args=(number,)) for number in range(64)]
        for thread in uploads:
            thread.start()
        for thread in uploads:
            thread.join()
        assert set(errors) <= {"GRAPH_MALFORMED", "GRAPH_TOO_LARGE", "QUEUE_FULL", "QUOTA"}
        assert len(errors) == 64
        assert peak_bytes(daemon) < 120e6 + MEMORY_TIER + 256 * MIB, f"after building: {built / MIB:.0f} MiB"
        # The slow ones did not starve those who read.
        for stream in readers:
            stream.cancel()
        content = contents[0]
        sizes = [len(c.data) for c in stub.Fetch(FetchRequest(content_digest=content.digest), timeout=CALL_S)]
        assert sum(sizes) == content.size_bytes


@pytest.mark.slow
def test_an_artifact_of_300_megabytes_arrives_whole(tmp_path: Path) -> None:
    """Case 10."""
    with FakeDaemon(tmp_path) as daemon:
        stub = daemon.stub()
        done = compile_piece(stub, piece(f"bytes:{300 * MIB}")).done
        content = Manifest.FromString(done.manifest.manifest).content
        verifier = ContentVerifier(content)
        for chunk in stub.Fetch(FetchRequest(content_digest=content.digest), timeout=CALL_S):
            verifier.feed(chunk.data)
        assert len(verifier.finish()) > 300 * MIB


def test_a_reader_that_stops_holds_no_more_than_a_window(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, memory_bytes=64 * MIB) as daemon:
        stub = daemon.stub()
        done = compile_piece(stub, piece(f"bytes:{16 * MIB}")).done
        content = Manifest.FromString(done.manifest.manifest).content
        list(stub.Fetch(FetchRequest(content_digest=content.digest), timeout=CALL_S))
        before = peak_bytes(daemon)
        streams = [
            daemon.stub().Fetch(FetchRequest(content_digest=content.digest), timeout=CALL_S) for _ in range(8)
        ]
        for stream in streams:
            assert len(next(stream).data) == CHUNK_BYTES
        time.sleep(0.5)
        # One copy of the content for all (it is there already), and per stream what the transport takes in.
        assert peak_bytes(daemon) - before < 8 * 4 * CHUNK_BYTES + 8 * MIB
        for stream in streams:
            stream.cancel()


def test_an_endless_upload_is_cut_at_what_it_announced(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        wanted = piece()
        call = Call(daemon.stub(), wanted.start)
        call.next_of("need_graph")
        for number in range(16):  # 8 MiB where a few hundred bytes were announced.
            call.send(CompileRequest(chunk=GraphChunk(data=bytes(CHUNK_BYTES), offset=number * CHUNK_BYTES)))
        with pytest.raises(grpc.RpcError) as caught:
            call.next_of("done", "failed")
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        call.close()
        until(lambda: not list((tmp_path / "work").glob("daemon-*/job-*")))


def test_a_message_beyond_the_limit_does_not_reach_the_daemon(tmp_path: Path) -> None:
    """Case 10: the limit is the server's own, and it goes on serving."""
    with FakeDaemon(tmp_path) as daemon:
        start = piece().start
        start.request = bytes(5 * MIB)
        call = Call(daemon.stub(), start)
        with pytest.raises(grpc.RpcError):
            call.next()
        call.close()
        assert lookup(daemon.stub(), piece()).results


def test_a_full_queue_says_so_and_when_to_come_again(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, workers=1, max_queue=1) as daemon:
        stub, gate = daemon.stub(), tmp_path / "gate"
        calls = []
        for number in range(2):  # One runs, one waits.
            wanted = piece(f"wait:{gate}", number=number)
            call = Call(stub, wanted.start)
            call.next_of("need_graph")
            call.send_graph(wanted.graph)
            call.next_of("compiling" if number == 0 else "queued")
            calls.append(call)
        with pytest.raises(grpc.RpcError) as caught:
            compile_piece(stub, piece(number=9))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(caught.value) == "QUEUE_FULL"
        gate.touch()
        for call in calls:
            call.next_of("done")
            call.close()
