"""Plain data back to an FX graph that Inductor compiles, in a process that never traced the model.

The graph gets fresh symbols, and every node the fake value that torch computes for it here. Nothing that came
with the request is evaluated, imported or looked up by a walk of attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import sympy
import torch
import torch.fx.experimental._config as symbolic_config
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fuse_cache.kernels.fx_targets import DTYPES, LAYOUTS, MEMORY_FORMATS, UnknownTarget, operator_of, resolve
from fuse_cache.proto.graph import (
    Argument,
    Device,
    Dtype,
    Graph,
    Group,
    Input,
    Layout,
    Level,
    MemoryFormat,
    NodeKind,
    Ref,
    Role,
    Symbol,
    SymMeta,
    TensorMeta,
)
from fuse_cache.proto.request import Range
from fuse_cache.server.worker.attention import CALLS, Policy
from fuse_cache.server.worker.metas import hint_of, meta_difference
from fuse_cache.server.worker.protocol import BuildFailed
from fuse_cache.server.worker.sizes import Size, Sizes, fresh_sizes

_STAGE: Final = "rebuild"
_HOW_TO_REGISTER: Final = (
    "the daemon must import the module that registers it; name it in the daemon's configuration "
    '(op_modules = ["my_model.ops"] in its TOML file, or FUSE_CACHE_OP_MODULES=my_model.ops,other.ops in its '
    "environment) and restart it"
)
_STATIC_INPUT: Final = {"_dynamo_static_input_type": "unguarded"}


class OpMissing(BuildFailed):
    """The graph calls an operator that this worker does not have."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__("OP_MISSING", message, stage=_STAGE)
        self.name = name


class SchemaMismatch(BuildFailed):
    """The worker's operator of that name is another one than the client's."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__("OP_MISSING", message, stage=_STAGE)
        self.name = name


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A graph ready for `standalone_compile(gm, example_inputs, dynamic_shapes="from_graph")`.

    `example_inputs` are the placeholders' own fake values: others would fix the sizes. Compile it under
    `size_oblivious()`, as it was rebuilt.
    """

    gm: GraphModule
    example_inputs: list[Any]
    fake_mode: FakeTensorMode
    shape_env: ShapeEnv
    symbols: tuple[
        sympy.Symbol | int, ...
    ]  # by number; int: the range leaves one value, which is compiled in
    bounds: tuple[Symbol, ...]  # by number: the sizes that the compiled code covers
    hints: tuple[int, ...]  # by number: example sizes that fit together


def size_oblivious() -> Any:
    """Return a context in which torch treats sizes 0 and 1 like others, as the client does when it traces."""
    config: Any = symbolic_config
    return config.patch(backed_size_oblivious=True)


def rebuild(graph: Graph, request_range: Range, policy: Policy | None = None) -> Rebuilt:
    """Make the FX graph that `graph` describes, with the sizes that `request_range` bounds. `policy` names
    the attention kernels in it; without one they are left to torch.

    Raises:
        OpMissing: an operator is not registered here; import the module that does (`op_modules`).
        SchemaMismatch: it is registered with another schema, or computes other shapes than the client's.
        BuildFailed: the range does not fit the graph, or torch refuses a call of it.
    """
    _check_schemas(graph)
    with size_oblivious(), torch.no_grad():
        sizes = fresh_sizes(graph, request_range)
        fake_mode = FakeTensorMode(shape_env=sizes.shape_env, allow_non_fake_inputs=True)
        with fake_mode:
            example_inputs = _fake_inputs(graph.inputs, sizes)
        gm = _build(graph, example_inputs)
        # As Dynamo computes them: without the Python dispatcher, composite operators written in C++ (linear
        # on torch 2.11) ask for sizes as plain numbers, which burns the example's in.
        with fake_mode, enable_python_dispatcher():
            _Propagator(gm, graph, sizes, policy).run(*example_inputs)
            if policy is not None:
                policy.apply(gm)
    return Rebuilt(gm, example_inputs, fake_mode, sizes.shape_env, sizes.symbols, sizes.bounds, sizes.hints)


def _check_schemas(graph: Graph) -> None:
    for sent in graph.op_schemas:
        try:
            op = operator_of(sent.name)
        except UnknownTarget as error:
            raise OpMissing(sent.name, f"{error}: {_HOW_TO_REGISTER}") from error
        here = str(op._schema)
        if here != sent.schema:
            raise SchemaMismatch(
                sent.name, f"operator {sent.name}: the client has {sent.schema}, the worker {here}"
            )
        tags = tuple(sorted(tag.name for tag in op.tags))
        if tags != sent.tags:
            raise SchemaMismatch(
                sent.name, f"operator {sent.name}: the client's tags are {sent.tags}, the worker's {tags}"
            )


def _fake_inputs(inputs: Sequence[Input], sizes: Sizes) -> list[Any]:
    """Make the fake values of the inputs. Inputs of one alias group are made in one storage."""
    storages: dict[int, Any] = {}
    values = []
    for number, entry in enumerate(inputs):
        try:
            values.append(_fake_input(entry, sizes, storages, inputs))
        except (KeyError, RuntimeError) as error:
            message = f"input {number} cannot be made: {type(error).__name__}: {error}"
            raise BuildFailed("GRAPH_MALFORMED", message, stage=_STAGE) from error
    return values


