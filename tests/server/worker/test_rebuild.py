"""A graph that went over the wire runs as the original did for all sizes of its range, and adds no guards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fuse_cache.kernels.fx_targets import name_of
from fuse_cache.proto.expression import (
    CEILDIV,
    EQ,
    FLOORDIV,
    LE,
    MAX,
    MIN,
    MOD,
    MUL,
    NEG,
    PYTHONMOD,
    Dim,
    combine,
    evaluate,
    symbol,
)
from fuse_cache.proto.graph import Graph, Input, Level, Role, Symbol, SymMeta, TensorMeta
from fuse_cache.proto.graph_codec import decode
from fuse_cache.proto.request import Range
from fuse_cache.server.worker.metas import meta_difference
from fuse_cache.server.worker.protocol import BuildFailed
from fuse_cache.server.worker.rebuild import OpMissing, Rebuilt, SchemaMismatch, rebuild
from fuse_cache.server.worker.sizes import choose_hints, fresh_sizes
from tests.captured import EncodedCapture, copied, encode_call, encoded_model
from tests.models import DTYPES, KINDS, MODELS, Kind, whole_way_cells


def _rebuilt(made: EncodedCapture, compile_range: Range | None = None) -> Rebuilt:
    return rebuild(decode(made.encoded.data), compile_range or Range())


def _differences(rebuilt: Rebuilt, graph: Graph) -> list[str]:
    """Return in what the fake values of the rebuilt graph differ from those the client sent."""
    calls = [node for node in rebuilt.gm.graph.nodes if node.op in ("call_function", "call_method")]
    return [
        f"{sent.target}: {difference}"
        for node, sent in zip(calls, graph.nodes, strict=True)
        if "example_value" in node.meta
        and (difference := meta_difference(node.meta["example_value"], sent.meta, rebuilt.hints))
    ]


def _assert_runs_as(rebuilt: Rebuilt, made: EncodedCapture, arguments: Sequence[Any] | None = None) -> None:
    """Run both on copies of the same arguments; results and what was written into arguments are equal."""
    arguments = tuple(made.captured.arguments if arguments is None else arguments)
    theirs = copied((*arguments, *made.encoded.constants))
    mine = copied(arguments)
    with torch.no_grad():
        got, want = rebuilt.gm(*theirs), made.captured.gm(*mine)
    assert len(got) == len(want)
    for left, right in zip((*got, *theirs), (*want, *mine, *made.encoded.constants), strict=True):
        if isinstance(right, Tensor):
            assert torch.equal(left, right)
        else:
            assert left == right


def _marked(*shape: int, dims: tuple[int, ...] = (0,)) -> Tensor:
    tensor = torch.randn(*shape)
    for dim in dims:
        torch._dynamo.mark_dynamic(tensor, dim)
    return tensor


# One cell of the cross for each model here, so that all of its rows and columns are met. The slow ones are
# those that tests/e2e/test_models.py does not take the whole way.
QUICK = [(name, DTYPES[i % 2], KINDS[i % 3]) for i, name in enumerate(MODELS)]
REST = [
    (name, dtype, kind)
    for name in MODELS
    for dtype in DTYPES
    for kind in KINDS
    if (name, dtype, kind) not in (*QUICK, *whole_way_cells())
]


def _check_model(name: str, dtype: torch.dtype, kind: Kind) -> None:
    made = encoded_model(name, dtype, kind)
    graph = made.encoded.graph
    assert decode(made.encoded.data) == graph
    compile_range = Range()
    if kind == "dynamic":
        place = made.encoded.input_names.index("input_ids")
        number = next(
            number
            for number, sources in enumerate(made.encoded.symbol_sources)
            if any(source.input == place and source.dim == 1 for source in sources)
        )
        compile_range = Range(symbol=number, lower=2, upper=64)
    rebuilt = _rebuilt(made, compile_range)
    assert _differences(rebuilt, graph) == []
    _assert_runs_as(rebuilt, made)


@pytest.mark.parametrize(("name", "dtype", "kind"), QUICK)
def test_a_model_is_rebuilt_with_the_same_values_and_results(
    name: str, dtype: torch.dtype, kind: Kind
) -> None:
    _check_model(name, dtype, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "kind"), REST)
def test_every_cell_that_goes_no_further_is_rebuilt(name: str, dtype: torch.dtype, kind: Kind) -> None:
    _check_model(name, dtype, kind)


def _rows(x: Tensor, w: Tensor) -> Tensor:
    rows: Tensor = torch.nn.functional.silu(x @ w)[:, None, ::2, ...]
    return rows.reshape(x.shape[0] * rows.shape[2], -1) * x.shape[0]


def test_one_rebuilt_graph_serves_size_one_and_both_ends_of_its_range() -> None:
    made = encode_call(_rows, _marked(5, 8), torch.randn(8, 8))
    rebuilt = _rebuilt(made, Range(symbol=0, lower=1, upper=64))
    assert rebuilt.bounds == (Symbol(1, 64),)
    assert rebuilt.shape_env.guards == []
    for tokens in (1, 2, 64):
        x, w = torch.randn(tokens, 8), torch.randn(8, 8)
        arguments = [
            tokens if isinstance(entry.meta, SymMeta) else x if entry.meta.size[0] != 8 else w
            for entry in made.encoded.graph.inputs
        ]
        _assert_runs_as(rebuilt, made, arguments)


def test_an_explicit_bound_makes_32_bit_indices_a_fact_and_no_guard() -> None:
    made = encode_call(_rows, _marked(5, 8), torch.randn(8, 8))
    rebuilt = _rebuilt(made, Range(symbol=0, lower=1, upper=4096))
    tensor = next(value for value in rebuilt.example_inputs if isinstance(value, Tensor) and value.ndim == 2)
    assert tensor.numel() * 1024 <= 2**31 - 1
    assert rebuilt.shape_env.guards == []


def test_a_range_of_one_size_is_static() -> None:
    made = encode_call(_rows, _marked(5, 8), torch.randn(8, 8))
    rebuilt = _rebuilt(made, Range(symbol=0, lower=7, upper=7))
    assert rebuilt.symbols == (7,)
    assert all(not isinstance(value, torch.SymInt) for value in rebuilt.example_inputs)
    assert all(
        type(size) is int
        for node in rebuilt.gm.graph.nodes
        if isinstance(value := node.meta.get("example_value"), Tensor)
        for size in value.shape
    )


def test_a_range_outside_what_the_graph_was_taken_for_is_refused() -> None:
    x = torch.randn(16, 8)
    torch._dynamo.mark_dynamic(x, 0, min=8, max=32)
    made = encode_call(_rows, x, torch.randn(8, 8))
    assert _rebuilt(made, Range(symbol=0, lower=1, upper=16)).bounds == (Symbol(8, 16),)
    with pytest.raises(BuildFailed, match=r"no size of 33 \.\. 64"):
        _rebuilt(made, Range(symbol=0, lower=33, upper=64))
    with pytest.raises(BuildFailed, match="the graph has 1"):
        _rebuilt(made, Range(symbol=3, lower=1, upper=64))


def _every_argument(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    y = torch.zeros(4, 6, dtype=torch.float64, device="cpu").to(x.dtype)
    y[1:3, ..., None] = x[:2, :6, None]
    y.index_copy_(0, index, x[:2] * float("-inf")).clamp_(min=-1.5)
    values, places = torch.topk(x, 2, dim=-1, sorted=True)
    left, right = x.chunk(2, dim=1)
    z = torch.einsum("ij,kj->ik", left, right).contiguous(memory_format=torch.contiguous_format)
    grown = torch.nn.functional.pad(z, (1, 0, 0, 2), value=float("nan"))
    picked = x[index, :, None].expand(-1, -1, 3)
    return y, values, places, grown.nan_to_num(nan=7.0), picked.transpose(0, 1).flatten(1), x.new_ones(2)


def test_every_kind_of_argument_survives() -> None:
    made = encode_call(_every_argument, torch.randn(4, 6), torch.tensor([0, 3]))
    rebuilt = _rebuilt(made)
    assert _differences(rebuilt, made.encoded.graph) == []
    _assert_runs_as(rebuilt, made)


def test_autocast_and_grad_mode_regions_survive_and_leave_no_trace() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
        with torch.enable_grad():
            return y.float() + x @ w

    made = encode_call(forward, torch.randn(4, 4), torch.randn(4, 4))
    assert {node.target for node in made.encoded.graph.nodes} >= {
        "torch.amp.autocast_mode._enter_autocast",
        "torch._C._set_grad_enabled",
    }
    rebuilt = _rebuilt(made)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    _assert_runs_as(rebuilt, made)


def test_inputs_that_share_storage_share_it_again() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    base = torch.zeros(10)
    made = encode_call(forward, base[2:8], base[4:10])
    rebuilt = _rebuilt(made)
    first, second = rebuilt.example_inputs
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert (first.storage_offset(), second.storage_offset()) == (2, 4)
    fresh = torch.zeros(10)
    with torch.no_grad():
        (result,) = rebuilt.gm(fresh[2:8], fresh[4:10])
    assert result.tolist() == [2, 2, 2, 2, 0, 0]


def test_parameters_are_parameters_and_constants_come_last() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    made = encode_call(Model(), torch.randn(2, 4))
    rebuilt = _rebuilt(made)
    roles = [entry.role for entry in made.encoded.graph.inputs]
    parameters = [isinstance(value, nn.Parameter) for value in rebuilt.example_inputs]
    assert parameters == [role is Role.PARAMETER for role in roles]


def test_an_operator_that_differs_here_is_named() -> None:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.h2rebuild.op.default(x) * 2
        return result

    def registered(schema: str, fake: Callable[..., Any]) -> Any:
        library = torch.library._scoped_library("h2rebuild", "DEF")
        opened = library.__enter__()
        opened.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        opened.impl("op", lambda x: x.clone(), "CPU")
        opened.impl("op", fake, "Meta")
        return library

    library = registered("op(Tensor x) -> Tensor", lambda x: torch.empty_like(x))
    try:
        made = encode_call(forward, torch.ones(3))
        assert _differences(_rebuilt(made), made.encoded.graph) == []
    finally:
        library.__exit__(None, None, None)
    with pytest.raises(OpMissing, match=r"h2rebuild::op\.default"):
        _rebuilt(made)
    library = registered("op(Tensor x) -> Tensor", lambda x: torch.empty_like(x, dtype=torch.bfloat16))
    try:
        with pytest.raises(SchemaMismatch, match=r"dtype torch\.bfloat16, sent torch\.float32"):
            _rebuilt(made)
    finally:
        library.__exit__(None, None, None)
    library = registered("op(Tensor(a!) x) -> Tensor", lambda x: torch.empty_like(x))
    try:
        with pytest.raises(SchemaMismatch, match=r"the worker h2rebuild::op\(Tensor\(a!\) x\)"):
            _rebuilt(made)
    finally:
        library.__exit__(None, None, None)


def test_a_call_that_torch_refuses_is_named() -> None:
    made = encode_call(lambda x, w: x @ w, torch.randn(2, 3), torch.randn(3, 4))
    graph = made.encoded.graph
    wrong = TensorMeta("float32", "cpu", (5, 4), (4, 1))
    broken = Graph(
        level=Level.DYNAMO,
        symbols=(),
        inputs=(graph.inputs[0], Input(wrong)),
        nodes=graph.nodes,
        outputs=graph.outputs,
    )
    with pytest.raises(BuildFailed, match=r"operator\.matmul refuses its arguments"):
        rebuild(broken, Range())


def test_an_output_that_the_host_saw_otherwise_is_named() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):  # what a worker without the host's state would not know
        made = encode_call(lambda x, w: x @ w, torch.randn(2, 3), torch.randn(3, 4))
        assert _rebuilt(made).gm is not None
    with pytest.raises(BuildFailed, match=r"operator\.matmul .* dtype torch\.float32, sent torch\.bfloat16"):
        _rebuilt(made)


def _with_guards(count: int, *guards: Any) -> Graph:
    return Graph(
        level=Level.DYNAMO, symbols=(Symbol(0, None),) * count,
        inputs=tuple(Input(SymMeta(symbol(number))) for number in range(count)),
        nodes=(), outputs=(), guards=guards,
    )  # fmt: skip


def test_example_sizes_differ_unless_a_guard_ties_them() -> None:
    free = _with_guards(3)
    assert len(set(choose_hints(free, free.symbols))) == 3
    tied = _with_guards(3, combine(EQ, [symbol(0), symbol(2)]))
    hints = choose_hints(tied, tied.symbols)
    assert hints[0] == hints[2] != hints[1]
    hints = choose_hints(tied, (Symbol(2, 4), Symbol(0, None), Symbol(0, 3)))
    assert hints[0] == hints[2] == 3 != hints[1]
    for later, earlier in ((1, 0), (2, 1)):  # A condition against the order of the symbols is as legal.
        ordered = _with_guards(3, combine(LE, [symbol(later), symbol(earlier)]))
        hints = choose_hints(ordered, ordered.symbols)
        assert hints[later] < hints[earlier]
    far = _with_guards(2, combine(LE, [combine(MUL, [symbol(1), 16]), symbol(0)]))
    hints = choose_hints(far, (Symbol(2, 4096), Symbol(2, 4096)))
    assert 16 * hints[1] <= hints[0]
    multiple = _with_guards(1, combine(EQ, [combine(MOD, [symbol(0), 48]), 0]))
    with pytest.raises(BuildFailed, match=r"s0 % 48"):
        choose_hints(multiple, (Symbol(1, 47),))


_EXPRESSIONS = st.recursive(
    st.one_of(st.integers(1, 9), st.integers(0, 1).map(symbol)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from([MUL, MAX, MIN, 2]), st.lists(inner, min_size=2, max_size=3)),
        st.tuples(st.sampled_from([FLOORDIV, CEILDIV, PYTHONMOD]), st.tuples(inner, st.integers(1, 9))),
        st.tuples(st.just(MOD), st.tuples(st.integers(0, 1).map(symbol), st.integers(1, 9))),
        st.tuples(st.just(NEG), inner.map(lambda one: [one])),
    ).map(lambda made: combine(made[0], list(made[1]))),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(_EXPRESSIONS)
def test_a_size_has_the_value_of_its_expression(expression: Dim) -> None:
    sizes = fresh_sizes(_with_guards(2), Range())
    if isinstance(expression, int):
        return
    size = sizes.size(expression)
    values = {made: sympy.Integer(hint) for made, hint in zip(sizes.symbols, sizes.hints, strict=True)}
    value = size if isinstance(size, int) else size.node.expr.xreplace(values)
    assert value == evaluate(expression, sizes.hints)


def test_a_size_without_a_value_and_a_tensor_that_cannot_be_are_named() -> None:
    sizes = fresh_sizes(_with_guards(2), Range())
    for expression in (combine(FLOORDIV, [symbol(0), 0]), combine(MOD, [-1, 3])):
        with pytest.raises(BuildFailed, match="has no value") as caught:
            sizes.size(expression)
        assert caught.value.reason == "GRAPH_MALFORMED"
    negative = combine(NEG, [symbol(0)])
    graph = Graph(
        level=Level.DYNAMO,
        symbols=(Symbol(1, None),),
        inputs=(Input(TensorMeta("float32", "cpu", (negative,), (1,))),),
        nodes=(),
        outputs=(),
    )
    with pytest.raises(BuildFailed, match="input 0 cannot be made"):
        rebuild(graph, Range())


def test_targets_of_the_rebuilt_graph_have_their_names() -> None:
    made = encode_call(_rows, torch.randn(5, 8), torch.randn(8, 8))
    calls = [node for node in _rebuilt(made).gm.graph.nodes if node.op == "call_function"]
    sent = [node.target for node in made.encoded.graph.nodes if node.kind == 1]
    assert [name_of(node.target) for node in calls] == sent
