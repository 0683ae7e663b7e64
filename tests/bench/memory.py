"""Peak memory of the daemon under eight slow readers of 64 MiB and 64 hostile uploads."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil

from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.compile_pb2 import (
    CompileRequest,
    CompileStart,
    FetchRequest,
    GraphChunk,
    LookupItem,
    LookupRequest,
)
from fuse_cache.proto.compile_pb2_grpc import CompileStub
from fuse_cache.proto.limits import CHUNK_BYTES, GraphLimits
from fuse_cache.proto.toolchain import local_toolchain
from tests.bench.row import Row
from tests.bench.synthetic import TARGET, publish, want_of
from tests.daemon import running_daemon

MIB = 1 << 20
READERS, UPLOADS = 8, 64
MEMORY_TIER = 64 * MIB
READ_S = 10.0


def _slow_read(endpoint: str, digest: bytes) -> None:
    with grpc.insecure_channel(endpoint) as channel:
        call = CompileStub(channel).Fetch(
            FetchRequest(namespace="default", content_digest=digest), timeout=READ_S + 5
        )
        end = time.monotonic() + READ_S
        for _ in call:
            time.sleep(0.5)
            if time.monotonic() > end:
                break
        call.cancel()


def _hostile_upload(endpoint: str, number: int) -> None:
    """Announce a graph of the largest size allowed and send noise, as fast as the daemon takes it."""
    want = want_of(1000 + number)
    size = GraphLimits().size_bytes

    def messages() -> Iterator[CompileRequest]:
        yield CompileRequest(
            start=CompileStart(
                namespace="default", request_digest=want.request_digest, request=want.fields.encode(),
                graph_digest=want.fields.graph_digest, graph_bytes=size,
                toolchain=local_toolchain().to_message(),
            )
        )  # fmt: skip
        for offset in range(0, size, CHUNK_BYTES):
            yield CompileRequest(
                chunk=GraphChunk(
                    data=os.urandom(CHUNK_BYTES), offset=offset, last=offset + CHUNK_BYTES >= size
                )
            )

    with grpc.insecure_channel(endpoint) as channel:
        try:
            for _ in CompileStub(channel).Compile(messages(), timeout=READ_S):
                pass
        except grpc.RpcError:
            pass  # Refused, as it must be; what is measured is what it cost.


def measure() -> list[Row]:
    """Run readers and uploads together and read VmHWM of the daemon process."""
    environment = {"FUSE_CACHE_MEMORY_BYTES": str(MEMORY_TIER)}
    with (
        tempfile.TemporaryDirectory() as name,
        running_daemon(Path(name) / "daemon", env=environment) as daemon,
    ):
        os.environ["FUSE_CACHE_TRUST_DIR"] = daemon.env["FUSE_CACHE_TRUST_DIR"]
        digests = []
        with grpc.insecure_channel(daemon.endpoint) as channel:
            for number in range(READERS):
                want = publish(channel, 2000 + number, 64 * MIB)
                answer = CompileStub(channel).Lookup(
                    LookupRequest(
                        namespace="default", toolchain=local_toolchain().to_message(),
                        items=[
                            LookupItem(request_digest=want.request_digest, target=TARGET, passes=want.passes)
                        ],
                    ), timeout=5,
                )  # fmt: skip
                digests.append(Manifest.FromString(answer.results[0].manifest.manifest).content.digest)
        threads = [threading.Thread(target=_slow_read, args=(daemon.endpoint, digest)) for digest in digests]
        threads += [
            threading.Thread(target=_hostile_upload, args=(daemon.endpoint, i)) for i in range(UPLOADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert daemon.process is not None
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1e3
        rest = psutil.Process(daemon.process.pid).memory_info().rss / 1e6
    bar = 120 + MEMORY_TIER / 1e6 + 256 * MIB / 1e6
    return [
        Row(
            what=f"peak memory, {READERS} slow readers of 64 MiB and {UPLOADS} hostile uploads",
            value=peak,
            unit="MB",
            bar=bar,
        ),
        Row(what="memory afterwards", value=rest, unit="MB"),
    ]
