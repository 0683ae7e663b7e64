"""Inputs that share memory, of which one is written.

Which of them overlap, and where, decides what the compiled code does, and Dynamo guards neither: traced with
a cache and a row apart, a graph is called with a row of the cache, and gives wrong results. So each call of a
graph that may write to an input is checked by `SharedMemory` (DECISIONS/0041). With varying sizes AOTAutograd
guards what shared memory when it traced, where it runs in the host; such a graph has no key.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from fuse_cache.client.graph_values import is_wrapper_subclass, value_of
from fuse_cache.proto.expression import SymExpr
from fuse_cache.proto.graph import Input, TensorMeta

_WRITING_OPERATORS: Final = frozenset(
    {
        operator.setitem,
        operator.iadd,
        operator.iand,
        operator.ifloordiv,
        operator.ilshift,
        operator.imatmul,
        operator.imod,
        operator.imul,
        operator.ior,
        operator.ipow,
        operator.irshift,
        operator.isub,
        operator.itruediv,
        operator.ixor,
    }
)


def writes_varying_aliases(gm: GraphModule, inputs: Sequence[Input]) -> bool:
    """Say whether `gm` may write to an input whose storage another input shares, where sizes of theirs vary.

    `inputs` are the encoded ones, of which the placeholders come first.
    """
    varying = {entry.alias_group for entry in inputs if entry.alias_group and _varies(entry)}
    if not varying:
        return False
    written = _written_storages(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    return any(
        entry.alias_group in varying and _storage(value_of(node)) in written
        for node, entry in zip(placeholders, inputs, strict=False)  # Constants come after them.
    )


_Span: TypeAlias = tuple[int, int, int]  # First byte, end, place among the inputs.
_MOST_SEEN: Final = 1024  # Sets of addresses that were found good; a server of 100 token counts has as many.


class SharedMemory:
    """Says of a call's arguments whether they share memory as those did that a graph was traced with.

    False as a whole where that changes nothing: no input may be written, or there is but one. Parameters that
    are not written are looked at again when the first of them is another object. Safe for concurrent use: two
    threads at worst do the same work twice.
    """

    def __init__(self, gm: GraphModule) -> None:
        values = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
        plain = {place: value for place, value in enumerate(values) if _is_plain(value)}
        written = _written_storages(gm)
        self._written = frozenset(place for place, value in plain.items() if _storage(value) in written)
        fixed = [
            place
            for place, value in plain.items()
            if isinstance(value, torch.nn.Parameter) and place not in self._written
        ]
        self._fixed = fixed if self._written else []
        self._moving = [place for place in plain if place not in fixed] if self._written else []
        # Inputs that overlapped, or may have: one unit, whose inputs are not held against each other.
        self._unit = _units({place: plain[place] for place in self._moving}, self._written)
        units = [
            [p for p in self._moving if self._unit[p] == unit] for unit in sorted({*self._unit.values()})
        ]
        self.is_shared = any(len(unit) > 1 for unit in units)
        # What AOTAutograd burnt in, of those whose sizes do not vary.
        self._tied = [
            [(place, _layout(plain[place])) for place in unit]
            for unit in units
            if len(unit) > 1 and not any(_is_symbolic(plain[place]) for place in unit)
        ]
        self._apart = len(units) + len(self._fixed) > 1
        self._sized = [place for place in self._moving if _is_symbolic(plain[place])]
        # In bytes, of those whose sizes do not vary.
        self._extents = {p: _extent(value) for p, value in plain.items() if not _is_symbolic(value)}
        self._seen: set[tuple[Any, ...]] = set()
        self._first: weakref.ReferenceType[Any] | None = None
        self._parameters: tuple[list[int], list[int]] = [], []  # Where they begin; the highest end so far.

    def __bool__(self) -> bool:
        return bool(self._written) and (self._apart or bool(self._tied))

    def same(self, args: Sequence[Any]) -> bool:
        """Say whether these tensors lie in memory as those of the trace did, as far as that matters."""
        for unit in self._tied:
            storage = args[unit[0][0]].untyped_storage()._cdata
            for place, layout in unit:
                if args[place].untyped_storage()._cdata != storage or _layout(args[place]) != layout:
                    return False
        if not self._apart:
            return True
        first = self._first
        if self._fixed and (first is None or first() is not args[self._fixed[0]]):
            self._learn_parameters(args)
        where: tuple[Any, ...] = tuple([args[place].data_ptr() for place in self._moving])
        for place in self._sized:
            where += (*args[place].shape, *args[place].stride())
        return where in self._seen or self._are_apart(args, where)

    def checked(
        self, run: Callable[..., Any], plain: Callable[..., Any], told: Callable[[str], None]
    ) -> Callable[..., Any]:
        """Return `run` for calls that share memory as when traced; `plain` runs the others, `told` once why.

        No compiled code would do: the next such call may share in yet another way, and Dynamo asks nobody.
        """
        tell = functools.cache(told)

        def call(*args: Any) -> Any:
            if self.same(args):
                return run(*args)
            tell("inputs share memory otherwise than when the graph was traced, and one is written")
            return plain(*args)

        return call

    def _learn_parameters(self, args: Sequence[Any]) -> None:
        spans = sorted(self._spans(args, self._fixed))
        self._parameters = (
            [start for start, _, _ in spans],
            list(itertools.accumulate((s[1] for s in spans), max)),
        )
        self._seen.clear()
        self._first = weakref.ref(args[self._fixed[0]])

    def _spans(self, args: Sequence[Any], places: Iterable[int]) -> Iterator[_Span]:
        """Yield where these inputs lie; one without elements lies nowhere."""
        known = self._extents
        for place in places:
            extent = known[place] if place in known else _extent(args[place])
            if extent:
                start = args[place].data_ptr()
                yield start, start + extent, place

    def _are_apart(self, args: Sequence[Any], where: tuple[Any, ...]) -> bool:
        """Say whether no written input overlaps one of another unit, and remember it."""
        spans = sorted(self._spans(args, self._moving))
        starts, ends = self._parameters
        for number, (start, end, place) in enumerate(spans):
            is_written = place in self._written
            if is_written and (before := bisect_left(starts, end)) and ends[before - 1] > start:
                return False
            for later in range(number + 1, len(spans)):
                if spans[later][0] >= end:
                    break
                other = spans[later][2]
                if (is_written or other in self._written) and self._unit[place] != self._unit[other]:
                    return False
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(where)
        return True


def _units(values: dict[int, Tensor], written: Set[int]) -> dict[int, int]:
    """Return the unit of each input: those of one storage that overlap, one of them written, have the same.

    Where sizes vary nobody knows yet which overlap.
    """
    unit = {place: place for place in values}
    neighbours: defaultdict[int | None, list[int]] = defaultdict(list)
    for place, value in values.items():
        neighbours[_storage(value)].append(place)
    for places in neighbours.values():
        for one, other in itertools.combinations(places, 2):
            if {one, other} & written and _may_overlap(values[one], values[other]):
                old, new = unit[other], unit[one]
                unit |= {place: new for place in places if unit[place] == old}
    return unit


def _may_overlap(one: Tensor, other: Tensor) -> bool:
    if _is_symbolic(one) or _is_symbolic(other):
        return True
    (start, end), (other_start, other_end) = (
        (offset := value.storage_offset() * value.element_size(), offset + _extent(value))
        for value in (one, other)
    )
    return start < other_end and other_start < end


def _extent(value: Tensor) -> int:
    """Return how many bytes lie between its first element and its last, both included."""
    if not value.numel():
        return 0
    steps = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return (steps + 1) * value.element_size()


def _layout(value: Tensor) -> tuple[Any, ...]:
    """Return what AOTAutograd takes for granted of an input that it makes again from the memory it shares: of
    what it is a view, or of the whole memory where that is not known (an inference tensor, the base itself).
    """
    base, size_bytes = value._base, value.untyped_storage().nbytes()
    if base is None:
        whole = torch.Size([size_bytes // value.element_size()]), (1,), 0
        return value.storage_offset(), size_bytes, whole
    return value.storage_offset(), size_bytes, (base.shape, base.stride(), base.storage_offset())


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_wrapper_subclass(value)


def _is_symbolic(value: Tensor) -> bool:
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _written_storages(gm: GraphModule) -> set[int | None]:
    """Return the storages that `gm` may write to."""
    return {
        _storage(value_of(argument))
        for node in gm.graph.nodes
        if _may_write(node)
        for argument in node.all_input_nodes
    } - {None}


def _varies(entry: Input) -> bool:
    meta = entry.meta
    return isinstance(meta, TensorMeta) and any(
        isinstance(dim, SymExpr) for dim in (*meta.size, *meta.stride, meta.storage_offset)
    )


def _storage(value: object) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and _is_plain(value) else None


def _may_write(node: FxNode) -> bool:
    """Say whether a call may write to an argument, rather too often than too rarely."""
    target = node.target
    if node.op not in ("call_function", "call_method"):
        return False
    if node.op == "call_method":
        return str(target).endswith("_")
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = str(getattr(target, "__name__", ""))
    return (
        target in _WRITING_OPERATORS
        or name.endswith("_")
        or isinstance(target, torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator)
        or "out" in node.kwargs
        or any(argument is True for argument in (*node.args, *node.kwargs.values()))  # inplace=True
    )
