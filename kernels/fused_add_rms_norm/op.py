"""`fuse_cache::fused_add_rms_norm`: the IR node that every addition before an RMSNorm is raised to."""

from __future__ import annotations

from fuse_cache.kernels.fused_add_rms_norm.reference import fused_add_rms_norm
from fuse_cache.kernels.library import Family, define
from fuse_cache.kernels.rms_norm.op import ATTRIBUTES

FAMILY = Family(
    name="fused_add_rms_norm",
    tensors="Tensor x, Tensor residual, Tensor? weight",
    attributes=f"{ATTRIBUTES}, ScalarType sum_dtype, bool norm_of_rounded",
    results=2,
    reference=fused_add_rms_norm,
)
FUSED_ADD_RMS_NORM = define(FAMILY)
