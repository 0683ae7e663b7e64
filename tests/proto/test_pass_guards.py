"""The guards of the distributed passes, and what levels switch: as if every pass were built."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from fuse_cache.proto import pass_config, pass_resolved, pass_tables
from fuse_cache.proto.pass_config import PIPELINE, PassConfig, PassContext, Range, ResolvedPassConfig

H200 = PassContext(target="sm_90", tp=4, hidden=8192, max_num_batched_tokens=16384)
# 8 MB a GPU, 4 GPUs, rows of 8192 bf16.
SP_FROM = 8 * 4 * 2**20 // (8192 * 2)
# 2 MB at world size 4 on sm_90.
ALLREDUCE_TO = 2 * 2**20 // (8192 * 2)
SINGLE = {
    "eliminate_noops", "norm_quant", "act_quant", "qk_norm_rope_kvcache", "rope_kvcache", "qk_norm_rope",
}  # fmt: skip
DISTRIBUTED = {"sequence_parallel", "async_tp", "allreduce_norm"}


@pytest.fixture(autouse=True)
def all_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass is built, for every target."""
    built = tuple(dataclasses.replace(facts, built=True, kernels=()) for facts in PIPELINE)
    for module in (pass_tables, pass_config, pass_resolved):
        monkeypatch.setattr(module, "PIPELINE", built)
        monkeypatch.setattr(module, "FACTS", {facts.name: facts for facts in built})


def resolve(context: PassContext = H200, level: str = "O2", **fields: object) -> ResolvedPassConfig:
    return PassConfig.from_mapping(fields).resolve(context, level)


def on(resolved: ResolvedPassConfig) -> set[str]:
    """Return the passes with a field of their own that are on."""
    return {s.name for s in resolved.switches if s.on and pass_tables.FACTS[s.name].field}


def reason(resolved: ResolvedPassConfig, name: str) -> str:
    return next(switch.reason for switch in resolved.switches if switch.name == name)


def tokens(lower: int, upper: int) -> Range:
    return Range(symbol=0, lower=lower, upper=upper)


@pytest.mark.parametrize(
    ("level", "expected", "mode"),
    [
        ("O0", set(), "NONE"),
        ("O1", SINGLE, "PIECEWISE"),
        ("O2", SINGLE | DISTRIBUTED, "FULL"),
        ("O3", SINGLE | DISTRIBUTED, "FULL"),
    ],
)
def test_each_level_switches_its_passes_and_recommends_its_mode(
    level: str, expected: set[str], mode: str
) -> None:
    resolved = resolve(level=level)
    assert on(resolved) == expected
    assert resolved.cudagraph_mode == mode
    assert resolved.warnings == ()


def test_o0_leaves_nothing_to_run_for_any_range() -> None:
    resolved = resolve(level="O0")
    for compile_range in (Range(), tokens(1, 8), tokens(4096, 16384)):
        assert resolved.active_passes(compile_range) == ()
    assert not any(switch.on for switch in resolved.switches)


@pytest.mark.parametrize("change", [{"tp": 1}, {"dense": False}, {"target": "sm_80"}, {"target": "cpu-avx2"}])
def test_without_ranks_density_or_thresholds_no_level_switches_a_distributed_pass(
    change: dict[str, object],
) -> None:
    resolved = resolve(dataclasses.replace(H200, **change))  # type: ignore[arg-type]  # fields by name
    assert on(resolved) == SINGLE
    assert resolved.cudagraph_mode == "FULL_AND_PIECEWISE"
    assert resolved.warnings == ()  # Nobody asked for them by name.


def test_async_tp_turns_sequence_parallelism_on() -> None:
    resolved = resolve(level="O1", fuse_gemm_comms=True)
    assert on(resolved) == SINGLE | {"sequence_parallel", "async_tp"}
    assert reason(resolved, "sequence_parallel") == "fuse_gemm_comms needs it"


