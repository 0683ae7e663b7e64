"""Every option of the daemon: typed, checked, read from command line > environment > TOML file > default."""

from __future__ import annotations

import difflib
import ipaddress
import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fuse_cache.proto.cpu_target import CPU_TARGETS, is_cpu_target, refusal

PREFIX = "FUSE_CACHE_"
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


class ServerConfig(BaseModel):
    """The options of `fuse-cache serve`. A list may be written as one text with commas."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    listen: tuple[str, ...] = ("127.0.0.1:7788",)
    http: str = "127.0.0.1:7789"  # "" for none
    store: Path = Field(default_factory=lambda: _cache_home() / "store")
    redis: str = ""
    workers: int = Field(default_factory=lambda: max(1, len(os.sched_getaffinity(0)) // 2), ge=1, le=1024)
    target: tuple[str, ...] = ()
    executor: Literal["local"] = "local"
    insecure: bool = False
    work_dir: Path = Field(
        default_factory=lambda: Path(tempfile.gettempdir()) / f"fuse-cache-work-{os.getuid()}"
    )
    memory_bytes: int | None = Field(
        default=None, ge=1 << 20
    )  # of the memory tier; default: cache/compose.py
    disk_bytes: int | None = Field(default=None, ge=1 << 20)
    job_timeout_s: float = Field(default=900.0, gt=0)
    job_memory_bytes: int = Field(default=8 << 30, ge=64 << 20)  # of one compilation's whole process tree
    max_queue: int = Field(default=256, ge=1)  # a model cut in 80 pieces with 3 ranges fits
    drain_grace_s: float = Field(default=25.0, ge=0)  # Kubernetes kills after 30
    signing_key: Path | None = None  # default: the key of the per-uid trust folder
    trusted_keys: tuple[Path, ...] = ()  # public keys of other builders, beside our own
    op_modules: tuple[str, ...] = ()  # modules that register custom operators; workers import them
    reflection: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("listen", "target", "op_modules", "trusted_keys", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return (
            tuple(part.strip() for part in value.split(",") if part.strip())
            if isinstance(value, str)
            else value
        )

    @field_validator("target")
    @classmethod
    def _known_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for name in targets:
            if not is_cpu_target(name):
                known = ", ".join(target.name for target in CPU_TARGETS)
                raise ValueError(f"{name} is not built by this version; it builds {known}")
        # Any CPU target builds anywhere (nothing is run), but loading it back to prove it whole needs the
        # processor.
        return targets or tuple(t.name for t in CPU_TARGETS if refusal(t.name) is None)

    @field_validator("redis")
    @classmethod
    def _no_redis_yet(cls, url: str) -> str:
        if url:
            raise ValueError("this version has no Redis tier; leave the option out")
        return url

    @model_validator(mode="after")
    def _plaintext_stays_here(self) -> ServerConfig:
        if not self.listen:
            raise ValueError("listen: give at least one HOST:PORT or unix:PATH")
        for name, address in [("listen", item) for item in self.listen] + [("http", self.http)]:
            if address and not self.insecure and not is_local(address):
                raise ValueError(
                    f"{name}: {address} would serve plaintext to other machines;"
                    " listen on loopback or unix:PATH, or say --insecure"
                )
        return self


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
    names = set(ServerConfig.model_fields)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for where, found in (
        (str(config_file), _read_toml(config_file) if config_file else {}),
        ("the environment", _from_environment(environment, names)),
        ("the command line", {name: value for name, value in (options or {}).items() if value is not None}),
    ):
        for name, value in found.items():
            if name not in names:
                raise ConfigError(f"{where}: {name} is not an option{_suggest(name, names)}")
            values[name], origin[name] = value, where
    try:
        return ServerConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(dict(detail), origin) for detail in error.errors())) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    table.pop("client", None)  # The client's own table, in the file that both read.
    return table


def _from_environment(environment: Mapping[str, str], names: set[str]) -> dict[str, str]:
    found = {}
    for variable, value in environment.items():
        if variable.startswith(PREFIX) and variable not in OTHERS_NAMES:
            name = variable.removeprefix(PREFIX).lower()
            if name not in names:
                raise ConfigError(f"the environment: {variable} is not an option{_suggest(name, names)}")
            found[name] = value
    return found


def _suggest(name: str, names: set[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; the options are {', '.join(sorted(names))}"


def _explain(detail: dict[str, Any], origin: Mapping[str, str]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ")
    name = str(detail["loc"][0]) if detail["loc"] else ""
    where = f"{origin[name]}: " if name in origin else ""
    return f"{where}{name}: {message}" if name else message


def _cache_home() -> Path:
    """Return our folder in the user's cache, or in the system's temporary folder for a uid without a home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "fuse-cache"
    try:
        return Path.home() / ".cache" / "fuse-cache"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"fuse-cache-{os.getuid()}-cache"
