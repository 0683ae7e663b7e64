"""Writes graphs before and after each pass, and the patterns, for people. Changes no compilation."""

from __future__ import annotations

import inspect
from pathlib import Path

from torch import fx

from fuse_cache.passes.base import Pass


class Dumper:
    """Numbers the files of one compilation in the order in which they were written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = 0

    def graph(self, graph: fx.Graph, pass_name: str, moment: str) -> None:
        """Write one graph as `NN.<pass>.<moment>.py`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._written:02d}.{pass_name}.{moment}.py"
        path.write_text(_as_text(graph))
        self._written += 1

    def patterns(self, one: Pass) -> None:
        """Write the patterns of a pass as Python, `patterns.<pass>.py`."""
        if one.patterns:
            self._folder.mkdir(parents=True, exist_ok=True)
            parts = []
            for pattern in one.patterns:
                parts += [
                    f"# {pattern.name}",
                    inspect.getsource(pattern.search),
                    inspect.getsource(pattern.replacement),
                ]
            (self._folder / f"patterns.{one.name}.py").write_text("\n".join(parts))


def _as_text(graph: fx.Graph) -> str:
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        kind = (
            f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if hasattr(value, "dtype") else ""
        )
        lines.append(f"{node.format_node() or node.op}  # {kind}")
    return "\n".join(lines) + "\n"
