"""`fuse_cache::rms_norm_quant_fp8_static`: what norm + quant fusion puts in the place of the two."""

from __future__ import annotations

from fuse_cache.kernels.fused_quant.op import FUSED
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.rms_norm.op import RMS_NORM

RMS_NORM_QUANT_FP8_STATIC, _ = FUSED[RMS_NORM, QUANT_FP8_STATIC, False]
