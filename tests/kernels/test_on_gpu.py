"""Kernels on the GPU that is here: fused against unfused, row against row, in an artifact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from fuse_cache.kernels.launch import implementations
from fuse_cache.kernels.obstacles import obstacle
from tests.kernels.cases import BF16, FP16, PRODUCER_CASES, QUANTISER_CASES, Case, fused_case
from tests.kernels.truth import assert_same_bits, bits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.slow,
]


def _several(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _arguments(case: Case, tokens: int, hidden: int, dtype: torch.dtype = BF16) -> tuple[Any, ...]:
    arguments = case.arguments(tokens, hidden, dtype)
    return tuple(a.cuda() if isinstance(a, Tensor) else a for a in arguments)


def _target() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@pytest.mark.parametrize("quantiser", QUANTISER_CASES, ids=lambda case: case.name)
def test_fused_equals_unfused_bit_by_bit(quantiser: Case) -> None:
    for index, producer in enumerate(PRODUCER_CASES):
        hidden = quantiser.width((64, 96, 2880, 4096, 8192)[index % 5])
        tokens, dtype = (1, 63, 1000)[index % 3], (BF16, FP16)[index % 2]
        case = fused_case(producer, quantiser, True)
        arguments = _arguments(case, tokens, hidden, dtype)
        assert obstacle(case.operator, arguments, _target()) is None
        fused = _several(case.operator(*arguments))
        value, *others = _several(producer.operator(*_arguments(producer, tokens, hidden, dtype)))
        codes = quantiser.operator(value, *_arguments(quantiser, tokens, hidden, dtype)[1:])
        for one, other in zip(fused, (*_several(codes), value, *others), strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("quantiser", QUANTISER_CASES, ids=lambda case: case.name)
def test_a_quantisation_equals_its_reference_bit_by_bit(quantiser: Case) -> None:
    hidden = quantiser.width(2880)
    x, *rest = quantiser.arguments(67, hidden)
    nan = 1.0 if quantiser.tells_nan_sign else float("nan")
    x[1], x[2, 3], x[3, 5], x[4, 7], x[5] = 0.0, nan, float("inf"), float("-inf"), x[5] * 1e-30
    expected = _several(quantiser.operator(x, *rest))
    found = _several(quantiser.operator(x.cuda(), *(a.cuda() if isinstance(a, Tensor) else a for a in rest)))
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one.cpu().contiguous(), other.contiguous())  # cpu() drops the padding of strides.


@pytest.mark.parametrize("index", range(len(PRODUCER_CASES)))
def test_a_row_is_the_same_among_16384_and_alone(index: int) -> None:
    case = fused_case(PRODUCER_CASES[index], QUANTISER_CASES[4], False)
    arguments = _arguments(case, 16384, 4096)
    together = _several(case.operator(*arguments))
    for row in (0, 9999, 16383):
        alone = (a[row : row + 1] if isinstance(a, Tensor) and a.dim() > 1 else a for a in arguments)
        for one, other in zip(together, _several(case.operator(*alone)), strict=True):
            assert torch.equal(bits(one)[row], bits(other)[0])


@pytest.mark.parametrize("index", [0, 4, 10, 13, 16, 18])
def test_inductor_takes_the_kernel_into_its_wrapper(index: int) -> None:
    case = fused_case(PRODUCER_CASES[index % len(PRODUCER_CASES)], QUANTISER_CASES[index], True)
    implementation = implementations(_target())[case.operator]
    hidden = case.width(96)

    given = [isinstance(a, Tensor) for a in case.tensors(4, hidden, BF16)]

    def run(*operands: Any) -> Any:
        remaining = iter(operands)
        tensors = (next(remaining) if one else None for one in given)
        return implementation(*tensors, *case.attributes(BF16))

    def operands(tokens: int) -> list[Any]:
        return [a for a in _arguments(case, tokens, hidden) if isinstance(a, Tensor)]

    functional = dispatch_functionalize(run, FunctionalTensorMode())
    with torch.no_grad():
        graph = make_fx(functional, select_decomp_table(), tracing_mode="symbolic")(*operands(37))
        names = [str(node.target) for node in graph.graph.nodes]
        assert names.count("triton_kernel_wrapper_functional") == 1
        compiled = torch._inductor.compile(graph, operands(37))
        for one, other in zip(
            _several(compiled(*operands(37))),
            _several(case.operator(*_arguments(case, 37, hidden))),
            strict=True,
        ):
            assert_same_bits(one, other)
