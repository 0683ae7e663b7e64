"""The toolchains of a daemon, from configuration to running supervisors. Imports no gRPC."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fuse_cache.proto.toolchain import Toolchain
from fuse_cache.server.config import OWN, ServerConfig
from fuse_cache.server.epoch import Sources, Stamps, take_epoch, take_stamps
from fuse_cache.server.interpreter import Interpreter, InterpreterError, ask_interpreter, own_interpreter
from fuse_cache.server.worker.environment import workers_environment
from fuse_cache.server.worker.link import SupervisorLink

Stamped = Mapping[str, tuple[Interpreter, Stamps]]


class LinkedToolchain(NamedTuple):
    """A toolchain with the supervisor of its workers."""

    name: str
    sources: Sources
    link: SupervisorLink


def stamped_interpreters(config: ServerConfig, root: Path) -> Stamped:
    """Return each with what the disk says of it. The daemon's own gives way to a named one that is the same.

    Raises:
        InterpreterError: one cannot be used, or two that are named are one and the same.
        EpochError: of one the toolchain cannot be told.
    """
    found: dict[str, tuple[Interpreter, Stamps]] = {}
    names: dict[Toolchain, str] = {}
    for name, interpreter in _interpreters(config, root).items():
        stamps = take_stamps(interpreter, op_modules=config.op_modules)
        twin = names.setdefault(stamps.toolchain, name)
        if twin == OWN != name:
            names[stamps.toolchain] = name
            found = {name: (interpreter, stamps)} | {n: item for n, item in found.items() if n != OWN}
        elif twin != name:
            raise InterpreterError(
                f"[toolchain.{name}] has what [toolchain.{twin}] has ({stamps.toolchain}): leave one out"
            )
        else:
            found[name] = interpreter, stamps
    return found


def start_toolchains(config: ServerConfig, stamped: Stamped, entry: str) -> list[LinkedToolchain]:
    """Start a supervisor for each (13 MB; its fork server is loaded later), and take the fingerprints.

    Raises:
        EpochError: the fingerprints cannot be taken.
    """
    links: list[SupervisorLink] = []
    for interpreter, _ in stamped.values():
        links.append(SupervisorLink(entry, os.environ, executable=interpreter.executable, siblings=links))
        links[-1].start()
    return [
        LinkedToolchain(name, _sources(config, name, *taken), link)
        for (name, taken), link in zip(stamped.items(), links, strict=True)
    ]


def _interpreters(config: ServerConfig, root: Path) -> dict[str, Interpreter]:
    """Return the daemon's own Python, and those that the configuration names."""
    found = {OWN: own_interpreter(root)}
    for name, item in config.toolchain.items():
        try:
            found[name] = ask_interpreter(item.python, workers_environment(os.environ))
        except InterpreterError as error:
            raise InterpreterError(f"[toolchain.{name}] python: {error}") from error
    return found


def _sources(config: ServerConfig, name: str, interpreter: Interpreter, stamps: Stamps) -> Sources:
    memo = config.work_dir / ("fingerprints.json" if name == OWN else f"fingerprints-{name}.json")
    epoch = take_epoch(stamps, interpreter, op_modules=config.op_modules, memo=memo)
    return Sources(epoch, stamps, interpreter, memo)
