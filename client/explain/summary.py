"""What the passes did, in words: the numbers of the table, for terminal and page alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuse_cache.client.explain.advice import MissGroup, group_misses
from fuse_cache.proto.artifact_pb2 import PassRecord
from fuse_cache.proto.compile_pb2 import ExplainResponse

_NODES = 8  # Named in the terminal of one group; the page and --json have all.
_DETAILS = 3
COLUMNS = ("pass", "on", "why", "candidates", "matched", "ms", "bytes saved a call")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is explained: a stored key in hex, or a graph file."""

    name: str
    key: str = ""


def row(record: PassRecord) -> tuple[str, ...]:
    """Return one pass as the cells of `COLUMNS`."""
    counts = [str(record.candidates), str(record.matches), f"{record.milliseconds:.1f}"]
    cells = [*counts, saved(record)] if record.on else ["", "", "", ""]
    return (record.name, "yes" if record.on else "no", record.reason, *cells)


def saved(record: PassRecord) -> str:
    """Return the memory traffic that the pass saves, as far as it is known."""
    if record.bytes_saved:
        return size_text(record.bytes_saved)
    return "depends on sizes" if record.is_fusion and record.matches else ""


def size_text(size_bytes: int) -> str:
    """Return a number of bytes as people read it."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def headline(response: ExplainResponse) -> str:
    """Return target, size and range of the graph in one line."""
    bounds = response.range
    sizes = f"sizes {bounds.lower} to {bounds.upper}" if bounds.symbol_plus_one else "static sizes"
    fused = sum(record.matches for record in response.passes if record.is_fusion and record.on)
    return (
        f"{response.target}, {response.nodes} nodes, {sizes}; {fused} fused, {len(response.near_misses)} not"
    )


def print_summary(console: Console, subject: Subject, response: ExplainResponse) -> None:
    """Print the table of passes and the near misses by reason, with what to do about each."""
    # Texts, not markup: names come from a model, and may hold what rich takes for a colour.
    table = Table(title=Text(f"fusions of {subject.name}"), caption=Text(headline(response)))
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in COLUMNS[3:] else "left")
    for record in response.passes:
        style = "bold" if record.is_fusion and record.matches else "" if record.on else "dim"
        table.add_row(*(Text(cell) for cell in row(record)), style=style)
    console.print(table)
    groups = group_misses(response.near_misses)
    if groups:
        console.print(Text(f"\nnot fused ({len(response.near_misses)}):"))
    for group in groups:
        _print_group(console, group)
    if response.graphs_missing:
        console.print(Text(f"\nno graphs: {response.graphs_missing}"))


def _print_group(console: Console, group: MissGroup) -> None:
    console.print(
        Text.assemble(
            "\n", (f"{len(group.nodes)} x {group.reason}", "bold"), f" ({group.pass_name}): {group.advice}"
        )
    )
    console.print(Text(f"  at {_some(group.nodes, _NODES)}"))
    for detail in group.details[:_DETAILS]:
        console.print(Text(f"  {detail}"))
    if (more := len(group.details) - _DETAILS) > 0:
        console.print(Text(f"  and {more} other details"))


def _some(names: Sequence[str], count: int) -> str:
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"


def as_dict(subject: Subject, response: ExplainResponse) -> dict[str, Any]:
    """Return the same as plain data."""
    bounds = response.range
    return {
        "subject": subject.name,
        "key": subject.key,
        "target": response.target,
        "nodes": response.nodes,
        "compile_range": [bounds.lower, bounds.upper] if bounds.symbol_plus_one else None,
        "passes": passes_as_dicts(response.passes),
        "near_misses": [
            {"pass": getattr(miss, "pass"), "reason": miss.reason, "node": miss.node, "detail": miss.detail}
            for miss in response.near_misses
        ],
        "advice": {group.reason: group.advice for group in group_misses(response.near_misses)},
        "changes": [
            {
                "pass": getattr(dump, "pass"),
                "nodes_before": dump.nodes_before,
                "nodes_after": dump.nodes_after,
                "sites": sum(site.times for site in dump.sites),
            }
            for dump in response.dumps
        ],
        "patterns": {field.name: field.value for field in response.patterns},
        "graphs_missing": response.graphs_missing,
    }


def passes_as_dicts(records: Iterable[PassRecord]) -> list[dict[str, Any]]:
    """Return pass records as plain data."""
    return [
        {
            "name": record.name,
            "on": record.on,
            "reason": record.reason,
            "candidates": record.candidates,
            "matches": record.matches,
            "milliseconds": record.milliseconds,
            "bytes_saved": record.bytes_saved,
            "is_fusion": record.is_fusion,
        }
        for record in records
    ]
