"""Inputs are compared with the input spec before a call, cheaply, and the first difference is named."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse_cache.client.checker import InputChecker, InputMismatchError, OutsideRangeError
from fuse_cache.proto.expression import Op, SymExpr, combine, symbol
from fuse_cache.proto.graph import Input, Role, Symbol, SymMeta, TensorMeta
from fuse_cache.proto.spec import ArtifactSpec

S0, S1 = symbol(0), symbol(1)


def tensor(
    *size: Any, stride: tuple[Any, ...] | None = None, dtype: str = "float32", role: Role = Role.INPUT
) -> Input:
    if stride is None:
        stride = tuple(
            combine(Op.MUL, [*size[i + 1 :], 1]) if i + 1 < len(size) else 1 for i in range(len(size))
        )
        if all(isinstance(dim, int) for dim in size[1:]):
            stride = tuple(_product(size[i + 1 :]) for i in range(len(size)))
    return Input(TensorMeta(dtype=dtype, device="cpu", size=size, stride=stride), role)


def _product(dims: tuple[int, ...]) -> int:
    result = 1
    for dim in dims:
        result *= dim
    return result


def spec(*inputs: Input, symbols: tuple[Symbol, ...] = (), guards: tuple[SymExpr, ...] = ()) -> ArtifactSpec:
    return ArtifactSpec(target="cpu-avx2", symbols=symbols, inputs=inputs, guards=guards, outputs=1)


DYNAMIC = spec(
    Input(SymMeta(S0)),
    tensor(S0, 4),
    tensor(4, 4, role=Role.PARAMETER),
    symbols=(Symbol(1, 8),),
)


def test_fitting_inputs_pass_for_every_size_of_the_range() -> None:
    check = InputChecker(DYNAMIC)
    weight = torch.zeros(4, 4)
    for size in (1, 8, 3, 1):
        check((size, torch.zeros(size, 4), weight))


@pytest.mark.parametrize("size", [0, 9, -1, 1 << 40])
def test_a_size_outside_the_range_is_an_error_of_its_own(size: int) -> None:
    with pytest.raises(OutsideRangeError, match="input 0 is"):
        InputChecker(DYNAMIC)((size, torch.zeros(1, 4), torch.zeros(4, 4)))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, torch.zeros(3, 5), "dimension 1 of input 1 is 5, not 4"),
        (1, torch.zeros(2, 4), "dimension 0 of input 1 is 2, not 3"),
        (1, torch.zeros(4, 3).t(), "the stride of dimension 0 of input 1 is 1, not 4"),
        (1, torch.zeros(3), "input 1 has 1 dimensions, not 2"),
        (1, torch.zeros(3, 4, dtype=torch.float64), "input 1 is of torch.float64, not torch.float32"),
        (1, torch.zeros(3, 4, device="meta"), "input 1 is on meta, not on cpu"),
        (1, 7, "input 1 is a int, not a tensor"),
        (1, None, "input 1 is a NoneType, not a tensor"),
        (0, torch.tensor(3), "input 0 is a Tensor, not an integer"),
        (0, 3.5, "input 0 is a float, not an integer"),
        (2, torch.zeros(4, 5), "dimension 1 of input 2 is 5, not 4"),
        (2, None, "input 2 is a NoneType, not a tensor"),
    ],
)
def test_the_first_difference_is_named(place: int, value: object, message: str) -> None:
    arguments: list[object] = [3, torch.zeros(3, 4), torch.zeros(4, 4)]
    check = InputChecker(DYNAMIC)
    check(arguments)
    arguments[place] = value
    with pytest.raises(InputMismatchError, match=message):
        check(arguments)


def test_a_wrong_count_is_an_error() -> None:
    with pytest.raises(InputMismatchError, match="2 inputs, the artifact takes 3"):
        InputChecker(DYNAMIC)((3, torch.zeros(3, 4)))


def test_a_subclass_that_answers_operators_itself_is_no_plain_tensor() -> None:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]  # torch declares it without its function
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise NotImplementedError

    wrapped = torch.zeros(3, 4).as_subclass(Wrapped)
    with pytest.raises(InputMismatchError, match="input 1 is a Wrapped, not a plain tensor"):
        InputChecker(DYNAMIC)((3, wrapped, torch.zeros(4, 4)))


def test_a_librarys_own_class_of_parameters_is_as_good_as_a_plain_one() -> None:
    class LibraryParameter(torch.nn.Parameter):
        pass

    weight = LibraryParameter(torch.zeros(4, 4))
    InputChecker(DYNAMIC)((3, torch.zeros(3, 4).as_subclass(LibraryParameter), weight))


def test_the_stride_of_a_dimension_of_size_one_does_not_matter() -> None:
    odd = torch.zeros(1, 9)[:, :4]
    assert odd.stride() == (9, 1)
    InputChecker(DYNAMIC)((1, odd, torch.zeros(4, 4)))


def test_a_guard_that_does_not_hold_is_an_error_of_its_own() -> None:
    even = combine(Op.EQ, [combine(Op.PYTHONMOD, [S0, 2]), 0])
    check = InputChecker(spec(Input(SymMeta(S0)), symbols=(Symbol(0, None),), guards=(even,)))
    check((4,))
    with pytest.raises(OutsideRangeError, match="s0=5"):
        check((5,))


def test_sizes_that_divide_by_zero_do_not_fit() -> None:
    multiple = combine(Op.EQ, [combine(Op.MOD, [S0, S1]), 0])
    sizes = (Input(SymMeta(S0)), Input(SymMeta(S1)))
    check = InputChecker(spec(*sizes, symbols=(Symbol(0, None), Symbol(0, None)), guards=(multiple,)))
    check((4, 2))
    with pytest.raises(OutsideRangeError, match="s1=0"):
        check((4, 0))


def test_a_symbol_without_an_integer_input_is_read_from_a_tensor() -> None:
    check = InputChecker(spec(tensor(S0, 4), tensor(S1, S0), symbols=(Symbol(1, 8), Symbol(1, 8))))
    check((torch.zeros(3, 4), torch.zeros(2, 3)))
    with pytest.raises(InputMismatchError, match="dimension 1 of input 1 is 5, not 3"):
        check((torch.zeros(3, 4), torch.zeros(2, 5)))
    with pytest.raises(OutsideRangeError, match="dimension 0 of input 0 is 9"):
        check((torch.zeros(9, 4), torch.zeros(2, 9)))


def test_an_integer_that_follows_from_the_symbols_is_compared_in_every_call() -> None:
    check = InputChecker(
        spec(Input(SymMeta(S0)), Input(SymMeta(combine(Op.MUL, [S0, 2]))), symbols=(Symbol(1, 8),))
    )
    check((3, 6))
    with pytest.raises(InputMismatchError, match="input 1 is 7, not 6"):
        check((3, 7))


def test_a_spec_whose_symbol_no_input_tells_is_refused() -> None:
    with pytest.raises(ValueError, match="symbol 0"):
        InputChecker(spec(tensor(4), symbols=(Symbol(1, 8),)))


def test_a_parameter_is_checked_again_when_it_is_another_object() -> None:
    check = InputChecker(DYNAMIC)
    x = torch.zeros(3, 4)
    check((3, x, torch.zeros(4, 4)))
    check((3, x, torch.zeros(4, 4)))
    with pytest.raises(InputMismatchError, match=r"input 2 is of torch\.float16"):
        check((3, x, torch.zeros(4, 4, dtype=torch.float16)))


def test_the_checker_does_not_keep_parameters_alive() -> None:
    check = InputChecker(DYNAMIC)
    weight = torch.zeros(4, 4)
    ended: list[bool] = []
    import weakref

    weakref.finalize(weight, ended.append, True)
    check((3, torch.zeros(3, 4), weight))
    del weight
    gc.collect()
    assert ended == [True]
    # Whatever now lives at its address is checked like any other.
    with pytest.raises(InputMismatchError, match="input 2"):
        check((3, torch.zeros(3, 4), torch.zeros(5, 5)))


def test_many_sizes_do_not_grow_the_checker_without_bound() -> None:
    check = InputChecker(spec(Input(SymMeta(S0)), symbols=(Symbol(0, None),)))
    for size in range(2000):
        check((size,))
    assert len(check._plans) <= 256


@pytest.mark.parametrize(
    "other", [torch.ones(8, 4), torch.ones(4, 4).t().as_strided((4, 4), (1, 4)), torch.ones(4, 4).double()]
)
def test_a_parameter_that_got_other_memory_is_traced_again_or_refused_before_an_artifact_sees_it(
    other: Tensor,
) -> None:
    # Known by identity, it is not checked again: sound only where Dynamo traces again, which 2.11 does not.
    graphs: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.extend((x.dtype, tuple(x.shape), x.stride()) for x in inputs if isinstance(x, nn.Parameter))
        return gm.forward

    layer = nn.Linear(4, 4, bias=False)
    check = InputChecker(spec(tensor(4, 4, role=Role.PARAMETER)))
    check((layer.weight,))
    compiled = torch.compile(lambda x: layer.weight * x, backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled(torch.ones(1))
        compiled(torch.ones(1))
        assert len(graphs) == 1
        layer.weight.data = other
        compiled(torch.ones(1))
    if graphs[1:]:
        assert graphs[1:] == [(other.dtype, tuple(other.shape), other.stride())]
    else:
        with pytest.raises(InputMismatchError):
            check((layer.weight,))
