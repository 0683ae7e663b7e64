"""These tests run in a process of their own (`test_interpreted.py`), under Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    import tests.kernels.interpreter  # noqa: F401  # puts the interpreter's conversions right
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that what a kernel does not write is seen; let values overflow."""
    empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        made = empty(self, *arguments, **options)
        return made.fill_(0x7F if not made.is_floating_point() else float("nan"))

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    np.seterr(all="ignore")
