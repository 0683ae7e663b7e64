"""A captured FX graph to canonical bytes: the same program gives the same bytes in every process and rank.

Node names, source lines, module paths, device indices, ranks and process-group names stay here.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from fuse_cache.client.aliasing import writes_varying_aliases
from fuse_cache.client.ambient import capture_ambient
from fuse_cache.client.graph_calls import CallEncoder
from fuse_cache.client.graph_values import ValueEncoder, is_wrapper_subclass, value_of
from fuse_cache.client.symbols import SymbolTable
from fuse_cache.client.unkeyable import UnkeyableGraph
from fuse_cache.proto.errors import GraphError
from fuse_cache.proto.graph import (
    Argument,
    Graph,
    GroupSpec,
    Input,
    Level,
    Node,
    NodeKind,
    Ref,
    Role,
    SymMeta,
    TensorMeta,
)
from fuse_cache.proto.graph_codec import encode, graph_digest

__all__ = ["Encoded", "SymbolSource", "UnkeyableGraph", "capture_ambient", "encode_graph", "needs_desugaring"]

# Counts calls of torch for its makers; computes nothing.
_DROPPED: Final = frozenset({id(torch._C._log_api_usage_once)})
_REFS: Final = tuple(Ref(number) for number in range(4096))  # a model of 32 layers has 2,300 values
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class SymbolSource:
    """Where a symbol can be read in the arguments of a call: an input that is it, or a size of a tensor."""

    input: int
    dim: int | None  # None: the input is the symbol itself, an int


@dataclass(frozen=True, slots=True)
class Encoded:
    """A graph as it is sent, and what only this process needs to know of it."""

    data: bytes
    digest: bytes
    graph: Graph
    constants: tuple[Tensor, ...]  # to be passed after the graph's own arguments, in this order
    symbols: tuple[sympy.Symbol, ...]  # by number
    symbol_sources: tuple[tuple[SymbolSource, ...], ...]  # by number; ints first
    input_names: tuple[str, ...]  # as the user knows them, "input_ids"; for options and messages only


def encode_graph(
    gm: GraphModule,
    example_inputs: Sequence[object] = (),
    *,
    groups: Mapping[str, GroupSpec] | None = None,
) -> Encoded:
    """Encode the graph that Dynamo or AOTAutograd handed to a backend.

    `groups` gives the logical name and size of each live process group by its own name. `example_inputs` is
    not read: what the graph was traced with stands in it, and values never reach the bytes.

    Raises:
        UnkeyableGraph: the graph holds something that cannot be sent; the reason names it.
    """
    # Nothing here is garbage before the end; one collection among torch's objects costs more than all of it.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _GraphEncoder(gm, groups or {}).encode()
    finally:
        if collecting:
            gc.enable()


def needs_desugaring(gm: GraphModule) -> bool:
    """Say whether inputs are tensors made of tensors, so that the graph goes at ATen level (`desugar.py`)."""
    return any(node.op == "placeholder" and is_wrapper_subclass(value_of(node)) for node in gm.graph.nodes)


class _GraphEncoder:
    """State of one encoding. Inputs are numbered first, so constants are found before the nodes are."""

    def __init__(self, gm: GraphModule, groups: Mapping[str, GroupSpec]) -> None:
        self._gm = gm
        self._symbols = SymbolTable()
        self._values = ValueEncoder(self._symbols)
        self._calls = CallEncoder(self._values, groups)
        self._asks_for_grad = _asks_for_grad(gm)
        # By identity of the meta that does not ask, which `_values` keeps.
        self._asking: dict[int, TensorMeta] = {}

    def encode(self) -> Encoded:
        nodes = list(self._gm.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        constants = self._constants(nodes)
        inputs, sources = self._inputs(placeholders, list(constants.values()))
        if writes_varying_aliases(self._gm, inputs):
            raise UnkeyableGraph("inputs that share memory, of which one is written, with sizes that vary")
        refs, ref = self._values.refs, _refs(len(nodes) + len(constants))
        for number, node in enumerate(placeholders):
            refs[node] = ref[number]
        numbers = {name: len(placeholders) + place for place, name in enumerate(constants)}
        calls: list[Node] = []
        outputs: tuple[Argument, ...] = ()
        call = self._calls.call
        for node in nodes:
            op = node.op
            if op == "call_function" or op == "call_method":
                if id(node.target) not in _DROPPED:
                    calls.append(call(node))
                    refs[node] = ref[len(inputs) + len(calls) - 1]
            elif op == "output":
                outputs = self._outputs(node)
            elif op == "get_attr":
                refs[node] = ref[numbers[str(node.target)]]
            elif op != "placeholder":
                raise UnkeyableGraph(f"a call of the module {node.target}")
        graph = Graph(
            level=_level(calls, placeholders),
            symbols=self._symbols.ranges(),
            inputs=inputs,
            nodes=tuple(calls),
            outputs=outputs,
            op_schemas=self._calls.op_schemas(),
            groups=self._calls.groups(),
            guards=self._symbols.guards(),
        )
        try:
            data = encode(graph)
        except GraphError as error:
            raise UnkeyableGraph(error.message) from error
        return Encoded(
            data=data,
            digest=graph_digest(data),
            graph=graph,
            constants=tuple(constants.values()),
            symbols=self._symbols.symbols,
            symbol_sources=sources,
            input_names=tuple(input_name(node) for node in placeholders) + tuple(constants),
        )

    def _constants(self, nodes: list[FxNode]) -> dict[str, Tensor]:
        """Return the tensors that the graph holds itself, in the order of first use."""
        found: dict[str, Tensor] = {}
        for node in nodes:
            if node.op != "get_attr" or str(node.target) in found:
                continue
            value: Any = self._gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if not isinstance(value, Tensor):
                kind = "a sub-graph" if isinstance(value, torch.nn.Module) else type(value).__qualname__
                raise UnkeyableGraph(
                    f"{kind} held by the graph (a higher-order operator's, or a live object)"
                )
            found[str(node.target)] = value
        return found

    def _inputs(
        self, placeholders: list[FxNode], constants: list[Tensor]
    ) -> tuple[tuple[Input, ...], tuple[tuple[SymbolSource, ...], ...]]:
        values = [value_of(node) for node in placeholders] + list(constants)
        roles = [_role(node) for node in placeholders] + [Role.CONSTANT] * len(constants)
        self._number_symbols(values)
        metas = [self._input_meta(value) for value in values]
        inputs = tuple(
            Input(meta, role, alias)
            for meta, role, alias in zip(metas, roles, _alias_groups(values), strict=True)
        )
        return inputs, self._sources(inputs)

    def _number_symbols(self, values: list[Any]) -> None:
        sizes: list[int | torch.SymInt] = []
        for value in values:
            if isinstance(value, Tensor):
                if is_wrapper_subclass(value):
                    name = f"{type(value).__module__}.{type(value).__qualname__}"
                    raise UnkeyableGraph(f"an input of type {name}: desugar_to_aten takes it apart")
                if value.layout is torch.strided:
                    sizes += [*value.shape, *value.stride(), value.storage_offset()]
            elif isinstance(value, torch.SymInt):
                sizes.append(value)
        symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
        alone = [expr for size in symbolic if isinstance(expr := size.node.expr, sympy.Symbol)]
        for size in symbolic:
            self._symbols.define(size, alone)

    def _input_meta(self, value: object) -> TensorMeta | SymMeta:
        if isinstance(value, Tensor):
            if value.is_conj() or value.is_neg():
                raise UnkeyableGraph("an input with a lazy conjugation or negation")
            meta = self._values.tensor(value)
            # Without grad mode nothing asks for it, and equal graphs shall have equal bytes.
            if not (self._asks_for_grad and value.requires_grad):
                return meta
            asking = self._asking.get(id(meta))
            if asking is None:
                asking = self._asking[id(meta)] = replace(meta, requires_grad=True)
            return asking
        if isinstance(value, torch.SymInt):
            return SymMeta(self._symbols.dim(value))
        if type(value) is int:
            return SymMeta(value)
        raise UnkeyableGraph(f"an input of type {type(value).__module__}.{type(value).__qualname__}")

    def _sources(self, inputs: Sequence[Input]) -> tuple[tuple[SymbolSource, ...], ...]:
        by_symbol: list[list[SymbolSource]] = [[] for _ in range(len(self._symbols))]
        by_code = {(1, number): found for number, found in enumerate(by_symbol)}  # (SYMBOL, number)
        for number, entry in enumerate(inputs):
            meta = entry.meta
            if isinstance(meta, SymMeta):
                if not isinstance(meta.value, int) and meta.value.code in by_code:
                    by_code[meta.value.code].insert(0, SymbolSource(number, None))
                continue
            for dim, size in enumerate(meta.size):
                if not isinstance(size, int) and size.code in by_code:
                    by_code[size.code].append(SymbolSource(number, dim))
        return tuple(tuple(found) for found in by_symbol)

    def _outputs(self, node: FxNode) -> tuple[Argument, ...]:
        returned = node.args[0]
        if isinstance(returned, FxNode):
            raise UnkeyableGraph("a graph that returns one value instead of a tuple")
        outputs = self._values.arguments(tuple(returned))  # type: ignore[arg-type]  # checked by its parts
        if any(isinstance(output, tuple | list | dict | slice) for output in outputs):
            raise UnkeyableGraph("an output that is a container")
        return outputs


def _refs(count: int) -> Sequence[Ref]:
    """Return the references to `count` values or more. Graphs share them."""
    return _REFS if count <= len(_REFS) else [Ref(number) for number in range(count)]


def _asks_for_grad(gm: GraphModule) -> bool:
    """Say whether gradients are on at the graph's start, or somewhere in it ("with torch.enable_grad()")."""
    if torch.is_inference_mode_enabled():
        return False
    return torch.is_grad_enabled() or any(
        node.target is torch._C._set_grad_enabled and node.args == (True,) for node in gm.graph.nodes
    )


