"""Tiny Hugging Face models, built from configs alone, and the calls we make of them: real input for tests.

A model has two layers and a vocabulary of 256: its graph has a real model's shape and nothing of its size.
Nothing here downloads anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor, nn
from torch.fx import GraphModule

transformers: Any = importlib.import_module("transformers")  # Any: its own types take mypy a minute.

Kind = Literal["static", "static_cache", "dynamic"]
KINDS: tuple[Kind, ...] = ("static", "static_cache", "dynamic")
DTYPES = (torch.float32, torch.bfloat16)

VOCABULARY = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
MAX_CACHE = 64

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 128,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": KV_HEADS}
_SLIDING = {**_GROUPED, "head_dim": HEAD_DIM, "sliding_window": 16}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": HEADS * HEAD_DIM,
    "n_head": HEADS,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _factory(model: str, config: str, options: dict[str, Any]) -> Callable[[int], nn.Module]:
    def build(layers: int) -> nn.Module:
        count = "n_layer" if model.startswith("GPT2") else "num_hidden_layers"
        settings = {**options, count: layers}
        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return built

    return build


# Name -> factory that takes the number of layers.
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "llama": _factory("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "qwen2": _factory("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": _factory("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": HEAD_DIM}),
    "gemma2": _factory("Gemma2ForCausalLM", "Gemma2Config", _SLIDING),
    "gemma3": _factory("Gemma3ForCausalLM", "Gemma3TextConfig", {**_SLIDING, "sliding_window_pattern": 2}),
    "mistral": _factory("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": None}),
    "phi3": _factory("Phi3ForCausalLM", "Phi3Config", _GROUPED),
    "mixtral": _factory(
        "MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "gpt2": _factory("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "olmo2": _factory("Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    "gpt_neox": _factory("GPTNeoXForCausalLM", "GPTNeoXConfig", _COMMON),
}


def build_model(name: str, dtype: torch.dtype = torch.float32, *, layers: int = 2) -> nn.Module:
    """Build a model in eval mode with seeded random weights: the same ones in every process."""
    torch.manual_seed(0)
    return MODELS[name](layers).eval().to(dtype)


def static_cache(model: nn.Module, *, batch: int, max_length: int = MAX_CACHE) -> Any:
    """Make an empty static KV cache whose tensors exist already, so that the graph only writes into them."""
    config: Any = model.config
    parameter = next(model.parameters())
    cache = transformers.StaticCache(config=config, max_cache_len=max_length)
    cache.early_initialization(
        batch_size=batch,
        num_heads=getattr(config, "num_key_value_heads", None) or HEADS,
        head_dim=HEAD_DIM,
        dtype=parameter.dtype,
        device=parameter.device,
    )
    return cache


def example_inputs(
    model: nn.Module, kind: Kind = "static", *, batch: int = 2, length: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Make the keyword arguments of one forward call. "dynamic" marks batch and sequence of both inputs."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    inputs: dict[str, Any] = {
        "input_ids": torch.randint(0, VOCABULARY, (batch, length), generator=generator).to(device),
        "attention_mask": torch.ones(batch, length, dtype=torch.int64, device=device),
        "use_cache": kind == "static_cache",
    }
    if kind == "static_cache":
        inputs["past_key_values"] = static_cache(model, batch=batch)
    if kind == "dynamic":
        for name in ("input_ids", "attention_mask"):
            for dim in (0, 1):
                torch._dynamo.mark_dynamic(inputs[name], dim)
    return inputs


@dataclass(frozen=True)
class Captured:
    """What Dynamo hands to a backend, and the arguments it then called the graph with."""

    gm: GraphModule
    example_inputs: list[Any]
    arguments: tuple[Any, ...]  # of the first call: tensors, and an int for each SymInt input
    result: Any


def capture(
    function: Callable[..., Any], *args: Any, backend_check: Callable[..., None] | None = None, **kwargs: Any
) -> Captured:
    """Trace a call with Dynamo as our backend does (inference, size-oblivious) and return its one graph.

    `backend_check(gm, example_inputs)` runs inside the backend, where the tracing context is alive. The call
    itself then runs the graph eagerly.
    """
    seen: list[tuple[GraphModule, list[Any]]] = []
    arguments: list[tuple[Any, ...]] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append((gm, inputs))
        if backend_check is not None:
            backend_check(gm, inputs)

        def run(*called_with: Any) -> Any:
            if not arguments:
                arguments.append(tuple(a.clone() if isinstance(a, Tensor) else a for a in called_with))
            return gm.forward(*called_with)

        return run

    torch._dynamo.reset()
    with torch.no_grad(), fx_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]  # added at run time
        result = torch.compile(function, backend=backend, fullgraph=True)(*args, **kwargs)
    assert len(seen) == 1
    return Captured(seen[0][0], seen[0][1], arguments[0], result)


def whole_way_cells() -> tuple[tuple[str, torch.dtype, Kind], ...]:
    """Every model in every kind; the dtype alternates, so that each kind and each model meets both."""
    return tuple(
        (model, DTYPES[(number + place) % 2], kind)
        for number, model in enumerate(MODELS)
        for place, kind in enumerate(KINDS)
    )


def capture_model(name: str, dtype: torch.dtype = torch.float32, kind: Kind = "static") -> Captured:
    """Trace one model of the list."""
    model = build_model(name, dtype)
    return capture(model, **example_inputs(model, kind))
