"""Reads what a graph defines where it is first used: texts, floats, expressions, metas."""

from __future__ import annotations

from typing import TypeVar

from fuse_cache.proto import graph_format as form
from fuse_cache.proto import targets
from fuse_cache.proto.expression import MAX_CODE, ExpressionError, SymExpr, check
from fuse_cache.proto.graph import Dim, Meta, OtherMeta, SymMeta, TensorMeta
from fuse_cache.proto.limits import GraphLimits
from fuse_cache.proto.varint import float_token, token_float, unzigzag

MAX_TOKEN_64 = (1 << 64) - 1
_Choice = TypeVar("_Choice")


class DefinitionReader:
    """Reads tokens once, in order. A read beyond the last raises StopIteration: no generator may do it.

    Every definition is checked to be well-formed and the first of its kind and value.
    """

    def __init__(self, tokens: list[int], limits: GraphLimits) -> None:
        self._next = iter(tokens).__next__
        self._limits = limits
        self._strings: list[str] = []
        self._string_set: set[str] = set()
        self._floats: list[float] = []
        self._float_set: set[int] = set()
        self._expressions: list[SymExpr] = []
        self._expression_set: set[SymExpr] = set()
        self._metas: list[Meta] = []
        self._meta_keys: set[tuple[object, ...]] = set()
        self._meta_shapes: list[tuple[int, int]] = []  # depth and number of parts of each meta
        self._symbols_defined = 0
        self._symbols_seen = 0
        self._code_read = 0

    def _integer(self, token: int) -> int:
        if token > MAX_TOKEN_64:
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
        if bits > MAX_TOKEN_64 or bits in self._float_set:
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
        self._code_read += length
        self._bounded(self._code_read, "integers in all expressions", self._limits.expression_code)
        expression = SymExpr(tuple([unzigzag(self._next()) for _ in range(length)]))
        try:
            symbols = check(expression, self._symbols_defined, boolean=boolean)
        except ExpressionError as error:
            raise form.malformed(f"an expression: {error}") from error
        if not symbols:
            raise form.malformed("an expression without a symbol: it is a constant")
        return expression, symbols

    def _meta(self, token: int, depth: int = 1) -> int:
        """Read the meta that `token` begins and return its number, which is above 0."""
        metas = self._metas
        if token:
            if token > len(metas):
                raise form.malformed(f"meta {token} of {len(metas)}")
            return token
        meta, key, shape = self._meta_definition(depth)
        if key in self._meta_keys:
            raise form.malformed("a second definition of a meta")
        self._meta_keys.add(key)
        self._meta_shapes.append(shape)
        metas.append(meta)
        return self._bounded(len(metas), "metas", self._limits.metas)

    def _meta_definition(self, depth: int) -> tuple[Meta, tuple[object, ...], tuple[int, int]]:
        """Return a meta, what tells it from others, and its depth and number of parts.

        Metas are told apart by the numbers and identities of their parts: hashing by value would let a few
        bytes that name a large part again and again cost what it costs to hash that part.
        """
        kind = self._next()
        if kind == form.META_TENSOR:
            tensor = self._tensor_meta()
            dims = map(_dim_key, (*tensor.size, *tensor.stride, tensor.storage_offset))
            key = (kind, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, *dims)
            return tensor, key, (0, 1)
        if kind == form.META_SYM:
            value = self._dim(signed=True)
            return SymMeta(value), (kind, _dim_key(value)), (0, 1)
        if kind == form.META_OTHER:
            name = self._string()
            if name not in targets.OTHER_METAS:
                raise form.malformed(f"{name!r} is no kind of meta")
            return OtherMeta(name), (kind, name), (0, 1)
        if kind != form.META_TUPLE:
            raise form.malformed(f"kind of meta {kind}")
        self._bounded(depth, "levels of nested results", self._limits.meta_depth)
        count = self._count("results", self._limits.results)
        numbers = [self._meta(self._next(), depth + 1) for _ in range(count)]
        shapes = [self._meta_shapes[number - 1] for number in numbers]
        # A part that is named by its number brings its own depth and size.
        depth = 1 + max([shape[0] for shape in shapes], default=0)
        self._bounded(depth, "levels of nested results", self._limits.meta_depth)
        size = self._bounded(1 + sum(shape[1] for shape in shapes), "results", self._limits.results)
        return tuple([self._metas[number - 1] for number in numbers]), (kind, *numbers), (depth, size)

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


def _dim_key(dim: Dim) -> int:
    """Return an integer that only the same size has. Equal expressions are one object here."""
    return dim if isinstance(dim, int) else id(dim) + (1 << 64)
