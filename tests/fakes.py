"""The wire, faked: a daemon that keeps what it is given and misbehaves as it is told. Real gRPC, real
sockets.

`python tests/fakes.py SOCKET TRUST_DIR` runs one as a process, for tests that fork or stop it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from fuse_cache.client.verify import Want
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto import compile_pb2_grpc
from fuse_cache.proto.artifact_pb2 import CompileRange, Manifest, SignedManifest
from fuse_cache.proto.content import describe_content
from fuse_cache.proto.graph_codec import graph_digest
from fuse_cache.proto.limits import CHUNK_BYTES
from fuse_cache.proto.pass_config import PassConfig, PassContext, ResolvedPassConfig
from fuse_cache.proto.request import Ambient, Range, RequestFields, decode_request
from fuse_cache.proto.signing import SigningKey
from fuse_cache.proto.toolchain import local_toolchain
from fuse_cache.proto.trust import open_trust_folder

TARGET = "cpu-avx2"


def resolved_config(**fields: Any) -> ResolvedPassConfig:
    """Return what a PassConfig comes to on the fake's target."""
    return PassConfig(**fields).resolve(PassContext(target=TARGET))


def make_want(
    graph: bytes = b"a graph", *, compile_range: Range | None = None, allow_covering: bool = False
) -> Want:
    """Return a want for graph bytes that no compiler will ever see."""
    fields = RequestFields(
        graph_digest=graph_digest(graph),
        pass_config=resolved_config().encode(),
        range=compile_range or Range(),
        target=TARGET,
        ambient=Ambient(),
    )
    return Want.of(fields, graph, resolved_config(), allow_covering=allow_covering)


def seal(
    fields: RequestFields,
    content: bytes,
    key: SigningKey,
    *,
    namespace: str = "default",
    **changes: Any,
) -> SignedManifest:
    """Return the signed manifest of `content` for a request. `changes` overwrite fields of the manifest."""
    bounds = fields.range
    manifest = Manifest(
        schema=1,
        key=fields.request_digest(),
        request_digest=fields.request_digest(),
        family_digest=fields.family_digest(),
        namespace=namespace,
        graph_digest=fields.graph_digest,
        pass_config_hash=ResolvedPassConfig.decode(fields.pass_config).hash(),
        range=CompileRange(
            lower=bounds.lower,
            upper=bounds.upper,
            symbol_plus_one=0 if bounds.symbol is None else bounds.symbol + 1,
        ),
        target=fields.target,
        epoch="epoch-1",
        toolchain=local_toolchain().to_message(),
        builder=key.builder,
        content=describe_content(content),
        purpose="artifact",
        nodes=3,
    )
    manifest.MergeFrom(Manifest(**changes))
    return key.sign(manifest.SerializeToString())


