"""Takes Inductor's Triton kernels apart into what a host needs to launch them: machine code, numbers, and how
big the grid is.

A kernel is carried as one description (`proto/gpu_kernel.py`), one cubin for each variant, and one small
function for each in the wrapper: from the arguments of the call to the grid and the arguments of the launch.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, MutableMapping, Set
from pathlib import Path
from typing import Any, Final

from fuse_cache.kernels.targets.cubin import CubinError, architecture_of
from fuse_cache.proto.gpu_kernel import GpuKernel, Variant, encode_kernel
from fuse_cache.server.worker.errors import NotCacheable

GPU_KERNEL: Final = "gpu_kernel"  # The loader puts it into the wrapper's namespace.
_DIGEST_CHARS: Final = 32


class KernelCarrier:
    """Carries the kernels of one compilation. `sections` gets their descriptions and cubins."""

    def __init__(
        self,
        bundle: Any,
        target: str,
        sections: MutableMapping[str, bytes],
        tuned: Set[str] = frozenset(),
    ) -> None:
        self._target = target
        self._sections = sections
        self._tuned = tuned  # hashes of the variants that measuring them here has chosen
        self._autotuners: Mapping[str, Any] = {
            item.kernel_name: item.kernel for item in (bundle.static_autotuners if bundle else ())
        }
        self._cubins = _cubins_of(bundle)

    def carry(self, name: str) -> list[ast.stmt]:
        """Carry the kernel `name` and return the statements that define it in the wrapper.

        Raises:
            NotCacheable: a host would have to compile it. The message names it.
        """
        autotuner = self._autotuners.get(name)
        if autotuner is None:
            raise NotCacheable(f"kernel {name} cannot be launched from its binary alone", stage="seal")
        statements: list[ast.stmt] = []
        variants: list[Variant] = []
        launchers: list[str] = []
        results = autotuner.compile_results
        chosen = [result for result in results if _path_key(result.kernel) in self._tuned]
        for number, result in enumerate(chosen or results):
            variants.append(self._variant(name, result))
            launchers.append(f"{name}_launch_{number}")
            statements += ast.parse(_launcher_source(launchers[-1], result)).body
        described = GpuKernel(
            entry=results[0].kernel.name,
            variants=tuple(variants),
            mutated=tuple(sorted(autotuner.mutated_arg_names)),
            zeroed=tuple(sorted(autotuner.reset_to_zero_arg_names)),
        )
        self._sections[f"gpu/{name}"] = encode_kernel(described)
        names = ", ".join(launchers)
        return [*statements, *ast.parse(f"{name} = {GPU_KERNEL}({name!r}, ({names},))").body]

    def _variant(self, name: str, result: Any) -> Variant:
        kernel = result.kernel
        if not hasattr(kernel, "arg_tys"):
            raise NotCacheable(f"kernel {name} cannot be launched from its binary alone", stage="seal")
        cubin = self._cubin(name, kernel)
        digest = hashlib.sha256(cubin).hexdigest()[:_DIGEST_CHARS]
        self._sections[f"cubin/{digest}"] = cubin
        scratch = sum(bool(getattr(kernel, f"has_{kind}_scratch", False)) for kind in ("global", "profile"))
        return Variant(
            cubin=digest,
            shared=int(kernel.shared),
            warps=int(kernel.num_warps),
            types=str(kernel.arg_tys) + "O" * scratch,
            scratch=scratch,
            config=_config_text(result.config),
        )

    def _cubin(self, name: str, kernel: Any) -> bytes:
        cubin = getattr(kernel, "cubin_raw", None) or self._cubins.get(_path_key(kernel))
        if cubin is None:
            raise NotCacheable(f"kernel {name} has no machine code", stage="seal")
        try:
            built = architecture_of(cubin)
        except CubinError as error:
            raise NotCacheable(f"kernel {name}: {error}", stage="seal") from error
        if built != self._target:
            raise NotCacheable(f"kernel {name} was built for {built}, not for {self._target}", stage="seal")
        return bytes(cubin)


def tuned_variants(cache: Path) -> frozenset[str]:
    """Return the hashes of the variants that Inductor measured and chose, by the notes it left in its folder.
    None where no kernel has run.
    """
    found = set()
    for note in cache.rglob("*.best_config"):
        chosen = json.loads(note.read_bytes()).get("triton_cache_hash")
        if chosen:
            found.add(str(chosen))
    return frozenset(found)


def _path_key(kernel: Any) -> str:
    """Return the name of a kernel's folder in Triton's cache, by which bundle and notes tell it."""
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    return str(triton_hash_to_path_key(kernel.hash))


def _cubins_of(bundle: Any) -> dict[str, bytes]:
    """Return the machine code of each kernel by Triton's hash."""
    return {
        kernel.kernel_hash: artifact.payload
        for kernel in (bundle.kernel_artifacts if bundle else ())
        for artifact in kernel.artifacts
        if artifact.filename.endswith(".cubin")
    }


def _launcher_source(name: str, result: Any) -> str:
    """Return the function that turns a call's arguments into a launch: (grid x, y, z, arguments).

    As Inductor's own launcher does it (`StaticTritonCompileResult.make_launcher`), which it compiles from
    such a text on every host.
    """
    from torch._inductor.runtime.triton_heuristics import GridExpr

    kernel = result.kernel
    _, defined, absent = result._get_arg_lists(kernel.arg_names, kernel.declared_constexprs)
    passed = [
        argument
        for number, argument in enumerate(kernel.arg_names)
        if number not in kernel.full_constexprs and argument not in absent
    ]
    grid = GridExpr.from_meta(result.inductor_meta, result.config)
    lines = [
        f"def {name}({', '.join(defined)}):",
        *(f"    {line}" for line in grid.prefix),
        f"    return ({grid.x_grid}, {grid.y_grid}, {grid.z_grid}, ({', '.join([*passed, ''])}))",
    ]
    return "\n".join(lines)


def _config_text(config: Any) -> str:
    """Return a variant's configuration for people, and for feeding back which one won."""
    parts = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return ",".join(f"{name}={value}" for name, value in sorted(parts.items()))
