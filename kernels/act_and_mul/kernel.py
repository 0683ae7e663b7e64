"""Gated activations with or without a quantisation, and quantisations alone, as one Triton kernel.

A program holds BLOCK columns of one row. Where a scale needs the whole row and the row is longer, it goes
over the row twice: for the largest value, which no order changes, and for the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fuse_cache.kernels.tl_numbers import magnitude_bits, rounded
from fuse_cache.kernels.tl_quantise import scale_of, store_row_block, store_static


@triton.jit
def activation(g, ACTIVATION: tl.constexpr, SIGMOID_DTYPE: tl.constexpr):
    """Return the activation in float32. tanh is spelled as a sigmoid, which cancels nothing."""
    if ACTIVATION == "silu":
        g = tl.div_rn(g, 1.0 + tl.exp(-g))
    if ACTIVATION == "swish":
        g = g * rounded(tl.div_rn(1.0, 1.0 + tl.exp(-g)), SIGMOID_DTYPE)
    if ACTIVATION == "gelu":
        g = g * 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        # 1 + tanh(u) = 2 * sigmoid(2 u)
        u = 1.5957691216057308 * g * (1.0 + 0.044715 * g * g)
        g = tl.div_rn(g, 1.0 + tl.exp(-u))
    return g


@triton.jit
def produce(
    gate, up, columns, mask,
    ACTIVATION: tl.constexpr, SIGMOID_DTYPE: tl.constexpr, ACT_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Return activation(gate) * up of these columns; gate as it is for the activation "none"."""
    v = tl.load(gate + columns, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION != "none":
        v = rounded(activation(v, ACTIVATION, SIGMOID_DTYPE), ACT_DTYPE)
        v = rounded(v * tl.load(up + columns, mask=mask, other=0.0).to(tl.float32), PRODUCT_DTYPE)
        v = rounded(v, OUT_DTYPE)
    return v


@triton.jit
def act_and_mul_kernel(
    gate, up, y, factor, codes, scales, num_tokens, gate_stride, up_stride, scales_stride,
    PACKED_HALVES: tl.constexpr, ACTIVATION: tl.constexpr, SIGMOID_DTYPE: tl.constexpr,
    ACT_DTYPE: tl.constexpr, PRODUCT_DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr, KEEP: tl.constexpr,
    KIND: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LAYOUT: tl.constexpr,
    BOUNDED: tl.constexpr, AMAX_MIN: tl.constexpr, AMAX_MAX: tl.constexpr, SCALE_RULE: tl.constexpr,
    DIVISOR: tl.constexpr, FLOOR_SCALE: tl.constexpr, AMAX_DTYPE: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    SCALE_MIN: tl.constexpr, POWER: tl.constexpr, AMAX_SCALING: tl.constexpr,
    GLOBAL_SCALING: tl.constexpr, TOTAL_SCALING: tl.constexpr, ZERO_GUARD: tl.constexpr,
    NAN_CODE: tl.constexpr, NAN_SIGN: tl.constexpr, ZERO_SIGN: tl.constexpr, SCALING: tl.constexpr,
    SCALED_DTYPE: tl.constexpr, CLAMP_MIN: tl.constexpr, CLAMP_MAX: tl.constexpr, CODES: tl.constexpr,
    CODEC: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """gate, up [T, H] with rows apart by their strides (PACKED_HALVES: up follows gate in the same row)."""
    row = tl.program_id(0).to(tl.int64)
    gate += row * gate_stride
    if PACKED_HALVES:
        up = gate + H
    else:
        up += row * up_stride
    if KIND == "token" and BLOCK < H:
        largest = tl.max(tl.zeros([BLOCK], tl.int32), 0)
        for first in range(0, H, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            mask = columns < H
            v = produce(
                gate, up, columns, mask, ACTIVATION, SIGMOID_DTYPE, ACT_DTYPE, PRODUCT_DTYPE, OUT_DTYPE
            )
            largest = tl.maximum(largest, tl.max(magnitude_bits(v, mask), 0))
        scale = scale_of(
            largest, factor, BOUNDED, AMAX_MIN, AMAX_MAX, SCALE_RULE, DIVISOR, FLOOR_SCALE, SCALE_DTYPE,
            SCALE_MIN, POWER,
        )  # fmt: skip
        tl.store(scales + row, scale)
        for first in range(0, H, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            mask = columns < H
            v = produce(
                gate, up, columns, mask, ACTIVATION, SIGMOID_DTYPE, ACT_DTYPE, PRODUCT_DTYPE, OUT_DTYPE
            )
            if KEEP:
                tl.store(y + row * H + columns, v.to(y.dtype.element_ty), mask=mask)
            store_static(
                v, columns, mask, row, scale, codes, H, SCALING, SCALED_DTYPE, CLAMP_MIN, CLAMP_MAX, CODES,
                CODEC, OVERFLOW,
            )  # fmt: skip
    else:
        first = tl.program_id(1) * BLOCK
        columns = first + tl.arange(0, BLOCK)
        mask = columns < H
        v = produce(gate, up, columns, mask, ACTIVATION, SIGMOID_DTYPE, ACT_DTYPE, PRODUCT_DTYPE, OUT_DTYPE)
        if KEEP:
            tl.store(y + row * H + columns, v.to(y.dtype.element_ty), mask=mask)
        store_row_block(
            v, columns, first, mask, row, factor, codes, scales, num_tokens, scales_stride, KIND, H, BLOCK,
            GROUP, LAYOUT, BOUNDED, AMAX_MIN, AMAX_MAX, SCALE_RULE, DIVISOR, FLOOR_SCALE, AMAX_DTYPE,
            SCALE_DTYPE, SCALE_MIN, POWER, AMAX_SCALING, GLOBAL_SCALING, TOTAL_SCALING, ZERO_GUARD, NAN_CODE,
            NAN_SIGN, ZERO_SIGN, SCALING, SCALED_DTYPE, CLAMP_MIN, CLAMP_MAX, CODES, CODEC, OVERFLOW,
        )  # fmt: skip
