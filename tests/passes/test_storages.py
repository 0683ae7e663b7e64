"""Fake values share storage where nodes do and nowhere else: Inductor's own passes go by that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fuse_cache.passes.aliasing import Aliasing, argument_effects
from fuse_cache.passes.reading import tensor
from tests.passes import spellings_dynamic
from tests.passes.pipeline import fuse_graph
from tests.passes.spellings import biased, divide_wide, llama, rows, weights
from tests.passes.spellings_more import add_wide, silu_wide
from tests.passes.tracing import trace

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def reshaped_norm(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return divide_wide(llama(x, w).view(-1, 128), s).float().view(x.shape).to(x.dtype) + x


def reshaped_norm_that_is_read(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    normed = llama(x, w)
    return divide_wide(normed.view(-1, 128), s).float().view(x.shape).to(x.dtype) + normed


def sum_and_norm(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    normed, total = add_wide(x, x.sin(), w)
    return divide_wide(normed.view(-1, 128), s).float().view(x.shape).to(x.dtype) + total


def wide_norm(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return biased(x, w).view(-1, 128).view(x.shape)


def gate(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return divide_wide(silu_wide(x, x.cos()).view(-1, 128), s).float().view(x.shape).to(x.dtype)


def groups(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    codes, scales = spellings_dynamic.group_flat(x.reshape(-1, 128))
    return (codes.float().view(-1, 64) * scales.reshape(-1, 1)).view(x.shape).to(x.dtype)


def keyless(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    codes, scales = spellings_dynamic.per_token_keyless(x.reshape(-1, 128))
    return (codes.float() * scales).view(x.shape).to(x.dtype)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "layer",
    [reshaped_norm, reshaped_norm_that_is_read, sum_and_norm, wide_norm, gate, groups, keyless],
)
def test_only_views_share_storage_with_what_they_view(layer: Layer, dynamic: bool) -> None:
    def model(x: Tensor, w: Tensor, s: Tensor) -> Any:
        return layer(layer(layer(x, w, s), w, s), w, s)

    x = rows(6, 5 * 128, torch.bfloat16).view(6, 5, 128)
    gm = trace(model, x, weights(128, torch.bfloat16), torch.tensor(0.0371), dynamic_rows=dynamic)
    check(gm.graph)
    found = fuse_graph(gm)
    assert found["raise_ir"].matches >= 3
    check(gm.graph)


def check(graph: fx.Graph) -> None:
    aliasing = Aliasing(graph)
    first: dict[int, fx.Node] = {}
    for node in graph.nodes:
        value = tensor(node)
        if value is None:
            continue
        other = first.setdefault(_storage(value), node)
        assert aliasing.root(node) is aliasing.root(other), f"{node} has the storage of {other}"
        for source in argument_effects(node)[0]:
            if (viewed := tensor(source)) is not None:
                assert _storage(value) == _storage(viewed), f"{node} has not the storage of {source}"


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
