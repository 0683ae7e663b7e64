"""Equal programs give equal bytes, others give others, and what cannot be sent is refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from fuse_cache.client.graph import SymbolSource, UnkeyableGraph, encode_graph
from fuse_cache.proto.expression import evaluate
from fuse_cache.proto.expression_text import to_text
from fuse_cache.proto.graph import Device, Level, OtherMeta, Role, Symbol, SymMeta, TensorMeta
from fuse_cache.proto.graph_codec import decode, encode, graph_digest
from tests.captured import encode_call
from tests.models import capture


def _digest(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    return encode_call(function, *args, **kwargs).encoded.digest


def _marked(*shape: int, dims: tuple[int, ...] = (0,)) -> Tensor:
    tensor = torch.randn(*shape)
    for dim in dims:
        torch._dynamo.mark_dynamic(tensor, dim)
    return tensor


def _scaled(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x * 2.5) + 1


def test_the_bytes_decode_to_the_graph_and_encode_again_to_the_bytes() -> None:
    encoded = encode_call(_scaled, torch.randn(3, 4)).encoded
    assert decode(encoded.data) == encoded.graph
    assert encode(decode(encoded.data)) == encoded.data
    assert graph_digest(encoded.data) == encoded.digest


def test_hints_values_and_names_do_not_reach_the_bytes() -> None:
    def renamed(some_other_name: Tensor) -> Tensor:
        inner = some_other_name * 2.5
        return torch.nn.functional.silu(inner) + 1

    assert _digest(_scaled, _marked(3, 4)) == _digest(renamed, _marked(7, 4))


def test_a_size_a_dtype_a_constant_and_an_op_change_the_bytes() -> None:
    digests = {
        _digest(_scaled, torch.randn(3, 4)),
        _digest(_scaled, torch.randn(3, 5)),
        _digest(_scaled, torch.randn(4, 3).t()),
        _digest(_scaled, torch.randn(3, 4, dtype=torch.float64)),
        _digest(_scaled, _marked(3, 4)),
        _digest(lambda x: torch.nn.functional.silu(x * 2.25) + 1, torch.randn(3, 4)),
        _digest(lambda x: torch.nn.functional.gelu(x * 2.5) + 1, torch.randn(3, 4)),
    }
    assert len(digests) == 7


class _Mlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256, bias=bias, dtype=torch.bfloat16)
        self.down = nn.Linear(256, 128, bias=bias, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return down


def test_models_of_equal_sizes_but_other_inputs_differ() -> None:
    # Case 3: a key of shapes and positions alone gave one model the other's code.
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    plain, biased = encode_call(_Mlp(False), x).encoded, encode_call(_Mlp(True), x).encoded
    assert plain.digest != biased.digest
    assert (len(plain.graph.inputs), len(biased.graph.inputs)) == (3, 5)
    assert _digest(lambda x: x + 1, x) != _digest(lambda x: x * 2, x)


def test_an_input_that_is_none_or_a_tensor_makes_two_graphs_and_module_names_make_none() -> None:
    # Case 50.
    def forward(x: Tensor, img: Tensor | None = None) -> Tensor:
        return x * 2 if img is None else x * 2 + img

    x, img = torch.randn(2, 4), torch.randn(2, 4)
    without, with_image = encode_call(forward, x).encoded, encode_call(forward, x, img=img).encoded
    assert without.digest != with_image.digest
    assert (len(without.graph.inputs), len(with_image.graph.inputs)) == (1, 2)

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Base()

        def forward(self, x: Tensor) -> Tensor:
            inner: Tensor = self.base(x)
            return inner

    assert _digest(Base(), x) == _digest(Wrapped(), x)


def test_one_shared_object_and_two_equal_ones_give_the_same_bytes() -> None:
    # Case 53: pickle writes a back-reference for the shared one.
    one, other = torch.device("cpu"), torch.device("cpu")

    def shared(x: Tensor) -> Tensor:
        return x + torch.ones(3, device=one) + torch.zeros(3, device=one)

    def equal(x: Tensor) -> Tensor:
        return x + torch.ones(3, device=one) + torch.zeros(3, device=other)

    x = torch.randn(3)
    before = _digest(shared, x)
    assert before == _digest(equal, x)
    for i in range(100):
        _digest(lambda x, i=i: x + i, x)
    assert before == _digest(shared, x)


def test_gradients_that_nobody_asks_for_do_not_change_the_bytes() -> None:
    asked, unasked = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    assert _digest(asked, torch.randn(2, 4)) == _digest(unasked, torch.randn(2, 4))


def test_a_device_written_in_any_way_is_its_type() -> None:
    def run(gm_device: Any) -> bytes:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.randn(2)
        made = graph.call_function(torch.ones, (2,), {"device": gm_device})
        moved = graph.call_method("to", (made, gm_device))
        graph.output((moved,))
        encoded = encode_graph(torch.fx.GraphModule({}, graph))
        assert encoded.graph.nodes[0].kwargs == (("device", Device("cuda")),)
        return encoded.data

    ways: tuple[Any, ...] = ("cuda", "cuda:0", "cuda:3", torch.device("cuda", 5))
    assert len({run(way) for way in ways}) == 1


def test_every_symbol_says_where_it_can_be_read() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(-1) * 2 + y.sum()

    encoded = encode_call(forward, _marked(6, 4), _marked(5, 5, dims=(1,))).encoded
    kinds = [type(entry.meta) for entry in encoded.graph.inputs]
    assert kinds == [SymMeta, TensorMeta, SymMeta, TensorMeta]
    assert encoded.symbol_sources == (
        (SymbolSource(0, None), SymbolSource(1, 0)),
        (SymbolSource(2, None), SymbolSource(3, 1)),
    )
    assert [encoded.input_names[1], encoded.input_names[3]] == ["x", "y"]
    assert len(encoded.symbols) == 2


def test_bounds_and_conditions_on_sizes_travel() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0] // 8, 8, 3)
        return rows + y.sum() if x.shape[0] < y.shape[0] * 3 else rows

    bounded = torch.randn(16, 3)
    torch._dynamo.mark_dynamic(bounded, 0, min=8, max=256)
    assert encode_call(_scaled, bounded).encoded.graph.symbols == (Symbol(8, 256),)

    graph = encode_call(forward, _marked(16, 3), _marked(7, 3)).encoded.graph
    assert "s0 < (3*s1)" in {to_text(guard) for guard in graph.guards}
    assert [guard.code for guard in graph.guards] == sorted(guard.code for guard in graph.guards)
    holds = [all(evaluate(guard, (rows, 40)) for guard in graph.guards) for rows in (8, 12, 64, 128)]
    assert holds == [True, False, True, False]


def _add_into(x: Tensor, y: Tensor) -> Tensor:
    x[:1].add_(1)
    return y * 2


def _add(x: Tensor, y: Tensor) -> Tensor:
    return x[:1] + 1 + y.sum()


@pytest.mark.parametrize(
    ("function", "shares", "varies", "keyable"),
    [
        (_add_into, True, True, False),
        (_add_into, True, False, True),
        (_add_into, False, True, True),
        (_add, True, True, True),
    ],
)
def test_a_write_to_shared_memory_of_varying_size_has_no_key(
    function: Any, shares: bool, varies: bool, keyable: bool
) -> None:
    memory = torch.randn(24, 2)
    x, y = memory[:6], memory[4:13]
    if not shares:
        y = y.clone()
    if varies:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(y, 0)
    if keyable:
        assert encode_call(function, x, y).encoded.data
    else:
        with pytest.raises(BackendCompilerFailed, match="share memory"):
            encode_call(function, x, y)


def test_roles_aliases_and_constants_are_told() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.b: Tensor
            self.register_buffer("b", torch.ones(4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * self.w + self.b + y

    base = torch.randn(8)
    graph = encode_call(Model(), base[:4], base[4:]).encoded.graph
    roles = {entry.role for entry in graph.inputs}
    assert roles == {Role.INPUT, Role.PARAMETER, Role.BUFFER}
    assert sorted(entry.alias_group for entry in graph.inputs) == [0, 0, 1, 1]

    holder = torch.fx.Graph()
    x = holder.placeholder("x")
    x.meta["example_value"] = torch.randn(3)
    constant = holder.get_attr("constant")
    constant.meta["example_value"] = torch.arange(3)
    holder.output((holder.call_function(operator.add, (x, constant)),))
    gm = torch.fx.GraphModule({"constant": torch.arange(3)}, holder)
    encoded = encode_graph(gm)
    assert [entry.role for entry in encoded.graph.inputs] == [Role.INPUT, Role.CONSTANT]
    assert torch.equal(encoded.constants[0], torch.arange(3))
    assert encoded.graph.nodes[0].meta == OtherMeta("unknown")  # nothing was traced here
    assert encoded.graph.level is Level.DYNAMO


def _with_cond(x: Tensor) -> Tensor:
    branched: Tensor = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
    return branched


def _hosts_own(x: Tensor) -> Tensor:
    return x


def _one_call(target: Any, *args: Any, value: object = None, **kwargs: Any) -> torch.fx.GraphModule:
    """Make the graph of one call of `target` on an input `value` and `args`."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.randn(3) if value is None else value
    call = graph.call_method(target, (x,)) if isinstance(target, str) else graph.call_function(target, (x,))
    graph.output((call,))
    gm = torch.fx.GraphModule({}, graph)
    call.args = (x, *args)  # After the code was generated: not all of these have a form in Python's text.
    call.kwargs = kwargs
    return gm


