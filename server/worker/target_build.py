"""Makes this process build for a request's target, whatever machine it runs on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from fuse_cache.kernels.targets.cpu_wheel import is_cpu_wheel, register_guard
from fuse_cache.kernels.targets.present import compiling_here, is_present
from fuse_cache.kernels.targets.shim import compiling_for
from fuse_cache.proto.gpu_target import ARCHITECTURES, is_gpu_target
from fuse_cache.proto.target_facts import gpu_of
from fuse_cache.server.worker.errors import TargetUnavailable
from fuse_cache.server.worker.isa import ISA_BUILDS, building_for
from fuse_cache.server.worker.protocol import Job
from fuse_cache.server.worker.seed import HEADERS, use_headers
from fuse_cache.server.worker.unloaded import unloaded_kernels

# Of this process, which makes one build. Line tables hold the paths of every source file.
_TRITON: Final = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_STORE_BINARY_ONLY": "1"}


@contextlib.contextmanager
def building(
    job: Job, target: str, facts: Iterable[tuple[str, object]] = ()
) -> Iterator[Mapping[str, object]]:
    """Build for `target` in the job's own folder while the context lasts, with these patches of Inductor's
    configuration.

    Raises:
        TargetUnavailable: no such target; the message lists those there are.
    """
    cache = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(job.dir / "inductor")))
    cache.mkdir(parents=True, exist_ok=True)
    if target in ISA_BUILDS:
        headers = job.dir / HEADERS
        if job.seed_dir is not None:
            use_headers(job.seed_dir / HEADERS, headers)
        with building_for(ISA_BUILDS[target], headers), unloaded_kernels():
            yield {}
    elif is_gpu_target(target):
        os.environ.update(_TRITON)
        gpu = gpu_of(target, facts)
        if is_present(gpu):
            with compiling_here() as config:
                yield config
            return
        if is_cpu_wheel():
            register_guard(job.dir if job.seed_dir is None else job.seed_dir)
        with compiling_for(gpu):
            # Several would be forks of this process, which has threads. Triton is the smallest part anyway.
            yield {"compile_threads": 1}
    else:
        known = ", ".join((*ISA_BUILDS, *ARCHITECTURES))
        raise TargetUnavailable(f"this worker builds for {known}, not for {target}")
