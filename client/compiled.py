"""A compiled model from another process's work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Importing it registers nothing, but sets how Dynamo treats size 1.
from fuse_cache.client.backend import fuse_cache


def load_compiled(
    model: torch.nn.Module,
    example_args: tuple[Any, ...] = (),
    *,
    options: Mapping[str, object] | None = None,
    fullgraph: bool = True,
) -> Any:
    """Return `model` compiled through fuse_cache, its artifacts loaded at the first call.

    This version traces as torch.compile does and so needs no `example_args`; they are for the start without
    tracing.
    """
    chosen: dict[str, Any] | None = dict(options) if options else None
    return torch.compile(model, backend=fuse_cache, fullgraph=fullgraph, options=chosen)
