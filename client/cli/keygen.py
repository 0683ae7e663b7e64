"""`fuse-cache keygen`: a signing key pair for a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fuse_cache.client.errors import FuseCacheError
from fuse_cache.proto.signing import KeyFileError, SigningKey, public_path


def keygen(
    folder: Annotated[
        Path, typer.Argument(help="Where the two files go; made if it is not there.", metavar="DIR")
    ],
) -> int:
    """Make a signing key pair: the private half for daemons, the public half for hosts."""
    path = folder / "signing.key"
    if path.exists() or public_path(path).exists():
        raise FuseCacheError(f"{path} exists: choose another folder, or remove it. Nothing was written.")
    key = SigningKey.generate()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key.save(path)
    except (OSError, KeyFileError) as error:
        raise FuseCacheError(f"{path}: {error}") from error
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"builder {key.builder}", markup=False)
    console.print(f"private: {path} (daemons: signing_key)", markup=False)
    console.print(f"public:  {public_path(path)} (hosts: option trusted_keys)", markup=False)
    return 0
