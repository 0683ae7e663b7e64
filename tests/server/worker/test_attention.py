"""The calls that the policy puts in compute what the model asked for: each is run here by its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fuse_cache.client.graph import encode_graph
from fuse_cache.proto.gpu_target import ARCHITECTURES
from fuse_cache.proto.request import Range
from fuse_cache.server.worker.attention import Policy
from fuse_cache.server.worker.protocol import BuildFailed
from fuse_cache.server.worker.rebuild import Rebuilt, rebuild
from tests.models import Captured, capture

ATEN: Any = torch.ops.aten


def tensors(*, heads: int = 4, kv_heads: int = 4, queries: int = 6, keys: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, queries, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, 16))
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v).contiguous()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.3).contiguous()


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    return scaled_dot_product_attention(q, k, v, columns[None, :] <= rows[:, None]).contiguous()


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.arange(k.shape[2]).to(q.dtype).expand(2, 1, q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=bias).contiguous()


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    mask = columns[None, :] <= rows[:, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).contiguous()


def built(captured: Captured, bounds: Range, *allowed: str) -> tuple[Rebuilt, dict[str, int]]:
    """Rebuild a captured graph under the policy, and say what it chose."""
    policy = Policy(ARCHITECTURES["sm_90"], allowed)
    chosen: dict[str, int] = {}
    apply = policy.apply

    def noted(gm: torch.fx.GraphModule) -> dict[str, int]:
        chosen.update(apply(gm))
        return chosen

    policy.apply = noted  # type: ignore[method-assign]
    return rebuild(encode_graph(captured.gm).graph, bounds, policy), chosen


class ByDefinition(torch.fx.Interpreter):
    """Runs the fused kernels, which this machine does not have, as what torch documents of them."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(target)
        if "_scaled_dot_product_flash_attention" in name:
            q, k, v, dropout, is_causal, _ = args
            assert q.shape[2] == k.shape[2] or not is_causal
            return (self._attend(q, k, v, None, dropout, is_causal, **kwargs),)
        if "_scaled_dot_product_efficient_attention" in name:
            q, k, v, bias, _, dropout, is_causal = args
            assert k.shape[1] == q.shape[1]
            assert bias is None or bias.shape == (*q.shape[:3], k.shape[2])
            return (self._attend(q, k, v, bias, dropout, is_causal, **kwargs),)
        if "_scaled_dot_product_cudnn_attention" in name:
            q, k, v, bias, _, dropout, is_causal, _ = args
            return (self._attend(q, k, v, bias, dropout, is_causal, **kwargs),)
        return super().call_function(target, args, kwargs)

    @staticmethod
    def _attend(
        q: Tensor, k: Tensor, v: Tensor, bias: Any, dropout: float, is_causal: bool, scale: float
    ) -> Tensor:
        assert bias is None or bias.dtype == q.dtype
        return scaled_dot_product_attention(
            q, k, v, bias, dropout, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


@pytest.mark.parametrize(
    ("function", "keys"), [(plain, 6), (causal, 6), (causal, 9), (masked, 9), (biased, 6), (grouped, 6)]
)
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "math"])
def test_each_backend_computes_what_the_model_asked_for(
    function: Callable[..., Tensor], keys: int, backend: str
) -> None:
    kv_heads = 2 if function is grouped else 4
    inputs = tensors(kv_heads=kv_heads, keys=keys)
    captured = capture(function, *inputs)
    rebuilt, chosen = built(captured, Range(), backend, "math")
    expected = backend
    if backend == "flash" and (function not in (plain, causal) or (function is causal and keys != 6)):
        expected = "math"
    assert chosen == {expected: 1}
    got = ByDefinition(rebuilt.gm).run(*captured.arguments)[0]
    torch.testing.assert_close(got, function(*inputs), rtol=2e-2, atol=2e-2)
    rest = {str(node.target) for node in rebuilt.gm.graph.nodes}
    assert not any(name.endswith("scaled_dot_product_attention") for name in rest)


def test_a_host_that_allows_too_little_is_told_why() -> None:
    captured = capture(masked, *tensors())
    with pytest.raises(BuildFailed, match="flash: it takes no mask") as raised:
        built(captured, Range(), "flash")
    assert raised.value.reason == "COMPILE_FAILED"


def test_sizes_that_vary_leave_no_guard() -> None:
    inputs = tensors()
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 2)

    def as_models_do(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    captured = capture(as_models_do, *inputs)
    rebuilt, chosen = built(
        captured, Range(symbol=0, lower=1, upper=64), "cudnn", "flash", "efficient", "math"
    )
    assert set(chosen) <= {"flash", "efficient"}
    plain_rebuilt = rebuild(encode_graph(captured.gm).graph, Range(symbol=0, lower=1, upper=64))
    assert len(rebuilt.shape_env.guards) <= len(plain_rebuilt.shape_env.guards)
