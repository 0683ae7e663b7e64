"""Graphs to test with: a fixed one that uses every part of the format, and a strategy that makes any."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import strategies as st

from fuse_cache.proto import targets
from fuse_cache.proto.expression import (
    ADD,
    CEILDIV,
    FLOORDIV,
    GE,
    MAX,
    MOD,
    MUL,
    NE,
    POW,
    Dim,
    SymExpr,
    combine,
    symbol,
    symbols_of,
)
from fuse_cache.proto.graph import (
    Argument,
    Device,
    Dtype,
    Graph,
    Group,
    GroupSpec,
    Input,
    Layout,
    Level,
    MemoryFormat,
    Meta,
    Node,
    NodeKind,
    OpSchema,
    OtherMeta,
    Ref,
    Role,
    Symbol,
    SymMeta,
    TensorMeta,
)
from fuse_cache.proto.graph_codec import GraphError, decode, encode

X = TensorMeta("float32", "cpu", (4, 8), (8, 1))
QUIET_NAN: float = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]


def every_part() -> Graph:
    """Return a graph that uses each part of the format. A golden vector is made from it: never change it."""
    batch, tokens = symbol(0), symbol(1)
    area = combine(MUL, [batch, tokens])
    row = TensorMeta("bfloat16", "cpu", (batch, tokens, 64), (combine(MUL, [tokens, 64]), 64, 1))
    weight = TensorMeta("float32", "cpu", (64,), (1,), 0, True)
    half = combine(CEILDIV, [combine(FLOORDIV, [combine(ADD, [area, 3]), 2]), 2])
    rest = combine(MAX, [combine(MOD, [tokens, 8]), combine(POW, [batch, 2])])
    nodes = (
        Node(NodeKind.METHOD, "mean", (Ref(2), -1), (("dtype", None), ("keepdim", True)), row),
        Node(NodeKind.FUNCTION, "operator.getitem", (Ref(2), (..., slice(None, Ref(1), 2))), (), row),
        Node(NodeKind.FUNCTION, "torch.topk", (Ref(2), 2), (), (row, (weight, OtherMeta("none")))),
        Node(NodeKind.FUNCTION, "operator.mul", (Ref(0), Ref(1)), (), SymMeta(area)),
        Node(NodeKind.FUNCTION, "operator.sub", (1, 4), (), SymMeta(-3)),
        Node(
            NodeKind.FUNCTION,
            "torch.zeros",
            ([Ref(0), 1 << 62, -(1 << 63), (1 << 63) - 1],),
            (
                ("device", Device("cpu")),
                ("dtype", Dtype("bfloat16")),
                ("layout", Layout("strided")),
                ("memory_format", MemoryFormat("contiguous_format")),
            ),
            TensorMeta("bfloat16", "cpu", (half, rest, 0), (1, 1, 1), tokens),
        ),
        Node(NodeKind.METHOD, "pow", (Ref(3), 2.0), (), row),
        Node(NodeKind.FUNCTION, "torch.where", (Ref(4), -0.0, float("-inf"), QUIET_NAN, 2.0), (), row),
        Node(NodeKind.FUNCTION, "torch._C._nn.gelu", (Ref(2),), (("approximate", "tanh"),), row),
        Node(NodeKind.FUNCTION, "builtins.getattr", (Ref(2), "mT"), (), OtherMeta("unknown")),
        Node(NodeKind.FUNCTION, "aten::add.Tensor", (Ref(2), Ref(2)), (("alpha", 2),), row),
        Node(
            NodeKind.FUNCTION, "_c10d_functional::all_reduce.default", (Ref(2), "sum", Group("tp")), (), row
        ),
        Node(NodeKind.FUNCTION, "acme::swish.default", (Ref(2), {"beta": 1.5, "mode": "fäst"}), (), row),
    )
    return Graph(
        level=Level.DYNAMO,
        symbols=(Symbol(1, 64), Symbol(-5, None)),
        inputs=(
            Input(SymMeta(batch)),
            Input(SymMeta(tokens)),
            Input(row),
            Input(weight, Role.PARAMETER, 1),
            Input(weight, Role.BUFFER, 1),
            Input(TensorMeta("int64", "cpu", (), ()), Role.CONSTANT),
        ),
        nodes=nodes,
        outputs=(Ref(17), None, Ref(6), True),
        op_schemas=(
            OpSchema(
                "acme::swish.default", "acme::swish(Tensor x, Any o) -> Tensor", ("core", "pt2_compliant_tag")
            ),
        ),
        groups=(GroupSpec("tp", 8),),
        guards=tuple(
            sorted(
                (combine(GE, [area, 2]), combine(NE, [combine(MOD, [tokens, 16]), 0])),
                key=lambda guard: guard.code,
            )
        ),
    )


_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
_TEXT = st.text(max_size=12).filter(str.isprintable)
_FUNCTIONS = [*sorted(set(targets.TARGETS) - {"builtins.getattr"}), "aten::mm.default", "prims::iota.default"]


def expressions(num_symbols: int) -> st.SearchStrategy[SymExpr]:
    """Return a strategy for sizes over these symbols, each with at least one of them."""

    def grow(parts: st.SearchStrategy[Dim]) -> st.SearchStrategy[Dim]:
        variadic = st.builds(
            combine, st.sampled_from((ADD, MUL, MAX)), st.lists(parts, min_size=2, max_size=3)
        )
        pair = st.builds(
            lambda op, left, right: combine(op, [left, right]),
            st.sampled_from((FLOORDIV, MOD, CEILDIV)),
            parts,
            parts,
        )
        power = st.builds(lambda base, exponent: combine(POW, [base, exponent]), parts, st.integers(2, 4))
        return st.one_of(variadic, pair, power)

    symbols = st.builds(symbol, st.integers(0, num_symbols - 1))
    grown = st.recursive(st.one_of(symbols, st.integers(-9, 9)), grow, max_leaves=6)
    return grown.filter(lambda dim: isinstance(dim, SymExpr) and len(symbols_of(dim)) > 0).map(
        _only_expression
    )


def _only_expression(dim: Dim) -> SymExpr:
    assert isinstance(dim, SymExpr)
    return dim


def _arguments(num_values: int) -> st.SearchStrategy[Argument]:
    plain: list[st.SearchStrategy[Argument]] = [
        st.none(),
        st.booleans(),
        _INT64,
        st.floats(),
        _TEXT,
        st.just(...),
        st.builds(Dtype, st.sampled_from(sorted(targets.DTYPES))),
        st.builds(Device, st.sampled_from(sorted(targets.DEVICES))),
        st.builds(MemoryFormat, st.sampled_from(sorted(targets.MEMORY_FORMATS))),
    ]
    if num_values:
        plain.append(st.builds(Ref, st.integers(0, num_values - 1)))
    leaf = st.one_of(plain)
    return st.one_of(
        leaf,
        st.lists(leaf, max_size=3),
        st.lists(leaf, max_size=3).map(tuple),
        st.builds(slice, leaf, leaf, leaf),
        st.dictionaries(_TEXT, leaf, max_size=2).map(lambda entries: dict(sorted(entries.items()))),
        st.lists(st.lists(leaf, max_size=2).map(tuple), max_size=2),
    )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Return a strategy for well-formed graphs."""
    num_symbols = draw(st.integers(0, 3))
    sizes: st.SearchStrategy[Dim] = st.integers(0, 1 << 40)
    if num_symbols:
        pool = draw(st.lists(expressions(num_symbols), max_size=4))
        sizes = st.one_of([sizes, st.sampled_from(pool)] if pool else [sizes])
    shapes = st.lists(st.tuples(sizes, sizes), max_size=3)
    tensors = st.builds(
        lambda dtype, shape, offset, grad: TensorMeta(
            dtype, "cpu", tuple(size for size, _ in shape), tuple(stride for _, stride in shape), offset, grad
        ),
        st.sampled_from(sorted(targets.DTYPES)),
        shapes,
        sizes,
        st.booleans(),
    )
    leaf_metas: st.SearchStrategy[Meta] = st.one_of(
        tensors,
        st.builds(SymMeta, sizes),
        st.builds(OtherMeta, st.sampled_from(sorted(targets.OTHER_METAS))),
    )
    pool_of_metas = draw(st.lists(leaf_metas, min_size=1, max_size=5))
    metas = st.one_of(
        st.sampled_from(pool_of_metas), st.lists(st.sampled_from(pool_of_metas), max_size=3).map(tuple)
    )
    inputs = [Input(SymMeta(symbol(number))) for number in range(num_symbols)]
    inputs += [
        Input(meta, role)
        for meta, role in draw(st.lists(st.tuples(tensors, st.sampled_from(Role)), max_size=3))
    ]
    nodes: list[Node] = []
    for _ in range(draw(st.integers(0, 4))):
        arguments = _arguments(len(inputs) + len(nodes))
        named = draw(
            st.dictionaries(st.sampled_from(("dim", "dtype", "keepdim", "out")), arguments, max_size=2)
        )
        kind = draw(st.sampled_from(NodeKind))
        names = sorted(targets.METHODS) if kind is NodeKind.METHOD else _FUNCTIONS
        nodes.append(
            Node(
                kind,
                draw(st.sampled_from(names)),
                tuple(draw(st.lists(arguments, max_size=4))),
                tuple(sorted(named.items())),
                draw(metas),
            )
        )
    num_values = len(inputs) + len(nodes)
    outputs = draw(st.lists(st.builds(Ref, st.integers(0, num_values - 1)), max_size=3)) if num_values else []
    symbols = tuple(
        Symbol(draw(st.integers(-4, 4)), draw(st.one_of(st.none(), st.integers(5, 99))))
        for _ in range(num_symbols)
    )
    return Graph(Level.DYNAMO, symbols, tuple(inputs), tuple(nodes), tuple(outputs))


