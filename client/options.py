"""Every option of the backend: its type, its default, and what is allowed.

Values come from the call, then the environment, then a TOML file, then the defaults below. `settings.py`
reads the middle two.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuse_cache.client.errors import OptionError
from fuse_cache.proto.inductor_options import check_options
from fuse_cache.proto.pass_config import LEVELS, PassConfig, PassConfigError
from fuse_cache.proto.request import Scalar
from fuse_cache.proto.signing import KeyFileError, parse_public_key

MODES = ("auto", "remote", "local", "off")
ATTENTION_BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")
DEFAULT_ENDPOINT = "127.0.0.1:7788"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM form. `ca` None: the system's. `cert` and `key` make it mutual."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """The options of `torch.compile(m, backend="fuse_cache", options={...})`, checked and in one form.

    Built by `from_mapping`, which takes what users write.
    """

    endpoint: tuple[str, ...] = (DEFAULT_ENDPOINT,)  # asked in order
    mode: str = "auto"
    level: str = "O2"
    pass_config: PassConfig = dataclasses.field(default_factory=PassConfig)
    compile_ranges: tuple[tuple[int, int], ...] | None = None
    # (input's name, or its number among the tensor inputs; dimension)
    range_dim: tuple[str, int] | None = None
    target: str = "auto"
    namespace: str = "default"
    cache_dir: Path | None = None  # None: under XDG_CACHE_HOME
    trusted_keys: tuple[bytes, ...] = ()  # besides the trust folder's
    token: str | None = dataclasses.field(default=None, repr=False)
    tls: Tls | bool | None = (
        None  # None: only where the endpoint is not of this machine; False: plaintext, said aloud
    )
    lookup_timeout_s: float = 0.25
    max_queue_s: float | None = None  # None: 2 in auto, compile_timeout_s in remote
    compile_timeout_s: float = 900.0
    tp: int = 1
    tp_group: str | None = None  # the live group's own name, where `tp` is one; not an option of its own
    max_num_batched_tokens: int | None = None
    dense: bool = True
    splitting_ops: tuple[str, ...] = ()
    regional: bool = False
    skip_tracing: bool = False
    attention_backend: str = "auto"
    accept_revisions: bool = False
    allow_unsigned: bool = False
    allow_cpu_wheel_builds: bool = False
    strict: bool = False
    dump_dir: Path | None = None
    inductor: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, object], defaults: Mapping[str, object] | None = None
    ) -> CompileOptions:
        """Build from a dict as users write it; `defaults` are values of lesser rank, in the same form.

        Raises:
            OptionError: a name is unknown or a value is wrong. The message names what is allowed.
        """
        checked: dict[str, Any] = {}
        for name, value in {**(defaults or {}), **values}.items():
            if name not in _CHECKS:
                raise OptionError(f"unknown option {name!r}: use one of {', '.join(_CHECKS)}")
            checked[name] = _CHECKS[name](name, value)
            if name == "tp" and not isinstance(value, int):
                checked["tp_group"] = str(getattr(value, "group_name", "")) or None
        return cls(**checked)

    @property
    def queue_bound_s(self) -> float:
        """How long a compilation may be queued before it is left for a local one."""
        if self.max_queue_s is not None:
            return self.max_queue_s
        return self.compile_timeout_s if self.mode == "remote" else 2.0

    @property
    def life_bound_s(self) -> float:
        """How long to wait for a sign of life. mode="remote" has nothing to fall back to, and more
        patience."""
        return max(self.lookup_timeout_s, 5.0) if self.mode == "remote" else self.lookup_timeout_s

    @property
    def answer_bound_s(self) -> float:
        """How long to wait for the answer to a short call once the endpoint has shown life."""
        return max(self.lookup_timeout_s, min(30.0, self.compile_timeout_s) if self.mode == "remote" else 2.0)

    @property
    def silence_bound_s(self) -> float:
        """How long a stream may say nothing; the daemon sends an event at least once a second."""
        return min(30.0, self.compile_timeout_s) if self.mode == "remote" else 5.0


def _wrong(name: str, value: object, allowed: str) -> OptionError:
    return OptionError(f"option {name}={value!r} is wrong: use {allowed}")


def _one_of(choices: Sequence[str]) -> Callable[[str, object], str]:
    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise _wrong(name, value, "one of " + ", ".join(choices))
        return value

    return check


def _boolean(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise _wrong(name, value, "True or False")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or len(value) > 255:
        raise _wrong(name, value, "a printable text of 1 to 255 characters")
    return value


def _name(name: str, value: object) -> str:
    if (
        not isinstance(value, str)
        or not value.isascii()
        or not value.isprintable()
        or " " in value
        or not 1 <= len(value) <= 128
    ):
        raise _wrong(name, value, "1 to 128 ASCII characters without spaces")
    return value


def _seconds(name: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise _wrong(name, value, "a positive number of seconds")
    return float(value)


def _optional(check: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _count(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise _wrong(name, value, "an integer from 1 to 2147483647")
    return value


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise _wrong(name, value, "a path")
    return Path(value).expanduser()


def _endpoints(name: str, value: object) -> tuple[str, ...]:
    allowed = '"HOST:PORT" or "unix:PATH", or a list of them'
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not items:
        raise _wrong(name, value, allowed)
    for item in items:
        if not isinstance(item, str):
            raise _wrong(name, value, allowed)
        if item.startswith("unix:"):
            if len(item) == len("unix:"):
                raise _wrong(name, value, allowed)
            continue
        host, _, port = item.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise _wrong(name, value, allowed)
    return tuple(items)


def _ranges(name: str, value: object) -> tuple[tuple[int, int], ...]:
    allowed = "a list of [lowest, highest] pairs of sizes from 1 on, in order, like [[1, 256], [257, 4096]]"
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise _wrong(name, value, allowed)
    ranges: list[tuple[int, int]] = []
    for pair in value:
        if not isinstance(pair, Sequence) or len(pair) != 2 or any(type(end) is not int for end in pair):
            raise _wrong(name, value, allowed)
        lower, upper = pair
        if not 1 <= lower <= upper < 2**31 or (ranges and lower <= ranges[-1][1]):
            raise _wrong(name, value, allowed)
        ranges.append((lower, upper))
    return tuple(ranges)


def _range_dim(name: str, value: object) -> tuple[str, int]:
    source, _, dim = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not source or not dim.isascii() or not dim.isdigit():
        allowed = '"input:dim", such as "input_ids:1", or "0:1" for dimension 1 of the first tensor input'
        raise _wrong(name, value, allowed)
    return source, int(dim)


def _pass_config(name: str, value: object) -> PassConfig:
    if isinstance(value, PassConfig):
        return value
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a PassConfig or a dict of its fields")
    try:
        return PassConfig.from_mapping(value)
    except PassConfigError as error:
        raise OptionError(f"option {name}: {error}") from error


def _trusted_keys(name: str, value: object) -> tuple[bytes, ...]:
    allowed = "a list of Ed25519 public keys: 32 bytes, 64 hex digits, or paths of `fuse-cache keygen` files"
    items = [value] if isinstance(value, str | bytes | Path) else value
    if not isinstance(items, Sequence):
        raise _wrong(name, value, allowed)
    keys = []
    for item in items:
        try:
            if isinstance(item, bytes) and len(item) == 32:
                keys.append(item)
            elif isinstance(item, str) and re.fullmatch("[0-9a-fA-F]{64}", item):
                keys.append(bytes.fromhex(item))
            elif isinstance(item, str | Path):
                keys.append(parse_public_key(Path(item).expanduser().read_text()))
            else:
                raise _wrong(name, item, allowed)
        except (OSError, KeyFileError, UnicodeDecodeError) as error:
            raise _wrong(name, item, f"{allowed} ({error})") from error
    return tuple(keys)


def _tls(name: str, value: object) -> Tls | bool | None:
    if value is None or isinstance(value, bool | Tls):
        return value
    if not isinstance(value, Mapping) or not set(value) <= {"ca", "cert", "key"}:
        raise _wrong(name, value, "True, False, or a dict of the paths ca, cert and key")
    files = {field: _path(f"{name}.{field}", path) for field, path in value.items()}
    if ("cert" in files) != ("key" in files):
        raise _wrong(name, value, "cert and key together")
    return Tls(**files)


def _tp(name: str, value: object) -> int:
    size = getattr(value, "size", None)  # a live process group says its own size
    number = size() if callable(size) else value
    if type(number) is not int or not 1 <= number <= 4096:
        raise _wrong(name, value, "the tensor-parallel size, from 1 on, or its process group")
    return number


def _names(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong(name, value, 'a list of operator names, such as ["aten::scaled_dot_product_attention"]')
    return tuple(_name(name, item) for item in value)


def _inductor(name: str, value: object) -> tuple[tuple[str, Scalar], ...]:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a dict of Inductor options")
    try:
        return check_options(value)
    except ValueError as error:
        raise OptionError(f"option {name}: {error}") from error


_CHECKS: Mapping[str, Callable[[str, object], Any]] = {
    "endpoint": _endpoints,
    "mode": _one_of(MODES),
    "level": _one_of(LEVELS),
    "pass_config": _pass_config,
    "compile_ranges": _optional(_ranges),
    "range_dim": _optional(_range_dim),
    "target": _name,
    "namespace": _name,
    "cache_dir": _optional(_path),
    "trusted_keys": _trusted_keys,
    "token": _optional(_text),
    "tls": _tls,
    "lookup_timeout_s": _seconds,
    "max_queue_s": _optional(_seconds),
    "compile_timeout_s": _seconds,
    "tp": _tp,
    "max_num_batched_tokens": _optional(_count),
    "dense": _boolean,
    "splitting_ops": _names,
    "regional": _boolean,
    "skip_tracing": _boolean,
    "attention_backend": _one_of(ATTENTION_BACKENDS),
    "accept_revisions": _boolean,
    "allow_unsigned": _boolean,
    "allow_cpu_wheel_builds": _boolean,
    "strict": _boolean,
    "dump_dir": _optional(_path),
    "inductor": _inductor,
}
OPTION_NAMES = tuple(_CHECKS)
