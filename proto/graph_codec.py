"""The one byte form of a graph: `decode(encode(g))` is `g`, `encode(decode(b))` is `b` or `decode` refuses.

`graph_format.py` describes the form. It is kept for ever: what schema 1 wrote is read as long as the project
lives.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

from blake3 import blake3

from fuse_cache.proto import graph_format as form
from fuse_cache.proto.errors import GraphError, GraphReason
from fuse_cache.proto.graph import Graph, Level
from fuse_cache.proto.graph_reader import read_graph
from fuse_cache.proto.graph_writer import write_graph
from fuse_cache.proto.limits import GRAPH_LIMITS, GraphLimits

__all__ = ["GraphError", "GraphReason", "Summary", "decode", "encode", "graph_digest", "validate"]


def encode(graph: Graph) -> bytes:
    """Return the canonical bytes of `graph`.

    It trusts its caller to have sorted what is to be sorted; `decode` refuses what was not.

    Raises:
        GraphError: the graph holds something that cannot be sent; the message names it.
    """
    return write_graph(graph)


def decode(data: bytes, limits: GraphLimits = GRAPH_LIMITS) -> Graph:
    """Return the graph whose canonical bytes are `data`. Safe on bytes from anywhere.

    Raises:
        GraphError: they are no canonical graph, or pass a limit; `reason` says which.
    """
    return read_graph(data, limits)


def graph_digest(data: bytes) -> bytes:
    """Return the 32 bytes that name a graph with these canonical bytes."""
    return blake3(data, derive_key_context=form.DIGEST_CONTEXT).digest()


@dataclass(frozen=True, slots=True)
class Summary:
    """What a daemon needs to know of a graph that it does not decode itself."""

    level: Level
    nodes: int
    inputs: int
    symbols: int
    custom_ops: tuple[str, ...]
    groups: tuple[tuple[str, int], ...]


def validate(data: bytes, limits: GraphLimits = GRAPH_LIMITS) -> Summary:
    """Make sure that `data` is a canonical graph within `limits`, by decoding it and encoding it again.

    Raises:
        GraphError: it is not.
    """
    # A graph has no cycles; looking for them while it grows takes twice as long as reading it.
    collecting = gc.isenabled()
    gc.disable()
    try:
        graph = read_graph(data, limits)
        if write_graph(graph) != data:
            raise form.malformed("not in canonical form")
    finally:
        if collecting:
            gc.enable()
    return Summary(
        level=graph.level,
        nodes=len(graph.nodes),
        inputs=len(graph.inputs),
        symbols=len(graph.symbols),
        custom_ops=tuple(schema.name for schema in graph.op_schemas),
        groups=tuple((group.name, group.size) for group in graph.groups),
    )
