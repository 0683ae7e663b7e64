from __future__ import annotations

import importlib

import pytest

from fuse_cache.proto import targets


@pytest.fixture(scope="module")
def torch_modules() -> dict[str, object]:
    return {target.module: importlib.import_module(target.module) for target in targets.TARGETS.values()}


def test_every_function_of_the_table_exists_in_this_torch(torch_modules: dict[str, object]) -> None:
    missing = [
        name
        for name, target in targets.TARGETS.items()
        if not callable(getattr(torch_modules[target.module], target.attribute, None))
    ]
    # A name may come or go with a torch version; more than these few would be a mistake in the table.
    assert len(missing) <= 20, missing


def test_no_function_has_two_names(torch_modules: dict[str, object]) -> None:
    names: dict[int, list[str]] = {}
    for name, target in targets.TARGETS.items():
        function = getattr(torch_modules[target.module], target.attribute, None)
        if function is not None:
            names.setdefault(id(function), []).append(name)
    assert [found for found in names.values() if len(found) > 1] == []


def test_every_method_of_the_table_exists_in_this_torch() -> None:
    import torch

    missing = [name for name in targets.METHODS if not callable(getattr(torch.Tensor, name, None))]
    assert len(missing) <= 10, missing


def test_names_are_made_of_module_and_attribute() -> None:
    for name, target in targets.TARGETS.items():
        assert name == f"{target.module}.{target.attribute}"
        assert target.attribute.isidentifier()


@pytest.mark.parametrize(
    "name",
    [
        "torch.load",
        "torch.save",
        "torch.compile",
        "torch.from_file",
        "torch.frombuffer",
        "torch.hub",
        "torch.set_num_threads",
        "torch.manual_seed",
        "torch.set_default_device",
        "torch.jit",
        "torch.use_deterministic_algorithms",
        "torch.set_rng_state",
        "builtins.eval",
        "builtins.exec",
        "builtins.open",
        "builtins.setattr",
        "builtins.delattr",
        "builtins.__import__",
        "builtins.compile",
        "builtins.print",
        "operator.methodcaller",
        "operator.attrgetter",
        "operator.itemgetter",
        "operator.call",
    ],
)
def test_what_touches_more_than_tensors_is_not_in_the_table(name: str) -> None:
    assert name not in targets.TARGETS


@pytest.mark.parametrize(
    "name",
    [
        "numpy",
        "tolist",
        "data_ptr",
        "storage",
        "untyped_storage",
        "set_",
        "share_memory_",
        "backward",
        "register_hook",
        "apply_",
        "map_",
        "module_load",
        "__reduce__",
        "__reduce_ex__",
        "__class__",
        "__init__",
        "__setstate__",
        "as_subclass",
        "record_stream",
        "pin_memory",
    ],
)
def test_methods_that_leave_the_graph_are_not_in_the_table(name: str) -> None:
    assert name not in targets.METHODS


def test_no_method_begins_with_an_underscore() -> None:
    assert [name for name in targets.METHODS if name.startswith("_")] == []


@pytest.mark.parametrize(
    "name",
    [
        "operator.mul",
        "operator.add",
        "operator.getitem",
        "operator.neg",
        "operator.and_",
        "operator.le",
        "operator.truediv",
        "operator.itruediv",
        "operator.floordiv",
        "operator.sub",
        "operator.gt",
        "operator.setitem",
        "torch._C._nn.linear",
        "torch._C._nn.scaled_dot_product_attention",
        "torch._C._nn.gelu",
        "torch._C._nn.pad",
        "torch.rsqrt",
        "torch.arange",
        "torch.cat",
        "torch.matmul",
        "torch.tanh",
        "torch.topk",
        "torch.sort",
        "torch.histc",
        "torch.cumsum",
        "torch.where",
        "torch.zeros",
        "torch.empty_like",
        "torch.nn.functional.silu",
        "torch.nn.functional.embedding",
        "torch.nn.functional.softmax",
        "torch.nn.functional.dropout",
        "torch.nn.functional.rms_norm",
        "torch._scaled_mm",
        "torch.sym_max",
        "torch._C._set_grad_enabled",
        "torch.amp.autocast_mode._enter_autocast",
    ],
)
def test_what_real_models_call_is_in_the_table(name: str) -> None:
    assert name in targets.TARGETS


def test_in_place_methods_are_in_the_table() -> None:
    assert {"add_", "index_copy_", "copy_", "masked_fill_", "zero_"} <= targets.METHODS


@pytest.mark.parametrize(
    ("name", "is_torch", "is_custom"),
    [
        ("aten::add.Tensor", True, False),
        ("prims::iota.default", True, False),
        ("_c10d_functional::all_reduce.default", True, False),
        ("acme::swish.default", False, True),
        ("aten::from_file.default", False, False),
        ("aten::add", False, False),
        ("aten.add.Tensor", False, False),
        ("aten::add.Tensor\n", False, False),
        ("aten::add.Tensor ", False, False),
        ("aten::ädd.Tensor", False, False),
        ("a" * 65 + "::b.default", False, False),
        ("::.", False, False),
    ],
)
def test_names_of_operators(name: str, is_torch: bool, is_custom: bool) -> None:
    assert targets.is_torch_op(name) is is_torch
    assert targets.is_custom_op(name) is is_custom


def test_the_dtypes_are_those_of_torch() -> None:
    import torch

    assert [name for name in targets.DTYPES if not isinstance(getattr(torch, name, None), torch.dtype)] == []
