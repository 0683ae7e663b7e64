"""A graph has the same bits whether an artifact or a local build computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

from fuse_cache.client.loader import load
from fuse_cache.passes.rounding import OPTION
from fuse_cache.proto.pass_config import PassConfig
from tests.captured import copied
from tests.compiled import compile_captured
from tests.models import capture
from tests.passes.graphs import same_codes
from tests.passes.spellings import divide, llama, rows, weights

# Torch's own, when Inductor is first imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def norm_quant(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Quantise a norm that was rounded before the weight and after it."""
    return divide(llama(x, weight), scale)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("inductor", [{}, {OPTION: False}], ids=["unset", "false"])
def test_artifact_and_local_build_have_the_same_bits(
    fused: bool, inductor: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = rows(63, 720, torch.bfloat16), weights(720, torch.bfloat16), torch.tensor(0.0371)
    expected = norm_quant(*arguments)
    made = compile_captured(
        capture(norm_quant, *arguments),
        tmp_path / "job",
        pass_config=PassConfig(fuse_norm_quant=fused),
        inductor_options=inductor,
    )
    with torch.no_grad():
        (remote,) = load(made.built.content)(*copied(made.captured.arguments))
    assert {row["name"]: row["matches"] for row in made.built.passes}["norm_quant"] == fused

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch._dynamo.reset()
    options: Any = {"mode": "local", "pass_config": {"fuse_norm_quant": fused}, "inductor": inductor}
    with fresh_cache(), torch.no_grad():
        local = torch.compile(norm_quant, backend="fuse_cache", fullgraph=True, options=options)(*arguments)
    assert same_codes(remote, local)
    if torch.__version__ < "2.13":
        return  # Inductor drops casts inside a loop there whatever it is told.
    if not inductor:
        assert same_codes(local, expected)
    elif not fused:
        assert not same_codes(local, expected), "the option made no difference: the test proves nothing"
