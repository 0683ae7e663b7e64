"""The life of a compilation: who may move it from where to where, single flight per key, and who goes next.

Two rules. Everything that changes a job's state is an event of the table below, applied by `Jobs.apply`; an
event that the table does not have is a bug and raises. And nothing here waits, reads or writes: listeners are
told that something changed, and look for themselves.

A job belongs to nobody: the request that caused it may go, the job goes on. Only while no graph has come yet
does it need somebody who can send one; when the last of those leaves in that state, it is abandoned, and who
merely waits hears so at once.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

REMEMBERED_S = 60.0  # Deterministic failures only; a fixed graph or daemon is tried again within a minute.
REMEMBERED = 4096  # Failures of about 1 KiB: 4 MiB at most.


class State(enum.Enum):
    """Where a job is."""

    WANTED = "wanted"  # nobody has sent the graph yet
    CHECKING = "checking"  # the validator has it
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"  # nobody was left who could send the graph


class Event(enum.Enum):
    """What can happen to a job."""

    UPLOADED = "uploaded"
    ACCEPTED = "accepted"
    STARTED = "started"
    BUILT = "built"
    BROKE = "broke"
    LEFT = "left"  # by the last one who could send the graph


NEXT: dict[State, dict[Event, State]] = {
    State.WANTED: {
        Event.UPLOADED: State.CHECKING,
        Event.BROKE: State.FAILED,
        Event.LEFT: State.ABANDONED,
    },
    State.CHECKING: {Event.ACCEPTED: State.QUEUED, Event.BROKE: State.FAILED},
    State.QUEUED: {Event.STARTED: State.RUNNING, Event.BROKE: State.FAILED},
    State.RUNNING: {Event.BUILT: State.DONE, Event.BROKE: State.FAILED},
    State.DONE: {},
    State.FAILED: {},
    State.ABANDONED: {},
}
FINAL = frozenset(state for state, events in NEXT.items() if not events)


class Priority(enum.IntEnum):
    """Lower goes first."""

    HOST = 1  # a host waits for it
    WARM = 2  # nobody waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a job failed. `reason` is an ErrorReason without its prefix.

    `refused`: the request itself was bad; each caller's call ends with INVALID_ARGUMENT rather than an event.
    """

    reason: str
    message: str
    stage: str = ""
    deterministic: bool = False
    refused: bool = False
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a job made: the serialised SignedManifest, and the content where it may go inline."""

    signed_manifest: bytes
    content_digest: bytes
    inline_content: bytes


@dataclass(slots=True, eq=False)
class Job:
    """One compilation. Change it through `Jobs` only."""

    key: bytes
    job_id: str
    priority: Priority
    namespace: str = ""
    state: State = State.WANTED
    uploader: object | None = None  # Who sends the graph at the moment; WANTED only.
    folder: Path | None = None  # Holds the graph from CHECKING on.
    stage: str = ""
    detail: str = ""
    since_s: float = 0.0
    result: Result | None = None
    failure: Failure | None = None
    listeners: set[Callable[[], None]] = field(default_factory=set)
    senders: set[Callable[[], None]] = field(default_factory=set)  # Listeners that can send the graph.
    order: int = 0

    @property
    def finished(self) -> bool:
        """Whether it has come to an end."""
        return self.state in FINAL


class Jobs:
    """All jobs that are not finished, by key, and the failures that are remembered. For one event loop."""

    def __init__(self, *, max_queue: int, now_s: Callable[[], float]) -> None:
        self._max_queue = max_queue
        self._now_s = now_s
        self._active: dict[bytes, Job] = {}
        self._queue: list[
            tuple[int, int, Job]
        ] = []  # A heap; a job may stand in it twice, the better one counts.
        self._counter = itertools.count()
        self._failures: OrderedDict[bytes, tuple[Failure, float, str]] = OrderedDict()
        self.on_queued: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._active.values()))

    def find(self, key: bytes) -> Job | None:
        """Return the job that runs for this key."""
        return self._active.get(key)

    def remembered(self, key: bytes, namespace: str) -> Failure | None:
        """Return the deterministic failure of the last minute, with the time until it is tried again.

        None also when it is another namespace's: what a graph of theirs failed of is theirs to know.
        """
        failure, until_s, owner = self._failures.get(key, (None, 0.0, ""))
        left_s = until_s - self._now_s()
        if failure is None or left_s <= 0:
            self._failures.pop(key, None)
            return None
        if owner != namespace:
            return None
        return Failure(
            reason=failure.reason,
            message=failure.message,
            stage=failure.stage,
            deterministic=True,
            refused=failure.refused,
            retry_after_s=left_s,
        )

    def join(self, key: bytes, job_id: str, priority: Priority, namespace: str = "") -> Job:
        """Return the job of this key: the one that runs, or a new one that wants its graph.

        The better priority wins.
        """
        job = self._active.get(key)
        if job is None:
            job = self._active[key] = Job(
                key, job_id, priority, namespace, since_s=self._now_s(), order=next(self._counter)
            )
        elif priority < job.priority:
            job.priority = priority
            if job.state is State.QUEUED:
                heapq.heappush(self._queue, (priority, job.order, job))
        return job

    def has_room(self) -> bool:
        """Whether another job may be taken in."""
        return sum(not job.finished and job.state is not State.RUNNING for job in self) < self._max_queue

    def apply(
        self, job: Job, event: Event, *, result: Result | None = None, failure: Failure | None = None
    ) -> None:
        """Move a job and tell its listeners.

        Raises:
            KeyError: the table has no such move: a bug.
        """
        job.state = NEXT[job.state][event]
        job.since_s = self._now_s()
        job.result, job.failure = result, failure
        if job.state is not State.WANTED:
            job.uploader = None
        if job.state is State.QUEUED:
            heapq.heappush(self._queue, (job.priority, job.order, job))
            self.on_queued()
        if job.finished:
            if self._active.get(job.key) is job:
                del self._active[job.key]
            if failure is not None and failure.deterministic:
                self._remember(job, failure)
        self.changed(job)

    def progress(self, job: Job, stage: str, detail: str) -> None:
        """Note what a running job is at."""
        job.stage, job.detail = stage, detail
        self.changed(job)

    def listen(self, job: Job, listener: Callable[[], None], *, can_send: bool) -> None:
        """Add a listener; with `can_send` one that sends the graph when it is its turn."""
        job.listeners.add(listener)
        if can_send:
            job.senders.add(listener)

    def leave(self, job: Job, listener: Callable[[], None]) -> None:
        """Take a listener away. A job that still wants a graph, with nobody left to send it, is abandoned."""
        job.listeners.discard(listener)
        job.senders.discard(listener)
        if job.state is State.WANTED and not job.senders:
            self.apply(job, Event.LEFT)

    def changed(self, job: Job) -> None:
        """Tell the listeners of a job to look again."""
        for listener in list(job.listeners):
            listener()

    def next_queued(self) -> Job | None:
        """Take the job that goes next."""
        while self._queue:
            _, _, job = heapq.heappop(self._queue)
            if job.state is State.QUEUED:
                return job
        return None

    def position(self, job: Job) -> int:
        """Return how many queued jobs go before this one."""
        ours = (job.priority, job.order)
        return sum(
            other.state is State.QUEUED and (other.priority, other.order) < ours
            for other in self._active.values()
            if other is not job
        )

    def _remember(self, job: Job, failure: Failure) -> None:
        self._failures[job.key] = (failure, self._now_s() + REMEMBERED_S, job.namespace)
        self._failures.move_to_end(job.key)
        while len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)