class FakeDaemon(compile_pb2_grpc.CompileServicer):
    """Answers the Compile service from a dict. Its attributes are what tests turn.

    `entries` by request digest; `contents` by digest. `script` says what a Compile call does, one word after
    the other: "queued:N", "compiling:N" (N events, 50 ms apart), "silent" (for ever), "fail:REASON", "cut",
    "done".
    """

    def __init__(self, key: SigningKey) -> None:
        self.key = key
        self.epoch = "epoch-1"
        self.revoked: list[str] = []
        self.targets: list[str] = []  # instead of the one it has
        self.toolchains: list[wire.ToolchainOffer] = []
        self.revocations_version = 0
        self.entries: dict[bytes, SignedManifest] = {}
        self.contents: dict[bytes, bytes] = {}
        self.content = b"compiled content"
        self.script = "compiling:1 done"
        self.inline = True
        self.lookup_delay_s = 0.0
        self.capabilities_delay_s = 0.0
        self.cut_fetch_after: int | None = None
        self.chunk_delay_s = 0.0
        self.calls: Counter[str] = Counter()
        self.reports: list[wire.ReportItem] = []
        self.uploaded: list[bytes] = []
        self.offsets: list[int] = []
        self.explained = wire.ExplainResponse()

    def put(self, want: Want, content: bytes, **changes: Any) -> SignedManifest:
        """Store content under a request."""
        signed = seal(want.fields, content, self.key, **changes)
        self.contents[describe_content(content).digest] = content
        self.entries[want.request_digest] = signed
        return signed

    def Capabilities(self, request: Any, context: Any) -> wire.CapabilitiesResponse:
        self.calls["Capabilities"] += 1
        time.sleep(self.capabilities_delay_s)
        offer = wire.ToolchainOffer(
            name="own", toolchain=local_toolchain().to_message(), epoch=self.epoch, ready=True,
            targets=[wire.TargetOffer(name=TARGET, way=wire.WAY_PROCESSOR)],
        )  # fmt: skip
        return wire.CapabilitiesResponse(
            targets=self.targets or [TARGET],
            toolchains=self.toolchains or [offer],
            revoked_builders=self.revoked,
            revocations_version=self.revocations_version,
            manifest_schemas=[1],
            builder_keys=[self.key.public_key],
            status="SERVING",
        )

    def Lookup(self, request: wire.LookupRequest, context: Any) -> wire.LookupResponse:
        self.calls["Lookup"] += 1
        time.sleep(self.lookup_delay_s)
        results = []
        for item in request.items:
            signed = self.entries.get(item.request_digest)
            if signed is None:
                results.append(wire.LookupResult())
                continue
            content = self._content_of(signed) if self.inline else b""
            results.append(wire.LookupResult(found=True, manifest=signed, inline_content=content))
        return wire.LookupResponse(
            results=results, epoch=self.epoch, revocations_version=self.revocations_version
        )

    def Fetch(self, request: wire.FetchRequest, context: Any) -> Iterator[wire.FetchChunk]:
        self.calls["Fetch"] += 1
        self.offsets.append(request.offset)
        content = self.contents.get(request.content_digest)
        if content is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "evicted")
        assert content is not None
        for sent, offset in enumerate(range(request.offset, len(content), CHUNK_BYTES)):
            if self.cut_fetch_after is not None and sent >= self.cut_fetch_after:
                self.cut_fetch_after = None
                context.abort(grpc.StatusCode.UNAVAILABLE, "the link broke")
            data = content[offset : offset + CHUNK_BYTES]
            yield wire.FetchChunk(data=data, offset=offset, size_bytes=len(content))
            time.sleep(self.chunk_delay_s)

    def Compile(self, requests: Iterator[wire.CompileRequest], context: Any) -> Iterator[wire.CompileEvent]:
        self.calls["Compile"] += 1
        start = next(requests).start
        yield wire.CompileEvent(key=start.request_digest, need_graph=True)
        graph = b""
        for message in requests:
            assert message.chunk.offset == len(graph)
            graph += message.chunk.data
            if message.chunk.last:
                break
        self.uploaded.append(graph)
        yield from self._play(start.request_digest, decode_request(start.request), context)

    def Wait(self, request: wire.WaitRequest, context: Any) -> Iterator[wire.CompileEvent]:
        self.calls["Wait"] += 1
        signed = self.entries.get(request.key)
        if signed is None:
            yield wire.CompileEvent(key=request.key, unknown=True)
        else:
            done = wire.Done(manifest=signed, inline_content=self._content_of(signed))
            yield wire.CompileEvent(key=request.key, done=done)

    def Report(self, request: wire.ReportRequest, context: Any) -> wire.ReportResponse:
        self.calls["Report"] += 1
        self.reports += request.items
        for item in request.items:
            if item.verdict != wire.VERDICT_USED:  # As the daemon does when its own check agrees.
                self.entries = {
                    digest: signed
                    for digest, signed in self.entries.items()
                    if Manifest.FromString(signed.manifest).key != item.key
                }
        return wire.ReportResponse()

    def Explain(self, request: wire.ExplainRequest, context: Any) -> wire.ExplainResponse:
        return self.explained

    def _content_of(self, signed: SignedManifest) -> bytes:
        return self.contents.get(Manifest.FromString(signed.manifest).content.digest, b"")

    def _play(self, key: bytes, fields: RequestFields, context: Any) -> Iterator[wire.CompileEvent]:
        for word in self.script.split():
            action, _, value = word.partition(":")
            if action in ("queued", "compiling"):
                for number in range(int(value)):
                    if action == "queued":
                        yield wire.CompileEvent(key=key, queued=wire.Queued(position=1))
                    else:
                        event = wire.Compiling(stage="inductor", seconds=number * 0.05)
                        yield wire.CompileEvent(key=key, compiling=event)
                    time.sleep(0.05)
            elif action == "silent":
                while context.is_active():
                    time.sleep(0.05)
                return
            elif action == "fail":
                reason = wire.ErrorReason.Value(f"ERROR_REASON_{value}")
                yield wire.CompileEvent(key=key, failed=wire.Failed(reason=reason, message="it said no"))
            elif action == "cut":
                self.script = "done"
                context.abort(grpc.StatusCode.UNAVAILABLE, "the link broke")
            elif action == "done":
                signed = seal(fields, self.content, self.key)
                self.entries[key] = signed
                self.contents[describe_content(self.content).digest] = self.content
                done = wire.Done(manifest=signed, inline_content=self.content if self.inline else b"")
                yield wire.CompileEvent(key=key, done=done)


@contextlib.contextmanager
def serving(daemon: FakeDaemon, address: str) -> Iterator[str]:
    """Serve a fake for the length of a block."""
    server = grpc.server(futures.ThreadPoolExecutor(16))
    compile_pb2_grpc.add_CompileServicer_to_server(daemon, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield address
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def deaf_listener() -> Iterator[str]:
    """Listen on a port, accept every connection, and never say a word."""
    held: list[socket.socket] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


def main(address: str, trust: str) -> None:
    """Serve 64 MiB for everything that is asked, 0.1 s a chunk, until the process is ended. TRUST_DIR.pid
    appears when it serves."""
    folder = open_trust_folder(create=True, environment={"FUSE_CACHE_TRUST_DIR": trust})
    daemon = FakeDaemon(folder.signing_key())
    daemon.content = bytes(64 << 20)
    daemon.inline = False
    daemon.chunk_delay_s = 0.1
    with serving(daemon, address):
        pid = Path(f"{trust}.pid")
        pid.with_suffix(".new").write_text(str(os.getpid()))
        pid.with_suffix(".new").rename(pid)
        while not daemon.calls["Fetch"]:
            time.sleep(0.01)
        Path(f"{trust}.fetching").touch()
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
