"""The daemon: reads its configuration, composes everything, serves until SIGTERM.

The one place that knows all classes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fuse_cache.server.cache.filesystem import StoreFolderError, refuse_unusable
from fuse_cache.server.config import ConfigError, ServerConfig, load_config
from fuse_cache.server.epoch import EpochError, package_root
from fuse_cache.server.interpreter import InterpreterError
from fuse_cache.server.logs import set_up_logging
from fuse_cache.server.toolchains import LinkedToolchain, stamped_interpreters, start_toolchains
from fuse_cache.server.worker.processes import become_subreaper
from fuse_cache.server.workfolder import WorkFolder

log = logging.getLogger(__name__)

ENTRY = "fuse_cache.server.worker.compile:build"
SEED_ENTRY = "fuse_cache.server.worker.seed:make_seed"


class StartError(RuntimeError):
    """The daemon cannot start; the message says what to change."""


def run(
    config: ServerConfig, *, entry: str = ENTRY, seed_entry: str = SEED_ENTRY, root: Path | None = None
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    `entry` is another build, and `root` another place to take fingerprints from, only in tests.
    """
    root = root or package_root()
    set_up_logging(config.log_level)
    try:
        refuse_unusable(config.store)
    except StoreFolderError as error:
        log.error("cannot start", extra={"why": str(error)})
        return 2  # Wrong usage, as any other option that cannot be right.
    try:
        work = WorkFolder(config.work_dir)
        # Before fork servers load anything, so that an edit in between is seen as a change.
        stamped = stamped_interpreters(config, root)
        become_subreaper()
        # Before gRPC is even imported: a process that has served gRPC must not fork.
        toolchains = start_toolchains(config, stamped, entry)
        return asyncio.run(_serve(config, work, toolchains, seed_entry))
    except (StoreFolderError, InterpreterError) as error:
        # Of another format, or without renames: seen when it is opened.
        log.error("cannot start", extra={"why": str(error)})
        return 2
    except (StartError, EpochError, OSError) as error:
        log.error("cannot start", extra={"why": str(error)})
        return 1


async def _serve(
    config: ServerConfig,
    work: WorkFolder,
    toolchains: list[LinkedToolchain],
    seed_entry: str,
) -> int:
    from fuse_cache.server.daemon import Daemon  # Imports gRPC, after the supervisor has been started.

    daemon = Daemon(config, work=work, toolchains=toolchains, seed_entry=seed_entry)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop_soon)
    try:
        await daemon.start()
        gc.collect()
        gc.freeze()  # What stays for ever need not be looked at again by each collection.
        await daemon.stopped()
    finally:
        await daemon.close()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve with the options of environment and file only: `fuse-cache serve` is for people."""
    try:
        config = load_config(config_file=Path(arguments[0]) if arguments else None)
    except ConfigError as error:
        print(f"fuse-cache: {error}", file=sys.stderr)
        return 2
    return run(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
