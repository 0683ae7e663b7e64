"""`fuse_cache::quant_nvfp4`: the IR node that every spelling of NVFP4 quantisation is raised to."""

from __future__ import annotations

from fuse_cache.kernels.library import Family, define
from fuse_cache.kernels.quant_nvfp4.reference import quant_nvfp4

FAMILY = Family(
    name="quant_nvfp4",
    tensors="Tensor x, Tensor? global_scale",
    attributes=(
        "str amax_scaling, ScalarType? amax_dtype, str global_scaling, float? scale_min, str total_scaling, "
        "str scaling, str zero_guard, int nan_code, bool nan_sign, bool zero_sign, bool swizzled"
    ),
    results=2,
    reference=quant_nvfp4,
)
QUANT_NVFP4 = define(FAMILY)
