"""What a graph is to be compiled for: a name that the host can run and, where there is a choice, that the
daemon builds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuse_cache.proto.cpu_target import CPU_TARGETS, refusal


def device_of(example_inputs: Sequence[object]) -> str:
    """Return the type of the device that the graph runs on: that of its first input that is not on the CPU,
    else "cpu"."""
    for value in example_inputs:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.device.type
    return "cpu"


def choose_target(option: str, device: str, offered: Sequence[str]) -> str:
    """Return the target for a graph on `device`: the option's, or for "auto" the best that this host runs and
    a daemon offers.

    Where no offer is known, or none fits, it is the best of this host, and the daemon says what it thinks of
    that. Empty: this version has no target for this host.
    """
    if option != "auto":
        return option
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"
    if device != "cpu":
        return ""
    runnable = [target.name for target in CPU_TARGETS if refusal(target.name) is None]
    return next((name for name in runnable if name in offered), runnable[0] if runnable else "")
