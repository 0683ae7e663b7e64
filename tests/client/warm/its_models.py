"""What a user's own module might offer to `fuse-cache warm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import build_model


class Tied(nn.Module):
    """One weight under two names, a buffer, and values that only a real model has."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.linspace(-1, 1, 32))
        nn.init.normal_(self.embed.weight)

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        gated: Tensor = torch.nn.functional.silu(self.embed(ids) * self.table * scale)
        return torch.nn.functional.linear(gated, self.head.weight)


class Broken(nn.Module):
    """Three graphs: Dynamo breaks at each print."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return torch.relu(self.second(y))


class Window(nn.Module):
    """Another program beyond a window, as models with a sliding one are."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.near(x) if x.shape[0] <= 16 else self.far(x))


class Chooses(nn.Module):
    """Needs values: how many there are is not known without them."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.nonzero().sum()


def tied() -> nn.Module:
    """As it is."""
    return Tied()


def broken() -> nn.Module:
    """As it is."""
    return Broken()


def window() -> nn.Module:
    """As it is."""
    return Window()


def chooses() -> nn.Module:
    """As it is."""
    return Chooses()


def llama() -> nn.Module:
    """Two layers."""
    return build_model("llama", torch.bfloat16)


def gemma3() -> nn.Module:
    """Two layers."""
    return build_model("gemma3", torch.float32)


def mixtral() -> nn.Module:
    """Two layers."""
    return build_model("mixtral", torch.bfloat16)


def fails() -> nn.Module:
    """What a bug of the user's looks like."""
    raise ZeroDivisionError("no layers to share the width")


def no_module() -> Any:
    """Another kind of thing."""
    return 3
