"""`fuse-cache doctor`: what would make a cache useless on this host, and what to do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from fuse_cache.client.cli.connection import Connection, EndpointOption, JsonOption, connect, print_json
from fuse_cache.client.errors import FuseCacheError
from fuse_cache.client.options import CompileOptions
from fuse_cache.client.settings import cache_folder
from fuse_cache.client.verify import trusted_keys
from fuse_cache.proto import compile_pb2 as wire
from fuse_cache.proto.cpu_target import CPU_TARGETS, host_cpu_target, refusal
from fuse_cache.proto.errors import ToolchainError, TrustError
from fuse_cache.proto.signing import MANIFEST_SCHEMA
from fuse_cache.proto.toolchain import Toolchain, local_toolchain
from fuse_cache.proto.trust import open_trust_folder

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)  # from, and below


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: "ok", "warning" (works, worse than it could) or "problem" (no artifact can be used here)."""

    check: str
    verdict: Literal["ok", "warning", "problem"]
    detail: str
    advice: str = ""


def doctor(endpoint: EndpointOption = None, json: JsonOption = False) -> int:
    """Check versions, target, reachability, permissions and trust. Exit code 1: there is a problem."""
    findings = list(_findings(connect(endpoint)))
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table("check", "", "found", "what to do")
        colours = {"ok": "green", "warning": "yellow", "problem": "red"}
        for finding in findings:
            verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
            table.add_row(finding.check, verdict, finding.detail, finding.advice)
        Console().print(table)
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0


def _findings(daemon: Connection) -> Iterator[Finding]:
    try:
        toolchain = local_toolchain()
    except ToolchainError as error:
        yield Finding("toolchain", "problem", str(error), "install torch in this environment")
        return
    yield _torch(toolchain)
    target = host_cpu_target()
    if target is None:
        wanted = refusal(CPU_TARGETS[-1].name) or ""
        yield Finding("CPU target", "warning", wanted, "GPU graphs only: CPU graphs compile locally here")
    else:
        yield Finding("CPU target", "ok", target)
    yield _cache(cache_folder(daemon.options))
    yield _trust(daemon)
    try:
        answer = daemon.call(daemon.compile().Capabilities, wire.CapabilitiesRequest())
    except FuseCacheError as error:
        yield Finding("daemon", "problem", str(error), "every graph compiles locally until it answers")
        return
    serving = answer.status == "SERVING"
    yield Finding(
        "daemon",
        "ok" if serving else "warning",
        f"{daemon.address}: version {answer.version}, {answer.status}",
    )
    yield from _agreement(daemon, answer, toolchain, target)


def _torch(toolchain: Toolchain) -> Finding:
    detail = f"python {toolchain.python}, torch {toolchain.torch}, triton {toolchain.triton or 'none'}"
    numbers = re.match(r"(\d+)\.(\d+)", toolchain.torch)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if OLDEST_TORCH <= version < NEWEST_TORCH:
        return Finding("toolchain", "ok", detail)
    return Finding("toolchain", "problem", detail, "install torch from 2.11 to below 2.15")


def _cache(folder: Path) -> Finding:
    probe = next(place for place in (folder, *folder.parents) if place.exists())
    if os.access(probe, os.W_OK | os.X_OK):
        return Finding("cache folder", "ok", str(folder))
    advice = "set XDG_CACHE_HOME or option cache_dir: without it every start asks the daemon"
    return Finding("cache folder", "warning", f"{folder}: {probe} cannot be written", advice)


def _trust(daemon: Connection) -> Finding:
    try:
        where = str(open_trust_folder(create=False).path)
    except TrustError as error:
        where = f"no trust folder ({error})"
    keys = trusted_keys(daemon.options)
    if keys:
        return Finding("trust", "ok", f"{len(keys)} trusted keys; {where}")
    advice = "start a daemon here as this user, or set option trusted_keys to what `fuse-cache keygen` made"
    return Finding("trust", "problem", f"no trusted key; {where}", advice)


_WAYS = {
    wire.WAY_PROCESSOR: "for such processors",
    wire.WAY_ON_DEVICE: "natively, on the GPU that is there",
    wire.WAY_WITHOUT_DEVICE: "without a GPU",
}


def _builders(answer: wire.CapabilitiesResponse, allow_cpu_wheel_builds: bool) -> Iterator[Finding]:
    """Say what the daemon builds with, for which targets, and how."""
    for offer in answer.toolchains:
        toolchain = Toolchain.from_message(offer.toolchain)
        by_way: dict[str, list[str]] = {}
        for item in offer.targets:
            by_way.setdefault(_WAYS.get(item.way, "in a way of its own"), []).append(item.name)
        ways = "; ".join(f"{', '.join(names)} {way}" for way, names in by_way.items()) or "for nothing"
        state = "" if offer.ready else " (its workers are not loaded yet)"
        detail = f"{toolchain}{state} builds {ways}"
        for_gpus = any(item.way != wire.WAY_PROCESSOR for item in offer.targets)
        if for_gpus and not toolchain.cuda and not allow_cpu_wheel_builds:
            advice = "install a CUDA wheel of torch there, or let hosts say allow_cpu_wheel_builds"
            detail += "; its torch has no CUDA, and hosts refuse what such a wheel built for a GPU"
            yield Finding(f"toolchain {offer.name}", "warning", detail, advice)
        else:
            yield Finding(f"toolchain {offer.name}", "ok", detail)


def _refusal(host: Toolchain, offer: wire.ToolchainOffer, target: str, options: CompileOptions) -> str | None:
    theirs = Toolchain.from_message(offer.toolchain)
    return host.compatible_with(theirs, target=target, any_wheel=options.allow_cpu_wheel_builds)


def _agreement(
    daemon: Connection, answer: wire.CapabilitiesResponse, toolchain: Toolchain, target: str | None
) -> Iterator[Finding]:
    """Say whether what the daemon builds can be used here."""
    yield from _builders(answer, daemon.options.allow_cpu_wheel_builds)
    runnable = [item.name for item in CPU_TARGETS if refusal(item.name) is None]
    served = [
        name
        for name in answer.targets
        if (name in runnable or not name.startswith("cpu-"))
        and any(_refusal(toolchain, offer, name, daemon.options) is None for offer in answer.toolchains)
    ]
    reasons = [
        f"{offer.name}: {_refusal(toolchain, offer, target or 'cpu', daemon.options)}"
        for offer in answer.toolchains
    ]
    if served:
        yield Finding("for this host", "ok", f"artifacts for {', '.join(served)}")
    elif not any(name in runnable or not name.startswith("cpu-") for name in answer.targets):
        detail = f"the daemon builds for {', '.join(answer.targets) or 'nothing'}"
        yield Finding(
            "for this host", "problem", detail, "start the daemon with --target " + (target or "TARGET")
        )
    else:
        advice = "install the python minor and torch wheel of one of them, or add a [toolchain.NAME] there"
        yield Finding("for this host", "problem", "; ".join(reasons) or "no toolchain on offer", advice)
    if trusted_keys(daemon.options) & set(answer.builder_keys):
        yield Finding("signatures", "ok", "a builder that the daemon trusts is trusted here")
    else:
        advice = "give hosts the daemon's public key: option trusted_keys"
        yield Finding("signatures", "problem", "no builder of the daemon is trusted here", advice)
    if MANIFEST_SCHEMA not in answer.manifest_schemas:
        written = ", ".join(map(str, answer.manifest_schemas))
        detail = f"the daemon writes manifests of schema {written}, this client reads {MANIFEST_SCHEMA}"
        yield Finding("schema", "problem", detail, "use the same release of fuse-cache on both")
