"""Everything but the graph that a client asks for, and the digests that follow from it.

`request_digest` is what both sides compute from the same bytes; the daemon adds its own fingerprints to make
the key (`server/key.py`). Byte form, schema 1: "FCR" 0x01, then each field as `digest.encode_value` writes
it, in the order of the classes below. There is no other form: `decode_request` encodes what it read and
compares.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, TypeAlias

from fuse_cache.proto.digest import FieldDigest, Value, encode_value
from fuse_cache.proto.errors import RequestError
from fuse_cache.proto.limits import REQUEST_BYTES
from fuse_cache.proto.request_reader import read_values

Scalar: TypeAlias = bool | int | float | str

_HEADER: Final = b"FCR\x01"
_REQUEST_CONTEXT: Final = "fuse-cache request v1"
_FAMILY_CONTEXT: Final = "fuse-cache request family v1"
_MAX_SIZE: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The inclusive interval of one symbol. `symbol` None: a static piece (lower and upper are 0)."""

    symbol: int | None = None
    lower: int = 0
    upper: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """Global state of the host that changes what the compiler makes of a graph."""

    grad_mode: bool = False
    inference_mode: bool = False
    autocast: tuple[tuple[str, str], ...] = ()  # (device, dtype) of each enabled autocast, sorted
    default_dtype: str = "float32"
    deterministic: bool = False
    deterministic_fill: bool = True
    float32_matmul_precision: str = "highest"
    allow_tf32: bool = False
    allow_bf16_reduced_precision: bool = True
    allow_fp16_reduced_precision: bool = True
    sdpa_backends: tuple[str, ...] = ("cudnn", "efficient", "flash", "math")  # enabled ones, sorted


