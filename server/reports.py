"""What hosts say of artifacts. Nobody's word alone removes one: the daemon looks itself."""

from __future__ import annotations

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


class Reports:
    """Takes `Report` and checks the entries that are called bad."""

    def __init__(self, store: Store, status: Status, metrics: Metrics) -> None:
        self._store = store
        self._status = status
        self._metrics = metrics
        self.used = 0
        self.bad = 0

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
        for key in list(suspects)[:MAX_CHECKS]:
            await self._check(key, request.namespace)

    async def _check(self, key: bytes, namespace: str) -> None:
        found = await self._store.get_manifest(key)
        if found is None:
            return
        try:
            manifest = verify(SignedManifest.FromString(found.data), self._status.trusted)
            if manifest.namespace != namespace:
                return  # Not theirs to report on.
            why = "" if manifest.key == key else "it stands under another key than its own"
            content = await self._store.get_content(manifest.content.digest)
            if content is not None:
                verify_content(manifest.content, content.data)
        except (SignatureError, ContentError, ValueError) as error:
            why = str(error)
        if why:
            self._metrics.integrity_failures.labels("report").inc()
            try:
                await self._store.quarantine(key, why)
            except TierError as error:
                log.warning("not set aside", extra={"key": key.hex()[:12], "why": str(error)})
