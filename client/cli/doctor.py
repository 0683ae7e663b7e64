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


def _agreement(
    daemon: Connection, answer: wire.CapabilitiesResponse, toolchain: Toolchain, target: str | None
) -> Iterator[Finding]:
    """Say whether what the daemon builds can be used here."""
    offers = [Toolchain.from_message(offer.toolchain) for offer in answer.toolchains]
    reasons = [toolchain.compatible_with(offer, target=target or "cpu") for offer in offers]
    if None in reasons:
        yield Finding("same toolchain", "ok", f"the daemon builds with torch {toolchain.torch}")
    else:
        detail = "; ".join(str(reason) for reason in reasons) or "the daemon offers none"
        yield Finding(
            "same toolchain", "problem", detail, "install the same python minor and torch wheel on both"
        )
    runnable = [item.name for item in CPU_TARGETS if refusal(item.name) is None]
    shared = [name for name in answer.targets if name in runnable or not name.startswith("cpu-")]
    detail = f"the daemon builds for {', '.join(answer.targets) or 'nothing'}"
    if shared:
        yield Finding("same target", "ok", detail)
    else:
        yield Finding(
            "same target", "problem", detail, "start the daemon with --target " + (target or "TARGET")
        )
    if trusted_keys(daemon.options) & set(answer.builder_keys):
        yield Finding("signatures", "ok", "a builder that the daemon trusts is trusted here")
    else:
        advice = "give hosts the daemon's public key: option trusted_keys"
        yield Finding("signatures", "problem", "no builder of the daemon is trusted here", advice)
    if MANIFEST_SCHEMA not in answer.manifest_schemas:
        written = ", ".join(map(str, answer.manifest_schemas))
        detail = f"the daemon writes manifests of schema {written}, this client reads {MANIFEST_SCHEMA}"
        yield Finding("schema", "problem", detail, "use the same release of fuse-cache on both")
