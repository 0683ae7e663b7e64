"""Symbolic sizes as torch holds them, sympy expressions, in the form that is sent: the one translation.

The client translates sizes and guards of the graphs that it sends, the worker the guards of what it compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import sympy
from torch.utils._sympy import functions as torch_sympy

from fuse_cache.proto.expression import MAX_EXPONENT, Dim, ExpressionError, Op, combine, symbol

_INT64: Final = range(-(1 << 63), 1 << 63)
# sympy class -> operator. Whatever is not here is refused by name.
_OPERATORS: Final[Mapping[type[sympy.Basic], Op]] = {
    sympy.Add: Op.ADD,
    sympy.Mul: Op.MUL,
    sympy.Pow: Op.POW,
    torch_sympy.PowByNatural: Op.POW,
    torch_sympy.FloorDiv: Op.FLOORDIV,
    torch_sympy.CleanDiv: Op.FLOORDIV,
    torch_sympy.Mod: Op.MOD,
    torch_sympy.PythonMod: Op.PYTHONMOD,
    torch_sympy.CeilDiv: Op.CEILDIV,
    torch_sympy.Max: Op.MAX,
    torch_sympy.Min: Op.MIN,
    sympy.Max: Op.MAX,
    sympy.Min: Op.MIN,
    sympy.Equality: Op.EQ,
    sympy.Unequality: Op.NE,
    sympy.StrictLessThan: Op.LT,
    sympy.LessThan: Op.LE,
    sympy.And: Op.AND,
    sympy.Or: Op.OR,
    sympy.Not: Op.NOT,
}
# a > b is written b < a: sympy turns relations round by the names of the symbols.
_MIRRORED: Final[Mapping[type[sympy.Basic], Op]] = {
    sympy.StrictGreaterThan: Op.LT,
    sympy.GreaterThan: Op.LE,
}


class NoFormError(ValueError):
    """An expression cannot be sent; the message is a noun phrase that names the function or the number."""


class UnknownSymbolError(NoFormError):
    """An expression is about `symbol`, which has no number. Callers know what it stands for."""

    def __init__(self, symbol: sympy.Symbol) -> None:
        super().__init__(f"the symbol {symbol}, which is no size of an input")
        self.symbol = symbol


def expression_of(
    expr: sympy.Basic, numbers: Mapping[sympy.Symbol, int], known: dict[sympy.Basic, Dim] | None = None
) -> Dim:
    """Return `expr` as an integer or as code over the symbols that `numbers` gives their numbers.

    `known` keeps what was translated over the same `numbers`, parts included, for the next call.

    Raises:
        NoFormError: it has no form; UnknownSymbolError where it is about another symbol.
    """
    memo = {} if known is None else known
    found = memo.get(expr)
    if found is None:
        found = memo[expr] = _translate(expr, numbers, memo)
    return found


def _translate(expr: sympy.Basic, numbers: Mapping[sympy.Symbol, int], memo: dict[sympy.Basic, Dim]) -> Dim:
    if isinstance(expr, sympy.Integer):
        number = int(expr)
        if number not in _INT64:
            raise NoFormError(f"a size of {number.bit_length()} bits")
        return number
    if isinstance(expr, sympy.Symbol):
        if expr not in numbers:
            raise UnknownSymbolError(expr)
        return symbol(numbers[expr])
    if isinstance(expr, torch_sympy.Identity):
        return expression_of(expr.args[0], numbers, memo)
    mirrored = _MIRRORED.get(type(expr))
    op = mirrored or _OPERATORS.get(type(expr))
    operands = [expression_of(arg, numbers, memo) for arg in expr.args]
    if isinstance(expr, torch_sympy.ModularIndexing):
        operands = [combine(Op.FLOORDIV, operands[:2]), operands[2]]
        op = Op.MOD
    if op is None:
        raise NoFormError(f"a size with the function {type(expr).__name__}")
    if op is Op.POW and not (isinstance(operands[1], int) and 2 <= operands[1] <= MAX_EXPONENT):
        raise NoFormError(f"a size to the power of {expr.args[1]}")
    try:
        return combine(op, operands[::-1] if mirrored else operands)
    except ExpressionError as error:
        raise NoFormError(f"a size that has no form: {error}") from error
