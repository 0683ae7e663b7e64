"""Which values of a graph share storage, and which nodes write to it."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from fuse_cache.kernels.library import NAMESPACE

# Their schema does not say so, but they return their input's storage.
_UNDECLARED_VIEWS = frozenset({torch.ops.aten._unsafe_view.default})
# Their schemas say all about storages, but for those above: nobody needs to look at fake values, which
# rewritten nodes share with those of other layers.
_SAID_BY_SCHEMA = frozenset({"aten", "prims", NAMESPACE})
# Operators of higher order that are functions of their arguments. Any other is taken to write to all that it
# is given.
_FUNCTIONAL_HIGHER_ORDER = frozenset(
    {"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"}
)


class Aliasing:
    """The storages of one graph, as it is now.

    Two nodes have the same `root` if one may be a view of the other. Built anew after a graph changed, or
    told of the change by `adopt` and `join`.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._position = {node: place for place, node in enumerate(graph.nodes)}
        self._writes: dict[fx.Node, list[int]] = defaultdict(list)  # Where, by root.
        by_storage: dict[StorageWeakRef, fx.Node] = {}
        written: list[tuple[fx.Node, fx.Node]] = []
        for node in graph.nodes:
            aliased, mutated = argument_effects(node)
            for argument in aliased:
                self._join(node, argument)
            written.extend((node, argument) for argument in mutated)
            if (storage := _storage(node)) is not None:
                self._join(node, by_storage.setdefault(storage, node))
        for writer, argument in written:
            self._writes[self.root(argument)].append(self._position[writer])
        self._members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            self._members[self.root(node)].append(node)

    def root(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for this node's storage."""
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node

    def members(self, node: fx.Node) -> list[fx.Node]:
        """Return every node that may share storage with this one, itself included."""
        return self._members[self.root(node)]

    def is_written(self, node: fx.Node, after: fx.Node | None = None, until: fx.Node | None = None) -> bool:
        """Return whether anything writes to the node's storage: at all, behind `after`, up to `until`."""
        first = -1 if after is None else self._position[after]
        last = len(self._position) if until is None else self._position[until]
        return any(first < place <= last for place in self._writes.get(self.root(node), ()))

    def last_reader(self, node: fx.Node) -> fx.Node:
        """Return the last node that reads the node's storage, the node itself if none does."""
        users = (user for member in self.members(node) if not member._erased for user in member.users)
        return max(users, key=self._position.__getitem__, default=node)

    def is_behind(self, node: fx.Node, other: fx.Node) -> bool:
        """Return whether the node runs after the other one."""
        return self._position[node] > self._position[other]

    def position(self, node: fx.Node) -> int:
        """Return the node's place in the order in which nodes run; an adopted node has that of another."""
        return self._position[node]

    def adopt(self, node: fx.Node, beside: fx.Node) -> None:
        """Take in a node that was inserted at the place of another one, with storage of its own."""
        self._position[node] = self._position[beside]
        self._members[node] = [node]

    def join(self, one: fx.Node, other: fx.Node) -> None:
        """Note that a rewrite made two nodes share storage."""
        one, other = self.root(one), self.root(other)
        if one is not other:
            self._members[other] += self._members.pop(one)
            self._writes[other] += self._writes.pop(one, [])
            self._parent[one] = other

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        one, other = self.root(one), self.root(other)
        if one is not other:
            self._parent[one] = other


def writes(node: fx.Node) -> bool:
    """Return whether the node changes any of its arguments."""
    target = node.target
    if isinstance(target, OpOverload) and not any(writes for *_, writes in _aliasing_arguments(target)):
        return False  # The most of a graph: its arguments need no look.
    return bool(argument_effects(node)[1])


def argument_effects(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the arguments that the result may alias, and the arguments that the node writes to."""
    target = node.target
    if node.op != "call_function" or not _may_hold_tensor(node):
        return [], []
    if target is operator.getitem:
        return [node.all_input_nodes[0]], []
    if isinstance(target, OpOverload):
        return _schema_effects(node, target)
    if isinstance(target, HigherOrderOperator) and target.__name__ in _FUNCTIONAL_HIGHER_ORDER:
        return [], []
    return list(node.all_input_nodes), list(node.all_input_nodes)


def _schema_effects(node: fx.Node, target: OpOverload) -> tuple[list[fx.Node], list[fx.Node]]:
    if target in _UNDECLARED_VIEWS:
        return [node.all_input_nodes[0]], []
    aliased, mutated = [], []
    for place, name, is_returned, is_written in _aliasing_arguments(target):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        nodes: list[fx.Node] = []
        fx.map_arg(given, nodes.append)
        if is_returned:
            aliased += nodes
        if is_written:
            mutated += nodes
    return aliased, mutated


@functools.cache
def _aliasing_arguments(target: OpOverload) -> tuple[tuple[int, str, bool, bool], ...]:
    """Return place and name of each argument whose storage the schema speaks of: whether the result may alias
    it, and whether it is written. Most operators have none, and graphs have thousands of calls."""
    infos = [result.alias_info for result in target._schema.returns if result.alias_info is not None]
    returned = set().union(*(info.before_set for info in infos))
    # A list of views, such as a split's, has its names inside, where they cannot be read from here.
    returns_list = any(not info.before_set for info in infos)
    return tuple(
        (place, argument.name, returns_list or bool(info.before_set & returned), bool(info.is_write))
        for place, argument in enumerate(target._schema.arguments)
        if (info := argument.alias_info) is not None
    )


def _may_hold_tensor(node: fx.Node) -> bool:
    """Symbolic arithmetic has neither storage nor effect. A node without meta is taken for a tensor."""
    value = node.meta.get("val", node)
    return not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_said_by_schema(node: fx.Node) -> bool:
    """Return whether `argument_effects` knows all that the result may share storage with."""
    if node.op != "call_function":
        return False
    source = node.args[0] if node.target is operator.getitem else node
    target = source.target if isinstance(source, fx.Node) else None
    if isinstance(target, OpOverload):
        return target.namespace in _SAID_BY_SCHEMA
    return isinstance(target, HigherOrderOperator) and target.__name__ in _FUNCTIONAL_HIGHER_ORDER


def _storage(node: fx.Node) -> StorageWeakRef | None:
    value = node.meta.get("val")
    if _is_said_by_schema(node):
        return None
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types here
    return None
