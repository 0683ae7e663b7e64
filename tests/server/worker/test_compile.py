"""What a build makes for a CPU target, and what it refuses by name."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor import codecache, cpp_builder
from torch._inductor.sizevars import SizeVarAllocator
from torch._subclasses import fake_impls
from torch.nn import functional

from fuse_cache.client.graph import encode_graph
from fuse_cache.client.loader import load
from fuse_cache.proto import graph_codec
from fuse_cache.proto.container import unpack
from fuse_cache.proto.graph import Ref
from fuse_cache.proto.request import Ambient, Range
from fuse_cache.proto.spec import decode_spec
from fuse_cache.server.worker.artifact import own_paths
from fuse_cache.server.worker.compile import build
from fuse_cache.server.worker.isa import ISA_BUILDS, building_for
from fuse_cache.server.worker.protocol import BuildFailed, Job
from fuse_cache.server.worker.seed import HEADERS
from fuse_cache.server.worker.unloaded import kernel_file, unloaded_kernels
from tests.compiled import (
    TARGET,
    block,
    block_inputs,
    capture_block,
    compile_captured,
    compiled_block,
    inductor_folder,
    seed_dir,
)
from tests.models import Kind, capture, capture_model

VECTOR_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(const float* in, float* out) {
    for (int64_t i = 0; i < 1024; i += at::vec::Vectorized<float>::size())
        (at::vec::Vectorized<float>::loadu(in + i) * at::vec::Vectorized<float>(2.0f)).exp().store(out + i);
}
"""


def test_no_section_holds_a_path_of_the_builder() -> None:
    sections = unpack(compiled_block().built.content)
    texts = [path.encode() for path in own_paths()] + [b".cpp", b"site-packages", b"torchinductor"]
    for name, data in sections.items():
        assert not [text for text in texts if text in data], name
        assert not re.search(rb"/(home|root|tmp|opt|usr/lib)/[\w.-]{3,}", data), name


def test_the_carried_python_has_no_comment_and_imports_torch_alone() -> None:
    source = unpack(compiled_block().built.content)["wrapper"].decode()
    assert "#" not in source
    assert set(re.findall(r"^\s*(?:import|from) (\S+)", source, re.M)) <= {"torch", "math"}


def test_the_spec_says_what_was_built() -> None:
    spec = decode_spec(unpack(compiled_block().built.content)["spec"])
    assert spec.target == TARGET
    assert [(symbol.lower, symbol.upper) for symbol in spec.symbols] == [(1, 64)]
    assert spec.guards == ()
    assert len(spec.inputs) == 6
    assert [compiled_block().encoded.input_names[i] for i in spec.mutated_inputs] == ["l_cache_"]


def test_an_equal_request_gives_equal_kernels_and_python(tmp_path: Path) -> None:
    again = compile_captured(capture_block(), tmp_path, compile_range=Range(symbol=0, lower=1, upper=64))
    first, second = unpack(compiled_block().built.content), unpack(again.built.content)
    assert sorted(first) == sorted(second)
    assert {n: d for n, d in first.items() if n != "aot"} == {n: d for n, d in second.items() if n != "aot"}


def test_the_build_tells_its_stages_and_its_passes(tmp_path: Path) -> None:
    stages: list[str] = []
    compiled = compile_captured(capture(functional.silu, torch.zeros(3, 5)), tmp_path, stages=stages)
    assert list(dict.fromkeys(stages)) == ["rebuild", "inductor", "seal"]
    assert compiled.built.nodes == 1
    assert compiled.built.compile_seconds > 0
    assert {record["name"] for record in compiled.built.passes} >= {"norm_quant", "eliminate_noops"}
    (result,) = load(compiled.built.content)(torch.ones(3, 5))
    assert torch.allclose(result, functional.silu(torch.ones(3, 5)))


def test_a_static_range_burns_the_size_in_and_refuses_others(tmp_path: Path) -> None:
    compiled = compile_captured(capture_block(), tmp_path, compile_range=Range(symbol=0, lower=3, upper=3))
    artifact = load(compiled.built.content, graph=compiled.encoded.graph, names=compiled.encoded.input_names)
    arguments = list(compiled.captured.arguments)
    names = compiled.encoded.input_names
    x, cache = block_inputs(3)
    expected_x, expected_cache = block_inputs(3)
    arguments[names.index("l_x_")], arguments[names.index("l_cache_")] = x, cache
    sizes = [index for index, value in enumerate(arguments) if isinstance(value, int)]
    for index in sizes:
        arguments[index] = 3
    with torch.no_grad():
        result = artifact(*arguments)[0]
        expected = block()(expected_x, expected_cache)[0]
    assert torch.allclose(result, expected, atol=1e-5)
    arguments[sizes[0]] = 4
    with pytest.raises(ValueError, match="is 4, the artifact is for 3 to 3"):
        artifact(*arguments)


