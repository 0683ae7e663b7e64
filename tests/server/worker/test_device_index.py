"""No number of the builder's device is left in what a host executes."""

from __future__ import annotations

import ast

import pytest

from fuse_cache.server.worker.device_index import unbind_device
from fuse_cache.server.worker.errors import NotCacheable

WRAPPER = """
def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        stream0 = get_raw_stream(0)
        buf0 = empty_strided_cuda((4, 0), (4, 1), torch.bfloat16)
        buf1 = torch.ops.aten.arange.start_step(0, 4, device=device(type='cuda', index=0), pin_memory=False)
        buf2 = aten.full.default([0], 0, device=torch.device('cuda', 0))
        buf3 = aten.full.default([0], 0, device=device(type='cpu'))
        kernel.run(buf0, 0, stream=stream0)
"""


def test_every_number_of_a_device_becomes_the_loaders_and_no_other_number_does() -> None:
    (statement,) = ast.parse(WRAPPER).body
    unbind_device(statement)
    expected = (
        WRAPPER.replace("_DeviceGuard(0)", "_DeviceGuard(device_index)")
        .replace("set_device(0)", "set_device(device_index)")
        .replace("get_raw_stream(0)", "get_raw_stream(device_index)")
        .replace("index=0", "index=device_index")
        .replace("'cuda', 0)", "'cuda', device_index)")
    )
    assert ast.unparse(statement) == ast.unparse(ast.parse(expected))


@pytest.mark.parametrize(
    "source", ["x = f('cuda:0')", "def g():\n    return torch.zeros(1, device='cuda:3')"]
)
def test_a_device_named_in_a_text_is_refused(source: str) -> None:
    (statement,) = ast.parse(source).body
    with pytest.raises(NotCacheable, match=r"names the device cuda:\d"):
        unbind_device(statement)