def _fake_input(entry: Input, sizes: Sizes, storages: dict[int, Any], inputs: Sequence[Input]) -> Any:
    meta = entry.meta
    if isinstance(meta, SymMeta):
        return sizes.size(meta.value)
    size = [sizes.size(dim) for dim in meta.size]
    stride = [sizes.size(dim) for dim in meta.stride]
    offset = sizes.size(meta.storage_offset)
    dtype, device = DTYPES[meta.dtype], torch.device(meta.device)
    tensor: Tensor
    if not entry.alias_group and meta.storage_offset == 0:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    else:
        storage = storages.get(entry.alias_group) if entry.alias_group else None
        if storage is None:
            group = [
                other for other in inputs if other is entry or 0 < other.alias_group == entry.alias_group
            ]
            elements = max((_extent(other.meta, sizes) for other in group), key=hint_of)
            storage = torch.empty(elements, dtype=dtype, device=device).untyped_storage()
            storages[entry.alias_group] = storage
        tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)
    if entry.role is Role.PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=meta.requires_grad)
    return tensor


def _extent(meta: TensorMeta | SymMeta, sizes: Sizes) -> Size:
    """Return how many elements the storage of a tensor holds up to the tensor's last."""
    assert isinstance(meta, TensorMeta)
    last: Size = sizes.size(meta.storage_offset)
    for dim, stride in zip(meta.size, meta.stride, strict=True):
        last = last + (sizes.size(dim) - 1) * sizes.size(stride)
    return last + 1


def _build(graph: Graph, example_inputs: Sequence[Any]) -> GraphModule:
    fx_graph = torch.fx.Graph()
    values: list[FxNode] = []
    for number, (entry, value) in enumerate(zip(graph.inputs, example_inputs, strict=True)):
        node = fx_graph.placeholder(f"input{number}")
        _keep(node, value, graph.level)
        if entry.role in (Role.PARAMETER, Role.BUFFER):
            node.meta["tensor_dict"] = dict(_STATIC_INPUT)
        values.append(node)
    for call in graph.nodes:
        args = tuple(_argument(argument, values) for argument in call.args)
        kwargs = {name: _argument(argument, values) for name, argument in call.kwargs}
        if call.kind is NodeKind.METHOD:
            values.append(fx_graph.call_method(call.target, args, kwargs))
            continue
        try:
            target = resolve(call.target)
        except UnknownTarget as error:
            raise OpMissing(call.target, str(error)) from error
        values.append(fx_graph.call_function(target, args, kwargs))
    fx_graph.output(tuple(_argument(argument, values) for argument in graph.outputs))
    return GraphModule({}, fx_graph)


def _argument(argument: Argument, values: Sequence[FxNode]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.value]
    if isinstance(argument, tuple | list):
        return type(argument)(_argument(part, values) for part in argument)
    if isinstance(argument, dict):
        return {name: _argument(part, values) for name, part in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_argument(part, values) for part in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, Dtype):
        return DTYPES[argument.name]
    if isinstance(argument, Device):
        return torch.device(argument.type)
    if isinstance(argument, MemoryFormat):
        return MEMORY_FORMATS[argument.name]
    if isinstance(argument, Layout):
        return LAYOUTS[argument.name]
    if isinstance(argument, Group):
        return argument.name
    return argument


def _keep(node: FxNode, value: Any, level: Level) -> None:
    """Keep a node's fake value where AOTAutograd and Inductor look for it."""
    node.meta["example_value"] = value
    if level is Level.ATEN:
        node.meta["val"] = value


class _Propagator(torch.fx.Interpreter):
    """Computes the fake value of every node.

    Those of custom operators and of outputs are compared with the client's: state of the host that this
    process did not take over (an autocast, a default) shows there.
    """

    def __init__(self, gm: GraphModule, graph: Graph, sizes: Sizes, policy: Policy | None) -> None:
        super().__init__(gm)
        self._policy = policy
        self._level = graph.level
        self._hints = sizes.hints
        self._custom = {schema.name for schema in graph.op_schemas}
        calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
        self._sent = dict(zip(calls, graph.nodes, strict=True))
        self._returned = frozenset(gm.graph.output_node().all_input_nodes)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._policy is not None and target in CALLS:
            return self._policy.value(args, kwargs)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: FxNode) -> Any:
        sent = self._sent.get(n)
        try:
            value = super().run_node(n)
        except BuildFailed:
            raise
        except Exception as error:
            what = n.op if sent is None else sent.target
            raise BuildFailed(
                "COMPILE_FAILED",
                f"{what} refuses its arguments: {type(error).__name__}: {error}",
                stage=_STAGE,
            ) from error
        if sent is not None:
            if _is_value(value):
                _keep(n, value, self._level)
            is_custom = sent.target in self._custom
            if is_custom or n in self._returned:
                difference = meta_difference(value, sent.meta, self._hints)
                message = f"{sent.target} returns something else here: {difference}"
                if difference and is_custom:
                    raise SchemaMismatch(sent.target, f"operator {message}")
                if difference:
                    raise BuildFailed("COMPILE_FAILED", message, stage=_STAGE)
        return value


def _is_value(value: object) -> bool:
    """Say whether a graph may keep `value`: not a live object, which could not be copied with the graph."""
    if isinstance(value, tuple | list):
        return all(_is_value(part) for part in value)
    return value is None or isinstance(
        value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool | str
    )
