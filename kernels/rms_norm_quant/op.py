"""`fuse_cache::rms_norm_quant_fp8_static`: what norm + quant fusion puts in the place of the two."""

from __future__ import annotations

from fuse_cache.kernels.library import define
from fuse_cache.kernels.quant_fp8_static.op import ATTRIBUTES as QUANT_ATTRIBUTES
from fuse_cache.kernels.rms_norm_quant.reference import rms_norm_quant_fp8_static

RMS_NORM_QUANT_FP8_STATIC = define(
    "rms_norm_quant_fp8_static(Tensor x, Tensor? weight, Tensor scale, float eps, float weight_bias, "
    f"ScalarType? weight_dtype, ScalarType? norm_dtype, ScalarType? out_dtype, {QUANT_ATTRIBUTES}) -> Tensor",
    rms_norm_quant_fp8_static,
)
