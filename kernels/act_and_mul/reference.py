"""Gated activations in plain PyTorch: the truth."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

SILU: Final = "silu"  # g / (1 + exp(-g)), as torch.nn.functional.silu computes
SWISH: Final = "swish"  # g * sigmoid(g): the same with another last bit
GELU: Final = "gelu"  # g / 2 * (1 + erf(g / sqrt(2)))
GELU_TANH: Final = "gelu_tanh"  # g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))
ACTIVATIONS: Final = (SILU, SWISH, GELU, GELU_TANH)


def act_and_mul(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    sigmoid_dtype: torch.dtype | None,
    act_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Return activation(gate) * up, [..., H].

    gate and up are [..., H] in bfloat16, float16 or float32. Without `up`, gate is [..., 2 H]: the gate's
    half before up's. Everything is computed in float32 and rounded where the attributes say: `sigmoid_dtype`
    the sigmoid of SWISH (None for the others), `act_dtype` the activation, `out_dtype` the product at last.
    None means no rounding there. The product is rounded to the promoted dtype of both factors, as PyTorch
    multiplies.

    Source: Shazeer 2020 (gated units); Hendrycks and Gimpel 2016 (both forms of GELU).

    Raises:
        ValueError: without `up`, the last dimension is odd.
    """
    if up is None:
        if gate.shape[-1] % 2 != 0:
            raise ValueError(f"{gate.shape[-1]} columns have no two halves")
        gate, up = gate.chunk(2, -1)
    wide = gate.to(torch.float32)
    if activation == SWISH:
        sigmoid = torch.sigmoid(wide)
        act = wide * (sigmoid if sigmoid_dtype is None else sigmoid.to(sigmoid_dtype).to(torch.float32))
    elif activation == SILU:
        act = F.silu(wide)
    else:
        # On a CPU its last bit depends on whether rows lie behind each other: one row always does.
        wide = wide.clone(memory_format=torch.contiguous_format)
        act = F.gelu(wide, approximate="tanh" if activation == GELU_TANH else "none")
        if activation == GELU and gate.dtype != torch.float32:
            # Far below zero PyTorch's kernel for float32 gives 0.0, all others the gate's sign.
            act = torch.copysign(act, wide)
    if act_dtype is not None:
        act = act.to(act_dtype)
    product_dtype = torch.promote_types(act.dtype, up.dtype)
    product = (act.to(torch.float32) * up.to(torch.float32)).to(product_dtype)
    return product if out_dtype is None else product.to(out_dtype)
