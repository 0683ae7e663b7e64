"""What looks like something that we fuse and is not: each with every reason that is to be given, in order.

Each takes x and y [T, H], a weight [H] and a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse_cache.passes.base import Reason
from tests.passes.spellings import FP8, divide, divide_wide, llama, olmo
from tests.passes.spellings_dynamic import MAX, per_tensor
from tests.passes.spellings_more import add_llama, silu

Expected: TypeAlias = tuple[str, Reason, str]
Function: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Case:
    """A function, and (pass, reason, words in the detail) of each near miss; `matches` of the two fusions."""

    function: Function
    expected: tuple[Expected, ...]
    matches: int
    is_static: bool  # With a symbolic number of rows it would be another case.
    is_symbolic: bool  # The other way round.


CASES: dict[str, Case] = {}


def near_miss(
    *expected: Expected, matches: int = 0, is_static: bool = False, is_symbolic: bool = False
) -> Callable[[Function], Function]:
    """Put a function into the table."""

    def register(function: Function) -> Function:
        CASES[function.__name__] = Case(function, expected, matches, is_static, is_symbolic)
        return function

    return register


def raising(reason: Reason, words: str) -> Expected:
    """Return a near miss of raise_ir."""
    return "raise_ir", reason, words


def norm(reason: Reason, words: str) -> Expected:
    """Return a near miss of norm_quant."""
    return "norm_quant", reason, words


def act(reason: Reason, words: str) -> Expected:
    """Return a near miss of act_quant."""
    return "act_quant", reason, words


_ALONE = norm(Reason.NO_PARTNER, "no quantisation reads it")
_UNREAD = norm(Reason.OTHER_SPELLING, "see the near miss of raise_ir")


# Norms that are none of ours.


@near_miss(raising(Reason.OTHER_SPELLING, "they are not averaged"))
def squares_are_only_added_up(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.SIZE_BURNT_IN, "divided by the number 128"))
def mean_is_a_sum_over_the_width(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.OTHER_SPELLING, "divided by 127.0"))
def mean_is_unbiased(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / 127 + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.OTHER_SPELLING, "nothing small is added to it"))
def eps_is_a_bound(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True).clamp(min=1e-6))).to(x.dtype)


@near_miss(raising(Reason.OTHER_SPELLING, "changes the mean once more"))
def eps_is_added_twice(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6 + 1e-5)).to(x.dtype)


@near_miss(raising(Reason.OTHER_SPELLING, "changes the mean once more"))
def mean_is_scaled(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    return w * (h * torch.rsqrt(2.0 * h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.OTHER_SPELLING, "rounds twice"))
def root_is_divided_by(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    return w * (h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.OTHER_SPELLING, "rounds twice"))
def eps_is_outside_of_the_root(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    return w * (h / (torch.sqrt(h.pow(2).mean(-1, keepdim=True)) + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.OTHER_SPELLING, "over [0, 1], keepdim True"))
def mean_is_over_everything(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean((0, 1), keepdim=True) + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.CAST_BETWEEN, "to torch.bfloat16 before the root"))
def mean_is_rounded(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    mean = h.pow(2).mean(-1, keepdim=True).to(torch.bfloat16)
    return w * (h * torch.rsqrt(mean.float() + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.CAST_BETWEEN, "rounds the mean to torch.bfloat16"))
def mean_has_a_dtype_of_its_own(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    mean = h.pow(2).mean(-1, keepdim=True, dtype=torch.bfloat16)
    return w * (h * torch.rsqrt(mean.float() + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.CAST_BETWEEN, "to torch.bfloat16 before the root"))
def squares_are_rounded(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    squares = h.pow(2).to(torch.bfloat16).float()
    return w * (h * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.CAST_BETWEEN, "rounds the reciprocal of the root"))
def root_is_rounded(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    root = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (x * root.to(x.dtype))


@near_miss(raising(Reason.EXTRA_VIEW, "reshapes the mean before the root"))
def mean_is_reshaped(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    mean = h.pow(2).mean(-1, keepdim=True).squeeze(-1)
    return w * (h * torch.rsqrt(mean + 1e-6).unsqueeze(-1)).to(x.dtype)


@near_miss(raising(Reason.OTHER_SPELLING, "what is scaled is not what was squared"))
def rows_are_centred_afterwards(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * ((h - h.mean(-1, keepdim=True)) * root).to(x.dtype)


@near_miss(raising(Reason.OTHER_SPELLING, "what is scaled is not what was squared"))
def norm_of_another_tensor(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return w * (y.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.DTYPE, "torch.float64"))
def norm_in_double(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.double()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@near_miss(raising(Reason.OTHER_SPELLING, "goes into aten.div"))
def root_is_divided(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    return w * (torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) / h).to(x.dtype)


# Gated activations that are none of ours.


@near_miss(raising(Reason.EXTRA_USER, "the activation is read by"))
def activation_is_returned(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    activation = F.silu(x)
    return activation * y, activation.relu()


@near_miss(raising(Reason.OTHER_SPELLING, "scaled by 1.702"))
def quick_gelu(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return x * torch.sigmoid(1.702 * x) * y


@near_miss(raising(Reason.OTHER_SPELLING, "as PyTorch's own GELU"))
def gelu_with_a_rounded_constant(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = x.float()
    inner = 0.7978 * (h + 0.044715 * (h * h * h))
    return (0.5 * h * (1.0 + torch.tanh(inner))).to(x.dtype) * y


@near_miss(raising(Reason.DTYPE, "step by step"))
def silu_rounded_at_each_step(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return x / (1 + torch.exp(-x)) * y


@near_miss(raising(Reason.SHAPE, "have the sizes"))
def one_row_gates_all(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return F.silu(x) * w


# Quantisations that are none of ours, behind a norm.


@near_miss(raising(Reason.OTHER_SPELLING, "clamped twice"), _UNREAD)
def codes_are_clamped_twice(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return (llama(x, w).float() / s).clamp(-448, 448).clamp(-240, 240).to(FP8)


@near_miss(raising(Reason.DTYPE, "the scale is torch.bfloat16"), _UNREAD)
def scale_is_narrow(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return (llama(x, w) / s.to(torch.bfloat16)).clamp(-448, 448).to(FP8)


@near_miss(raising(Reason.OP_MISSING, "no static quantisation to torch.int8"), _UNREAD)
def static_int8(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return torch.round(llama(x, w).float() / s).clamp(-128, 127).to(torch.int8)


@near_miss(raising(Reason.OP_MISSING, "the scale has the shape [128]"), _UNREAD)
def one_scale_a_column(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return (llama(x, w).float() / w.float().exp()).clamp(-448, 448).to(FP8)


@near_miss(raising(Reason.CAST_BETWEEN, "rounds the largest value"), _UNREAD)
def largest_value_is_rounded(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = llama(x.float(), w.float())
    scale = h.abs().amax(-1, keepdim=True).to(torch.bfloat16).float() / MAX
    return (h / scale).clamp(-MAX, MAX).to(FP8), scale


@near_miss(raising(Reason.OTHER_SPELLING, "is the largest absolute value itself"), _UNREAD)
def scaled_to_one(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = llama(x, w).float()
    return (h / h.abs().amax(-1, keepdim=True)).clamp(-1, 1).to(FP8)


@near_miss(raising(Reason.OTHER_SPELLING, "comes from another tensor's values"), _UNREAD)
def scale_of_another_tensor(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    scale = y.float().abs().amax(-1, keepdim=True) / MAX
    return (llama(x, w).float() / scale).clamp(-MAX, MAX).to(FP8)


@near_miss(raising(Reason.OTHER_SPELLING, "scales by something that is not a constant"), _UNREAD)
def scale_is_smoothed(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = llama(x, w).float()
    scale = h.abs().amax(-1, keepdim=True) / MAX * s
    return (h / scale).clamp(-MAX, MAX).to(FP8)


@near_miss(raising(Reason.OTHER_SPELLING, "scales once more"), _UNREAD)
def scale_is_doubled(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    h = llama(x, w).float()
    scale = h.abs().amax(-1, keepdim=True) / MAX * 2.0
    return (h / scale).clamp(-MAX, MAX).to(FP8)


# What stands between the two.


@near_miss(
    *[norm(Reason.CAST_BETWEEN, "to torch.float16 first"), norm(Reason.CAST_BETWEEN, "for that reason")]
)
def cast_between(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide_wide(olmo(x, w).to(torch.float16), s)


@near_miss(norm(Reason.EXTRA_VIEW, "reshapes"), norm(Reason.EXTRA_VIEW, "for that reason"))
def flattened_to_one_row(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(llama(x, w).view(-1), s)


@near_miss(norm(Reason.EXTRA_VIEW, "moves the values"), norm(Reason.EXTRA_VIEW, "for that reason"))
def turned(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(llama(x, w).t(), s)


@near_miss(norm(Reason.SHAPE, "from 128 to 192 columns"), norm(Reason.SHAPE, "for that reason"))
def padded_to_a_multiple_of_the_group(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    padded = F.pad(llama(x, w), (0, 64))
    groups = padded.view(-1, 2, 96).float()
    scale = groups.abs().amax(-1, keepdim=True) / MAX
    return (groups / scale).clamp(-MAX, MAX).to(FP8).view(-1, 192), scale.squeeze(-1)


@near_miss(
    norm(Reason.SIZE_BURNT_IN, "a size is burnt in"),
    norm(Reason.SIZE_BURNT_IN, "for that reason"),
    is_symbolic=True,
)
def always_four_rows(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(llama(x, w)[:4], s)


@near_miss(norm(Reason.EXTRA_VIEW, "takes a part"), norm(Reason.EXTRA_VIEW, "for that reason"))
def all_rows_but_the_first(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(llama(x, w)[1:], s)


@near_miss(norm(Reason.EXTRA_VIEW, "takes a part"), norm(Reason.EXTRA_VIEW, "for that reason"))
def half_of_the_columns(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(llama(x, w)[:, :64], s)


@near_miss(norm(Reason.NO_PARTNER, "neither a norm nor"), norm(Reason.NO_PARTNER, "no quantisation reads it"))
def residual_is_added_behind(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(llama(x, w) + y, s)


@near_miss(norm(Reason.NO_PARTNER, "neither a norm nor"), norm(Reason.NO_PARTNER, "no quantisation reads it"))
def norm_is_softmaxed(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(llama(x, w).softmax(-1), s)


@near_miss(norm(Reason.NO_PARTNER, "neither a norm nor"), _ALONE, norm(Reason.NO_PARTNER, "no quantisation"))
def two_norms_beside_each_other(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(torch.cat([llama(x, w), llama(y, w)]), s)


@near_miss(norm(Reason.NO_PARTNER, "the sum before the norm"), _ALONE)
def sum_is_quantised_and_not_the_norm(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed, total = add_llama(x, y, w)
    return divide(total, s), normed


@near_miss(norm(Reason.NO_PARTNER, "neither a norm nor a gated activation"))
def ungated_activation(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(F.silu(x), s)


@near_miss(norm(Reason.NO_PARTNER, "neither a norm nor a gated activation"))
def gated_by_relu(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(x.relu() * y, s)


@near_miss(norm(Reason.OP_MISSING, "no attention kernel with an output scale on this target"))
def attention(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    q, k = (one.view(1, -1, 2, 64).transpose(1, 2) for one in (x, y))
    return divide(F.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(-1, 128), s)


# Scales that need what is being fused.


@near_miss(norm(Reason.GUARD, "one scale for the whole tensor"), norm(Reason.GUARD, "for that reason"))
def one_scale_for_all_rows(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed, total = add_llama(x, y, w)
    return (*per_tensor(normed), total)


@near_miss(norm(Reason.EXTRA_USER, "computed from the norm"), norm(Reason.EXTRA_USER, "for that reason"))
def scale_from_a_reader_of_the_norm(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed = llama(x, w)
    return divide_wide(normed, s + normed.relu().float().sum())


@near_miss(act(Reason.EXTRA_USER, "computed from the activation"), act(Reason.EXTRA_USER, "for that reason"))
def scale_from_a_reader_of_the_activation(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    product = silu(x, y)
    return divide_wide(product, s + product.float().sum())


@near_miss(act(Reason.GUARD, "one scale for the whole tensor"), act(Reason.GUARD, "for that reason"))
def one_scale_for_an_activation(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return per_tensor(silu(x, y))


@near_miss(act(Reason.CAST_BETWEEN, "to torch.float16 first"), act(Reason.CAST_BETWEEN, "for that reason"))
def cast_behind_an_activation(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide_wide(silu(x, y).float().to(torch.float16), s)


@near_miss(act(Reason.EXTRA_VIEW, "takes a part"), act(Reason.EXTRA_VIEW, "for that reason"))
def half_of_an_activation(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    return divide(silu(x, y)[:, 64:], s)


@near_miss(act(Reason.EXTRA_USER, "is fused with another one"), matches=1)
def two_scales_for_an_activation(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    product = silu(x, y)
    return divide(product, s), divide(product, s + 1)


@near_miss(norm(Reason.EXTRA_USER, "is fused with another one"), matches=1)
def two_formats_of_one_norm(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> Any:
    normed = llama(x, w)
    scale = normed.abs().amax(-1, keepdim=True).float() / 127.0
    codes = torch.round(normed.float() / scale).clamp(-128, 127).to(torch.int8)
    return divide(normed, s), codes, scale
