"""The table of GPUs, and what a cubin says of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuse_cache.kernels.codecs import CODECS
from fuse_cache.kernels.targets.cubin import CubinError, architecture_of, registers_of
from fuse_cache.kernels.targets.properties import DeviceProperties
from fuse_cache.proto.gpu_target import ARCHITECTURES, GPUS, UnknownGpuError, find_gpu, is_gpu_target


def test_every_architecture_has_a_gpu_and_codes() -> None:
    assert {gpu.target for gpu in GPUS.values()} == set(ARCHITECTURES)
    assert set(ARCHITECTURES) <= set(CODECS)
    for name, item in ARCHITECTURES.items():
        assert name == f"sm_{item.major}{item.minor}"
        assert is_gpu_target(name)
    assert not is_gpu_target("cpu-avx2")


def test_the_h200_and_the_a100_are_as_read_from_the_devices() -> None:
    """`torch.cuda.get_device_properties` on both. Memory is what the driver leaves, so only nearly so."""
    for name, expected in {
        "h200": (9, 0, 132, 62914560, 232448, 233472, 2048, 150754820096),
        "a100": (8, 0, 108, 41943040, 166912, 167936, 2048, 85095874560),
    }.items():
        facts = DeviceProperties.of(find_gpu(name))
        found = (
            facts.major,
            facts.minor,
            facts.multi_processor_count,
            facts.L2_cache_size,
            facts.shared_memory_per_block_optin,
            facts.shared_memory_per_multiprocessor,
            facts.max_threads_per_multi_processor,
        )
        assert found == expected[:-1]
        assert facts.total_memory == pytest.approx(expected[-1], rel=0.02)


def test_a_bare_architecture_is_the_first_gpu_of_it_and_an_unknown_name_lists_the_known() -> None:
    assert find_gpu("sm_90").name == "h100"
    assert find_gpu("H200").product == "NVIDIA H200"
    with pytest.raises(UnknownGpuError, match=r"gtx-480 is no GPU of this .*: use one of sm_80, .*, h200"):
        find_gpu("gtx-480")


@given(
    st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(lambda tail: b"\x7fELF\x02\x01" + tail))
)
def test_bytes_that_are_no_cubin_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(CubinError):
        registers_of(data)
    if not data.startswith(b"\x7fELF\x02\x01") or len(data) < 64:
        with pytest.raises(CubinError):
            architecture_of(data)
