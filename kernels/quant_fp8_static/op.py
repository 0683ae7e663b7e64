"""`fuse_cache::quant_fp8_static`: the IR node that every spelling of static FP8 quantisation is raised to."""

from __future__ import annotations

from fuse_cache.kernels.library import define
from fuse_cache.kernels.quant_fp8_static.reference import quant_fp8_static

# Shared by the fused operators, which carry the quantisation's attributes unchanged.
ATTRIBUTES = "str scaling, ScalarType scaled_dtype, float? clamp_min, float? clamp_max, ScalarType dtype"

QUANT_FP8_STATIC = define(
    f"quant_fp8_static(Tensor x, Tensor scale, {ATTRIBUTES}) -> Tensor", quant_fp8_static
)
