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
        self._meta_set: set[Meta] = set()
        self._symbols_defined = 0
        self._symbols_seen = 0
        self._symbol_uses = 0

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
