"""The torch.library namespace of our operators, and how one is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

NAMESPACE = "fuse_cache"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]  # torch.library has no types

Reference = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An operator by its parts, in the order of its arguments: so that fused operators can be put together.

    `tensors` and `attributes` are parts of a schema. `results` counts the tensors that `reference` returns,
    of which the first is the one that a following operator reads.
    """

    name: str
    tensors: str
    attributes: str
    results: int
    reference: Reference

    @property
    def schema(self) -> str:
        """Return the operator's schema."""
        returns = "Tensor" if self.results == 1 else f"({', '.join(['Tensor'] * self.results)})"
        return f"{self.name}({self.tensors}, {self.attributes}) -> {returns}"

    @property
    def num_tensors(self) -> int:
        """Return how many arguments are tensors or may be: they come first."""
        return self.tensors.count(",") + 1


def define(family: Family) -> OpOverload:
    """Register an operator whose truth is its reference: it runs eagerly and on fake tensors.

    Operators are functional: a graph that holds them may be reordered. Passes put them in and take them out
    again, so that no artifact needs them on the host.
    """
    name = family.name
    _LIBRARY.define(family.schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]  # as above
    _LIBRARY.impl(name, family.reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above
    torch.library.register_fake(f"{NAMESPACE}::{name}", family.reference, lib=_LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    assert isinstance(overload, OpOverload)
    on_cuda = partial(_run_on_cuda, family, overload)
    _LIBRARY.impl(name, on_cuda, "CUDA")  # type: ignore[no-untyped-call]  # as above
    return overload


def _run_on_cuda(family: Family, overload: OpOverload, *arguments: Any) -> Any:
    # Not at import: kernels need Triton, which a machine without a GPU may lack, and the operators above.
    from fuse_cache.kernels.launch import run_on_cuda

    return run_on_cuda(family, overload, arguments)
