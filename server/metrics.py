"""Every metric of the daemon, by name, in one table. No key, digest or model name is ever a label."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAST_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
_SLOW_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 900.0)


class HotCounters(Collector):
    """What every lookup counts: plain numbers of the event loop, made into metrics when somebody asks.

    prometheus_client takes a lock and four calls for each of them, 10 us of a hit together.
    """

    def __init__(self) -> None:
        self.hits = self.misses = self.running = self.no_room = self.mismatches = 0
        self.inline_bytes = self.fetched_bytes = 0
        self.seconds_saved = 0.0  # By all hits; what hosts could not use of it is in the next.
        self.seconds_rejected = 0.0

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        items = CounterMetricFamily(
            "fuse_cache_lookup_items", "Items of lookups, by what came of them.", labels=("outcome",)
        )
        for outcome in ("hits", "misses", "running", "no_room", "mismatches"):
            items.add_metric((outcome,), getattr(self, outcome))
        sent = CounterMetricFamily(
            "fuse_cache_content_bytes", "Content sent, inline or fetched.", labels=("way",)
        )
        sent.add_metric(("inline",), self.inline_bytes)
        sent.add_metric(("fetch",), self.fetched_bytes)
        saved = CounterMetricFamily(
            "fuse_cache_compile_seconds_saved", "Seconds that hits did not have to compile again."
        )
        saved.add_metric((), self.seconds_saved)
        rejected = CounterMetricFamily(
            "fuse_cache_compile_seconds_rejected",
            "Of the seconds saved, those of hits that a host then reported bad: it compiled after all.",
        )
        rejected.add_metric((), self.seconds_rejected)
        yield from (items, sent, saved, rejected)


class Metrics:
    """The daemon's counters. One object per daemon, so that tests may run several in a process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "fuse_cache_requests",
            "Calls that ended, by method and status code.",
            ("method", "code"),
            registry=registry,
        )
        self.seconds = Histogram(
            "fuse_cache_request_seconds", "Time from call to answer of unary methods.", ("method",),
            buckets=_FAST_S, registry=registry,
        )  # fmt: skip
        self.hot = HotCounters()
        registry.register(self.hot)
        self.compiles = Counter("fuse_cache_compiles", "Compilations started.", registry=registry)
        self.compile_ends = Counter(
            "fuse_cache_compile_ends",
            "Compilations ended, by reason (DONE, or an ErrorReason).",
            ("reason",),
            registry=registry,
        )
        self.compile_seconds = Histogram(
            "fuse_cache_compile_seconds",
            "Time of a compilation in its worker.",
            buckets=_SLOW_S,
            registry=registry,
        )
        self.seconds_spent = Counter(
            "fuse_cache_compile_seconds_spent", "Seconds that workers compiled.", registry=registry
        )
        self.publish_seconds = Histogram(
            "fuse_cache_publish_seconds", "Time from a worker's end to the event for who waits.",
            buckets=_FAST_S, registry=registry,
        )  # fmt: skip
        self.rejected_graphs = Counter(
            "fuse_cache_rejected_graphs", "Graphs refused, by reason.", ("reason",), registry=registry
        )
        self.reports = Counter(
            "fuse_cache_reports", "Artifacts reported on, by verdict.", ("verdict",), registry=registry
        )
        self.waiting = Gauge("fuse_cache_waiting", "Calls that wait for a compilation.", registry=registry)
        self.integrity_failures = Counter(
            "fuse_cache_integrity_failures",
            "Stored entries set aside, by what found them.",
            ("found_by",),
            registry=registry,
        )

        self._successes: dict[str, tuple[Counter, Histogram]] = {}

    def succeeded(self, method: str, seconds: float) -> None:
        """Count and time a call that ended well."""
        found = self._successes.get(method)
        if found is None:
            found = self._successes[method] = (
                self.requests.labels(method, "OK"),
                self.seconds.labels(method),
            )
        found[0].inc()
        found[1].observe(seconds)

    def render(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self.registry)


def value(metric: Counter | Gauge, **labels: str) -> float:
    """Return what a counter or gauge stands at; with labels of a family, that child's."""
    found = 0.0
    for family in metric.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created") and labels.items() <= sample.labels.items():
                found += sample.value
    return found
