"""A content that is found damaged is no hit of the call that found it, nor of any later one."""

from __future__ import annotations

from pathlib import Path

from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.compile_pb2 import CompileEvent, WaitRequest
from tests.server.harness import CALL_S, FakeDaemon, Piece, compile_piece, lookup, piece


def test_damage_found_by_lookup_compile_or_wait_is_a_miss_of_that_call(tmp_path: Path) -> None:
    pieces = [piece("bytes:100", number=number) for number in (21, 22, 23)]  # No two contents alike.
    with FakeDaemon(tmp_path) as daemon:
        manifests = [_manifest(compile_piece(daemon.stub(), one)) for one in pieces]
    for manifest in manifests:  # While no daemon has them in its memory.
        digest = manifest.content.digest.hex()
        path = tmp_path / "store" / "content" / digest[:2] / digest
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with FakeDaemon(tmp_path) as daemon:
        stub = daemon.stub()
        looked_up, compiled, awaited = pieces
        assert not lookup(stub, looked_up).results[0].found
        _made_anew(daemon, looked_up)
        _made_anew(daemon, compiled)
        (event,) = stub.Wait(WaitRequest(key=manifests[2].key, inline_limit_bytes=1 << 20), timeout=CALL_S)
        assert event.unknown
        _made_anew(daemon, awaited)


def _made_anew(daemon: FakeDaemon, wanted: Piece) -> None:
    done = compile_piece(daemon.stub(), wanted).done
    assert not done.was_stored
    assert done.inline_content
    (result,) = lookup(daemon.stub(), wanted).results
    assert result.found
    assert result.inline_content == done.inline_content


def _manifest(event: CompileEvent) -> Manifest:
    return Manifest.FromString(event.done.manifest.manifest)
