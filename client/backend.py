"""The Dynamo backend: `torch.compile(m, backend="fuse_cache")`.

Never worse than no cache: whatever goes wrong between here and the daemon, the graph is compiled locally, and
`report()` says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx.experimental._config as _symbolic_config
from torch.fx import GraphModule

from fuse_cache.client import fallback
from fuse_cache.client.build import GraphBuild, warn_once
from fuse_cache.client.dispatch import Slot, on_first_call
from fuse_cache.client.errors import OptionError
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.reports import GraphReport, add
from fuse_cache.client.settings import load_options
from fuse_cache.client.strict import check_strict

# Dynamo looks the backend up, and so imports this module, when torch.compile() is called: before it traces.
# Without this a call of size 1 is a graph of its own, or an error where the size was marked dynamic
# (DECISIONS/0003).

_symbolic_config.backed_size_oblivious = True


def fuse_cache(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Return a callable for `gm`: the backend that the entry point names.

    Raises:
        OptionError: an option is unknown or wrong. Dynamo wraps it in its own error.
        RemoteCompileError: mode="remote", and the daemon could not answer.
        FusionMissedError: strict=True, and a pass that was asked for matched nothing.
    """
    if mode is not None:
        raise OptionError(f"torch.compile(mode={mode!r}) is Inductor's: use options={{'level': ...}} here")
    return compile_graph(gm, example_inputs, _options(options or {}))


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], options: CompileOptions
) -> Callable[..., Any]:
    """Return a callable for `gm` under checked options. Errors as of `fuse_cache`."""
    began_s = time.monotonic()
    reports: list[GraphReport] = []
    if options.mode == "off":
        call = _plain(gm, example_inputs, options, reports)
    elif options.splitting_ops:
        from fuse_cache.client.pieces import compile_pieces

        call = compile_pieces(gm, example_inputs, options, reports)
    else:
        call = GraphBuild(gm, example_inputs, options, reports).run()
    for report in reports:
        report.seconds = time.monotonic() - began_s
    if options.strict:
        check_strict(options, reports)
    return call


def _plain(
    gm: GraphModule, example_inputs: Sequence[Any], options: CompileOptions, reports: list[GraphReport]
) -> Callable[..., Any]:
    """Compile as backend="inductor" does, and say so."""
    report = add(GraphReport(key="", source="local", reason="mode is off"))
    reports.append(report)

    def called() -> None:
        report.used = True

    def failed(error: Exception) -> Callable[..., Any]:
        raise error

    slot = Slot(0, 0, gm)
    on_first_call(slot, fallback.compile_plain(gm, example_inputs, options).call, called, failed)
    return lambda *args: slot.run(*args)


def _options(values: Mapping[str, object]) -> CompileOptions:
    options = load_options(values)
    for name in ("regional", "skip_tracing"):
        if getattr(options, name):
            warn_once(f"option {name} has no effect in this version: the whole graph is traced and compiled")
    return options
