"""Functionalisation repair: functionalised calls of mutating operators write in place again.

Always last: behind it the graph is no longer functional. A mutated base gets a copy if and only if its old
value is needed later: something reads it, the caller holds it and would see the write, or it is a constant.
Calls that write to views of their base are left as they are, for Inductor's own re-inplacing.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from fuse_cache.passes.aliasing import Aliasing
from fuse_cache.passes.base import Outcome, Pass, Setting

aten = torch.ops.aten
_V1 = torch.ops.higher_order.auto_functionalized
_V2 = torch.ops.higher_order.auto_functionalized_v2


@dataclass(frozen=True, slots=True)
class _Call:
    """A functionalised call that can write in place; `bases` holds what is written, by argument."""

    node: fx.Node
    target: OpOverload
    plain: Mapping[str, object]
    bases: dict[str, fx.Node]

    @property
    def num_returns(self) -> int:
        """How many results stand before the bases' new values; one, None, if the operator returns nothing."""
        return max(1, len(self.target._schema.returns))


def _run(graph: fx.Graph, setting: Setting) -> Outcome:
    outcome = Outcome()
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target in (_V1, _V2)]
    if not calls:
        return outcome
    aliasing = Aliasing(graph)
    for node in calls:
        outcome.candidates += 1
        call = _read(node, aliasing)
        if call is not None:
            _write_in_place(graph, call, aliasing)
            outcome.matches += 1
    return outcome


def _read(node: fx.Node, aliasing: Aliasing) -> _Call | None:
    """Return the call if every written argument is a whole base of its own, that no other argument shares."""
    target = node.args[0]
    if not isinstance(target, OpOverload) or any(a.name.startswith("_") for a in target._schema.arguments):
        return None
    written = [argument.name for argument in target._schema.arguments if _is_written(argument)]
    plain = {name: value for name, value in node.kwargs.items() if not name.startswith("_")}
    bases: dict[str, fx.Node] = {}
    if node.target == _V1:
        for name in written:
            if not isinstance(base := plain.pop(name, None), fx.Node):
                return None
            bases[name] = base
    else:
        given = node.kwargs["_all_bases"]
        assert isinstance(given, (list, tuple))
        for name in written:
            details = [key for key in node.kwargs if key.startswith(f"_{name}_")]
            place = node.kwargs.get(f"_{name}_base_index")
            if details != [f"_{name}_base_index"] or not isinstance(place, int):
                return None
            base = given[place]
            assert isinstance(base, fx.Node)
            bases[name] = base
        if len(given) != len(bases) or list(bases.values()) != list(given):
            return None
    operands: list[fx.Node] = []
    fx.map_arg(plain, operands.append)
    roots = [aliasing.root(base) for base in bases.values()]
    shared = set(roots) & {aliasing.root(operand) for operand in operands}
    return None if shared or len(set(roots)) < len(roots) else _Call(node, target, plain, bases)


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _write_in_place(graph: fx.Graph, call: _Call, aliasing: Aliasing) -> None:
    """Put the mutating call, and the copies it needs, in the place of the functionalised one."""
    node = call.node
    results = _results(graph, node, aliasing)
    values = node.meta["val"]
    with graph.inserting_before(node):
        targets: dict[str, fx.Node] = {}
        for place, (name, base) in enumerate(call.bases.items()):
            result = results.get(call.num_returns + place)
            targets[name] = base
            if _needs_copy(call, base, result, aliasing):
                targets[name] = graph.call_function(aten.clone.default, (base,))
                targets[name].meta["val"] = values[call.num_returns + place]
                aliasing.adopt(targets[name], node)
        arguments = {**call.plain, **targets}
        names = [argument.name for argument in call.target._schema.arguments if argument.name in arguments]
        direct = graph.call_function(call.target, kwargs={name: arguments[name] for name in names})  # type: ignore[misc]  # arguments of the old node
        returned = len(call.target._schema.returns)
        direct.meta["val"] = values[:returned] if returned > 1 else values[0]
        if "stack_trace" in node.meta:
            direct.meta["stack_trace"] = node.meta["stack_trace"]
        aliasing.adopt(direct, node)
    for place, name in enumerate(call.bases):
        if (result := results.pop(call.num_returns + place, None)) is not None:
            _read_from(graph, result, targets[name], aliasing)
    for index, result in results.items():
        if returned == 1:
            result.replace_all_uses_with(direct)
            graph.erase_node(result)
        else:
            assert isinstance(index, int)
            result.replace_input_with(node, direct)
    graph.erase_node(node)


def _results(graph: fx.Graph, node: fx.Node, aliasing: Aliasing) -> dict[object, fx.Node]:
    """Return the nodes that take the call's results apart, by index, one for each: of several that take the
    same result the first serves the readers of all."""
    results: dict[object, fx.Node] = {}
    for user in sorted(node.users, key=aliasing.position):
        assert user.target is operator.getitem
        first = results.setdefault(user.args[1], user)
        if first is not user:
            user.replace_all_uses_with(first)
            graph.erase_node(user)
    return results


def _read_from(graph: fx.Graph, result: fx.Node, target: fx.Node, aliasing: Aliasing) -> None:
    """Let the readers of a base's new value read the base; writing it back to itself is then no work."""
    for user in list(result.users):
        if _is_write_back(user, target) and user.args[1] is result and not user.users:
            graph.erase_node(user)
    result.replace_all_uses_with(target)
    aliasing.join(result, target)
    graph.erase_node(result)


def _needs_copy(call: _Call, base: fx.Node, result: fx.Node | None, aliasing: Aliasing) -> bool:
    """Return whether writing to the base would be seen by anyone who should see its old value."""
    family = [member for member in aliasing.members(base) if not member._erased]
    if any(member.op == "get_attr" for member in family):
        return True
    for member in family:
        for user in member.users:
            if (
                user is not call.node
                and aliasing.is_behind(user, call.node)
                and not _is_write_back(user, base)
            ):
                return True
    if not any(member.op == "placeholder" for member in family):
        return False
    # The caller holds it: only a write-back of the whole base hides ours, and nobody may read our value
    # behind it.
    write_back = next((user for user in base.users if _is_write_back(user, base)), None)
    if base.op != "placeholder" or write_back is None or not aliasing.is_behind(write_back, call.node):
        return True
    if result is None or write_back.args[1] is result:
        return False
    readers = (user for member in aliasing.members(result) for user in member.users)
    return any(aliasing.is_behind(reader, write_back) for reader in readers)


def _is_write_back(user: fx.Node, base: fx.Node) -> bool:
    return user.target == aten.copy_.default and user.args[0] is base and user.args[1] is not base


PASS = Pass(name="functionalization", run=_run)
