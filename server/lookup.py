"""Answers lookups: finish the key, ask the store, and put small content into the reply."""

from __future__ import annotations

from collections.abc import Callable

from fuse_cache.proto.artifact_pb2 import Manifest, SignedManifest
from fuse_cache.proto.compile_pb2 import LookupItem, LookupRequest
from fuse_cache.proto.limits import INLINE_BYTES
from fuse_cache.proto.revision import TUNED_REVISION, revised_key
from fuse_cache.server import reply
from fuse_cache.server.admission import check_digest, check_namespace, check_target
from fuse_cache.server.builders import Builders, host_of
from fuse_cache.server.cache.answers import Found
from fuse_cache.server.cache.facts import decode_facts
from fuse_cache.server.cache.store import Store
from fuse_cache.server.epoch import Epoch
from fuse_cache.server.errors import InvalidRequestError
from fuse_cache.server.fetch import Grants
from fuse_cache.server.jobs import Jobs
from fuse_cache.server.key import KeyFields, difference
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.misses import MissLog

MAX_ITEMS = 1024
MAX_PASSES = 64
REPLY_BYTES = 3 << 20  # Of one reply: clients refuse messages above 4 MiB unless told otherwise.
KEY_MEMO = 65536  # Keys of 32 bytes by their question: 20 MiB at most, and 30 us saved each.
MAX_COVERING = 4  # Candidates that are read for one item.

_Question = tuple[str, bytes, str, str, tuple[str, ...]]


class Lookups:
    """Answers `Lookup`. It never starts a compilation."""

    def __init__(
        self,
        *,
        store: Store,
        jobs: Jobs,
        builders: Builders,
        grants: Grants,
        misses: MissLog,
        metrics: Metrics,
        revocations: Callable[[], int],
    ) -> None:
        """`revocations` returns the version of the list of recalled builders."""
        self._store = store
        self._jobs = jobs
        self._builders = builders
        self._grants = grants
        self._misses = misses
        self._revocations = revocations
        self._counters = metrics.hot
        self._memo: dict[_Question, tuple[bytes, KeyFields] | None] = {}

    async def answer(self, request: LookupRequest) -> bytes:
        """Answer all items in their order; returns a serialised LookupResponse.

        Raises:
            InvalidRequestError: malformed.
        """
        namespace = request.namespace
        check_namespace(namespace)
        if len(request.items) > MAX_ITEMS:
            raise InvalidRequestError(
                "REQUEST_MALFORMED", f"items: {len(request.items)}, the limit is {MAX_ITEMS}"
            )
        host = host_of(request.toolchain, any_wheel=request.allow_cpu_wheel_builds)
        results: list[reply.Parts] = []
        # Of the builder that serves this host: of the first of its items that one can serve.
        epoch = "" if request.items else self._builders.first.epoch.name
        room = REPLY_BYTES
        inline_limit = min(request.inline_limit_bytes, INLINE_BYTES)
        for item in request.items:
            check_digest("request_digest", item.request_digest)
            check_target(item.target)
            builder = self._builders.choose(host, item.target)
            if builder is None:
                self._counters.mismatches += 1
                results.append(reply.MISS)
                continue
            epoch = epoch or builder.epoch.name
            parts = await self._answer_one(namespace, item, builder.epoch, inline_limit, room)
            room -= sum(map(len, parts))
            results.append(parts)
        return reply.response(results, epoch, self._revocations())

    async def _answer_one(
        self, namespace: str, item: LookupItem, epoch: Epoch, inline_limit: int, room: int
    ) -> reply.Parts:
        named = self._key(namespace, item, epoch)
        if named is None:  # A pass that does not exist here: nothing can be stored for it.
            self._counters.misses += 1
            return reply.MISS
        key, fields = named
        found = None
        if item.max_revision >= TUNED_REVISION:
            found = await self._store.get_manifest(revised_key(key))
        if found is None:
            found = await self._store.get_manifest(key)
        if found is None and item.allow_covering and item.family_digest:
            found = await self._covering(namespace, item, fields)
        content: bytes | None = b""
        if found is not None and len(found.data) <= room:
            content = await inline_content(self._store, found, min(inline_limit, room - len(found.data)))
        if found is None or content is None:
            self._misses.add(namespace, item.request_digest, fields.describe())
            if self._jobs.find(key) is not None:
                self._counters.running += 1
                return reply.RUNNING
            self._counters.misses += 1
            return reply.MISS
        if len(found.data) > room:
            # Compile answers it as stored. Better one more call than a reply that the client cannot receive.
            self._counters.no_room += 1
            return reply.MISS
        self._grants.add(namespace, found.meta.content)
        self._counters.hits += 1
        self._counters.seconds_saved += found.meta.cost_s
        self._counters.inline_bytes += len(content)
        return reply.hit(found.data, content, found.tier)

    def _key(self, namespace: str, item: LookupItem, epoch: Epoch) -> tuple[bytes, KeyFields] | None:
        if len(self._memo) >= KEY_MEMO:
            self._memo.clear()
        question = (epoch.name, item.request_digest, namespace, item.target, tuple(item.passes))
        if question not in self._memo:
            if len(item.passes) > MAX_PASSES:
                raise InvalidRequestError(
                    "REQUEST_MALFORMED", f"passes: {len(item.passes)}, the limit is {MAX_PASSES}"
                )
            try:
                fields = epoch.key_fields(
                    request_digest=item.request_digest,
                    namespace=namespace,
                    target=item.target,
                    passes=tuple(item.passes),
                )
                self._memo[question] = (fields.digest(), fields)
            except KeyError:
                return None
        return self._memo[question]

    async def _covering(self, namespace: str, item: LookupItem, wanted: KeyFields) -> Found | None:
        """Look for an artifact of the same family and passes whose range holds the one asked for."""
        candidates = self._store.covering(
            namespace,
            item.family_digest,
            symbol_plus_one=item.range.symbol_plus_one,
            lower=item.range.lower,
            upper=item.range.upper,
            max_revision=item.max_revision,
        )
        for key in candidates[:MAX_COVERING]:
            found = await self._store.get_manifest(key)
            if found is not None and _same_but_for_range(found, wanted):
                return found
        return None


async def inline_content(store: Store, found: Found, limit: int) -> bytes | None:
    """Return the content of a hit where it is not larger than `limit`, else nothing: it is to be fetched.

    None: it was looked for and is gone, or was found damaged just now. Then there is no hit.
    """
    if limit <= 0:
        return b""
    content = store.content_at_hand(found.meta.content)
    if content is None:
        facts = decode_facts(found.meta.facts)
        if facts is not None and facts.content_bytes > limit:
            return b""  # Not read from disk only to be thrown away.
        content = await store.get_content(found.meta.content)
    if content is None:
        return None
    return content.data if len(content.data) <= limit else b""


def _same_but_for_range(found: Found, wanted: KeyFields) -> bool:
    manifest = Manifest.FromString(SignedManifest.FromString(found.data).manifest)
    ours = wanted.describe()
    names = {name for name, _ in ours}
    # Passes that only the stored one ran have names of their own; fields of the request are not compared:
    # same family.
    theirs = [(f.name, f.value) for f in manifest.key_fields if f.name in names or f.name.startswith("pass.")]
    return all(name == "request_digest" for name, _, _ in difference(ours, theirs))
