"""torch's symbolic sizes as expressions: what the client's graphs and the worker's guards have in common."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import Identity, PowByNatural

from fuse_cache.kernels.sizes import NoFormError, UnknownSymbolError, expression_of
from fuse_cache.proto.expression import Dim, Op, SymExpr, check, combine, evaluate, symbol

S, T = sympy.symbols("s t", integer=True, positive=True)
NUMBERS = {S: 0, T: 1}


def test_a_relation_has_one_form_whichever_way_it_is_written() -> None:
    expected = combine(Op.LT, [symbol(1), symbol(0)])
    assert expression_of(sympy.StrictGreaterThan(S, T), NUMBERS) == expected
    assert expression_of(sympy.StrictLessThan(T, S), NUMBERS) == expected
    assert expression_of(sympy.GreaterThan(S, T), NUMBERS) == combine(Op.LE, [symbol(1), symbol(0)])


def test_the_names_of_the_symbols_do_not_matter() -> None:
    swapped = expression_of((S * 2 + T * 3) * T, {S: 1, T: 0})
    assert swapped == expression_of((T * 2 + S * 3) * S, NUMBERS)


@pytest.mark.parametrize("power", [S**3, PowByNatural(S, sympy.Integer(3), evaluate=False)])
def test_powers_are_of_small_whole_exponents(power: sympy.Basic) -> None:
    code = expression_of(power, NUMBERS)
    assert isinstance(code, SymExpr)
    check(code, 2)
    assert evaluate(code, (5, 1)) == 125


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (S**17, "power of 17"),
        (1 / S, "power of -1"),
        (S**T, "power of t"),
        (sympy.sin(S), "function sin"),
        (sympy.Integer(2) ** 64, "65 bits"),
    ],
)
def test_what_has_no_form_is_refused_by_name(expr: sympy.Basic, message: str) -> None:
    with pytest.raises(NoFormError, match=message):
        expression_of(expr, NUMBERS)


def test_a_symbol_without_a_number_is_handed_to_the_caller() -> None:
    unknown = sympy.Symbol("u0", integer=True)
    with pytest.raises(UnknownSymbolError) as caught:
        expression_of(S + unknown, NUMBERS)
    assert caught.value.symbol is unknown


def test_parts_are_kept_for_the_next_expression() -> None:
    known: dict[sympy.Basic, Dim] = {}
    product = S * T
    whole = expression_of(Identity(product + 1), NUMBERS, known)
    assert known[product] == combine(Op.MUL, [symbol(0), symbol(1)])
    assert known[product + 1] is whole
