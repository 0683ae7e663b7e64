"""The last part of every kernel: quantise a block of one row and store codes and scales.

All kernels end here, fused or not, so that both give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fuse_cache.kernels.tl_numbers import (
    at_least,
    at_most,
    e2m1,
    e4m3fn,
    encode,
    from_e4m3fn,
    magnitude_bits,
    rounded,
    scaled,
    to_power_of_two,
)


@triton.jit
def scale_of(
    bits,
    factor,
    BOUNDED: tl.constexpr,
    AMAX_MIN: tl.constexpr,
    AMAX_MAX: tl.constexpr,
    SCALE_RULE: tl.constexpr,
    DIVISOR: tl.constexpr,
    FLOOR_SCALE: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    SCALE_MIN: tl.constexpr,
    POWER: tl.constexpr,
):
    """Return the scale of a group from the bits of its amax, by the steps of the reference (0.0: not)."""
    amax = bits.to(tl.float32, bitcast=True)
    floored = amax <= AMAX_MIN
    if AMAX_MIN != 0.0:
        amax = at_least(amax, AMAX_MIN)
    if AMAX_MAX != 0.0:
        amax = at_most(amax, AMAX_MAX)
    if BOUNDED:
        amax = at_most(amax, tl.load(factor))
    if SCALE_RULE == "divide":
        scale = tl.div_rn(amax, DIVISOR)
    elif SCALE_RULE == "multiply":
        scale = amax * DIVISOR
    elif SCALE_RULE == "inverse":
        scale = tl.div_rn(1.0, amax) * DIVISOR
    else:
        # One rounding, as float64 gives; its own floor is no float32.
        scale = tl.div_rn(DIVISOR, amax)
        if AMAX_MIN != 0.0:
            scale = tl.where(floored, FLOOR_SCALE, scale)
    scale = rounded(scale, SCALE_DTYPE)
    if SCALE_MIN != 0.0:
        scale = at_least(scale, SCALE_MIN)
    return to_power_of_two(scale, POWER)


@triton.jit
def store_static(
    v, columns, mask, row, factor, codes,
    H: tl.constexpr, SCALING: tl.constexpr, SCALED_DTYPE: tl.constexpr, CLAMP_MIN: tl.constexpr,
    CLAMP_MAX: tl.constexpr, CODES: tl.constexpr, CODEC: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Quantise with one scale. Also the second half of per-token quantisation: `factor` is a scale then."""
    code = encode(scaled(v, factor, SCALING, SCALED_DTYPE), CLAMP_MIN, CLAMP_MAX, CODES, CODEC, OVERFLOW)
    tl.store(codes + row * H + columns, code, mask=mask)


