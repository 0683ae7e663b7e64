"""A graph to its canonical bytes. `graph_format.py` describes the form; `graph_reader.py` reads it back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fuse_cache.proto import graph_format as form
from fuse_cache.proto.expression import SymExpr
from fuse_cache.proto.graph import (
    Argument,
    Device,
    Dim,
    Dtype,
    Graph,
    Group,
    Layout,
    MemoryFormat,
    Meta,
    Ref,
    SymMeta,
    TensorMeta,
)
from fuse_cache.proto.limits import GRAPH_LIMITS
from fuse_cache.proto.varint import float_token, pack, zigzag

# Tag of each argument that is nothing but a name.
_NAMED = {
    Dtype: form.DTYPE,
    MemoryFormat: form.MEMORY_FORMAT,
    Layout: form.LAYOUT,
    Group: form.GROUP,
}
_SPECIAL = {None: form.NONE, True: form.TRUE, False: form.FALSE, ...: form.ELLIPSIS}


def write_graph(graph: Graph) -> bytes:
    """Return the bytes of `graph`.

    Raises:
        GraphError: it holds something that has no form here; the message names it.
    """
    return form.HEADER + _Writer().write(graph)


class _Writer:
    """Tokens of one graph. Tables map what is defined already to its number, plus 1."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._emit = self._tokens.append
        self._strings: dict[str, int] = {}
        self._floats: dict[int, int] = {}
        self._expressions: dict[SymExpr, int] = {}
        self._targets: dict[tuple[int, str], int] = {}
        self._metas: dict[Hashable, int] = {}
        self._meta_ids: dict[
            int, int
        ] = {}  # by identity, since hashing a meta costs 2 us; the graph keeps them alive
        self._depth = 0

    def write(self, graph: Graph) -> bytes:
        emit = self._emit
        emit(graph.level)
        emit(len(graph.symbols))
        for symbol in graph.symbols:
            emit(self._integer(symbol.lower))
            emit(0 if symbol.upper is None else self._integer(symbol.upper) + 1)
        emit(len(graph.groups))
        for group in graph.groups:
            self._string(group.name)
            emit(group.size)
        emit(len(graph.op_schemas))
        for schema in graph.op_schemas:
            self._string(schema.name)
            self._string(schema.schema, GRAPH_LIMITS.schema_bytes)
            emit(len(schema.tags))
            for tag in schema.tags:
                self._string(tag)
        emit(len(graph.inputs))
        for entry in graph.inputs:
            emit(entry.role)
            emit(entry.alias_group)
            self._meta(entry.meta)
        self._nodes(graph)
        emit(len(graph.outputs))
        self._arguments(graph.outputs, len(graph.inputs) + len(graph.nodes))
        emit(len(graph.guards))
        for guard in graph.guards:
            self._code(guard)
        try:
            return pack(self._tokens)
        except TypeError as error:
            raise form.malformed(f"a number that is not an integer: {error}") from error

    def _nodes(self, graph: Graph) -> None:
        emit = self._emit
        targets = self._targets
        meta_ids = self._meta_ids
        value = len(graph.inputs)
        emit(len(graph.nodes))
        write, emit_name = self._arguments, self._string
        for kind, target, args, kwargs, meta in graph.nodes:
            key = (kind, target)
            number = targets.get(key)
            if number is None:
                emit(0)
                emit(kind)
                emit_name(target)
                targets[key] = len(targets) + 1
            else:
                emit(number)
            emit(len(args))
            write(args, value)
            emit(len(kwargs))
            for name, argument in kwargs:
                emit_name(name)
                write((argument,), value)
            number = meta_ids.get(id(meta))
            if number is None:
                self._meta(meta)
            else:
                emit(number)
            value += 1

    def _arguments(self, arguments: Sequence[Argument], value: int) -> None:
        """Emit `arguments` of the value with the number `value`."""
        emit = self._emit
        for argument in arguments:
            kind = type(argument)
            if kind is Ref:
                distance = value - argument.value  # type: ignore[attr-defined]  # `kind` is its type
                if not 0 < distance <= value:
                    raise form.malformed(f"value {value} refers to {argument}, which is not before it")
                emit(distance << 4 | form.REF)
            elif kind is int:
                if 0 <= argument <= form.INT64_MAX:  # type: ignore[operator]  # `kind` is its type
                    emit(argument << 5 | form.INT)  # type: ignore[operator]  # zigzag of what is not negative
                else:
                    emit(self._integer(argument) << 4 | form.INT)
            elif argument is None or argument is True or argument is False or argument is ...:
                emit(_SPECIAL[argument] << 4 | form.SPECIAL)
            elif kind is tuple or kind is list:
                assert isinstance(argument, tuple | list)
                emit(len(argument) << 4 | (form.TUPLE if kind is tuple else form.LIST))
                self._nested(argument, value)
            elif kind is float:
                emit(form.FLOAT)
                self._float(argument)
            elif kind is str:
                emit(form.STR)
                self._string(argument)
            elif kind is Device:
                emit(form.DEVICE)
                self._string(argument.type)  # type: ignore[attr-defined]  # `kind` is its type
            elif kind in _NAMED:
                emit(_NAMED[kind])
                self._string(argument.name)  # type: ignore[attr-defined]  # each kind in _NAMED has one
            elif isinstance(argument, slice):
                emit(form.SLICE)
                self._nested((argument.start, argument.stop, argument.step), value)
            elif kind is dict:
                assert isinstance(argument, dict)
                emit(len(argument) << 4 | form.DICT)
                self._nested((), value)  # an empty one is a level too
                for name in sorted(argument):
                    self._string(name)
                    self._nested((argument[name],), value)
            else:
                raise form.malformed(
                    f"an argument of type {kind.__module__}.{kind.__qualname__} has no form in a graph"
                )

    def _nested(self, arguments: Sequence[Argument], value: int) -> None:
        self._depth += 1
        if self._depth > GRAPH_LIMITS.argument_depth:
            raise form.too_large("levels of nested arguments", self._depth, GRAPH_LIMITS.argument_depth)
        self._arguments(arguments, value)
        self._depth -= 1

    def _integer(self, value: object) -> int:
        if type(value) is not int:
            raise form.malformed(f"{value!r} is not an integer")
        if not form.INT64_MIN <= value <= form.INT64_MAX:
            raise form.malformed(f"an integer of {value.bit_length()} bits; 64 with the sign are the most")
        return zigzag(value)

    def _string(self, text: object, limit: int = GRAPH_LIMITS.string_bytes) -> None:
        if type(text) is not str:
            raise form.malformed(f"{type(text).__name__} where a text belongs")
        number = self._strings.get(text)
        if number is not None:
            self._emit(number)
            return
        if not text.isprintable():
            raise form.malformed("a text with characters that cannot be printed")
        data = text.encode()
        if len(data) > limit:
            raise form.too_large("bytes of text", len(data), limit)
        self._emit(0)
        self._emit(len(data))
        self._tokens.extend(data)
        self._strings[text] = len(self._strings) + 1

    def _float(self, value: object) -> None:
        assert isinstance(value, float)
        bits = float_token(value)
        number = self._floats.get(bits, 0)
        self._emit(number)
        if not number:
            self._emit(bits)
            self._floats[bits] = len(self._floats) + 1

    def _dim(self, dim: Dim, signed: bool = False) -> None:
        if type(dim) is int:
            if not signed and not 0 <= dim <= form.INT64_MAX:
                raise form.malformed(f"{dim} is no size, stride or offset")
            self._emit((self._integer(dim) if signed else dim) << 1)
            return
        if type(dim) is not SymExpr:
            raise form.malformed(f"{type(dim).__name__} where a size belongs")
        number = self._expressions.get(dim, 0)
        self._emit(number << 1 | 1)
        if not number:
            self._code(dim)
            self._expressions[dim] = len(self._expressions) + 1

    def _code(self, expression: SymExpr) -> None:
        self._emit(len(expression.code))
        self._tokens.extend([self._integer(int(part)) for part in expression.code])

    def _meta(self, meta: Meta, depth: int = 1) -> None:
        number = self._meta_ids.get(id(meta)) or self._metas.get(self._meta_key(meta), 0)
        if number:
            self._emit(number)
            self._meta_ids[id(meta)] = number
            return
        emit = self._emit
        emit(0)
        if isinstance(meta, TensorMeta):
            emit(form.META_TENSOR)
            self._string(meta.dtype)
            self._string(meta.layout)
            self._string(meta.device)
            emit(int(meta.requires_grad))
            if len(meta.size) != len(meta.stride):
                raise form.malformed(f"{len(meta.size)} sizes and {len(meta.stride)} strides")
            emit(len(meta.size))
            for dim in meta.size:
                self._dim(dim)
            for dim in meta.stride:
                self._dim(dim)
            self._dim(meta.storage_offset)
        elif isinstance(meta, SymMeta):
            emit(form.META_SYM)
            self._dim(meta.value, signed=True)
        elif isinstance(meta, tuple):
            if depth > GRAPH_LIMITS.meta_depth:
                raise form.too_large("levels of nested results", depth, GRAPH_LIMITS.meta_depth)
            emit(form.META_TUPLE)
            emit(len(meta))
            for part in meta:
                self._meta(part, depth + 1)
        else:
            emit(form.META_OTHER)
            self._string(meta.kind)
        self._metas[self._meta_key(meta)] = self._meta_ids[id(meta)] = len(self._metas) + 1

    def _meta_key(self, meta: Meta) -> Hashable:
        """Return what tells a meta from others: itself, or the numbers of its parts.

        Hashing several results by value would cost what all parts cost, for every few bytes that name them.
        A part that is not defined yet has the number 0, which is in no key of the table.
        """
        if not isinstance(meta, tuple):
            return meta
        return tuple(
            [self._meta_ids.get(id(part)) or self._metas.get(self._meta_key(part), 0) for part in meta]
        )
