"""Counts, by architecture, what is there to raise and what is raised: `python -m tests.passes.fusions_table`.

Writes passes/FUSIONS.md; a test compares it with what the passes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.fx.experimental._config as fx_config
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from fuse_cache.passes import raise_ir
from fuse_cache.passes.fingerprint import installed_root
from tests.models import MODELS, Kind, build_model, example_inputs
from tests.passes.graphs import run_pass

PATH = installed_root() / "passes" / "FUSIONS.md"
_OURS = {
    "rms_norm": "fuse_cache.rms_norm.default",
    "add": "fuse_cache.fused_add_rms_norm.default",
    "act": "fuse_cache.act_and_mul.default",
}

_TAIL = (
    "\n"
    "# What happened in a model\n"
    "\n"
    "`report()` has the table of passes and the near misses of every graph, also of one that was\n"
    "loaded: they are in the artifact's manifest. `fuse-cache explain fusions KEY` shows them for a\n"
    "stored artifact, with what to do about each kind of near miss; `--html F` writes one page with\n"
    "drawings of what each pass changed. The backend's option `dump_dir` writes graph files\n"
    "(`request.*.fcgraph`), which `fuse-cache explain fusions FILE` runs through the passes without\n"
    "a daemon; `--dump DIR` writes the graph before and after each pass, and the patterns.\n"
)


@dataclass(frozen=True, slots=True)
class Counts:
    """What one model has, and what of it was raised; `named` counts the near misses."""

    norms: int
    gates: int
    raised_norms: int
    raised_sums: int
    raised_gates: int
    named: int

    @property
    def is_complete(self) -> bool:
        """Whether every norm and every gated activation was raised."""
        return self.norms == self.raised_norms + self.raised_sums and self.gates == self.raised_gates


def count(name: str, dtype: torch.dtype, kind: Kind) -> Counts:
    """Trace one model and raise it."""
    model = build_model(name, dtype)
    modules = [module for _, module in model.named_modules()]
    with fx_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]  # added at run time
        gm = _joint_graph(model, kind)
        outcome = run_pass(raise_ir.PASS, gm)
    names = [str(node.target) for node in gm.graph.nodes]
    return Counts(
        norms=sum("RMSNorm" in type(module).__name__ for module in modules),
        gates=sum(hasattr(module, "gate_proj") or hasattr(module, "gate_up_proj") for module in modules),
        raised_norms=names.count(_OURS["rms_norm"]),
        raised_sums=names.count(_OURS["add"]),
        raised_gates=names.count(_OURS["act"]),
        named=len(outcome.near_misses),
    )


def _joint_graph(model: nn.Module, kind: Kind) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def capture(gm: fx.GraphModule, inputs: Sequence[object]) -> object:
        found.append(gm)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=capture, decompositions=select_decomp_table(), keep_inference_input_mutations=True
    )
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(**example_inputs(model, kind))
    (gm,) = found
    return gm


def row(name: str, counts: Counts) -> str:
    """Return one line of the table."""
    cells = (name, counts.norms, counts.raised_norms, counts.raised_sums, counts.gates, counts.raised_gates)
    return "| " + " | ".join(map(str, cells)) + " |"


def text(table: dict[str, Counts]) -> str:
    """Return the whole file."""
    head = (
        "# What is raised, by architecture\n\n"
        "Made by `python -m tests.passes.fusions_table` from tiny models with these architectures\n"
        "(`tests/models.py`); tests hold it in both dtypes, static and dynamic. Every RMSNorm is raised\n"
        "alone or with the addition of the residual before it. GPT-2 and GPT-NeoX have layer norms and\n"
        "ungated activations: there is nothing to raise.\n\n"
        "| model | RMSNorms | raised alone | raised with the sum | gated activations | raised |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "\n".join(row(name, counts) for name, counts in table.items()) + "\n" + _TAIL


def main() -> None:
    """Write the table."""
    Path(PATH).write_text(text({name: count(name, torch.bfloat16, "dynamic") for name in MODELS}))


if __name__ == "__main__":
    main()
