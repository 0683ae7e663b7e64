"""The graphs that `warm` traces without weights are those that hosts trace with them: to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuse_cache.client.asking import ask, encode
from fuse_cache.client.backend import compile_graph
from fuse_cache.client.errors import OptionError
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.warm.manifest import InputPlan, ModelPlan
from fuse_cache.client.warm.tracing import Traced, example_sizes, trace
from fuse_cache.client.warm.weightless import ModelError
from fuse_cache.proto.request import Range
from tests.client.warm import its_models
from tests.models import example_inputs, transformers

TARGET = "cpu-avx2"
IDS = InputPlan(name="input_ids", shape=("batch", "length"), dtype="int64")
MASK = InputPlan(name="attention_mask", shape=("batch", "length"), dtype="int64")
NO_CACHE = InputPlan(name="use_cache", value=False)


def plan(factory: str, *inputs: InputPlan, dtype: str | None = None) -> ModelPlan:
    return ModelPlan(
        name="m", factory=f"{its_models.__name__}:{factory}", hf_config=None, dtype=dtype, inputs=inputs,
        targets=(), options={},
    )  # fmt: skip


def fixed(item: InputPlan, *shape: int) -> InputPlan:
    return InputPlan(name=item.name, shape=shape, dtype=item.dtype)


def asked_by_a_host(model: nn.Module, options: CompileOptions, *calls: dict[str, Any]) -> list[bytes]:
    """Return the request digests of a host with real weights, in order."""
    found: list[bytes] = []

    class Noted:
        def __init__(self, gm: Any, inputs: Any, options: CompileOptions, _: Any, **known: Any) -> None:
            self._gm, self._inputs, self._options = gm, inputs, options
            known.pop("may_compile_here", None)
            self._known = known

        def run(self) -> Callable[..., Any]:
            encoded = encode(self._gm, self._inputs, self._options)
            asked = ask(encoded, self._inputs, self._options, (TARGET,), **self._known)
            found.extend(want.request_digest for want in asked.wants)
            forward: Callable[..., Any] = self._gm.forward
            return forward

        def run_locally(self, reason: str) -> Callable[..., Any]:
            raise AssertionError(reason)

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend=lambda gm, inputs: compile_graph(gm, inputs, options, Noted))
        for arguments in calls:
            compiled(**arguments)
    return found


def digests(traced: Traced) -> list[bytes]:
    assert not traced.refused
    return [want.request_digest for want in traced.wants]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "static"), ("llama", "dynamic"), ("gemma3", "static"), ("mixtral", "dynamic")],
)
def test_a_model_without_weights_asks_for_what_one_with_weights_does(name: str, kind: Any) -> None:
    options = CompileOptions.from_mapping({"mode": "remote"})
    inputs = (IDS, MASK) if kind == "dynamic" else (fixed(IDS, 2, 8), fixed(MASK, 2, 8))
    traced = trace(plan(name, *inputs, NO_CACHE), options, [TARGET], "cpu")
    model = getattr(its_models, name)()
    assert digests(traced) == asked_by_a_host(model, options, example_inputs(model, kind))


def test_a_configuration_of_hugging_face_means_the_model_that_its_library_makes_of_it(tmp_path: Path) -> None:
    config: Any = its_models.llama().config
    config.architectures = ["LlamaForCausalLM"]
    config.to_json_file(tmp_path / "config.json")
    options = CompileOptions.from_mapping({"mode": "remote"})
    described = ModelPlan(
        name="m", factory=None, hf_config=tmp_path / "config.json", dtype="bfloat16",
        inputs=(fixed(IDS, 2, 8), fixed(MASK, 2, 8), NO_CACHE), targets=(), options={},
    )  # fmt: skip
    traced = trace(described, options, [TARGET], "cpu")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert digests(traced) == asked_by_a_host(model, options, example_inputs(model, "static"))


def test_shared_and_converted_weights_ranges_and_plain_values_make_the_same_request() -> None:
    options = CompileOptions.from_mapping(
        {"mode": "remote", "compile_ranges": [[1, 16], [17, 64]], "level": "O1"}
    )
    ids = InputPlan(name="ids", shape=("tokens",), dtype="int64")
    scale = InputPlan(name="scale", value=0.5)
    traced = trace(plan("tied", ids, scale, dtype="bfloat16"), options, [TARGET], "cpu")
    model = its_models.tied().to(torch.bfloat16)
    real = torch.arange(6)
    torch._dynamo.mark_dynamic(real, 0)
    assert digests(traced) == asked_by_a_host(model, options, {"ids": real, "scale": 0.5})
    assert [want.fields.range for want in traced.wants] == [
        Range(symbol=0, lower=1, upper=16), Range(symbol=0, lower=17, upper=64)
    ]  # fmt: skip


def test_every_graph_of_a_broken_function_and_every_piece_of_a_cut_one_is_asked_for() -> None:
    x = InputPlan(name="x", shape=(4, 16), dtype="float32")
    for options in (
        CompileOptions.from_mapping({"mode": "remote"}),
        CompileOptions.from_mapping({"mode": "remote", "splitting_ops": ["aten::relu"]}),
    ):
        traced = trace(plan("broken", x), options, [TARGET], "cpu")
        host = asked_by_a_host(its_models.broken(), options, {"x": torch.randn(4, 16)})
        # Twice the same linear layer and ReLU: one artifact serves both.
        assert digests(traced) == list(dict.fromkeys(host))
        assert len(host) == 2


def test_sizes_that_vary_do_so_after_a_graph_break_too() -> None:
    options = CompileOptions.from_mapping({"mode": "remote", "compile_ranges": [[1, 4], [5, 8]]})
    x = InputPlan(name="x", shape=("tokens", 16), dtype="float32")
    traced = trace(plan("broken", x), options, [TARGET], "cpu")
    calls = [{"x": torch.randn(size, 16)} for size in (6, 7)]
    torch._dynamo.mark_dynamic(calls[0]["x"], 0)
    host = asked_by_a_host(its_models.broken(), options, *calls)
    # At its first call a host takes 6 tokens for a constant after the break, which no other host has.
    assert len(host) == 5
    assert host[:2] == host[3:]
    assert digests(traced) == host[:2], "the graph after the break is that before it"
    assert all(want.fields.range.symbol == 0 for want in traced.wants)


def test_a_program_that_tells_its_ranges_apart_is_traced_in_each_of_them() -> None:
    options = CompileOptions.from_mapping({"mode": "remote", "compile_ranges": [[1, 16], [17, 64]]})
    x = InputPlan(name="x", shape=("tokens", 16), dtype="float32")
    traced = trace(plan("window", x), options, [TARGET], "cpu")
    model = its_models.window()
    for sizes in ((8, 40), (40, 8)):
        calls = [{"x": torch.randn(size, 16)} for size in sizes]
        for call in calls:
            torch._dynamo.mark_dynamic(call["x"], 0)
        host = asked_by_a_host(model, options, *calls)
        assert len(set(host)) == 2
        assert set(host) <= set(digests(traced))
    by_range = {want.fields.range.upper: want.fields.graph_digest for want in traced.wants}
    assert set(by_range) == {16, 64}
    assert by_range[16] != by_range[64], "it is another program there"


def test_example_sizes_lie_in_their_ranges_and_are_no_other_name() -> None:
    inputs = [IDS, MASK]
    options = CompileOptions.from_mapping(
        {"compile_ranges": [[1, 1], [2, 72], [100, 4096]], "range_dim": "attention_mask:1"}
    )
    sizes = example_sizes(inputs, ["batch", "length"], options)
    assert sizes == [{"batch": 37, "length": 2}, {"batch": 37, "length": 38}, {"batch": 37, "length": 2098}]
    assert example_sizes(inputs, ["batch", "length"], CompileOptions()) == [{"batch": 37, "length": 41}]


def test_each_target_is_asked_for_with_the_facts_of_its_gpu() -> None:
    x = InputPlan(name="x", shape=(4, 16), dtype="float32")
    options = CompileOptions.from_mapping({"mode": "remote"})
    traced = trace(plan("broken", x), options, ["cpu-avx2", "cpu-avx512"], "cpu")
    assert [want.fields.target for want in traced.wants] == ["cpu-avx2", "cpu-avx512"]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("chooses", r"aten.nonzero.default needs the values of a tensor, and tracing has none"),
        ("fails", "its_models:fails raised ZeroDivisionError: no layers to share the width"),
        ("no_module", "its_models:no_module returned a int, no torch.nn.Module"),
        ("nothing_here", "its_models has no function nothing_here"),
    ],
)
def test_a_model_that_cannot_be_traced_is_told_with_the_reason(factory: str, message: str) -> None:
    x = InputPlan(name="x", shape=(4, 16), dtype="float32")
    with pytest.raises(ModelError, match=message):
        trace(plan(factory, x), CompileOptions(), [TARGET], "cpu")


def test_an_argument_that_the_model_does_not_take_is_told() -> None:
    with pytest.raises(ModelError, match="unexpected keyword argument 'y'"):
        trace(
            plan("broken", InputPlan(name="y", shape=(4, 16), dtype="float32")),
            CompileOptions(),
            [TARGET],
            "cpu",
        )


def test_a_range_dim_that_names_nothing_is_the_users_error() -> None:
    options = CompileOptions.from_mapping({"range_dim": "z:0"})
    ids = InputPlan(name="ids", shape=("tokens",), dtype="int64")
    with pytest.raises(OptionError, match=r"range_dim=z:0 names no symbolic size of the graph: use .*ids:0"):
        trace(plan("tied", ids), options, [TARGET], "cpu")


def test_modules_convert_as_ever_afterwards() -> None:
    before = nn.Module._apply
    ids = InputPlan(name="ids", shape=(3,), dtype="int64")
    trace(plan("tied", ids, dtype="float16"), CompileOptions(), [TARGET], "cpu")
    assert nn.Module._apply is before
    weight = its_models.tied().half().state_dict()["head.weight"]
    assert isinstance(weight, Tensor)
    assert weight.dtype is torch.float16
