"""One artifact from the daemon: taken as found, fetched, or compiled there; verified before anybody sees
it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from fuse_cache.client.errors import (
    ArtifactRejectedError,
    DaemonRefusedError,
    DaemonTooLateError,
    DaemonUnavailableError,
)
from fuse_cache.client.forklock import ForkLock
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.reporter import Reporter
from fuse_cache.client.transport import Transport
from fuse_cache.client.verify import Artifact, Checker, Want
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.artifact_pb2 import Manifest, SignedManifest
from fuse_cache.proto.artifact_pb2 import Toolchain as ToolchainMessage
from fuse_cache.proto.content import ContentVerifier
from fuse_cache.proto.errors import ContentError
from fuse_cache.proto.fetch_chunk import chunk_data
from fuse_cache.proto.limits import CHUNK_BYTES, INLINE_BYTES

REPORT_BAD_S = 1.0  # A bad entry is reported before the daemon is asked again, so that it can set it aside.

_log = logging.getLogger("fuse_cache.client")


class Own:
    """Which compilations of one batch run now. Safe for concurrent use.

    Two ranges of one graph on a daemon with one worker: the second is queued behind the first, and to leave
    it for a local compile would be to compete with oneself.
    """

    def __init__(self) -> None:
        self._lock = ForkLock()  # Guards _running.
        self._running: set[int] = set()

    def set_running(self, identity: int, running: bool) -> None:
        """Say that a compilation of the batch runs, or no longer does."""
        with self._lock:
            (self._running.add if running else self._running.discard)(identity)

    def is_running(self) -> bool:
        """Tell whether any runs."""
        with self._lock:
            return bool(self._running)


class Remote:
    """Takes artifacts from the daemon for one checker. `rejected` are the refusals on the way, oldest
    first."""

    def __init__(self, transport: Transport, reporter: Reporter, checker: Checker, own: Own) -> None:
        self._transport = transport
        self._reporter = reporter
        self._checker = checker
        self._namespace = checker.options.namespace
        self._own = own
        self.rejected: list[ArtifactRejectedError] = []

    def take(self, want: Want, signed: SignedManifest, inline: bytes) -> Artifact | None:
        """Return the artifact, fetched and verified; None: it was refused, or is gone.

        Raises:
            DaemonUnavailableError, DaemonRefusedError
        """
        key = content_digest = b""
        try:
            manifest = self._checker.manifest(signed, want)
            key, content_digest = manifest.key, manifest.content.digest
            if inline:
                return self._checker.content(signed, manifest, inline)
            return Artifact(signed, manifest, self._fetch(manifest))
        except ArtifactRejectedError as error:
            self.rejected.append(error)
            _log.warning("refused an artifact of the daemon: %s", error)
            self._reporter.bad(key or _key_of(signed), content_digest, error.verdict, str(error))
            self._reporter.flush(REPORT_BAD_S)
            return None
        except DaemonRefusedError as error:
            if error.reason != "NOT_FOUND":
                raise
            return None  # Evicted between lookup and fetch: a miss.

    def _fetch(self, manifest: Manifest) -> bytes:
        """Return the content, each chunk verified. A cut is resumed once, where it happened."""
        try:
            verifier = ContentVerifier(manifest.content)
            offset, cuts = 0, 0
            while not verifier.complete:
                request = wire.FetchRequest(
                    namespace=self._namespace, content_digest=manifest.content.digest, offset=offset
                )
                try:
                    for message in self._transport.fetch(request):
                        verifier.feed(chunk_data(message))
                        offset = verifier.offset
                    if not verifier.complete:
                        raise DaemonUnavailableError("the content ended early")
                except DaemonTooLateError:
                    raise
                except DaemonUnavailableError:
                    cuts += 1
                    if cuts > 1:
                        raise
            return verifier.join()  # The manifest's signature, checked before, covers each chunk's digest.
        except ContentError as error:
            raise ArtifactRejectedError("BAD_DIGEST", str(error)) from error

    def compile(self, want: Want) -> tuple[Artifact, bool]:
        """Have the daemon compile, or join the compilation that runs; also return whether it was stored
        already.

        After a cut it re-attaches once. All of it takes `compile_timeout_s` at most.

        Raises:
            DaemonUnavailableError, DaemonRefusedError
            ArtifactRejectedError: what the daemon made was refused.
        """
        options = self._checker.options
        start = compile_start(want, options, self._checker.toolchain.to_message())
        progress = _Progress(options.queue_bound_s, self._own)
        ends_s = time.monotonic() + options.compile_timeout_s

        def ask() -> wire.Done | None:
            left_s = ends_s - time.monotonic()
            return progress.follow(self._transport.compile(start, want.graph, CHUNK_BYTES, left_s))

        try:
            done = ask()
        except DaemonTooLateError:
            raise
        except DaemonUnavailableError:
            done = None
            if progress.key:
                again = wire.WaitRequest(
                    namespace=self._namespace, key=progress.key, inline_limit_bytes=INLINE_BYTES
                )
                done = progress.follow(self._transport.wait(again, ends_s - time.monotonic()))
            if done is None:
                done = ask()
        if done is None:
            raise DaemonUnavailableError("the daemon ended a compilation without an answer")
        artifact = self.take(want, done.manifest, done.inline_content)
        if artifact is None:
            if self.rejected:
                raise self.rejected[-1]
            raise DaemonUnavailableError("the daemon compiled an artifact that it then did not have")
        return artifact, done.was_stored


def compile_start(want: Want, options: CompileOptions, toolchain: ToolchainMessage) -> wire.CompileStart:
    """Return the first message of a Compile, for a host that waits."""
    return wire.CompileStart(
        namespace=options.namespace,
        request_digest=want.request_digest,
        request=want.fields.encode(),
        graph_digest=want.fields.graph_digest,
        graph_bytes=len(want.graph),
        toolchain=toolchain,
        priority=wire.PRIORITY_HOST,
        inline_limit_bytes=INLINE_BYTES,
        allow_cpu_wheel_builds=options.allow_cpu_wheel_builds,
    )


class _Progress:
    """Follows the events of one compilation."""

    def __init__(self, queue_bound_s: float, own: Own) -> None:
        self.key = b""
        self._queue_bound_s = queue_bound_s
        self._own = own
        self._queued_since_s: float | None = None

    def follow(self, events: Iterable[wire.CompileEvent]) -> wire.Done | None:
        """Return the result, or None when the stream ends without one or the daemon does not know the key.

        Raises:
            DaemonRefusedError: it failed, or was queued for too long.
            DaemonUnavailableError
        """
        try:
            for event in events:
                self.key = event.key or self.key
                kind = event.WhichOneof("event")
                self._own.set_running(id(self), kind == "compiling")
                if kind == "done":
                    return event.done
                if kind == "unknown":
                    return None
                if kind == "failed":
                    reason = wire.ErrorReason.Name(event.failed.reason).removeprefix("ERROR_REASON_")
                    stage = f" ({event.failed.stage})" if event.failed.stage else ""
                    raise DaemonRefusedError(reason, event.failed.message + stage)
                if kind == "queued":
                    self._check_queue(event.queued.position)
        finally:
            self._own.set_running(id(self), False)
        return None

    def _check_queue(self, position: int) -> None:
        now = time.monotonic()
        if self._queued_since_s is None or self._own.is_running():
            self._queued_since_s = now
        if now - self._queued_since_s > self._queue_bound_s:
            raise DaemonRefusedError(
                "QUEUE_FULL",
                f"queued for more than {self._queue_bound_s:g} s, with {position} before it (max_queue_s)",
            )


def _key_of(signed: SignedManifest) -> bytes:
    """Return the key that a refused manifest claims, for the report: the daemon looks for itself."""
    try:
        return Manifest.FromString(signed.manifest).key
    except DecodeError:
        return b""
