"""The closed table finds what it lists, knows one name for each callable, and finds nothing else."""

from __future__ import annotations

import operator
import re

import pytest
import torch

from fuse_cache.kernels.fx_targets import (
    DTYPE_NAMES,
    DTYPES,
    UnknownTarget,
    name_of,
    overload_of,
    qualified_name,
    resolve,
)
from fuse_cache.proto import targets

# The table is torch 2.13's: what came after 2.11 is refused there by name.
NEWER_THAN_2_11 = {
    "torch.nn.functional.linear_cross_entropy",
    "torch.distributed._functional_collectives.all_gather_single_autograd",
}


def test_every_name_of_the_table_is_a_callable_whose_name_resolves_to_it() -> None:
    missing = NEWER_THAN_2_11 if torch.__version__ < "2.12" else set()
    for name in targets.TARGETS:
        if name in missing:
            with pytest.raises(UnknownTarget, match=f"torch {re.escape(torch.__version__)} has no {name}"):
                resolve(name)
            continue
        function = resolve(name)
        known = name_of(function)
        assert known is not None
        assert resolve(known) is function


def test_every_method_of_the_table_is_a_tensors() -> None:
    assert [name for name in sorted(targets.METHODS) if not callable(getattr(torch.Tensor, name, None))] == []


def test_functions_with_two_names_have_one() -> None:
    assert name_of(torch.nn.functional.linear) == "torch._C._nn.linear"
    assert name_of(operator.mul) == "operator.mul"
    assert name_of(torch.ops.aten.add.Tensor) == "aten::add.Tensor"
    assert name_of(torch.ops.aten.mm.default) == "aten::mm.default"
    assert name_of(torch.save) is None
    assert name_of(print) is None


@pytest.mark.parametrize(
    "name",
    [
        "torch.save",
        "torch.load",
        "os.system",
        "builtins.eval",
        "torch._C._nn.linear.__class__",
        "aten::from_file.default",
        "aten::nothing.default",
        "aten::add.__class__",
        "nolib::op.default",
        "add",
        "",
    ],
)
def test_nothing_else_is_found(name: str) -> None:
    with pytest.raises(UnknownTarget):
        resolve(name)


def test_a_packet_gives_the_overload_that_the_arguments_take() -> None:
    x = torch.ones(2)
    assert overload_of(torch.ops.aten.mul, (x, x), {}) is torch.ops.aten.mul.Tensor
    assert overload_of(torch.ops.aten.mul, (x, 2), {}) is torch.ops.aten.mul.Tensor
    assert overload_of(torch.ops.aten.sum, (x, [0]), {}) is torch.ops.aten.sum.dim_IntList


def test_dtypes_go_both_ways() -> None:
    assert DTYPES["bfloat16"] is torch.bfloat16
    assert {DTYPE_NAMES[value] for value in DTYPES.values()} == set(DTYPES)
    assert qualified_name(torch.cond).endswith("cond")
