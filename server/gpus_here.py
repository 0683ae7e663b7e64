"""Which GPUs this machine has, asked of the driver's management library: starts no CUDA, loads no torch."""

from __future__ import annotations

import ctypes
import functools

_LIBRARY = "libnvidia-ml.so.1"  # comes with the driver
_OK = 0


@functools.cache
def architectures_here(library: str = _LIBRARY) -> tuple[str, ...]:
    """Return the architectures of this machine's GPUs, such as "sm_90", in the driver's order; none where
    there is no driver, or it does not answer."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != _OK:
        return ()
    try:
        return tuple(dict.fromkeys(_architectures(nvml)))
    finally:
        nvml.nvmlShutdown()


def _architectures(nvml: ctypes.CDLL) -> list[str]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _OK:
        return []
    found = []
    for index in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != _OK:
            continue
        numbers = ctypes.byref(major), ctypes.byref(minor)
        if nvml.nvmlDeviceGetCudaComputeCapability(device, *numbers) == _OK:
            found.append(f"sm_{major.value}{minor.value}")
    return found
