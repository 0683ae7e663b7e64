"""Makes Inductor build for a stated CPU target instead of for the machine it runs on. Worker processes only.

Left alone, Inductor probes the processor and compiles with -march=native: what it writes then crashes on a
lesser host. Here the vector width, the compiler's architecture and the thread count are facts of the
target.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._inductor import codecache, cpp_builder, cpu_vec_isa

# Loops are split for this many threads; how many run is the host's choice at each call
# (`cpp.dynamic_threads`). It decides how many loop levels are collapsed (until 2x this many pieces), so it
# must not be the builder's own core count.
PLANNED_THREADS = 32


@dataclass(frozen=True, slots=True)
class IsaBuild:
    """How to build for one CPU target."""

    name: str
    march: str
    simdlen: int
    vec_isa: type[cpu_vec_isa.VecISA]


# "v3" and "v4" are what proto/cpu_target.py asks of a host, flag for flag.
ISA_BUILDS: dict[str, IsaBuild] = {
    "cpu-avx2": IsaBuild("cpu-avx2", "x86-64-v3", 256, cpu_vec_isa.VecAVX2),
    "cpu-avx512": IsaBuild("cpu-avx512", "x86-64-v4", 512, cpu_vec_isa.VecAVX512),
}

_Flags = tuple[list[str], list[str]]


@contextlib.contextmanager
def building_for(isa: IsaBuild, headers_dir: Path) -> Iterator[None]:
    """Build for `isa` while the context lasts, wherever this runs: nothing is probed, no path of this
    machine is written down.

    Precompiled headers are taken from `headers_dir`, or made there.
    """
    vec_isa = isa.vec_isa()
    own_flags = cpp_builder._get_optimization_cflags
    with contextlib.ExitStack() as stack:
        _replace(stack, cpu_vec_isa, "valid_vec_isa_list", lambda: [vec_isa])
        _replace(stack, cpp_builder, "_get_optimization_cflags", _flags_for(isa, own_flags))
        _replace(stack, codecache, "_precompile_header", functools.partial(_precompiled_header, headers_dir))
        stack.enter_context(inductor_config.patch(_config_for(isa)))
        yield


def _config_for(isa: IsaBuild) -> dict[str, Any]:
    patches: dict[str, Any] = {
        "cpp.simdlen": isa.simdlen,
        "cpp.vec_isa_ok": True,
        "cpp.dynamic_threads": True,
        "cpp.threads": PLANNED_THREADS,
        "aot_inductor.enable_line_tables": False,  # they hold the paths of every header
    }
    known = inductor_config.get_config_copy()
    return {name: value for name, value in patches.items() if name in known}


def _flags_for(isa: IsaBuild, own_flags: Callable[..., _Flags]) -> Callable[..., _Flags]:
    # `config.cpp.march` exists from torch 2.13 on; the list of flags is the same in 2.11, so this serves
    # both.
    torch_dir = str(Path(torch.__file__).parent)

    def flags(cpp_compiler: str, min_optimize: bool = False) -> _Flags:
        cflags, ldflags = own_flags(cpp_compiler, min_optimize)
        kept = [flag for flag in cflags if not flag.startswith(("march=", "mtune=", "mcpu="))]
        # Bounds checks name their source file. With a name of our own no path gets in, and equal kernels
        # have equal bytes in every job.
        named = [
            "Wno-builtin-macro-redefined",
            'D__FILE__=\\"kernel\\"',
            f"ffile-prefix-map={torch_dir}=torch",
        ]
        # -s: no symbol table, which names the source file; no build id, so that equal sources give equal
        # bytes.
        return [*kept, f"march={isa.march}", *named], [*ldflags, "Wl,-s", "Wl,--build-id=none"]

    return flags


def _precompiled_header(headers_dir: Path, header: str, command_line: str, **compile_command: Any) -> str:
    """Return the path of a file that includes `header`, its precompiled form beside it.

    Inductor's own keeps them in one folder per user, and runs the preprocessor and openssl in every process
    to name them. A seed is made for one toolchain (seed.py), so here the name is the command line, the
    compiler and the release of torch.
    """
    compile_command.pop("extra_flags", None)  # inputs of the linker
    options = cpp_builder.CppTorchDeviceOptions(**compile_command, precompiling=True)
    compiler = cpp_builder.get_compiler_version_info(options.get_compiler())
    identity = "\0".join((header, command_line, compiler, str(torch.__version__)))
    path = headers_dir / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.h"
    if not path.with_name(f"{path.name}.gch").exists():
        headers_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#include <{header}>\n")
        cpp_builder.CppBuilder(name=str(path), sources=str(path), BuildOption=options).build()
    return str(path)


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: object) -> None:
    if not hasattr(owner, name):
        return  # A name that this release of torch does not have: it has no such behaviour to replace.
    before = getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)
