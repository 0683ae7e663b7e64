"""The Admin service: what operators ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

from fuse_cache.proto import admin_pb2, admin_pb2_grpc
from fuse_cache.proto.artifact_pb2 import CompileRange, SignedManifest
from fuse_cache.proto.content import ContentError, ContentVerifier
from fuse_cache.proto.limits import CHUNK_BYTES
from fuse_cache.proto.signing import SignatureError, verify
from fuse_cache.server.admission import check_namespace
from fuse_cache.server.cache.answers import EntryInfo
from fuse_cache.server.cache.facts import describe
from fuse_cache.server.cache.store import Store
from fuse_cache.server.cache.tier import TierError
from fuse_cache.server.errors import (
    AmbiguousError,
    DamagedUploadError,
    DeniedError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from fuse_cache.server.metrics import Metrics, value
from fuse_cache.server.pace import Pace
from fuse_cache.server.recalls import Recalls
from fuse_cache.server.reports import Reports
from fuse_cache.server.rpc import Context, fails_with_status
from fuse_cache.server.status import Status

MIN_PREFIX_DIGITS = 8
MAX_IMPORT_BYTES = (
    256 << 20
)  # Held in memory while it is checked; larger artifacts are copied with their store.
IMPORT_PATIENCE_S = 10.0  # For the next message: others wait for their turn to import.


class AdminService(admin_pb2_grpc.AdminServicer):
    """Implements `Admin` of admin.proto, which says what each method promises."""

    def __init__(
        self,
        *,
        store: Store,
        status: Status,
        reports: Reports,
        metrics: Metrics,
        recalls: Recalls,
        drain: Callable[[float], int],
    ) -> None:
        """`drain(grace_s)` begins to stop the daemon and tells how many compilations run."""
        self._store = store
        self._status = status
        self._reports = reports
        self._metrics = metrics
        self._recalls = recalls
        self._drain = drain
        self._importing = asyncio.Lock()  # One import at a time: each holds an artifact in memory.

    @fails_with_status
    async def Stats(self, request: admin_pb2.StatsRequest, context: Context) -> admin_pb2.StatsResponse:
        metrics, status = self._metrics, self._status
        store = await self._store.stats()
        status.store_reason = store.reason
        epoch = status.builders.first.epoch
        ended = value(metrics.compile_ends)
        return admin_pb2.StatsResponse(
            compiles=int(value(metrics.compiles)),
            waiting=int(value(metrics.waiting)),
            lookups=[
                admin_pb2.TierCounters(tier=tier, **counts) for tier, counts in sorted(store.lookups.items())
            ],
            entries=store.entries,
            bytes=store.size_bytes,
            evictions=store.evictions,
            compile_seconds_spent=value(metrics.seconds_spent),
            compile_seconds_saved=max(0.0, metrics.hot.seconds_saved - metrics.hot.seconds_rejected),
            status=status.name(),
            epoch=epoch.name,
            targets=status.targets,
            toolchain=epoch.toolchain.to_message(),
            failed_compiles=int(ended - value(metrics.compile_ends, reason="DONE")),
            rejected_graphs=int(value(metrics.rejected_graphs)),
            uptime_seconds=status.uptime_s,
            used_reports=self._reports.used,
            bad_reports=self._reports.bad,
        )

    @fails_with_status
    async def List(self, request: admin_pb2.ListRequest, context: Context) -> None:
        check_namespace(request.namespace)
        async for info in self._store.iterate():
            if not request.namespace or info.facts.namespace == request.namespace:
                await context.write(to_entry(info))

    @fails_with_status
    async def Show(self, request: admin_pb2.ShowRequest, context: Context) -> admin_pb2.ShowResponse:
        (info,) = await self._find([request.key_prefix])
        found = await self._store.inspect(info.key)
        if found is None:
            raise NotFoundError(
                "UNSPECIFIED", f"{info.key.hex()} was evicted just now; the next compilation brings it back"
            )
        return admin_pb2.ShowResponse(manifest=SignedManifest.FromString(found), entry=to_entry(info))

    @fails_with_status
    async def Remove(self, request: admin_pb2.RemoveRequest, context: Context) -> admin_pb2.RemoveResponse:
        wanted = _selector(request)
        keys = {info.key for info in await self._find(request.key_prefixes)}
        chosen = [
            info
            async for info in self._store.iterate()
            if (info.key in keys if keys else True) and wanted(info)
        ]
        if not request.dry_run:
            if request.builder:
                await self._recall(request.builder)
            for info in chosen:
                try:
                    await self._store.remove(info.key)
                except TierError as error:
                    raise UnavailableError("STORE_FAILED", str(error)) from error
        return admin_pb2.RemoveResponse(
            entries=len(chosen),
            bytes=sum(info.size_bytes for info in chosen),
            keys=[info.key for info in chosen],
        )

    @fails_with_status
    async def Import(
        self, requests: AsyncIterator[admin_pb2.ImportRequest], context: Context
    ) -> admin_pb2.ImportResponse:
        response = admin_pb2.ImportResponse()
        requests = aiter(requests)
        async with self._importing:
            signed: SignedManifest | None = None
            verifier: ContentVerifier | None = None
            pace = Pace(patience_s=IMPORT_PATIENCE_S)
            while (message := await pace.wait(anext(requests, None))) is not None:
                pace.received(message.ByteSize())
                if message.WhichOneof("message") == "manifest":
                    if signed is not None:
                        raise DamagedUploadError("DIGEST_MISMATCH", "a manifest before the end of a content")
                    signed, verifier = message.manifest, self._begin_import(message.manifest)
                elif verifier is None or signed is None:
                    raise InvalidRequestError("REQUEST_MALFORMED", "a chunk before its manifest")
                else:
                    _feed(verifier, message.chunk)
                    if verifier.complete:
                        response.bytes += await self._end_import(signed, verifier)
                        response.entries += 1
                        signed = verifier = None
            if signed is not None:
                raise DamagedUploadError("DIGEST_MISMATCH", "the stream ended within a content")
        return response

    @fails_with_status
    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        return admin_pb2.DrainResponse(running=self._drain(max(0.0, request.grace_seconds)))

    async def _recall(self, builder: str) -> None:
        try:
            await asyncio.to_thread(self._recalls.add, builder)
        except ValueError as error:
            raise InvalidRequestError("REQUEST_MALFORMED", str(error)) from error
        except OSError as error:
            # As good as it gets without a disk, and said so: hosts hear of it until this daemon restarts.
            self._status.revoke((builder,))
            raise UnavailableError(
                "STORE_FAILED",
                f"recalled until this daemon restarts only: the store cannot be written ({error.strerror})",
            ) from error
        self._status.revoke((builder,))

    async def _find(self, prefixes: Iterable[str]) -> list[EntryInfo]:
        """Return the one entry of each prefix."""
        wanted = [prefix.lower() for prefix in prefixes]
        for prefix in wanted:
            if len(prefix) < MIN_PREFIX_DIGITS or not set(prefix) <= set("0123456789abcdef"):
                raise InvalidRequestError(
                    "REQUEST_MALFORMED", f"{prefix!r}: give at least {MIN_PREFIX_DIGITS} hex digits of a key"
                )
        found: dict[str, list[EntryInfo]] = {prefix: [] for prefix in wanted}
        if wanted:
            async for info in self._store.iterate():
                for prefix in wanted:
                    if info.key.hex().startswith(prefix):
                        found[prefix].append(info)
        for prefix, infos in found.items():
            if not infos:
                raise NotFoundError(
                    "UNSPECIFIED",
                    f"no artifact has a key that starts with {prefix}; `fuse-cache ls` shows those there are",
                )
            if len(infos) > 1:
                raise AmbiguousError(
                    "REQUEST_MALFORMED", f"{len(infos)} keys start with {prefix}: give more digits"
                )
        return [infos[0] for infos in found.values()]

    def _begin_import(self, signed: SignedManifest) -> ContentVerifier:
        try:
            manifest = verify(signed, self._status.trusted)
            if manifest.content.size_bytes > MAX_IMPORT_BYTES:
                raise InvalidRequestError(
                    "REQUEST_MALFORMED",
                    f"the artifact has {manifest.content.size_bytes} bytes, the limit is {MAX_IMPORT_BYTES}",
                )
            return ContentVerifier(manifest.content)
        except SignatureError as error:
            raise DeniedError("UNSPECIFIED", str(error)) from error
        except ContentError as error:
            raise InvalidRequestError("REQUEST_MALFORMED", str(error)) from error

    async def _end_import(self, signed: SignedManifest, verifier: ContentVerifier) -> int:
        manifest = verify(signed, self._status.trusted)
        try:
            content = await asyncio.to_thread(verifier.finish)
        except ContentError as error:
            raise DamagedUploadError("DIGEST_MISMATCH", str(error)) from error
        published = await self._store.publish(
            signed.SerializeToString(), manifest.key, content, describe(manifest)
        )
        if published.lost:
            raise UnavailableError("STORE_FAILED", published.lost)
        return len(content)


def to_entry(info: EntryInfo) -> admin_pb2.Entry:
    """Return one line of a listing as a message."""
    facts = info.facts
    return admin_pb2.Entry(
        key=info.key,
        namespace=facts.namespace,
        target=facts.target,
        range=CompileRange(lower=facts.lower, upper=facts.upper, symbol_plus_one=facts.symbol_plus_one),
        bytes=info.size_bytes,
        compile_seconds=facts.compile_seconds,
        builder=facts.builder,
        hits=info.hits,
        created_unix_s=facts.created_unix_s,
        epoch=facts.epoch,
        model=facts.model,
        revision=facts.revision,
        nodes=facts.nodes,
    )


def _selector(request: admin_pb2.RemoveRequest) -> Callable[[EntryInfo], bool]:
    """Return what tells whether an entry is to go: all selectors that are given must agree."""
    tests: list[Callable[[EntryInfo], bool]] = []
    if request.builder:
        tests.append(lambda info: info.facts.builder == request.builder)
    if request.epoch:
        tests.append(lambda info: info.facts.epoch == request.epoch)
    if request.toolchain_fingerprint:
        tests.append(lambda info: request.toolchain_fingerprint in info.facts.toolchain)
    if request.older_than_seconds > 0:
        before_unix_s = time.time() - request.older_than_seconds
        tests.append(lambda info: info.facts.created_unix_s < before_unix_s)
    if not tests and not request.key_prefixes:
        raise InvalidRequestError(
            "REQUEST_MALFORMED", "say what to remove: keys, builder, epoch, toolchain or age"
        )
    return lambda info: all(test(info) for test in tests)


def _feed(verifier: ContentVerifier, chunk: bytes) -> None:
    if len(chunk) > CHUNK_BYTES:
        raise InvalidRequestError("REQUEST_MALFORMED", f"a chunk has at most {CHUNK_BYTES} bytes")
    try:
        verifier.feed(chunk)
    except ContentError as error:
        raise DamagedUploadError("DIGEST_MISMATCH", str(error)) from error
