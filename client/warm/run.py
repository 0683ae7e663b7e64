"""One warm run: every model traced for each kind of device, then all of its artifacts asked for."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fuse_cache.client.client import Client
from fuse_cache.client.errors import OptionError
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.settings import load_options
from fuse_cache.client.warm.asking import Asker, Question
from fuse_cache.client.warm.hosts import toolchains_for
from fuse_cache.client.warm.manifest import ModelPlan
from fuse_cache.client.warm.outcome import Listener, Outcome, Summary
from fuse_cache.client.warm.tracing import trace
from fuse_cache.client.warm.weightless import ModelError
from fuse_cache.proto import cpu_target
from fuse_cache.proto.gpu_target import find_gpu, is_gpu_target
from fuse_cache.proto.target_facts import requested


def run(
    plans: Sequence[ModelPlan], values: Mapping[str, object], *, dry_run: bool, listener: Listener
) -> Summary:
    """Have the daemon hold all that hosts of these models will ask for. `values` are options of the client.

    Raises:
        OptionError: an option of a model is wrong, or no daemon builds for a target of it.
        DaemonUnavailableError, DaemonRefusedError: the daemon cannot be asked at all.
    """
    client = Client(load_options(values))
    # Before the first trace, which may take minutes. Not what is remembered: the daemon must be there now.
    answer = client.transport.capabilities()
    offered = tuple(answer.targets)
    checked = [(plan, _options(plan, values), _targets(plan, offered)) for plan in plans]
    summary = Summary()
    for plan, options, targets in checked:
        for device, some in _by_device(targets).items():
            any_wheel = options.allow_cpu_wheel_builds
            served = toolchains_for(client.toolchain, answer.toolchains, device, any_wheel=any_wheel)
            listener.tracing(plan.name, device)
            try:
                with for_device(some[0]):
                    traced = trace(plan, options, some, device)
            except (ModelError, OptionError) as error:
                summary.failures[plan.name] = str(error)
                listener.failed(plan.name, str(error))
                break
            if traced.refused:
                summary.local[plan.name] = traced.refused
            questions = [Question(plan.name, want) for want in traced.wants]
            for offer in served:
                asker = Asker(client, offer)
                summary.outcomes += _ask(asker, questions, dry_run=dry_run, listener=listener)
    client.close()
    return summary


def _ask(asker: Asker, questions: Sequence[Question], *, dry_run: bool, listener: Listener) -> list[Outcome]:
    stored = asker.stored(questions)
    outcomes: list[Outcome] = []

    def heard(outcome: Outcome) -> None:
        outcomes.append(outcome)
        listener.heard(outcome)

    if questions:
        count = sum(outcome is not None for outcome in stored)
        listener.traced(questions[0].model, len(questions), count)
    for outcome in stored:
        if outcome is not None:
            heard(outcome)
    wanting = [item for item, outcome in zip(questions, stored, strict=True) if outcome is None]
    if dry_run:
        for item in wanting:
            heard(asker.missing(item))
    else:
        asker.compile(wanting, heard)
    return outcomes


def _options(plan: ModelPlan, values: Mapping[str, object]) -> CompileOptions:
    try:
        return load_options({**values, **plan.options})
    except OptionError as error:
        raise OptionError(f"model {plan.name}: {error}") from error


def _targets(plan: ModelPlan, offered: Sequence[str]) -> tuple[str, ...]:
    """Return the model's targets, all that the daemon builds for where it names none."""
    for name in plan.targets:
        if requested(name)[0] not in offered:
            raise OptionError(
                f"model {plan.name}: the daemon does not build for {name}, but for {', '.join(offered)}: "
                "start it with --target, or change targets"
            )
    return plan.targets or tuple(offered)


def _by_device(targets: Sequence[str]) -> dict[str, list[str]]:
    """Return the targets by the device that a host's tensors are on."""
    found: dict[str, list[str]] = {}
    for name in targets:
        found.setdefault("cpu" if cpu_target.is_cpu_target(name) else "cuda", []).append(name)
    return found


@contextlib.contextmanager
def for_device(target: str) -> Iterator[None]:
    """Let a model be traced for a GPU that is not here."""
    name, _ = requested(target)
    if not is_gpu_target(name):
        yield
        return
    from fuse_cache.kernels.targets.cpu_wheel import is_cpu_wheel, register_guard
    from fuse_cache.kernels.targets.shim import compiling_for

    with tempfile.TemporaryDirectory(prefix="fuse-cache-warm-") as folder, compiling_for(find_gpu(target)):
        if is_cpu_wheel():
            register_guard(Path(folder))
        yield
