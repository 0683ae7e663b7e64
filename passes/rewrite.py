"""Putting a new node in the place of old ones, without using anything before it has been defined."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from fuse_cache.passes.cleanup import has_effect
from fuse_cache.passes.reading import aten, prims, reshape_source
from fuse_cache.passes.verify import same_layout


class NoRoom(enum.Enum):
    """Why one node cannot take the place of several. The value says so in words."""

    CIRCULAR = "an operand is computed from a result"
    WRITE = "something is written in between"


# Of a replaced node's meta: what tells where it came from. The rest speaks of the old operator.
_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack")


def insert_call(
    anchor: fx.Node, target: OpOverload, args: Sequence[object], value: object, origin: fx.Node
) -> list[fx.Node]:
    """Insert a call before `anchor` and return a node for each of its results.

    `value` is what the call gives on fake tensors, `origin` the node that it stands for.
    """
    graph = anchor.graph
    kept = {key: origin.meta[key] for key in _KEPT_META if key in origin.meta}
    with graph.inserting_before(anchor):
        call = graph.call_function(target, _arguments(args))
        call.meta.update({"val": value, **kept})
        if not isinstance(value, (tuple, list)):
            return [call]
        results = [graph.call_function(operator.getitem, (call, place)) for place in range(len(value))]
    for result, one in zip(results, value, strict=True):
        result.meta.update({"val": one, **kept})
    return results


def take_over(old: fx.Node, new: fx.Node) -> None:
    """Let the readers of `old` read `new`, through a cast and a reshape where the two differ.

    Readers that reshape `old` to what `new` is already need none.
    """
    value, wanted = new.meta["val"], old.meta["val"]
    if same_layout(value, wanted):
        old.replace_all_uses_with(new)
        return
    for user in list(old.users):
        if reshape_source(user) is old and same_layout(user.meta["val"], value):
            user.replace_all_uses_with(new)
            old.graph.erase_node(user)
    if old.users:
        old.replace_all_uses_with(_in_form_of(new, old))


def _in_form_of(new: fx.Node, old: fx.Node) -> fx.Node:
    """Insert the cast and the reshape that make `new` what `old` was.

    Fake values have the storage of what `old` was from the cast on: its readers' have it too.
    """
    graph, wanted = new.graph, old.meta["val"]
    node, shape = new, new.meta["val"].shape
    is_reshaped = list(shape) != list(wanted.shape)
    with graph.inserting_before(_behind(new)):
        if node.meta["val"].dtype != wanted.dtype:
            cast = graph.call_function(prims.convert_element_type.default, (node, wanted.dtype))
            strides = new.meta["val"].stride()
            cast.meta["val"] = wanted.as_strided(shape, strides) if is_reshaped else wanted
            node = cast
        if is_reshaped:
            view = graph.call_function(aten.view.default, (node, _sizes_of(old)))
            view.meta["val"] = wanted
            node = view
    return node


def _behind(node: fx.Node) -> fx.Node:
    """Return the node to insert before so as to stand behind a call and the getitems that belong to it."""
    following = node.next
    while following.target is operator.getitem and following.args[0] is node.args[0]:
        following = following.next
    return following


def _sizes_of(old: fx.Node) -> list[int]:
    """Return sizes for a view that gives what `old` is: -1 stands for the one that may be symbolic."""
    sizes = old.meta["val"].shape
    assert can_be_viewed(old.meta["val"])
    return [size if isinstance(size, int) else -1 for size in sizes]


def can_be_viewed(value: torch.Tensor) -> bool:
    """Return whether a view can name these sizes without nodes for symbols: at most one is symbolic."""
    return sum(not isinstance(size, int) for size in value.shape) <= 1


def replace_result(graph: fx.Graph, old: fx.Node, target: OpOverload, args: Sequence[object]) -> fx.Node:
    """Compute the value of `old` by another call, in the same place, and erase `old` and what only it needed.

    The new node stands where `old` stood, so that its operands must stand before `old`: that is so for
    anything that `old` was computed from.
    """
    (new,) = insert_call(old, target, args, old.meta["val"], old)
    old.replace_all_uses_with(new)
    erase_dead(graph, old)
    return new


def erase_dead(graph: fx.Graph, *nodes: fx.Node) -> None:
    """Erase nodes that nothing reads, and then those that they alone had read. What has an effect stays."""
    waiting = list(nodes)
    while waiting:
        dead = waiting.pop()
        if dead.op == "call_function" and not dead._erased and not dead.users and not has_effect(dead):
            inputs = dead.all_input_nodes
            graph.erase_node(dead)
            waiting.extend(inputs)


def make_room(graph: fx.Graph, results: Sequence[fx.Node], operands: Iterable[fx.Node]) -> fx.Node | NoRoom:
    """Find where one node may compute all of `results` from `operands`; return the node to insert it before.

    It must stand behind every operand and before every reader of a result: where the first result stands,
    if the operands allow. An operand that is merely late is moved up with all that it is computed from. If
    an operand is computed from a result by other nodes, or a write stands between, there is no such place:
    the graph is as it was, and the answer says why.
    """
    first, last = min(results), max(results)
    if any(has_effect(node) for node in _between(first, last)):
        return NoRoom.WRITE
    inside = set(results)
    operands = list(operands)
    if all(operand < first for operand in operands):
        return first
    anchor = min([*(user for result in results for user in result.users if user not in inside), last.next])
    late: set[fx.Node] = set()
    waiting = [operand for operand in operands if not operand < anchor]
    while waiting:
        node = waiting.pop()
        if node in late:
            continue
        if node in inside or any(source in inside for source in node.all_input_nodes):
            return NoRoom.CIRCULAR
        # Moving a node over a write could change what it reads.
        if node.op not in ("call_function", "get_attr") or has_effect(node):
            return NoRoom.WRITE
        late.add(node)
        waiting.extend(source for source in node.all_input_nodes if not source < anchor)
    if late and any(has_effect(node) for node in _between(anchor, max(late))):
        return NoRoom.WRITE
    for node in sorted(late):
        anchor.prepend(node)
    return anchor


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """Yield the calls from one node to another, both included."""
    node = first
    while node < last or node is last:
        if node.op == "call_function":
            yield node
        node = node.next
        if node.op == "root":
            return


def _arguments(values: Sequence[object]) -> tuple[Argument, ...]:
    return tuple(values)  # type: ignore[arg-type]  # nodes, numbers, dtypes and strings, by construction
