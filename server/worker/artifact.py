"""Packs what Inductor made for a target into the content that any host of that target loads: no compiler, no
cache folder, no path.

Sections of the container: `wrapper` (Python source), its kernels (`so/<digest>` for a CPU; `gpu/<name>` and
`cubin/<digest>` for a GPU), `aot` (what AOTAutograd must do around it), `spec` (what must be true of the
inputs), `constant/<name>` (tensors that were folded). `client/loader.py` is the reader.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fuse_cache.proto import cpu_target, safe_pickle
from fuse_cache.proto.container import pack
from fuse_cache.proto.expression import SymExpr
from fuse_cache.proto.graph import Input, Symbol
from fuse_cache.proto.spec import ArtifactSpec, Constant, encode_spec
from fuse_cache.server.worker.errors import CompilerRaised, NotCacheable
from fuse_cache.server.worker.gpu_kernels import KernelCarrier, tuned_variants
from fuse_cache.server.worker.unloaded import kernel_file
from fuse_cache.server.worker.wrapper_source import carried_source

# Fields of AOTAutograd's record that only people or a second compilation read.
_DROPPED = {
    "compiled_fw": None,
    "compiled_bw": None,
    "aot_joint_graph_str": None,
    "aot_forward_graph_str": None,
    "aot_backward_graph_str": None,
    "min_cut_info_str": None,
    "guards_expr": None,
    "serialized_bw_module": None,
    "forward_time_taken_ns": 0,
    "backward_time_taken_ns": 0,
}


def pack_artifact(
    entry: Any,
    *,
    target: str,
    inputs: Sequence[Input],
    symbols: Sequence[Symbol],
    guards: Sequence[SymExpr],
    outputs: int,
) -> bytes:
    """Return the content for AOTAutograd's record `entry` of an inference graph. Runs where the graph was
    compiled, kernels unloaded.

    Raises:
        NotCacheable: the result holds something that cannot be carried.
    """
    compiled = entry.compiled_fw.result
    _refuse_what_cannot_travel(entry, compiled)
    sections: dict[str, bytes] = {}

    gpu = None if cpu_target.is_cpu_target(target) else _gpu_kernels(compiled, target, sections)

    def carry_kernel(argtypes: Sequence[str], source: str) -> str:
        if gpu is not None:
            raise NotCacheable(f"a part of the graph runs on the CPU, and {target} does not say on which")
        library = kernel_file(argtypes, source).read_bytes()
        digest = hashlib.sha256(library).hexdigest()[:32]
        sections[f"so/{digest}"] = library
        return digest

    sections["wrapper"] = carried_source(
        compiled.source_code, carry_kernel, gpu.carry if gpu is not None else None
    ).encode()
    sections["aot"] = _slim_record(entry)
    constants = []
    for name, value in sorted((compiled.constants or {}).items()):
        constants.append(Constant(name, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
        sections[f"constant/{name}"] = _tensor_bytes(name, value)
    spec = ArtifactSpec(
        target=target,
        symbols=tuple(symbols),
        inputs=tuple(inputs),
        guards=tuple(guards),
        outputs=outputs,
        constants=tuple(constants),
        aligned_inputs=tuple(sorted(compiled.inputs_to_check)),
        mutated_inputs=tuple(sorted(compiled.mutated_input_idxs)),
        torch=str(torch.__version__).partition("+")[0],
    )
    sections["spec"] = encode_spec(spec)
    _prove_complete(sections, target)
    return pack(sections)


def _gpu_kernels(compiled: Any, target: str, sections: MutableMapping[str, bytes]) -> KernelCarrier:
    tuned = tuned_variants(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    return KernelCarrier(getattr(compiled, "_triton_bundle", None), target, sections, tuned)


def _refuse_what_cannot_travel(entry: Any, compiled: Any) -> None:
    if entry.compiled_bw is not None:
        raise NotCacheable("the graph has a backward part: artifacts are for inference")
    if entry.maybe_subclass_meta is not None:
        raise NotCacheable("an input or output is a tensor subclass: such graphs must be sent at ATen level")
    for name in ("torchbind_constants", "opaque_value_type_classes", "frozen_param_names"):
        if getattr(compiled, name, None):
            raise NotCacheable(f"the compiled code holds {name.replace('_', ' ')}")
    if not compiled.source_code:
        raise NotCacheable("the compiler wrote no Python")


def _slim_record(entry: Any) -> bytes:
    slim = copy.copy(entry)
    for name, value in _DROPPED.items():
        if hasattr(slim, name):
            setattr(slim, name, value)
    for output in slim.runtime_metadata.output_info:
        # Only equality of two tracings asks for it; it holds sizes as sympy expressions.
        if output.view_meta_sequence is not None:
            output.view_meta_sequence.metadata = None
    data = pickle.dumps(slim, protocol=5)
    try:
        safe_pickle.loads(data)
    except safe_pickle.ForbiddenNameError as error:
        raise NotCacheable(f"AOTAutograd's record cannot be carried: {error}", stage="seal") from error
    return data


def _tensor_bytes(name: str, value: object) -> bytes:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        raise NotCacheable(f"constant {name} is no plain tensor")
    if not value.is_contiguous():
        # The compiled code reads it by the strides it had; a host lays the bytes out row by row.
        raise NotCacheable(f"constant {name} is not contiguous: strides {tuple(value.stride())}")
    flat = value.detach().cpu().reshape(-1).view(torch.uint8)
    return bytes(flat.numpy().tobytes())


def _prove_complete(sections: Mapping[str, bytes], target: str) -> None:
    """Make sure that the sections are all that a host needs and say nothing of this machine."""
    wanted = set(re.findall(rb"native_kernel\('([0-9a-f]{32})'\)", sections["wrapper"]))
    missing = [digest.decode() for digest in wanted if f"so/{digest.decode()}" not in sections]
    assert not missing, f"kernels without a section: {missing}"
    for path in own_paths():
        for name, data in sections.items():
            if path.encode() in data:
                raise CompilerRaised(f"section {name} holds a path of this machine: {path}", stage="seal")
    if cpu_target.is_cpu_target(target) and cpu_target.refusal(target) is None:
        for name, data in sections.items():
            if name.startswith("so/"):
                _load_once(name, data)


def own_paths() -> tuple[str, ...]:
    """Return the folders of this machine that nothing in an artifact may name."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    found = (
        sys.prefix,
        sys.base_prefix,
        str(Path(torch.__file__).parent),
        str(Path.home()),
        tempfile.gettempdir(),
        cache,
    )
    # "/usr" and the like say nothing of a builder, and occur in any library.
    return tuple(sorted({path for path in found if path.count("/") > 1 or path == "/tmp"}))


def _load_once(name: str, library: bytes) -> None:
    # Resolves every symbol, as a host will have to. The process ends soon; what the library does to it does
    # not matter.
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        try:
            ctypes.CDLL(file.name, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise CompilerRaised(f"kernel {name} cannot be loaded: {error}", stage="seal") from error
