"""Which passes run, with which thresholds: what a user asks for, and what that comes to on one target.

`PassConfig` is the wish, `PassConfig.resolve` applies levels, guards and tables, and `ResolvedPassConfig` is
the effect. Only the effect is encoded and enters the key: two wishes with one effect share artifacts. Why a
pass is on or off stays beside it, unhashed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from fuse_cache.proto.pass_resolved import (
    MAX_TOKENS,
    PassConfigError,
    PassSwitch,
    ResolvedPassConfig,
    TokenLimits,
    add_serving_passes,
)
from fuse_cache.proto.pass_tables import (
    ALLREDUCE_MAX_MB,
    CUDAGRAPH_MODES,
    DTYPE_BYTES,
    FACTS,
    LEVELS,
    PIPELINE,
    SP_MIN_HIDDEN,
    SP_MIN_MB_PER_GPU,
    PassFacts,
    target_family,
)
from fuse_cache.proto.request import Range

__all__ = [
    "FACTS",
    "LEVELS",
    "PIPELINE",
    "PassConfig",
    "PassConfigError",
    "PassContext",
    "PassFacts",
    "PassSwitch",
    "Range",
    "ResolvedPassConfig",
    "TokenLimits",
]

_MOST_MB = 1 << 20  # 1 TiB: no GPU has as much


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """What the guards ask about.

    `hidden` is the model's hidden size where it is known, `dtype` that of its activations ("bfloat16"), `tp`
    the tensor-parallel world size, `max_num_batched_tokens` the most tokens one call sees (None: not said),
    `splitting_ops` where the model is to be cut into pieces.
    """

    target: str
    tp: int = 1
    hidden: int | None = None
    dense: bool = True
    max_num_batched_tokens: int | None = None
    dtype: str = "bfloat16"
    splitting_ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise PassConfigError("tp", self.tp, "an integer from 1 on")
        if self.hidden is not None and self.hidden < 1:
            raise PassConfigError("hidden", self.hidden, "a positive integer or None")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 1:
            raise PassConfigError(
                "max_num_batched_tokens", self.max_num_batched_tokens, "a positive integer or None"
            )
        if self.dtype not in DTYPE_BYTES:
            raise PassConfigError("dtype", self.dtype, "one of " + ", ".join(DTYPE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class PassConfig:
    """What the user asks for. None leaves a pass to the level and a threshold to the tables.

    Raises:
        PassConfigError: a value is wrong; the message names the field and the allowed values.
    """

    fuse_norm_quant: bool | None = None
    fuse_act_quant: bool | None = None
    fuse_attn_quant: bool | None = None
    fuse_allreduce_rms: bool | None = None
    fuse_qk_norm_rope: bool | None = None
    fuse_rope_kvcache: bool | None = None
    fuse_qk_norm_rope_kvcache: bool | None = None
    enable_sp: bool | None = None
    fuse_gemm_comms: bool | None = None
    eliminate_noops: bool | None = None
    sp_min_token_num: int | None = None
    allreduce_max_size_mb: float | None = None
    rope_kvcache_max_token_num: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "allreduce_max_size_mb":
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not is_number or not 0 < value <= _MOST_MB:
                    raise PassConfigError(
                        field.name,
                        value,
                        f"a positive number of MB up to {_MOST_MB}, or None for the table's",
                    )
                object.__setattr__(self, field.name, float(value))
            elif field.name in ("sp_min_token_num", "rope_kvcache_max_token_num"):
                if type(value) is not int or not 1 <= value < 2**31:
                    raise PassConfigError(
                        field.name, value, "an integer from 1 to 2147483647, or None for the table's"
                    )
            elif type(value) is not bool:
                raise PassConfigError(field.name, value, "True, False, or None for the level's default")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> PassConfig:
        """Build from a dict as users write it.

        Raises:
            PassConfigError: a name is unknown (the message lists the known ones) or a value is wrong.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise PassConfigError(str(name), values[name], "one of these fields: " + ", ".join(known))
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every value.

    def resolve(self, context: PassContext, level: str = "O2") -> ResolvedPassConfig:
        """Return which passes run on this target, with which limits, and why each is on or off.

        Raises:
            PassConfigError: `level` is not one of O0, O1, O2, O3.
        """
        if level not in LEVELS:
            raise PassConfigError("level", level, "one of " + ", ".join(LEVELS))
        switches: dict[str, PassSwitch] = {}
        for facts in PIPELINE:
            if facts.field is not None:
                switches[facts.name] = self._switch(facts, context, level)
        _couple(self, switches)
        ordered = add_serving_passes(switches)
        asked = tuple(facts.name for facts in PIPELINE if facts.field and getattr(self, facts.field) is True)
        warnings = self._warnings(switches)
        mode, splitting_ops = CUDAGRAPH_MODES[level], context.splitting_ops
        if switches["sequence_parallel"].on:
            # A piece would begin with rows that the one before has left on other ranks.
            mode = "NONE" if mode == "NONE" else "FULL"
            if splitting_ops:
                warnings += ("splitting_ops has no effect: sequence parallelism needs the whole graph",)
                splitting_ops = ()
        return ResolvedPassConfig(
            switches=ordered,
            asked_by_name=asked,
            cudagraph_mode=mode,
            warnings=warnings,
            splitting_ops=splitting_ops,
        )

    def _switch(self, facts: PassFacts, context: PassContext, level: str) -> PassSwitch:
        """Decide one switchable pass: the wish, then the version, the target and the pass's own guard."""
        assert facts.field is not None
        wish: bool | None = getattr(self, facts.field)
        if wish is None:
            wished = level in facts.levels
            because = f"level {level}" if wished else f"not in level {level}"
            if wished and facts.levels == ("O2", "O3") and not context.dense:
                wished, because = False, "the model is not dense"
        else:
            wished, because = wish, f"{facts.field}={wish}"
        if (
            facts.name == "sequence_parallel"
            and not wished
            and self.enable_sp is None
            and self.fuse_gemm_comms
        ):
            wished, because = True, "fuse_gemm_comms needs it"
        if not wished:
            return PassSwitch(facts.name, False, because)
        if facts.name in _GUARDS:
            limits = _GUARDS[facts.name](self, context)
            if isinstance(limits, str):
                return PassSwitch(facts.name, False, limits)
        else:
            limits = TokenLimits()
        if not facts.built:
            return PassSwitch(facts.name, False, "not built in this version")
        if facts.kernels and target_family(context.target) not in facts.kernels:
            return PassSwitch(facts.name, False, f"no kernel for target {context.target} in this version")
        return PassSwitch(facts.name, True, because, limits)

    def _warnings(self, switches: Mapping[str, PassSwitch]) -> tuple[str, ...]:
        """Name the settings that have no effect."""
        passes = [
            f"{facts.field}=True has no effect: {switches[facts.name].reason}"
            for facts in PIPELINE
            if facts.field and getattr(self, facts.field) is True and not switches[facts.name].on
        ]
        thresholds = [
            f"{field} has no effect: {' and '.join(users)} off"
            for field, users in _THRESHOLD_USERS.items()
            if getattr(self, field) is not None and not any(switches[user].on for user in users)
        ]
        return (*passes, *thresholds)


