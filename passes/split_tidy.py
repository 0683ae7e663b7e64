"""Brings the parts of a projection to one form: one `split_with_sizes` of the whole, read part by part.

Models take q, k and v, gate and up, or the halves that a rotation swaps, by slices, by `chunk`, by a split of
a split. All of these are views of the same memory, so that none of it changes a value. Sizes along the
dimension must be numbers: no size is asked for, none is burnt in.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx

from fuse_cache.passes.base import Outcome, Pass, Setting
from fuse_cache.passes.reading import aten, is_call, tensor
from fuse_cache.passes.rewrite import erase_dead, insert_call

_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_DEFAULTS: tuple[object, ...] = (None, 0, None, None, 1)
Part = tuple[int, int]  # Where a part starts and where it ends.


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    slices: dict[tuple[fx.Node, int], dict[fx.Node, Part]] = defaultdict(dict)
    for node in graph.nodes:
        if (found := _sliced(node)) is not None:
            base, dim, part = found
            slices[base, dim][node] = part
    moved: dict[fx.Node, fx.Node] = {}
    for (base, dim), parts in slices.items():
        outcome.candidates += 1
        found_parts = _split_slices(moved.get(base, base), dim, parts)
        moved |= found_parts
        outcome.matches += bool(found_parts)
    for node in reversed(list(graph.nodes)):  # What is split last is taken in first.
        if is_call(node, _SPLITS) and not node._erased:
            outcome.candidates += 1
            outcome.matches += _tidy_split(graph, node)
    return outcome


def _sliced(node: fx.Node) -> tuple[fx.Node, int, Part] | None:
    """Return what a slice is taken of, along which dimension, from where to where. None: no plain part."""
    if not is_call(node, aten.slice.Tensor) or node.kwargs:
        return None
    given: list[object] = [*node.args, *_DEFAULTS[len(node.args) :]]
    base, dim, start, end, step = given
    value = tensor(base)
    if not isinstance(base, fx.Node) or value is None or not isinstance(dim, int) or step != 1:
        return None
    size, begin = value.shape[dim], 0 if start is None else start
    if not isinstance(size, int) or not isinstance(begin, int):
        return None
    stop = size if end is None else end
    if not isinstance(stop, int) or any(user.op == "output" for user in node.users):
        return None
    begin, stop = (min(max(at + size if at < 0 else at, 0), size) for at in (begin, stop))
    return (base, dim % value.dim(), (begin, stop)) if 0 < stop - begin < size else None


def _split_slices(base: fx.Node, dim: int, parts: dict[fx.Node, Part]) -> dict[fx.Node, fx.Node]:
    """Put one split in the place of slices that do not overlap, two of them or more; say what took whose."""
    wanted = sorted(set(parts.values()))
    if len(wanted) < 2 or any(one[1] > other[0] for one, other in itertools.pairwise(wanted)):
        return {}
    # What no slice takes is a part that nobody reads.
    edges = sorted({0, base.meta["val"].shape[dim], *itertools.chain.from_iterable(wanted)})
    sizes = [stop - start for start, stop in itertools.pairwise(edges)]
    places = {part: edges.index(part[0]) for part in wanted}
    results = _insert_split(min(parts), base, sizes, dim)
    for node, part in parts.items():
        node.replace_all_uses_with(results[places[part]])
        base.graph.erase_node(node)
    erase_dead(base.graph, *results)
    return {node: results[places[part]] for node, part in parts.items()}


def _insert_split(anchor: fx.Node, base: fx.Node, sizes: Sequence[int], dim: int) -> list[fx.Node]:
    pieces = torch.split(base.meta["val"], list(sizes), dim)
    return insert_call(anchor, aten.split_with_sizes.default, (base, list(sizes), dim), pieces, base)


def _sizes_of(split: fx.Node) -> tuple[fx.Node, list[int], int] | None:
    """Return what is split, into which sizes, along which dimension; None where a size is symbolic."""
    base, value = split.args[0], tensor(split.args[0])
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    if not isinstance(base, fx.Node) or value is None or not isinstance(dim, int):
        return None
    sizes = [piece.shape[dim] for piece in split.meta["val"]]
    known = [size for size in sizes if isinstance(size, int)]
    return (base, known, dim % value.dim()) if len(known) == len(sizes) else None


def _items(split: fx.Node) -> dict[int, list[fx.Node]] | None:
    """Return the nodes that read each part; None if something reads the split otherwise."""
    items: dict[int, list[fx.Node]] = defaultdict(list)
    for user in split.users:
        place = user.args[1] if user.target is operator.getitem else None
        if not isinstance(place, int):
            return None
        items[place].append(user)
    return items


def _tidy_split(graph: fx.Graph, split: fx.Node) -> bool:
    """Name the sizes of a split, take in the splits of its parts, and merge what is read twice."""
    erase_dead(graph, *split.users)
    if split._erased:
        return True
    read, items = _sizes_of(split), _items(split)
    if read is None or items is None:
        return False
    base, sizes, dim = read
    inner = {place: found for place in items if (found := _inner_split(items[place], dim)) is not None}
    is_tidy = split.target == aten.split_with_sizes.default and split.args[2:] == (dim,)
    if is_tidy and not inner and all(len(nodes) == 1 for nodes in items.values()):
        return False
    flat: list[int] = []
    readers: list[list[fx.Node]] = []
    for place, size in enumerate(sizes):
        if place in inner:
            node, parts = inner[place]
            flat += parts
            by_place = _items(node) or {}
            readers += [by_place.get(index, []) for index in range(len(parts))]
        else:
            flat.append(size)
            readers.append(items.get(place, []))
    results = _insert_split(split, base, flat, dim)
    for nodes, result in zip(readers, results, strict=True):
        for node in nodes:
            node.replace_all_uses_with(result)
    erase_dead(graph, *(node for nodes in readers for node in nodes), *results)
    return True


def _inner_split(nodes: list[fx.Node], dim: int) -> tuple[fx.Node, list[int]] | None:
    """Return the split that is the only reader of a part, along the same dimension, and its sizes."""
    users = {user for node in nodes for user in node.users}
    if len(users) != 1:
        return None
    (user,) = users
    read = _sizes_of(user) if is_call(user, _SPLITS) else None
    if read is None or read[2] != dim or _items(user) is None:
        return None
    return user, read[1]


PASS = Pass(name="split_tidy", run=_run)
