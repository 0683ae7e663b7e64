"""Canonical bytes to a graph, trusting nothing. `graph_format.py` describes the form.

Whatever is read is checked at once, so that a graph that comes out is one that `graph_writer.py` could have
written, and writing it gives the same bytes.
"""

from __future__ import annotations

from typing import TypeVar

from fuse_cache.proto import graph_format as form
from fuse_cache.proto import targets
from fuse_cache.proto.errors import GraphError, GraphReason
from fuse_cache.proto.expression import MAX_CODE, ExpressionError, SymExpr, check
from fuse_cache.proto.graph import (
    Argument,
    Device,
    Dim,
    Dtype,
    Graph,
    Group,
    GroupSpec,
    Input,
    Layout,
    Level,
    MemoryFormat,
    Meta,
    Node,
    NodeKind,
    OpSchema,
    OtherMeta,
    Ref,
    Role,
    Symbol,
    SymMeta,
    TensorMeta,
)
from fuse_cache.proto.limits import GraphLimits
from fuse_cache.proto.varint import VarintError, float_token, token_float, unpack, unzigzag

_SPECIAL: tuple[Argument, ...] = (None, True, False, ...)
_LEVELS = {int(level): level for level in Level}
_KINDS = {int(kind): kind for kind in NodeKind}
_ROLES = {int(role): role for role in Role}
_NAMED: dict[int, tuple[type[Dtype] | type[Device] | type[MemoryFormat] | type[Layout], frozenset[str]]] = {
    form.DTYPE: (Dtype, targets.DTYPES),
    form.DEVICE: (Device, targets.DEVICES),
    form.MEMORY_FORMAT: (MemoryFormat, targets.MEMORY_FORMATS),
    form.LAYOUT: (Layout, targets.LAYOUTS),
}
_MAX_TOKEN_64 = (1 << 64) - 1
_Choice = TypeVar("_Choice")


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


