"""A daemon process with fake builds, and what is needed to talk to it by hand."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fuse_cache.proto import admin_pb2_grpc, compile_pb2_grpc, graph_codec
from fuse_cache.proto.compile_pb2 import (
    CompileEvent,
    CompileRequest,
    CompileStart,
    GraphChunk,
    LookupItem,
    LookupRequest,
)
from fuse_cache.proto.graph import Graph, Input, Level, Node, NodeKind, Ref, TensorMeta
from fuse_cache.proto.limits import CHUNK_BYTES
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.request import Range, RequestFields
from fuse_cache.proto.toolchain import local_toolchain
from fuse_cache.server.epoch import package_root

FAKES = Path(__file__).parent / "fakes"
READY_S = 60.0  # A test machine under load needs seconds to start Python four times.
CALL_S = 60.0
TARGET = "cpu-avx2"


def until(condition: Callable[[], object], seconds: float = 20.0, what: str = "") -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never came true: {what or condition}"
        time.sleep(0.02)


async def until_async(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for a condition in an event loop."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def tiny_graph(number: int = 1) -> bytes:
    """Return a graph that adds `number` to its input."""
    meta = TensorMeta(dtype="float32", device="cpu", size=(8,), stride=(1,))
    node = Node(NodeKind.FUNCTION, "operator.add", (Ref(0), number), (), meta)
    graph = Graph(Level.DYNAMO, (), (Input(meta),), (node,), (Ref(1),))
    return graph_codec.encode(graph)


@dataclass(frozen=True)
class Piece:
    """One graph and its request."""

    graph: bytes
    request: RequestFields
    namespace: str = ""

    @property
    def start(self) -> CompileStart:
        return CompileStart(
            namespace=self.namespace,
            request_digest=self.request.request_digest(),
            request=self.request.encode(),
            graph_digest=self.request.graph_digest,
            graph_bytes=len(self.graph),
            toolchain=local_toolchain().to_message(),
            inline_limit_bytes=1 << 20,
        )

    @property
    def item(self) -> LookupItem:
        bounds = self.request.range
        config = PassConfig().resolve(PassContext(target=self.request.target))
        item = LookupItem(
            request_digest=self.request.request_digest(),
            family_digest=self.request.family_digest(),
            target=self.request.target,
            passes=config.active_passes(bounds),
        )
        if bounds.symbol is not None:
            item.range.lower, item.range.upper = bounds.lower, bounds.upper
            item.range.symbol_plus_one = bounds.symbol + 1
        return item


def piece(
    script: str = "",
    *,
    number: int = 1,
    namespace: str = "",
    graph: bytes | None = None,
    bounds: Range | None = None,
) -> Piece:
    """Return a piece whose fake build runs `script` (fakes/fake_builds.py)."""
    graph = tiny_graph(number) if graph is None else graph
    request = RequestFields(
        graph_digest=graph_codec.graph_digest(graph),
        pass_config=PassConfig().resolve(PassContext(target=TARGET)).encode(),
        range=bounds or Range(),
        target=TARGET,
        inductor_options=(("fake", f"script={script};"),) if script else (),
    )
    return Piece(graph, request, namespace)


class Call:
    """One Compile call by hand: what to send is decided while events come."""

    def __init__(
        self, stub: compile_pb2_grpc.CompileStub, start: CompileStart, timeout_s: float = CALL_S
    ) -> None:
        self._outgoing: queue.Queue[CompileRequest | None] = queue.Queue()
        self.events: list[CompileEvent] = []
        self.send(CompileRequest(start=start))
        self.stream: Any = stub.Compile(iter(self._outgoing.get, None), timeout=timeout_s)

    def send(self, message: CompileRequest) -> None:
        self._outgoing.put(message)

    def send_graph(self, graph: bytes) -> None:
        for offset in range(0, len(graph), CHUNK_BYTES):
            data = graph[offset : offset + CHUNK_BYTES]
            last = offset + len(data) == len(graph)
            self.send(CompileRequest(chunk=GraphChunk(data=data, offset=offset, last=last)))

    def next(self) -> CompileEvent:
        event: CompileEvent = next(self.stream)
        self.events.append(event)
        return event

    def next_of(self, *kinds: str) -> CompileEvent:
        """Return the next event of one of these kinds."""
        while True:
            event = self.next()
            if event.WhichOneof("event") in kinds:
                return event

    def close(self) -> None:
        self._outgoing.put(None)
        self.stream.cancel()


def compile_piece(
    stub: compile_pb2_grpc.CompileStub, wanted: Piece, timeout_s: float = CALL_S
) -> CompileEvent:
    """Compile as a host does, and return the last event."""
    call = Call(stub, wanted.start, timeout_s)
    try:
        while True:
            event = call.next_of("need_graph", "done", "failed")
            if event.WhichOneof("event") != "need_graph":
                return event
            call.send_graph(wanted.graph)
    finally:
        call.close()


def lookup(
    stub: compile_pb2_grpc.CompileStub, *pieces: Piece, inline: int = 1 << 20, covering: bool = False
) -> Any:
    """Look pieces up and return the response."""
    request = LookupRequest(
        namespace=pieces[0].namespace, toolchain=local_toolchain().to_message(), inline_limit_bytes=inline
    )
    for wanted in pieces:
        item = wanted.item
        item.allow_covering = covering
        request.items.append(item)
    return stub.Lookup(request, timeout=CALL_S)


def reason_of(error: grpc.RpcError) -> str:
    """Return ErrorInfo.reason of a status with details."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "fuse-cache"
    return str(info.reason)


