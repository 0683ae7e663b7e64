"""A graph in pieces computes what the whole computes, and every piece that is compiled has a key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fuse_cache.client.errors import OptionError
from fuse_cache.client.graph import encode_graph
from fuse_cache.client.split import Split, resolve_splitting_op, split_graph
from tests.captured import copied
from tests.models import Captured, build_model, capture, example_inputs

ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


def _split_call(splitting_ops: list[str], function: Any, *args: Any, **kwargs: Any) -> tuple[Split, Captured]:
    made: list[Split] = []
    captured = capture(
        function, *args, backend_check=lambda gm, _: made.append(split_graph(gm, splitting_ops)), **kwargs
    )
    return made[0], captured


def _assert_equal(split: Split, captured: Captured) -> None:
    with torch.no_grad():
        got, want = split.stitch(*copied(captured.arguments)), captured.gm(*copied(captured.arguments))
    assert len(got) == len(want)
    assert all(torch.equal(left, right) for left, right in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", ["static_cache", "dynamic"])
def test_a_model_cut_at_attention_has_keyed_pieces_and_equal_results(kind: Any) -> None:
    model = build_model("llama")
    split, captured = _split_call([ATTENTION], model, **example_inputs(model, kind))
    assert [piece.is_splitting for piece in split.pieces] == [False, True, False, True, False]
    encoded = [encode_graph(piece.gm) for piece in split.pieces]
    targets = [{node.target for node in one.graph.nodes} for one in encoded]
    attention = "torch._C._nn.scaled_dot_product_attention"
    assert [attention in found for found in targets] == [piece.is_splitting for piece in split.pieces]
    assert encoded[1].digest == encoded[3].digest  # the attention of both layers
    _assert_equal(split, captured)


def test_pieces_with_equal_inputs_have_keys_of_their_own() -> None:
    # Case 3: x + 1 and x * 2 take the same [N, 128] input.
    def forward(x: Tensor) -> Tensor:
        return torch.softmax(x + 1, -1) * 2

    x = torch.randn(4, 128)
    torch._dynamo.mark_dynamic(x, 0)
    split, captured = _split_call(["torch.softmax"], forward, x)
    first, cut, last = (encode_graph(piece.gm) for piece in split.pieces)
    assert len({first.digest, cut.digest, last.digest}) == 3
    assert [node.target for node in cut.graph.nodes] == ["torch.softmax"]
    assert len(first.graph.symbols) == 1
    _assert_equal(split, captured)


def test_an_operator_of_several_results_keeps_them_in_its_piece() -> None:
    def forward(x: Tensor) -> Tensor:
        values, places = torch.topk(x * 2, 2)
        return values + places

    split, captured = _split_call(["torch.topk"], forward, torch.randn(4, 8))
    assert [len(encode_graph(piece.gm).graph.outputs) for piece in split.pieces] == [1, 2, 1]
    _assert_equal(split, captured)


def test_without_a_splitting_operator_there_is_one_piece_and_the_graph_is_left_alone() -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.relu(x) + 1

    split, captured = _split_call([ATTENTION], forward, torch.randn(4))
    (piece,) = split.pieces
    assert encode_graph(piece.gm).digest == encode_graph(captured.gm).digest
    _assert_equal(split, captured)


def test_names_mean_functions_operators_methods_or_nothing() -> None:
    assert torch.nn.functional.scaled_dot_product_attention in resolve_splitting_op(ATTENTION)
    assert torch.ops.aten.bmm in resolve_splitting_op("aten::bmm")
    assert resolve_splitting_op("aten::bmm.default")[0] is torch.ops.aten.bmm.default
    assert resolve_splitting_op("index_copy_") == ()
    for unknown in ("attention", "os.system", "nolib::attention", "torch.save"):
        with pytest.raises(OptionError, match="splitting_ops"):
            resolve_splitting_op(unknown)
