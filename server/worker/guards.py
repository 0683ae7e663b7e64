"""What the compiler assumed of the symbolic sizes, as expressions that a host checks. Nothing is evaluated
as text, here or there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions as torch_sympy

from fuse_cache.proto import expression
from fuse_cache.proto.expression import Dim, ExpressionError, Op, SymExpr
from fuse_cache.proto.expression_text import to_text
from fuse_cache.proto.graph import Symbol
from fuse_cache.server.worker.errors import NotCacheable

# Values of this many other symbols are tried together: 4^6 combinations of 3 us.
_MAX_OTHERS = 6

_VARIADIC: Mapping[type[sympy.Basic], Op] = {
    sympy.Add: Op.ADD,
    sympy.Mul: Op.MUL,
    sympy.And: Op.AND,
    sympy.Or: Op.OR,
    sympy.Max: Op.MAX,
    sympy.Min: Op.MIN,
    torch_sympy.Max: Op.MAX,
    torch_sympy.Min: Op.MIN,
}
_FIXED: Mapping[type[sympy.Basic], Op] = {
    sympy.Eq: Op.EQ,
    sympy.Ne: Op.NE,
    sympy.Lt: Op.LT,
    sympy.Le: Op.LE,
    sympy.Gt: Op.GT,
    sympy.Ge: Op.GE,
    sympy.Not: Op.NOT,
    torch_sympy.FloorDiv: Op.FLOORDIV,
    torch_sympy.CleanDiv: Op.FLOORDIV,
    torch_sympy.CeilDiv: Op.CEILDIV,
    torch_sympy.Mod: Op.MOD,
    torch_sympy.PythonMod: Op.PYTHONMOD,
}


def artifact_guards(shape_env: ShapeEnv, numbers: Mapping[sympy.Symbol, int]) -> tuple[SymExpr, ...]:
    """Return the guards that the compiler left in `shape_env`, sorted, each once. `numbers` gives each
    symbol its number.

    Raises:
        NotCacheable: a guard is about something that is no size of an input, or uses a function that has no
        encoding.
    """
    found = {encode_guard(guard.expr, numbers) for guard in shape_env.guards if guard.expr is not sympy.true}
    return tuple(
        sorted((guard for guard in found if isinstance(guard, SymExpr)), key=lambda guard: guard.code)
    )


def encode_guard(expr: sympy.Basic, numbers: Mapping[sympy.Symbol, int]) -> Dim:
    """Encode one expression over symbols.

    Raises:
        NotCacheable: it has no encoding; the message names the function.
    """
    if isinstance(expr, sympy.Symbol):
        if expr not in numbers:
            raise NotCacheable(f"the compiled code depends on {expr}, which is no size of an input")
        return expression.symbol(numbers[expr])
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Pow) and isinstance(expr.exp, sympy.Integer) and int(expr.exp) > 1:
        return expression.combine(Op.POW, [encode_guard(expr.base, numbers), int(expr.exp)])
    if isinstance(expr, torch_sympy.ModularIndexing):
        base, divisor, modulus = (encode_guard(part, numbers) for part in expr.args)
        return expression.combine(Op.MOD, [expression.combine(Op.FLOORDIV, [base, divisor]), modulus])
    op = _VARIADIC.get(type(expr)) or _FIXED.get(type(expr))
    if op is None:
        raise NotCacheable(f"the compiled code is guarded by {type(expr).__name__}, which has no encoding")
    return expression.combine(op, [encode_guard(part, numbers) for part in expr.args])


def check_covers_range(
    guards: Sequence[SymExpr], bounds: Sequence[Symbol], hints: Sequence[int], ranged: int | None
) -> None:
    """Make sure that the guards hold at both ends of the compile range: of symbol `ranged`, within `bounds`.

    A compiler that burnt in a size would otherwise give an artifact that refuses nearly every call of its
    range. The other symbols may take any of a few values that fit: `hints`, their own ends, or that same
    end where a guard ties them together.

    Raises:
        NotCacheable: they do not; the message shows the guard and the size.
    """
    if ranged is None:
        return
    others = sorted({number for guard in guards for number in expression.symbols_of(guard)} - {ranged})
    for end in sorted({bounds[ranged].lower, bounds[ranged].upper or bounds[ranged].lower}):
        choices = [_choices(bounds[number], hints[number], end) for number in others[:_MAX_OTHERS]]
        for chosen in itertools.product(*choices):
            values = list(hints)
            values[ranged] = end
            for number, value in zip(others, chosen, strict=False):
                values[number] = value
            broken = next((guard for guard in guards if not _holds(guard, values)), None)
            if broken is None:
                break
            assumed = to_text(broken)
        else:
            raise NotCacheable(
                f"the compiled code does not cover size {end} of its range: it assumes {assumed}"
            )


def _holds(guard: SymExpr, values: Sequence[int]) -> bool:
    try:
        return bool(expression.evaluate(guard, values))
    except ExpressionError:
        return False  # a division by zero: these sizes do not fit


def _choices(bounds: Symbol, hint: int, end: int) -> list[int]:
    upper = bounds.upper if bounds.upper is not None else max(hint, end)
    found = (hint, bounds.lower, upper, min(max(end, bounds.lower), upper))
    return list(dict.fromkeys(found))
