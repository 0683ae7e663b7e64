"""Some of vLLM's operators by their schemas, with bodies in plain PyTorch that round as its kernels do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LIBRARY = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types here
FP8 = torch.float8_e4m3fn


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (scaled * weight.float()).to(x.dtype)


def _rms_norm(result: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> None:
    result.copy_(_norm(x, weight, epsilon))


def _fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual.copy_((x.float() + residual.float()).to(x.dtype))
    x.copy_(_norm(residual, weight, epsilon))


def _silu_and_mul(result: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, -1)
    result.copy_(F.silu(gate) * up)


def _static(result: Tensor, x: Tensor, scale: Tensor, group_shape: object = None) -> None:
    result.copy_((x.float() * scale.reciprocal()).clamp(-448, 448).to(FP8))


def _per_token(result: Tensor, x: Tensor, scale: Tensor, scale_ub: Tensor | None) -> None:
    amax = x.float().abs().amax(-1, keepdim=True)
    amax = amax if scale_ub is None else torch.minimum(amax, scale_ub)
    scale.copy_((amax / 448.0).clamp_min(1 / (448 * 512)))
    result.copy_((x.float() / scale).clamp(-448, 448).to(FP8))


def _per_group(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    group: int,
    eps: float,
    low: float,
    high: float,
    power: bool,
    transposed: bool = False,
    aligned: bool = False,
) -> None:
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // group, group)
    scale = groups.abs().amax(-1).clamp_min(eps) / high
    if power:
        scale = torch.exp2(torch.ceil(torch.log2(scale.clamp_min(1e-10))))
    scales.copy_(scale)
    codes.copy_((groups * scale.reciprocal().unsqueeze(-1)).clamp(low, high).flatten(-2).to(FP8))


for _schema, _body in (
    ("rms_norm(Tensor(a!) result, Tensor input, Tensor weight, float epsilon) -> ()", _rms_norm),
    (
        "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()",
        _fused_add_rms_norm,
    ),
    ("silu_and_mul(Tensor(a!) result, Tensor input) -> ()", _silu_and_mul),
    (
        "static_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor scale, "
        "int[]? group_shape=None) -> ()",
        _static,
    ),
    (
        "dynamic_per_token_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor(b!) scale, "
        "Tensor? scale_ub) -> ()",
        _per_token,
    ),
    (
        "per_token_group_fp8_quant(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s, int group_size, "
        "float eps, float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed=False, "
        "bool dummy_is_tma_aligned=False) -> ()",
        _per_group,
    ),
):
    LIBRARY.define(_schema)  # type: ignore[no-untyped-call]  # as above
    LIBRARY.impl(_schema.split("(")[0], _body, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above

C = torch.ops._C
EPS = 1e-6


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return the norm of x, as vLLM's layer calls it."""
    out = torch.empty_like(x)
    C.rms_norm(out, x, weight, EPS)
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum and the sum, in the places of x and residual."""
    C.fused_add_rms_norm(x, residual, weight, EPS)
    return x, residual


def silu_and_mul(x: Tensor) -> Tensor:
    """Return the gated half of x."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    C.silu_and_mul(out, x)
    return out


def static(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Return codes by a given scale."""
    out = torch.empty_like(x, dtype=FP8)
    C.static_scaled_fp8_quant(out, x, scale)
    return (out,)


def per_token(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Return codes and a scale for each row."""
    out, scales = torch.empty_like(x, dtype=FP8), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    C.dynamic_per_token_scaled_fp8_quant(out, x, scales, None)
    return out, scales


def per_token_bounded(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Return codes and a scale for each row, of amax up to `scale`."""
    out, scales = torch.empty_like(x, dtype=FP8), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    C.dynamic_per_token_scaled_fp8_quant(out, x, scales, scale)
    return out, scales


def per_group(x: Tensor, scale: Tensor, *, power: bool = False) -> tuple[Tensor, ...]:
    """Return codes and a scale for each 128 neighbours."""
    out = torch.empty_like(x, dtype=FP8)
    scales = x.new_empty(x.shape[0], x.shape[1] // 128, dtype=torch.float32)
    C.per_token_group_fp8_quant(x, out, scales, 128, 1e-10, -448.0, 448.0, power)
    return out, scales


def per_group_power(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Return codes and scales that are powers of two."""
    return per_group(x, scale, power=True)


QUANTS = {
    "static": static,
    "per_token": per_token,
    "per_token_bounded": per_token_bounded,
    "per_group": per_group,
    "per_group_power": per_group_power,
}
