"""Canonical bytes to a graph, trusting nothing. `graph_format.py` describes the form.

Whatever is read is checked at once, so that a graph that comes out is one that `graph_writer.py` could have
written, and writing it gives the same bytes.
"""

from __future__ import annotations

from fuse_cache.proto import graph_format as form
from fuse_cache.proto import targets
from fuse_cache.proto.errors import GraphError, GraphReason
from fuse_cache.proto.expression import SymExpr
from fuse_cache.proto.graph import (
    Argument,
    Graph,
    GroupSpec,
    Input,
    Level,
    Node,
    NodeKind,
    OpSchema,
    Ref,
    Role,
    Symbol,
    SymMeta,
    TensorMeta,
)
from fuse_cache.proto.graph_arguments import ArgumentReader
from fuse_cache.proto.limits import GraphLimits
from fuse_cache.proto.varint import VarintError, unpack

_LEVELS = {int(level): level for level in Level}
_KINDS = {int(kind): kind for kind in NodeKind}
_ROLES = {int(role): role for role in Role}


def read_graph(data: bytes, limits: GraphLimits) -> Graph:
    """Return the graph whose canonical bytes are `data`.

    Raises:
        GraphError: they are not, or pass a limit.
    """
    if len(data) > limits.size_bytes:
        raise form.too_large("bytes of graph", len(data), limits.size_bytes)
    if data[:4] != form.HEADER:
        if data[:3] == form.MAGIC and len(data) > 3:
            raise form.malformed(f"graph schema {data[3]}; this side reads {form.SCHEMA}")
        raise form.malformed("not a graph: wrong first bytes")
    try:
        tokens = unpack(data, len(form.HEADER))
    except VarintError as error:
        raise form.malformed(str(error)) from error
    try:
        return _Reader(tokens, limits).read()
    except StopIteration as error:
        raise form.malformed("the graph is cut off") from error


