"""Which code formats a target has kernels for, and how they are encoded there. Torch-free: a table."""

from __future__ import annotations

from typing import Final

HARDWARE: Final = "hardware"  # one instruction for two values
SOFTWARE: Final = "software"  # integer operations, the same bits

E4M3FN: Final = "float8_e4m3fn"
E4M3FNUZ: Final = "float8_e4m3fnuz"
E5M2: Final = "float8_e5m2"
INT8: Final = "int8"
E2M1: Final = "float4_e2m1"

# sm_80 and sm_86 have no conversion to e4m3; no NVIDIA GPU has one to e4m3fnuz, and gfx94x has no other FP8.
_SM_80: Final = {
    E4M3FN: SOFTWARE,
    E4M3FNUZ: SOFTWARE,
    E5M2: SOFTWARE,
    INT8: HARDWARE,
    E2M1: SOFTWARE,
}
_SM_89: Final = {**_SM_80, E4M3FN: HARDWARE}
CODECS: Final[dict[str, dict[str, str]]] = {
    "sm_80": _SM_80,
    "sm_86": _SM_80,
    "sm_89": _SM_89,
    "sm_90": _SM_89,
    "sm_100": _SM_89,
    "sm_103": _SM_89,
    "sm_120": _SM_89,
    "gfx942": {E4M3FNUZ: SOFTWARE, INT8: HARDWARE, E2M1: SOFTWARE},
    "gfx950": {E4M3FN: SOFTWARE, E5M2: SOFTWARE, INT8: HARDWARE, E2M1: SOFTWARE},
}


def codec(target: str, codes: str) -> str | None:
    """Return how a target encodes a format, None when it has no kernel for it."""
    return CODECS.get(target, {}).get(codes)
