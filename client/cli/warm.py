"""`fuse-cache warm`: have the daemon hold what a fleet will ask for, before its first host starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fuse_cache.client.cli.connection import EndpointOption, JsonOption, print_json
from fuse_cache.client.settings import load_options
from fuse_cache.client.warm.manifest import read_manifest
from fuse_cache.client.warm.outcome import Outcome, Summary
from fuse_cache.proto.request import Range
from fuse_cache.proto.request_text import describe_range


def warm(
    manifest: Annotated[
        Path, typer.Argument(help="TOML file with [[model]] tables.", metavar="MANIFEST.toml")
    ],
    endpoint: EndpointOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what is there and what is not; compile nothing.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Trace the models of a manifest without weights, and have the daemon compile what hosts will ask for.

    Exit code 1: something failed, or with --dry-run is missing.
    """
    plans = read_manifest(manifest)
    values: dict[str, object] = {"mode": "remote"}
    if endpoint is not None:
        values["endpoint"] = endpoint
    load_options(values)
    # It loads torch, after the manifest was read: what is wrong with that is said at once.
    from fuse_cache.client.warm.run import run

    console = Console(stderr=True, highlight=False)
    listener = _Bars(console) if console.is_terminal and not json else _Lines(console, quiet=json)
    with listener.running():
        summary = run(plans, values, dry_run=dry_run, listener=listener)
    if json:
        print_json(_as_dict(summary))
    else:
        _print(summary)
    return 0 if summary.complete else 1


class _Lines:
    """A line for everything that happens: for files and pipes."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def tracing(self, model: str, device: str) -> None:
        self._line(f"{model}: tracing on {device}")

    def traced(self, model: str, artifacts: int, stored: int) -> None:
        self._line(f"{model}: {artifacts} artifacts, {stored} of them stored")

    def heard(self, outcome: Outcome) -> None:
        if outcome.state != "stored":
            what = outcome.reason or f"{outcome.seconds:.1f} s, {outcome.bytes:,} bytes"
            where = f"{_target(outcome)}, {describe_range(outcome.compile_range)}, {outcome.toolchain}"
            self._line(f"{outcome.model}: {outcome.state}: {where}: {what}")

    def failed(self, model: str, reason: str) -> None:
        self._line(f"{model}: failed: {reason}")

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False, soft_wrap=True)


class _Bars(_Lines):
    """A bar for each model, and a line for what goes wrong."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, quiet=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._progress:
            yield

    def tracing(self, model: str, device: str) -> None:
        if model not in self._tasks:
            self._tasks[model] = self._progress.add_task(f"{model}: tracing", total=None)

    def traced(self, model: str, artifacts: int, stored: int) -> None:
        task = self._progress.tasks[self._tasks[model]]
        self._progress.update(task.id, description=model, total=int(task.total or 0) + artifacts)

    def heard(self, outcome: Outcome) -> None:
        self._progress.advance(self._tasks[outcome.model])
        if outcome.state == "failed":
            self._progress.console.print(f"{outcome.model}: {outcome.reason}", markup=False)

    def failed(self, model: str, reason: str) -> None:
        self._progress.update(self._tasks[model], description=f"{model}: failed", total=1)
        self._progress.console.print(f"{model}: {reason}", markup=False)


def _print(summary: Summary) -> None:
    console = Console()
    table = Table("model", "target", "range", "toolchain", "", "seconds", "bytes", "key")
    for outcome in summary.outcomes:
        table.add_row(
            outcome.model, _target(outcome), describe_range(outcome.compile_range), outcome.toolchain,
            outcome.state, f"{outcome.seconds:.1f}", f"{outcome.bytes:,}", outcome.key.hex()[:12],
        )  # fmt: skip
    if summary.outcomes:
        console.print(table)
    for model, reasons in summary.local.items():
        for reason in dict.fromkeys(reasons):
            console.print(f"{model}: every host compiles a graph of it itself: {reason}", markup=False)
    for outcome in summary.outcomes:
        if outcome.state == "failed":
            console.print(f"{outcome.model}, {_target(outcome)}: failed: {outcome.reason}", markup=False)
    for model, reason in summary.failures.items():
        console.print(f"{model}: failed: {reason}", markup=False)
    counts = ", ".join(f"{count} {state}" for state, count in _counts(summary).items() if count)
    console.print(counts or "nothing to do", markup=False)


def _counts(summary: Summary) -> dict[str, int]:
    return {
        "compiled": summary.count("compiled"),
        "stored": summary.count("stored"),
        "missing": summary.count("missing"),
        "failed": summary.count("failed") + len(summary.failures),
    }


def _as_dict(summary: Summary) -> dict[str, Any]:
    return {
        **_counts(summary),
        "artifacts": [_outcome_as_dict(outcome) for outcome in summary.outcomes],
        "failures": [{"model": model, "reason": reason} for model, reason in summary.failures.items()],
        "local": [
            {"model": model, "reason": reason} for model, found in summary.local.items() for reason in found
        ],
    }


def _outcome_as_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "model": outcome.model,
        "target": outcome.target,
        "target_facts": dict(outcome.target_facts),
        "toolchain": outcome.toolchain,
        "compile_range": _range_as_list(outcome.compile_range),
        "state": outcome.state,
        "key": outcome.key.hex(),
        "bytes": outcome.bytes,
        "compile_seconds": outcome.seconds,
        "reason": outcome.reason,
    }


def _target(outcome: Outcome) -> str:
    """Return a target as people tell it from others: an architecture with the multiprocessors of its GPU."""
    count = dict(outcome.target_facts).get("multiprocessors")
    return outcome.target if count is None else f"{outcome.target} ({count} multiprocessors)"


def _range_as_list(compile_range: Range) -> list[int] | None:
    return None if compile_range.symbol is None else [compile_range.lower, compile_range.upper]
