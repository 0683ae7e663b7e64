"""Checks of single options: each takes a name and what a user wrote, and returns the value in its one form.

All raise OptionError with the name and what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuse_cache.client.errors import OptionError
from fuse_cache.proto.inductor_options import check_options
from fuse_cache.proto.pass_config import PassConfig, PassConfigError
from fuse_cache.proto.request import Scalar
from fuse_cache.proto.signing import KeyFileError, parse_public_key


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM form. `ca` None: the system's. `cert` and `key` make it mutual."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


def wrong(name: str, value: object, allowed: str) -> OptionError:
    return OptionError(f"option {name}={value!r} is wrong: use {allowed}")


def one_of(choices: Sequence[str]) -> Callable[[str, object], str]:
    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise wrong(name, value, "one of " + ", ".join(choices))
        return value

    return check


def true_or_false(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise wrong(name, value, "True or False")
    return value


def printable_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or len(value) > 255:
        raise wrong(name, value, "a printable text of 1 to 255 characters")
    return value


def plain_name(name: str, value: object) -> str:
    if (
        not isinstance(value, str)
        or not value.isascii()
        or not value.isprintable()
        or " " in value
        or not 1 <= len(value) <= 128
    ):
        raise wrong(name, value, "1 to 128 ASCII characters without spaces")
    return value


def seconds(name: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise wrong(name, value, "a positive number of seconds")
    return float(value)


def optional(check: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda name, value: None if value is None else check(name, value)


def count(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise wrong(name, value, "an integer from 1 to 2147483647")
    return value


def file_path(name: str, value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise wrong(name, value, "a path")
    return Path(value).expanduser()


def endpoints(name: str, value: object) -> tuple[str, ...]:
    allowed = '"HOST:PORT" or "unix:PATH", or a list of them'
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not items:
        raise wrong(name, value, allowed)
    for item in items:
        if not isinstance(item, str):
            raise wrong(name, value, allowed)
        if item.startswith("unix:"):
            if len(item) == len("unix:"):
                raise wrong(name, value, allowed)
            continue
        host, _, port = item.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise wrong(name, value, allowed)
    return tuple(items)


def size_ranges(name: str, value: object) -> tuple[tuple[int, int], ...]:
    allowed = "a list of [lowest, highest] pairs of sizes from 1 on, in order, like [[1, 256], [257, 4096]]"
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise wrong(name, value, allowed)
    ranges: list[tuple[int, int]] = []
    for pair in value:
        if not isinstance(pair, Sequence) or len(pair) != 2 or any(type(end) is not int for end in pair):
            raise wrong(name, value, allowed)
        lower, upper = pair
        if not 1 <= lower <= upper < 2**31 or (ranges and lower <= ranges[-1][1]):
            raise wrong(name, value, allowed)
        ranges.append((lower, upper))
    return tuple(ranges)


def range_dim(name: str, value: object) -> tuple[str, int]:
    source, _, dim = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not source or not dim.isascii() or not dim.isdigit():
        allowed = '"input:dim", such as "input_ids:1", or "0:1" for dimension 1 of the first tensor input'
        raise wrong(name, value, allowed)
    return source, int(dim)


def pass_config(name: str, value: object) -> PassConfig:
    if isinstance(value, PassConfig):
        return value
    if not isinstance(value, Mapping):
        raise wrong(name, value, "a PassConfig or a dict of its fields")
    try:
        return PassConfig.from_mapping(value)
    except PassConfigError as error:
        raise OptionError(f"option {name}: {error}") from error


def trusted_keys(name: str, value: object) -> tuple[bytes, ...]:
    allowed = "a list of Ed25519 public keys: 32 bytes, 64 hex digits, or paths of `fuse-cache keygen` files"
    items = [value] if isinstance(value, str | bytes | Path) else value
    if not isinstance(items, Sequence):
        raise wrong(name, value, allowed)
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
                raise wrong(name, item, allowed)
        except (OSError, KeyFileError, UnicodeDecodeError) as error:
            raise wrong(name, item, f"{allowed} ({error})") from error
    return tuple(keys)


def tls_files(name: str, value: object) -> Tls | bool | None:
    if value is None or isinstance(value, bool | Tls):
        return value
    if not isinstance(value, Mapping) or not set(value) <= {"ca", "cert", "key"}:
        raise wrong(name, value, "True, False, or a dict of the paths ca, cert and key")
    files = {field: file_path(f"{name}.{field}", path) for field, path in value.items()}
    if ("cert" in files) != ("key" in files):
        raise wrong(name, value, "cert and key together")
    return Tls(**files)


def tp_size(name: str, value: object) -> int:
    size = getattr(value, "size", None)  # a live process group says its own size
    number = size() if callable(size) else value
    if type(number) is not int or not 1 <= number <= 4096:
        raise wrong(name, value, "the tensor-parallel size, from 1 on, or its process group")
    return number


def plain_names(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise wrong(name, value, 'a list of operator names, such as ["aten::scaled_dot_product_attention"]')
    return tuple(plain_name(name, item) for item in value)


def inductor_options(name: str, value: object) -> tuple[tuple[str, Scalar], ...]:
    if not isinstance(value, Mapping):
        raise wrong(name, value, "a dict of Inductor options")
    try:
        return check_options(value)
    except ValueError as error:
        raise OptionError(f"option {name}: {error}") from error
