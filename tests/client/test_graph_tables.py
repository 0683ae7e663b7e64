"""What encoding looks up instead of working it out again: made in time, and never for the wrong thing."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from fuse_cache.proto.graph import TensorMeta
from tests.captured import encode_call


def test_the_table_of_functions_is_made_when_the_backend_is_imported_not_in_the_first_encoding() -> None:
    source = (
        "import fuse_cache.client.graph\n"
        "from fuse_cache.kernels import fx_targets\n"
        "print(fx_targets._names.cache_info().currsize, fx_targets._functions.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_a_size_and_an_offset_that_are_told_apart_by_place_alone_give_different_metas() -> None:
    # Metas are looked up by sizes, strides and offset in one row: rank 1 at offset 4 is not rank 0 or 2.
    def views(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x[4:8] + 0,
            x.as_strided((4,), (1,), 4),
            x.as_strided((4, 1), (1, 4), 1),
            x.as_strided((), (), 4),
        )

    graph = encode_call(views, torch.zeros(16)).encoded.graph
    forms = {
        (meta.size, meta.stride, meta.storage_offset)
        for node in graph.nodes
        if isinstance(meta := node.meta, TensorMeta)
    }
    assert {((4,), (1,), 4), ((4, 1), (1, 4), 1), ((), (), 4), ((4,), (1,), 0)} <= forms
