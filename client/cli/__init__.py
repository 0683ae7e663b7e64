"""The command line, `fuse-cache`. Exit codes: 0 done, 1 failed, 2 wrong usage. Importing it imports no
torch."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from fuse_cache.client.errors import FuseCacheError, OptionError

__all__ = ["main"]

# Command -> module. `serve` is loaded alone: the daemon's process is the smaller for it.
_COMMANDS = {
    "serve": "serve",
    "stats": "store",
    "ls": "store",
    "show": "store",
    "rm": "store",
    "doctor": "doctor",
    "keygen": "keygen",
    "warm": "warm",
}

# Command with commands of its own -> them. Its module has its name.
_GROUPS = {"explain": ("miss", "fusions")}


def _app(only: str | None) -> typer.Typer:
    """Return the command line with all commands, or with `only` one where that is known already."""
    app = typer.Typer(
        name="fuse-cache",
        help="Compile PyTorch graphs once and serve the result to a whole fleet.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    known = [*_COMMANDS, *_GROUPS]
    for name in [only] if only in known else known:
        module = importlib.import_module(f"fuse_cache.client.cli.{_COMMANDS.get(name, name)}")
        if name in _COMMANDS:
            app.command(name=name)(_exiting(getattr(module, name)))
            continue
        group = typer.Typer(no_args_is_help=True, help=module.__doc__)
        for inner in _GROUPS[name]:
            group.command(name=inner)(_exiting(getattr(module, inner)))
        app.add_typer(group, name=name)
    app.callback()(_nothing)  # With one command Typer would take its name for an argument.
    return app


def _nothing() -> None:
    """Compile PyTorch graphs once and serve the result to a whole fleet."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        _app(words[0] if words else None)(args=words)
    except OptionError as error:
        _fail(str(error), 2)
    except FuseCacheError as error:
        _fail(str(error), 1)
    sys.exit(0)


def _exiting(command: Callable[..., int | None]) -> Callable[..., None]:
    """Make a command's result the exit code."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        raise typer.Exit(command(*args, **kwargs) or 0)

    return run


def _fail(message: str, code: int) -> NoReturn:
    from rich.console import Console  # Here, where it is needed: `serve` starts without it.

    Console(stderr=True, highlight=False, soft_wrap=True).print(f"fuse-cache: {message}", markup=False)
    sys.exit(code)
