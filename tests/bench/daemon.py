"""The daemon process: exec to the first answered lookup, and idle memory.

The fork server may still be loading.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import grpc
import psutil

from fuse_cache.proto.compile_pb2 import LookupItem, LookupRequest
from fuse_cache.proto.compile_pb2_grpc import CompileStub
from tests.bench.row import Row, median_row
from tests.daemon import Daemon

STARTS = 5


def _lookup(endpoint: str, end: float) -> None:
    request = LookupRequest(
        namespace="default", items=[LookupItem(request_digest=os.urandom(32), target="cpu-avx2")]
    )
    while True:
        try:
            with grpc.insecure_channel(endpoint) as channel:
                CompileStub(channel).Lookup(request, timeout=0.5)
            return
        except grpc.RpcError:
            if time.monotonic() > end:
                raise
            time.sleep(0.005)


def measure() -> list[Row]:
    """Start the daemon `STARTS` times on one store; each answers a lookup as soon as it can."""
    starts, idle = [], 0.0
    with tempfile.TemporaryDirectory() as name:
        for number in range(STARTS):
            # As installed: with bytecode beside the modules, which some test machines forbid.
            daemon = Daemon(Path(name) / "daemon", env={"PYTHONDONTWRITEBYTECODE": ""})
            began = time.perf_counter()
            daemon.start(wait=False)
            _lookup(daemon.endpoint, time.monotonic() + 30)
            starts.append((time.perf_counter() - began) * 1e3)
            daemon.wait_ready()
            if number == STARTS - 1:
                time.sleep(2)
                assert daemon.process is not None
                idle = psutil.Process(daemon.process.pid).memory_info().rss / 1e6
            daemon.stop()
    return [
        median_row("exec to the first answered lookup", starts, "ms", 1000),
        Row(what="resident memory of the idle daemon process", value=idle, unit="MB", bar=120),
    ]
