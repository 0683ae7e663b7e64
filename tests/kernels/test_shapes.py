"""Every operator's meta function: symbolic tokens, no size burnt in, the layout of the real result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tests.kernels.cases import PRODUCER_CASES, QUANTISER_CASES, Case, fused_case

Arguments = tuple[Any, ...]


def _fake(mode: FakeTensorMode, value: object, tokens: int) -> object:
    """Return a fake of a tensor, its first dimension symbolic where it counts tokens."""
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_contiguous():  # A slice of a wider tensor: the strides of a fake slice are no symbols.
        whole = value.as_strided((tokens, value.stride(0)), (value.stride(0), 1), 0)
        start = value.storage_offset()
        fake = _fake(mode, whole, tokens)
        assert isinstance(fake, torch.Tensor)
        return fake[:, start : start + value.shape[1]]
    dims = [DimDynamic.STATIC] * value.dim()
    if value.dim() > 1 and value.shape[0] == tokens:
        dims[0] = DimDynamic.DUCK  # Equal counts are one symbol.
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    return mode.from_tensor(value, source=ConstantSource(f"t{id(value)}"), symbolic_context=context)


def _check(operator: Callable[..., Any], arguments: Arguments, tokens: int) -> None:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    faked = [_fake(mode, argument, tokens) for argument in arguments]
    with mode:
        shaped = operator(*faked)
    real = operator(*arguments)
    shaped, real = ((r,) if isinstance(r, torch.Tensor) else r for r in (shaped, real))
    known = {symbol: environment.backed_var_to_val[symbol] for symbol in environment.backed_var_to_val}
    for one, other in zip(shaped, real, strict=True):
        size = [int(_value(s, known)) for s in one.shape]
        stride = [int(_value(s, known)) for s in one.stride()]
        assert (one.dtype, size, stride) == (other.dtype, list(other.shape), list(other.stride()))
    # What guards there are hold for any number of tokens: no size is burnt in.
    for guard in environment.guards:
        for count in (2, 3, 100, 128, 4096, 8191):
            assert guard.expr.xreplace(dict.fromkeys(known, sympy.Integer(count))) == sympy.true, guard.expr


def _value(size: Any, known: dict[Any, Any]) -> int:
    return int(size.node.expr.xreplace(known)) if isinstance(size, torch.SymInt) else int(size)


@pytest.mark.parametrize("case", [*PRODUCER_CASES, *QUANTISER_CASES], ids=lambda case: case.name)
def test_an_operator_on_symbolic_tokens_has_the_layout_of_the_real_result(case: Case) -> None:
    _check(case.operator, case.arguments(37, case.width(96)), 37)


@pytest.mark.parametrize("index", range(len(QUANTISER_CASES)))
def test_a_fused_operator_on_symbolic_tokens_has_the_layout_of_the_real_result(index: int) -> None:
    # Every quantiser, with every producer in turn: a fused operator is its two halves in sequence.
    producer = PRODUCER_CASES[index % len(PRODUCER_CASES)]
    case = fused_case(producer, QUANTISER_CASES[index], keep=index % 2 == 0)
    _check(case.operator, case.arguments(37, case.width(96)), 37)
