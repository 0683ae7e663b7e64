"""Putting a new node in the place of old ones, without using anything before it has been defined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from fuse_cache.passes.cleanup import has_effect

# Of a replaced node's meta: what tells where it came from. The rest speaks of the old operator.
_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack")


def replace_result(
    graph: fx.Graph, old: fx.Node, target: OpOverload, args: Sequence[object], kwargs: dict[str, object]
) -> fx.Node:
    """Compute the value of `old` by another call, in the same place, and erase `old` and what only it needed.

    The new node stands where `old` stood, so that its operands must stand before `old`: that is so for
    anything that `old` was computed from.
    """
    with graph.inserting_before(old):
        new = graph.call_function(target, _arguments(args), _keywords(kwargs))
    new.meta["val"] = old.meta["val"]
    new.meta.update({key: old.meta[key] for key in _KEPT_META if key in old.meta})
    old.replace_all_uses_with(new)
    erase_dead(graph, old)
    return new


def erase_dead(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that nothing reads, and then those that it alone had read. What has an effect stays."""
    waiting = [node]
    while waiting:
        dead = waiting.pop()
        if dead.op == "call_function" and not dead.users and not has_effect(dead) and not dead._erased:
            inputs = dead.all_input_nodes
            graph.erase_node(dead)
            waiting.extend(inputs)


def make_room(graph: fx.Graph, results: Sequence[fx.Node], operands: Iterable[fx.Node]) -> fx.Node | None:
    """Find where one node may compute all of `results` from `operands`; return the node to insert it before.

    It must stand behind every operand and before every reader of a result. An operand that is merely late is
    moved up with all that it is computed from. If an operand is computed from a result by other nodes, there
    is no such place: None, and the graph is as it was.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    inside = set(results)
    readers = [user for result in results for user in result.users if user not in inside]
    anchor = min([*readers, graph.output_node()], key=place.__getitem__)
    late: set[fx.Node] = set()
    waiting = [operand for operand in operands if place[operand] >= place[anchor]]
    while waiting:
        node = waiting.pop()
        if node in late:
            continue
        # Moving a node over a write could change what it reads.
        if node in inside or node.op != "call_function" or has_effect(node):
            return None
        if any(source in inside for source in node.all_input_nodes):
            return None
        late.add(node)
        waiting.extend(source for source in node.all_input_nodes if place[source] >= place[anchor])
    between = list(graph.nodes)[place[anchor] : 1 + max([place[anchor], *(place[node] for node in late)])]
    if late and any(has_effect(node) for node in between if node.op == "call_function"):
        return None
    for node in sorted(late, key=place.__getitem__):
        anchor.prepend(node)
    return anchor


def _arguments(values: Sequence[object]) -> tuple[Argument, ...]:
    return tuple(values)  # type: ignore[arg-type]  # nodes, numbers, dtypes and strings, by construction


def _keywords(values: dict[str, object]) -> dict[str, Argument]:
    return dict(values)  # type: ignore[arg-type]  # as above
