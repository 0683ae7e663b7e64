"""One endpoint's gRPC channel: opened at the first use in each process, with a rule for what counts as a sign
of life.

The rule. Scheduling delay is not an outage: when 64 processes start at once on two cores, most of them wait
longer than 250 ms for a healthy daemon. What tells a dead endpoint from a busy one is progress: a connection
whose other side has sent its HTTP/2 settings is alive and gets the long bound; one that has not gets the
short bound, counted in time that this machine really had to give.
"""

from __future__ import annotations

import ipaddress
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuse_cache.client.breaker import Breaker
from fuse_cache.client.errors import DaemonUnavailableError, OptionError
from fuse_cache.client.forklock import ForkLock
from fuse_cache.client.forksafe import SURVIVES_FORK, grpc
from fuse_cache.client.option_checks import Tls
from fuse_cache.client.options import CompileOptions
from fuse_cache.proto import compile_pb2, compile_pb2_grpc

# Inline content is 1 MiB at most for each of up to 1,024 lookup items; a manifest of a 64 MiB artifact is
# about 10 kB.
MAX_MESSAGE_BYTES = 256 << 20
_SLICE_S = 0.02
CONNECT_CAP_S = 2.0  # However busy this machine is: then the local compile may start.
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A shared pool would share back-off state between clients of one process, and with other libraries.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This is also how long one attempt to connect may take: the rule below is the one that ends it.
    ("grpc.min_reconnect_backoff_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),  # Ours know which calls are idempotent.
    ("grpc.enable_http_proxy", 0),
)
_FETCH = f"/{compile_pb2.DESCRIPTOR.services_by_name['Compile'].full_name}/Fetch"
# Channels made before a fork. Closing or collecting them in the child can hang on threads that the child does
# not have.
_inherited: list[Any] = []


class Stub(compile_pb2_grpc.CompileStub):
    """The generated stub, with a `Fetch` that leaves its messages as they came: `chunk_data` reads them."""

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(channel)
        self.fetch_raw: Callable[..., Any] = channel.unary_stream(
            _FETCH, request_serializer=compile_pb2.FetchRequest.SerializeToString
        )


class Endpoint:
    """One daemon address. Safe for concurrent use, and after a fork: each process has a channel of its
    own."""

    def __init__(self, address: str, options: CompileOptions) -> None:
        self.address = address
        self.breaker = Breaker()
        self._options = options
        self._lock = ForkLock()  # Guards the fields below. Not held during calls.
        self._pid = -1
        self._channel: grpc.Channel | None = None
        self._stub: tuple[grpc.Channel, Stub] | None = None  # With the channel that it is on.
        self._alive = threading.Event()  # The other side has sent something on this channel.
        self._failed = threading.Event()  # The connection attempt was refused.

    def stub(self) -> Stub:
        """Return a stub on this process's channel."""
        channel, made = self.channel(), self._stub
        if made is None or made[0] is not channel:
            # Making one registers seven methods: a quarter of the time of a small hit.
            self._stub = made = (channel, Stub(channel))
        return made[1]

    def channel(self) -> grpc.Channel:
        """Return this process's channel, opened now if need be. Opening does no I/O that could block."""
        if self._pid != os.getpid():
            # A fork may have copied the lock in its locked state; the child has this one thread.
            self._lock, self.breaker = ForkLock(), Breaker()
        with self._lock:
            if self._pid != os.getpid() or self._channel is None:
                if self._channel is not None:
                    _inherited.append(self._channel)
                if self._pid not in (-1, os.getpid()) and not SURVIVES_FORK:
                    raise DaemonUnavailableError(
                        "this process was forked after its parent used gRPC: set GRPC_ENABLE_FORK_SUPPORT=1, "
                        "or import fuse_cache.client before grpc"
                    )
                self._pid = os.getpid()
                self._alive, self._failed = threading.Event(), threading.Event()
                self._channel = _open(self.address, self._options)
            return self._channel

    def await_life(self) -> None:
        """Wait until the other side has answered on this channel once.

        Raises:
            DaemonUnavailableError: refused, or no sign of life within `life_bound_s`.
        """
        channel = self.channel()
        alive, failed = self._alive, self._failed
        if alive.is_set():
            return
        failed.clear()
        settled = threading.Event()

        def observe(state: grpc.ChannelConnectivity) -> None:
            if state is grpc.ChannelConnectivity.READY:
                alive.set()
                settled.set()
            elif state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                failed.set()
                settled.set()

        channel.subscribe(observe, try_to_connect=True)
        try:
            _wait(settled, self._options.life_bound_s)
        finally:
            channel.unsubscribe(observe)
        if alive.is_set():
            return
        if failed.is_set():
            raise DaemonUnavailableError(f"no daemon at {self.address}: the connection was refused")
        raise DaemonUnavailableError(
            f"no sign of life from {self.address} within {self._options.life_bound_s:g} s"
        )

    def lost(self) -> None:
        """The connection broke or fell silent: the next call asks for a sign of life again, on a new
        channel."""
        with self._lock:
            if self._pid == os.getpid() and self._channel is not None:
                self._channel.close()
            elif self._channel is not None:
                _inherited.append(self._channel)
            self._channel = None

    def close(self) -> None:
        """Close the channel. A later call opens another."""
        self.lost()


def _wait(event: threading.Event, bound_s: float) -> None:
    """Wait for `event` for `bound_s` of time that this machine could give, and for `cap_s` at most.

    With r runnable threads on c cores, a healthy daemon here would get about c / r of the time it needs:
    waiting counts as much.
    """
    cap_s = max(CONNECT_CAP_S, bound_s)
    start = last = time.monotonic()
    counted = 0.0
    while counted < bound_s:
        left = min(_SLICE_S, bound_s - counted, max(0.0, cap_s - (last - start)))
        if event.wait(left) or left == 0.0:
            return
        now = time.monotonic()
        # A slice that took longer than asked for is our own delay, not the daemon's.
        counted += min(now - last, left) * _share_of_cores()
        last = now


def _share_of_cores() -> float:
    """Return the share of a core that one more thread of this machine gets, 1.0 where nothing waits for a
    core."""
    try:
        runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 1.0
    return min(1.0, (os.cpu_count() or 1) / max(1, runnable))


def is_local(address: str) -> bool:
    """Tell whether only this machine can be behind `address`."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _open(address: str, options: CompileOptions) -> grpc.Channel:
    """Open a channel: plaintext to this machine, TLS elsewhere, unless told otherwise."""
    tls = options.tls if options.tls is not None else not is_local(address)
    if tls is False:
        return grpc.insecure_channel(address, options=_OPTIONS)
    files = tls if isinstance(tls, Tls) else Tls()
    try:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=files.ca.read_bytes() if files.ca else None,
            private_key=files.key.read_bytes() if files.key else None,
            certificate_chain=files.cert.read_bytes() if files.cert else None,
        )
    except OSError as error:
        raise OptionError(f"option tls: {error}") from error
    return grpc.secure_channel(address, credentials, options=_OPTIONS)
