"""Runs the few operators that Inductor computes while it compiles on the CPU, whatever device they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types its __init_subclass__ not
    """While it lasts, what is made on a GPU is made on the CPU: constants of one element."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value
