"""Runs the passes that are on at their hooks in Inductor, verifies after each, and tells what they did."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fuse_cache.passes.base import NearMiss, Outcome, Pass, PassError, Setting
from fuse_cache.passes.dump import Dumper, Observer
from fuse_cache.passes.fingerprint import Fingerprints, fingerprints, installed_root
from fuse_cache.passes.order import PLACES, Stage
from fuse_cache.passes.rounding import rounding_patches
from fuse_cache.passes.verify import promise_of, verify
from fuse_cache.proto.pass_config import FACTS, Range, ResolvedPassConfig


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass of the pipeline did, or why it did not run."""

    name: str
    on: bool
    reason: str
    candidates: int = 0
    matches: int = 0
    milliseconds: float = 0.0
    bytes_saved: int = 0
    is_fusion: bool = False
    fingerprint: bytes = b""


@functools.cache
def installed_fingerprints() -> Fingerprints:
    """Return the fingerprints of this process's own sources, measured once."""
    return fingerprints(installed_root())


def load_pass(name: str) -> Pass:
    """Import a pass by its name in the pipeline."""
    found = importlib.import_module(PLACES[name].module).PASS
    assert isinstance(found, Pass)
    return found


class _Journal:
    """What the passes of one manager did so far. Sub-graphs go through the hooks one by one."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.seconds: dict[str, float] = {}

    def add(self, name: str, outcome: Outcome, seconds: float) -> None:
        total = self.outcomes.setdefault(name, Outcome())
        total.candidates += outcome.candidates
        total.matches += outcome.matches
        total.bytes_saved += outcome.bytes_saved
        total.near_misses += outcome.near_misses
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class StagePass(CustomGraphPass):
    """The passes of one hook, as Inductor wants them.

    Inductor copies its configuration now and then: a copy is the same object, so that no count is lost. A
    pickled one starts counting anew.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        setting: Setting,
        journal: _Journal | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self._names = names
        self._setting = setting
        self._journal = journal or _Journal()
        self._observers = observers

    def __call__(self, graph: fx.Graph) -> None:
        """Run the passes in order; each must leave a legal graph with the same inputs, outputs, writes."""
        if any(str(node.target).startswith("tangents") for node in graph.find_nodes(op="placeholder")):
            return  # A training graph: what it saves for the backward is not ours to change.
        promise = promise_of(graph)
        for name in self._names:
            for observer in self._observers:
                observer.graph(graph, name, "before")
            started = time.perf_counter()
            try:
                outcome = load_pass(name).run(graph, self._setting)
                verify(graph, promise, name)
            except (PassError, OSError, MemoryError):
                raise  # A full disk or memory is no fault of the pass.
            except Exception as error:
                raise PassError(name, f"{type(error).__name__}: {error}") from error
            self._journal.add(name, outcome, time.perf_counter() - started)
            for observer in self._observers:
                observer.graph(graph, name, "after")

    def uuid(self) -> str:
        """Return the id for Inductor's keys: order and sources of the passes, and the setting."""
        hasher = blake3(b"fuse-cache stage v1")
        known = installed_fingerprints().passes
        for part in (self._setting.target, *(f"{name} {known[name]}" for name in self._names)):
            hasher.update(len(part).to_bytes(8, "big") + part.encode())
        return hasher.hexdigest()

    def __deepcopy__(self, memo: object) -> StagePass:
        return self

    def __reduce__(self) -> tuple[type[StagePass], tuple[tuple[str, ...], Setting]]:
        return StagePass, (self._names, self._setting)


class PassManager:
    """The passes of one compilation.

    `inductor_patches()` goes into the options of the compilation; afterwards `report()` and `near_misses()`
    tell what happened. Where Inductor answered from a cache of its own no pass ran, and `ran` is False.
    `observers` are told the graph before and after each pass, as is the writer of `dump_dir`.
    """

    def __init__(
        self,
        resolved: ResolvedPassConfig,
        compile_range: Range,
        target: str,
        *,
        dump_dir: Path | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self._resolved = resolved
        self._range = compile_range
        self._active = resolved.active_passes(compile_range)
        self._setting = Setting(target)
        self._journal = _Journal()
        self._observers = observers
        if dump_dir is not None:
            self._observers += (Dumper(dump_dir, repr((target, compile_range, self._active))),)

    @property
    def ran(self) -> bool:
        """Whether any pass has been run yet."""
        return bool(self._journal.outcomes)

    def inductor_patches(
        self, gm: fx.GraphModule | None = None, options: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """Return the Inductor options that run the passes and keep the rounding of the graph `gm`.

        `options` are the user's, and win over what the rounding asks for: who says False gets Inductor's own.
        """
        patches = {**rounding_patches(gm, self._setting.family), **(options or {})}
        for stage in Stage:
            names = tuple(name for name in self._active if PLACES[name].stage is stage)
            if names:
                patches[stage.value] = StagePass(names, self._setting, self._journal, self._observers)
        for observer in self._observers:
            if gm is not None:
                observer.name_after(gm.graph)
            for name in self._active:
                observer.patterns_of(load_pass(name))
        return patches

    def report(self) -> tuple[PassRecord, ...]:
        """Return one record for every pass of the pipeline, in order, whether it ran or not."""
        known = installed_fingerprints().passes
        records = []
        for name, on, reason in self._resolved.reasons(self._range):
            outcome = self._journal.outcomes.get(name, Outcome())
            records.append(
                PassRecord(
                    name=name,
                    on=on,
                    reason=reason,
                    candidates=outcome.candidates,
                    matches=outcome.matches,
                    milliseconds=1000 * self._journal.seconds.get(name, 0.0),
                    bytes_saved=outcome.bytes_saved,
                    is_fusion=FACTS[name].is_fusion,
                    fingerprint=bytes.fromhex(known.get(name, "")),
                )
            )
        return tuple(records)

    def near_misses(self) -> tuple[NearMiss, ...]:
        """Return every candidate that was not fused, in the order of the passes."""
        return tuple(miss for outcome in self._journal.outcomes.values() for miss in outcome.near_misses)

    def fusions(self) -> dict[str, int]:
        """Return how often each fusion that was on matched."""
        return {record.name: record.matches for record in self.report() if record.on and record.is_fusion}
