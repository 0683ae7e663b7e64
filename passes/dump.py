"""Writes graphs before and after each pass, and the patterns, for people. Changes no compilation."""

from __future__ import annotations

import functools
import inspect
import logging
from pathlib import Path

from blake3 import blake3
from torch import fx

from fuse_cache.passes.base import Pass

_log = logging.getLogger(__name__)
_DIGEST_LETTERS = 12  # 48 bits: a folder holds thousands of graphs at most.


class Dumper:
    """Writes what one compilation passes through, as `<digest>.NN.<pass>.<moment>.py`.

    The digest is that of the graph that is compiled and of `setting`, all else that tells its compilation
    from another: any number of them can share a folder, and the same one writes the same names. NN counts
    the graphs in the order in which they were written. A folder that cannot be written costs the dumps and
    one warning per process, never the compilation.
    """

    def __init__(self, folder: Path, setting: str = "") -> None:
        self._folder = folder
        self._setting = setting
        self._digest = ""
        self._written = 0
        self._failed = False

    def name_after(self, graph: fx.Graph) -> None:
        """Name all files after `graph`. Without it they are named after the first that is written."""
        text = f"{self._setting}\n{_as_text(graph)}".encode()
        self._digest = blake3(text).hexdigest()[:_DIGEST_LETTERS]

    def graph(self, graph: fx.Graph, pass_name: str, moment: str) -> None:
        """Write one graph."""
        if not self._digest:
            self.name_after(graph)
        self._write(f"{self._digest}.{self._written:02d}.{pass_name}.{moment}.py", _as_text(graph))
        self._written += 1

    def patterns(self, one: Pass) -> None:
        """Write the patterns of a pass as Python, `patterns.<pass>.py`: they are the same for every graph."""
        if one.patterns:
            parts = []
            for pattern in one.patterns:
                parts += [
                    f"# {pattern.name}",
                    inspect.getsource(pattern.search),
                    inspect.getsource(pattern.replacement),
                ]
            self._write(f"patterns.{one.name}.py", "\n".join(parts))

    def _write(self, name: str, text: str) -> None:
        if self._failed:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_text(text)
        except OSError as error:
            self._failed = True
            _warn_once(self._folder, error.strerror or str(error))


@functools.cache
def _warn_once(folder: Path, reason: str) -> None:
    """Warn once in a process: models have many graphs."""
    _log.warning(
        "no dumps: %s. Make dump_dir=%s a folder that can be written and has room, or leave it out",
        reason,
        folder,
    )


def _as_text(graph: fx.Graph) -> str:
    lines = []
    for node in graph.nodes:
        # Dynamo's graphs carry the one, ATen's the other.
        value = node.meta.get("val", node.meta.get("example_value"))
        kind = (
            f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if hasattr(value, "dtype") else ""
        )
        lines.append(f"{node.format_node() or node.op}  # {kind}")
    return "\n".join(lines) + "\n"
