"""Case 14, an exception in a pass: a named failure in the daemon and here, and the host has its results."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fuse_cache.client import report
from fuse_cache.passes import norm_quant
from fuse_cache.passes.base import Outcome, Setting
from tests.daemon import running_daemon
from tests.passes.spellings import divide, llama, rows, weights

# Torch's own, when Inductor is first imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
# A daemon imports it as a library of operators; the pass then raises on whatever it is given.
BROKEN = """
import dataclasses
from fuse_cache.passes import norm_quant

def _raise(graph, setting):
    raise ZeroDivisionError("planted in the daemon")

norm_quant.PASS = dataclasses.replace(norm_quant.PASS, run=_raise)
"""


def quantised_norm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return divide(llama(x, weight), scale)


def on_host(options: dict[str, Any]) -> dict[str, Any]:
    """Compile and call; the codes must be eager's but for Inductor's own rounding. Return the last report."""
    arguments = rows(5, 96, torch.float32), weights(96, torch.float32), torch.tensor(0.0371)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(quantised_norm, backend="fuse_cache", fullgraph=True, options=options)(*arguments)
    # Of NaN rows IEEE 754 leaves the sign open.
    equal = got.float().nan_to_num(999) == quantised_norm(*arguments).float().nan_to_num(999)
    assert equal.float().mean() > 0.95
    row: dict[str, Any] = report(json=True)[-1]
    assert (row["source"], row["used"]) == ("local", True)
    return row


def broken(graph: fx.Graph, setting: Setting) -> Outcome:
    """Stand for a pass with a bug."""
    raise ZeroDivisionError("planted here")


def test_a_local_build_does_without_passes_where_one_of_them_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_quant, "PASS", dataclasses.replace(norm_quant.PASS, run=broken))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    row = on_host({"mode": "local"})
    assert "compiled without passes: pass norm_quant: ZeroDivisionError: planted here" in row["reason"]
    assert not row["fusions"]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="pass norm_quant: ZeroDivisionError: planted here"):
        on_host({"mode": "local", "strict": True})


@pytest.mark.slow
def test_the_daemon_names_the_pass_that_raised_and_the_host_compiles_with_its_own(
    tmp_path: Path, trust_dir: Path
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "e2e_broken_pass.py").write_text(BROKEN)
    env = {
        "FUSE_CACHE_TRUST_DIR": str(trust_dir), "FUSE_CACHE_OP_MODULES": "e2e_broken_pass",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(library), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    with running_daemon(tmp_path / "daemon", "--workers", "1", env=env) as daemon:
        options = {"endpoint": daemon.endpoint, "max_queue_s": 60.0, "lookup_timeout_s": 5.0}
        row = on_host({**options, "cache_dir": str(tmp_path / "cache")})
        assert daemon.entries() == []
        stats = daemon.stats()
        assert (stats["compiles"], stats["failed_compiles"], stats["rejected_graphs"]) == (1, 1, 0)
    assert "pass norm_quant: ZeroDivisionError: planted in the daemon" in row["reason"]
    assert row["fusions"]["norm_quant"] == 1
