"""Every option of the daemon: typed, checked, read from command line > environment > TOML file > default."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from fuse_cache.proto.cpu_target import CPU_TARGETS, is_cpu_target, refusal
from fuse_cache.proto.gpu_target import ARCHITECTURES, GPUS, is_gpu_target
from fuse_cache.proto.target_facts import requested
from fuse_cache.server.gpus_here import architectures_here

PREFIX = "FUSE_CACHE_"
OWN = "own"  # the toolchain of the daemon's own Python
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
ENVIRONMENT = "the environment"
# Names under our prefix that others read: the client's options, and what both sides find their trust folder
# by.
_OTHERS = """
    ENDPOINT MODE LEVEL PASS_CONFIG COMPILE_RANGES RANGE_DIM NAMESPACE CACHE_DIR TOKEN TLS
    LOOKUP_TIMEOUT_S MAX_QUEUE_S COMPILE_TIMEOUT_S TP MAX_NUM_BATCHED_TOKENS DENSE SPLITTING_OPS REGIONAL
    SKIP_TRACING ATTENTION_BACKEND ACCEPT_REVISIONS ALLOW_UNSIGNED ALLOW_CPU_WHEEL_BUILDS STRICT DUMP_DIR
    INDUCTOR TRUST_DIR CONFIG
"""
OTHERS_NAMES = frozenset(PREFIX + name for name in _OTHERS.split())


class ConfigError(ValueError):
    """The configuration cannot be used.

    The message names the option, where it came from, and what is allowed.
    """


class ToolchainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[toolchain.NAME]` of the TOML file: another Python whose torch workers use."""

    python: Path  # of an environment with fuse-cache and its own torch and triton


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `fuse-cache serve`. A list may be written as one text with commas.

    Made by `load_config`, which checks each value against the types below.
    """

    listen: tuple[str, ...] = ("127.0.0.1:7788",)
    http: str = "127.0.0.1:7789"  # "" for none
    store: Path = msgspec.field(default_factory=lambda: _cache_home() / "store")
    redis: str = ""
    workers: Annotated[int, Meta(ge=1, le=1024)] = msgspec.field(
        default_factory=lambda: max(1, len(os.sched_getaffinity(0)) // 2)
    )
    # Any CPU target builds anywhere (nothing is run), but loading it back to prove it whole needs the
    # processor.
    target: tuple[str, ...] = msgspec.field(
        default_factory=lambda: (
            *(t.name for t in CPU_TARGETS if refusal(t.name) is None),
            *filter(is_gpu_target, architectures_here()),
        )
    )
    executor: Literal["local"] = "local"
    insecure: bool = False
    work_dir: Path = msgspec.field(
        default_factory=lambda: Path(tempfile.gettempdir()) / f"fuse-cache-work-{os.getuid()}"
    )
    memory_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None  # of the memory tier; else cache/compose.py
    disk_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    job_timeout_s: Annotated[float, Meta(gt=0)] = 900.0
    job_memory_bytes: Annotated[int, Meta(ge=64 << 20)] = 8 << 30  # of one compilation's whole process tree
    max_queue: Annotated[int, Meta(ge=1)] = 256  # a model cut in 80 pieces with 3 ranges fits
    drain_grace_s: Annotated[float, Meta(ge=0)] = 25.0  # Kubernetes kills after 30
    signing_key: Path | None = None  # default: the key of the per-uid trust folder
    trusted_keys: tuple[Path, ...] = ()  # public keys of other builders, beside our own
    op_modules: tuple[str, ...] = ()  # modules that register custom operators; workers import them
    # Beside the daemon's own, which stands first. A host is served by one whose artifacts it can use.
    toolchain: dict[str, ToolchainConfig] = msgspec.field(default_factory=dict)
    reflection: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"


_TYPES = {field.name: field.type for field in msgspec.structs.fields(ServerConfig)}


def _read(name: str, value: object, *, is_text: bool) -> Any:
    """Return `value` in the type of option `name`; `is_text` for the environment, which has no types.

    Raises:
        ValueError: it does not fit; the message says what does.
    """
    kind = _TYPES[name]
    if name == "toolchain" and not isinstance(value, dict):
        raise ValueError('it is a table of the TOML file: [toolchain.NAME], python = "..."')
    if isinstance(value, str) and get_origin(kind) is tuple:
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        found = msgspec.convert(value, kind, strict=not is_text, dec_hook=_read_path)
    except msgspec.ValidationError as error:
        names = f"; it may be {', '.join(get_args(kind))}" if get_origin(kind) is Literal else ""
        raise ValueError(f"{error}{names} (given: {value!r})") from error
    if name == "listen" and not found:
        raise ValueError("give at least one HOST:PORT or unix:PATH")
    if name == "redis" and found:
        raise ValueError("this version has no Redis tier; leave the option out")
    if name == "toolchain":
        for item in found:
            if not _NAME.fullmatch(item) or item == OWN:
                raise ValueError(f"{item!r} cannot name one: use letters, digits, _ . and -, and not {OWN!r}")
    return _read_targets(found) if name == "target" else found


def _read_targets(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets as requests name them: a GPU's name means its architecture."""
    found = []
    for name in names:
        target, _ = requested(name)
        if not is_cpu_target(target) and not is_gpu_target(target):
            known = ", ".join((*(item.name for item in CPU_TARGETS), *ARCHITECTURES, *GPUS))
            raise ValueError(f"{name} is not built by this version; it builds {known}")
        found.append(target)
    return tuple(dict.fromkeys(found))


