"""A verified hit of the daemon's memory tier beside a bare server of its kind, in one run, turn about."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from fuse_cache.client.client import Client
from tests.bench.hit_clients import PROCESSES, THREADS, Verified, bare_call, rate
from tests.bench.row import Row, median_row
from tests.bench.synthetic import publish
from tests.daemon import running_daemon

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 8 * MIB, 64 * MIB)
ROUNDS = {64 * KIB: 400, 8 * MIB: 40, 64 * MIB: 8}


@contextlib.contextmanager
def bare_server(folder: Path) -> Iterator[str]:
    """Run the floor in a process of its own."""
    address = f"unix:{folder / 'bare.sock'}"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("bare.py")), address], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        yield address
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _timed(call: Callable[[], int], size: int) -> float:
    began = time.perf_counter()
    got = call()
    seconds = time.perf_counter() - began
    assert got == size
    return seconds * 1e3


def measure() -> list[Row]:
    """Time hits of three sizes, and sixteen clients at once."""
    rows = []
    options = [("grpc.max_receive_message_length", 8 * MIB)]
    with tempfile.TemporaryDirectory() as name, running_daemon(Path(name) / "daemon") as daemon:
        folder = Path(name)
        os.environ["FUSE_CACHE_TRUST_DIR"] = daemon.env["FUSE_CACHE_TRUST_DIR"]
        client = Client({"endpoint": daemon.endpoint, "cache_dir": str(folder / "cache")})
        verified = Verified(client)
        with bare_server(folder) as address, grpc.insecure_channel(address, options) as floor:
            bare = bare_call(floor)
            with grpc.insecure_channel(daemon.endpoint) as channel:
                wants = {size: publish(channel, rows_, size) for rows_, size in enumerate(SIZES, 1)}
            for size in SIZES:
                ours, theirs = [], []
                for round_ in range(ROUNDS[size] + 3):
                    a = _timed(lambda size=size: verified.get(wants[size]), size)  # type: ignore[misc]  # a default binds it
                    b = _timed(lambda size=size: bare(size), size)  # type: ignore[misc]
                    if round_ >= 3:  # Connections, memory tier and branch predictors are warm.
                        ours.append(a)
                        theirs.append(b)
                label = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
                ratio = statistics.median(ours) / statistics.median(theirs)
                rows += [
                    median_row(f"verified hit, {label}", ours, "ms"),
                    median_row(f"bare grpc.aio server, {label}", theirs, "ms"),
                    Row(what=f"ratio, {label}", value=ratio, unit="x", bar=1.5),
                ]
            mine = rate("verified", daemon.endpoint, folder)
            bares = rate("bare", address, folder)
            clients = f"{PROCESSES} processes of {THREADS} threads, 64 KiB"
            rows += [
                Row(what=f"verified hits a second, {clients}", value=mine, unit="/s"),
                Row(what=f"bare server, {clients}", value=bares, unit="/s"),
                Row(what="ratio", value=mine / bares, unit="x", bar=0.75, at_least=True),
            ]
        client.close()
    return rows
