"""RMSNorm, with or without the addition of a residual and a quantisation, as one Triton kernel.

A program holds one row, whatever the number of rows, so that a row's bits do not depend on the others. The
tree of the sum is that of BLOCK, which follows from H alone. Each value is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fuse_cache.kernels.tl_numbers import rounded, sum_of_squares
from fuse_cache.kernels.tl_quantise import store_row_block


@triton.jit
def rms_norm_kernel(
    x, residual, weight, y, total, factor, codes, scales,
    num_tokens, x_stride, residual_stride, scales_stride,
    ADD: tl.constexpr, SUM_DTYPE: tl.constexpr, NORM_OF_ROUNDED: tl.constexpr, WEIGHTED: tl.constexpr,
    EPS: tl.constexpr, WEIGHT_BIAS: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, NORM_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr, KEEP: tl.constexpr, HALVINGS: tl.constexpr,
    KIND: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LAYOUT: tl.constexpr,
    BOUNDED: tl.constexpr, AMAX_MIN: tl.constexpr, AMAX_MAX: tl.constexpr, SCALE_RULE: tl.constexpr,
    DIVISOR: tl.constexpr, FLOOR_SCALE: tl.constexpr, AMAX_DTYPE: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    SCALE_MIN: tl.constexpr, POWER: tl.constexpr, AMAX_SCALING: tl.constexpr,
    GLOBAL_SCALING: tl.constexpr, TOTAL_SCALING: tl.constexpr, ZERO_GUARD: tl.constexpr,
    NAN_CODE: tl.constexpr, NAN_SIGN: tl.constexpr, ZERO_SIGN: tl.constexpr, SCALING: tl.constexpr,
    SCALED_DTYPE: tl.constexpr, CLAMP_MIN: tl.constexpr, CLAMP_MAX: tl.constexpr, CODES: tl.constexpr,
    CODEC: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """x, residual [T, H] with rows apart by their strides; y, total, codes [T, H]; factor one float32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < H
    z = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    if ADD:
        z += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + row * H + columns, z.to(total.dtype.element_ty), mask=mask)
        if NORM_OF_ROUNDED:
            z = rounded(z, SUM_DTYPE)
    mean = tl.div_rn(sum_of_squares(z, BLOCK, HALVINGS), H * 1.0)
    v = rounded(z * tl.div_rn(1.0, tl.sqrt_rn(mean + EPS)), NORM_DTYPE)
    if WEIGHTED:
        w = rounded(tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32), WEIGHT_DTYPE)
        if WEIGHT_BIAS != 0.0:
            w = rounded(w + WEIGHT_BIAS, WEIGHT_DTYPE)
        v = rounded(v * w, PRODUCT_DTYPE)
    v = rounded(v, OUT_DTYPE)
    if KEEP:
        tl.store(y + row * H + columns, v.to(y.dtype.element_ty), mask=mask)
    store_row_block(
        v, columns, 0, mask, row, factor, codes, scales, num_tokens, scales_stride, KIND, H, BLOCK, GROUP,
        LAYOUT, BOUNDED, AMAX_MIN, AMAX_MAX, SCALE_RULE, DIVISOR, FLOOR_SCALE, AMAX_DTYPE, SCALE_DTYPE,
        SCALE_MIN, POWER, AMAX_SCALING, GLOBAL_SCALING, TOTAL_SCALING, ZERO_GUARD, NAN_CODE, NAN_SIGN,
        ZERO_SIGN, SCALING, SCALED_DTYPE, CLAMP_MIN, CLAMP_MAX, CODES, CODEC, OVERFLOW,
    )  # fmt: skip
