"""Launching kernels from machine code, with torch's launcher and the clock of the device replaced."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fuse_cache.client import gpu_kernel
from fuse_cache.client.gpu_kernel import GpuKernels, GpuLoadError, LoadedKernel, why_not_here
from fuse_cache.proto.container import pack, unpack
from fuse_cache.proto.gpu_kernel import GpuKernel, GpuKernelError, Variant, decode_kernel, encode_kernel
from fuse_cache.proto.revision import tuned_content

STREAM = 7


def _variant(cubin: str, **changes: Any) -> Variant:
    values = {
        "cubin": cubin,
        "shared": 64,
        "warps": 4,
        "types": "OOiO",
        "scratch": 1,
        "config": f"of {cubin}",
    }
    return Variant(**{**values, **changes})


def launch_wide(x: Any, out: Any, xnumel: int) -> tuple[int, int, int, tuple[Any, ...]]:
    return -(xnumel // -128), 1, 1, (x, out, xnumel)


def launch_narrow(x: Any, out: Any, xnumel: int) -> tuple[int, int, int, tuple[Any, ...]]:
    return -(xnumel // -32), 1, 1, (x, out, xnumel)


class _Device:
    """Stands for the device: what was loaded and launched, and how long each cubin takes, in ms."""

    def __init__(self, milliseconds: dict[bytes, float], spills: dict[bytes, int] | None = None) -> None:
        self.milliseconds = milliseconds
        self.spills = spills or {}
        self.loaded: list[tuple[bytes, str, int, int]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.clock = 0.0

    def _load_kernel(self, path: str, entry: str, shared: int, device: int) -> tuple[Any, ...]:
        cubin = Path(path).read_bytes()
        if cubin == b"broken":
            raise RuntimeError("no kernel image is available")
        self.loaded.append((cubin, entry, shared, device))
        return ("module", cubin, 32, self.spills.get(cubin, 0))

    def _launch_kernel(self, function: bytes, *rest: Any) -> None:
        self.clock += self.milliseconds[function]
        self.launches.append((function, *rest))

    def event(self) -> Any:
        device = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = device.clock

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        return Event()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> _Device:
    made = _Device({b"wide": 2.0, b"narrow": 1.0, b"spilling": 0.5}, {b"spilling": 40})
    monkeypatch.setattr(gpu_kernel, "static_launcher", lambda: made)
    monkeypatch.setattr(gpu_kernel, "_event", made.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def _loaded(*names: str, number: int = 1, **changes: Any) -> LoadedKernel:
    kernel = GpuKernel(entry="triton_poi", variants=tuple(map(_variant, names)), mutated=("out",), **changes)
    launchers = [launch_narrow if name == "narrow" else launch_wide for name in names]
    return LoadedKernel("k", kernel, launchers, {name: name.encode() for name in names}, number)


def test_a_kernel_is_loaded_at_its_first_launch_on_the_device_it_was_bound_to(device: _Device) -> None:
    kernel = _loaded("wide", number=1)
    assert device.loaded == []
    x, out = torch.ones(200), torch.zeros(200)
    for _ in range(2):
        kernel.run(x, out, 200, stream=STREAM)
    assert device.loaded == [(b"wide", "triton_poi", 64, 1)]
    assert device.launches == [(b"wide", 2, 1, 1, 4, 64, "OOiO", (x, out, 200, None), STREAM)] * 2


def test_the_first_launch_measures_variants_once_and_on_copies_of_what_they_write(device: _Device) -> None:
    kernel = _loaded("wide", "spilling", "narrow")
    x, out = torch.ones(100), torch.zeros(100)
    kernel.run(x, out, 100, stream=STREAM)
    assert kernel.config == "of narrow"  # The fastest of those that Inductor would try.
    *measured, real = device.launches
    assert {entry[0] for entry in measured} == {b"wide", b"narrow"}
    assert all(entry[7][0] is x and entry[7][1] is not out for entry in measured)
    assert real[0] == b"narrow"
    assert real[7][1] is out
    device.launches.clear()
    kernel.run(x, out, 100, stream=STREAM)
    assert [entry[0] for entry in device.launches] == [b"narrow"]


def test_while_a_graph_is_captured_nothing_is_measured(
    device: _Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = _loaded("wide", "narrow")
    kernel.run(torch.ones(4), torch.zeros(4), 4, stream=STREAM)
    assert [entry[0] for entry in device.launches] == [b"wide"]


def test_what_must_be_zero_is_zero_before_each_measurement(device: _Device) -> None:
    seen = []
    device_launch = device._launch_kernel

    def launch(function: bytes, *rest: Any) -> None:
        seen.append(float(rest[6][1].sum()))
        rest[6][1].add_(1)
        device_launch(function, *rest)

    device._launch_kernel = launch  # type: ignore[method-assign]
    kernel = _loaded("wide", "narrow", zeroed=("out",))
    kernel.run(torch.ones(4), torch.zeros(4), 4, stream=STREAM)
    assert len(seen) > 10
    assert set(seen) == {0.0}


def test_two_threads_at_the_first_launch_load_it_once(device: _Device) -> None:
    kernel = _loaded("wide", "narrow")
    barrier = threading.Barrier(4)

    def run() -> None:
        barrier.wait()
        kernel.run(torch.ones(4), torch.zeros(4), 4, stream=STREAM)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(device.loaded) == 2


def test_a_kernel_that_the_device_refuses_is_an_error_that_names_it(device: _Device) -> None:
    with pytest.raises(GpuLoadError, match="kernel k cannot be loaded on this device: no kernel image"):
        _loaded("broken").run(torch.ones(4), torch.zeros(4), 4, stream=STREAM)


def test_a_description_comes_back_and_a_wrong_one_is_refused() -> None:
    kernel = GpuKernel(entry="k", variants=(_variant("a"), _variant("b", warps=8)), mutated=("out",))
    assert decode_kernel(encode_kernel(kernel)) == kernel
    for wrong in (
        b"", b"{}", b"[]", encode_kernel(GpuKernel(entry="k", variants=())),
        encode_kernel(GpuKernel(entry="k", variants=(_variant("a", types="Z"),))),
        encode_kernel(GpuKernel(entry="k", variants=(_variant("a", scratch=9),))),
        encode_kernel(GpuKernel(entry="k", variants=(_variant("a", warps=0),))),
        encode_kernel(kernel).replace(b'"entry"', b'"other"'),
    ):  # fmt: skip
        with pytest.raises(GpuKernelError):
            decode_kernel(wrong)


def test_a_host_without_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch sees none here" in str(why_not_here("sm_90"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert why_not_here("sm_90") is None
    assert why_not_here("sm_100") == "built for sm_100, and this device is sm_90"


def test_the_winners_of_a_host_are_what_a_tuned_build_keeps(
    device: _Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)

    def kernel(*names: str) -> bytes:
        return encode_kernel(GpuKernel(entry="k", variants=tuple(map(_variant, names)), mutated=("out",)))

    sections = {
        "gpu/two": kernel("wide", "narrow"),
        "gpu/spills": kernel("spilling", "wide"),
        "gpu/one": kernel("wide"),
        **{f"cubin/{name}": name.encode() for name in ("wide", "narrow", "spilling")},
    }

    def run(kernels: GpuKernels) -> None:
        define = kernels.namespace()["gpu_kernel"]
        x, out = torch.ones(100), torch.zeros(100)
        for name, launchers in (
            ("two", (launch_wide, launch_narrow)),
            ("spills", (launch_wide, launch_wide)),
            ("one", (launch_wide,)),
        ):
            loaded = define(name, launchers)
            assert name == "one" or kernels.choices() == {}  # Not before all have run.
            loaded.run(x, out, 100, stream=STREAM)

    first = GpuKernels(sections)
    run(first)
    assert first.choices() == {"two": "narrow", "spills": "wide"}
    tuned = unpack(tuned_content(pack({"wrapper": b"", **sections}), first.choices()))
    assert "cubin/spilling" not in tuned
    device.launches.clear()
    second = GpuKernels(tuned)
    run(second)
    assert [entry[0] for entry in device.launches] == [b"narrow", b"wide", b"wide"]  # Nothing was measured.
    assert second.choices() == {}


def test_the_wrapper_gets_the_device_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    kernel = GpuKernel(entry="k", variants=(_variant("a"),))
    names = GpuKernels({"gpu/k": encode_kernel(kernel), "cubin/a": b"code"}).namespace()
    assert names["device_index"] == 3
    assert names["gpu_kernel"]("k", (launch_wide,))._device == 3
    with pytest.raises(GpuKernelError, match="1 variants and 2 launchers"):
        names["gpu_kernel"]("k", (launch_wide, launch_wide))
