"""Roundings and codes for Triton kernels, bit for bit those of the references.

Divisions and roots are IEEE's (`div_rn`, `sqrt_rn`): Triton's `/` is not. Nothing after the scaling adds to a
product, which ptxas could contract; what comes before it is one function in both forms of a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(v, DTYPE: tl.constexpr):
    """Round float32 values to a dtype by name, "none" for not at all."""
    if DTYPE == "bfloat16":
        v = v.to(tl.bfloat16).to(tl.float32)
    if DTYPE == "float16":
        v = v.to(tl.float16).to(tl.float32)
    return v


@triton.jit
def at_least(v, bound):
    """Clamp from below. NaN stays NaN."""
    return tl.maximum(v, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(v, bound):
    """Clamp from above. NaN stays NaN."""
    return tl.minimum(v, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude_bits(v, mask):
    """Return |v| as int32 bits, 0 where masked: they order as the values do, with NaN above infinity."""
    return tl.where(mask, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def sum_of_squares(z, BLOCK: tl.constexpr, HALVINGS: tl.constexpr):
    """Return the sum of z * z of [BLOCK] values, BLOCK = 2 ** (HALVINGS + 1), by a tree of neighbours.

    Triton may lay values out over threads in another way where a kernel stores more, and `tl.sum` adds as
    they lie. A sum of two is the same both ways, so that this tree is that of the indices in every kernel.
    The first step is a fused multiply-add by name: left to ptxas, which of both squares is rounded depends on
    the layout. Seen on an H200: with `tl.sum(z * z)` 10 of 2.9 million results of fused and unfused differed.
    """
    left, right = tl.split(tl.reshape(z, [BLOCK // 2, 2]))
    s = tl.fma(left, left, right * right)
    for step in tl.static_range(HALVINGS):
        s = tl.sum(tl.reshape(s, [BLOCK >> (step + 2), 2]), 1)
    return tl.sum(s, 0)


@triton.jit
def to_power_of_two(scale, POWER: tl.constexpr):
    """Round scales up to powers of two: "exact" by the bits, "masked" without an exception for NaN, "clamped"
    to the exponents 1 to 254, "log2" by way of log2, "none"."""
    if POWER == "exact":
        bits = scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        up = (bits + 0x7FFFFF) & 0x7F800000
        scale = tl.where(bits < 0x7F800000, up, bits).to(tl.float32, bitcast=True)
    if POWER == "masked":
        bits = scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    if POWER == "clamped":
        up = (scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF) + 0x7FFFFF
        # Infinity and NaN have grown over the sign: to 255 or more, as unsigned.
        exponent = (up >> 23) & 0x1FF
        scale = (tl.minimum(tl.maximum(exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
    if POWER == "log2":
        scale = tl.exp2(tl.ceil(tl.log2(scale)))
    return scale


@triton.jit
def scaled(v, scale, SCALING: tl.constexpr, DTYPE: tl.constexpr):
    """Scale values by "divide", "reciprocal" (as it is or rounded) or "multiply", and round to DTYPE."""
    if SCALING == "divide":
        v = tl.div_rn(v, scale)
    if SCALING == "reciprocal":
        v = v * tl.div_rn(1.0, scale)
    if SCALING == "reciprocal_bfloat16":
        v = v * rounded(tl.div_rn(1.0, scale), "bfloat16")
    if SCALING == "reciprocal_float16":
        v = v * rounded(tl.div_rn(1.0, scale), "float16")
    if SCALING == "multiply":
        v = v * scale
    return rounded(v, DTYPE)


@triton.jit
def _e4m3fn(v, OVERFLOW: tl.constexpr):
    """Encode by integers: bias 7, 448 = 0x7E, NaN = 0x7F. OVERFLOW is the code of what is larger."""
    bits = v.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormals: 16384 has its last bit at 2^-9, so that the addition rounds there.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    code = tl.where(magnitude < 0x3C800000, shifted.to(tl.int32, bitcast=True) - 0x46800000, normal)
    code = tl.where(code > 0x7E, OVERFLOW, code)
    code = code | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def _e4m3fnuz(v):
    """Encode by integers: bias 8, 240 = 0x7F, no negative zero; NaN and what is larger = 0x80."""
    bits = v.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (119 << 3)
    shifted = magnitude.to(tl.float32, bitcast=True) + 8192.0
    code = tl.where(magnitude < 0x3C000000, shifted.to(tl.int32, bitcast=True) - 0x46000000, normal)
    large = (code > 0x7F) | (magnitude > 0x7F800000)
    code = tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))
    return tl.where(large, 0x80, code).to(tl.uint8)


@triton.jit
def _e5m2(v, OVERFLOW: tl.constexpr):
    """Encode by integers: bias 15, 57344 = 0x7B, infinity = 0x7C, NaN = 0x7F. OVERFLOW as in `_e4m3fn`."""
    bits = v.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21) - (112 << 2)
    # Subnormals: 128 has its last bit at 2^-16.
    shifted = magnitude.to(tl.float32, bitcast=True) + 128.0
    code = tl.where(magnitude < 0x38800000, shifted.to(tl.int32, bitcast=True) - 0x43000000, normal)
    code = tl.where(code > 0x7B, OVERFLOW, code)
    code = tl.where(magnitude == 0x7F800000, 0x7C, code) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def e4m3fn(v, CODEC: tl.constexpr, OVERFLOW: tl.constexpr):
    """Encode float32 as e4m3fn, as uint8: by the instruction ("hardware") or by integers ("software")."""
    if CODEC == "hardware":
        code = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        if OVERFLOW == 0x7F:
            code = tl.where(tl.abs(v) > 464.0, 0x7F | ((v < 0).to(tl.int32) << 7), code).to(tl.uint8)
    else:
        code = _e4m3fn(v, OVERFLOW)
    return code


@triton.jit
def encode(
    v,
    CLAMP_MIN: tl.constexpr,
    CLAMP_MAX: tl.constexpr,
    CODES: tl.constexpr,
    CODEC: tl.constexpr,
    OVERFLOW: tl.constexpr,
):
    """Clamp (0.0: not) and encode as "float8_e4m3fn", "..._e4m3fnuz", "..._e5m2" or "int8", all as 8 bits."""
    if CLAMP_MIN != 0.0:
        v = at_least(v, CLAMP_MIN)
    if CLAMP_MAX != 0.0:
        v = at_most(v, CLAMP_MAX)
    if CODES == "int8":
        # Bounds are integers, so that rounding may follow: 1.5 * 2^23 has its last bit at 1.
        code = (v + 12582912.0 - 12582912.0).to(tl.int32).to(tl.int8)
    elif CODES == "float8_e4m3fnuz":
        code = _e4m3fnuz(v)
    elif CODES == "float8_e5m2":
        code = _e5m2(v, OVERFLOW)
    else:
        code = e4m3fn(v, CODEC, OVERFLOW)
    return code


@triton.jit
def e2m1(v, NAN_CODE: tl.constexpr, NAN_SIGN: tl.constexpr, ZERO_SIGN: tl.constexpr):
    """Encode float32 as e2m1, as int32: to the nearest, ties to even, saturating at 6.

    NaN is NAN_CODE (-1: what is left of its bits), with its sign if NAN_SIGN; -0.0 is 8 or, without
    ZERO_SIGN, 0.
    """
    bits = v.to(tl.int32, bitcast=True)
    sign = (bits >> 28) & 8
    a = tl.abs(v)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code = (code + (a > 5.0).to(tl.int32)) | sign
    if not ZERO_SIGN:
        code = tl.where(a == 0.0, 0, code)
    if NAN_CODE == -1:
        magnitude = bits & 0x7FFFFFFF
        nan = ((magnitude - 0x3EE00001 + ((magnitude >> 22) & 1)) >> 22) & 7
    else:
        nan = tl.zeros_like(code) + NAN_CODE
    if NAN_SIGN:
        nan = nan | sign
    return tl.where(a != a, nan, code)


@triton.jit
def from_e4m3fn(code, CODEC: tl.constexpr):
    """Decode e4m3fn codes without a sign, given as uint8. Exact on every target.

    Where the instruction encodes, it must decode too: codes come in pairs then, and ptxas of CUDA 13 for
    sm_90 (in Triton 3.6) drops the shift by which integers would take the second of a pair.
    """
    if CODEC == "hardware":
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.int32)
        normal = ((wide << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(wide < 8, wide.to(tl.float32) * 0.001953125, normal)
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
    return value
