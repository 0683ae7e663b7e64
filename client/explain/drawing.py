"""Turns a place that a pass changed into boxes and lines with coordinates. The page's template draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuse_cache.client.explain.layout import place
from fuse_cache.proto import compile_pb2 as wire

BOX_HEIGHT = 50.0
_LETTER = 6.3  # Width of a letter of the page's 10.5 px monospace font, rounded up.
_PADDING = 8.0
_MARGIN = 6.0
_TEXT_LETTERS = 34
_CLASSES = {
    wire.MARK_KEPT: "kept",
    wire.MARK_REMOVED: "removed",
    wire.MARK_ADDED: "added",
    wire.MARK_REWIRED: "rewired",
}


@dataclass(frozen=True, slots=True)
class Box:
    """One node. `hint` is shown when it is pointed at."""

    left: float
    top: float
    width: float
    css: str
    lines: tuple[str, ...]
    hint: str


@dataclass(frozen=True, slots=True)
class Line:
    """One edge, as the data of an SVG path."""

    path: str
    css: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """One graph."""

    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]
    width: float
    height: float


def draw(nodes: Sequence[wire.DumpNode]) -> Drawing:
    """Lay out the nodes of one side of a site. A node reads only what stands before it; other edges, which a
    daemon should not send, are left out."""
    texts = [_lines(node) for node in nodes]
    widths = [max(len(line) for line in lines) * _LETTER + 2 * _PADDING for lines in texts]
    inputs = [sorted({read for read in node.inputs if read < own}) for own, node in enumerate(nodes)]
    placed = place(inputs, widths, BOX_HEIGHT)
    boxes = tuple(
        Box(
            left=_round(placed.left[number] + _MARGIN),
            top=_round(placed.top[number] + _MARGIN),
            width=_round(widths[number]),
            css=_CLASSES.get(node.mark, "kept"),
            lines=texts[number],
            hint=f"{node.name} = {node.call}  {node.value}".rstrip(),
        )
        for number, node in enumerate(nodes)
    )
    lines = tuple(
        _line(boxes[read], boxes[own], _edge_class(nodes[read], nodes[own]))
        for own, reads in enumerate(inputs)
        for read in reads
    )
    return Drawing(boxes, lines, _round(placed.width + 2 * _MARGIN), _round(placed.height + 2 * _MARGIN))


def _lines(node: wire.DumpNode) -> tuple[str, ...]:
    target = node.call.partition("(")[0]
    return tuple(_cut(text) for text in (node.name, target, node.value) if text) or ("?",)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_LETTERS else f"{text[: _TEXT_LETTERS - 1]}\u2026"


def _edge_class(upper: wire.DumpNode, lower: wire.DumpNode) -> str:
    for mark in (wire.MARK_REMOVED, wire.MARK_ADDED):
        if mark in (upper.mark, lower.mark):
            return _CLASSES[mark]
    return "kept"


def _line(upper: Box, lower: Box, css: str) -> Line:
    x1, y1 = upper.left + upper.width / 2, upper.top + BOX_HEIGHT
    x2, y2 = lower.left + lower.width / 2, lower.top
    bend = max(12.0, (y2 - y1) / 2)
    path = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"
    return Line(path, css)


def _round(value: float) -> float:
    return round(value, 1)
