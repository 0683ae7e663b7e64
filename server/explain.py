"""Why a lookup missed, and what the passes did in a stored artifact."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fuse_cache.proto.artifact_pb2 import KeyField, Manifest, SignedManifest
from fuse_cache.proto.compile_pb2 import ExplainRequest, ExplainResponse, FieldDifference, Neighbour
from fuse_cache.proto.compile_pb2 import Miss as WireMiss
from fuse_cache.server.admission import Admitted, check_digest
from fuse_cache.server.cache.store import Store
from fuse_cache.server.errors import InvalidRequestError, NotFoundError
from fuse_cache.server.kept_graphs import KeptGraphs
from fuse_cache.server.key import difference
from fuse_cache.server.misses import Described, Miss, MissLog
from fuse_cache.server.pass_runs import PassRuns

RECENT = 20  # Misses of one answer.
NEAREST = 3  # Entries compared with each, of those examined the ones with the fewest differences.
_NOT_KEPT = (
    "this daemon no longer has the graph: an artifact is stored without it. Compile once more with option "
    "dump_dir, and explain the .fcgraph file that is written there"
)
EXAMINED = 512  # Manifests read for one answer: 30 ms of disk reads in the store's threads.


class Explainer:
    """Answers `Explain`."""

    def __init__(self, store: Store, misses: MissLog, runs: PassRuns, kept: KeptGraphs) -> None:
        self._store = store
        self._misses = misses
        self._runs = runs
        self._kept = kept

    def note_miss(self, admitted: Admitted) -> None:
        """Note all fields of a request that went on to Compile."""
        fields = admitted.key.describe() + admitted.request.describe()
        self._misses.add(admitted.key.namespace, admitted.key.request_digest, fields)

    async def explain(self, request: ExplainRequest) -> ExplainResponse:
        """Answer one request.

        Raises:
            NotFoundError: nothing is known of it.
            InvalidRequestError: malformed, or the passes cannot run on it.
            BusyError, UnavailableError: no worker has time for a run of the passes.
        """
        subject = request.WhichOneof("subject")
        if subject == "key":
            return await self._artifact(request.namespace, request.key, with_graphs=request.with_graphs)
        if subject == "miss_request_digest":
            return await self._explain_misses(request.namespace, request.miss_request_digest)
        if subject == "graph":
            return await self._runs.run(request.graph, request.request)
        raise InvalidRequestError("REQUEST_MALFORMED", "name a miss, a key or a graph")

    async def _artifact(self, namespace: str, key: bytes, *, with_graphs: bool) -> ExplainResponse:
        check_digest("key", key)
        manifest = await self._manifest(key)
        if manifest is None or manifest.namespace != namespace:
            raise NotFoundError("UNSPECIFIED", "no such artifact in this namespace")
        told = ExplainResponse(
            passes=manifest.passes,
            near_misses=manifest.near_misses,
            target=manifest.target,
            nodes=manifest.nodes,
            range=manifest.range,
        )
        if not with_graphs:
            return told
        kept = await asyncio.to_thread(self._kept.find, key)
        if kept is None:
            told.graphs_missing = _NOT_KEPT
            return told
        again = await self._runs.run(*kept)
        # The table stays that of the build: it is what was signed.
        told.dumps.extend(again.dumps)
        told.patterns.extend(again.patterns)
        return told

    async def _explain_misses(self, namespace: str, digest: bytes) -> ExplainResponse:
        if digest:
            check_digest("miss_request_digest", digest)
            miss = self._misses.find(namespace, digest)
            if miss is None:
                raise NotFoundError("UNSPECIFIED", "this request did not miss here lately")
            misses = [miss]
        else:
            misses = self._misses.recent(namespace)[:RECENT]
        stored = await self._stored(namespace) if misses else []
        return ExplainResponse(misses=[_to_message(miss, stored) for miss in misses])

    async def _stored(self, namespace: str) -> list[tuple[bytes, Described]]:
        found = []
        async for info in self._store.iterate():
            if info.facts.namespace != namespace:
                continue
            manifest = await self._manifest(info.key)
            if manifest is not None:
                found.append((info.key, [(field.name, field.value) for field in manifest.key_fields]))
            if len(found) >= EXAMINED:
                break
        return found

    async def _manifest(self, key: bytes) -> Manifest | None:
        found = await self._store.inspect(key)
        return None if found is None else Manifest.FromString(SignedManifest.FromString(found).manifest)


def _to_message(miss: Miss, stored: Iterable[tuple[bytes, Described]]) -> WireMiss:
    names = {name for name, _ in miss.fields}
    neighbours = []
    for key, fields in stored:
        # A miss that never came to Compile is known by fewer fields; only those can be compared.
        comparable = [(n, v) for n, v in fields if n in names or n.startswith("pass.")]
        differences = [d for d in difference(miss.fields, comparable) if d[0] != "request_digest"]
        neighbours.append((len(differences), key, differences))
    neighbours.sort(key=lambda item: item[:2])
    return WireMiss(
        request_digest=miss.request_digest,
        unix_ms=miss.unix_ms,
        fields=[KeyField(name=name, value=value) for name, value in miss.fields],
        nearest=[
            Neighbour(
                key=key,
                differences=[
                    FieldDifference(name=name, wanted=wanted or "", stored=have or "")
                    for name, wanted, have in differences
                ],
            )
            for _, key, differences in neighbours[:NEAREST]
        ],
    )