def _read_path(kind: type, value: object) -> Path:
    """Read the one type of our options that msgspec leaves to us."""
    assert kind is Path
    if isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError("Expected a path")


def _check_plaintext_stays_here(config: ServerConfig) -> None:
    for name, address in [("listen", item) for item in config.listen] + [("http", config.http)]:
        if address and not config.insecure and not is_local(address):
            raise ConfigError(
                f"{name}: {address} would serve plaintext to other machines;"
                " listen on loopback or unix:PATH, or say --insecure"
            )


def is_local(address: str) -> bool:
    """Tell whether only this machine can reach `address` (HOST:PORT or unix:PATH).

    Raises:
        ValueError: it is neither.
    """
    if address.startswith("unix:"):
        return True
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 host stands in brackets.

    Raises:
        ValueError: it is not of this form.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address} is not HOST:PORT or unix:PATH")
    return host, int(port)


def load_config(
    options: Mapping[str, object] | None = None,
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Return the configuration. `options` are those of the command line; one that is None was not given.

    Raises:
        ConfigError: an unknown name or a wrong value.
    """
    environment = os.environ if environment is None else environment
    config_file = config_file or (Path(p) if (p := environment.get(f"{PREFIX}CONFIG")) else None)
    names = set(_TYPES)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for where, found in (
        (str(config_file), _read_toml(config_file) if config_file else {}),
        (ENVIRONMENT, _from_environment(environment, names)),
        ("the command line", {name: value for name, value in (options or {}).items() if value is not None}),
    ):
        for name, value in found.items():
            if name not in names:
                raise ConfigError(f"{where}: {name} is not an option{_suggest(name, names)}")
            values[name], origin[name] = value, where
    read: dict[str, Any] = {}
    problems = []
    for name, value in values.items():
        try:
            read[name] = _read(name, value, is_text=origin[name] == ENVIRONMENT)
        except ValueError as error:
            problems.append(f"{origin[name]}: {name}: {error}")
    if problems:
        raise ConfigError("; ".join(problems))
    if not read.get("target", True):
        del read["target"]  # An empty list asks for the default.
    config = ServerConfig(**read)
    try:
        _check_plaintext_stays_here(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; --config and FUSE_CACHE_CONFIG name a TOML file of options"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}; an option is a line such as workers = 4") from error
    table.pop("client", None)  # The client's own table, in the file that both read.
    return table


def _from_environment(environment: Mapping[str, str], names: set[str]) -> dict[str, str]:
    found = {}
    for variable, value in environment.items():
        if variable.startswith(PREFIX) and variable not in OTHERS_NAMES:
            name = variable.removeprefix(PREFIX).lower()
            if name not in names:
                raise ConfigError(f"{ENVIRONMENT}: {variable} is not an option{_suggest(name, names)}")
            found[name] = value
    return found


def _suggest(name: str, names: set[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; the options are {', '.join(sorted(names))}"


def _cache_home() -> Path:
    """Return our folder in the user's cache, or in the system's temporary folder for a uid without a home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "fuse-cache"
    try:
        return Path.home() / ".cache" / "fuse-cache"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"fuse-cache-{os.getuid()}-cache"
