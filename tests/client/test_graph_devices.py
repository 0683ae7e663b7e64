"""Graphs carry no device index, so two devices of one type must not be taken for one."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fuse_cache.client.graph_values import ValueEncoder
from fuse_cache.client.symbols import SymbolTable
from fuse_cache.client.unkeyable import UnkeyableGraph


def test_a_graph_on_two_devices_of_one_type_is_refused_by_name() -> None:
    values = ValueEncoder(SymbolTable())
    with FakeTensorMode():
        first, other = (torch.empty(4, 2, device=f"cuda:{index}") for index in (1, 0))
        on_cpu = torch.empty(4, 2)
    assert values.tensor(first).device == "cuda"
    assert values.tensor(on_cpu).device == "cpu"
    with pytest.raises(UnkeyableGraph, match=r"tensors on cuda:1 and on cuda:0"):
        values.tensor(other)


def test_the_index_of_the_one_device_does_not_matter() -> None:
    with FakeTensorMode():
        metas = [
            ValueEncoder(SymbolTable()).tensor(torch.empty(4, 2, device=f"cuda:{index}")) for index in (0, 3)
        ]
    assert metas[0] == metas[1]
