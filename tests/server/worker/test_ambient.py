"""A worker takes over the host's state without the host's devices."""

from __future__ import annotations

import pytest
import torch

from fuse_cache.proto.request import Ambient
from fuse_cache.server.worker.ambient import ambient_state
from fuse_cache.server.worker.protocol import BuildFailed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_as_the_host_has_it_also_of_a_device_that_is_not_here(device: str, dtype: str) -> None:
    before = torch.get_autocast_dtype(device)
    with ambient_state(Ambient(autocast=((device, dtype),))):
        assert torch.is_autocast_enabled(device)
        assert torch.get_autocast_dtype(device) is getattr(torch, dtype)
        x = torch.ones(2, 2)
        assert (x @ x).dtype is (getattr(torch, dtype) if device == "cpu" else torch.float32)
        assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types for it
    assert not torch.is_autocast_enabled(device)
    assert torch.get_autocast_dtype(device) is before
    assert (x @ x).dtype is torch.float32


def test_a_dtype_that_torch_does_not_have_is_refused_by_name() -> None:
    with (
        pytest.raises(BuildFailed, match="float7"),
        ambient_state(Ambient(autocast=(("cuda", "float7"),))),
    ):
        pass