@triton.jit
def store_groups(
    v, columns, first, mask, row, factor, codes, scales, num_tokens, scales_stride,
    H: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LAYOUT: tl.constexpr,
    BOUNDED: tl.constexpr, AMAX_MIN: tl.constexpr, AMAX_MAX: tl.constexpr, SCALE_RULE: tl.constexpr,
    DIVISOR: tl.constexpr, FLOOR_SCALE: tl.constexpr, SCALE_DTYPE: tl.constexpr, SCALE_MIN: tl.constexpr,
    POWER: tl.constexpr,
    SCALING: tl.constexpr, SCALED_DTYPE: tl.constexpr, CLAMP_MIN: tl.constexpr, CLAMP_MAX: tl.constexpr,
    CODES: tl.constexpr, CODEC: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Quantise groups of a row. Scales of a column layout are `scales_stride` apart, rows to it are 0."""
    NUM: tl.constexpr = BLOCK // GROUP
    bits = tl.max(tl.reshape(magnitude_bits(v, mask), [NUM, GROUP]), 1)  # [NUM]
    scale = scale_of(
        bits, factor, BOUNDED, AMAX_MIN, AMAX_MAX, SCALE_RULE, DIVISOR, FLOOR_SCALE, SCALE_DTYPE,
        SCALE_MIN, POWER,
    )  # fmt: skip
    values = scaled(tl.reshape(v, [NUM, GROUP]), scale[:, None], SCALING, SCALED_DTYPE)
    code = encode(values, CLAMP_MIN, CLAMP_MAX, CODES, CODEC, OVERFLOW)
    tl.store(codes + row * H + columns, tl.reshape(code, [BLOCK]), mask=mask)
    group = first // GROUP + tl.arange(0, NUM)
    if LAYOUT == "row":
        tl.store(scales + row * (H // GROUP) + group, scale, mask=group < H // GROUP)
    else:
        if LAYOUT == "packed":
            words: tl.constexpr = (H // GROUP + 3) // 4
            bits = scale.to(tl.int32, bitcast=True)
            exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
            exponent = tl.where(group < H // GROUP, tl.minimum(exponent, 255) << (group % 4) * 8, 0)
            value = tl.sum(tl.reshape(exponent, [NUM // 4, 4]), 1)
            column = first // GROUP // 4 + tl.arange(0, NUM // 4)
            inside = column < words
        else:
            value = scale
            column = group
            inside = group < H // GROUP
        place = scales + column.to(tl.int64) * scales_stride
        tl.store(place + row, value, mask=inside)
        for padding in range(num_tokens + row, scales_stride, num_tokens):
            tl.store(place + padding, tl.zeros_like(value), mask=inside)


@triton.jit
def _nvfp4_place(row, group, TILES: tl.constexpr):
    """Return where the scale of a token and group lies among tiles of 128 by 4."""
    tile = row // 128 * TILES + group // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4


@triton.jit
def store_nvfp4(
    v, first, mask, row, factor, codes, scales, num_tokens, scales_stride,
    H: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr, AMAX_SCALING: tl.constexpr,
    AMAX_DTYPE: tl.constexpr, GLOBAL_SCALING: tl.constexpr, TOTAL_SCALING: tl.constexpr,
    SCALE_MIN: tl.constexpr, SCALING: tl.constexpr, ZERO_GUARD: tl.constexpr, NAN_CODE: tl.constexpr,
    NAN_SIGN: tl.constexpr, ZERO_SIGN: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """Quantise groups of 16 to e2m1 with scales in e4m3. `scales_stride` is the padded token count."""
    NUM: tl.constexpr = BLOCK // 16
    bits = tl.max(tl.reshape(magnitude_bits(v, mask), [NUM, 16]), 1)  # [NUM]
    amax = bits.to(tl.float32, bitcast=True)
    if AMAX_SCALING == "divide":
        amax = tl.div_rn(amax, 6.0)
    else:
        amax = amax * (1.0 / 6.0)
    amax = rounded(amax, AMAX_DTYPE)
    scale = amax
    if GLOBAL_SCALING != "none" or TOTAL_SCALING != "none":
        whole = tl.load(factor)
    if GLOBAL_SCALING == "divide":
        scale = tl.div_rn(amax, whole)
    if GLOBAL_SCALING == "multiply":
        scale = amax * whole
    if SCALE_MIN != 0.0:
        scale = at_least(scale, SCALE_MIN)
    scale_code = e4m3fn(at_most(scale, 448.0), CODEC, 0x7E)
    scale = from_e4m3fn(scale_code, CODEC)
    total = scale
    if TOTAL_SCALING == "multiply":
        total = scale * whole
    if TOTAL_SCALING == "divide":
        total = tl.div_rn(scale, whole)
    if TOTAL_SCALING == "reciprocal":
        divisor = whole
        if ZERO_GUARD == "reciprocals":
            divisor = tl.where(whole == 0.0, float("inf"), whole)
        total = scale * tl.div_rn(1.0, divisor)
    values = tl.reshape(v, [NUM, 16])
    if SCALING == "reciprocal":
        if ZERO_GUARD == "reciprocals":
            total = tl.where(total == 0.0, float("inf"), total)
        inverse = tl.div_rn(1.0, total)
        if ZERO_GUARD == "scale":
            inverse = tl.where(scale == 0.0, 0.0, inverse)
        values = values * inverse[:, None]
    else:
        values = tl.div_rn(values, total[:, None])
    codes_of_values = e2m1(values, NAN_CODE, NAN_SIGN, ZERO_SIGN)
    low, high = tl.split(tl.reshape(codes_of_values, [BLOCK // 2, 2]))
    pair = first // 2 + tl.arange(0, BLOCK // 2)
    tl.store(codes + row * (H // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=pair < H // 2)
    group = first // 16 + tl.arange(0, NUM)
    if LAYOUT == "row":
        tl.store(scales + row * (H // 16) + group, scale_code, mask=group < H // 16)
    else:
        TILES: tl.constexpr = (H // 16 + 3) // 4
        scale_code = tl.where(group < H // 16, scale_code, 0).to(tl.uint8)
        tl.store(scales + _nvfp4_place(row, group, TILES), scale_code, mask=group < TILES * 4)
        # Sixteen rows at a time, of which each program has every num_tokens-th.
        for padding in range(num_tokens + row, scales_stride, num_tokens * 16):
            rows = padding + tl.arange(0, 16)[:, None] * num_tokens
            place = _nvfp4_place(rows, group[None, :], TILES)
            inside = (rows < scales_stride) & (group[None, :] < TILES * 4)
            tl.store(scales + place, tl.zeros([16, NUM], tl.uint8), mask=inside)


@triton.jit
def store_row_block(
    v, columns, first, mask, row, factor, codes, scales, num_tokens, scales_stride,
    KIND: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LAYOUT: tl.constexpr,
    BOUNDED: tl.constexpr, AMAX_MIN: tl.constexpr, AMAX_MAX: tl.constexpr, SCALE_RULE: tl.constexpr,
    DIVISOR: tl.constexpr, FLOOR_SCALE: tl.constexpr, AMAX_DTYPE: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    SCALE_MIN: tl.constexpr, POWER: tl.constexpr, AMAX_SCALING: tl.constexpr,
    GLOBAL_SCALING: tl.constexpr, TOTAL_SCALING: tl.constexpr, ZERO_GUARD: tl.constexpr,
    NAN_CODE: tl.constexpr, NAN_SIGN: tl.constexpr, ZERO_SIGN: tl.constexpr, SCALING: tl.constexpr,
    SCALED_DTYPE: tl.constexpr, CLAMP_MIN: tl.constexpr, CLAMP_MAX: tl.constexpr, CODES: tl.constexpr,
    CODEC: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Quantise by KIND: "static", "token" (the block holds the whole row), "group", "nvfp4", or "none"."""
    if KIND == "static":
        store_static(
            v, columns, mask, row, tl.load(factor), codes, H, SCALING, SCALED_DTYPE, CLAMP_MIN, CLAMP_MAX,
            CODES, CODEC, OVERFLOW,
        )  # fmt: skip
    if KIND == "token":
        scale = scale_of(
            tl.max(magnitude_bits(v, mask), 0), factor, BOUNDED, AMAX_MIN, AMAX_MAX, SCALE_RULE, DIVISOR,
            FLOOR_SCALE, SCALE_DTYPE, SCALE_MIN, POWER,
        )  # fmt: skip
        tl.store(scales + row, scale)
        store_static(
            v, columns, mask, row, scale, codes, H, SCALING, SCALED_DTYPE, CLAMP_MIN, CLAMP_MAX, CODES,
            CODEC, OVERFLOW,
        )  # fmt: skip
    if KIND == "group":
        store_groups(
            v, columns, first, mask, row, factor, codes, scales, num_tokens, scales_stride, H, BLOCK, GROUP,
            LAYOUT, BOUNDED, AMAX_MIN, AMAX_MAX, SCALE_RULE, DIVISOR, FLOOR_SCALE, SCALE_DTYPE, SCALE_MIN,
            POWER, SCALING, SCALED_DTYPE, CLAMP_MIN, CLAMP_MAX, CODES, CODEC, OVERFLOW,
        )  # fmt: skip
    if KIND == "nvfp4":
        store_nvfp4(
            v, first, mask, row, factor, codes, scales, num_tokens, scales_stride, H, BLOCK, LAYOUT,
            AMAX_SCALING, AMAX_DTYPE, GLOBAL_SCALING, TOTAL_SCALING, SCALE_MIN, SCALING, ZERO_GUARD, NAN_CODE,
            NAN_SIGN, ZERO_SIGN, CODEC,
        )  # fmt: skip
