"""The backend without a daemon's help: every way to a right answer, and what the report says of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import fuse_cache.client
from fuse_cache.client import reports
from fuse_cache.client.backend import _options, compile_graph
from fuse_cache.client.backend import fuse_cache as backend
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.reports import GraphReport, report
from fuse_cache.client.settings import load_options
from fuse_cache.client.warn import warn_once

# torch's own, the first time a process compiles.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

NOBODY = "127.0.0.1:1"
FIELDS = {
    *("key", "source", "reason", "seconds", "lookup_seconds", "compile_range"),
    *("target", "fusions", "near_misses", "used", "nodes", "cudagraph_mode"),
}


@pytest.fixture(autouse=True)
def fresh_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget what other tests compiled."""
    torch._dynamo.reset()
    reports.clear()
    yield
    torch._dynamo.reset()


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    values = {"endpoint": NOBODY, **options}
    return torch.compile(function, backend="fuse_cache", fullgraph=True, options=values)


def _gelu_sum(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x).sum(-1)


def _sized(size: int, *, dynamic: bool = False) -> Tensor:
    x = torch.randn(size, 8)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    return x


def test_the_entry_point_is_known_to_dynamo_by_name() -> None:
    from torch._dynamo.backends.registry import lookup_backend

    assert lookup_backend("fuse_cache") is backend
    assert torch.fx.experimental._config.backed_size_oblivious is True


def test_the_public_names_are_there_and_are_what_they_say() -> None:
    from fuse_cache.client import Client, CompileOptions, PassConfig, load_compiled, report

    assert callable(report)
    assert callable(load_compiled)
    assert {Client, CompileOptions, PassConfig}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fuse_cache.client.nothing


@torch.no_grad()
def test_without_a_daemon_every_size_is_right_compiled_here_once_and_counted_with_its_reason() -> None:
    compiled = _compiled(_gelu_sum, compile_ranges=[[1, 4], [5, 16]])
    for size in (4, 1, 5, 16):
        x = _sized(size, dynamic=size == 4)
        torch.testing.assert_close(compiled(x), _gelu_sum(x))
    graphs = report()
    assert [(g.source, g.compile_range, g.used) for g in graphs] == [
        ("local", (1, 4), True),
        ("local", (5, 16), True),
    ]
    assert all("refused" in g.reason and NOBODY in g.reason for g in graphs)
    x = _sized(20)
    torch.testing.assert_close(compiled(x), _gelu_sum(x))
    assert [g.reason for g in report()[2:]] == ["size 20 is outside every compile range ([1, 4], [5, 16])"]


@torch.no_grad()
def test_remote_mode_raises_where_auto_would_compile() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"RemoteCompileError.*connection was refused"):
        _compiled(_gelu_sum, mode="remote")(_sized(3))
    assert report() == []


