"""Calls, arguments and results that a graph may not have are refused by name."""

from __future__ import annotations

import pytest

from fuse_cache.proto.expression import INT, SymExpr, symbol
from fuse_cache.proto.graph import (
    Argument,
    Device,
    Dtype,
    Group,
    Layout,
    Level,
    Meta,
    Node,
    NodeKind,
    OtherMeta,
    Ref,
    SymMeta,
    TensorMeta,
)
from fuse_cache.proto.graph_codec import GraphError, GraphReason, decode, encode
from tests.proto.graphs import X, graph_of, refused


def test_an_integer_beyond_64_bits_is_refused_by_name() -> None:
    for value in (1 << 63, -(1 << 63) - 1, 1 << 100_000):
        assert "bits" in refused(graph_of(value)).message


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (1j, "complex"),
        (object(), "object"),
        ({1, 2}, "set"),
        (b"x", "bytes"),
        (int, "type"),
        (symbol(0), "SymExpr"),
        (Node, "type"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_arguments_without_a_form_are_refused_by_name(value: object, name: str) -> None:
    with pytest.raises(GraphError, match=name):
        encode(graph_of(value))
    with pytest.raises(GraphError, match=name):
        encode(graph_of([(value,)]))


@pytest.mark.parametrize("text", ["a\nb", "\x00", "\ud800", "\u202e"], ids=ascii)
def test_texts_that_cannot_be_printed_are_refused(text: str) -> None:
    with pytest.raises(GraphError, match="printed"):
        encode(graph_of(text))


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "builtins.exec",
        "builtins.__import__",
        "torch.load",
        "torch.save",
        "torch.compile",
        "torch.from_file",
        "torch.ops.load_library",
        "torch.nn.functional.os",
        "torch.Tensor.__reduce__",
        "torch._C",
        "aten::from_file.default",
        "aten::add",
        "aten::add.Tensor.more",
        "aten::__class__.default.x",
        "acme::swish.default",
        "operator.attrgetter",
        "operator.methodcaller",
        "",
    ],
)
def test_functions_outside_the_closed_table_are_refused(target: str) -> None:
    assert refused(graph_of(Ref(0), target=target)).reason is GraphReason.UNKNOWN_TARGET


@pytest.mark.parametrize(
    "target", ["numpy", "tolist", "__reduce__", "backward", "data_ptr", "torch.abs", "set_"]
)
def test_methods_outside_the_closed_table_are_refused(target: str) -> None:
    graph = graph_of(Ref(0), target=target, kind=NodeKind.METHOD)
    assert refused(graph).reason is GraphReason.UNKNOWN_TARGET


def test_methods_are_for_graphs_of_the_dynamo_level() -> None:
    decode(encode(graph_of(Ref(0), target="abs", kind=NodeKind.METHOD)))
    graph = graph_of(Ref(0), target="abs", kind=NodeKind.METHOD, level=Level.ATEN)
    assert refused(graph).reason is GraphReason.UNKNOWN_TARGET


def test_attributes_are_those_of_the_table() -> None:
    decode(encode(graph_of(Ref(0), "mT", target="builtins.getattr")))
    refusals: tuple[tuple[Argument, ...], ...] = (
        (Ref(0), "__class__"),
        (Ref(0),),
        ("mT", "mT"),
        (Ref(0), "mT", 1),
    )
    for args in refusals:
        assert refused(graph_of(*args, target="builtins.getattr")).reason is GraphReason.UNKNOWN_TARGET


def test_references_go_backwards_only() -> None:
    for value in (1, 2, -1):
        with pytest.raises(GraphError, match="not before it"):
            encode(graph_of(Ref(value)))
    with pytest.raises(GraphError, match="not before it"):
        encode(graph_of(Ref(0), outputs=(Ref(2),)))


def test_named_arguments_are_sorted_and_are_names() -> None:
    assert "order" in refused(graph_of(Ref(0), kwargs=(("b", 1), ("a", 1)))).message
    assert "order" in refused(graph_of(Ref(0), kwargs=(("a", 1), ("a", 1)))).message
    for name in ("a b", "", "1a", "class", "None", "é", "a" * 65):
        assert "no name" in refused(graph_of(Ref(0), kwargs=((name, 1),))).message


@pytest.mark.parametrize(
    "argument",
    [
        Dtype("float128"),
        Dtype("__class__"),
        Device("cuda:0"),
        Device("privateuse"),
        Layout("sparse_coo"),
        Group("tp"),
    ],
    ids=repr,
)
def test_names_outside_their_tables_are_refused(argument: Argument) -> None:
    assert refused(graph_of(argument)).reason is GraphReason.MALFORMED


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        (TensorMeta("float32", "cpu", (4,), ()), "1 sizes and 0 strides"),
        (TensorMeta("float32", "cpu", (-1,), (1,)), "no size"),
        (TensorMeta("float32", "cpu", (1 << 63,), (1,)), "no size"),
        (TensorMeta("float33", "cpu", (1,), (1,)), "no such tensor"),
        (TensorMeta("float32", "cpu", (1,), (1,), layout="sparse_coo"), "no such tensor"),
        (TensorMeta("float32", "cpu", (1,) * 65, (1,) * 65), "65 dimensions"),
        (TensorMeta("float32", "cpu", (SymExpr((INT, 3)),), (1,)), "constant"),
        (TensorMeta("float32", "cpu", (symbol(0),), (1,)), "symbol 0 of 0"),
        (OtherMeta("pickle"), "no kind of meta"),
        ((((((X,),),),),), "nested results"),
        ((X,) * 4097, "results"),
    ],
)
def test_malformed_metas_are_refused_by_name(meta: Meta, reason: str) -> None:
    assert reason in refused(graph_of(Ref(0), meta=meta)).message


def test_outputs_are_flat() -> None:
    assert "flat" in refused(graph_of(Ref(0), outputs=((Ref(1),),))).message


def test_a_bool_is_no_size() -> None:
    with pytest.raises(GraphError):
        encode(graph_of(Ref(0), meta=TensorMeta("float32", "cpu", (True,), (1,))))
    with pytest.raises(GraphError):
        encode(graph_of(Ref(0), meta=SymMeta("4")))  # type: ignore[arg-type]  # what a buggy caller may pass
