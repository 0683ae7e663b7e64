"""From a request to a verified artifact: own tiers, then lookup and fetch, then a compilation on the daemon.

Nothing here imports torch, compiles, or opens content.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fuse_cache.client.epochs import Epochs, Known, epoch_for
from fuse_cache.client.errors import (
    ArtifactRejectedError,
    DaemonRefusedError,
    DaemonUnavailableError,
    FuseCacheError,
)
from fuse_cache.client.forklock import ForkLock
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.remote import REPORT_BAD_S, Own, Remote, compile_start
from fuse_cache.client.reporter import Reporter
from fuse_cache.client.revisions import most_revision
from fuse_cache.client.settings import cache_folder, load_options
from fuse_cache.client.tiers import DiskTier, MemoryTier
from fuse_cache.client.transport import Transport
from fuse_cache.client.verify import Artifact, Checker, Want, range_message, trusted_keys
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.limits import INLINE_BYTES
from fuse_cache.proto.toolchain import local_toolchain

Source = Literal["memory", "disk", "daemon", "compiled"]
LOOKUP_ITEMS = 1024
PARALLEL_COMPILES = 8  # Ranges of one graph; the daemon queues what it has no worker for.

_log = logging.getLogger("fuse_cache.client")


@dataclass(slots=True, kw_only=True)
class Obtained:
    """What became of one want: an artifact and where it came from, or the error that says why there is
    none."""

    artifact: Artifact | None = None
    source: Source | None = None
    error: FuseCacheError | None = None
    lookup_seconds: float = 0.0
    rejected: list[ArtifactRejectedError] = field(default_factory=list)  # on the way to the artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What is known of the daemon while one graph is obtained; an error where it was asked in vain."""

    known: Known | None
    outage: FuseCacheError | None = None
    seconds: float = 0.0  # what asking took

    @property
    def targets(self) -> tuple[str, ...]:
        """What the daemon builds for; empty when it never said."""
        return self.known.targets if self.known is not None else ()


