"""`fuse_cache::quant_fp8_static`: the IR node that every spelling of static FP8 quantisation is raised to."""

from __future__ import annotations

from fuse_cache.kernels.library import Family, define
from fuse_cache.kernels.quant_fp8_static.reference import quant_fp8_static

FAMILY = Family(
    name="quant_fp8_static",
    tensors="Tensor x, Tensor scale",
    attributes=("str scaling, ScalarType scaled_dtype, float? clamp_min, float? clamp_max, ScalarType dtype"),
    results=1,
    reference=quant_fp8_static,
)
QUANT_FP8_STATIC = define(FAMILY)
