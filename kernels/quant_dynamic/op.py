"""`fuse_cache::quant_dynamic`: the IR node that every spelling of dynamic quantisation is raised to."""

from __future__ import annotations

from fuse_cache.kernels.library import Family, define
from fuse_cache.kernels.quant_dynamic.reference import quant_dynamic

FAMILY = Family(
    name="quant_dynamic",
    tensors="Tensor x, Tensor? bound",
    attributes=(
        "int group, float? amax_min, float? amax_max, str scale_rule, float divisor, "
        "ScalarType? scale_dtype, float? scale_min, str power_of_two, str scaling, ScalarType scaled_dtype, "
        "float? clamp_min, float? clamp_max, ScalarType dtype, str layout"
    ),
    results=2,
    reference=quant_dynamic,
)
QUANT_DYNAMIC = define(FAMILY)
