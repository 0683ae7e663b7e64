"""What is known of each pass before any graph is seen: its order, option, levels, targets and size limits.

Tables only; `pass_config.py` draws the conclusions.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("O0", "O1", "O2", "O3")

# Recommended CUDA-graph mode by level. Capturing is the caller's; sequence parallelism changes it to FULL.
CUDAGRAPH_MODES = {"O0": "NONE", "O1": "PIECEWISE", "O2": "FULL_AND_PIECEWISE", "O3": "FULL_AND_PIECEWISE"}

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFacts:
    """One pass of the pipeline.

    `field` is the PassConfig field that switches it; a pass without one runs when a pass in `serves` does (an
    empty `serves`: when any pass does). `levels` are those at which the field is on by itself. `kernels`
    names the target families that have what the pass inserts ("cpu", "sm"); empty when it inserts nothing of
    its own. `built` is False for a pass that is only a name yet.
    """

    name: str
    field: str | None = None
    levels: tuple[str, ...] = ()
    built: bool = False
    kernels: tuple[str, ...] = ()
    serves: tuple[str, ...] = ()
    is_fusion: bool = False


_SINGLE = ("O1", "O2", "O3")
_DISTRIBUTED = ("O2", "O3")
_IR_USERS = (
    "sequence_parallel",
    "async_tp",
    "allreduce_norm",
    "norm_quant",
    "act_quant",
    "qk_norm_rope_kvcache",
    "rope_kvcache",
    "qk_norm_rope",
    "attn_quant",
)

# In the order in which they run: the order has meaning (more specific patterns first, repair last).
PIPELINE: tuple[PassFacts, ...] = (
    PassFacts(name="raise_ir", serves=_IR_USERS, built=True),
    PassFacts(name="eliminate_noops", field="eliminate_noops", levels=_SINGLE, built=True),
    PassFacts(name="sequence_parallel", field="enable_sp", levels=_DISTRIBUTED, is_fusion=True),
    PassFacts(name="async_tp", field="fuse_gemm_comms", levels=_DISTRIBUTED, is_fusion=True),
    PassFacts(name="allreduce_norm", field="fuse_allreduce_rms", levels=_DISTRIBUTED, is_fusion=True),
    PassFacts(name="norm_reshape", serves=("norm_quant", "act_quant"), built=True),
    PassFacts(
        name="norm_quant",
        field="fuse_norm_quant",
        levels=_SINGLE,
        built=True,
        kernels=("cpu", "sm"),
        is_fusion=True,
    ),
    PassFacts(
        name="act_quant",
        field="fuse_act_quant",
        levels=_SINGLE,
        built=True,
        kernels=("cpu", "sm"),
        is_fusion=True,
    ),
    PassFacts(name="split_tidy", serves=("qk_norm_rope_kvcache", "rope_kvcache", "qk_norm_rope"), built=True),
    PassFacts(name="qk_norm_rope_kvcache", field="fuse_qk_norm_rope_kvcache", levels=_SINGLE, is_fusion=True),
    PassFacts(name="rope_kvcache", field="fuse_rope_kvcache", levels=_SINGLE, is_fusion=True),
    PassFacts(name="qk_norm_rope", field="fuse_qk_norm_rope", levels=_SINGLE, is_fusion=True),
    PassFacts(name="attn_quant", field="fuse_attn_quant", is_fusion=True),
    PassFacts(name="cleanup", built=True),
    PassFacts(name="lower_ir", serves=_IR_USERS, built=True),
    PassFacts(name="clone_elimination", built=True),
    PassFacts(name="cleanup_lowered", serves=_IR_USERS, built=True),
    PassFacts(name="functionalization", built=True),
)

FACTS: dict[str, PassFacts] = {facts.name: facts for facts in PIPELINE}

# Sequence parallelism pays from this many MB of activations per GPU and this hidden size on (as in vLLM
# 0.31).
SP_MIN_HIDDEN: dict[str, int] = {"sm_90": 8192, "sm_100": 8192}
SP_MIN_MB_PER_GPU: dict[str, int] = {"sm_90": 8, "sm_100": 32}

# Largest tensor, in MB, for which the fused all-reduce wins, by target and world size: starting values.
ALLREDUCE_MAX_MB: dict[str, dict[int, float]] = {
    "sm_90": {2: 64, 4: 2, 8: 0.5},
    "sm_100": {2: 64, 4: 32, 8: 1},
}


def target_family(target: str) -> str:
    """Return "cpu" for "cpu-avx2", "sm" for "sm_90"."""
    return target.replace("_", "-").split("-", 1)[0]