def test_constants_that_the_compiler_folds_travel(tmp_path: Path) -> None:
    def f(x: Tensor) -> Tensor:
        return x[torch.tensor([2, 0, 1])] + torch.tensor([0.5, 0.25, 0.125]).reshape(3, 1)

    compiled = compile_captured(capture(f, torch.zeros(3, 4)), tmp_path)
    x = torch.arange(12.0).reshape(3, 4)
    arguments = [*compiled.captured.arguments, *compiled.encoded.constants]
    arguments[0] = x
    (result,) = load(compiled.built.content)(*arguments)
    assert torch.equal(result, f(x))


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="Dynamo of 2.11 cannot trace it size-obliviously, whoever compiles it"
)
def test_rows_that_are_assigned_to_a_padded_tensor_are_compiled_for_any_number_of_them(
    tmp_path: Path,
) -> None:
    def padded(x: Tensor) -> Tensor:
        count = x.shape[0]
        rows = x.new_zeros((count + 7) // 8 * 8, 4)
        rows[:count] = x
        return rows * 2

    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = compile_captured(capture(padded, x), tmp_path)
    for count in (6, 2, 8, 11):
        x = torch.randn(count, 4)
        (found,) = load(compiled.built.content)(count, x)
        torch.testing.assert_close(found, padded(x), rtol=0, atol=0)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_an_avx2_build_holds_no_zmm_register(tmp_path: Path) -> None:
    for name, data in unpack(compiled_block(target="cpu-avx2").built.content).items():
        if name.startswith("so/"):
            assert "zmm" not in _disassembled(data, tmp_path)
            assert "ymm" in _disassembled(data, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_an_avx512_build_is_made_on_any_machine(tmp_path: Path) -> None:
    headers = seed_dir("cpu-avx512") / HEADERS
    with (
        inductor_folder(tmp_path),
        building_for(ISA_BUILDS["cpu-avx512"], headers),
        unloaded_kernels(),
    ):
        library = kernel_file(["const float*", "float*"], VECTOR_KERNEL).read_bytes()
    assert "zmm" in _disassembled(library, tmp_path)
    compiled = compile_captured(
        capture_block(),
        tmp_path / "job",
        target="cpu-avx512",
        compile_range=Range(symbol=0, lower=1, upper=64),
    )
    assert decode_spec(unpack(compiled.built.content)["spec"]).target == "cpu-avx512"


def _disassembled(library: bytes, folder: Path) -> str:
    path = folder / "library.so"
    path.write_bytes(library)
    command = ["objdump", "-d", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _job(folder: Path, *, graph: dict[str, Any] | None = None, **request: Any) -> Job:
    """Return the block's job with fields of its graph and request replaced."""
    compiled = compiled_block()
    data = compiled.encoded.data
    if graph is not None:
        data = graph_codec.encode(dataclasses.replace(compiled.encoded.graph, **graph))
    changed = dataclasses.replace(compiled.request, **request)
    return Job(job_id="test", dir=folder, graph=data, request=changed.encode(), seed_dir=seed_dir())


def _failure(job: Job) -> BuildFailed:
    with inductor_folder(job.dir / "inductor"), pytest.raises(BuildFailed) as caught:
        build(job, lambda stage, detail: None)
    return caught.value


def test_a_graph_that_computes_nothing_is_not_cacheable(tmp_path: Path) -> None:
    failure = _failure(_job(tmp_path, graph={"nodes": (), "outputs": (Ref(1),)}))
    assert (failure.reason, failure.deterministic) == ("NOT_CACHEABLE", True)
    assert "computes nothing" in failure.message


def test_a_graph_under_enabled_grad_is_not_cacheable(tmp_path: Path) -> None:
    failure = _failure(_job(tmp_path, ambient=Ambient(grad_mode=True)))
    assert failure.reason == "NOT_CACHEABLE"
    assert "gradients are on" in failure.message


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    assert _failure(_job(tmp_path, target="cpu-neon")).reason == "TARGET_UNAVAILABLE"
    refused = _failure(_job(tmp_path, inductor_options=(("trace.enabled", True),)))
    assert refused.reason == "REQUEST_MALFORMED"
    assert "trace.enabled" in refused.message
    beyond = _failure(_job(tmp_path, range=Range(symbol=7, lower=1, upper=2)))
    assert beyond.reason == "REQUEST_MALFORMED"
    garbage = dataclasses.replace(_job(tmp_path), graph=b"garbage")
    assert _failure(garbage).reason == "GRAPH_MALFORMED"
    assert _failure(dataclasses.replace(_job(tmp_path), request=b"garbage")).reason == "REQUEST_MALFORMED"


def test_a_missing_compiler_is_no_property_of_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    failure = _failure(_job(tmp_path))
    assert failure.reason == "COMPILE_FAILED"
    assert failure.stage == "inductor"
    assert not failure.deterministic


def test_a_build_leaves_torch_as_it_was(tmp_path: Path) -> None:
    def state() -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch._C._get_flash_sdp_enabled(),
            inductor_config.cpp.simdlen,
            inductor_config.cpp.dynamic_threads,
            codecache._precompile_header,
            cpp_builder._get_optimization_cflags,
            fake_impls._compute_stride,
            SizeVarAllocator.evaluate_min,
            SizeVarAllocator.evaluate_max,
        )

    before = state()
    ambient = Ambient(
        default_dtype="float64", deterministic=True, float32_matmul_precision="high", sdpa_backends=("math",)
    )
    _failure(_job(tmp_path, ambient=ambient, inductor_options=(("trace.enabled", True),)))
    assert state() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static_cache", "dynamic"])
def test_a_tiny_llama_computes_what_eager_does(kind: Kind, tmp_path: Path) -> None:
    captured = capture_model("llama", kind=kind)
    encoded = encode_graph(captured.gm, captured.example_inputs)
    # The sequence: the symbol of dimension 1 of the first input of two dimensions.
    compile_range = Range(symbol=1, lower=2, upper=64) if encoded.graph.symbols else None
    compiled = compile_captured(captured, tmp_path, compile_range=compile_range)
    artifact = load(compiled.built.content, graph=encoded.graph)
    assert artifact.spec.guards == ()
    ours, eager = ([_copy(value) for value in captured.arguments] for _ in range(2))
    with torch.no_grad():
        results = artifact(*ours)
        expected = captured.gm(*eager)
    for have, want in zip([*results, *ours], [*expected, *eager], strict=True):
        if isinstance(want, Tensor):
            assert torch.allclose(have, want, atol=1e-4)
    if kind == "static_cache":
        assert len(artifact.spec.mutated_inputs) >= 4, "two layers, keys and values"


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