class _Reader:
    """Reads tokens once, in order. A read beyond the last raises StopIteration, which `read_graph` names."""

    def __init__(self, tokens: list[int], limits: GraphLimits) -> None:
        self._next = iter(tokens).__next__
        self._limits = limits
        self._strings: list[str] = []
        self._string_set: set[str] = set()
        self._floats: list[float] = []
        self._float_set: set[int] = set()
        self._expressions: list[SymExpr] = []
        self._expression_set: set[SymExpr] = set()
        self._targets: list[tuple[NodeKind, str]] = []
        self._target_set: set[tuple[NodeKind, str]] = set()
        self._metas: list[Meta] = []
        self._meta_set: set[Meta] = set()
        self._refs: list[Ref] = []  # one object per value, shared by all that refer to it
        self._symbols_defined = 0
        self._symbols_seen = 0
        self._symbol_uses = 0
        self._arguments_seen = 0
        self._level = Level.DYNAMO
        self._schemas: dict[str, bool] = {}  # name -> called
        self._groups: dict[str, bool] = {}  # name -> used

    def read(self) -> Graph:
        limits = self._limits
        level = self._choice(_LEVELS, "level")
        self._level = level
        symbols = tuple(self._symbol() for _ in range(self._count("symbols", limits.symbols)))
        self._symbols_defined = len(symbols)
        groups = tuple(self._group() for _ in range(self._count("groups", limits.groups)))
        schemas = tuple(self._schema() for _ in range(self._count("operator schemas", limits.op_schemas)))
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
        tags = tuple(self._string() for _ in range(self._count("tags", 64)))
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
            meta = self._meta()
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
            meta = metas[token - 1] if 0 < token <= len(metas) else self._meta(token)
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

    def _arguments(self, count: int, depth: int) -> list[Argument]:
        """Read `count` arguments of the value that is being made, which is the one after all `_refs`."""
        if count > self._limits.arguments:
            raise form.too_large("arguments", count, self._limits.arguments)
        if depth > self._limits.argument_depth:
            raise form.too_large("levels of nested arguments", depth, self._limits.argument_depth)
        self._arguments_seen += count
        if self._arguments_seen > self._limits.total_arguments:
            raise form.too_large("arguments in all", self._arguments_seen, self._limits.total_arguments)
        take = self._next
        refs = self._refs
        arguments: list[Argument] = []
        for _ in range(count):
            token = take()
            tag = token & 15
            payload = token >> 4
            if tag == form.REF:
                if not 0 < payload <= len(refs):
                    raise form.malformed("a reference that is not to an earlier value")
                arguments.append(refs[-payload])
            elif tag == form.INT:
                arguments.append(self._integer(payload))
            elif tag == form.TUPLE:
                arguments.append(tuple(self._arguments(payload, depth + 1)))
            elif tag == form.LIST:
                arguments.append(self._arguments(payload, depth + 1))
            elif tag == form.SPECIAL:
                if payload >= len(_SPECIAL):
                    raise form.malformed(f"special argument {payload}")
                arguments.append(_SPECIAL[payload])
            elif tag == form.DICT:
                arguments.append(self._dict(payload, depth + 1))
            elif payload:
                raise form.malformed(f"payload of an argument with tag {tag}")
            else:
                arguments.append(self._tagged(tag, depth))
        return arguments

    def _tagged(self, tag: int, depth: int) -> Argument:
        """Read what follows a token that was a tag only."""
        if tag == form.FLOAT:
            return self._float()
        if tag == form.STR:
            return self._string()
        if tag == form.SLICE:
            return slice(*self._arguments(3, depth + 1))
        if tag == form.GROUP:
            name = self._string()
            if name not in self._groups:
                raise form.malformed(f"group {name!r} is not defined")
            self._groups[name] = True
            return Group(name)
        if tag not in _NAMED:
            raise form.malformed(f"argument with tag {tag}")
        kind, names = _NAMED[tag]
        name = self._string()
        if name not in names:
            raise form.malformed(f"{name!r} is no {kind.__name__}")
        return kind(name)

    def _dict(self, count: int, depth: int) -> dict[str, Argument]:
        entries: dict[str, Argument] = {}
        last = None
        for _ in range(self._bounded(count, "arguments", self._limits.arguments)):
            name = self._string()
            if last is not None and name <= last:
                raise form.malformed("a dict that is not in the order of its keys")
            last = name
            (entries[name],) = self._arguments(1, depth)
        if not count and depth > self._limits.argument_depth:
            raise form.too_large("levels of nested arguments", depth, self._limits.argument_depth)
        return entries

    def _guards(self) -> tuple[SymExpr, ...]:
        guards: list[SymExpr] = []
        for _ in range(self._count("guards", self._limits.guards)):
            guard, _symbols = self._expression(boolean=True)
            if guards and guard.code <= guards[-1].code:
                raise form.malformed("guards are not in the order of their codes")
            guards.append(guard)
        return tuple(guards)

    # Definitions.

    def _string(self, limit: int = 0) -> str:
        number = self._next()
        strings = self._strings
        if number:
            if number > len(strings):
                raise form.malformed(f"string {number} of {len(strings)}")
            return strings[number - 1]
        length = self._bounded(self._next(), "bytes of text", limit or self._limits.string_bytes)
        self._bounded(len(strings) + 1, "texts", self._limits.strings)
        try:
            text = bytes([self._next() for _ in range(length)]).decode()
        except ValueError as error:
            raise form.malformed("a text that is not UTF-8") from error
        if not text.isprintable():
            raise form.malformed("a text with characters that cannot be printed")
        if text in self._string_set:
            raise form.malformed(f"a second definition of text {text[:80]!r}")
        self._string_set.add(text)
        strings.append(text)
        return text

    def _float(self) -> float:
        number = self._next()
        floats = self._floats
        if number:
            if number > len(floats):
                raise form.malformed(f"float {number} of {len(floats)}")
            return floats[number - 1]
        bits = self._next()
        if bits > _MAX_TOKEN_64 or bits in self._float_set:
            raise form.malformed("a float of more than 64 bits, or defined a second time")
        value = token_float(bits)
        if float_token(value) != bits:
            raise form.malformed("a float that this machine cannot hold")
        self._float_set.add(bits)
        floats.append(value)
        return value

    def _dim(self, signed: bool = False) -> Dim:
        token = self._next()
        number = token >> 1
        if not token & 1:
            if signed:
                return self._integer(number)
            if number > form.INT64_MAX:
                raise form.malformed("a size of more than 64 bits")
            return number
        if number:
            if number > len(self._expressions):
                raise form.malformed(f"expression {number} of {len(self._expressions)}")
            return self._expressions[number - 1]
        expression, symbols = self._expression()
        if expression in self._expression_set:
            raise form.malformed("a second definition of an expression")
        fresh = {symbol for symbol in symbols if symbol >= self._symbols_seen}
        if fresh and max(fresh) - self._symbols_seen + 1 != len(fresh):
            raise form.malformed("symbols are not numbered by first use")
        self._symbols_seen += len(fresh)
        self._expression_set.add(expression)
        self._expressions.append(expression)
        return expression

    def _expression(self, boolean: bool = False) -> tuple[SymExpr, list[int]]:
        """Read and check code, and return it with its symbols in the order of their use."""
        length = self._count("integers in an expression", MAX_CODE)
        expression = SymExpr(tuple([unzigzag(self._next()) for _ in range(length)]))
        try:
            symbols = check(expression, self._symbols_defined, boolean=boolean)
        except ExpressionError as error:
            raise form.malformed(f"an expression: {error}") from error
        if not symbols:
            raise form.malformed("an expression without a symbol: it is a constant")
        self._symbol_uses += len(symbols)
        self._bounded(self._symbol_uses, "uses of symbols", self._limits.symbol_uses)
        return expression, symbols

    def _meta(self, number: int | None = None, depth: int = 1) -> Meta:
        """Read a meta, whose number is read already when it is given."""
        if number is None:
            number = self._next()
        metas = self._metas
        if number:
            if number > len(metas):
                raise form.malformed(f"meta {number} of {len(metas)}")
            return metas[number - 1]
        if depth > self._limits.meta_depth + 1:
            raise form.too_large("levels of nested results", depth - 1, self._limits.meta_depth)
        meta = self._meta_definition(depth)
        if meta in self._meta_set:
            raise form.malformed("a second definition of a meta")
        self._bounded(len(metas) + 1, "metas", self._limits.metas)
        self._meta_set.add(meta)
        metas.append(meta)
        return meta

    def _meta_definition(self, depth: int) -> Meta:
        kind = self._next()
        if kind == form.META_TENSOR:
            return self._tensor_meta()
        if kind == form.META_SYM:
            return SymMeta(self._dim(signed=True))
        if kind == form.META_OTHER:
            name = self._string()
            if name not in targets.OTHER_METAS:
                raise form.malformed(f"{name!r} is no kind of meta")
            return OtherMeta(name)
        if kind == form.META_TUPLE:
            if depth > self._limits.meta_depth:
                raise form.too_large("levels of nested results", depth, self._limits.meta_depth)
            count = self._count("results", self._limits.results)
            return tuple([self._meta(None, depth + 1) for _ in range(count)])
        raise form.malformed(f"kind of meta {kind}")

    def _tensor_meta(self) -> TensorMeta:
        dtype, layout, device = self._string(), self._string(), self._string()
        if dtype not in targets.DTYPES or layout not in targets.LAYOUTS or device not in targets.DEVICES:
            raise form.malformed(f"no such tensor: {dtype!r}, {layout!r}, {device!r}")
        requires_grad = self._next()
        if requires_grad > 1:
            raise form.malformed("requires_grad is neither 0 nor 1")
        rank = self._count("dimensions", self._limits.rank)
        size = tuple([self._dim() for _ in range(rank)])
        stride = tuple([self._dim() for _ in range(rank)])
        return TensorMeta(dtype, device, size, stride, self._dim(), bool(requires_grad), layout)

    # Numbers.

    def _integer(self, token: int) -> int:
        if token > _MAX_TOKEN_64:
            raise form.malformed("an integer of more than 64 bits")
        return token >> 1 if not token & 1 else -((token + 1) >> 1)

    def _count(self, what: str, limit: int) -> int:
        return self._bounded(self._next(), what, limit)

    def _bounded(self, count: int, what: str, limit: int) -> int:
        if count > limit:
            raise form.too_large(what, count, limit)
        return count

    def _choice(self, choices: dict[int, _Choice], what: str) -> _Choice:
        number = self._next()
        if number not in choices:
            raise form.malformed(f"{what} {number}")
        return choices[number]
