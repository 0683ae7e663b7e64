from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_cache.proto import expression
from fuse_cache.proto.expression import (
    ADD,
    AND,
    CEILDIV,
    EQ,
    FLOORDIV,
    GE,
    INT,
    LT,
    MAX,
    MIN,
    MOD,
    MUL,
    NEG,
    NOT,
    OR,
    POW,
    SYMBOL,
    ExpressionError,
    Op,
    SymExpr,
    check,
    combine,
    evaluate,
    symbol,
    symbols_of,
)
from fuse_cache.proto.expression_text import to_text
from tests.proto.graphs import expressions

S0, S1 = symbol(0), symbol(1)


def test_constants_and_the_enum_agree() -> None:
    assert {op.name: getattr(expression, op.name) for op in Op} == {op.name: op.value for op in Op}


@pytest.mark.parametrize(
    ("op", "operands", "value"),
    [
        (ADD, [S0, S1, 1], 11),
        (MUL, [S0, S1], 21),
        (POW, [S0, 2], 49),
        (FLOORDIV, [S0, 2], 3),
        (FLOORDIV, [combine(NEG, [S0]), 2], -4),
        (MOD, [combine(NEG, [S0]), 3], 2),
        (CEILDIV, [S0, 2], 4),
        (MAX, [S0, S1, 5], 7),
        (MIN, [S0, S1, 5], 3),
        (EQ, [S0, 7], 1),
        (LT, [S0, S1], 0),
        (GE, [S0, 7], 1),
        (NOT, [combine(EQ, [S0, 7])], 0),
        (AND, [combine(EQ, [S0, 7]), combine(EQ, [S1, 3])], 1),
        (OR, [combine(EQ, [S0, 1]), combine(EQ, [S1, 1])], 0),
    ],
)
def test_values(op: int, operands: list[expression.Dim], value: int) -> None:
    expr = combine(op, operands)
    check(expr, 2, boolean=op >= EQ)
    assert evaluate(expr, [7, 3]) == value


def test_an_integer_is_its_own_value() -> None:
    assert evaluate(5, []) == 5


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.randoms())
def test_the_order_of_the_operands_does_not_matter(numbers: list[int], random: object) -> None:
    parts = [combine(MUL, [symbol(number), 3]) for number in numbers]
    shuffled = list(parts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    assert combine(ADD, parts) == combine(ADD, shuffled)


@given(expressions(3))
def test_what_combine_builds_is_well_formed(expr: SymExpr) -> None:
    assert check(expr, 3) == symbols_of(expr)


@given(st.lists(st.integers(-2, 22), max_size=12))
@settings(max_examples=300)
def test_any_numbers_are_checked_or_refused_and_what_passes_has_a_value(code: list[int]) -> None:
    expr = SymExpr(tuple(code))
    for boolean in (False, True):
        try:
            check(expr, 3, boolean=boolean)
        except ExpressionError:
            continue
        try:
            value = evaluate(expr, [1, 2, 3])
        except ExpressionError:
            continue
        assert isinstance(value, int)
        assert to_text(expr)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ((), "0 values"),
        ((INT,), "operand missing"),
        ((SYMBOL, 3), "symbol 3 of 3"),
        ((SYMBOL, -1), "symbol -1 of 3"),
        ((INT, 1 << 63), "64 bits"),
        ((99,), "unknown operator"),
        ((-1,), "unknown operator"),
        ((SYMBOL, 0, SYMBOL, 1), "2 values"),
        ((SYMBOL, 0, ADD, 2), "needs 2 values, 1"),
        ((SYMBOL, 0, ADD, 1), "arity 1"),
        ((SYMBOL, 0, INT, 1, ADD, 2), "order"),
        ((SYMBOL, 0, SYMBOL, 1, POW), "exponent"),
        ((SYMBOL, 0, INT, 17, POW), "exponent"),
        ((SYMBOL, 0, INT, 2, NEG, POW), "exponent"),
        ((INT, 1, SYMBOL, 0, EQ), "truth value"),
        ((SYMBOL, 0, NOT), "mixes"),
        ((INT, 1, SYMBOL, 0, EQ, SYMBOL, 0, MUL, 2), "mixes"),
        ((INT, 0) * 600, "limit"),
    ],
)
def test_malformed_code_is_refused_by_name(code: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason):
        check(SymExpr(code), 3)


def test_a_guard_must_be_a_truth_value() -> None:
    check(combine(GE, [S0, 1]), 1, boolean=True)
    with pytest.raises(ExpressionError, match="number where a truth value"):
        check(S0, 1, boolean=True)


def test_powers_of_powers_stop_instead_of_filling_the_memory() -> None:
    tower = S0
    for _ in range(100):
        tower = combine(POW, [tower, 16])
    check(tower, 1)
    with pytest.raises(ExpressionError, match="256 bits"):
        evaluate(tower, [3])


def test_a_division_by_zero_is_named() -> None:
    with pytest.raises(ExpressionError, match="division by zero"):
        evaluate(combine(MOD, [S0, S1]), [1, 0])


def test_code_as_long_as_allowed_is_not_deep_for_python() -> None:
    nested = S0
    while len(nested.code) < 1000:
        nested = combine(NEG, [nested])
    check(nested, 1)
    assert abs(evaluate(nested, [4])) == 4
    assert len(to_text(nested)) > 900


def test_texts_are_readable() -> None:
    expr = combine(ADD, [combine(MUL, [S0, 2]), combine(FLOORDIV, [S1, 4])])
    assert to_text(expr) == "(2*s0) + (s1//4)"
    assert to_text(combine(NOT, [combine(EQ, [S0, 2])])) == "not (2 == s0)"
    assert to_text(7) == "7"


def test_combine_refuses_a_wrong_number_of_operands() -> None:
    for op, operands in ((ADD, [S0]), (NEG, [S0, S1]), (INT, [1]), (MOD, [S0])):
        with pytest.raises(ExpressionError):
            combine(op, operands)


def test_hashes_and_equality_go_by_the_code() -> None:
    assert hash(SymExpr((SYMBOL, 0))) == hash(symbol(0))
    assert SymExpr((SYMBOL, 0)) == symbol(0) != symbol(1)


def test_the_module_loads_without_torch() -> None:
    code = (
        "import sys, fuse_cache.proto.graph_codec, fuse_cache.proto.trust, fuse_cache.proto.toolchain; "
        + ("sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'triton', 'sympy')))")
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
