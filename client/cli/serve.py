"""`fuse-cache serve`: the daemon, in this process. It alone imports the server, and only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fuse_cache.client.errors import OptionError


def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file of options.", metavar="F")] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT or unix:PATH; may be repeated. Default: 127.0.0.1:7788."),
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="HOST:PORT of /healthz, /readyz and /metrics. Default: 127.0.0.1:7789.")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of the entries.", metavar="DIR")] = None,
    redis: Annotated[str | None, typer.Option(help="Shared store behind the disk.", metavar="URL")] = None,
    workers: Annotated[int | None, typer.Option(help="Compilations at a time.")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="What to build for, such as cpu-avx2, sm_90 or h200; may be repeated. "
            "Default: this machine's processor and GPU."
        ),
    ] = None,
    executor: Annotated[str | None, typer.Option(help="local or ray.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Serve plaintext to other machines.")
    ] = None,
) -> int:
    """Serve artifacts and compile what is missing, until SIGTERM.

    Every option also comes from the environment (FUSE_CACHE_WORKERS=4) or from the TOML file of --config.
    Models with operators of their own: name the modules that register them, as in op_modules =
    ["my_model.ops"] in the file or FUSE_CACHE_OP_MODULES=my_model.ops,other.ops; the daemon's workers import
    them. Hosts with other releases of torch: [toolchain.NAME] tables in the file, python = "/path/to/python".
    """
    from fuse_cache.server import app
    from fuse_cache.server.config import ConfigError, load_config

    options = {
        "listen": tuple(listen) if listen else None,
        "http": http,
        "store": store,
        "redis": redis,
        "workers": workers,
        "target": tuple(target) if target else None,
        "executor": executor,
        "insecure": insecure,
    }
    try:
        settings = load_config(options, config)
    except ConfigError as error:
        raise OptionError(str(error)) from error
    return app.run(settings)
