"""What a host asks for: its GPU as the driver describes it, and which differences between two GPUs make two
requests."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from fuse_cache.client.target import Target, choose_target, device_of
from fuse_cache.kernels.targets.properties import DeviceProperties
from fuse_cache.proto.gpu_target import GPUS, find_gpu
from fuse_cache.proto.request import Range, RequestFields
from fuse_cache.proto.target_facts import CODE_FACTS, code_facts


def on_host_with(monkeypatch: pytest.MonkeyPatch, properties: DeviceProperties) -> Target:
    """Return what `target="auto"` is on a host whose driver says this of its second device."""
    others = SimpleNamespace(major=7, minor=5)

    def describe(device: torch.device) -> object:
        return properties if device.index == 1 else others

    monkeypatch.setattr(torch.cuda, "get_device_properties", describe)
    return choose_target("auto", torch.device("cuda", 1), ("cpu-avx2", "sm_80"))


def digest(target: Target) -> bytes:
    fields = RequestFields(
        graph_digest=bytes(32), pass_config=b"", range=Range(), target=target.name, target_facts=target.facts
    )
    return fields.request_digest()


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_table_reports_the_facts_that_its_name_means(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = find_gpu(name)
    auto = on_host_with(monkeypatch, DeviceProperties.of(gpu))
    assert auto == Target(gpu.target, code_facts(gpu))
    assert choose_target(name, torch.device("cpu"), ()) == auto
    assert {fact for fact, _ in auto.facts} == set(CODE_FACTS)


def test_what_changes_no_code_makes_no_other_request_and_what_does_makes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h100 = DeviceProperties.of(find_gpu("h100"))
    asked = digest(on_host_with(monkeypatch, h100))
    # An H200 has what an H100 has, but more memory and cache, faster.
    assert digest(on_host_with(monkeypatch, DeviceProperties.of(find_gpu("h200")))) == asked
    for change in (
        {"name": "NVIDIA Other"}, {"total_memory": 1 << 30}, {"L2_cache_size": 1 << 20},
        {"clock_rate": 1}, {"memory_clock_rate": 1}, {"memory_bus_width": 64},
    ):  # fmt: skip
        other = dataclasses.replace(h100, **change)
        assert digest(on_host_with(monkeypatch, other)) == asked, change
    for change in ({"multi_processor_count": 114}, {"max_threads_per_multi_processor": 1536}, {"minor": 3}):
        other = dataclasses.replace(h100, **change)  # type: ignore[arg-type]
        assert digest(on_host_with(monkeypatch, other)) != asked, change


def test_the_device_is_that_of_the_graph() -> None:
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        inputs = [torch.empty(2), 3, torch.empty(2, device="cuda:1")]
    assert device_of(inputs) == torch.device("cuda", 1)
    assert device_of(inputs[:2]) == torch.device("cpu")


def test_what_this_version_has_no_target_for_is_none_and_an_unknown_name_is_the_daemons_to_judge() -> None:
    assert choose_target("auto", torch.device("meta"), ()) == Target("")
    assert choose_target("gtx-480", torch.device("cpu"), ()) == Target("gtx-480")
