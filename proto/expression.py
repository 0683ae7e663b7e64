"""Symbolic sizes as flat postfix code over numbered symbols.

`s0 * 2 + 1` is `SymExpr((INT, 1, INT, 2, SYMBOL, 0, MUL, 2, ADD, 2))`: INT and SYMBOL are followed by their
operand, ADD, MUL, MAX, MIN, AND and OR by their arity, the others take a fixed number of values from the
stack. Nothing here parses text, and nothing evaluates code: `evaluate` is a loop over integers. The operands
of the commutative operators, EQ and NE included, are in the order of their code, so that equal expressions
have equal codes whatever names the symbols had; `combine` sees to that.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias


class Op(enum.IntEnum):
    """Operators. Values are part of the format; new ones are added at the end."""

    INT = 0  # operand: the integer
    SYMBOL = 1  # operand: the symbol's number
    ADD = 2  # operand: arity
    MUL = 3  # operand: arity
    POW = 4  # base, exponent; the exponent is an INT in 2 .. MAX_EXPONENT
    FLOORDIV = 5
    MOD = 6  # of operands that are known not to be negative
    PYTHONMOD = 7
    CEILDIV = 8
    MAX = 9  # operand: arity
    MIN = 10  # operand: arity
    NEG = 11
    EQ = 12
    NE = 13
    LT = 14
    LE = 15
    GT = 16
    GE = 17
    AND = 18  # operand: arity
    OR = 19  # operand: arity
    NOT = 20


# Plain integers: members of an IntEnum are several times slower to compare and hash.
INT, SYMBOL, ADD, MUL, POW, FLOORDIV, MOD, PYTHONMOD, CEILDIV, MAX, MIN, NEG = range(12)
EQ, NE, LT, LE, GT, GE, AND, OR, NOT = range(12, 21)

LEAVES: Final = frozenset({INT, SYMBOL})
VARIADIC: Final = frozenset({ADD, MUL, MAX, MIN, AND, OR})
UNARY: Final = frozenset({NEG, NOT})
_COMMUTATIVE_PAIR: Final = frozenset({EQ, NE})
_BOOLEAN: Final = frozenset({EQ, NE, LT, LE, GT, GE, AND, OR, NOT})
_COMPARISONS: Final = {
    EQ: operator.eq, NE: operator.ne, LT: operator.lt, LE: operator.le, GT: operator.gt, GE: operator.ge
}  # fmt: skip
_FOLDS: Final[dict[int, Callable[[list[int]], int]]] = {ADD: sum, MAX: max, MIN: min, AND: all, OR: any}
_LOGICAL: Final = frozenset({AND, OR, NOT})

MAX_CODE: Final = 1024  # integers in one expression; the longest stride seen in 11 models has 27
MAX_EXPONENT: Final = 16
_MAX_VALUE: Final = 1 << 256  # four 64-bit sizes multiplied; `evaluate` stops there: POW of POW would not


class ExpressionError(ValueError):
    """The code is not a well-formed expression, or has no value here."""


@dataclass(frozen=True, slots=True)
class SymExpr:
    """An expression. `code` is postfix, see the module's docstring."""

    code: tuple[int, ...]
    _hash: int = field(init=False, repr=False, compare=False)  # sizes are hashed once per tensor: kept

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.code))

    def __hash__(self) -> int:
        return self._hash


Dim: TypeAlias = int | SymExpr


def _code(operand: Dim) -> tuple[int, ...]:
    return operand.code if isinstance(operand, SymExpr) else (INT, int(operand))


def symbol(number: int) -> SymExpr:
    """Return the expression that is the symbol with this number."""
    return SymExpr((SYMBOL, number))


def combine(op: int, operands: Iterable[Dim]) -> SymExpr:
    """Apply `op` to `operands`, in the canonical order where the order does not matter.

    Raises:
        ExpressionError: the number of operands does not fit the operator.
    """
    codes = [_code(operand) for operand in operands]
    if op in VARIADIC:
        if len(codes) < 2:
            raise ExpressionError(f"{Op(op).name} needs at least 2 operands, not {len(codes)}")
        codes.sort()
        tail: tuple[int, ...] = (int(op), len(codes))
    else:
        wanted = 1 if op in UNARY else 2
        if op in (INT, SYMBOL) or len(codes) != wanted:
            raise ExpressionError(f"{Op(op).name} does not take {len(codes)} operands")
        if op in _COMMUTATIVE_PAIR:
            codes.sort()
        tail = (int(op),)
    return SymExpr(tuple(part for code in codes for part in code) + tail)


def symbols_of(expr: SymExpr) -> list[int]:
    """Return the numbers of the symbols in the order of their places in the code, with repetitions."""
    code = expr.code
    found = []
    at = 0
    while at < len(code):
        op = code[at]
        if op == SYMBOL:
            found.append(code[at + 1])
        at += 2 if op <= SYMBOL or op in VARIADIC else 1
    return found


