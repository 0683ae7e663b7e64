"""Writes graphs before and after each pass, and the patterns, for people. Changes no compilation."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from blake3 import blake3
from torch import fx
from torch._ops import OpOverload

from fuse_cache.passes.base import Pass

_log = logging.getLogger(__name__)
_DIGEST_LETTERS = 12  # 48 bits: a folder holds thousands of graphs at most.
CALL_LETTERS = 240  # Of one call's text: a view's sizes fit, a list of a thousand inputs does not.


class Observer(Protocol):
    """Who is told what a compilation passes through. None of it may change the graph."""

    def name_after(self, graph: fx.Graph) -> None:
        """Take the graph that is compiled, before anything else."""

    def graph(self, graph: fx.Graph, pass_name: str, moment: str) -> None:
        """Take a graph "before" or "after" a pass."""

    def patterns_of(self, one: Pass) -> None:
        """Take a pass that is on."""


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

    def patterns_of(self, one: Pass) -> None:
        """Write the patterns of a pass as Python, `patterns.<pass>.py`: they are the same for every graph."""
        if one.patterns:
            self._write(f"patterns.{one.name}.py", pattern_source(one))

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


def pattern_source(one: Pass) -> str:
    """Return the patterns of a pass as Python: what is searched for, and what takes its place."""
    parts = []
    for pattern in one.patterns:
        parts += [
            f"# {pattern.name}",
            inspect.getsource(pattern.search),
            inspect.getsource(pattern.replacement),
        ]
    return "\n".join(parts)


def call_text(op: str, target: object, args: object, kwargs: object) -> str:
    """Return a node's call as people write it, cut where it is long."""
    if op not in ("call_function", "call_method"):
        return op
    assert isinstance(args, tuple)
    assert isinstance(kwargs, Mapping)
    shown = [_argument_text(one) for one in args]
    shown += [f"{name}={_argument_text(one)}" for name, one in kwargs.items()]
    return _cut(f"{target_text(target)}({', '.join(shown)})")


def target_text(target: object) -> str:
    """Return the name of what a node calls."""
    if isinstance(target, OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def value_text(node: fx.Node) -> str:
    """Return dtype and sizes of a node's value, "" where it is no tensor."""
    # Dynamo's graphs carry the one, ATen's the other.
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return ""
    return _cut(f"{_argument_text(value.dtype)}{list(value.shape)}")


def _cut(text: str) -> str:
    return text if len(text) <= CALL_LETTERS else f"{text[: CALL_LETTERS - 1]}\u2026"


def _argument_text(argument: object) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, torch.dtype):
        return str(argument).removeprefix("torch.")
    if isinstance(argument, (tuple, list)):
        return f"[{', '.join(_argument_text(part) for part in argument)}]"
    return repr(argument)


def _as_text(graph: fx.Graph) -> str:
    lines = [f"{node.format_node() or node.op}  # {value_text(node)}" for node in graph.nodes]
    return "\n".join(lines) + "\n"
