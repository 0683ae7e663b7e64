"""Cases 22 and 23: an artifact runs on the device that is current where it is loaded, on no other kind."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuse_cache.client import gpu_kernel
from fuse_cache.client.gpu_kernel import GpuKernels, why_not_here
from fuse_cache.client.target import choose_target
from fuse_cache.kernels.targets.properties import DeviceProperties
from fuse_cache.proto.gpu_kernel import GpuKernel, Variant, encode_kernel
from fuse_cache.proto.gpu_target import find_gpu, is_gpu_target
from fuse_cache.proto.request import Range, RequestFields


def launch(x: Any) -> tuple[int, int, int, tuple[Any, ...]]:
    return 1, 1, 1, (x,)


def test_one_content_runs_on_each_device_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 22: compiled for the first device, loaded for the second, in one process; and back."""
    loaded: list[int] = []
    launches: list[str] = []

    def load_kernel(path: str, entry: str, shared: int, device: int) -> tuple[str, str, int, int]:
        loaded.append(device)
        return "module", f"on {device}", 1, 0

    launcher = SimpleNamespace(
        _load_kernel=load_kernel, _launch_kernel=lambda function, *rest: launches.append(function)
    )
    monkeypatch.setattr(gpu_kernel, "static_launcher", lambda: launcher)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    variant = Variant(cubin="a", shared=0, warps=4, types="O", scratch=0, config="")
    sections = {"gpu/k": encode_kernel(GpuKernel(entry="k", variants=(variant,))), "cubin/a": b"code"}
    for device in (1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        names = GpuKernels(sections).namespace()
        assert names["device_index"] == device
        names["gpu_kernel"]("k", (launch,)).run(torch.ones(1), stream=0)
    assert loaded == [1, 0, 1]
    assert launches == ["on 1", "on 0", "on 1"]


def digest_on(monkeypatch: pytest.MonkeyPatch, **changes: int) -> tuple[str, bytes]:
    properties = dataclasses.replace(DeviceProperties.of(find_gpu("sm_120")), **changes)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    target = choose_target("auto", torch.device("cuda", 0), ())
    fields = RequestFields(
        graph_digest=bytes(32), pass_config=b"", range=Range(), target=target.name, target_facts=target.facts
    )
    return target.name, fields.request_digest()


def test_a_capability_of_another_minor_is_another_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 23: sm_120 code on an sm_121 device ran and was wrong, with no error."""
    name, digest = digest_on(monkeypatch)
    other, other_digest = digest_on(monkeypatch, minor=1)
    assert (name, other) == ("sm_120", "sm_121")
    assert digest != other_digest
    assert not is_gpu_target(other)  # Nobody builds for it yet: such hosts compile for themselves.
    # The number of multiprocessors changes what is compiled (DECISIONS/0073).
    assert digest_on(monkeypatch, multi_processor_count=170)[1] != digest


def test_a_host_refuses_code_for_another_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 1))
    assert why_not_here("sm_120") == "built for sm_120, and this device is sm_121"
