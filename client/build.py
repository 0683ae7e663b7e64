"""Builds the callable of one graph: encode, plan ranges, obtain, load, dispatch; locally where that fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from torch.fx import GraphModule

from fuse_cache.client import fallback
from fuse_cache.client.aliasing import SharedMemory
from fuse_cache.client.asking import ask, encode, resolve
from fuse_cache.client.checker import InputMismatchError
from fuse_cache.client.client import Client, Obtained, shared_client
from fuse_cache.client.dispatch import Call, Slot, dispatch, neighbourhood, on_first_call, slot_for
from fuse_cache.client.dump import dump_graph, dump_manifest, dump_requests
from fuse_cache.client.errors import ArtifactRejectedError, DaemonRefusedError, RemoteCompileError
from fuse_cache.client.graph import Encoded, UnkeyableGraph
from fuse_cache.client.loader import ArtifactLoadError, load
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.own_config import warn_of_own_settings
from fuse_cache.client.ranges import RangePlan
from fuse_cache.client.reports import GraphReport, add, describe_manifest
from fuse_cache.client.target import Target
from fuse_cache.client.verify import Want
from fuse_cache.client.warn import warn_once
from fuse_cache.proto.pass_config import PassContext, ResolvedPassConfig
from fuse_cache.proto.request import Range


class LocalNeeded(Exception):
    """A graph at ATen level cannot be had from the daemon: its Dynamo graph is to be compiled here
    instead."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GraphBuild:
    """One graph on its way to a callable. `reports` gets one GraphReport for each artifact or local build.

    `range_symbol` is what the ranges are about, for a piece of a larger graph; without `is_own` the graph is
    a later one of a broken function (`plan_ranges` says what that means). Without `may_compile_here` a need
    to compile locally is raised as LocalNeeded.
    """

    def __init__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        options: CompileOptions,
        reports: list[GraphReport],
        *,
        range_symbol: sympy.Symbol | None = None,
        is_own: bool = True,
        may_compile_here: bool = True,
    ) -> None:
        self._gm = gm
        self._example_inputs = example_inputs
        self._options = options
        self._reports = reports
        self._range_symbol = range_symbol
        self._is_own = is_own
        self._may_compile_here = may_compile_here
        self._target = Target("")
        self._resolved: ResolvedPassConfig = options.pass_config.resolve(
            PassContext(target="cpu"), options.level
        )
        self._local_builds: dict[tuple[str, ...], fallback.LocalBuild] = {}

    def run(self) -> Call:
        """Return the callable. Errors as of the backend."""
        options = self._options
        client = shared_client(options) if options.mode in ("auto", "remote") else None
        session = client.session() if client is not None else None
        if client is not None:
            warn_of_own_settings()
        try:
            encoded = encode(self._gm, self._example_inputs, options)
        except UnkeyableGraph as error:
            return self.run_locally(f"not cacheable: {error.reason}")
        asked = ask(
            encoded,
            self._example_inputs,
            options,
            session.targets if session else (),
            range_symbol=self._range_symbol,
            is_own=self._is_own,
        )
        self._target, self._resolved, plan, wants = asked.target, asked.resolved, asked.plan, asked.wants
        if options.dump_dir is not None:
            dump_graph(options.dump_dir, encoded.digest, self._gm)
            dump_requests(options.dump_dir, wants)
        if client is None or session is None or not wants:
            unfit = "no target of this version runs on this host's processor"
            return self._all_local(plan, unfit if client else "mode is local")
        answers = zip(wants, client.obtain(wants, session), strict=True)
        return self._dispatch([self._slot(client, encoded, *answer) for answer in answers], plan)

    def run_locally(self, reason: str) -> Call:
        """Return a callable compiled here, without asking anybody. Errors as of the backend."""
        self._target, self._resolved = resolve(self._options, self._example_inputs)
        return self._all_local(RangePlan((Range(),)), reason)

    def _slot(self, client: Client, encoded: Encoded, want: Want, answer: Obtained) -> Slot:
        """Return what serves one range: the artifact, or a local build."""
        compile_range = want.fields.range
        artifact = answer.artifact
        if artifact is None or answer.source is None:
            return self._local_slot(compile_range, _reason(answer), answer.lookup_seconds)
        try:
            loaded = load(artifact.content, artifact.manifest, graph=encoded.graph, names=encoded.input_names)
        except ArtifactLoadError as error:
            client.bad(want, artifact, "LOAD_FAILED", error.reason)
            reason = f"the artifact does not load here: {error.reason}"
            return self._local_slot(compile_range, reason, answer.lookup_seconds)
        report = self._report(compile_range, source=answer.source, lookup_seconds=answer.lookup_seconds)
        describe_manifest(report, artifact.manifest, self._resolved, compile_range)
        if self._options.dump_dir is not None:
            dump_manifest(self._options.dump_dir, artifact.manifest)
        slot = slot_for(compile_range)

        def called(seconds: float) -> None:
            report.used = True
            client.used(artifact)
            client.tuned(artifact, loaded.choices())

        def failed(error: Exception) -> Call:
            if isinstance(error, InputMismatchError):
                raise error
            client.bad(want, artifact, "CALL_FAILED", f"{type(error).__name__}: {error}")
            if loaded.spec.mutated_inputs:
                raise error  # Inputs may have been written already: running again could be wrong.
            return self._when_called(compile_range, f"the artifact failed at its first call: {error}", error)

        constants = encoded.constants
        run: Call = loaded
        if constants:

            def with_constants(*args: Any) -> Any:
                return loaded(*args, *constants)

            run = with_constants
        on_first_call(slot, self._checked(run, compile_range), called, failed)
        return slot

    def _checked(self, run: Call, compile_range: Range) -> Call:
        """Return `run` for inputs that share memory as when traced, and the graph as it is for others."""
        shared = SharedMemory(self._gm)
        if not shared:
            return run
        return shared.checked(run, self._gm, lambda reason: self._uncompiled(compile_range, reason))

    def _uncompiled(self, compile_range: Range, reason: str) -> None:
        """Say once that calls run as they are, without a compiler."""
        self._refuse_if_remote(reason, None)
        warn_once(f"run uncompiled: {reason}")
        self._report(compile_range, source="local", reason=reason, used=True)

    def _report(self, compile_range: Range, **fields: Any) -> GraphReport:
        bounds = None if compile_range.symbol is None else (compile_range.lower, compile_range.upper)
        nodes = sum(node.op in ("call_function", "call_method") for node in self._gm.graph.nodes)
        report = GraphReport(key="", compile_range=bounds, target=self._target.name, nodes=nodes, **fields)
        self._reports.append(report)
        return add(report)

    def _all_local(self, plan: RangePlan, reason: str) -> Call:
        return self._dispatch([self._local_slot(item, reason, 0.0) for item in plan.ranges], plan)

    def _local_slot(self, compile_range: Range, reason: str, lookup_seconds: float) -> Slot:
        """Compile here and now, once for all ranges with the same passes."""
        self._refuse_if_remote(reason, None)
        if not self._may_compile_here:
            raise LocalNeeded(reason)
        passes = self._resolved.active_passes(compile_range)
        if passes not in self._local_builds:
            self._local_builds[passes] = fallback.compile_while_tracing(
                self._gm,
                self._example_inputs,
                self._resolved,
                compile_range,
                self._target.name,
                self._options,
            )
        build = self._local_builds[passes]
        slot = slot_for(compile_range)
        self._account_local(slot, build, compile_range, reason, lookup_seconds)
        return slot

    def _when_called(self, compile_range: Range, reason: str, cause: Exception | None = None) -> Call:
        """Return a local build for calls that come after the trace."""
        self._refuse_if_remote(reason, cause)
        build = fallback.compile_when_called(
            self._gm, self._resolved, compile_range, self._target.name, self._options
        )
        slot = slot_for(compile_range)
        self._account_local(slot, build, compile_range, reason, 0.0)
        return lambda *args: slot.run(*args)

    def _account_local(
        self, slot: Slot, build: fallback.LocalBuild, compile_range: Range, reason: str, lookup_seconds: float
    ) -> None:
        if reason != "mode is local":
            warn_once(f"compiled here: {reason}")
        report = self._report(compile_range, source="local", reason=reason, lookup_seconds=lookup_seconds)
        build.describe(report)

        def called(seconds: float) -> None:
            report.used = True
            report.seconds = report.seconds or seconds  # Built at its first call, after the trace.
            build.describe(report)

        def failed(error: Exception) -> Call:
            raise error

        on_first_call(slot, self._checked(build.call, compile_range), called, failed)

    def _refuse_if_remote(self, reason: str, cause: Exception | None) -> None:
        if self._options.mode == "remote":
            raise RemoteCompileError(
                f'{reason} (mode="remote" does not compile here; mode="auto" does)'
            ) from cause

    def _dispatch(self, slots: list[Slot], plan: RangePlan) -> Call:
        gaps: dict[tuple[int, int], Call] = {}
        symbol = plan.ranges[0].symbol if plan.ranges else None

        def outside(size: int | None) -> Call:
            lower, upper, within = neighbourhood(slots, size)
            if (lower, upper) not in gaps:
                compile_range = Range() if size is None else Range(symbol=symbol, lower=lower, upper=upper)
                if within:
                    shown = "the call's sizes break" if size is None else f"size {size} breaks"
                    reason = f"{shown} an assumption that the artifact was built on"
                else:
                    reason = f"size {size} is outside every compile range ({plan.describe()})"
                gaps[lower, upper] = self._when_called(compile_range, reason)
            return gaps[lower, upper]

        return dispatch(slots, plan.source, outside)


def _reason(answer: Obtained) -> str:
    """Say why there is no artifact."""
    error = answer.error
    if isinstance(error, ArtifactRejectedError):
        return f"the artifact was refused: {error}"
    if isinstance(error, DaemonRefusedError):
        if error.reason == "NOT_CACHEABLE":
            return f"not cacheable: {error.message}"
        return f"the daemon refused: {error}"
    return f"no daemon: {error}"
