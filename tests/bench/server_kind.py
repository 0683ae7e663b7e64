"""What a 64 KiB inline lookup hit costs beside a bare gRPC server, for both kinds of server that grpcio has.

The same client sends the same request bytes to four servers in turn, interleaved: a bare asyncio server and a
bare thread server that answer a constant of the same size, the daemon (asyncio), and the daemon's own lookup
code behind a thread server. Run: python tests/bench/server_kind.py [rounds]. Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fuse_cache.proto.compile_pb2 import LookupRequest, LookupResponse
from fuse_cache.proto.toolchain import local_toolchain
from tests.server.harness import FakeDaemon, Piece, compile_piece, piece

METHOD = "/fusecache.v1.Compile/Lookup"
CONTENT_BYTES = 64 * 1024
PER_ROUND = 300
CLIENTS = 16
BURST_S = 2.0

Call = Callable[[bytes], bytes]


def bare_handler(answer: bytes, *, is_async: bool) -> grpc.GenericRpcHandler:
    """Return a service that parses nothing and answers a constant."""

    async def reply_async(_request: bytes, _context: object) -> bytes:
        return answer

    def reply(_request: bytes, _context: object) -> bytes:
        return answer

    chosen: Any = reply_async if is_async else reply
    methods: dict[str, Any] = {"Lookup": grpc.unary_unary_rpc_method_handler(chosen)}
    return grpc.method_handlers_generic_handler("fusecache.v1.Compile", methods)


def serve(kind: str, folder: Path) -> None:
    """Run one server of the comparison in this process, for ever. Prints its port."""
    answer = (folder / "answer").read_bytes()
    if kind == "bare-aio":
        asyncio.run(_serve_aio(answer))
        return
    server = grpc.server(ThreadPoolExecutor(CLIENTS))
    handler = bare_handler(answer, is_async=False) if kind == "bare-threads" else _daemon_handler(folder)
    server.add_generic_rpc_handlers((handler,))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


async def _serve_aio(answer: bytes) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((bare_handler(answer, is_async=True),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def _daemon_handler(folder: Path) -> grpc.GenericRpcHandler:
    """Put the daemon's lookup behind a thread server: a memory hit never waits, so a thread can run it."""
    from fuse_cache.server.builders import Builder, Builders
    from fuse_cache.server.cache.compose import open_store
    from fuse_cache.server.epoch import Sources, take_epoch, take_stamps
    from fuse_cache.server.fetch import Grants
    from fuse_cache.server.freshness import Freshness
    from fuse_cache.server.interpreter import own_interpreter
    from fuse_cache.server.jobs import Jobs
    from fuse_cache.server.lookup import Lookups
    from fuse_cache.server.metrics import Metrics
    from fuse_cache.server.misses import MissLog

    root = folder / "sources"
    whose = own_interpreter(root)
    stamps = take_stamps(whose)
    epoch = take_epoch(stamps, whose, op_modules=(), memo=folder / "work" / "fingerprints.json")
    store, metrics = open_store(folder / "store"), Metrics()
    freshness = Freshness(Sources(epoch, stamps, whose, folder / "memo"), on_change=lambda: None)
    nothing: Any = None
    builders = Builders([Builder(name="own", freshness=freshness, link=nothing, pool=nothing, seeds=nothing)])
    jobs = Jobs(max_queue=1, now_s=time.monotonic)
    lookups = Lookups(
        store=store, jobs=jobs, builders=builders, grants=Grants(store),
        misses=MissLog(), metrics=metrics, revocations=lambda: 0,
    )  # fmt: skip
    warm = LookupRequest.FromString((folder / "request").read_bytes())
    assert (
        LookupResponse.FromString(asyncio.run(lookups.answer(warm))).results[0].found
    )  # Now it is in memory.

    def reply(request: bytes, _context: object) -> bytes:
        began = time.perf_counter()
        coroutine = lookups.answer(LookupRequest.FromString(request))
        try:
            coroutine.send(None)
        except StopIteration as stop:
            metrics.succeeded("Lookup", time.perf_counter() - began)
            response: bytes = stop.value
            return response
        raise AssertionError("a memory hit waited")

    methods: dict[str, Any] = {"Lookup": grpc.unary_unary_rpc_method_handler(reply)}
    return grpc.method_handlers_generic_handler("fusecache.v1.Compile", methods)


def connect(port: int) -> Call:
    options = [("grpc.use_local_subchannel_pool", 1)]
    method: Any = grpc.insecure_channel(f"127.0.0.1:{port}", options=options).unary_unary(METHOD)
    return lambda request: method(request, timeout=30, wait_for_ready=True)


def milliseconds(call: Call, request: bytes, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call(request)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def hits_per_second(port: int, request: bytes) -> float:
    counts = [0] * CLIENTS
    end = time.perf_counter() + BURST_S

    def client(number: int) -> None:
        call = connect(port)
        while time.perf_counter() < end:
            call(request)
            counts[number] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / BURST_S


def lookup_request(wanted: Piece) -> bytes:
    request = LookupRequest(toolchain=local_toolchain().to_message(), inline_limit_bytes=1 << 20)
    request.items.append(wanted.item)
    return request.SerializeToString()


def measure(rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        daemon = FakeDaemon(folder, listen=[f"unix:{folder / 'd.sock'}", "127.0.0.1:0"]).start()
        servers: list[subprocess.Popen[str]] = []
        try:
            wanted = piece(f"bytes:{CONTENT_BYTES}")
            compile_piece(daemon.stub(), wanted)
            serving = next(line for line in daemon.log().splitlines() if '"serving"' in line)
            ports = {"daemon-aio": int(json.loads(serving)["listen"][1].rpartition(":")[2])}
            request = lookup_request(wanted)
            (folder / "request").write_bytes(request)
            (folder / "answer").write_bytes(connect(ports["daemon-aio"])(request))
            for kind in ("bare-aio", "bare-threads", "daemon-threads"):
                command = [sys.executable, __file__, "--serve", kind, name]
                server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=daemon.environment)
                servers.append(server)
                assert server.stdout is not None
                ports[kind] = int(server.stdout.readline())
            calls = {kind: connect(port) for kind, port in ports.items()}
            times: dict[str, list[float]] = {kind: [] for kind in ports}
            rates: dict[str, list[float]] = {kind: [] for kind in ports}
            for call in calls.values():
                milliseconds(call, request, 50)
            for _ in range(rounds):
                for kind, call in calls.items():
                    times[kind] += milliseconds(call, request, PER_ROUND)
            for _ in range(2):
                for kind, port in ports.items():
                    rates[kind].append(hits_per_second(port, request))
        finally:
            for server in servers:
                server.kill()
                server.wait()
            daemon.stop()
    p50 = {kind: round(statistics.median(values), 3) for kind, values in times.items()}
    p99 = {kind: round(statistics.quantiles(values, n=100)[98], 3) for kind, values in times.items()}
    rate = {kind: round(statistics.median(values)) for kind, values in rates.items()}
    return {
        "load": os.getloadavg()[0],
        "p50_ms": p50,
        "p99_ms": p99,
        "hits_per_s_16": rate,
        "p50_ratio": {k: round(p50[f"daemon-{k}"] / p50[f"bare-{k}"], 2) for k in ("aio", "threads")},
        "rate_ratio": {k: round(rate[f"daemon-{k}"] / rate[f"bare-{k}"], 2) for k in ("aio", "threads")},
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        print(json.dumps(measure(int(sys.argv[1]) if sys.argv[1:] else 10), indent=1))
