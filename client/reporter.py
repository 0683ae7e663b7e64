"""Tells the daemon in the background what became of artifacts: used, or bad and why. Loses reports rather
than time."""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from fuse_cache.client.errors import FuseCacheError
from fuse_cache.client.forklock import ForkLock
from fuse_cache.proto import compile_pb2 as wire

# A model has some hundred artifacts; past this the daemon is away, and reports are dropped.
QUEUE_ITEMS = 1024
GATHER_S = 0.2  # Artifacts of one model come in a row: one call for all of them.
EXIT_S = 0.5  # What an ending process waits for its last report.
_DETAIL_BYTES = 1024


class Reporter:
    """Queues verdicts and sends them from a thread of its own. Safe for concurrent use and after a fork."""

    def __init__(self, send: Callable[[wire.ReportRequest], None], namespace: str) -> None:
        self._send = send
        self._namespace = namespace
        self._pid = -1
        self._lock = ForkLock()  # Guards the start of the thread.
        self._items: queue.Queue[wire.ReportItem] = queue.Queue(QUEUE_ITEMS)
        self._idle = threading.Event()
        self.dropped = 0

    def used(self, key: bytes, content_digest: bytes) -> None:
        """Say that an artifact was called."""
        self._put(wire.ReportItem(key=key, content_digest=content_digest, verdict=wire.VERDICT_USED, count=1))

    def tuned(self, key: bytes, content_digest: bytes, choices: Mapping[str, str]) -> None:
        """Say which variant of each kernel won."""
        self._put(
            wire.ReportItem(
                key=key,
                content_digest=content_digest,
                verdict=wire.VERDICT_TUNED,
                count=1,
                choices=[
                    wire.KernelChoice(kernel=kernel, cubin=cubin) for kernel, cubin in sorted(choices.items())
                ],
            )
        )

    def bad(self, key: bytes, content_digest: bytes, verdict: str, detail: str) -> None:
        """Say that an artifact failed, with a name of Verdict."""
        self._put(
            wire.ReportItem(
                key=key,
                content_digest=content_digest,
                verdict=wire.Verdict.Value(f"VERDICT_{verdict}"),
                detail=detail.encode()[:_DETAIL_BYTES].decode(errors="ignore"),
                count=1,
            )
        )

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was said is sent or given up. False: it took longer."""
        if self._pid != os.getpid():
            return True
        return self._idle.wait(timeout_s)

    def _put(self, item: wire.ReportItem) -> None:
        self._start()
        self._idle.clear()
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def _start(self) -> None:
        if self._pid != os.getpid():
            # After a fork the parent's thread is not here, and its lock may be held for ever.
            self._lock = ForkLock()
        with self._lock:
            if self._pid == os.getpid():
                return
            self._pid = os.getpid()
            self._items = queue.Queue(QUEUE_ITEMS)
            self._idle = threading.Event()
            threading.Thread(
                target=self._run, args=(self._items, self._idle), name="fuse-cache-report", daemon=True
            ).start()
            atexit.register(self.flush, EXIT_S)

    def _run(self, items: queue.Queue[wire.ReportItem], idle: threading.Event) -> None:
        while True:
            batch = [items.get()]
            threading.Event().wait(GATHER_S)
            while not items.empty():
                batch.append(items.get())
            try:
                self._send(wire.ReportRequest(namespace=self._namespace, items=_merge(batch)))
            except (FuseCacheError, RuntimeError):
                # RuntimeError: a first call opens a channel, whose threads Python 3.12 does not start once
                # the process is ending.
                self.dropped += len(batch)
            if items.empty():
                idle.set()


def _merge(batch: list[wire.ReportItem]) -> list[wire.ReportItem]:
    """Add up equal verdicts."""
    counts: Counter[bytes] = Counter()
    for item in batch:
        counts[item.SerializeToString(deterministic=True)] += 1
    merged = []
    for data, count in counts.items():
        item = wire.ReportItem.FromString(data)
        item.count = count
        merged.append(item)
    return merged
