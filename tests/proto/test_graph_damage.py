"""Bytes that are no graph are refused within limits, whatever they are."""

from __future__ import annotations

import dataclasses
import random

import pytest

from fuse_cache.proto import graph_format as form
from fuse_cache.proto.graph import (
    Argument,
    Graph,
    Input,
    Level,
    Meta,
    Node,
    NodeKind,
    Ref,
)
from fuse_cache.proto.graph_codec import GraphError, GraphReason, decode, encode, validate
from fuse_cache.proto.limits import GRAPH_LIMITS
from fuse_cache.proto.varint import pack, unpack
from tests.proto.graphs import X, every_part, graph_of, large, refused


def test_results_nested_by_reference_count_as_deep_and_as_large_as_they_are() -> None:
    def chain(depth: int, width: int) -> Graph:
        metas: list[Meta] = [X]
        for _ in range(depth):
            metas.append((metas[-1],) * width)
        nodes = tuple(Node(NodeKind.METHOD, "abs", (Ref(0),), (), meta) for meta in metas)
        return Graph(Level.DYNAMO, (), (Input(X),), nodes, ())

    decode(encode(chain(4, 2)))
    assert "nested results" in refused(chain(5, 1)).message
    assert "results" in refused(chain(4, 10)).message


@pytest.mark.parametrize("kind", [tuple, list, dict, slice])
def test_nesting_beyond_the_limit_is_refused_without_deep_recursion(kind: type) -> None:
    nested: Argument = 1
    for _ in range(5_000):
        if kind is dict:
            nested = {"a": nested}
        elif kind is slice:
            nested = slice(nested, None, None)
        else:
            nested = kind([nested])
    with pytest.raises(GraphError, match="nested arguments"):
        encode(graph_of(nested))
    tag = {tuple: form.TUPLE, list: form.LIST, dict: form.DICT, slice: form.SLICE}[kind]
    token = tag if kind is slice else 1 << 4 | tag
    head = unpack(encode(graph_of(Ref(0))), 4)
    at = head.index(1 << 4 | form.REF)
    deep = head[:at] + [token] * 100_000
    if kind is dict:
        deep = head[:at] + [token, 0, 1, 97] + [token, 1] * 100_000
    with pytest.raises(GraphError) as caught:
        decode(form.HEADER + pack(deep))
    assert caught.value.reason is GraphReason.TOO_LARGE


def test_writer_and_reader_agree_on_the_deepest_nesting() -> None:
    innermost: list[Argument] = [(), [], {}, slice(None)]
    for nested in innermost:
        for _ in range(GRAPH_LIMITS.argument_depth - 1):
            nested = (nested,)
        decode(encode(graph_of(nested)))
        with pytest.raises(GraphError, match="nested arguments"):
            encode(graph_of((nested,)))


def test_every_prefix_of_a_graph_is_refused() -> None:
    data = encode(every_part())
    for length in range(len(data)):
        with pytest.raises(GraphError):
            decode(data[:length])


def test_bytes_after_a_graph_are_refused() -> None:
    with pytest.raises(GraphError, match="after the graph"):
        decode(encode(every_part()) + b"\x00")


def test_other_schemas_and_other_files_are_refused_by_name() -> None:
    with pytest.raises(GraphError, match="schema 2; this side reads 1"):
        decode(b"FCG\x02" + encode(every_part())[4:])
    for data in (b"", b"FCG", b"\x80\x04pickle", b"FCC\x01"):
        with pytest.raises(GraphError, match="not a graph"):
            decode(data)


@pytest.mark.parametrize("limit", ["size_bytes", "nodes", "inputs", "outputs", "symbols", "strings", "metas"])
def test_each_limit_is_named_when_it_is_passed(limit: str) -> None:
    data = encode(every_part())
    decode(data, dataclasses.replace(GRAPH_LIMITS, size_bytes=len(data)))
    with pytest.raises(GraphError, match="the limit is 1") as caught:
        decode(data, dataclasses.replace(GRAPH_LIMITS, **{limit: 1}))
    assert caught.value.reason is GraphReason.TOO_LARGE


def test_a_count_of_billions_costs_nothing() -> None:
    huge = (1 << 64) - 1
    for tokens in ([1, huge], [1, 0, 0, 0, huge], [1, 0, 0, 0, 0, huge], [1, 0, 0, 0, 0, 1, 0, 1, 0, huge]):
        with pytest.raises(GraphError) as caught:
            decode(form.HEADER + pack(tokens))
        assert caught.value.reason is GraphReason.TOO_LARGE


def mutants(data: bytes, count: int, seed: int) -> list[bytes]:
    """Return damaged copies: bits flipped, bytes changed, cut out, doubled, cut off."""
    source = random.Random(seed)
    made = []
    for _ in range(count):
        copy = bytearray(data)
        for _ in range(source.randrange(1, 4)):
            at = source.randrange(4, len(copy))
            action = source.randrange(6)
            if action == 0:
                copy[at] ^= 1 << source.randrange(8)
            elif action == 1:
                copy[at] = source.choice((0, 1, 127, 128, 255, source.randrange(256)))
            elif action == 2:
                del copy[at : at + source.randrange(1, 6)]
            elif action == 3:
                copy[at:at] = source.randbytes(source.randrange(1, 6))
            elif action == 4:
                copy[at:at] = copy[at : at + source.randrange(1, 40)]
            else:
                del copy[at + 1 :]
            if len(copy) < 6:
                break
        made.append(bytes(copy))
    return made


def survive(data: bytes, count: int, seed: int) -> int:
    """Validate `count` mutants and return how many were graphs."""
    accepted = 0
    for mutant in mutants(data, count, seed):
        try:
            validate(mutant)
        except GraphError:
            continue  # anything else would fail the test
        accepted += 1
    return accepted


def test_3_000_damaged_graphs_are_refused_or_canonical() -> None:
    accepted = survive(encode(every_part()), 3_000, seed=1)
    assert 0 < accepted < 1_000  # a changed constant is still a graph; most damage is not


@pytest.mark.slow
def test_100_000_damaged_graphs_are_refused_or_canonical() -> None:
    accepted = survive(encode(every_part()), 80_000, seed=2) + survive(encode(large(40)), 20_000, seed=3)
    assert 0 < accepted < 20_000


def test_random_bytes_are_refused() -> None:
    source = random.Random(4)
    for _ in range(2_000):
        with pytest.raises(GraphError):
            validate(form.HEADER + source.randbytes(source.randrange(200)))
