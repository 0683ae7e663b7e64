"""Calls to the daemons: deadlines, the breaker, the next endpoint, one retry where that is safe, errors in
our own terms.

Bounds (design.md, "When things go wrong"): no sign of life for 250 ms, or no answer to a lookup for 2 s, is
an outage; a compile stream that says nothing for 5 s is left; a fetch may take as long as bytes flow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from fuse_cache.client.channel import Endpoint
from fuse_cache.client.errors import DaemonRefusedError, DaemonTooLateError, DaemonUnavailableError
from fuse_cache.client.forksafe import grpc
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.watchdog import Watch, watchdog
from fuse_cache.proto import compile_pb2 as wire

MAX_FETCH_S = 3600.0  # every call has a deadline; a fetch is bounded by silence, not by this
_T = TypeVar("_T")

# These say that nobody answered, or that another endpoint may; all others are answers.
_OUTAGES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
    }
)


class Transport:
    """The daemons of one option set. Safe for concurrent use and after a fork."""

    def __init__(self, options: CompileOptions) -> None:
        self.options = options
        self.endpoints = [Endpoint(address, options) for address in options.endpoint]

    def lookup(self, request: wire.LookupRequest, timeout_s: float | None = None) -> wire.LookupResponse:
        """Ask for many artifacts. `timeout_s` None: the options' bound; at most that.

        Raises:
            DaemonUnavailableError, DaemonRefusedError
        """
        return self._unary(lambda endpoint: endpoint.stub().Lookup, request, timeout_s=timeout_s)

    def capabilities(self, timeout_s: float | None = None) -> wire.CapabilitiesResponse:
        """Ask what the daemon speaks, builds and trusts. `timeout_s` as of `lookup`.

        Raises:
            DaemonUnavailableError, DaemonRefusedError
        """
        request = wire.CapabilitiesRequest()
        return self._unary(lambda endpoint: endpoint.stub().Capabilities, request, timeout_s=timeout_s)

    def report(self, request: wire.ReportRequest) -> None:
        """Tell what became of artifacts. Not repeated elsewhere: a lost report is no harm, a double one would
        count twice.

        Raises:
            DaemonUnavailableError, DaemonRefusedError
        """
        self._unary(lambda endpoint: endpoint.stub().Report, request, attempts=1)

    def fetch(self, request: wire.FetchRequest) -> Iterator[bytes]:
        """Stream content, as serialised FetchChunks (`fetch_chunk.chunk_data`).

        The caller resumes at another offset if it likes.

        Raises:
            DaemonUnavailableError: DaemonTooLateError when no byte came for `silence_bound_s`.
            DaemonRefusedError
        """
        endpoint = self._choose()
        with self._watched(
            endpoint,
            lambda: endpoint.stub().fetch_raw(request, timeout=MAX_FETCH_S, metadata=self._metadata()),
            self.options.silence_bound_s,
        ) as stream:
            yield from stream

    def wait(self, request: wire.WaitRequest, timeout_s: float) -> Iterator[wire.CompileEvent]:
        """Re-attach to a compilation; as `compile` otherwise."""
        endpoint = self._choose()
        with self._watched(
            endpoint,
            lambda: endpoint.stub().Wait(request, timeout=timeout_s, metadata=self._metadata()),
            self.options.silence_bound_s,
        ) as stream:
            yield from stream

    def compile(
        self, start: wire.CompileStart, graph: bytes, chunk_bytes: int, timeout_s: float
    ) -> Iterator[wire.CompileEvent]:
        """Compile one piece, or join the compilation that runs for it: yields the daemon's events,
        `need_graph` left out.

        Raises:
            DaemonUnavailableError: DaemonTooLateError when no event came for `silence_bound_s`, or no result
                within `timeout_s`.
            DaemonRefusedError
        """
        endpoint = self._choose()
        upload = _Upload(start, graph, chunk_bytes)
        try:
            with self._watched(
                endpoint,
                lambda: endpoint.stub().Compile(iter(upload), timeout=timeout_s, metadata=self._metadata()),
                self.options.silence_bound_s,
            ) as stream:
                for event in stream:
                    if event.WhichOneof("event") == "need_graph":
                        upload.send_graph()
                    else:
                        yield event
        finally:
            upload.end()

    def close(self) -> None:
        """Close all channels."""
        for endpoint in self.endpoints:
            endpoint.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.options.token}"),) if self.options.token else ()

    def _choose(self) -> Endpoint:
        """Return the first endpoint that is alive."""
        problems = []
        for endpoint in self.endpoints:
            if not endpoint.breaker.allows():
                problems.append(f"{endpoint.address} did not answer before, and is asked again in a while")
                continue
            try:
                endpoint.await_life()
            except DaemonUnavailableError as error:
                endpoint.breaker.failed()
                endpoint.lost()
                problems.append(str(error))
                continue
            return endpoint
        raise DaemonUnavailableError("; ".join(problems))

    def _unary(
        self,
        method: Callable[[Endpoint], Callable[..., _T]],
        request: object,
        *,
        attempts: int = 2,
        timeout_s: float | None = None,
    ) -> _T:
        """Make an idempotent call, once more if the connection turned out to be dead."""
        bound_s = self.options.answer_bound_s
        for attempt in range(attempts):
            endpoint = self._choose()
            began = time.monotonic()
            try:
                answer = method(endpoint)(
                    request,
                    # One that ran out already still gets a moment: gRPC takes no deadline in the past.
                    timeout=bound_s if timeout_s is None else max(min(timeout_s, bound_s), 0.01),
                    metadata=self._metadata(),
                )
            except grpc.RpcError as error:
                failure = self._translate(endpoint, error)
                # A connection that an old daemon left behind breaks at once; a silent one has used up the
                # caller's patience.
                again = attempt + 1 < attempts and time.monotonic() - began < self.options.lookup_timeout_s
                if isinstance(failure, DaemonUnavailableError) and again:
                    continue
                raise failure from error
            endpoint.breaker.succeeded()
            return answer
        raise AssertionError("unreachable")

    def _watched(self, endpoint: Endpoint, call: Callable[[], Any], silence_s: float) -> _Watched:
        return _Watched(self, endpoint, call, silence_s)

    def _translate(self, endpoint: Endpoint, error: grpc.RpcError) -> Exception:
        """Turn a gRPC error into ours, and tell the breaker. The one border for this."""
        code, details = error.code(), error.details() or ""
        if code in _OUTAGES:
            reason = error_reason(error)
            if not reason:  # The daemon itself says "draining": an answer, though not from this endpoint.
                endpoint.breaker.failed()
                endpoint.lost()
            return DaemonUnavailableError(f"{endpoint.address}: {details or code.name}")
        endpoint.breaker.succeeded()
        reason = error_reason(error)
        # Not every status has a reason of its own: then its code says what to do (NOT_FOUND: look up again).
        return DaemonRefusedError(
            code.name if reason in ("", "UNSPECIFIED") else reason, details or code.name
        )


def error_reason(error: grpc.RpcError) -> str:
    """Return the ErrorReason that the daemon sent with an error, without its prefix, or an empty text."""
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key != "grpc-status-details-bin":
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            return ""
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == "fuse-cache":
                return str(info.reason).removeprefix("ERROR_REASON_")
    return ""


class _Watched:
    """A response stream that is cancelled when nothing comes for `silence_s`. Use as a context manager."""

    def __init__(
        self, transport: Transport, endpoint: Endpoint, call: Callable[[], Any], silence_s: float
    ) -> None:
        self._transport, self._endpoint, self._silence_s = transport, endpoint, silence_s
        self._call = call()
        self._watch = Watch(self._call.cancel, silence_s)
        watchdog.add(self._watch)

    def __enter__(self) -> Iterator[Any]:
        return self._iterate()

    def __exit__(self, *_: object) -> None:
        watchdog.remove(self._watch)
        self._call.cancel()

    def _iterate(self) -> Iterator[Any]:
        watch = self._watch
        try:
            for message in self._call:
                watch.fed()
                yield message
                watch.fed()  # The consumer's time is not the daemon's.
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # It talked all the time: no outage.
                raise DaemonTooLateError(f"{self._endpoint.address}: no result in time") from error
            failure = self._transport._translate(self._endpoint, error)
            if watch.silent:
                failure = DaemonTooLateError(f"{self._endpoint.address}: silent for {self._silence_s:g} s")
            raise failure from error
        self._endpoint.breaker.succeeded()


class _Upload:
    """The client's half of a Compile stream: `start`, then the graph once it is asked for, then the end.

    gRPC iterates it in a thread of its own.
    """

    def __init__(self, start: wire.CompileStart, graph: bytes, chunk_bytes: int) -> None:
        self._start, self._graph, self._chunk_bytes = start, graph, chunk_bytes
        self._wanted = False
        self._event = threading.Event()

    def send_graph(self) -> None:
        self._wanted = True
        self._event.set()

    def end(self) -> None:
        self._event.set()

    def __iter__(self) -> Iterator[wire.CompileRequest]:
        yield wire.CompileRequest(start=self._start)
        self._event.wait()
        if not self._wanted:
            return
        for offset in range(0, max(1, len(self._graph)), self._chunk_bytes):
            data = self._graph[offset : offset + self._chunk_bytes]
            last = offset + len(data) == len(self._graph)
            yield wire.CompileRequest(chunk=wire.GraphChunk(data=data, offset=offset, last=last))
