"""Artifacts for tests: one seed per machine, one build per graph and test session."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fuse_cache.client.ambient import capture_ambient
from fuse_cache.client.graph import Encoded, encode_graph
from fuse_cache.proto.cpu_target import host_cpu_target
from fuse_cache.proto.inductor_options import check_options
from fuse_cache.proto.pass_config import PassConfig, PassContext
from fuse_cache.proto.request import Ambient, Range, RequestFields
from fuse_cache.server.worker import isa, seed
from fuse_cache.server.worker.compile import build
from fuse_cache.server.worker.protocol import Built, Job
from tests.models import Captured, capture

TARGET = host_cpu_target() or "cpu-avx2"


@functools.cache
def seed_dir(target: str = TARGET) -> Path:
    """Return a seed for `target`, made once per machine and version of what makes it: it takes 10 s and 150
    MB.
    """
    identity = (
        Path(isa.__file__).read_bytes() + Path(seed.__file__).read_bytes() + str(torch.__version__).encode()
    )
    name = f"fuse-cache-test-seed-{os.getuid()}-{hashlib.sha256(identity).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir()) / name
    seed.make_seed(folder, (target,))
    return folder


@contextmanager
def inductor_folder(folder: Path) -> Iterator[None]:
    """Give Inductor a folder of its own, as a worker has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield


class Block(nn.Module):
    """The smallest thing that has all a decoder layer has: a norm, a linear layer, a cache that is written,
    a view as output.
    """

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.linear = nn.Linear(32, 32, bias=False)
        self.register_buffer("table", torch.linspace(-1.0, 1.0, 16))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.pow(2).mean(-1, keepdim=True)
        hidden = self.linear(x * torch.rsqrt(mean + 1e-6) * self.norm)
        cache.add_(hidden)
        return functional.silu(cache) * self.table.repeat(2), cache.view(-1, 32)


def block() -> Block:
    """Make the block, with the same weights in every process."""
    torch.manual_seed(0)
    return Block().eval()


def block_inputs(batch: int) -> tuple[Tensor, Tensor]:
    """Make inputs of the block."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 4, 32, generator=generator), torch.randn(batch, 4, 32, generator=generator)


def capture_block() -> Captured:
    """Trace the block with a dynamic batch."""
    inputs = block_inputs(6)
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    return capture(block(), *inputs)


def compiled_block(lower: int = 1, upper: int = 64, target: str = TARGET) -> Compiled:
    """Return the block's artifact for a range of batches, built once per process."""
    return _compiled_block(lower, upper, target)


@functools.cache
def _compiled_block(lower: int, upper: int, target: str) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="fuse-cache-test-") as folder:
        compile_range = Range(symbol=0, lower=lower, upper=upper)
        return compile_captured(capture_block(), Path(folder), target=target, compile_range=compile_range)


@dataclass(frozen=True)
class Compiled:
    """A graph and what was built from it."""

    captured: Captured
    encoded: Encoded
    built: Built
    request: RequestFields


def compile_captured(
    captured: Captured,
    folder: Path,
    *,
    target: str = TARGET,
    compile_range: Range | None = None,
    ambient: Ambient | None = None,
    pass_config: PassConfig | None = None,
    inductor_options: Mapping[str, object] | None = None,
    stages: list[str] | None = None,
) -> Compiled:
    """Encode what Dynamo captured and build it in this process, as a worker would."""
    encoded = encode_graph(captured.gm, captured.example_inputs)
    resolved = (pass_config or PassConfig()).resolve(PassContext(target=target))
    if ambient is None:
        with torch.no_grad():
            ambient = capture_ambient()
    request = RequestFields(
        graph_digest=encoded.digest,
        pass_config=resolved.encode(),
        range=compile_range or Range(),
        target=target,
        inductor_options=check_options(inductor_options or {}),
        ambient=ambient,
    )
    job = Job(
        job_id="test", dir=folder, graph=encoded.data, request=request.encode(), seed_dir=seed_dir(target)
    )
    told = [] if stages is None else stages
    with inductor_folder(folder / "inductor"):
        built = build(job, lambda stage, detail: told.append(stage))
    return Compiled(captured, encoded, built, request)
