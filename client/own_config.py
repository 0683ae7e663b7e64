"""Settings of this process's own compiler, which a daemon's builds do not follow."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch._functorch.config
import torch._inductor.config

from fuse_cache.client.warn import warn_once
from fuse_cache.proto.inductor_options import ALLOWED

# They change how this process compiles and what it writes, not what is computed.
_HARMLESS: Final = (
    "autotune_local_cache",
    "autotune_remote_cache",
    "bundle",
    "compile_threads",
    "debug",
    "enable_autograd_cache",
    "enable_remote_autograd_cache",
    "fake_tensor_",  # Dynamo's own, while it traces.
    "force_disable_caches",
    "fx_graph_cache",
    "fx_graph_remote_cache",
    "generate_intermediate_hooks",
    "quiesce_async_compile",
    "strict_autograd_cache",
    "trace",
    "verbose_progress",
    "worker_",
)


def own_settings() -> dict[str, object]:
    """Return what somebody set in `torch._inductor.config` and `torch._functorch.config`, by full name."""
    modules: tuple[Any, ...] = (torch._inductor.config, torch._functorch.config)
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, entry in module._config.items()
        # What was patched for a while, by torch itself too, counts as set ever after: with its default again.
        if not name.startswith(_HARMLESS)
        and not module._is_default(name)
        and (value := getattr(module, name)) != entry.default
    }


@functools.cache
def warn_of_own_settings() -> None:
    """Warn, once in this process, of each setting that builds of a daemon do not follow."""
    for name, value in own_settings().items():
        short = name.removeprefix("torch._inductor.config.")
        instead = (
            f"give it as options={{'inductor': {{{short!r}: {value!r}}}}}"
            if short in ALLOWED
            else "use mode='local' if it matters"
        )
        warn_once(f"{name} is set in this process, and artifacts of a daemon are built without it: {instead}")