def test_async_tp_goes_off_with_sequence_parallelism_that_is_off_by_name() -> None:
    resolved = resolve(enable_sp=False, fuse_gemm_comms=True)
    assert not on(resolved) & {"sequence_parallel", "async_tp"}
    assert resolved.warnings == (
        "fuse_gemm_comms=True has no effect: sequence_parallel is off: enable_sp=False",
    )
    assert not on(resolve(enable_sp=False)) & {"async_tp"}
    assert resolve(enable_sp=False).warnings == ()


def test_one_rank_turns_both_off_whatever_was_asked_and_each_setting_warns() -> None:
    alone = dataclasses.replace(H200, tp=1)
    resolved = resolve(alone, enable_sp=True, fuse_gemm_comms=True, sp_min_token_num=64)
    assert not on(resolved) & DISTRIBUTED
    assert resolved.warnings == (
        "enable_sp=True has no effect: tp is 1",
        "fuse_gemm_comms=True has no effect: tp is 1",
        "sp_min_token_num has no effect: sequence_parallel off",
    )


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("field", [facts.field for facts in PIPELINE if facts.field])
@pytest.mark.parametrize("wish", [True, False])
def test_an_explicit_field_wins_over_the_level(level: str, field: str, wish: bool) -> None:
    (name,) = (facts.name for facts in PIPELINE if facts.field == field)
    wishes = {"enable_sp": True, field: wish} if field == "fuse_gemm_comms" else {field: wish}
    assert (name in on(PassConfig.from_mapping(wishes).resolve(H200, level))) is wish


def test_sequence_parallelism_needs_the_whole_graph() -> None:
    cut = dataclasses.replace(H200, splitting_ops=("scaled_dot_product_attention",))
    resolved = resolve(cut)
    assert resolved.splitting_ops == ()
    assert resolved.warnings == ("splitting_ops has no effect: sequence parallelism needs the whole graph",)
    assert resolved.cudagraph_mode == "FULL"
    without = resolve(cut, enable_sp=False)
    assert without.splitting_ops == cut.splitting_ops
    assert without.cudagraph_mode == "FULL_AND_PIECEWISE"
    assert without.warnings == ()


def test_no_cuda_graphs_at_o0_stay_none_with_sequence_parallelism() -> None:
    assert resolve(level="O0", enable_sp=True).cudagraph_mode == "NONE"


def test_sequence_parallelism_runs_for_ranges_that_begin_at_its_threshold() -> None:
    resolved = resolve()
    assert SP_FROM == 2048
    assert "sequence_parallel" in resolved.active_passes(tokens(SP_FROM, 16384))
    assert "sequence_parallel" not in resolved.active_passes(tokens(SP_FROM - 1, 16384))
    assert "sequence_parallel" not in resolved.active_passes(Range())  # Its size is not known.


def test_all_reduce_fusion_runs_for_ranges_that_end_at_its_limit() -> None:
    resolved = resolve()
    assert ALLREDUCE_TO == 128
    assert "allreduce_norm" in resolved.active_passes(tokens(1, ALLREDUCE_TO))
    assert "allreduce_norm" not in resolved.active_passes(tokens(1, ALLREDUCE_TO + 1))


def test_default_ranges_show_both_of_them() -> None:
    resolved = resolve()
    ranges = resolved.default_ranges(16384)
    assert ranges == ((1, 128), (129, 2047), (2048, 16384))
    active = [set(resolved.active_passes(tokens(*bounds))) & DISTRIBUTED for bounds in ranges]
    assert active == [{"allreduce_norm"}, set(), {"sequence_parallel", "async_tp"}]


@pytest.mark.parametrize(("target", "mb"), [("sm_90", 8), ("sm_100", 32)])
@pytest.mark.parametrize(
    ("tp", "hidden", "dtype", "width"), [(2, 8192, "bfloat16", 2), (8, 16384, "float32", 4)]
)
def test_the_threshold_of_sequence_parallelism_is_the_formula(
    target: str, mb: int, tp: int, hidden: int, dtype: str, width: int
) -> None:
    context = PassContext(target=target, tp=tp, hidden=hidden, dtype=dtype)
    limits = next(s.limits for s in resolve(context).switches if s.name == "sequence_parallel")
    assert limits.minimum == mb * tp * 2**20 // (hidden * width)


