"""Kernels compile for GPUs that are not here. They run under the interpreter (`interpreted/`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fuse_cache.kernels import launch
from tests.kernels.cases import PRODUCER_CASES, QUANTISER_CASES, Case, fused_case

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
}


def _launched(case: Case, target: str, hidden: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Return the kernel, its arguments and its options as they would be launched."""
    seen: list[tuple[Any, ...]] = []

    def note(
        kernel: Any,
        grid: tuple[Any, ...],
        arguments: tuple[Any, ...],
        written: tuple[str, ...],
        **options: Any,
    ) -> dict[str, Any]:
        seen.append((kernel, arguments, options))
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        return {name: named[name] for name in written}

    monkeypatch.setattr(launch, "_launch", note)
    launch.implementations(target)[case.operator](*case.arguments(4, case.width(hidden)))
    (only,) = seen
    return only


def _compile(case: Case, capability: int, monkeypatch: pytest.MonkeyPatch, hidden: int = 4096) -> Any:
    kernel, arguments, options = _launched(case, f"sm_{capability}", hidden, monkeypatch)
    num_warps = options.pop("num_warps")
    signature, attributes = {}, {}
    for index, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        is_tensor = isinstance(value, torch.Tensor)
        signature[name] = _POINTERS[value.dtype] if is_tensor else "i32"
        if is_tensor or value % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    constants = {(kernel.arg_names.index(name),): value for name, value in options.items()}
    signature |= dict.fromkeys(options, "constexpr")
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})


def _pick(index: int) -> Case:
    return fused_case(PRODUCER_CASES[index % len(PRODUCER_CASES)], QUANTISER_CASES[index], index % 2 == 0)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("index", [0, 4, 11, 17, 19])
def test_a_fused_kernel_compiles(index: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = _compile(_pick(index), capability, monkeypatch).asm["ptx"]
    assert f".target sm_{capability}" in ptx
    # e4m3 by the instruction where there is one, by integers where there is none.
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (capability >= 89)


@pytest.mark.parametrize("capability", [80, 90])
def test_scales_are_decoded_as_they_were_encoded(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By integers behind the instruction, ptxas takes the first code of each pair for both."""
    quantiser = next(case for case in QUANTISER_CASES if case.name == "nvfp4_linear")
    ptx = _compile(fused_case(PRODUCER_CASES[2], quantiser, True), capability, monkeypatch).asm["ptx"]
    encoded, decoded = ("cvt.rn.satfinite.e4m3x2.f32" in ptx), ("cvt.rn.f16x2.e4m3x2" in ptx)
    assert (encoded, decoded) == (capability >= 89,) * 2


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("index", range(len(QUANTISER_CASES)))
def test_every_quantisation_compiles(index: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compile(_pick(index), capability, monkeypatch).asm["cubin"]


def test_rows_are_read_and_written_in_wide_words(monkeypatch: pytest.MonkeyPatch) -> None:
    case = fused_case(PRODUCER_CASES[6], QUANTISER_CASES[4], False)
    kernel = _compile(case, 90, monkeypatch)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]  # 16 bytes: 8 values of bfloat16
    assert "local" not in kernel.asm["ptx"]  # No spills.
