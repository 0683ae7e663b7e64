"""Everything but the graph that a client asks for, and the digests that follow from it.

`request_digest` is what both sides compute from the same bytes; the daemon adds its own fingerprints to make the key (`server/key.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Scalar: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The inclusive interval of one symbol. `symbol` None: a static piece (lower and upper are 0)."""

    symbol: int | None = None
    lower: int = 0
    upper: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """Global state of the host that changes what the compiler makes of a graph."""

    grad_mode: bool = False
    inference_mode: bool = False
    autocast: tuple[tuple[str, str], ...] = ()  # (device, dtype) of each enabled autocast, sorted
    default_dtype: str = "float32"
    deterministic: bool = False
    deterministic_fill: bool = True
    float32_matmul_precision: str = "highest"
    allow_tf32: bool = False
    allow_bf16_reduced_precision: bool = True
    allow_fp16_reduced_precision: bool = True
    sdpa_backends: tuple[str, ...] = ("cudnn", "efficient", "flash", "math")  # enabled ones, sorted


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """The request. Each field can change the artifact."""

    graph_digest: bytes  # of the canonical graph bytes
    pass_config: bytes  # ResolvedPassConfig.encode(): which passes run, with which thresholds
    range: Range
    target: str  # "cpu-avx2", "sm_90"
    target_facts: tuple[tuple[str, Scalar], ...] = ()  # those that change code, sorted; empty for a target's own defaults
    inductor_options: tuple[tuple[str, Scalar], ...] = ()  # allow-listed, sorted
    attention_backend: str = "auto"
    ambient: Ambient = Ambient()
