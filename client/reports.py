"""What became of each graph in this process: `report()`.

One `GraphReport` per artifact: a graph that was compiled for three ranges has three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, overload

from fuse_cache.client.forklock import ForkLock
from fuse_cache.proto.artifact_pb2 import Manifest, PassRecord
from fuse_cache.proto.pass_config import ResolvedPassConfig
from fuse_cache.proto.request import Range

Source: TypeAlias = Literal["memory", "disk", "daemon", "compiled", "local"]


@dataclass(slots=True, kw_only=True)
class GraphReport:
    """One artifact of this process.

    `source` "compiled": a compilation that ran, or was running, for this request answered it; "daemon": it
    was stored already; "memory" and "disk": the client's own tiers; "local": compiled here, and `reason` says
    why. `seconds` is all of the time from Dynamo's hand-over to a callable, `lookup_seconds` the part until
    the daemon's first answer.
    """

    key: str
    source: Source
    reason: str = ""
    seconds: float = 0.0
    lookup_seconds: float = 0.0
    compile_range: tuple[int, int] | None = None  # None: no symbolic size
    target: str = ""
    fusions: dict[str, int] = field(default_factory=dict)
    near_misses: list[dict[str, str]] = field(default_factory=list)
    used: bool = False
    nodes: int = 0
    cudagraph_mode: str = "NONE"
    # Every pass: name, on, reason; of the build also candidates, matches, milliseconds and bytes_saved, which
    # is an estimate for one call, and 0 where a size is symbolic.
    passes: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain data: what JSON can hold."""
        plain = dataclasses.asdict(self)
        plain["compile_range"] = list(self.compile_range) if self.compile_range else None
        return plain


def cudagraph_mode(target: str, wished: str) -> str:
    """Return the mode to recommend for an artifact: there are no CUDA graphs on a CPU, whatever the level."""
    return "NONE" if target.startswith("cpu") else wished or "NONE"


def describe_manifest(
    report: GraphReport, manifest: Manifest, resolved: ResolvedPassConfig, compile_range: Range
) -> None:
    """Fill in what a manifest says of the artifact's passes. Why each is on or off is the client's own to
    say: the daemon knows the effect of a configuration, not the wish."""
    report.key = manifest.key.hex()
    report.target = manifest.target
    report.nodes = manifest.nodes
    report.cudagraph_mode = cudagraph_mode(
        manifest.target, resolved.cudagraph_mode or manifest.cudagraph_mode
    )
    report.fusions = {row.name: row.matches for row in manifest.passes if row.is_fusion and row.on}
    report.near_misses = [
        {"pass": getattr(miss, "pass"), "reason": miss.reason, "node": miss.node, "detail": miss.detail}
        for miss in manifest.near_misses
    ]
    rows = {row.name: row for row in manifest.passes}
    report.passes = [
        pass_row(name, on, reason, rows.get(name, PassRecord()))
        for name, on, reason in resolved.reasons(compile_range)
    ]


class PassNumbers(Protocol):
    """What a pass did: a manifest's record or one of the passes' own."""

    @property
    def candidates(self) -> int: ...
    @property
    def matches(self) -> int: ...
    @property
    def milliseconds(self) -> float: ...
    @property
    def bytes_saved(self) -> int: ...


def pass_row(name: str, on: bool, reason: str, did: PassNumbers) -> dict[str, Any]:
    """Return one row of `GraphReport.passes`."""
    return {
        "name": name,
        "on": on,
        "reason": reason,
        "candidates": did.candidates,
        "matches": did.matches,
        "milliseconds": did.milliseconds,
        "bytes_saved": did.bytes_saved,
    }


_lock = ForkLock()  # Guards _reports. Nothing else is taken while it is held.
_reports: list[GraphReport] = []


def add(report: GraphReport) -> GraphReport:
    """Keep `report` for `report()` and return it. It may still change: `used` does."""
    with _lock:
        _reports.append(report)
    return report


def clear() -> None:
    """Forget all reports: for tests, and for processes that count from a point of their own."""
    with _lock:
        _reports.clear()


@overload
def report(json: Literal[False] = False) -> list[GraphReport]: ...
@overload
def report(json: Literal[True]) -> list[dict[str, Any]]: ...
def report(json: bool = False) -> list[GraphReport] | list[dict[str, Any]]:
    """Return one `GraphReport` per graph compiled or loaded in this process, oldest first; `json=True`: as
    plain data."""
    with _lock:
        reports: Iterable[GraphReport] = tuple(_reports)
    return [item.as_dict() for item in reports] if json else list(reports)