class _Reader(ArgumentReader):
    """Reads one graph."""

    def __init__(self, tokens: list[int], limits: GraphLimits) -> None:
        super().__init__(tokens, limits)
        self._targets: list[tuple[NodeKind, str]] = []
        self._target_set: set[tuple[NodeKind, str]] = set()
        self._level = Level.DYNAMO
        self._schemas: dict[str, bool] = {}  # name -> called

    def read(self) -> Graph:
        limits = self._limits
        level = self._choice(_LEVELS, "level")
        self._level = level
        symbols = tuple([self._symbol() for _ in range(self._count("symbols", limits.symbols))])
        self._symbols_defined = len(symbols)
        groups = tuple([self._group() for _ in range(self._count("groups", limits.groups))])
        schema_count = self._count("operator schemas", limits.op_schemas)
        schemas = tuple([self._schema() for _ in range(schema_count)])
        inputs = self._inputs()
        nodes = self._nodes()
        outputs = self._arguments(self._count("outputs", limits.outputs), 0)
        if any(isinstance(output, tuple | list | dict | slice) for output in outputs):
            raise form.malformed("an output that is not flat")
        self._check_all_used()
        guards = self._guards()
        try:
            self._next()
        except StopIteration:
            return Graph(level, symbols, inputs, nodes, tuple(outputs), schemas, groups, guards)
        raise form.malformed("bytes after the graph")

    def _check_all_used(self) -> None:
        if self._symbols_seen != self._symbols_defined:
            raise form.malformed(f"{self._symbols_defined - self._symbols_seen} symbols are not used")
        for what, table in (("operator schema", self._schemas), ("group", self._groups)):
            for name, used in table.items():
                if not used:
                    raise form.malformed(f"{what} {name} is not used")

    # Head: symbols, groups, operator schemas.

    def _symbol(self) -> Symbol:
        lower = self._integer(self._next())
        token = self._next()
        upper = self._integer(token - 1) if token else None
        if upper is not None and upper < lower:
            raise form.malformed(f"a symbol in {lower} .. {upper}")
        return Symbol(lower, upper)

    def _group(self) -> GroupSpec:
        name = self._string()
        if not form.is_group_name(name):
            raise form.malformed(f"{name!r} is no name of a group")
        if self._groups and name <= next(reversed(self._groups)):
            raise form.malformed("groups are not in the order of their names")
        size = self._next()
        if not 1 <= size <= 1 << 20:
            raise form.malformed(f"group {name} of {size} ranks")
        self._groups[name] = False
        return GroupSpec(name, size)

    def _schema(self) -> OpSchema:
        name = self._string()
        if not targets.is_custom_op(name):
            raise form.malformed(f"{name!r} is no custom operator")
        if self._schemas and name <= next(reversed(self._schemas)):
            raise form.malformed("operator schemas are not in the order of their names")
        schema = self._string(self._limits.schema_bytes)
        if not form.schema_fits(name, schema):
            raise form.malformed(f"{schema[:80]!r} is not a schema of {name}")
        tags = tuple([self._string() for _ in range(self._count("tags", 64))])
        if not all(form.is_tag(tag) for tag in tags) or list(tags) != sorted(set(tags)):
            raise form.malformed(f"the tags of {name} are malformed or not in order")
        self._schemas[name] = False
        return OpSchema(name, schema, tags)

    # Inputs and nodes.

    def _inputs(self) -> tuple[Input, ...]:
        inputs = []
        alias_counts: list[int] = []
        for number in range(self._count("inputs", self._limits.inputs)):
            role = self._choice(_ROLES, "role")
            alias_group = self._next()
            if alias_group > len(alias_counts) + 1:
                raise form.malformed("alias groups are not numbered by first use")
            if alias_group == len(alias_counts) + 1:
                alias_counts.append(0)
            if alias_group:
                alias_counts[alias_group - 1] += 1
            meta = self._metas[self._meta(self._next()) - 1]
            if not isinstance(meta, TensorMeta | SymMeta):
                raise form.malformed(f"input {number} is neither a tensor nor a symbolic integer")
            inputs.append(Input(meta, role, alias_group))
            self._refs.append(Ref(number))
        if 1 in alias_counts:
            raise form.malformed("an alias group of one input")
        return tuple(inputs)

    def _nodes(self) -> tuple[Node, ...]:
        take = self._next
        limits = self._limits
        metas = self._metas
        known_targets = self._targets
        refs = self._refs
        nodes = []
        for _ in range(self._count("nodes", limits.nodes)):
            token = take()
            if not token:
                kind, target = self._target()
            elif token <= len(known_targets):
                kind, target = known_targets[token - 1]
            else:
                raise form.malformed(f"target {token} of {len(known_targets)}")
            args = tuple(self._arguments(take(), 0))
            if target == form.GETATTR and not (
                len(args) == 2
                and type(args[0]) is Ref
                and type(args[1]) is str
                and args[1] in targets.ATTRIBUTES
            ):
                raise GraphError(GraphReason.UNKNOWN_TARGET, "an attribute outside the closed table")
            count = take()
            kwargs = self._kwargs(count) if count else ()
            token = take()
            meta = metas[(token if 0 < token <= len(metas) else self._meta(token)) - 1]
            nodes.append(Node(kind, target, args, kwargs, meta))
            refs.append(Ref(len(refs)))
        return tuple(nodes)

    def _target(self) -> tuple[NodeKind, str]:
        kind = self._choice(_KINDS, "kind of target")
        name = self._string()
        if kind is NodeKind.METHOD:
            known = name in targets.METHODS and self._level is Level.DYNAMO
        elif name in self._schemas:
            self._schemas[name] = known = True
        else:
            known = name in targets.TARGETS or targets.is_torch_op(name)
        if not known:
            raise GraphError(
                GraphReason.UNKNOWN_TARGET, f"{kind.name.lower()} {name!r} is not in the closed table"
            )
        target = (kind, name)
        if target in self._target_set:
            raise form.malformed(f"a second definition of target {name}")
        self._target_set.add(target)
        self._targets.append(target)
        return target

    def _kwargs(self, count: int) -> tuple[tuple[str, Argument], ...]:
        kwargs: list[tuple[str, Argument]] = []
        for _ in range(self._bounded(count, "arguments", self._limits.arguments)):
            name = self._string()
            if not form.is_argument_name(name):
                raise form.malformed(f"{name!r} is no name of an argument")
            if kwargs and name <= kwargs[-1][0]:
                raise form.malformed("named arguments are not in the order of their names")
            kwargs.append((name, self._arguments(1, 0)[0]))
        return tuple(kwargs)

    def _guards(self) -> tuple[SymExpr, ...]:
        guards: list[SymExpr] = []
        for _ in range(self._count("guards", self._limits.guards)):
            guard, _symbols = self._expression(boolean=True)
            if guards and guard.code <= guards[-1].code:
                raise form.malformed("guards are not in the order of their codes")
            guards.append(guard)
        return tuple(guards)
