"""What an endpoint keeps between calls."""

from __future__ import annotations

from fuse_cache.client.channel import Endpoint
from fuse_cache.client.options import CompileOptions


def test_a_stub_is_kept_as_long_as_its_channel() -> None:
    endpoint = Endpoint("unix:/nowhere", CompileOptions())
    first = endpoint.stub()
    assert endpoint.stub() is first
    endpoint.lost()
    second = endpoint.stub()
    assert second is not first
    assert endpoint.stub() is second
    endpoint.close()
