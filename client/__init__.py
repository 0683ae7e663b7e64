"""The inference host's side: Dynamo backend, graph codec, transport, loader, local fallback, CLI.

The public names load on first use: the command line and the daemon it starts never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuse_cache.client.client import Client
    from fuse_cache.client.compiled import load_compiled
    from fuse_cache.client.options import CompileOptions
    from fuse_cache.client.reports import GraphReport, report
    from fuse_cache.proto.pass_config import PassConfig

__all__ = ["Client", "CompileOptions", "GraphReport", "PassConfig", "load_compiled", "report"]

_HOMES = {
    "Client": "fuse_cache.client.client",
    "CompileOptions": "fuse_cache.client.options",
    "GraphReport": "fuse_cache.client.reports",
    "PassConfig": "fuse_cache.proto.pass_config",
    "load_compiled": "fuse_cache.client.compiled",
    "report": "fuse_cache.client.reports",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
