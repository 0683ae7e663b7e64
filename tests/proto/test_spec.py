"""The input spec, the CPU targets, the options and the pickle list: what both sides read alike."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuse_cache.proto import safe_pickle
from fuse_cache.proto.cpu_target import CPU_TARGETS, host_cpu_target, is_cpu_target, refusal
from fuse_cache.proto.expression import Op, SymExpr, combine, symbol
from fuse_cache.proto.graph import Input, Role, Symbol, SymMeta, TensorMeta
from fuse_cache.proto.inductor_options import ALLOWED, check_options
from fuse_cache.proto.spec import ArtifactSpec, Constant, SpecError, decode_spec, encode_spec

TWICE = combine(Op.MUL, [symbol(0), 2])
SPEC = ArtifactSpec(
    target="cpu-avx2",
    symbols=(Symbol(1, 64), Symbol(0, None)),
    inputs=(
        Input(SymMeta(symbol(0))),
        Input(TensorMeta("bfloat16", "cpu", (TWICE, 4), (4, 1)), Role.PARAMETER),
        Input(SymMeta(7)),
    ),
    guards=(combine(Op.GT, [symbol(1), 3]),),
    outputs=2,
    constants=(Constant("_tensor_constant0", "float32", (2, 3)),),
    aligned_inputs=(1,),
    mutated_inputs=(0, 1),
    torch="2.13.0",
)


def test_a_spec_survives_its_bytes() -> None:
    assert decode_spec(encode_spec(SPEC)) == SPEC


def test_every_cut_of_a_spec_is_a_spec_error_or_another_spec() -> None:
    data = encode_spec(SPEC)
    for length in range(len(data)):
        try:
            decode_spec(data[:length])
        except SpecError:
            continue


@given(st.binary(max_size=200))
def test_garbage_is_a_spec_error(data: bytes) -> None:
    try:
        decode_spec(data)
    except SpecError:
        return


@pytest.mark.parametrize(
    "bad",
    [
        SymExpr((1, 9)),  # a symbol that does not exist
        SymExpr((2, 2)),  # an addition of nothing
        SymExpr(()),
    ],
)
def test_a_bad_expression_is_a_spec_error(bad: SymExpr) -> None:
    with pytest.raises(SpecError, match="expression"):
        decode_spec(
            encode_spec(ArtifactSpec(target="", symbols=(), inputs=(Input(SymMeta(bad)),), outputs=0))
        )


def test_a_guard_must_be_a_truth_value() -> None:
    spec = ArtifactSpec(target="", symbols=(Symbol(1, 2),), inputs=(), guards=(symbol(0),), outputs=0)
    with pytest.raises(SpecError, match="expression"):
        decode_spec(encode_spec(spec))


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 / 0",)


@pytest.mark.parametrize("value", [Evil(), getattr, len, pickle.loads, [Evil()], {"a": Evil()}])
def test_a_name_off_the_list_is_refused_before_it_runs(value: object) -> None:
    with pytest.raises(safe_pickle.ForbiddenNameError):
        safe_pickle.loads(pickle.dumps(value))


def test_plain_data_passes() -> None:
    value = {"a": [1, 2.5, None, "text", (True, b"bytes")], "b": {1, 2}}
    assert safe_pickle.loads(pickle.dumps(value)) == value


def test_no_listed_name_leads_further() -> None:
    for module, names in safe_pickle.ALLOWED.items():
        assert not module.startswith(("os", "sys", "subprocess", "importlib"))
        assert not names & {"getattr", "eval", "exec", "__import__", "compile", "open", "attrgetter", "apply"}
    assert not safe_pickle.is_allowed("torch._C._functionalization", "apply_view_meta_sequence")
    assert safe_pickle.is_allowed("torch._C._functionalization", "view_ViewMeta")


def test_a_processor_gets_the_best_target_that_it_can_run() -> None:
    best, lesser = CPU_TARGETS
    assert host_cpu_target(best.flags) == best.name
    assert host_cpu_target(lesser.flags) == lesser.name
    assert host_cpu_target(lesser.flags - {"fma"}) is None
    assert refusal(lesser.name, best.flags) is None
    assert "avx512f" in str(refusal(best.name, lesser.flags))
    assert "not a CPU target" in str(refusal("sm_90", best.flags))
    assert is_cpu_target("cpu-avx2")
    assert not is_cpu_target("sm_90")


def test_options_are_checked_by_name_and_type() -> None:
    assert check_options({"split_reductions": False, "max_fusion_size": 8}) == (
        ("max_fusion_size", 8),
        ("split_reductions", False),
    )
    for name, value in [("max_autotune", True), ("max_fusion_size", True), ("split_reductions", 1)]:
        with pytest.raises(ValueError, match=name):
            check_options({name: value})
    assert list(ALLOWED) == sorted(ALLOWED)