@pytest.mark.parametrize(
    ("target", "argument", "reason"),
    [
        (_hosts_own, 1, "_hosts_own, which is not in the closed table"),
        (torch.save, "file", "torch.serialization.save, which is not in the closed table"),
        (torch.cond, 1, "which is not in the closed table"),
        ("backward", None, "tensor method backward"),
        (torch.mul, 2j, "type builtins.complex"),
        (torch.mul, 2**70, "integer of 71 bits"),
        (torch.mul, {1: 2}, "keys that are no text"),
        (torch.mul, torch.Generator(), "Generator"),
        (torch.mul, torch.sparse_coo, "sparse_coo"),
        (torch.mul, torch.qint8, "qint8"),
        (torch.mul, [({1},)], "type builtins.set"),
        ("to", "hpu", "hpu"),
    ],
)
def test_a_call_that_cannot_be_sent_is_refused_by_name(target: Any, argument: object, reason: str) -> None:
    with pytest.raises(UnkeyableGraph, match=reason):
        encode_graph(_one_call(target, argument))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex64).conj(), "lazy conjugation"),
        (1.5, "an input of type builtins.float"),
        (object(), "an input of type builtins.object"),
    ],
)
def test_an_input_that_cannot_be_sent_is_refused_by_name(value: object, reason: str) -> None:
    with pytest.raises(UnkeyableGraph, match=reason):
        encode_graph(_one_call(torch.neg, value=value))


