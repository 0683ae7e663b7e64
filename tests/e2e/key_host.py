"""A host that compiles one small program after whatever its environment made of it: `key_host.py < options`.

KEY_HOST_SHARED: 1 writes each device as one shared object, 0 as objects of their own. KEY_HOST_BEFORE: how
many other graphs it traces and encodes first.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import Tensor, nn

from fuse_cache.client import report
from fuse_cache.client.graph import encode_graph


class Program(nn.Module):
    """A few operators with devices, and settings in a dict whose order is that of a set of texts."""

    def __init__(self, devices: tuple[torch.device, torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.settings = {name: len(name) for name in {"alpha", "be", "gam", "d"}}
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones(4, device=self.devices[0]) + torch.full((4,), 2.0, device=self.devices[1])
        weights: Tensor = self.linear(x).softmax(-1)
        return weights * one * self.settings["alpha"] + self.settings["be"]


def main() -> None:
    """Print the key, the source and how far the result is from eager, as JSON."""
    for number in range(int(os.environ.get("KEY_HOST_BEFORE", "0"))):
        torch._dynamo.reset()

        def other(x: Tensor, number: int = number) -> Tensor:
            return (x * number).relu() - number

        def encode(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
            encode_graph(gm, inputs)
            return gm

        torch.compile(other, backend=encode, fullgraph=True)(torch.randn(number + 1))
    torch._dynamo.reset()
    device = torch.device("cpu")
    shared = os.environ.get("KEY_HOST_SHARED") == "1"
    torch.manual_seed(0)
    program = Program((device, device if shared else torch.device("cpu"))).eval()
    x = torch.randn(3, 8)
    compiled = torch.compile(program, backend="fuse_cache", fullgraph=True, options=json.load(sys.stdin))
    with torch.no_grad():
        worst = float((compiled(x) - program(x)).abs().max())
    (row,) = report(json=True)
    print(json.dumps({"key": row["key"], "source": row["source"], "worst": worst}))


if __name__ == "__main__":
    main()
