"""Recognises scales that become powers of two by integer operations on their bits, by what these give."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, fx

from fuse_cache.kernels.quant_dynamic.reference import (
    CLAMPED_POWER,
    EXACT_POWER,
    MASKED_POWER,
    to_power_of_two,
)
from fuse_cache.passes.probe import Part, no_modes, part_behind
from fuse_cache.passes.reading import aten, dtype, is_call

# What fields of a float32 are cut and shifted by: a part with no other constant cannot tell more mantissas
# apart than those that are tried.
_CONSTANTS = {0, 1, 23, 254, 255, 0x7FFFFF, 0x7F800000, 0x7FFFFFFF, -0x800000, 1 << 23}
_found: dict[str, str | None] = {}


def source_of_bits(node: fx.Node) -> fx.Node | None:
    """Return the scale whose bits make up this float32, None if the node is not made of bits."""
    part = _part(node)
    return None if part is None else part.source.all_input_nodes[0]


def read_power(node: fx.Node) -> str | None:
    """Return by which rule the node rounds the scale up; None: by none that has a name."""
    part = _part(node)
    if part is None:
        return None
    with no_modes():
        if not set(part.constants()) <= _CONSTANTS:
            return None
        key = part.key()
        if key not in _found:
            bits = _bits()
            result = part.run(bits)
            _found[key] = None if result is None else _rule(bits, result)
    return _found[key]


def _part(node: fx.Node) -> Part | None:
    if not is_call(node, aten.view.dtype) or dtype(node) != torch.float32:
        return None
    if dtype(node.args[0]) != torch.int32:
        return None
    return part_behind(node, _is_bits)


def _is_bits(node: fx.Node) -> bool:
    return (
        is_call(node, aten.view.dtype) and dtype(node) == torch.int32 and dtype(node.args[0]) == torch.float32
    )


@functools.cache
def _bits() -> Tensor:
    """Every exponent with the mantissas at its ends, single bits and some between. Scales have no sign."""
    generator = torch.Generator().manual_seed(0)
    ends = [0, 1, 2, 3, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFD, 0x7FFFFE, 0x7FFFFF]
    mantissas = torch.tensor(ends + [1 << place for place in range(23)], dtype=torch.int32)
    some = torch.randint(0, 1 << 23, (64,), generator=generator, dtype=torch.int32)
    exponents = torch.arange(256, dtype=torch.int32) << 23
    return (exponents[:, None] | torch.cat([mantissas, some])).reshape(-1)


def _rule(bits: Tensor, result: Tensor) -> str | None:
    given = bits.view(torch.float32)
    for rule in (EXACT_POWER, CLAMPED_POWER, MASKED_POWER):
        if torch.equal(to_power_of_two(given, rule).view(torch.int32), result.view(torch.int32)):
            return rule
    return None