_THRESHOLD_USERS = {
    "sp_min_token_num": ("sequence_parallel",),
    "allreduce_max_size_mb": ("allreduce_norm",),
    "rope_kvcache_max_token_num": ("rope_kvcache", "qk_norm_rope_kvcache"),
}


def _couple(config: PassConfig, switches: dict[str, PassSwitch]) -> None:
    """Async TP works on what sequence parallelism makes: without it there is nothing to overlap."""
    sp, tp = switches["sequence_parallel"], switches["async_tp"]
    if tp.on and not sp.on:
        switches["async_tp"] = PassSwitch("async_tp", False, f"sequence_parallel is off: {sp.reason}")


def _sequence_parallel_limits(config: PassConfig, context: PassContext) -> TokenLimits | str:
    """From how many tokens on it pays: min(MB_per_gpu * tp * 2^20 / (hidden * element bytes), max batch)."""
    if context.tp == 1:
        return "tp is 1"
    if (minimum := config.sp_min_token_num) is None:
        if context.target not in SP_MIN_MB_PER_GPU:
            return f"no threshold for target {context.target}: give sp_min_token_num"
        if context.hidden is None:
            return "the hidden size is not known: give sp_min_token_num"
        if context.hidden < SP_MIN_HIDDEN[context.target]:
            least = SP_MIN_HIDDEN[context.target]
            return f"hidden size {context.hidden} is below {least}: give sp_min_token_num to force it"
        row_bytes = context.hidden * DTYPE_BYTES[context.dtype]
        minimum = SP_MIN_MB_PER_GPU[context.target] * context.tp * 2**20 // row_bytes
    if context.max_num_batched_tokens is not None:
        minimum = min(minimum, context.max_num_batched_tokens)
    return TokenLimits(minimum=min(max(minimum, 1), MAX_TOKENS))


def _allreduce_limits(config: PassConfig, context: PassContext) -> TokenLimits | str:
    """Up to how many tokens one fused all-reduce beats the collective and the norm apart."""
    if context.tp == 1:
        return "tp is 1"
    if (size_mb := config.allreduce_max_size_mb) is None:
        if context.tp not in (by_world := ALLREDUCE_MAX_MB.get(context.target, {})):
            return f"no size limit for target {context.target} at tp {context.tp}: give allreduce_max_size_mb"
        size_mb = by_world[context.tp]
    if context.hidden is None:
        return "the hidden size is not known"
    maximum = int(size_mb * 2**20) // (context.hidden * DTYPE_BYTES[context.dtype])
    if maximum < 1:
        return f"allreduce_max_size_mb {size_mb} is less than one token"
    if context.max_num_batched_tokens is not None:
        maximum = min(maximum, context.max_num_batched_tokens)
    return TokenLimits(maximum=min(maximum, MAX_TOKENS))


def _rope_kvcache_limits(config: PassConfig, context: PassContext) -> TokenLimits | str:
    """The user's limit; without one the fused kernel serves every size, since it only saves traffic."""
    return TokenLimits(maximum=config.rope_kvcache_max_token_num)


_GUARDS = {
    "sequence_parallel": _sequence_parallel_limits,
    "async_tp": _sequence_parallel_limits,
    "allreduce_norm": _allreduce_limits,
    "rope_kvcache": _rope_kvcache_limits,
    "qk_norm_rope_kvcache": _rope_kvcache_limits,
}