def _level(calls: Sequence[Node], placeholders: Sequence[FxNode]) -> Level:
    """AOTAutograd keeps values under "val" and calls operators only; Dynamo has "example_value"."""
    if any("example_value" in node.meta for node in placeholders):
        return Level.DYNAMO
    if any(call.kind is NodeKind.METHOD for call in calls):
        return Level.DYNAMO
    return Level.ATEN if any("val" in node.meta for node in placeholders) else Level.DYNAMO


def _role(node: FxNode) -> Role:
    value = value_of(node)
    if isinstance(value, torch.nn.Parameter):
        return Role.PARAMETER
    if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None:
        return Role.BUFFER
    return Role.INPUT


def _alias_groups(values: Sequence[object]) -> list[int]:
    """Number the storages that several of `values` share, in the order of first use; 0 for the others."""
    storages = [value.untyped_storage()._cdata if isinstance(value, Tensor) else None for value in values]
    counts = Counter(storages)
    numbers: dict[int, int] = {}
    return [
        numbers.setdefault(storage, len(numbers) + 1) if storage is not None and counts[storage] > 1 else 0
        for storage in storages
    ]


def input_name(node: FxNode) -> str:
    """Return an input's name as the caller knows it: the last name in Dynamo's source, or the node's own."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is not None and isinstance(value_of(node), Tensor):
        name = source.name if isinstance(source.name, str) else source.name()  # a method up to torch 2.9
        words = _WORD.findall(name)
        if words:
            return str(words[-1])
    return node.name
