"""Symbolic sizes of a Dynamo graph as plain data: numbered symbols, expressions as code, guards.

A symbol's name says where in the user's program it came from, so it stays here. Its number is its order of
first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from fuse_cache.client.unkeyable import UnkeyableGraph
from fuse_cache.kernels.sizes import NoFormError, UnknownSymbolError, expression_of
from fuse_cache.proto.expression import Dim, SymExpr
from fuse_cache.proto.graph import Symbol

_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1


class SymbolTable:
    """Numbers symbols and writes expressions over them. One table per graph."""

    def __init__(self) -> None:
        self._shape_env: ShapeEnv | None = None
        self._numbers: dict[sympy.Symbol, int] = {}
        self._expressions: dict[sympy.Basic, Dim] = {}
        # By identity of the expression that a SymInt holds: applying the replacements to it costs 5 us,
        # and a graph has few. They are kept, so that an id stays one thing's.
        self._by_id: dict[int, tuple[sympy.Basic, Dim]] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """The symbols by number."""
        return tuple(self._numbers)

    def define(self, value: int | torch.SymInt, standing_alone: Iterable[sympy.Symbol] = ()) -> None:
        """Number the symbols of `value` that have no number yet.

        Several new ones in one expression take the order of `standing_alone`, which no name decides.
        """
        if isinstance(value, int):
            return
        self._shape_env = value.node.shape_env
        fresh = {item for item in value.node.expr.free_symbols if item not in self._numbers}
        if len(fresh) > 1:
            order = {item: place for place, item in enumerate(dict.fromkeys(standing_alone))}
            ordered = sorted(fresh, key=lambda item: (order.get(item, len(order)), str(item)))
        else:
            ordered = list(fresh)
        for item in ordered:
            assert isinstance(item, sympy.Symbol)
            if not _is_backed(item, self._shape_env):
                raise UnkeyableGraph("an input whose size depends on data (unbacked symbol)")
            self._numbers[item] = len(self._numbers)

    def dim(self, value: int | torch.SymInt) -> Dim:
        """Return `value` as an integer or as an expression over the symbols.

        Raises:
            UnkeyableGraph: it uses a symbol that no input has, or a function without a form.
        """
        if isinstance(value, int):
            return int(value)
        node = value.node
        raw = node._expr
        known = self._by_id.get(id(raw))
        if known is None:
            known = self._by_id[id(raw)] = (raw, self.expression(node.expr))
        return known[1]

    def expression(self, expr: sympy.Basic) -> Dim:
        """Return a sympy expression as an integer or as code. Errors as of `dim`."""
        try:
            return expression_of(expr, self._numbers, self._expressions)
        except UnknownSymbolError as error:
            backed = _is_backed(error.symbol, self._shape_env)
            raise UnkeyableGraph(
                "a size that no input has" if backed else "a size that depends on data (unbacked symbol)"
            ) from None
        except NoFormError as error:
            raise UnkeyableGraph(str(error)) from error

    def ranges(self) -> tuple[Symbol, ...]:
        """Return the symbols with the bounds that Dynamo knows."""
        if self._shape_env is None:
            return ()
        return tuple(_bounds(self._shape_env.var_to_range.get(item)) for item in self._numbers)

    def guards(self) -> tuple[SymExpr, ...]:
        """Return the conditions on the symbols under which Dynamo took the graph, as far as they have a form.

        Those that the bounds imply are left out, and those about values that are not inputs of this graph.
        """
        env = self._shape_env
        if env is None:
            return ()
        ranges = {item: env.var_to_range[item] for item in self._numbers if item in env.var_to_range}
        found: set[tuple[int, ...]] = set()
        for guard in env.guards:
            expr = env.replace(guard.expr)
            if not expr.free_symbols or not expr.free_symbols <= self._numbers.keys():
                continue
            if bound_sympy(expr, ranges) == ValueRanges.wrap(sympy.true):
                continue
            try:
                code = self.expression(expr)
            except UnkeyableGraph:
                continue  # A worker that lacks it may choose example sizes that do not fit, and then says so.
            if isinstance(code, SymExpr):
                found.add(code.code)
        return tuple(SymExpr(code) for code in sorted(found))


def _is_backed(item: sympy.Symbol, env: ShapeEnv | None) -> bool:
    return env is not None and item in env.var_to_range and not _is_unbacked(item)


def _is_unbacked(item: sympy.Symbol) -> bool:
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return bool(symbol_is_type(item, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def _bounds(known: Any) -> Symbol:
    if known is None:
        return Symbol(0, None)
    lower = int(known.lower) if known.lower.is_Integer else _INT64_MIN
    upper = int(known.upper) if known.upper.is_Integer else None
    if upper is not None and upper >= _INT64_MAX:
        upper = None
    return Symbol(max(lower, _INT64_MIN), upper)