AMBIENT_NAMES: Final = [field.name for field in dataclasses.fields(Ambient)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """The request. Each field can change the artifact."""

    graph_digest: bytes  # of the canonical graph bytes
    pass_config: bytes  # ResolvedPassConfig.encode(): which passes run, with which thresholds
    range: Range
    target: str  # "cpu-avx2", "sm_90"
    target_facts: tuple[tuple[str, Scalar], ...] = ()  # that change code, sorted; empty for a target's own
    inductor_options: tuple[tuple[str, Scalar], ...] = ()  # allow-listed, sorted
    attention_backend: str = "auto"
    ambient: Ambient = Ambient()

    def encode(self) -> bytes:
        """Return the canonical bytes, which travel in `CompileStart.request`.

        Raises:
            RequestError: a field has a value that it cannot have.
        """
        _check(self)
        return _HEADER + b"".join(encode_value(value) for _, value in _fields(self))

    def request_digest(self) -> bytes:
        """Return the 32 bytes that name this request."""
        return FieldDigest(_REQUEST_CONTEXT).add_all(_fields(self)).digest()

    def family_digest(self) -> bytes:
        """Return the 32 bytes that name this request whatever its range: what a covering lookup asks by."""
        return FieldDigest(_FAMILY_CONTEXT).add_all(_fields(self, without_range=True)).digest()

    def describe(self) -> list[tuple[str, str]]:
        """Return every field by name, as text for people. Holds no secret and no path."""
        from fuse_cache.proto.request_text import describe_request  # it knows passes, which know requests

        return describe_request(self)


def _fields(request: RequestFields, *, without_range: bool = False) -> list[tuple[str, Value]]:
    """Return names and values in the order of the classes. A new field comes at the end, in a new schema."""
    bounds = request.range
    fields: list[tuple[str, Value]] = [
        ("graph_digest", request.graph_digest),
        ("pass_config", request.pass_config),
        # Requests of one family have ranges of one symbol: another size is no instance of it.
        ("range", bounds.symbol if without_range else (bounds.symbol, bounds.lower, bounds.upper)),
        ("target", request.target),
        ("target_facts", request.target_facts),
        ("inductor_options", request.inductor_options),
        ("attention_backend", request.attention_backend),
    ]
    fields += [
        (f"ambient.{field.name}", getattr(request.ambient, field.name))
        for field in dataclasses.fields(Ambient)
    ]
    return fields


def decode_request(data: bytes) -> RequestFields:
    """Return the request whose canonical bytes are `data`. Safe on bytes from anywhere.

    Raises:
        RequestError: they are no canonical request; the message says what is wrong.
    """
    if len(data) > REQUEST_BYTES:
        raise RequestError(f"a request of {len(data)} bytes; the limit is {REQUEST_BYTES}")
    if data[:4] != _HEADER:
        raise RequestError("not a request: wrong first bytes or a schema that this side does not read")
    values = read_values(data, len(_HEADER))
    if len(values) != 7 + len(AMBIENT_NAMES):
        raise RequestError(f"{len(values)} fields instead of {7 + len(AMBIENT_NAMES)}")
    graph_digest, pass_config, bounds, target, facts, options, attention = values[:7]
    if not isinstance(bounds, tuple) or len(bounds) != 3:
        raise RequestError("a malformed range")
    # Types are checked below, for what a client builds and for what a daemon reads alike.
    request = RequestFields(
        graph_digest=graph_digest,  # type: ignore[arg-type]
        pass_config=pass_config,  # type: ignore[arg-type]
        range=Range(symbol=bounds[0], lower=bounds[1], upper=bounds[2]),  # type: ignore[arg-type]
        target=target,  # type: ignore[arg-type]
        target_facts=facts,  # type: ignore[arg-type]
        inductor_options=options,  # type: ignore[arg-type]
        attention_backend=attention,  # type: ignore[arg-type]
        ambient=Ambient(**dict(zip(AMBIENT_NAMES, values[7:], strict=True))),  # type: ignore[arg-type]
    )
    if request.encode() != data:
        raise RequestError("not in canonical form")
    return request


def _check(request: RequestFields) -> None:
    """Raise RequestError unless every field has the type and the form it says."""
    if type(request.graph_digest) is not bytes or len(request.graph_digest) != 32:
        raise RequestError("graph_digest is not 32 bytes")
    if type(request.pass_config) is not bytes:
        raise RequestError("pass_config is not bytes")
    _check_range(request.range)
    for name in ("target", "attention_backend"):
        _check_name(name, getattr(request, name))
    for name in ("target_facts", "inductor_options"):
        pairs = getattr(request, name)
        _check_pairs(name, pairs)
        for key, value in pairs:
            if type(value) is str:
                _check_text(f"{name}.{key}", value)
            elif type(value) not in (bool, int, float):
                raise RequestError(f"{name}.{key} is neither a truth value, a number nor a text")
    for field in dataclasses.fields(Ambient):
        value = getattr(request.ambient, field.name)
        name = f"ambient.{field.name}"
        if field.type == "bool":
            if type(value) is not bool:
                raise RequestError(f"{name} is not a truth value")
        elif field.type == "str":
            _check_name(name, value)
        elif field.name == "autocast":
            _check_pairs(name, value)
            for device, dtype in value:
                _check_name(f"{name}.{device}", dtype)
        else:
            if type(value) is not tuple:
                raise RequestError(f"{name} is not a tuple")
            for entry in value:
                _check_name(name, entry)
            if list(value) != sorted(set(value)):
                raise RequestError(f"{name} is not in order")


def _check_range(bounds: Range) -> None:
    numbers = (bounds.lower, bounds.upper)
    if any(type(number) is not int or not 0 <= number <= _MAX_SIZE for number in numbers):
        raise RequestError("the range is not of sizes")
    if bounds.symbol is None:
        if numbers != (0, 0):
            raise RequestError("a range without a symbol has bounds")
    elif type(bounds.symbol) is not int or not 0 <= bounds.symbol < 1 << 31:
        raise RequestError("the range names no symbol")
    elif not bounds.lower <= bounds.upper:
        raise RequestError(f"the range {bounds.lower} .. {bounds.upper} is empty")


def _check_pairs(name: str, pairs: object) -> None:
    if type(pairs) is not tuple or any(type(pair) is not tuple or len(pair) != 2 for pair in pairs):
        raise RequestError(f"{name} is not a tuple of pairs")
    keys = [key for key, _ in pairs]
    for key in keys:
        _check_name(name, key)
    if keys != sorted(set(keys)):
        raise RequestError(f"{name} is not in the order of its names")


def _check_name(name: str, value: object) -> None:
    _check_text(name, value)
    if not value or len(str(value)) > 128 or not str(value).isascii() or " " in str(value):
        raise RequestError(f"{name} holds {str(value)[:80]!r}, which is no name")


def _check_text(name: str, value: object) -> None:
    if type(value) is not str or not value.isprintable():
        raise RequestError(f"{name} is not a printable text")
