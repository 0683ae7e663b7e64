"""Has the daemon hold what hosts will ask for: looks all of it up, and has what is missing compiled.

Loads and fetches nothing. A host that waits goes before `warm`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final

from fuse_cache.client.client import LOOKUP_ITEMS, PARALLEL_COMPILES, Client
from fuse_cache.client.errors import DaemonRefusedError, DaemonUnavailableError
from fuse_cache.client.verify import Want
from fuse_cache.client.warm.outcome import Outcome, State
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.artifact_pb2 import Manifest, SignedManifest
from fuse_cache.proto.limits import CHUNK_BYTES

_BUSY_S: Final = 1.0  # Between two tries at a daemon whose queue is full.


@dataclass(frozen=True, slots=True)
class Question:
    """One want of one model."""

    model: str
    want: Want


class Asker:
    """Asks one daemon, as a host does that has the toolchain of `offer`."""

    def __init__(self, client: Client, offer: wire.ToolchainOffer) -> None:
        self._client = client
        self._offer = offer

    def stored(self, questions: Sequence[Question]) -> list[Outcome | None]:
        """Look all of them up: what is stored has an outcome.

        Raises:
            DaemonUnavailableError, DaemonRefusedError
        """
        outcomes: list[Outcome | None] = []
        for first in range(0, len(questions), LOOKUP_ITEMS):
            part = questions[first : first + LOOKUP_ITEMS]
            request = self._client.lookup_request([item.want for item in part])
            request.inline_limit_bytes = 0
            request.toolchain.CopyFrom(self._offer.toolchain)
            results = self._client.transport.lookup(request, self._client.options.answer_bound_s).results
            for item, result in zip(part, results, strict=True):
                outcomes.append(self._had(item, "stored", result.manifest) if result.found else None)
        return outcomes

    def compile(self, questions: Iterable[Question], heard: Callable[[Outcome], None]) -> None:
        """Have each compiled, several at a time; tell of each as it ends. Raises nothing that a daemon
        causes. `heard` is called from this thread."""
        with ThreadPoolExecutor(PARALLEL_COMPILES, thread_name_prefix="fuse-cache-warm") as pool:
            for future in as_completed([pool.submit(self._compile_one, item) for item in questions]):
                heard(future.result())

    def _compile_one(self, item: Question) -> Outcome:
        ends_s = time.monotonic() + self._client.options.compile_timeout_s
        while True:
            try:
                done = self._follow(item, ends_s - time.monotonic())
            except DaemonRefusedError as error:
                if error.reason == "QUEUE_FULL" and time.monotonic() + _BUSY_S < ends_s:
                    time.sleep(_BUSY_S)
                    continue
                return self._outcome(item, "failed", reason=str(error))
            except DaemonUnavailableError as error:
                return self._outcome(item, "failed", reason=str(error))
            return self._had(item, "stored" if done.was_stored else "compiled", done.manifest)

    def _follow(self, item: Question, timeout_s: float) -> wire.Done:
        start = self._client.compile_start(item.want)
        start.priority = wire.PRIORITY_WARM
        start.inline_limit_bytes = 0
        start.toolchain.CopyFrom(self._offer.toolchain)
        start.model = item.model
        for event in self._client.transport.compile(start, item.want.graph, CHUNK_BYTES, timeout_s):
            kind = event.WhichOneof("event")
            if kind == "done":
                return event.done
            if kind == "failed":
                reason = wire.ErrorReason.Name(event.failed.reason).removeprefix("ERROR_REASON_")
                stage = f" ({event.failed.stage})" if event.failed.stage else ""
                raise DaemonRefusedError(reason, event.failed.message + stage)
        raise DaemonUnavailableError("the daemon ended a compilation without an answer")

    def missing(self, item: Question) -> Outcome:
        """Return the outcome of a want that is not there."""
        return self._outcome(item, "missing")

    def _had(self, item: Question, state: State, signed: SignedManifest) -> Outcome:
        manifest = Manifest.FromString(signed.manifest)
        return self._outcome(
            item, state, key=manifest.key, bytes=manifest.content.size_bytes, seconds=manifest.compile_seconds
        )

    def _outcome(self, item: Question, state: State, **found: Any) -> Outcome:
        fields = item.want.fields
        return Outcome(
            model=item.model,
            target=fields.target,
            target_facts=fields.target_facts,
            compile_range=fields.range,
            toolchain=self._offer.name,
            state=state,
            **found,
        )
