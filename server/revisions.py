"""Stores what a host found out about kernel variants: a second, signed revision of the artifact.

The first report of a key is taken. It can only leave variants out, so a wrong one costs speed, and only
hosts that accept revisions see it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from fuse_cache.proto.artifact_pb2 import Manifest, SignedManifest
from fuse_cache.proto.compile_pb2 import ReportItem
from fuse_cache.proto.content import ContentError, describe_content, verify_content
from fuse_cache.proto.revision import TUNED_REVISION, RevisionError, revised_key, tuned_content
from fuse_cache.proto.signing import SignatureError, SigningKey, verify
from fuse_cache.server.cache.facts import describe
from fuse_cache.server.cache.store import Store
from fuse_cache.server.cache.tier import TierError
from fuse_cache.server.status import Status

log = logging.getLogger(__name__)

MAX_CHOICES = 4096  # Kernels of one artifact.


class Revisions:
    """Makes tuned builds of stored artifacts."""

    def __init__(
        self,
        store: Store,
        status: Status,
        signing_key: SigningKey,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._status = status
        self._signing_key = signing_key
        self._now_s = now_s
        self.made = 0

    async def take(self, item: ReportItem, namespace: str) -> bool:
        """Store the tuned build that a host's choices make. False: there is one, or they do not fit."""
        choices = {choice.kernel: choice.cubin for choice in item.choices[:MAX_CHOICES]}
        key = revised_key(item.key)
        try:
            if await self._store.get_manifest(key) is not None:
                return False
            found = await self._first_build(item, namespace)
            if found is None:
                return False
            manifest, content = found
            signed, revised, tuned = await asyncio.to_thread(self._revise, manifest, content, key, choices)
            await self._store.publish(signed, key, tuned, describe(revised))
        except (SignatureError, ContentError, RevisionError, TierError, ValueError) as error:
            extra = {"key": item.key.hex()[:12], "why": str(error)[:200]}
            log.warning("a tuned build was not made", extra=extra)
            return False
        self.made += 1
        log.info("tuned", extra={"key": item.key.hex()[:12], "bytes": len(tuned), "before": len(content)})
        return True

    async def _first_build(self, item: ReportItem, namespace: str) -> tuple[Manifest, bytes] | None:
        found = await self._store.get_manifest(item.key)
        if found is None:
            return None
        manifest = verify(SignedManifest.FromString(found.data), self._status.trusted)
        if manifest.namespace != namespace or manifest.revision or manifest.key != item.key:
            return None  # Not theirs to report on, or tuned already.
        if manifest.content.digest != item.content_digest:
            return None  # Of another content: one that was replaced meanwhile.
        content = await self._store.get_content(manifest.content.digest)
        if content is None:
            return None
        await asyncio.to_thread(verify_content, manifest.content, content.data)
        return manifest, content.data

    def _revise(
        self, manifest: Manifest, content: bytes, key: bytes, choices: Mapping[str, str]
    ) -> tuple[bytes, Manifest, bytes]:
        tuned = tuned_content(content, choices)
        revised = Manifest()
        revised.CopyFrom(manifest)
        revised.key = key
        revised.revision = TUNED_REVISION
        revised.builder = self._signing_key.builder
        revised.created_unix_s = int(self._now_s())
        revised.content.CopyFrom(describe_content(tuned))
        signed = self._signing_key.sign(revised.SerializeToString())
        return signed.SerializeToString(), revised, tuned
