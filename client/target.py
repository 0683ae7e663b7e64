"""What a graph is to be compiled for: a name that the host can run, the facts of its GPU that change code,
and, where there is a choice, what the daemon builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuse_cache.proto.cpu_target import CPU_TARGETS, refusal
from fuse_cache.proto.target_facts import Facts, requested


@dataclass(frozen=True, slots=True)
class Target:
    """A target as a request names it. An empty name: this version has none for this host."""

    name: str
    facts: Facts = ()


def device_of(example_inputs: Sequence[object]) -> torch.device:
    """Return the device that the graph runs on: that of its first input that is not on the CPU, else the
    CPU."""
    for value in example_inputs:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")


def choose_target(option: str, device: torch.device, offered: Sequence[str]) -> Target:
    """Return the target for a graph on `device`: the option's, or for "auto" the best that this host runs and
    a daemon offers.

    Where no offer is known, or none fits, it is the best of this host, and the daemon says what it thinks of
    that.
    """
    if option != "auto":
        return Target(*requested(option))
    if device.type == "cuda":
        return _own_gpu(device)
    if device.type != "cpu":
        return Target("")
    runnable = [target.name for target in CPU_TARGETS if refusal(target.name) is None]
    return Target(next((name for name in runnable if name in offered), runnable[0] if runnable else ""))


def _own_gpu(device: torch.device) -> Target:
    """Return the target of a GPU of this host, as its driver describes it."""
    found = torch.cuda.get_device_properties(device)
    facts = {
        "multiprocessors": found.multi_processor_count,
        "threads": found.max_threads_per_multi_processor,
    }
    return Target(f"sm_{found.major}{found.minor}", tuple(sorted(facts.items())))
