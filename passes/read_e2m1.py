"""Recognises the encoding to e2m1, by what it gives, and the packing of two codes in a byte."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_cache.kernels.quant_nvfp4.reference import BITS, e2m1
from fuse_cache.passes.base import Reason
from fuse_cache.passes.probe import no_modes, part_behind
from fuse_cache.passes.raised import Miss
from fuse_cache.passes.reading import RESHAPES, aten, cast_source, dtype, is_call, number, only_user, tensor

_HOLDS_CODES = frozenset({torch.uint8, torch.int16, torch.int32, torch.int64})
_SHIFTS = (aten.bitwise_left_shift.Tensor_Scalar, aten.__lshift__.Scalar)
_JOINS = (aten.bitwise_or.Tensor, aten.add.Tensor, aten.bitwise_xor.Tensor)
_THRESHOLDS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
_NEAR = 64  # Neighbours on both sides of each threshold.
_found: dict[str, Encoding | None] = {}


@dataclass(frozen=True, slots=True)
class Encoding:
    """What is open in e2m1: attributes of `quant_nvfp4`."""

    nan_code: int
    nan_sign: bool
    zero_sign: bool


def packed_codes(join: fx.Node) -> tuple[fx.Node, fx.Node] | Miss | None:
    """Read a byte of two codes: return the node that is uint8, and the codes. None: it packs nothing."""
    if not is_call(join, _JOINS) or dtype(join) not in _HOLDS_CODES or join.kwargs:
        return None
    for high, low in (join.args, tuple(reversed(join.args))):
        shifted = _shifted(high)
        first, second = _every_other(low), _every_other(shifted)
        if first is None or second is None or first[0] is not second[0]:
            continue
        if (first[1], second[1]) == (1, 0):
            return Miss(Reason.OTHER_SPELLING, "element 2k is in the high nibble, not in the low one")
        if (first[1], second[1]) != (0, 1):
            continue
        byte: fx.Node | None = join
        if dtype(join) != torch.uint8:
            byte = only_user(join)
            if byte is None or cast_source(byte) is not join or dtype(byte) != torch.uint8:
                return Miss(Reason.DTYPE, f"two codes are packed in {dtype(join)}")
        assert byte is not None
        return byte, first[0]
    return None


def _shifted(node: object) -> fx.Node | None:
    node = _without_casts(node)
    is_shift = is_call(node, _SHIFTS) and number(node.args[1]) == 4
    is_product = is_call(node, aten.mul.Tensor) and number(node.args[1]) == 16
    if not isinstance(node, fx.Node) or not (is_shift or is_product) or dtype(node) not in _HOLDS_CODES:
        return None
    inner = node.args[0]
    return inner if isinstance(inner, fx.Node) else None


def _without_casts(node: object) -> object:
    """Look through casts between integers that hold codes."""
    while (source := cast_source(node)) is not None and {dtype(node), dtype(source)} <= _HOLDS_CODES:
        node = source
    return node


def _every_other(node: object) -> tuple[fx.Node, int] | None:
    """Return of what this is every second element of the last dimension, and which is the first."""
    node = _without_casts(node)
    while is_call(node, RESHAPES):
        node = _without_casts(node.args[0])
    value = tensor(node)
    if value is None or not isinstance(node, fx.Node):
        return None
    base = node.args[0] if node.args else None
    whole = tensor(base)
    if not isinstance(base, fx.Node) or whole is None:
        return None
    last = (-1, whole.dim() - 1)
    if is_call(node, aten.slice.Tensor) and len(node.args) == 5 and node.args[1] in last:
        # To the end: half of an even number.
        start, is_half = node.args[2] or 0, statically_known_true(value.shape[-1] * 2 == whole.shape[-1])
        if node.args[4] == 2 and isinstance(start, int) and start in (0, 1) and is_half:
            return _codes_of(base), start
    if is_call(node, aten.select.int) and node.args[1] in last and whole.shape[-1] == 2:
        place = node.args[2]
        return (_codes_of(base), place % 2) if isinstance(place, int) else None
    return None


def _codes_of(node: fx.Node) -> fx.Node:
    """Look through reshapes: neighbours stay neighbours."""
    inner = _without_casts(node)
    while is_call(inner, RESHAPES | {aten.clone.default}):
        inner = _without_casts(inner.args[0])
    assert isinstance(inner, fx.Node)
    return inner


def read_encoding(codes: fx.Node, scaled: fx.Node) -> Encoding | Miss:
    """Read how scaled float32 values become codes."""
    part = part_behind(codes, lambda node: node is scaled)
    if part is None:
        return Miss(Reason.OTHER_SPELLING, f"{codes.name} is not computed from {scaled.name} value by value")
    with no_modes():
        key = part.key()
        if key not in _found:
            values = torch.cat([_values(), _around(part.constants())])
            result = part.run(values)
            _found[key] = None if result is None else _meaning(values, result.to(torch.int32))
    encoding = _found[key]
    return encoding or Miss(Reason.OTHER_SPELLING, f"{codes.name} does not round to e2m1, ties to even")


def _meaning(values: Tensor, codes: Tensor) -> Encoding | None:
    nan = codes[values.isnan()]
    zero = codes[(values == 0) & values.signbit()]
    for nan_code in (int(nan[0]) & 7, BITS):
        for nan_sign in (False, True):
            found = Encoding(nan_code, nan_sign, bool(zero[0] == 8))
            if torch.equal(e2m1(values, found.nan_code, found.nan_sign, found.zero_sign), codes):
                return found
    return None


@functools.cache
def _values() -> Tensor:
    """Every bfloat16 number, the neighbours of the thresholds, and some others."""
    generator = torch.Generator().manual_seed(0)
    coarse = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    some = torch.randn(1 << 14, generator=generator) * 3
    payloads = torch.tensor([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    return torch.cat([coarse, some, _around(list(_THRESHOLDS)), payloads.view(torch.float32)])


def _around(numbers: list[float]) -> Tensor:
    """Return numbers, their negatives and their neighbours in float32."""
    within = [value for value in numbers if abs(value) < 3e38]
    bits = torch.tensor(within, dtype=torch.float32).abs().view(torch.int32)
    near = torch.arange(-_NEAR, _NEAR + 1, dtype=torch.int32)
    positive = (bits[:, None] + near).clamp(0, 0x7F800000).reshape(-1).view(torch.float32)
    return torch.cat([positive, -positive])
