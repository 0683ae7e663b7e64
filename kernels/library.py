"""The torch.library namespace of our operators, and how one is registered."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

NAMESPACE = "fuse_cache"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]  # torch.library has no types


def define(schema: str, reference: Callable[..., Tensor]) -> OpOverload:
    """Register an operator whose truth is `reference`: it runs eagerly and on fake tensors.

    Operators are functional: a graph that holds them may be reordered. Passes put them in and take them out
    again, so that no artifact needs them on the host.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]  # as above
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above
    torch.library.register_fake(f"{NAMESPACE}::{name}", reference, lib=_LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    assert isinstance(overload, OpOverload)
    return overload
