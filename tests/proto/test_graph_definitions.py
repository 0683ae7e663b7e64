"""What a graph defines once (symbols, guards, schemas, groups, aliases) is used, in one order."""

from __future__ import annotations

import dataclasses

from fuse_cache.proto.expression import ADD, GE, MUL, Dim, combine, symbol
from fuse_cache.proto.graph import (
    Graph,
    Group,
    GroupSpec,
    Input,
    Level,
    OpSchema,
    Ref,
    Role,
    Symbol,
    TensorMeta,
)
from fuse_cache.proto.graph_codec import GraphReason, decode, encode
from tests.proto.graphs import X, graph_of, refused


def test_symbols_are_numbered_by_first_use_and_all_used() -> None:
    def made(dims: tuple[Dim, ...], count: int) -> Graph:
        meta = TensorMeta("float32", "cpu", dims, (1,) * len(dims))
        return Graph(Level.DYNAMO, (Symbol(0, None),) * count, (Input(meta),), (), ())

    decode(encode(made((symbol(0), symbol(1)), 2)))
    assert "numbered" in refused(made((symbol(1), symbol(0)), 2)).message
    assert "not used" in refused(made((symbol(0),), 2)).message
    swapped = combine(ADD, [symbol(1), combine(MUL, [symbol(0), 2])])
    decode(encode(made((swapped,), 2)))  # within one size any order will do


def test_guards_are_sorted_truth_values_over_used_symbols() -> None:
    meta = TensorMeta("float32", "cpu", (symbol(0),), (1,))
    graph = Graph(Level.DYNAMO, (Symbol(0, None),), (Input(meta),), (), ())
    first, second = sorted(
        (combine(GE, [symbol(0), 2]), combine(GE, [symbol(0), 1])), key=lambda guard: guard.code
    )
    decode(encode(dataclasses.replace(graph, guards=(first, second))))
    for guards, reason in (
        ((second, first), "order"),
        ((first, first), "order"),
        ((symbol(0),), "truth"),
        ((combine(GE, [1, 2]),), "constant"),
    ):
        assert reason in refused(dataclasses.replace(graph, guards=guards)).message


def test_operator_schemas_are_used_sorted_and_fit_their_names() -> None:
    def made(*schemas: OpSchema) -> Graph:
        return graph_of(Ref(0), target="acme::f.default", op_schemas=schemas)

    good = OpSchema("acme::f.default", "acme::f(Tensor x) -> Tensor", ("core",))
    decode(encode(made(good)))
    other = OpSchema("acme::g.default", "acme::g(Tensor x) -> Tensor")
    assert "not used" in refused(made(good, other)).message
    assert "order" in refused(made(other, good)).message
    assert "order" in refused(made(good, good)).message
    for name, schema, tags in (
        ("acme::f.default", "acme::g(Tensor x) -> Tensor", ()),
        ("acme::f.default", "acme::f.default(Tensor x) -> Tensor", ()),
        ("acme::f.out", "acme::f(Tensor x) -> Tensor", ()),
        ("acme::f.default", "acme::f(Tensor x)", ()),
        ("acme::f.default", "acme::f(Tensor x) -> Tensor", ("b", "a")),
        ("aten::add.Tensor", "aten::add.Tensor(Tensor x) -> Tensor", ()),
    ):
        assert refused(made(OpSchema(name, schema, tags))).reason is GraphReason.MALFORMED


def test_groups_are_used_and_logical() -> None:
    decode(encode(graph_of(Group("tp"), groups=(GroupSpec("tp", 2),))))
    assert "not used" in refused(graph_of(1, groups=(GroupSpec("tp", 2),))).message
    assert "name of a group" in refused(graph_of(Group("0"), groups=(GroupSpec("0", 2),))).message
    assert "ranks" in refused(graph_of(Group("tp"), groups=(GroupSpec("tp", 0),))).message


def test_alias_groups_are_numbered_by_first_use_and_shared() -> None:
    def made(*groups: int) -> Graph:
        return Graph(Level.DYNAMO, (), tuple(Input(X, Role.INPUT, group) for group in groups), (), ())

    decode(encode(made(1, 0, 2, 1, 2)))
    assert "first use" in refused(made(2, 1, 1, 2)).message
    assert "one input" in refused(made(1, 0)).message