class Client:
    """A client of one set of daemons. Safe for concurrent use, and after a fork: channels are opened lazily
    per process.

    `Client()` takes its options from environment and file; `Client({"endpoint": ...})` as the backend does.
    """

    def __init__(self, options: CompileOptions | dict[str, object] | None = None) -> None:
        self.options = options if isinstance(options, CompileOptions) else load_options(options or {})
        folder = cache_folder(self.options)
        self.toolchain = local_toolchain()
        self._toolchain_message = self.toolchain.to_message()  # Copied into each request.
        self.transport = Transport(self.options)
        self.memory = MemoryTier()
        self.disk = DiskTier(folder)
        self.epochs = Epochs(folder, self.options, self.toolchain)
        self.reporter = Reporter(self.transport.report, self.options.namespace)

    def known(self) -> Known:
        """Return what the daemon said of itself, from memory or disk if that is fresh, else asked now.

        Raises:
            DaemonUnavailableError, DaemonRefusedError: it had to be asked and did not answer.
        """
        return self.epochs.fresh() or self._ask()

    def session(self) -> Session:
        """Return what is known of the daemon for one graph, asked once. Raises nothing that a daemon
        causes."""
        began_s = time.monotonic()
        try:
            return Session(known=self.known(), seconds=time.monotonic() - began_s)
        except (DaemonUnavailableError, DaemonRefusedError) as error:
            seconds = time.monotonic() - began_s
            return Session(known=self.epochs.last(), outage=error, seconds=seconds)

    def obtain(self, wants: Sequence[Want], session: Session | None = None) -> list[Obtained]:
        """Return what became of each want, in order. Blocks while the daemon compiles; raises nothing that it
        causes."""
        session = session or self.session()
        began_s = time.monotonic()
        seconds = session.seconds
        known, outage = session.known, session.outage
        answers = [Obtained() for _ in wants]
        if known is not None:
            for want, answer in zip(wants, answers, strict=True):
                self._from_tiers(known, want, answer)
        missing = [number for number, answer in enumerate(answers) if answer.artifact is None]
        if missing and outage is None:
            try:
                left_s = self.options.answer_bound_s - session.seconds
                found, known = self._lookup([wants[number] for number in missing], left_s)
            except (DaemonUnavailableError, DaemonRefusedError) as error:
                outage = error
            seconds += time.monotonic() - began_s
            if outage is None:
                own = Own()
                jobs = [
                    (known, own, wants[n], result, answers[n])
                    for n, result in zip(missing, found, strict=True)
                ]
                for *_, answer in jobs:
                    answer.lookup_seconds = seconds
                _each(self._answer, jobs)
        for answer in answers:
            if answer.artifact is None and answer.error is None:
                answer.error = outage
                answer.lookup_seconds = seconds
        return answers

    def used(self, artifact: Artifact) -> None:
        """Tell the daemon, in the background, that the artifact was called."""
        self.reporter.used(artifact.manifest.key, artifact.manifest.content.digest)

    def tuned(self, artifact: Artifact, choices: Mapping[str, str]) -> None:
        """Tell the daemon which kernel variants won on this host, where it takes part in that (option
        `accept_revisions`)."""
        if choices and not artifact.manifest.revision and most_revision(self.options):
            self.reporter.tuned(artifact.manifest.key, artifact.manifest.content.digest, choices)

    def bad(self, want: Want, artifact: Artifact, verdict: str, detail: str) -> None:
        """Set an artifact aside that failed after its checks, and tell the daemon in the background."""
        known = self.epochs.last()
        if known is not None:
            self._forget(known, want)
        self.reporter.bad(artifact.manifest.key, artifact.manifest.content.digest, verdict, detail)

    def close(self) -> None:
        """Send what is left to report, and close the channels."""
        self.reporter.flush(REPORT_BAD_S)
        self.transport.close()

    def _ask(self, timeout_s: float | None = None) -> Known:
        answer = self.transport.capabilities(timeout_s)
        known = Known(
            epoch=epoch_for(self.toolchain, answer.toolchains, any_wheel=self.options.allow_cpu_wheel_builds),
            targets=tuple(answer.targets),
            revoked=tuple(answer.revoked_builders),
            revocations_version=answer.revocations_version,
        )
        self.epochs.heard(known)
        return self.epochs.last() or known

    def _checker(self, known: Known) -> Checker:
        return Checker(
            options=self.options,
            toolchain=self.toolchain,
            keys=trusted_keys(self.options),
            revoked=frozenset(known.revoked),
        )

    def _scope(self, known: Known) -> str:
        return f"{known.epoch}\0{self.options.namespace}"

    def _from_tiers(self, known: Known, want: Want, answer: Obtained) -> None:
        scope = self._scope(known)
        artifact = self.memory.get(scope, want.request_digest)
        if artifact is not None and artifact.manifest.builder not in known.revoked:
            answer.artifact, answer.source = artifact, "memory"
            return
        try:
            artifact = self.disk.get(scope, want, lambda: self._checker(known))
        except ArtifactRejectedError as error:
            answer.rejected.append(error)
            _log.warning("refused an artifact of the disk tier: %s", error)
            return
        if artifact is not None:
            self.memory.put(scope, want.request_digest, artifact)
            answer.artifact, answer.source = artifact, "disk"

    def _lookup(self, wants: Sequence[Want], left_s: float) -> tuple[list[wire.LookupResult], Known]:
        """Look up in batches. All calls together, what the lookup makes necessary included, get `left_s`."""
        ends_s = time.monotonic() + left_s
        results: list[wire.LookupResult] = []
        known = self.epochs.last()
        for first in range(0, len(wants), LOOKUP_ITEMS):
            response = self.transport.lookup(
                self.lookup_request(wants[first : first + LOOKUP_ITEMS], known.epoch if known else ""),
                ends_s - time.monotonic(),
            )
            results += response.results
            if known is None or known.revocations_version != response.revocations_version:
                known = self._ask(ends_s - time.monotonic())
            known = replace(known, epoch=response.epoch or known.epoch)
            self.epochs.heard(known)
        assert known is not None
        results += [wire.LookupResult() for _ in wants[len(results) :]]  # A short answer is misses.
        return results[: len(wants)], known

    def lookup_request(self, wants: Sequence[Want], epoch: str = "") -> wire.LookupRequest:
        """Return the message that looks `wants` up, LOOKUP_ITEMS of them at most."""
        return wire.LookupRequest(
            namespace=self.options.namespace,
            toolchain=self._toolchain_message,
            items=[self._item(want) for want in wants],
            inline_limit_bytes=INLINE_BYTES,
            client_epoch=epoch,
            allow_cpu_wheel_builds=self.options.allow_cpu_wheel_builds,
        )

    def _item(self, want: Want) -> wire.LookupItem:
        return wire.LookupItem(
            request_digest=want.request_digest,
            family_digest=want.family_digest if want.allow_covering else b"",
            range=range_message(want.fields.range),
            allow_covering=want.allow_covering,
            max_revision=most_revision(self.options),
            target=want.fields.target,
            passes=want.passes,
        )

    def compile_start(self, want: Want) -> wire.CompileStart:
        """Return the message that has `want` compiled for this host."""
        return compile_start(want, self.options, self._toolchain_message)

    def _answer(self, known: Known, own: Own, want: Want, found: wire.LookupResult, answer: Obtained) -> None:
        """Turn a lookup's result into an artifact: take it, or have it compiled."""
        remote = Remote(self.transport, self.reporter, self._checker(known), own)
        try:
            artifact, stored = None, True
            if found.found:
                artifact = remote.take(want, found.manifest, found.inline_content)
            if artifact is None:
                artifact, stored = remote.compile(want)
        except (DaemonUnavailableError, DaemonRefusedError, ArtifactRejectedError) as error:
            answer.error = error
        else:
            scope = self._scope(known)
            self.memory.put(scope, want.request_digest, artifact)
            self.disk.put(scope, want.request_digest, artifact)
            answer.artifact, answer.source = artifact, "daemon" if stored else "compiled"
        answer.rejected += remote.rejected

    def _forget(self, known: Known, want: Want) -> None:
        scope = self._scope(known)
        self.memory.delete(scope, want.request_digest)
        self.disk.delete(scope, want.request_digest)


