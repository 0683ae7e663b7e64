"""The layout of drawings: every edge points down, no two boxes overlap, whatever the graph."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from fuse_cache.client.explain.layout import place

HEIGHT = 50.0


def graph(seed: int, nodes: int) -> tuple[list[list[int]], list[float]]:
    """Return a graph whose nodes read what stands before them, and widths."""
    chance = random.Random(seed)
    inputs = [chance.sample(range(node), min(node, chance.randint(0, 3))) for node in range(nodes)]
    return inputs, [chance.uniform(30, 250) for _ in range(nodes)]


@pytest.mark.parametrize("seed", range(20))
def test_edges_point_down_and_boxes_do_not_overlap(seed: int) -> None:
    inputs, widths = graph(seed, 1 + 4 * seed)
    placed = place(inputs, widths, HEIGHT)
    for node, reads in enumerate(inputs):
        assert all(placed.top[read] + HEIGHT < placed.top[node] for read in reads)
    boxes = list(zip(placed.left, placed.top, widths, strict=True))
    for (left, top, width), (other_left, other_top, other_width) in itertools.combinations(boxes, 2):
        apart = left + width < other_left or other_left + other_width < left
        assert top != other_top or apart
    assert all(left >= 0 and left + width <= placed.width + 1e-6 for left, _, width in boxes)
    assert max(placed.top) + HEIGHT == pytest.approx(placed.height)


def test_an_operand_stands_just_above_its_first_reader() -> None:
    placed = place([[], [0], [1], [], [2, 3]], [100.0] * 5, HEIGHT)
    assert placed.top[3] == placed.top[2]


def test_nothing_has_no_size() -> None:
    placed = place([], [], HEIGHT)
    assert (placed.width, placed.height) == (0.0, 0.0)


def test_a_thousand_nodes_are_placed_in_seconds_at_most() -> None:
    inputs, widths = graph(1, 1000)
    began = time.process_time()
    place(inputs, widths, HEIGHT)
    assert time.process_time() - began < 4.0
