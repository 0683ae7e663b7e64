"""The input spec of an artifact: what the compiled code assumes of its inputs, as data that a host checks
before each call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from fuse_cache.proto import expression, spec_pb2
from fuse_cache.proto.expression import Dim, ExpressionError, SymExpr
from fuse_cache.proto.graph import Input, Role, Symbol, SymMeta, TensorMeta

SCHEMA = 1
MAX_RANK = 64  # torch's own limit for a TensorIterator
MAX_SYMBOLS = 1_024  # as in a graph (limits.py)


class SpecError(ValueError):
    """The bytes are not a spec of a schema that this version knows."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that the compiler made while it compiled. Its bytes lie in a section of their own."""

    name: str
    dtype: str
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactSpec:
    """What a host must know before it may call an artifact.

    `symbols` carry the interval that the code was built for: the compile range, where that names the
    symbol. `guards` must all be true of the symbols' values. Inputs in `aligned_inputs` must start at a
    multiple of 16 bytes; those in `mutated_inputs` are written.
    """

    target: str
    symbols: tuple[Symbol, ...]
    inputs: tuple[Input, ...]
    guards: tuple[SymExpr, ...] = ()
    outputs: int
    constants: tuple[Constant, ...] = ()
    aligned_inputs: tuple[int, ...] = ()
    mutated_inputs: tuple[int, ...] = ()
    torch: str = ""


def encode_spec(spec: ArtifactSpec) -> bytes:
    """Return the bytes of `spec`."""
    message = spec_pb2.ArtifactSpec(
        schema=SCHEMA,
        target=spec.target,
        symbols=[spec_pb2.SymbolSpec(lower=s.lower, upper=s.upper or 0) for s in spec.symbols],
        inputs=[_input_to_message(item) for item in spec.inputs],
        guards=[spec_pb2.Expression(code=guard.code) for guard in spec.guards],
        outputs=spec.outputs,
        constants=[spec_pb2.ConstantSpec(name=c.name, dtype=c.dtype, size=c.size) for c in spec.constants],
        aligned_inputs=spec.aligned_inputs,
        mutated_inputs=spec.mutated_inputs,
        torch=spec.torch,
    )
    return message.SerializeToString(deterministic=True)


def decode_spec(data: bytes) -> ArtifactSpec:
    """Return the spec in `data`, every expression checked.

    Raises:
        SpecError: not a spec, or of another schema.
    """
    message = spec_pb2.ArtifactSpec()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise SpecError("the spec is not a message of its form") from error
    if message.schema != SCHEMA:
        raise SpecError(f"spec of schema {message.schema}, this version reads {SCHEMA}")
    num_symbols = len(message.symbols)
    if num_symbols > MAX_SYMBOLS:
        raise SpecError(f"{num_symbols} symbols, the limit is {MAX_SYMBOLS}")
    try:
        inputs = tuple(_input_from_message(item, num_symbols) for item in message.inputs)
        guards = tuple(_expression(item, num_symbols, boolean=True) for item in message.guards)
    except ExpressionError as error:
        raise SpecError(f"a bad expression: {error}") from error
    return ArtifactSpec(
        target=message.target,
        symbols=tuple(Symbol(s.lower, s.upper or None) for s in message.symbols),
        inputs=inputs,
        guards=guards,
        outputs=message.outputs,
        constants=tuple(Constant(c.name, c.dtype, tuple(c.size)) for c in message.constants),
        aligned_inputs=_indices(message.aligned_inputs, len(inputs)),
        mutated_inputs=_indices(message.mutated_inputs, len(inputs)),
        torch=message.torch,
    )


def _dimension(value: Dim) -> spec_pb2.Dimension:
    if isinstance(value, SymExpr):
        return spec_pb2.Dimension(expression=spec_pb2.Expression(code=value.code))
    return spec_pb2.Dimension(constant=value)


def _input_to_message(item: Input) -> spec_pb2.InputSpec:
    if isinstance(item.meta, SymMeta):
        return spec_pb2.InputSpec(integer=_dimension(item.meta.value), role=int(item.role))
    tensor = spec_pb2.TensorSpec(
        dtype=item.meta.dtype,
        device=item.meta.device,
        size=[_dimension(value) for value in item.meta.size],
        stride=[_dimension(value) for value in item.meta.stride],
    )
    return spec_pb2.InputSpec(tensor=tensor, role=int(item.role))


def _expression(message: spec_pb2.Expression, num_symbols: int, *, boolean: bool = False) -> SymExpr:
    value = SymExpr(tuple(message.code))
    expression.check(value, num_symbols, boolean=boolean)
    return value


def _dim(message: spec_pb2.Dimension, num_symbols: int) -> Dim:
    return (
        _expression(message.expression, num_symbols) if message.HasField("expression") else message.constant
    )


def _input_from_message(message: spec_pb2.InputSpec, num_symbols: int) -> Input:
    try:
        role = Role(message.role)
    except ValueError as error:
        raise SpecError(f"unknown role {message.role}") from error
    if message.WhichOneof("value") == "integer":
        return Input(SymMeta(_dim(message.integer, num_symbols)), role)
    if message.WhichOneof("value") != "tensor":
        raise SpecError("an input that is neither a tensor nor an integer")
    tensor = message.tensor
    if len(tensor.size) != len(tensor.stride) or len(tensor.size) > MAX_RANK:
        raise SpecError(f"a tensor of {len(tensor.size)} sizes and {len(tensor.stride)} strides")
    meta = TensorMeta(
        dtype=tensor.dtype,
        device=tensor.device,
        size=tuple(_dim(item, num_symbols) for item in tensor.size),
        stride=tuple(_dim(item, num_symbols) for item in tensor.stride),
    )
    return Input(meta, role)


def _indices(values: Iterable[int], count: int) -> tuple[int, ...]:
    indices = tuple(values)
    if any(index >= count for index in indices):
        raise SpecError(f"an input number beyond {count}")
    return indices
