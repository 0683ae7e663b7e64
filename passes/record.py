"""Keeps what each pass changed, for `explain`: the places that it changed, each with the nodes around it.

A model repeats its layers, and a pass then makes the same change in each: places with equal changes are kept
once, with their number. Changes no compilation.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from fuse_cache.passes.base import Pass
from fuse_cache.passes.dump import call_text, pattern_source, target_text, value_text

SITES = 24  # Kinds of changes kept of one pass.
SITE_CHANGES = 60  # Changed nodes in one place. A longer run of them is cut into several.
GAP = 2  # So many kept nodes between two changes do not part them.
NEIGHBOURS = 12  # Kept nodes around one place: a weight may have a reader in every layer.
ALSO = 100


class Mark(enum.Enum):
    """What became of a node."""

    KEPT = "kept"
    REMOVED = "removed"
    ADDED = "added"
    REWIRED = "rewired"


@dataclass(frozen=True, slots=True)
class ShownNode:
    """One node of a drawing. `inputs` are places in the drawing's own list."""

    name: str
    call: str
    value: str
    mark: Mark
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """One place that a pass changed, and how often the same change was made (`also_at`: where else)."""

    before: tuple[ShownNode, ...]
    after: tuple[ShownNode, ...]
    times: int
    also_at: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What one run of a pass changed."""

    pass_name: str
    nodes_before: int
    nodes_after: int
    sites: tuple[Site, ...]
    sites_left_out: int


class Recorder:
    """Is told the graph before and after each pass, and keeps `changes` in the order in which they ran."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.patterns: dict[str, str] = {}  # name of a pass -> its patterns, as Python
        self._before: _Snapshot | None = None

    def name_after(self, graph: fx.Graph) -> None:
        """Take the graph that is compiled: of no interest here."""

    def graph(self, graph: fx.Graph, pass_name: str, moment: str) -> None:
        """Take a graph "before" or "after" a pass."""
        if moment == "before":
            self._before = _Snapshot(graph)
            return
        assert self._before is not None
        self.changes.append(_compare(pass_name, self._before, _Snapshot(graph)))
        self._before = None

    def patterns_of(self, one: Pass) -> None:
        """Take a pass that is on."""
        if one.patterns:
            self.patterns[one.name] = pattern_source(one)


class _Snapshot:
    """One graph as it was. What a node reads is changed in place later, so it is kept here."""

    def __init__(self, graph: fx.Graph) -> None:
        self.reads: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.calls: dict[fx.Node, tuple[object, object, object]] = {}
        for node in graph.nodes:
            self.reads[node] = tuple(node.all_input_nodes)
            self.calls[node] = (node.target, node.args, node.kwargs)

    def users(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """Return who reads each of these nodes."""
        wanted: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
        for reader, reads in self.reads.items():
            for read in reads:
                if read in wanted:
                    wanted[read].append(reader)
        return wanted


def _compare(pass_name: str, before: _Snapshot, after: _Snapshot) -> Change:
    marks = _marks(before, after)
    windows = _windows(_merged(before, after), marks)
    users = [
        side.users(node for node, mark in marks.items() if mark is not Mark.KEPT) for side in (before, after)
    ]
    kinds: dict[tuple[tuple[Mark, str], ...], list[list[fx.Node]]] = {}
    for window in windows:
        kind = tuple((marks[node], target_text(_call_of(node, before, after)[0])) for node in window)
        kinds.setdefault(kind, []).append(window)
    sites = [
        Site(
            before=_draw(first, before, users[0], marks),
            after=_draw(first, after, users[1], marks),
            times=1 + len(others),
            also_at=tuple(other[0].name for other in others[:ALSO]),
        )
        for first, *others in list(kinds.values())[:SITES]
    ]
    return Change(pass_name, len(before.reads), len(after.reads), tuple(sites), max(0, len(kinds) - SITES))


def _call_of(node: fx.Node, before: _Snapshot, after: _Snapshot) -> tuple[object, object, object]:
    return after.calls[node] if node in after.calls else before.calls[node]


def _marks(before: _Snapshot, after: _Snapshot) -> dict[fx.Node, Mark]:
    marks = {node: Mark.REMOVED for node in before.reads if node not in after.reads}
    for node, reads in after.reads.items():
        if node not in before.reads:
            marks[node] = Mark.ADDED
        # Not by the arguments themselves: comparing sizes that are symbols would add guards.
        elif reads != before.reads[node] or before.calls[node][0] != after.calls[node][0]:
            marks[node] = Mark.REWIRED
        else:
            marks[node] = Mark.KEPT
    return marks


def _merged(before: _Snapshot, after: _Snapshot) -> list[fx.Node]:
    """Return all nodes in the order of `after`, removed ones where they stood: behind the same kept node."""
    behind: dict[fx.Node | None, list[fx.Node]] = {}
    last: fx.Node | None = None
    for node in before.reads:
        if node in after.reads:
            last = node
        else:
            behind.setdefault(last, []).append(node)
    merged = list(behind.get(None, ()))
    for node in after.reads:
        merged.append(node)
        merged += behind.get(node, ())
    return merged


def _windows(merged: Sequence[fx.Node], marks: dict[fx.Node, Mark]) -> list[list[fx.Node]]:
    """Return the changed nodes in runs that belong together."""
    windows: list[list[fx.Node]] = []
    gap = GAP + 1
    for node in merged:
        if marks[node] is Mark.KEPT:
            gap += 1
            continue
        if gap > GAP or len(windows[-1]) >= SITE_CHANGES:
            windows.append([])
        windows[-1].append(node)
        gap = 0
    # Reading another node is a part of the change beside it; alone it is only its far end.
    return [window for window in windows if any(marks[node] is not Mark.REWIRED for node in window)]


def _draw(
    window: Sequence[fx.Node],
    side: _Snapshot,
    users: dict[fx.Node, list[fx.Node]],
    marks: dict[fx.Node, Mark],
) -> tuple[ShownNode, ...]:
    """Return one place as it is on one side: the changed nodes, what they read, and what reads them."""
    core = {node: None for node in window if node in side.reads}
    around: dict[fx.Node, None] = {}
    for node in core:
        around.update(dict.fromkeys((*side.reads[node], *users.get(node, ()))))
    shown = set(core) | set([node for node in around if node not in core][:NEIGHBOURS])
    places = {node: place for place, node in enumerate(node for node in side.reads if node in shown)}
    return tuple(
        ShownNode(
            name=node.name,
            call=call_text(node.op, *side.calls[node]),
            value=value_text(node),
            mark=marks[node] if node in core else Mark.KEPT,
            inputs=tuple(places[read] for read in side.reads[node] if read in places),
        )
        for node in places
    )
