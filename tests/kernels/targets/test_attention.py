"""The policy against what an H200 chose (`tests/gpu/attention_choices.json`), and where sizes vary."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse_cache.kernels.targets.attention import BACKENDS, AttentionCall, NoBackendError, choose
from fuse_cache.proto.gpu_target import ARCHITECTURES

MEASURED = json.loads((Path(__file__).parents[2] / "gpu" / "attention_choices.json").read_text())
NAMES = {name[0]: name for name in BACKENDS}
CALL = AttentionCall(
    dtype="bfloat16", heads=8, kv_heads=8, head=128, value_head=128, queries=128, keys=128, is_square=True,
    is_static=True,
)  # fmt: skip


def measured() -> Iterator[tuple[AttentionCall, str]]:
    for key, letters in MEASURED["choices"].items():
        dtype, head, value_head, mask = key.split()
        cells = [(lengths, heads) for lengths in MEASURED["lengths"] for heads in MEASURED["heads"]]
        for ((queries, keys), (heads, kv_heads)), letter in zip(cells, letters, strict=True):
            yield (
                AttentionCall(
                    dtype=dtype,
                    heads=heads,
                    kv_heads=kv_heads,
                    head=int(head),
                    value_head=int(value_head),
                    queries=queries,
                    keys=keys,
                    is_square=queries == keys,
                    is_static=True,
                    mask={"bool": "bool", "float": dtype}.get(mask),
                    causal=mask == "causal",
                ),
                NAMES[letter],
            )


def test_chooses_what_an_h200_chose() -> None:
    """But for two kinds: heads that torch pads for flash, and grouped heads, which it leaves to math."""
    compared = 0
    for call, theirs in measured():
        ours = choose(call, ARCHITECTURES["sm_90"], BACKENDS)
        is_padded = theirs == "flash" and call.head % 8 != 0
        is_grouped = theirs == "math" and ours == "efficient" and call.heads != call.kv_heads
        assert ours == theirs or is_padded or is_grouped, (call, theirs)
        compared += ours == theirs
    assert compared > 500


def test_varying_lengths_never_get_a_kernel_that_a_size_in_them_breaks() -> None:
    varying = dataclasses.replace(CALL, queries=None, keys=None, is_static=False)
    masked = dataclasses.replace(varying, mask="bool")
    crossed = dataclasses.replace(varying, causal=True, is_square=False)
    for target in ARCHITECTURES:
        architecture = ARCHITECTURES[target]
        assert choose(varying, architecture, BACKENDS) == "flash", target
        assert choose(masked, architecture, BACKENDS) == "efficient", target
        # Flash aligns a causal mask to the end, torch to the beginning.
        assert choose(crossed, architecture, BACKENDS) == "efficient", target
        with pytest.raises(NoBackendError, match="cudnn: there may be a single key"):
            choose(varying, architecture, ("cudnn",))


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_only_the_generations_of_which_torch_says_so_prefer_cudnn(target: str) -> None:
    assert choose(CALL, ARCHITECTURES[target], BACKENDS) == "flash"
    assert choose(dataclasses.replace(CALL, mask="bool"), ARCHITECTURES[target], BACKENDS) == "efficient"
    assert choose(CALL, ARCHITECTURES[target], ("cudnn", "math")) == "cudnn"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head": 20, "value_head": 20}, "no multiples"),
        ({"dtype": "float64"}, "it has no float64"),
        ({"dropout": 0.1}, "dropout"),
        ({"keys": 0, "is_square": False}, "an empty sequence"),
        ({"mask": "float32"}, "a mask of float32 for a query of bfloat16"),
        ({"kv_heads": 3}, "8 heads are no multiple of 3"),
        ({"is_plain": False}, "four dimensions"),
    ],
)
def test_what_no_fused_kernel_computes_is_left_to_math(changes: dict[str, object], why: str) -> None:
    call = dataclasses.replace(CALL, **changes)  # type: ignore[arg-type]
    assert choose(call, ARCHITECTURES["sm_90"], BACKENDS) == "math"
    with pytest.raises(NoBackendError, match=why) as raised:
        choose(call, ARCHITECTURES["sm_90"], ("efficient", "cudnn"))
    assert "allow math as well" in str(raised.value)


def test_deterministic_hosts_get_no_cudnn() -> None:
    assert choose(dataclasses.replace(CALL, deterministic=True), ARCHITECTURES["sm_90"], BACKENDS) == "flash"