def test_a_small_model_gets_it_only_with_a_threshold_by_hand() -> None:
    small = dataclasses.replace(H200, hidden=4096)
    assert "sequence_parallel" not in on(resolve(small, enable_sp=True))
    resolved = resolve(small, enable_sp=True, sp_min_token_num=512)
    assert "sequence_parallel" in resolved.active_passes(tokens(512, 1024))
    unknown = dataclasses.replace(H200, hidden=None, target="sm_80")
    assert "sequence_parallel" in on(resolve(unknown, enable_sp=True, sp_min_token_num=512))


def test_the_threshold_is_never_above_the_largest_batch() -> None:
    few = dataclasses.replace(H200, max_num_batched_tokens=1000)
    assert "sequence_parallel" in resolve(few).active_passes(tokens(1000, 1000))
    assert resolve(few).default_ranges(1000) == ((1, 128), (129, 999), (1000, 1000))
    by_hand = resolve(few, sp_min_token_num=4096)
    assert "sequence_parallel" in by_hand.active_passes(tokens(1000, 1000))


def test_a_pass_asked_for_that_no_range_admits_warns() -> None:
    resolved = resolve(enable_sp=True, fuse_norm_quant=True)
    assert resolved.warnings_for([tokens(1, 128), tokens(129, 1024)]) == (
        "enable_sp=True has no effect: no range lies within [2048, ...] tokens",
    )
    assert resolved.warnings_for([tokens(1, 128), tokens(2048, 4096)]) == ()
    assert resolve().warnings_for([tokens(1, 128)]) == ()  # By level, not by name.


def test_the_cache_write_runs_up_to_its_limit_and_without_one_everywhere() -> None:
    limited = resolve(rope_kvcache_max_token_num=256)
    for name in ("rope_kvcache", "qk_norm_rope_kvcache"):
        assert name in limited.active_passes(tokens(1, 256))
        assert name not in limited.active_passes(tokens(1, 257))
        assert name in resolve().active_passes(tokens(1, 1 << 20))


@pytest.mark.parametrize("size_mb", [1e-6, 2**20])
def test_sizes_at_the_ends_of_what_is_allowed_can_be_encoded(size_mb: float) -> None:
    context = PassContext(target="sm_90", tp=2, hidden=1)
    resolved = resolve(context, allreduce_max_size_mb=size_mb, sp_min_token_num=2**31 - 1)
    assert ResolvedPassConfig.decode(resolved.encode()).encode() == resolved.encode()
    huge = dataclasses.replace(H200, tp=2**40, max_num_batched_tokens=None)
    assert ResolvedPassConfig.decode(resolve(huge).encode()) == resolve(huge)


def test_every_mix_of_wishes_resolves_encodes_and_keeps_the_guards() -> None:
    fields = ("enable_sp", "fuse_gemm_comms", "fuse_allreduce_rms", "sp_min_token_num")
    values = itertools.product((None, True, False), (None, True, False), (None, True), (None, 100))
    for mix, level, tp in itertools.product(values, ("O0", "O1", "O2"), (1, 4)):
        context = dataclasses.replace(H200, tp=tp)
        resolved = resolve(context, level, **dict(zip(fields, mix, strict=True)))
        active = on(resolved)
        assert not ("async_tp" in active and "sequence_parallel" not in active)
        assert not (tp == 1 and active & DISTRIBUTED)
        assert ResolvedPassConfig.decode(resolved.encode()) == resolved
        covered = [size for lower, upper in resolved.default_ranges(5000) for size in range(lower, upper + 1)]
        assert covered == list(range(1, 5001))
