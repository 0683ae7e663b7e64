"""Where options come from besides the call: `FUSE_CACHE_*` in the environment, and the `[client]` table of a
TOML file.

This is the only reader of the environment in the client. `FUSE_CACHE_CONFIG` names the file, which the daemon
reads too.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuse_cache.client.errors import OptionError
from fuse_cache.client.options import OPTION_NAMES, CompileOptions

PREFIX = "FUSE_CACHE_"
# How each option that is not a plain text is written in a variable; lists and tables are JSON.
_NUMBERS = frozenset({"lookup_timeout_s", "max_queue_s", "compile_timeout_s", "tp", "max_num_batched_tokens"})
_FLAGS = frozenset(
    {
        "dense",
        "regional",
        "skip_tracing",
        "accept_revisions",
        "allow_unsigned",
        "allow_cpu_wheel_builds",
        "strict",
        "tls",
    }
)
_LISTS = frozenset({"endpoint", "trusted_keys", "splitting_ops"})
_JSON = frozenset({"pass_config", "compile_ranges", "inductor"})
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


def load_options(
    values: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> CompileOptions:
    """Return the options of one call: `values` over environment over file over defaults.

    Raises:
        OptionError: an unknown name or a wrong value; the message says where it came from.
    """
    environment = os.environ if environment is None else environment
    defaults = {**_from_file(environment), **_from_environment(environment)}
    return CompileOptions.from_mapping(values, defaults)


def wants_one_graph_for_size_one(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether first traces are to be size-oblivious: unless `FUSE_CACHE_SIZE_OBLIVIOUS` says no.

    No option of a call: the trace is done when a call's options arrive (DECISIONS/0006).

    Raises:
        OptionError: it says something else than yes or no.
    """
    environment = os.environ if environment is None else environment
    text = environment.get(f"{PREFIX}SIZE_OBLIVIOUS", "").lower()
    if text and text not in _TRUE | _FALSE:
        raise OptionError(f"{PREFIX}SIZE_OBLIVIOUS={text!r} is not allowed: use 1 or 0")
    return text not in _FALSE


def cache_folder(options: CompileOptions, environment: Mapping[str, str] | None = None) -> Path:
    """Return where this client keeps artifacts. A uid without a home gets a folder in the system's temporary
    one."""
    if options.cache_dir is not None:
        return options.cache_dir
    environment = os.environ if environment is None else environment
    if base := environment.get("XDG_CACHE_HOME"):
        return Path(base) / "fuse-cache" / "client"
    try:
        home = Path.home()  # Raises for a uid with neither HOME nor a passwd entry.
    except RuntimeError:
        home = Path("/")
    # A container's random uid often gets HOME=/, which is nobody's to write.
    if home == Path("/"):
        return Path(tempfile.gettempdir()) / f"fuse-cache-{os.getuid()}-cache" / "client"
    return home / ".cache" / "fuse-cache" / "client"


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in OPTION_NAMES:
        text = environment.get(PREFIX + name.upper())
        if text:
            found[name] = _parse(name, text)
    return found


def _parse(name: str, text: str) -> Any:
    """Read one variable. What cannot be read is left as text, and the option's own check names the allowed
    form."""
    if name in _FLAGS and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if name in _LISTS and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if name in _NUMBERS | _JSON | _LISTS or text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _from_file(environment: Mapping[str, str]) -> dict[str, object]:
    path = environment.get(f"{PREFIX}CONFIG")
    if not path:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text()).get("client", {})
    except (OSError, ValueError) as error:
        raise OptionError(f"{PREFIX}CONFIG: {path}: {error}") from error
    if not isinstance(table, dict):
        raise OptionError(f"{path}: client must be a table of options")
    for name in table:
        if name not in OPTION_NAMES:
            raise OptionError(f"{path}: unknown option client.{name}: use one of {', '.join(OPTION_NAMES)}")
    return table
