"""What asks for hits: a client that verifies each, one of the bare server, and sixteen of either at once.

The sixteen are threads of several processes, as the ranks of a host are: within one process they would take
turns at its interpreter, and the measurement would be of that. Run as a process:
`hit_clients.py verified|bare ADDRESS FOLDER`; says "ready", waits for a line, makes its calls, and ends.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from fuse_cache.client.client import Client
from fuse_cache.client.remote import Own, Remote
from fuse_cache.client.verify import Want
from fuse_cache.proto.limits import INLINE_BYTES
from tests.bench.synthetic import want_of

PROCESSES, THREADS = 4, 4
ROUNDS = 200  # calls of each thread
SIZE_BYTES = 64 << 10
ROWS = 1  # `synthetic.want_of` of this is published with SIZE_BYTES


class Verified:
    """A client that keeps nothing: each hit is a lookup, a fetch where it is large, and every check."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._checker = client._checker(client.known())

    def get(self, want: Want) -> int:
        """Return the bytes of one verified hit."""
        client = self._client
        answer = client.transport.lookup(client.lookup_request([want], ""))
        found = answer.results[0]
        assert found.found
        remote = Remote(client.transport, client.reporter, self._checker, Own())
        artifact = remote.take(want, found.manifest, found.inline_content)
        assert artifact is not None
        return len(artifact.content)


def bare_call(channel: grpc.Channel) -> Callable[[int], int]:
    """Return what gets so many bytes from the bare server."""
    unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/bare.Bare/Get")
    stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/bare.Bare/Stream")

    def get(size: int) -> int:
        request = str(size).encode()
        if size <= INLINE_BYTES:
            return len(unary(request, timeout=30))
        return len(b"".join(stream(request, timeout=30)))

    return get


def rate(kind: str, address: str, folder: Path) -> float:
    """Return calls a second of all threads of all processes together, starts and first calls left out."""
    command = [sys.executable, __file__, kind, address, str(folder)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        began = time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"done\n"
        return PROCESSES * THREADS * ROUNDS / (time.perf_counter() - began)
    finally:
        for process in processes:
            process.communicate()


def _work(call: Callable[[], int]) -> None:
    for _ in range(3):  # The connection is there, and all code has run once.
        assert call() == SIZE_BYTES
    print("ready", flush=True)
    sys.stdin.readline()

    def calls(_: int) -> None:
        for _ in range(ROUNDS):
            call()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(calls, range(THREADS)))  # Raises what a thread raised.
    print("done", flush=True)


def main(kind: str, address: str, folder: str) -> None:
    """Be one of the processes."""
    if kind == "bare":
        with grpc.insecure_channel(address) as channel:
            bare = bare_call(channel)
            _work(lambda: bare(SIZE_BYTES))
        return
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        client = Client({"endpoint": address, "cache_dir": cache})
        verified, want = Verified(client), want_of(ROWS)
        _work(lambda: verified.get(want))
        client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
