"""Small programs as an inference host: run one by name in a process of its own and print what happened as
JSON.

`python tests/e2e/small_host.py NAME` reads the backend's options as JSON from stdin. With "linger" among
them, the process waits for a line on stdin before it compiles, so that a test can do something to the daemon
meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def mlp(options: dict[str, Any]) -> float:
    """A two-layer network at both ends of each range, at size 1, and outside of all ranges in mode auto."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 4)]
    model = torch.nn.Sequential(*layers).eval()
    compiled = torch.compile(model, backend="fuse_cache", fullgraph=True, options=options)
    sizes = [4, 1, 5, 16] + ([20] if options.get("mode") == "auto" else [])
    worst = 0.0
    for size in sizes:
        x = torch.randn(size, 8)
        if size == sizes[0]:
            torch._dynamo.mark_dynamic(x, 0)
        worst = max(worst, float((compiled(x) - model(x)).abs().max()))
    return worst


def one_size(options: dict[str, Any]) -> float:
    """A static graph."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(6, 8)

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x).sum(-1)

    compiled = torch.compile(run, backend="fuse_cache", fullgraph=True, options=options)
    return float((compiled(x) - run(x)).abs().max())


def optional(options: dict[str, Any], *, reverse: bool = False) -> float:
    """Case 50: an argument that is None or a tensor, in both orders, and one weight under two names."""
    import torch

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((4,), 3.0))

        def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
            return x * self.w if image is None else x * self.w + image

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Plain()

        def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
            result: torch.Tensor = self.base(x, image)
            return result

    torch.manual_seed(0)
    x, image = torch.randn(2, 4), torch.randn(2, 4)
    worst = 0.0
    for model in (Plain(), Wrapped()):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="fuse_cache", fullgraph=True, options=options)
        for argument in (image, None) if reverse else (None, image):
            worst = max(worst, float((compiled(x, argument) - model(x, argument)).abs().max()))
    return worst


def optional_reversed(options: dict[str, Any]) -> float:
    """The same the other way round."""
    return optional(options, reverse=True)


def sizes(options: dict[str, Any]) -> float:
    """A size among the results, and one that was computed from it."""
    import torch

    def run(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        return x.sin() * 2, x.shape[0], x.shape[0] * 2 + x.shape[1]

    compiled = torch.compile(run, backend="fuse_cache", fullgraph=True, dynamic=True, options=options)
    worst = 0.0
    for rows in (4, 7):
        x = torch.randn(rows, 3)
        (value, *got), (expected, *wanted) = compiled(x), run(x)
        assert got == wanted
        worst = max(worst, float((value - expected).abs().max()))
    return worst


def normed(options: dict[str, Any]) -> float:
    """Two norms with their quantisations, and one behind a reshape."""
    import torch
    from torch import Tensor

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def quantise(x: Tensor, scale: Tensor) -> Tensor:
        return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    def run(x: Tensor, y: Tensor, z: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fused = quantise(norm(x, weight), scale), quantise(norm(y, weight), scale)
        return *fused, quantise(norm(z, weight).view(-1, 8, 8), scale)

    torch.manual_seed(0)
    rows = [torch.randn(6, 64).to(torch.bfloat16) for _ in range(3)]
    arguments = *rows, torch.randn(64).to(torch.bfloat16), torch.tensor(0.02)
    compiled = torch.compile(run, backend="fuse_cache", fullgraph=True, options=options)
    pairs = zip(compiled(*arguments), run(*arguments), strict=True)
    return max(float((one.float() - other.float()).abs().max()) for one, other in pairs)


PROGRAMS: dict[str, Callable[[dict[str, Any]], float]] = {
    "mlp": mlp,
    "one_size": one_size,
    "normed": normed,
    "optional": optional,
    "optional_reversed": optional_reversed,
    "sizes": sizes,
}


def host_environment(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a host whose HOME and caches lie in `folder`."""
    return {
        **os.environ,
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        **env,
    }


def start(name: str, options: dict[str, Any], folder: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a host; with "linger" it prints "ready" and waits for a line."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, __file__, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=host_environment(folder, env),
        cwd=folder,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(options) + "\n")
    process.stdin.flush()
    return process


def finish(process: subprocess.Popen[str], timeout_s: float = 300) -> dict[str, Any]:
    """Let the host run to its end, and return what happened."""
    with contextlib.suppress(BrokenPipeError):
        output, _ = process.communicate("\n", timeout=timeout_s)
    assert process.returncode == 0, output
    outcome: dict[str, Any] = json.loads(output.splitlines()[-1])
    return outcome


def run(name: str, options: dict[str, Any], folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Run a host from start to end."""
    return finish(start(name, options, folder, env))


def main(name: str) -> None:
    """Be the host."""
    options = json.loads(sys.stdin.readline())
    import torch

    from fuse_cache.client import report

    if options.pop("linger", False):
        print("ready", flush=True)
        sys.stdin.readline()
    began = time.monotonic()
    with torch.no_grad():
        worst = PROGRAMS[name](options)
    print(json.dumps({"worst": worst, "seconds": time.monotonic() - began, "graphs": report(json=True)}))


if __name__ == "__main__":
    main(sys.argv[1])
