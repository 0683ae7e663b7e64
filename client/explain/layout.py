"""Places the nodes of a small graph in rows, so that every edge points down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROW_GAP = 34.0
COLUMN_GAP = 18.0
_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the boxes are: left edges and tops, in the order of the nodes, and the size of the whole."""

    left: tuple[float, ...]
    top: tuple[float, ...]
    width: float
    height: float


def place(inputs: Sequence[Sequence[int]], widths: Sequence[float], height: float) -> Placed:
    """Place nodes, which come in an order in which each stands behind all that it reads.

    `inputs` are places in the same list, `widths` the boxes' own; all have one `height`. Rows are by the
    longest way down; in a row, boxes stand near to what they are connected with.
    """
    rows = _rows(inputs)
    order = _ordered(rows, inputs)
    row_width = [sum(widths[node] for node in row) + COLUMN_GAP * (len(row) - 1) for row in order]
    width = max(row_width, default=0.0)
    left, top = [0.0] * len(inputs), [0.0] * len(inputs)
    for number, row in enumerate(order):
        at = (width - row_width[number]) / 2
        for node in row:
            left[node], top[node] = at, number * (height + ROW_GAP)
            at += widths[node] + COLUMN_GAP
    total = len(order) * (height + ROW_GAP) - ROW_GAP if order else 0.0
    return Placed(tuple(left), tuple(top), width, total)


def _rows(inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    rank = [0] * len(inputs)
    for node, reads in enumerate(inputs):
        rank[node] = max((rank[read] + 1 for read in reads), default=0)
    # What reads nothing stands just above its first reader: a weight of the last row is not to cross all.
    for node, reads in enumerate(inputs):
        readers = [rank[other] for other, its in enumerate(inputs) if node in its]
        if not reads and readers:
            rank[node] = min(readers) - 1
    rows: list[list[int]] = [[] for _ in range(max(rank, default=-1) + 1)]
    for node, number in enumerate(rank):
        rows[number].append(node)
    return [row for row in rows if row]


def _ordered(rows: list[list[int]], inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sort each row by the mean place of its nodes' neighbours, downwards and upwards in turn."""
    users: list[list[int]] = [[] for _ in inputs]
    for node, reads in enumerate(inputs):
        for read in reads:
            users[read].append(node)
    place_of = [0.0] * len(inputs)
    for row in rows:
        _number(row, place_of)
    for sweep in range(_SWEEPS):
        neighbours = inputs if sweep % 2 == 0 else users
        for row in rows if sweep % 2 == 0 else reversed(rows):
            mean = {
                node: sum(place_of[other] for other in neighbours[node]) / len(neighbours[node])
                if neighbours[node]
                else place_of[node]
                for node in row
            }
            row.sort(key=mean.__getitem__)
            _number(row, place_of)
    return rows


def _number(row: Sequence[int], place_of: list[float]) -> None:
    """Number a row's nodes around its middle, for rows of different lengths to be compared."""
    for at, node in enumerate(row):
        place_of[node] = at - (len(row) - 1) / 2
