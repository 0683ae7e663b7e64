"""What hosts say of artifacts.

One that is called damaged is looked at, and stays if it is sound. One that does not run on a host goes aside
once: the daemon runs nothing that it could find out by.
"""

from __future__ import annotations

import asyncio
import logging

from fuse_cache.proto.artifact_pb2 import SignedManifest
from fuse_cache.proto.compile_pb2 import ReportItem, ReportRequest, Verdict
from fuse_cache.proto.content import ContentError, verify_content
from fuse_cache.proto.signing import SignatureError, verify
from fuse_cache.server.admission import check_digest
from fuse_cache.server.cache.store import Store
from fuse_cache.server.cache.tier import TierError
from fuse_cache.server.errors import InvalidRequestError
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.status import Status

log = logging.getLogger(__name__)

MAX_ITEMS = 1024
MAX_CHECKS = 8  # Of one request: each reads a whole artifact.
# Content that is whole and still does not run is nothing that this process can see for itself: hosts are
# believed, once per key, so that a liar costs one compilation of each key and no more.
_BELIEVED = frozenset({Verdict.VERDICT_LOAD_FAILED, Verdict.VERDICT_CALL_FAILED})
MAX_BELIEVED = 65_536  # Keys of 32 bytes; beyond it nobody is believed.


class Reports:
    """Takes `Report` and checks the entries that are called bad."""

    def __init__(self, store: Store, status: Status, metrics: Metrics) -> None:
        self._store = store
        self._status = status
        self._metrics = metrics
        self.used = 0
        self.bad = 0
        self._believed: set[bytes] = set()  # Keys that were set aside on a host's word.

    async def take(self, request: ReportRequest) -> None:
        """Count the verdicts, and set aside what is bad in our own eyes too.

        Raises:
            InvalidRequestError: an unknown verdict, or too many.
        """
        if len(request.items) > MAX_ITEMS:
            raise InvalidRequestError(
                "REQUEST_MALFORMED", f"items: {len(request.items)}, the limit is {MAX_ITEMS}"
            )
        for item in request.items:
            check_digest("key", item.key)
            if item.verdict not in Verdict.values() or item.verdict == Verdict.VERDICT_UNSPECIFIED:
                raise InvalidRequestError("REQUEST_MALFORMED", f"verdict {item.verdict} is not known")
        suspects: dict[bytes, ReportItem] = {}
        for item in request.items:
            name = Verdict.Name(item.verdict).removeprefix("VERDICT_")
            count = max(1, min(item.count, 1 << 32))
            self._metrics.reports.labels(name).inc(count)
            if item.verdict == Verdict.VERDICT_USED:
                self.used += count
            else:
                self.bad += count
                suspects[item.key] = item
                log.warning(
                    "bad artifact reported",
                    extra={"key": item.key.hex()[:12], "verdict": name, "why": item.detail[:200]},
                )
        for item in list(suspects.values())[:MAX_CHECKS]:
            await self._check(item, request.namespace)

    async def _check(self, item: ReportItem, namespace: str) -> None:
        key = item.key
        found = await self._store.get_manifest(key)
        if found is None:
            return
        try:
            manifest = verify(SignedManifest.FromString(found.data), self._status.trusted)
            if manifest.namespace != namespace:
                return  # Not theirs to report on.
            why = "" if manifest.key == key else "it stands under another key than its own"
            why = why or self._hearsay(item, manifest.content.digest)
            content = await self._store.get_content(manifest.content.digest)
            if content is not None:
                await asyncio.to_thread(verify_content, manifest.content, content.data)
        except (SignatureError, ContentError, ValueError) as error:
            why = str(error)
        if why:
            self._metrics.integrity_failures.labels("report").inc()
            try:
                await self._store.quarantine(key, why)
            except TierError as error:
                log.warning("not set aside", extra={"key": key.hex()[:12], "why": str(error)})

    def _hearsay(self, item: ReportItem, content_digest: bytes) -> str:
        """Return why the entry goes on a host's word, or an empty text."""
        if item.verdict not in _BELIEVED or item.content_digest != content_digest:
            return ""  # Of another content: one that was replaced meanwhile.
        if item.key in self._believed or len(self._believed) >= MAX_BELIEVED:
            return ""
        self._believed.add(item.key)
        return f"a host says that it does not run: {item.detail[:200]}"
