"""`fuse_cache::rms_norm`: the IR node that every spelling of RMSNorm is raised to."""

from __future__ import annotations

from fuse_cache.kernels.library import Family, define
from fuse_cache.kernels.rms_norm.reference import rms_norm

# Shared by fused_add_rms_norm, which normalises in the same ways.
ATTRIBUTES = (
    "float eps, float weight_bias, ScalarType? weight_dtype, ScalarType? norm_dtype, ScalarType? out_dtype"
)
FAMILY = Family(
    name="rms_norm", tensors="Tensor x, Tensor? weight", attributes=ATTRIBUTES, results=1, reference=rms_norm
)
RMS_NORM = define(FAMILY)