def large(nodes: int) -> Graph:
    """Return a graph as large models have them: `nodes` nodes, a dynamic size, few distinct shapes."""
    tokens = symbol(0)
    metas = [
        TensorMeta(dtype, "cpu", (1, tokens, width), (combine(MUL, [tokens, width]), width, 1))
        for dtype in ("bfloat16", "float32")
        for width in (512, 1024, 4096)
    ]
    made = []
    first = 2
    for number in range(nodes):
        last = Ref(first + number - 1)
        target, args = (
            ("operator.mul", (last, last)),
            ("torch.rsqrt", (last,)),
            ("torch._C._nn.linear", (last, Ref(1), None)),
            ("operator.getitem", (last, (..., slice(None, 32, None)))),
        )[number % 4]
        made.append(Node(NodeKind.FUNCTION, target, args, (), metas[number % len(metas)]))
    weight = TensorMeta("bfloat16", "cpu", (512, 512), (512, 1))
    inputs = (Input(SymMeta(tokens)), Input(weight, Role.PARAMETER))
    return Graph(Level.DYNAMO, (Symbol(1, None),), inputs, tuple(made), (Ref(first + nodes - 1),))


def graph_of(
    *args: Argument,
    target: str = "torch.abs",
    kind: NodeKind = NodeKind.FUNCTION,
    meta: Meta = X,
    kwargs: tuple[tuple[str, Argument], ...] = (),
    level: Level = Level.DYNAMO,
    **fields: object,
) -> Graph:
    """Return a graph of one tensor and one call."""
    made = Graph(level, (), (Input(X),), (Node(kind, target, args, kwargs, meta),), (Ref(1),))
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]  # fields of Graph by name


def refused(graph: Graph) -> GraphError:
    """Return why a graph that can be written cannot be read, or cannot be written at all."""
    with pytest.raises(GraphError) as caught:
        decode(encode(graph))
    return caught.value
