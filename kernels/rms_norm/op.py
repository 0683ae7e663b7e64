"""`fuse_cache::rms_norm`: the IR node that every spelling of RMSNorm is raised to."""

from __future__ import annotations

from fuse_cache.kernels.library import define
from fuse_cache.kernels.rms_norm.reference import rms_norm

RMS_NORM = define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_bias=0.0, ScalarType? weight_dtype=None, "
    "ScalarType? norm_dtype=None, ScalarType? out_dtype=None) -> Tensor",
    rms_norm,
)