@torch.no_grad()
@pytest.mark.parametrize(("mode", "reason"), [("local", "mode is local"), ("off", "mode is off")])
def test_local_and_off_make_no_call(mode: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuse_cache.client.channel import Endpoint

    monkeypatch.setattr(Endpoint, "channel", lambda self: pytest.fail("a channel was opened"))
    x = _sized(3)
    torch.testing.assert_close(_compiled(_gelu_sum, mode=mode)(x), _gelu_sum(x))
    assert [(g.source, g.reason, g.used) for g in report()] == [("local", reason, True)]


def test_a_graph_that_needs_gradients_is_not_cacheable_and_trains_all_the_same() -> None:
    weight = torch.randn(8, requires_grad=True)
    x = torch.randn(2, 8)
    out = _compiled(lambda x, w: (x * w).sum())(x, weight)
    out.backward()
    torch.testing.assert_close(weight.grad, x.sum(0))
    (graph,) = report()
    assert graph.reason.startswith("not cacheable: grad mode is on")


def test_gradients_that_only_a_part_of_the_graph_asks_for_are_not_lost() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            return (x * w).sum()

    weight = torch.randn(8, requires_grad=True)
    x = torch.randn(2, 8)
    with torch.no_grad():
        out = _compiled(forward)(x, weight)
    out.backward()
    torch.testing.assert_close(weight.grad, x.sum(0))
    (graph,) = report()
    assert graph.reason.startswith("not cacheable: grad mode is on")


def test_an_empty_graph_is_not_cacheable_and_returns_its_input() -> None:
    graph, x = torch.fx.Graph(), torch.randn(3)
    placeholder = graph.placeholder("x")
    placeholder.meta["example_value"] = x
    graph.output((placeholder,))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    call = compile_graph(gm, [x], CompileOptions.from_mapping({"endpoint": NOBODY}))
    assert call(x)[0] is x
    assert [g.reason for g in report()] == ["not cacheable: the graph computes nothing"]


@torch.no_grad()
def test_a_higher_order_operator_is_not_cacheable_and_runs() -> None:
    def choose(x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        return chosen

    compiled = _compiled(choose)
    for sign in (1.0, -1.0):
        x = torch.full((3,), sign)
        torch.testing.assert_close(compiled(x), choose(x))
    assert {g.reason.partition(":")[0] for g in report()} == {"not cacheable"}


@torch.no_grad()
def test_several_symbolic_sizes_must_be_told_apart_and_the_error_lists_them() -> None:
    def add(query: Tensor, key: Tensor) -> Tensor:
        return query.sum() + key.sum()

    query, key = torch.randn(3, 8), torch.randn(5, 8)
    for tensor in (query, key):
        torch._dynamo.mark_dynamic(tensor, 0)
    with pytest.raises(BackendCompilerFailed, match=r"range_dim must name .*query:0, key:0"):
        _compiled(add, compile_ranges=[[1, 8]])(query, key)
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match=r"range_dim=value:0 .*query:0, key:0"):
        _compiled(add, range_dim="value:0")(query, key)


@torch.no_grad()
def test_strict_raises_when_a_pass_that_was_asked_for_matched_nothing() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"norm_quant matched nothing"):
        _compiled(_gelu_sum, mode="local", strict=True, pass_config={"fuse_norm_quant": True})(_sized(3))


@torch.no_grad()
def test_an_unknown_option_reaches_the_user_by_name() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"unknown option 'modes'"):
        _compiled(_gelu_sum, modes="auto")(_sized(3))


@torch.no_grad()
def test_pieces_between_splitting_operators_are_graphs_of_their_own() -> None:
    def block(x: Tensor) -> Tensor:
        return torch.nn.functional.softmax(torch.relu(x) + 1, -1) * 2

    x = _sized(3, dynamic=True)
    compiled = _compiled(block, mode="local", splitting_ops=["torch.nn.functional.softmax"])
    torch.testing.assert_close(compiled(x), block(x))
    assert [(g.source, g.used) for g in report()] == [("local", True), ("local", True)]
    x = _sized(9)
    torch.testing.assert_close(compiled(x), block(x))
    assert len(report()) == 2


def test_a_report_has_the_fields_of_the_design_and_is_plain_data_as_json() -> None:
    assert set(GraphReport(key="", source="local").as_dict()) >= FIELDS
    reports.add(GraphReport(key="ab", source="disk", compile_range=(1, 4), fusions={"norm_quant": 2}))
    (plain,) = report(json=True)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["compile_range"] == [1, 4]


@pytest.mark.parametrize("option", [{"regional": True}, {"skip_tracing": True}])
def test_an_option_without_effect_says_so_once(
    option: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        _options(option)
    (name,) = option
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"option {name} has no effect in this version"
    ]


def test_an_attention_kernel_for_a_cpu_graph_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    options = load_options({"attention_backend": "flash", "mode": "off"})
    compile_graph(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)], options)
    ours = [record.getMessage() for record in caplog.records if record.name == "fuse_cache.client"]
    assert ours == ["option attention_backend has no effect on a CPU: there is one attention kernel"]


def test_a_setting_without_effect_warns_once_however_many_graphs_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    warn_once.cache_clear()
    options = {"mode": "local", "pass_config": {"sp_min_token_num": 4093}, "level": "O0"}
    with caplog.at_level(logging.WARNING, "fuse_cache.client"), torch.no_grad():
        for size in (2, 3):
            torch._dynamo.reset()
            _compiled(double, **options)(torch.ones(size))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["pass_config: sp_min_token_num has no effect: sequence_parallel off"]
    assert not any(row["on"] for graph in report()[-2:] for row in graph.passes)
    assert [graph.near_misses for graph in report()[-2:]] == [[], []]