def _refusal(function: Callable[..., Any], *args: Any) -> str:
    reasons: list[str] = []

    def check(gm: Any, inputs: Any) -> None:
        with pytest.raises(UnkeyableGraph) as caught:
            encode_graph(gm, inputs)
        reasons.append(caught.value.reason)

    capture(function, *args, backend_check=check)
    return reasons[0]


def test_higher_order_operators_and_data_dependent_sizes_are_refused_by_name() -> None:
    assert "sub-graph" in _refusal(_with_cond, torch.randn(3))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        reason = _refusal(lambda x: torch.nonzero(x) + 1, torch.ones(3))
    assert "depends on data" in reason
    assert "nonzero" in reason


def test_a_float_that_varies_is_refused_with_what_to_do() -> None:
    with torch._dynamo.config.patch(specialize_float=False, assume_static_by_default=False):
        reason = _refusal(lambda x, scale: x * scale, torch.ones(3), 0.5)
    assert "pass it as a tensor" in reason
    assert "specialize_float" in reason


def test_an_operator_of_a_library_travels_with_its_schema_and_what_its_fake_computes() -> None:
    # Cases 6 and 21: the text of the graph is the same each time.
    def run(schema: str, fake: Callable[..., Any]) -> bytes:
        with torch.library._scoped_library("h2graph", "DEF") as library:
            library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
            library.impl("op", lambda x, out: None if "-> ()" in schema else x.clone(), "CPU")
            library.impl("op", fake, "Meta")

            def forward(x: Tensor) -> Tensor:
                out = torch.zeros_like(x)
                operator: Any = torch.ops.h2graph.op
                result: Tensor | None = operator(x, out)
                return out + 0 if result is None else result * 2

            graph = encode_call(forward, torch.ones(3)).encoded
            (sent,) = graph.graph.op_schemas
            assert sent.schema.startswith("h2graph::op(")
            assert "pt2_compliant_tag" in sent.tags
            return graph.digest

    silent = run("op(Tensor x, Tensor out) -> ()", lambda x, out: None)
    writes = run("op(Tensor x, Tensor(a!) out) -> ()", lambda x, out: None)
    returns = "op(Tensor x, Tensor out) -> Tensor"
    digests = {
        silent,
        writes,
        run(returns, lambda x, out: torch.empty_like(x)),
        run(returns, lambda x, out: torch.empty_like(x, dtype=torch.bfloat16)),
        run(returns, lambda x, out: x.new_empty(6)),
        run(returns, lambda x, out: x.new_empty_strided((3,), (2,))),
    }
    assert len(digests) == 6
