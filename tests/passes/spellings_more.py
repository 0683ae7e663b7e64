"""Additions before a norm and gated activations as models write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spellings import functional, gemma, llama, olmo

AddNorm: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Gate: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def add_llama(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum in the dtype of the two."""
    total = residual + x
    return llama(total, weight), total


def add_behind(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The other order, another norm."""
    total = torch.add(x, residual)
    return gemma(total, weight), total


def add_functional(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Before PyTorch's own norm; the sum is read once more."""
    total = x + residual
    return functional(total, weight), total * 2


def add_wide(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm reads the exact sum, the next layer the rounded one."""
    total = x.float() + residual.float()
    h = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype), total.to(x.dtype)


def add_wide_rounded(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Added in float32 and rounded before anyone reads it."""
    total = (x.to(torch.float32) + residual.to(torch.float32)).to(x.dtype)
    return olmo(total, weight), total


def add_wide_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A residual that stays in float32."""
    total = x + residual.float()
    h = total * torch.rsqrt((total * total).mean(-1, keepdim=True) + 1e-5)
    return (h * weight).to(x.dtype), total


def add_three(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and feed-forward in parallel."""
    total = x + x.sin() + residual
    return llama(total, weight), total


def add_in_place(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Into a tensor of our own."""
    total = residual.clone()
    total += x
    return llama(total, weight), total


ADD_NORMS: dict[str, AddNorm] = {
    one.__name__: one
    for one in (
        add_llama,
        add_behind,
        add_functional,
        add_wide,
        add_wide_rounded,
        add_wide_residual,
        add_three,
        add_in_place,
    )
}


def silu(gate: Tensor, up: Tensor) -> Tensor:
    """Llama's."""
    return F.silu(gate) * up


def silu_behind(gate: Tensor, up: Tensor) -> Tensor:
    """Phi-3's order."""
    activation: Callable[[Tensor], Tensor] = torch.nn.SiLU()
    return up * activation(gate)


def silu_wide(gate: Tensor, up: Tensor) -> Tensor:
    """In float32 up to the product."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def silu_rounded(gate: Tensor, up: Tensor) -> Tensor:
    """In float32, rounded before the product."""
    return F.silu(gate.to(torch.float32)).to(gate.dtype) * up


def silu_unrounded(gate: Tensor, up: Tensor) -> Tensor:
    """The product stays in float32."""
    return up.float() * F.silu(gate).float()


def swish(gate: Tensor, up: Tensor) -> Tensor:
    """x * sigmoid(x), each step rounded."""
    return gate * torch.sigmoid(gate) * up


def swish_wide(gate: Tensor, up: Tensor) -> Tensor:
    """x * sigmoid(x) in float32."""
    h = gate.float()
    return (torch.sigmoid(h) * h).to(gate.dtype) * up


def swish_mixed(gate: Tensor, up: Tensor) -> Tensor:
    """Only the sigmoid is rounded."""
    sigmoid = gate.float().sigmoid().to(gate.dtype)
    return (gate * sigmoid) * up


def gelu(gate: Tensor, up: Tensor) -> Tensor:
    """The exact form."""
    return F.gelu(gate) * up


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """Gemma's."""
    return F.gelu(gate, approximate="tanh") * up


def gelu_wide(gate: Tensor, up: Tensor) -> Tensor:
    """In float32, the operands the other way round."""
    return (up.float() * F.gelu(gate.float(), approximate="tanh")).to(gate.dtype)


def chunked(gate: Tensor, up: Tensor) -> Tensor:
    """Both from one linear."""
    one, other = torch.cat([gate, up], -1).chunk(2, dim=-1)
    return other * F.silu(one)


def sliced(gate: Tensor, up: Tensor) -> Tensor:
    """Both from one linear, by slices."""
    both = torch.cat([gate, up], -1)
    half = both.shape[-1] // 2
    return F.silu(both[..., :half]) * both[..., half:]


def up_half_first(gate: Tensor, up: Tensor) -> Tensor:
    """Both from one linear, the gate behind."""
    other, one = torch.split(torch.cat([up, gate], -1), [up.shape[-1], gate.shape[-1]], dim=-1)
    return F.gelu(one) * other


GATES: dict[str, Gate] = {
    one.__name__: one
    for one in (
        silu,
        silu_behind,
        silu_wide,
        silu_rounded,
        silu_unrounded,
        swish,
        swish_wide,
        swish_mixed,
        gelu,
        gelu_tanh,
        gelu_wide,
        chunked,
        sliced,
        up_half_first,
    )
}
