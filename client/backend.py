"""The Dynamo backend: `torch.compile(m, backend="fuse_cache")`.

Never worse than no cache: whatever goes wrong between here and the daemon, the graph is compiled locally, and
`report()` says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch.fx import GraphModule

from fuse_cache.client import fallback
from fuse_cache.client.build import GraphBuild, LocalNeeded
from fuse_cache.client.desugar import desugar_to_aten
from fuse_cache.client.dispatch import Slot, on_first_call
from fuse_cache.client.dump import dump_reports
from fuse_cache.client.errors import OptionError
from fuse_cache.client.frames import is_users_own_function
from fuse_cache.client.graph import UnkeyableGraph, needs_desugaring
from fuse_cache.client.graph_values import value_of
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.ranges import range_symbol_of
from fuse_cache.client.reports import GraphReport, add
from fuse_cache.client.settings import load_options
from fuse_cache.client.split import split_graph
from fuse_cache.client.strict import check_strict
from fuse_cache.client.target import device_of
from fuse_cache.client.tracing import trace_size_obliviously
from fuse_cache.client.warn import warn_once


class Build(Protocol):
    """What becomes of one graph. `GraphBuild` says what both promise."""

    def run(self) -> Callable[..., Any]: ...
    def run_locally(self, reason: str) -> Callable[..., Any]: ...


MakeBuild: TypeAlias = Callable[..., Build]

# Dynamo looks the backend up, and so imports this module, when torch.compile() is called: before it traces.
trace_size_obliviously()


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
    trace_size_obliviously()
    if mode is not None:
        raise OptionError(f"torch.compile(mode={mode!r}) is Inductor's: use options={{'level': ...}} here")
    return compile_graph(gm, example_inputs, _options(options or {}))


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: CompileOptions,
    make_build: MakeBuild = GraphBuild,
) -> Callable[..., Any]:
    """Return a callable for `gm` under checked options. Errors as of `fuse_cache`.

    `make_build` is what becomes of each graph that is sent; `warm` only notes what would be asked.
    """
    began_s = time.monotonic()
    if options.attention_backend != "auto" and device_of(example_inputs).type == "cpu":
        warn_once("option attention_backend has no effect on a CPU: there is one attention kernel")
    reports: list[GraphReport] = []
    if options.mode == "off":
        call = _plain(gm, example_inputs, options, reports)
    elif options.splitting_ops:
        call = _in_pieces(gm, options, reports, make_build)
    elif options.mode != "local" and needs_desugaring(gm):
        call = _desugared(gm, example_inputs, options, reports, make_build)
    else:
        call = make_build(gm, example_inputs, options, reports, is_own=is_users_own_function()).run()
    for report in reports:
        report.seconds = time.monotonic() - began_s
    if options.dump_dir is not None:
        dump_reports(options.dump_dir, reports)
    if options.strict:
        check_strict(options, reports)
    return call


def _plain(
    gm: GraphModule, example_inputs: Sequence[Any], options: CompileOptions, reports: list[GraphReport]
) -> Callable[..., Any]:
    """Compile as backend="inductor" does, and say so."""
    report = add(GraphReport(key="", source="local", reason="mode is off"))
    reports.append(report)

    def called(seconds: float) -> None:
        report.used = True

    def failed(error: Exception) -> Callable[..., Any]:
        raise error

    slot = Slot(0, 0, gm)
    on_first_call(slot, fallback.compile_plain(gm, example_inputs, options).call, called, failed)
    return lambda *args: slot.run(*args)


# Options that are checked and go into the key where they must, and that no part of this version acts on.
_WITHOUT_EFFECT: Mapping[str, str] = {
    "regional": "the whole graph is traced and compiled",
    "skip_tracing": "the whole graph is traced and compiled",
}


def _options(values: Mapping[str, object]) -> CompileOptions:
    options = load_options(values)
    for name, instead in _WITHOUT_EFFECT.items():
        if getattr(options, name) not in (False, "auto"):
            warn_once(f"option {name} has no effect in this version: {instead}")
    return options


def _in_pieces(
    gm: GraphModule, options: CompileOptions, reports: list[GraphReport], make_build: MakeBuild
) -> Callable[..., Any]:
    """Cut the graph at `splitting_ops`; each piece between them is a graph of its own, the operators run as
    they are."""
    is_own = is_users_own_function()
    range_symbol = range_symbol_of(gm, options, is_own=is_own)
    split = split_graph(gm, options.splitting_ops)
    for piece in split.pieces:
        if piece.is_splitting:
            continue
        inputs = [value_of(node) for node in piece.gm.graph.find_nodes(op="placeholder")]
        build = make_build(piece.gm, inputs, options, reports, range_symbol=range_symbol, is_own=is_own)
        call = build.run()
        delattr(split.stitch, piece.name)  # A module's place takes modules only, unless it is given up first.
        setattr(split.stitch, piece.name, call)
    forward: Callable[..., Any] = split.stitch.forward
    return forward


def _desugared(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: CompileOptions,
    reports: list[GraphReport],
    make_build: MakeBuild,
) -> Callable[..., Any]:
    """Take tensor subclasses apart here, and have the plain graph that is left compiled there."""

    is_own = is_users_own_function()
    range_symbol = range_symbol_of(gm, options, is_own=is_own)
    # The inputs of the flat graph have names of AOTAutograd: a name of the user's was looked up above.
    may_be_asked = is_own and options.range_dim is None

    def compile_flat(flat: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        build = make_build(
            flat,
            inputs,
            options,
            reports,
            range_symbol=range_symbol,
            is_own=may_be_asked,
            may_compile_here=False,
        )
        return build.run()

    try:
        return desugar_to_aten(gm, example_inputs, compile_flat)
    except UnkeyableGraph as error:
        reason = f"not cacheable: {error.reason}"
    except LocalNeeded as error:
        reason = error.reason
    # Inductor takes the Dynamo graph apart itself, and the passes see what they always see.
    return make_build(gm, example_inputs, options, reports).run_locally(reason)
