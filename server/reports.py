"""What hosts say of artifacts.

One that is called damaged is looked at, and stays if it is sound. One that does not run on a host goes aside
once: the daemon runs nothing that it could find out by. Either way a hit that its host could not use saved
nothing: its seconds are taken back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict

from fuse_cache.proto.artifact_pb2 import SignedManifest
from fuse_cache.proto.compile_pb2 import ReportItem, ReportRequest, Verdict
from fuse_cache.proto.content import ContentError, verify_content
from fuse_cache.proto.signing import SignatureError, verify
from fuse_cache.server.admission import check_digest
from fuse_cache.server.cache.store import Store
from fuse_cache.server.cache.tier import TierError
from fuse_cache.server.errors import InvalidRequestError
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.revisions import Revisions
from fuse_cache.server.status import Status

log = logging.getLogger(__name__)

MAX_ITEMS = 1024
MAX_CHECKS = 8  # Of one request: each reads a whole artifact.
MAX_LOGGED = 8  # Of one request: the log's disk is no place for what a host makes up.
# Content that is whole and still does not run is nothing that this process can see for itself: hosts are
# believed, once per key, so that a liar costs one compilation of each key and no more.
_BELIEVED = frozenset({Verdict.VERDICT_LOAD_FAILED, Verdict.VERDICT_CALL_FAILED})
MAX_BELIEVED = 65_536  # Keys of 32 bytes; beyond it nobody is believed.
MAX_TAKEN_BACK = 65_536  # Keys whose hits were taken back; beyond it those of the oldest are forgotten.


class Reports:
    """Takes `Report` and checks the entries that are called bad."""

    def __init__(self, store: Store, status: Status, metrics: Metrics, revisions: Revisions) -> None:
        self._store = store
        self._revisions = revisions
        self._status = status
        self._metrics = metrics
        self.used = 0
        self.bad = 0
        self._believed: set[bytes] = set()  # Keys that were set aside on a host's word.
        self._taken_back: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # Hits of a key that saved nothing after all.

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
        rejected: Counter[bytes] = Counter()
        tuned: list[ReportItem] = []
        for item in request.items:
            name = Verdict.Name(item.verdict).removeprefix("VERDICT_")
            count = max(1, min(item.count, 1 << 32))
            self._metrics.reports.labels(name).inc(count)
            if item.verdict == Verdict.VERDICT_USED:
                self.used += count
            elif item.verdict == Verdict.VERDICT_TUNED:
                tuned.append(item)
            else:
                self.bad += count
                suspects[item.key] = item
                rejected[item.key] += count
        for item in list(suspects.values())[:MAX_LOGGED]:
            name = Verdict.Name(item.verdict).removeprefix("VERDICT_")
            extra = {"key": item.key.hex()[:12], "verdict": name, "why": item.detail[:200]}
            log.warning("bad artifact reported", extra=extra)
        if len(suspects) > MAX_LOGGED:
            log.warning("more bad artifacts reported", extra={"keys": len(suspects) - MAX_LOGGED})
        for item in tuned[:MAX_CHECKS]:
            await self._revisions.take(item, request.namespace)
        for item in list(suspects.values())[:MAX_CHECKS]:
            await self._check(item, request.namespace, rejected[item.key])

    async def _check(self, item: ReportItem, namespace: str, rejected: int) -> None:
        key = item.key
        hits = self._store.catalogue.hits(key)
        found = await self._store.get_manifest(key)
        if found is None:
            return
        try:
            manifest = verify(SignedManifest.FromString(found.data), self._status.trusted)
            if manifest.namespace != namespace:
                return  # Not theirs to report on.
            self._take_back(key, min(rejected, hits), hits, manifest.compile_seconds)
            why = "" if manifest.key == key else "it stands under another key than its own"
            why = why or self._hearsay(item, manifest.content.digest)
            content = await self._store.get_content(manifest.content.digest)
            if content is not None:
                await asyncio.to_thread(verify_content, manifest.content, content.data)
        except (SignatureError, ContentError, ValueError) as error:
            why = str(error)
        if why:
            self._taken_back.pop(key, None)  # Its hits are counted anew.
            self._metrics.integrity_failures.labels("report").inc()
            try:
                await self._store.quarantine(key, why)
            except TierError as error:
                log.warning("not set aside", extra={"key": key.hex()[:12], "why": str(error)})

    def _take_back(self, key: bytes, rejected: int, hits: int, seconds: float) -> None:
        """Count what hits did not save, each hit once: a liar can take back no more than was counted."""
        before = self._taken_back.pop(key, 0)
        count = max(0, min(rejected, hits - before))
        self._metrics.hot.seconds_rejected += count * seconds
        self._taken_back[key] = before + count
        if len(self._taken_back) > MAX_TAKEN_BACK:
            self._taken_back.popitem(last=False)

    def _hearsay(self, item: ReportItem, content_digest: bytes) -> str:
        """Return why the entry goes on a host's word, or an empty text."""
        if item.verdict not in _BELIEVED or item.content_digest != content_digest:
            return ""  # Of another content: one that was replaced meanwhile.
        if item.key in self._believed or len(self._believed) >= MAX_BELIEVED:
            return ""
        self._believed.add(item.key)
        return f"a host says that it does not run: {item.detail[:200]}"