def check(expr: SymExpr, num_symbols: int, *, boolean: bool = False) -> list[int]:
    """Make sure that `expr` is well-formed and canonical, and return its symbols as `symbols_of` does.

    With `boolean` the value must be a truth value (a guard), without it an integer (a size).

    Raises:
        ExpressionError: it is not; the message says where.
    """
    code = expr.code
    length = len(code)
    if length > MAX_CODE:
        raise ExpressionError(f"expression of {length} integers; the limit is {MAX_CODE}")
    starts: list[int] = []  # where the code of each value on the stack begins
    truths: list[bool] = []
    symbols: list[int] = []
    at = 0
    while at < length:
        op = code[at]
        if op in LEAVES or op in VARIADIC:
            if at + 1 >= length:
                raise ExpressionError(f"operand missing at {at}")
            operand = code[at + 1]
            if op in LEAVES:
                if op == SYMBOL:
                    if not 0 <= operand < num_symbols:
                        raise ExpressionError(f"symbol {operand} of {num_symbols} at {at}")
                    symbols.append(operand)
                elif not -(1 << 63) <= operand < 1 << 63:
                    raise ExpressionError(f"integer outside 64 bits at {at}")
                starts.append(at)
                truths.append(False)
                at += 2
                continue
            arity = operand
            if arity < 2:
                raise ExpressionError(f"arity {arity} at {at}")
        elif op in UNARY:
            arity = 1
        elif POW <= op <= GE:
            arity = 2
        else:
            raise ExpressionError(f"unknown operator {op} at {at}")
        if arity > len(starts):
            raise ExpressionError(f"{Op(op).name} at {at} needs {arity} values, {len(starts)} are there")
        first = len(starts) - arity
        if any(truth != (op in _LOGICAL) for truth in truths[first:]):
            raise ExpressionError(f"{Op(op).name} at {at} mixes numbers and truth values")
        if op in VARIADIC or op in _COMMUTATIVE_PAIR:
            bounds = [*starts[first:], at]
            parts = [code[bounds[i] : bounds[i + 1]] for i in range(arity)]
            if any(parts[i] > parts[i + 1] for i in range(arity - 1)):
                raise ExpressionError(f"operands of {Op(op).name} at {at} are not in canonical order")
        elif op == POW and (
            at - starts[-1] != 2 or code[at - 2] != INT or not 2 <= code[at - 1] <= MAX_EXPONENT
        ):
            raise ExpressionError(f"exponent at {at} is not an integer in 2 .. {MAX_EXPONENT}")
        del starts[first + 1 :], truths[first:]
        truths.append(op in _BOOLEAN)
        at += 2 if op in VARIADIC else 1
    if len(starts) != 1:
        raise ExpressionError(f"{len(starts)} values instead of one")
    if truths[0] != boolean:
        raise ExpressionError(
            "a truth value where a number belongs" if truths[0] else "a number where a truth value belongs"
        )
    return symbols


def evaluate(expr: Dim, values: Sequence[int]) -> int:
    """Return the value of `expr` where symbol i is `values[i]`. Truth values are 0, 1; division is Python's.

    The expression must be well-formed (`check`).

    Raises:
        ExpressionError: a division by zero, or a value beyond 256 bits.
    """
    if not isinstance(expr, SymExpr):
        return expr
    code = expr.code
    if len(code) == 2:
        return values[code[1]] if code[0] == SYMBOL else code[1]
    try:
        return _run(code, values)
    except ZeroDivisionError as error:
        raise ExpressionError(f"a division by zero in {code}") from error


def _run(code: tuple[int, ...], values: Sequence[int]) -> int:
    stack: list[int] = []
    push = stack.append
    at = 0
    length = len(code)
    while at < length:
        op = code[at]
        if op == SYMBOL:
            push(values[code[at + 1]])
            at += 2
            continue
        if op == INT:
            push(code[at + 1])
            at += 2
            continue
        if op in VARIADIC:
            arity = code[at + 1]
            operands = stack[-arity:]
            del stack[-arity:]
            push(_fold(op, operands))
            at += 2
            continue
        right = stack.pop()
        if op == NEG:
            push(-right)
        elif op == NOT:
            push(int(not right))
        else:
            push(_apply(op, stack.pop(), right))
        at += 1
    return stack[0]


def _fold(op: int, operands: list[int]) -> int:
    if op != MUL:
        return int(_FOLDS[op](operands))
    product = 1
    for operand in operands:
        product = _bounded(product * operand)
    return product


def _apply(op: int, left: int, right: int) -> int:
    if op == FLOORDIV:
        return left // right
    if op in (MOD, PYTHONMOD):
        return left % right
    if op == CEILDIV:
        return -(-left // right)
    if op == POW:
        return _bounded(left**right)
    return int(_COMPARISONS[op](left, right))


def _bounded(value: int) -> int:
    if -_MAX_VALUE < value < _MAX_VALUE:
        return value
    raise ExpressionError("a value of more than 256 bits")
