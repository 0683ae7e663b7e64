"""PassConfig: levels, guards, thresholds, ranges, and the bytes that enter the key."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from fuse_cache.proto.pass_config import (
    FACTS,
    PIPELINE,
    PassConfig,
    PassConfigError,
    PassContext,
    PassSwitch,
    Range,
    ResolvedPassConfig,
    TokenLimits,
)

CPU = PassContext(target="cpu-avx2")
STATIC = Range()


def on(config: PassConfig, context: PassContext = CPU, level: str = "O2") -> set[str]:
    return {s.name for s in config.resolve(context, level).switches if s.on}


def reason(config: PassConfig, name: str, context: PassContext = CPU) -> str:
    return next(s.reason for s in config.resolve(context).switches if s.name == name)


def test_level_o0_runs_nothing_and_asks_for_no_cuda_graphs() -> None:
    resolved = PassConfig().resolve(CPU, "O0")
    assert resolved.active_passes(STATIC) == ()
    assert resolved.cudagraph_mode == "NONE"


def test_an_explicit_field_wins_over_the_level() -> None:
    assert "norm_quant" in on(PassConfig(fuse_norm_quant=True), level="O0")
    assert "norm_quant" not in on(PassConfig(fuse_norm_quant=False), level="O2")


def test_a_pass_that_serves_nobody_does_not_run() -> None:
    only_noops = PassConfig(fuse_norm_quant=False, fuse_act_quant=False).resolve(CPU)
    expected = ("eliminate_noops", "cleanup", "clone_elimination", "functionalization")
    assert only_noops.active_passes(STATIC) == expected


def test_the_active_passes_come_in_pipeline_order() -> None:
    active = PassConfig().resolve(CPU).active_passes(STATIC)
    order = [facts.name for facts in PIPELINE]
    assert list(active) == sorted(active, key=order.index)
    assert active[-1] == "functionalization"


def test_a_pass_that_is_only_a_name_is_never_on_and_says_so() -> None:
    everything = PassConfig(**{f.field: True for f in PIPELINE if f.field})
    resolved = everything.resolve(PassContext(target="sm_90", tp=4, hidden=8192))
    for switch in resolved.switches:
        assert FACTS[switch.name].built or not switch.on
    assert reason(everything, "attn_quant") == "not built in this version"
    assert any(text.startswith("fuse_attn_quant=True has no effect") for text in resolved.warnings)


def test_a_fusion_without_a_kernel_for_the_target_is_off_and_says_so() -> None:
    assert "no kernel for target gfx942" in reason(PassConfig(), "norm_quant", PassContext(target="gfx942"))


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (PassContext(target="sm_90", tp=1, hidden=8192), "tp is 1"),
        (PassContext(target="sm_90", tp=8, hidden=4096), "below 8192"),
        (PassContext(target="sm_90", tp=8), "hidden size is not known"),
        (PassContext(target="sm_80", tp=8, hidden=8192), "no threshold for target sm_80"),
    ],
)
def test_sequence_parallelism_declines_with_the_reason(context: PassContext, words: str) -> None:
    assert words in reason(PassConfig(enable_sp=True), "sequence_parallel", context)
    assert words in reason(PassConfig(fuse_gemm_comms=True), "sequence_parallel", context)


def test_a_model_that_is_not_dense_gets_no_distributed_pass_by_level() -> None:
    context = PassContext(target="sm_90", tp=8, hidden=8192, dense=False)
    assert reason(PassConfig(), "sequence_parallel", context) == "the model is not dense"
    assert reason(PassConfig(enable_sp=True), "sequence_parallel", context) == "not built in this version"


def test_default_ranges_split_where_a_pass_starts_or_stops() -> None:
    limits = {"sequence_parallel": TokenLimits(minimum=2048), "allreduce_norm": TokenLimits(maximum=256)}
    resolved = ResolvedPassConfig(
        switches=tuple(
            PassSwitch(f.name, f.name in limits, "", limits.get(f.name, TokenLimits())) for f in PIPELINE
        )
    )
    assert resolved.default_ranges(4096) == ((1, 256), (257, 2047), (2048, 4096))
    assert resolved.default_ranges(100) == ((1, 100),)
    assert resolved.active_passes(Range(symbol=0, lower=1, upper=256)) == ("allreduce_norm",)
    assert resolved.active_passes(Range(symbol=0, lower=2048, upper=4096)) == ("sequence_parallel",)
    assert resolved.active_passes(Range(symbol=0, lower=200, upper=300)) == ()
    why = {n: r for n, _, r in resolved.reasons(Range(symbol=0, lower=200, upper=300))}
    assert why["allreduce_norm"] == ("range outside [1, 256] tokens")


def test_a_pass_without_limits_runs_for_every_range() -> None:
    resolved = PassConfig().resolve(CPU)
    assert resolved.default_ranges(4096) == ((1, 4096),)
    assert resolved.active_passes(Range(symbol=0, lower=1, upper=8)) == resolved.active_passes(STATIC)


def test_encoding_round_trips_and_depends_on_the_effect_alone() -> None:
    by_level = PassConfig().resolve(CPU, "O1")
    by_field = PassConfig(fuse_norm_quant=True, fuse_act_quant=True, eliminate_noops=True).resolve(CPU, "O0")
    assert by_level.encode() == by_field.encode()
    assert by_level.hash() == by_field.hash()
    decoded = ResolvedPassConfig.decode(by_level.encode())
    assert decoded == by_level
    assert decoded.active_passes(STATIC) == by_level.active_passes(STATIC)


def test_every_switch_changes_the_hash() -> None:
    hashes = {
        PassConfig(fuse_norm_quant=a, eliminate_noops=b).resolve(CPU).hash()
        for a in (True, False)
        for b in (True, False)
    }
    assert len(hashes) == 4


def test_damaged_bytes_are_refused_by_name_and_never_crash() -> None:
    data = PassConfig().resolve(CPU).encode()
    for cut in range(len(data)):
        with pytest.raises(PassConfigError):
            ResolvedPassConfig.decode(data[:cut])
    with pytest.raises(PassConfigError):
        ResolvedPassConfig.decode(data + b"\0")
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            try:
                other = ResolvedPassConfig.decode(bytes(flipped))
            except PassConfigError:
                continue
            assert other.encode() == bytes(flipped)


@pytest.mark.parametrize(
    "values",
    [
        {"fuse_norm_quant": 1},
        {"fuse_norm_quant": "yes"},
        {"sp_min_token_num": 0},
        {"sp_min_token_num": True},
        {"sp_min_token_num": 1.5},
        {"rope_kvcache_max_token_num": -1},
        {"allreduce_max_size_mb": 0},
        {"allreduce_max_size_mb": float("nan")},
        {"allreduce_max_size_mb": "64"},
        {"allreduce_max_size_mb": True},
        {"allreduce_max_size_mb": float("inf")},
        {"allreduce_max_size_mb": 10**400},
        {"sp_min_token_num": 2**31},
        {"no_such_field": True},
    ],
)
def test_a_wrong_value_names_the_field_and_what_is_allowed(values: dict[str, object]) -> None:
    (name,) = values
    with pytest.raises(PassConfigError, match=name) as raised:
        PassConfig.from_mapping(values)
    assert raised.value.allowed in str(raised.value)


def test_a_wrong_level_names_the_levels() -> None:
    with pytest.raises(PassConfigError, match=r"level='O4'.*O0, O1, O2, O3"):
        PassConfig().resolve(CPU, "O4")


def test_a_threshold_without_effect_warns() -> None:
    warnings = PassConfig(sp_min_token_num=128).resolve(CPU).warnings
    assert warnings == ("sp_min_token_num has no effect: sequence_parallel off",)
    assert PassConfig().resolve(CPU).warnings == ()


def test_every_field_of_the_contract_exists() -> None:
    names = {field.name for field in dataclasses.fields(PassConfig)}
    assert {facts.field for facts in PIPELINE if facts.field} <= names
    assert names >= {"sp_min_token_num", "allreduce_max_size_mb", "rope_kvcache_max_token_num"}


def test_the_module_needs_no_torch() -> None:
    code = "import sys, fuse_cache.proto.pass_config; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
