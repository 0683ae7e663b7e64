"""The graph as plain data: what a client sends and a worker rebuilds. No torch, no code, no names of the
user's files.

Values are numbered: the inputs first (0 .. len(inputs) - 1), then one per node. A `Ref` names a value. Node
names, module stacks, paths, hints, device indices, ranks and process-group names never appear.
`graph_codec.py` turns a `Graph` into its one canonical byte form and back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fuse_cache.proto.expression import SymExpr

Dim: TypeAlias = int | SymExpr


class Level(enum.IntEnum):
    """Where in the compiler the graph was taken. Values are part of the format."""

    DYNAMO = 1  # torch functions and methods, in-place ones included
    ATEN = 2  # after AOTAutograd: OpOverloads and operator functions


class NodeKind(enum.IntEnum):
    """How the target is called. Values are part of the format."""

    FUNCTION = 1
    METHOD = 2


class Role(enum.IntEnum):
    """What an input is to the model. Values are part of the format."""

    INPUT = 1
    PARAMETER = 2
    BUFFER = 3
    CONSTANT = 4  # a tensor that the graph held itself, lifted to an input


@dataclass(frozen=True, slots=True)
class Ref:
    """The value with this number."""

    value: int


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch.dtype by its name, "bfloat16"."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device type, "cpu" or "cuda". The index is bound on the host, never carried."""

    type: str


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    """A torch.memory_format by its name, "contiguous_format"."""

    name: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A torch.layout by its name, "strided"."""

    name: str


@dataclass(frozen=True, slots=True)
class Group:
    """A process group by its logical name, "tp"; `Graph.groups` gives its size."""

    name: str


# Also: tuple and list of arguments, dict with str keys, slice, Ellipsis. A torch.Size is a tuple.
Argument: TypeAlias = object


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbolic size. Its number is its place in `Graph.symbols`: the order of first use in the inputs.

    `lower` and `upper` are inclusive; `upper` None means unbounded.
    """

    lower: int
    upper: int | None


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is known of a tensor. Sizes, strides and the offset are in elements."""

    dtype: str
    device: str
    size: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    storage_offset: Dim = 0
    requires_grad: bool = False
    layout: str = "strided"


@dataclass(frozen=True, slots=True)
class SymMeta:
    """A symbolic integer."""

    value: Dim


@dataclass(frozen=True, slots=True)
class OtherMeta:
    """Neither a tensor nor a symbolic integer: "none", "bool", "int", "float", "str", "unknown"."""

    kind: str


# A node with several results has a tuple.
Meta: TypeAlias = "TensorMeta | SymMeta | OtherMeta | tuple[Meta, ...]"


@dataclass(frozen=True, slots=True)
class Input:
    """One input in calling order. Inputs with the same non-zero `alias_group` share storage."""

    meta: TensorMeta | SymMeta
    role: Role = Role.INPUT
    alias_group: int = 0


class Node(NamedTuple):
    """One call. `kwargs` are sorted by name; `target` is in the closed table or in `Graph.op_schemas`.

    A tuple, since a graph has thousands and a frozen dataclass takes three times as long to make.
    """

    kind: NodeKind
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    meta: Meta


@dataclass(frozen=True, slots=True)
class OpSchema:
    """A custom operator that the graph calls: schema (with mutation marks) and tags, as on the client."""

    name: str  # "transformers::grouped_mm_fallback.default"
    schema: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A logical process group and its size."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole graph. Equal graphs have equal bytes (`graph_codec.encode`)."""

    level: Level
    symbols: tuple[Symbol, ...]
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Argument, ...]  # Ref, None or a constant each; Inductor wants them flat
    op_schemas: tuple[OpSchema, ...] = ()  # sorted by name
    groups: tuple[GroupSpec, ...] = ()  # sorted by name
    # Boolean conditions on the symbols under which the graph was taken, sorted by code. Dynamo checks them
    # before each call; the worker needs them to choose example sizes that fit together.
    guards: tuple[SymExpr, ...] = ()
