"""Every option of the backend: its type, its default, and what is allowed.

Values come from the call, then the environment, then a TOML file, then the defaults below. `settings.py`
reads the middle two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuse_cache.client.errors import OptionError
from fuse_cache.client.option_checks import (
    Tls,
    count,
    endpoints,
    file_path,
    inductor_options,
    one_of,
    optional,
    pass_config,
    plain_name,
    plain_names,
    printable_text,
    range_dim,
    seconds,
    size_ranges,
    tls_files,
    tp_size,
    true_or_false,
    trusted_keys,
)
from fuse_cache.proto.pass_config import LEVELS, PassConfig
from fuse_cache.proto.request import Scalar

MODES = ("auto", "remote", "local", "off")
ATTENTION_BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")
DEFAULT_ENDPOINT = "127.0.0.1:7788"


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
    # A folder for people to read in. Compiled here: the graph before and after each pass, and the patterns.
    # From the daemon: the graph as sent, and per artifact its manifest, passes and report (`dump.py`).
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


_CHECKS: Mapping[str, Callable[[str, object], Any]] = {
    "endpoint": endpoints,
    "mode": one_of(MODES),
    "level": one_of(LEVELS),
    "pass_config": pass_config,
    "compile_ranges": optional(size_ranges),
    "range_dim": optional(range_dim),
    "target": plain_name,
    "namespace": plain_name,
    "cache_dir": optional(file_path),
    "trusted_keys": trusted_keys,
    "token": optional(printable_text),
    "tls": tls_files,
    "lookup_timeout_s": seconds,
    "max_queue_s": optional(seconds),
    "compile_timeout_s": seconds,
    "tp": tp_size,
    "max_num_batched_tokens": optional(count),
    "dense": true_or_false,
    "splitting_ops": plain_names,
    "regional": true_or_false,
    "skip_tracing": true_or_false,
    "attention_backend": one_of(ATTENTION_BACKENDS),
    "accept_revisions": true_or_false,
    "allow_unsigned": true_or_false,
    "allow_cpu_wheel_builds": true_or_false,
    "strict": true_or_false,
    "dump_dir": optional(file_path),
    "inductor": inductor_options,
}
OPTION_NAMES = tuple(_CHECKS)