def copy_sources(folder: Path) -> None:
    """Copy all that fingerprints are taken of."""
    ignore = shutil.ignore_patterns("__pycache__", "*.proto", "*.pyi")
    for name in ("proto", "passes", "kernels", "server"):
        shutil.copytree(package_root() / name, folder / name, ignore=ignore)


class FakeDaemon:
    """A daemon process whose builds are fakes."""

    def __init__(self, folder: Path, **options: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.socket = folder / "d.sock"
        self.options: dict[str, object] = {
            "listen": [f"unix:{self.socket}"],
            "http": "",
            "store": str(folder / "store"),
            "work_dir": str(folder / "work"),
            "workers": 2,
            "target": [TARGET],
            **options,
        }
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(FAKES), os.environ.get("PYTHONPATH")))),
            "FUSE_CACHE_TRUST_DIR": str(folder / "trust"),
        }
        self.log_path = folder / "log"
        # A copy of its own: a source that is edited while tests run would make a new epoch under their feet.
        self.sources = folder / "sources"
        if not self.sources.exists():
            copy_sources(self.sources)
        self._channels: list[grpc.Channel] = []

    def start(self, *, wait: bool = True) -> FakeDaemon:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(FAKES / "fake_daemon.py"), json.dumps(self.options), str(self.sources)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment,
            )  # fmt: skip
        if wait:
            self.wait_listening()
        return self

    def wait_listening(self) -> None:
        """Wait by hand: a channel that found nothing waits a second before it tries again."""
        until(
            lambda: self.process.poll() is not None or self._listens(), READY_S, "the daemon does not serve"
        )
        assert self.process.poll() is None, self.log()

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def channel(self) -> grpc.Channel:
        # A channel of its own each time: gRPC shares connections between channels with equal options.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 8 << 20)]
        channel = grpc.insecure_channel(f"unix:{self.socket}", options=options)
        self._channels.append(channel)
        return channel

    def stub(self) -> compile_pb2_grpc.CompileStub:
        return compile_pb2_grpc.CompileStub(self.channel())

    def admin(self) -> admin_pb2_grpc.AdminStub:
        return admin_pb2_grpc.AdminStub(self.channel())

    def log(self) -> str:
        return self.log_path.read_text()

    def stop(self, signal_number: int = signal.SIGTERM, timeout_s: float = 40.0) -> int:
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def __enter__(self) -> FakeDaemon:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def fake_daemons(folder: Path, **options: object) -> Iterator[FakeDaemon]:
    """For fixtures: a running daemon, stopped at the end."""
    with FakeDaemon(folder, **options) as daemon:
        yield daemon
