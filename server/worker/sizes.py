"""Fresh symbolic sizes for a graph that is rebuilt: bounds, example values that fit together, expressions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from fuse_cache.proto.expression import (
    ADD,
    CEILDIV,
    FLOORDIV,
    INT,
    MAX,
    MIN,
    MOD,
    MUL,
    NEG,
    POW,
    PYTHONMOD,
    SYMBOL,
    Dim,
    ExpressionError,
    evaluate,
)
from fuse_cache.proto.expression_text import to_text
from fuse_cache.proto.graph import Graph, Symbol, TensorMeta
from fuse_cache.proto.request import Range
from fuse_cache.server.worker.protocol import BuildFailed

Size: TypeAlias = int | torch.SymInt

# Distinct primes, so that no accident makes two sizes look related. Small, so that a product of three stays
# below 2^31 elements of a real model's width.
_GENERIC: Final = (11, 13, 17, 19, 23, 29, 31, 37)
# Distinct primes that lie far apart, for conditions such as 4 * s1 <= s0.
_SPREAD: Final = (3, 17, 89, 457, 2311, 11587)
_MAX_ORDERS: Final = 720  # of the values among the symbols: all of six
# Sizes that must be multiples of something are multiples of one of these.
_SCALES: Final = (1, 2, 8, 64, 128, 1024)
_MAX_TRIALS: Final = 20_000  # of 3 us each: 60 ms at most


@dataclass(frozen=True, slots=True)
class Sizes:
    """The symbols of one graph as a compiler sees them."""

    shape_env: ShapeEnv
    bounds: tuple[Symbol, ...]  # what the compiled code covers
    hints: tuple[int, ...]  # an example value of each, within its bounds
    symbols: tuple[sympy.Symbol | int, ...]  # int: the bounds leave one value, which is compiled in

    def size(self, dim: Dim) -> Size:
        """Return the size that an expression over the graph's symbols stands for.

        Raises:
            BuildFailed: it has no value, or a function in it is not defined for its operands.
        """
        if isinstance(dim, int):
            return dim
        try:
            expr = _to_sympy(dim.code, self.symbols)
            return self.shape_env.create_symintnode(sympy.sympify(expr), hint=evaluate(dim, self.hints))
        except (ArithmeticError, AssertionError, ExpressionError, ValueError) as error:
            raise BuildFailed(
                "GRAPH_MALFORMED", f"the size {to_text(dim)} has no value: {error}", stage="rebuild"
            ) from error


def fresh_sizes(graph: Graph, compile_range: Range) -> Sizes:
    """Make symbols for `graph`, of which the one that `compile_range` names stays within it.

    Raises:
        BuildFailed: the range is outside what the graph was taken for, or no sizes fit the graph's guards.
    """
    bounds = tuple(
        _intersection(symbol, compile_range) if number == compile_range.symbol else symbol
        for number, symbol in enumerate(graph.symbols)
    )
    if compile_range.symbol is not None and compile_range.symbol >= len(graph.symbols):
        raise BuildFailed(
            "REQUEST_MALFORMED",
            f"the range is about symbol {compile_range.symbol}; the graph has {len(graph.symbols)}",
            stage="rebuild",
        )
    hints = choose_hints(graph, bounds)
    shape_env = ShapeEnv()
    symbols = tuple(
        symbol.lower if symbol.lower == symbol.upper else _fresh_symbol(shape_env, number, symbol, hint)
        for number, (symbol, hint) in enumerate(zip(bounds, hints, strict=True))
    )
    return Sizes(shape_env, bounds, hints, symbols)


def _intersection(symbol: Symbol, wanted: Range) -> Symbol:
    lower = max(symbol.lower, wanted.lower)
    upper = wanted.upper if symbol.upper is None else min(symbol.upper, wanted.upper)
    if lower > upper:
        most = "unbounded" if symbol.upper is None else str(symbol.upper)
        raise BuildFailed(
            "REQUEST_MALFORMED",
            f"no size of {wanted.lower} .. {wanted.upper} is one that the graph was taken for: "
            f"{symbol.lower} .. {most}",
            stage="rebuild",
        )
    return Symbol(lower, upper)


def _fresh_symbol(shape_env: ShapeEnv, number: int, bounds: Symbol, hint: int) -> sympy.Symbol:
    upper = int_oo if bounds.upper is None else bounds.upper
    made = shape_env.create_symbol(
        hint,
        source=ConstantSource(f"size{number}"),
        dynamic_dim=DimDynamic.DYNAMIC,
        # The bounds are explicit, so that what follows from them (32-bit indices) needs no guard.
        constraint_dim=StrictMinMaxConstraint(vr=ValueRanges(bounds.lower, upper), warn_only=False),
        positive=True if bounds.lower >= 0 else None,
        do_not_specialize_zero_one=True,
    )
    assert isinstance(made, sympy.Symbol)
    return made


def choose_hints(graph: Graph, bounds: Sequence[Symbol]) -> tuple[int, ...]:
    """Choose an example value for every symbol, within its bounds, so that all guards of the graph hold.

    Symbols get values of their own unless guards tie them together. The choice depends on nothing else.

    Raises:
        BuildFailed: none was found.
    """
    for trial, hints in enumerate(_candidates(graph, bounds)):
        try:
            if _within(hints, bounds) and all(evaluate(guard, hints) for guard in graph.guards):
                return hints
        except ExpressionError:
            pass  # a division by zero: not these values
        if trial >= _MAX_TRIALS:
            break
    raise BuildFailed(
        "REQUEST_MALFORMED",
        "no sizes within the range fulfil the graph's conditions: "
        + ", ".join(to_text(guard) for guard in graph.guards[:8]),
        stage="rebuild",
    )


def _within(hints: Sequence[int], bounds: Sequence[Symbol]) -> bool:
    return all(
        bound.lower <= hint and (bound.upper is None or hint <= bound.upper)
        for hint, bound in zip(hints, bounds, strict=True)
    )


def _candidates(graph: Graph, bounds: Sequence[Symbol]) -> Iterator[tuple[int, ...]]:
    count = len(bounds)
    counts = range(1, count)
    # All different as long as that can be: equal example sizes are taken for a condition that they are equal.
    rounds = [
        *((0, assign) for assign in (_in_order, _in_any_order)),
        *((merged, assign) for assign in (_in_order, _in_any_order) for merged in counts),
    ]
    for merged, assign in rounds:
        for classes in _partitions(_places(graph), merged):
            shared = [
                _intersection_of([bounds[i] for i in range(count) if classes[i] == one])
                for one in range(max(classes, default=-1) + 1)
            ]
            for values in assign(len(shared)):
                clamped = [_clamp(value, bound) for value, bound in zip(values, shared, strict=True)]
                yield tuple(clamped[one] for one in classes)
    yield from itertools.product(*((bound.lower, bound.upper or bound.lower) for bound in bounds))


def _in_order(count: int) -> Iterator[tuple[int, ...]]:
    """Yield values for `count` symbols, that of the first the smallest."""
    for scale in _SCALES:
        yield tuple(_GENERIC[one % len(_GENERIC)] * scale for one in range(count))


def _in_any_order(count: int) -> Iterator[tuple[int, ...]]:
    """Yield values for `count` symbols, also far apart, from that of the first the greatest on."""
    for primes in (_GENERIC, _SPREAD):
        values = [primes[one % len(primes)] for one in range(count)]
        for order in itertools.islice(itertools.permutations(values[::-1]), _MAX_ORDERS):
            for scale in _SCALES[:3]:
                yield tuple(value * scale for value in order)


def _intersection_of(bounds: Sequence[Symbol]) -> Symbol:
    uppers = [bound.upper for bound in bounds if bound.upper is not None]
    return Symbol(max(bound.lower for bound in bounds), min(uppers, default=None))


def _clamp(value: int, bounds: Symbol) -> int:
    if bounds.upper is not None and value > bounds.upper:
        value = bounds.upper
    return max(value, bounds.lower)


def _places(graph: Graph) -> list[int]:
    """Return for each symbol the dimension of the first input that has it as its size; -1 for none."""
    places = [-1] * len(graph.symbols)
    for entry in graph.inputs:
        if isinstance(entry.meta, TensorMeta):
            for dim, size in enumerate(entry.meta.size):
                if not isinstance(size, int) and len(size.code) == 2 and places[size.code[1]] < 0:
                    places[size.code[1]] = dim
    return places


def _partitions(places: list[int], merged: int) -> list[list[int]]:
    """Return the ways to put the symbols in classes, `merged` fewer than symbols, likely ones first.

    Sizes of one dimension (the batch of two inputs) are more likely to be equal than others.
    """
    count = len(places)
    found: list[tuple[int, list[int]]] = []

    def extend(classes: list[int], used: int) -> None:
        if len(found) >= _MAX_TRIALS or len(classes) - used > merged:
            return
        if len(classes) == count:
            if count - used == merged:
                unlike = sum(
                    classes[i] == classes[j] and places[i] != places[j]
                    for i in range(count)
                    for j in range(i)
                )
                found.append((unlike, classes))
            return
        for choice in range(used + 1):
            extend([*classes, choice], max(used, choice + 1))

    extend([], 0)
    return [classes for _, classes in sorted(found)]


def _to_sympy(code: tuple[int, ...], symbols: Sequence[sympy.Symbol | int]) -> sympy.Expr | int:
    """Return the expression whose code this is. A loop over integers: no text is read."""
    stack: list[sympy.Expr] = []
    at = 0
    while at < len(code):
        op = code[at]
        at += 1
        if op in (INT, SYMBOL):
            stack.append(sympy.Integer(code[at]) if op == INT else sympy.sympify(symbols[code[at]]))
            at += 1
        elif op in (ADD, MUL, MAX, MIN):
            arity = code[at]
            operands = stack[-arity:]
            del stack[-arity:]
            stack.append({ADD: sympy.Add, MUL: sympy.Mul, MAX: Max, MIN: Min}[op](*operands))
            at += 1
        elif op == NEG:
            stack.append(-stack.pop())
        else:
            right, left = stack.pop(), stack.pop()
            make = {POW: sympy.Pow, FLOORDIV: FloorDiv, MOD: Mod, PYTHONMOD: PythonMod, CEILDIV: CeilDiv}[op]
            stack.append(make(left, right))
    return stack[0]
