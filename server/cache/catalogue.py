"""Manifests and contents belong together: what a hit is, in which order things are written, and what goes
with what.

All of it is synchronous and safe for threads; `store.py` keeps it off the event loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping

from blake3 import blake3

from fuse_cache.server.cache.answers import EntryInfo, Found, Published
from fuse_cache.server.cache.facts import Facts, decode_facts
from fuse_cache.server.cache.families import FamilyIndex
from fuse_cache.server.cache.layered import LayeredTier
from fuse_cache.server.cache.measured import MeasuredTier
from fuse_cache.server.cache.tier import (
    CorruptEntryError,
    Entry,
    Meta,
    Space,
    TierError,
    TierUnavailableError,
    Usage,
)

log = logging.getLogger(__name__)

MAX_NAMING = 1024  # Manifests of one content that are asked whose they are: 30 ms of reads.
FAMILY_BATCH = 256  # Entries read between pauses: some milliseconds.


class Catalogue:
    """The store's rules over a fast tier above a slow one."""

    def __init__(self, tiers: LayeredTier, measured: Mapping[str, MeasuredTier]) -> None:
        self.tiers = tiers
        self.families = FamilyIndex()
        self._measured = dict(measured)
        self._lock = threading.Lock()  # Guards the next two. Nothing else happens under it.
        self._hits: dict[bytes, int] = {}
        self._published: set[bytes] = set()  # since `fill_families` last began
        # Who publishes and who removes take turns, for one key and for one content: else a removal could take
        # the content from under a publish that found it there, or the manifest that was just published. Held
        # during I/O, by these only; a key's first, then a content's, then any lock of a tier.
        self._key_stripes = [threading.Lock() for _ in range(64)]
        self._content_stripes = [threading.Lock() for _ in range(64)]

    def peek(self, key: bytes) -> tuple[Entry | None, Found | None]:
        """Ask the fast tier only: (what it has, the hit if manifest and content are both there).

        Never blocks on I/O.
        """
        entry = self.tiers.fast.get(Space.MANIFEST, key)
        if entry is None or not self.tiers.fast.contains(Space.CONTENT, entry.meta.content):
            return entry, None
        return entry, self._hit(key, entry)

    def get_manifest(self, key: bytes, peeked: Entry | None = None) -> Found | None:
        """Ask the rest after `peek`.

        None is a miss: not stored, damaged, not reachable, or its content is lost.
        """
        entry = peeked
        try:
            if entry is None:
                entry = self.tiers.get_slow(Space.MANIFEST, key)
            if entry is None:
                return None
            if self.tiers.contains(Space.CONTENT, entry.meta.content):
                return self._hit(key, entry)
        except TierUnavailableError:
            return None  # Counted apart by MeasuredTier; for this caller the answer is to compile.
        except CorruptEntryError as error:
            log.warning(
                "entry set aside", extra={"key": key.hex()[:12], "tier": error.tier, "reason": error.reason}
            )
            return None
        return self._forget_dangling(key, entry)

    def get_content_fast(self, digest: bytes) -> Found | None:
        """Ask the fast tier only. Never blocks on I/O."""
        entry = self.tiers.fast.get(Space.CONTENT, digest)
        return None if entry is None else Found(entry.data, entry.meta, entry.tier)

    def get_content(self, digest: bytes) -> Found | None:
        """Ask the rest after `get_content_fast`.

        None: evicted or damaged or not reachable; the caller looks up again.
        """
        try:
            entry = self.tiers.get_slow(Space.CONTENT, digest)
        except TierUnavailableError:
            return None
        except CorruptEntryError as error:
            log.warning(
                "content set aside",
                extra={"digest": digest.hex()[:12], "tier": error.tier, "reason": error.reason},
            )
            # The fast tier may hold manifests that name it; `contains` answers False from now on.
            return None
        return None if entry is None else Found(entry.data, entry.meta, entry.tier)

    def publish(self, signed_manifest: bytes, key: bytes, content: bytes, meta: Meta) -> Published:
        """Store content first, manifest last: a reader sees nothing or the whole. A full disk loses only the
        write.

        Raises:
            ValueError: `content` is not what the manifest names (a bug of the caller: nothing is stored).
        """
        if blake3(content).digest() != meta.content:
            raise ValueError("content does not have the digest that the manifest names")
        manifest, bare = Entry(signed_manifest, meta), Entry(content, Meta(cost_s=meta.cost_s))
        lost = ""
        with self._key_turn(key), self._content_turn(meta.content):
            try:
                self.tiers.put(Space.CONTENT, meta.content, bare)
                self.tiers.put(Space.MANIFEST, key, manifest)
                if not self.tiers.slow.contains(Space.CONTENT, meta.content):
                    # Another process removed it between the two writes, with its last manifest. Now ours
                    # names it.
                    self.tiers.put(Space.CONTENT, meta.content, bare)
            except TierError as error:
                lost = str(error)
                log.warning(
                    "write lost", extra={"key": key.hex()[:12], "tier": error.tier, "reason": error.reason}
                )
                # Without its content below, the manifest belongs to the fast tier only.
                self._put_fast(key, manifest)
        facts = decode_facts(meta.facts)
        with self._lock:
            self._published.add(key)
        if facts is not None:
            self.families.add(key, facts)
        return Published(lost)

    def remove(self, key: bytes) -> bool:
        """Remove the artifact, and its content when no other manifest names it; tell whether there was one.

        Raises:
            TierError: a tier that may hold it could not be changed.
        """
        with self._key_turn(key):
            meta = self._meta(key)
            with self._content_turn(meta.content):
                removed = self.tiers.delete(Space.MANIFEST, key)
            self._forget(key, meta)
        return removed

    def quarantine(self, key: bytes, reason: str) -> bool:
        """Set the manifest and its content aside (both are evidence) so that neither is served again."""
        log.warning("entry set aside", extra={"key": key.hex()[:12], "reason": reason})
        with self._key_turn(key):
            meta = self._meta(key)
            with self._content_turn(meta.content):
                done = self.tiers.quarantine(Space.MANIFEST, key)
                if meta.content:
                    done = self.tiers.quarantine(Space.CONTENT, meta.content) or done
            self._forget(key, meta)
        return done

    def entries(self) -> Iterator[EntryInfo]:
        """Yield what all tiers hold, each once, in no order. Raises: TierUnavailableError (no answer)."""
        for stored in self.tiers.iterate(Space.MANIFEST):
            facts = decode_facts(stored.meta.facts) or Facts()
            size_bytes = stored.size_bytes + facts.content_bytes
            yield EntryInfo(
                stored.name, facts, stored.meta.content, size_bytes, self._hits.get(stored.name, 0)
            )

    def namespaces_of(self, digest: bytes) -> frozenset[str]:
        """Return the namespaces whose manifests name this content.

        Costs a look at an index and one read per manifest that names it; next to nothing for a content that
        is not there. Raises: TierUnavailableError.
        """
        entries = (self._uncounted(key) for key in self.tiers.naming(digest)[:MAX_NAMING])
        facts = [decode_facts(entry.meta.facts) for entry in entries if entry is not None]
        return frozenset(known.namespace for known in facts if known is not None)

    def hits(self, key: bytes) -> int:
        """Return how often this artifact was found since daemon start, as far as it is remembered."""
        with self._lock:
            return self._hits.get(key, 0)

    def fill_families(self, pause: Callable[[], bool] = lambda: True) -> int:
        """Make the family index agree with what is stored; return how many artifacts were seen.

        For a background thread: `pause` is called now and then, and ends the work by answering False.
        """
        seen: set[bytes] = set()
        with self._lock:
            self._published = set()
        try:
            for info in self.entries():
                self.families.add(info.key, info.facts)
                seen.add(info.key)
                if len(seen) % FAMILY_BATCH == 0 and not pause():
                    return len(seen)
        except TierUnavailableError:
            return len(seen)  # It is filled again after the next successful `maintain`.
        # What tiers evicted since is known to nobody else: families and hits would grow for ever.
        with self._lock:
            alive = seen | self._published
            self._hits = {key: hits for key, hits in self._hits.items() if key in alive}
        self.families.keep(alive)
        return len(seen)

    def lookups(self) -> dict[str, dict[str, int]]:
        return {name: tier.lookups() for name, tier in self._measured.items()}

    def get_seconds(self) -> dict[str, float]:
        return {name: tier.get_seconds() for name, tier in self._measured.items()}

    def usage(self) -> Usage:
        return self.tiers.usage()

    def health(self) -> str:
        return self.tiers.health()

    def _hit(self, key: bytes, entry: Entry) -> Found:
        with self._lock:
            self._hits[key] = self._hits.get(key, 0) + 1
        # A hit refreshes all parts that it names, in the tiers that did not see it too.
        self.tiers.touch(Space.MANIFEST, (key,))
        self.tiers.touch(Space.CONTENT, (entry.meta.content,))
        return Found(entry.data, entry.meta, entry.tier)

    def inspect(self, key: bytes) -> bytes | None:
        """Return the serialised SignedManifest for people to look at, without counting it as a lookup."""
        entry = self._uncounted(key)
        return None if entry is None else entry.data

    def _meta(self, key: bytes) -> Meta:
        """Find what is kept beside the manifest."""
        entry = self._uncounted(key)
        return Meta() if entry is None else entry.meta

    def _uncounted(self, key: bytes) -> Entry | None:
        for tier in (self.tiers.fast, self.tiers.slow):
            inner = tier.base if isinstance(tier, MeasuredTier) else tier
            try:
                entry = inner.get(Space.MANIFEST, key)
            except TierError:
                continue
            if entry is not None:
                return entry
        return None

    def _put_fast(self, key: bytes, entry: Entry) -> None:
        try:
            self.tiers.fast.put(Space.MANIFEST, key, entry)
        except TierError as error:
            log.warning(
                "write lost", extra={"key": key.hex()[:12], "tier": error.tier, "reason": error.reason}
            )

    def _forget_dangling(self, key: bytes, entry: Entry) -> Found | None:
        """Count a manifest whose content is gone as a miss, and drop it, that it does not mislead again.

        Unless it was published anew since it was read: then it is a hit after all.
        """
        with self._key_turn(key):
            current = self._uncounted(key)
            if current is not None and self._has_content(current.meta.content):
                return self._hit(key, current)
            if entry.tier in self._measured:
                self._measured[entry.tier].recount_as_miss(Space.MANIFEST)
            log.warning("content lost", extra={"key": key.hex()[:12], "tier": entry.tier})
            try:
                with self._content_turn(entry.meta.content):
                    self.tiers.delete(Space.MANIFEST, key)
            except TierError:
                return None  # Read-only or away: the next lookup finds the same and misses the same.
            self._forget(key, entry.meta)
        return None

    def _has_content(self, digest: bytes) -> bool:
        try:
            return self.tiers.contains(Space.CONTENT, digest)
        except TierUnavailableError:
            return False

    def _forget(self, key: bytes, meta: Meta) -> None:
        facts = decode_facts(meta.facts)
        if facts is not None:
            self.families.discard(key, facts.family)
        with self._lock:
            self._hits.pop(key, None)

    def _key_turn(self, key: bytes) -> threading.Lock:
        return self._key_stripes[key[0] % 64 if key else 0]

    def _content_turn(self, digest: bytes) -> threading.Lock:
        return self._content_stripes[digest[0] % 64 if digest else 0]