def _each(call: Callable[..., None], jobs: Sequence[tuple[Any, ...]]) -> None:
    """Make the calls, side by side where there are several."""
    if len(jobs) == 1:
        call(*jobs[0])
        return
    with ThreadPoolExecutor(min(PARALLEL_COMPILES, len(jobs)), thread_name_prefix="fuse-cache") as pool:
        for future in [pool.submit(call, *job) for job in jobs]:
            future.result()


_clients_lock = ForkLock()  # Guards _clients. Held while a client is made, which does no call.
_clients: dict[CompileOptions, Client] = {}


def shared_client(options: CompileOptions) -> Client:
    """Return this process's client for the options that matter to one: tiers, channels and breakers are
    shared."""
    defaults = CompileOptions()
    identity = replace(
        options,
        level=defaults.level,
        pass_config=defaults.pass_config,
        compile_ranges=None,
        range_dim=None,
        target=defaults.target,
        tp=1,
        max_num_batched_tokens=None,
        dense=True,
        splitting_ops=(),
        regional=False,
        skip_tracing=False,
        attention_backend=defaults.attention_backend,
        strict=False,
        dump_dir=None,
        inductor=(),
    )
    with _clients_lock:
        if identity not in _clients:
            _clients[identity] = Client(identity)
        return _clients[identity]
