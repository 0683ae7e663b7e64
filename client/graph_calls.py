"""Calls of an FX graph as plain data: target by name, arguments, result, and the custom operators used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node as FxNode

from fuse_cache.client.graph_values import ValueEncoder, value_of
from fuse_cache.client.unkeyable import UnkeyableGraph
from fuse_cache.kernels.fx_targets import load_table, name_of, overload_of, qualified_name
from fuse_cache.proto import targets
from fuse_cache.proto.graph import Group, GroupSpec, Meta, Node, NodeKind, OpSchema, OtherMeta

# Methods whose first argument may be a device written as a text or a number.
_DEVICE_METHODS: Final = frozenset({"to", "cuda"})
# Read once: a member of an enumeration is looked up slowly.
_FUNCTION: Final = NodeKind.FUNCTION
_METHOD: Final = NodeKind.METHOD
_NO_VALUE: Final = OtherMeta("unknown")
load_table()  # Now, while the process starts, and not in its first encoding.
_new: Final = tuple.__new__  # What a NamedTuple's own constructor calls, after sorting out its arguments.
_GROUP_ARGUMENT: Final = "group_name"
_COLLECTIVES: Final = ("_c10d_functional", "symm_mem", "torch.distributed")


class CallEncoder:
    """Encodes the calls of one graph, and collects the custom operators and process groups that they name."""

    def __init__(self, values: ValueEncoder, live_groups: Mapping[str, GroupSpec]) -> None:
        self._values = values
        self._live_groups = live_groups
        self._schemas: dict[str, OpSchema] = {}
        self._groups: dict[str, GroupSpec] = {}
        self._names: dict[int, str] = {}  # by id of the callable; the graph keeps it alive

    def op_schemas(self) -> tuple[OpSchema, ...]:
        """Return the schemas of the custom operators seen so far, by name."""
        return tuple(self._schemas[name] for name in sorted(self._schemas))

    def groups(self) -> tuple[GroupSpec, ...]:
        """Return the process groups seen so far, by name."""
        return tuple(self._groups[name] for name in sorted(self._groups))

    def call(self, node: FxNode) -> Node:
        """Return one call of a function or method.

        Raises:
            UnkeyableGraph: what it calls, an argument or its result has no form; the reason names it.
        """
        kind = _FUNCTION
        positional: tuple[Any, ...] = node.args
        named: Mapping[str, Any] = node.kwargs
        if node.op == "call_method":
            kind, target = _METHOD, str(node.target)
            if target not in targets.METHODS:
                raise UnkeyableGraph(f"tensor method {target}, which is not in the closed table")
            if target == "item" and isinstance(value_of(node), torch.SymFloat):
                raise UnkeyableGraph(
                    "a float that differs from call to call: pass it as a tensor (or set "
                    "torch._dynamo.config.specialize_float for one graph per value)"
                )
            if target in _DEVICE_METHODS and len(positional) > 1 and type(positional[1]) in (str, int):
                positional = (positional[0], torch.device(positional[1]), *positional[2:])
        else:
            target = self._function(node)
            if target in self._schemas or target.startswith(_COLLECTIVES):
                positional, named = self._with_groups(node, target)
        values = self._values
        # A call each less for almost every node: this runs once for each of a thousand.
        known = node.meta
        value = known["example_value"] if "example_value" in known else known.get("val", _NO_VALUE)
        try:
            if type(value) is FakeTensor:
                result: Meta = values.tensor(value)
            elif value is _NO_VALUE:
                result = _NO_VALUE
            else:
                result = values.meta(value)
        except UnkeyableGraph as error:
            raise UnkeyableGraph(f"{error.reason}, made by {target}") from None
        return _new(
            Node, (kind, target, values.arguments(positional), values.named(named) if named else (), result)
        )

    def _function(self, node: FxNode) -> str:
        target: Any = node.target
        known = self._names.get(id(target))
        if known is not None:
            return known
        if isinstance(target, torch._ops.OpOverloadPacket):
            return self._operator(_overload(target, node))  # Not remembered: the next call may take another.
        if isinstance(target, torch._ops.OpOverload):
            name = self._operator(target)
        else:
            found = name_of(target)
            if found is None:
                raise UnkeyableGraph(f"{qualified_name(target)}, which is not in the closed table")
            name = found
        self._names[id(target)] = name
        return name

    def _operator(self, overload: torch._ops.OpOverload[..., Any]) -> str:
        name = name_of(overload)
        assert name is not None
        if targets.is_torch_op(name):
            return name
        if not targets.is_custom_op(name):
            raise UnkeyableGraph(f"operator {name}, which is not in the closed table")
        if name not in self._schemas:
            tags = tuple(sorted(tag.name for tag in overload.tags))
            self._schemas[name] = OpSchema(name, str(overload._schema), tags)
        return name

    def _with_groups(self, node: FxNode, target: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with each process group's own name replaced by its logical one."""
        args: list[Any] = list(node.args)
        kwargs: dict[str, Any] = dict(node.kwargs)
        if not isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            raise UnkeyableGraph(f"{target}: collectives are sent as operators only")
        overload = (
            node.target if isinstance(node.target, torch._ops.OpOverload) else _overload(node.target, node)
        )
        for place, argument in enumerate(overload._schema.arguments):
            if argument.name != _GROUP_ARGUMENT:
                continue
            if place < len(args) and isinstance(args[place], str):
                args[place] = self._group(args[place], target)
            elif isinstance(kwargs.get(argument.name), str):
                kwargs[argument.name] = self._group(kwargs[argument.name], target)
        return tuple(args), kwargs

    def _group(self, name: str, target: str) -> Group:
        spec = self._live_groups.get(name)
        if spec is None:
            raise UnkeyableGraph(f"{target} on a process group that the option `tp` does not name")
        self._groups[spec.name] = spec
        return Group(spec.name)


def _overload(packet: torch._ops.OpOverloadPacket[..., Any], node: FxNode) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
    try:
        return overload_of(packet, args, kwargs)
    except RuntimeError as error:
        raise UnkeyableGraph(f"{qualified_name(packet)}, of which no overload takes the arguments") from error
