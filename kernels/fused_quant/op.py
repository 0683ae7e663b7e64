"""The fused operators, put together from their two halves: what fusion puts in the place of both.

`rms_norm_quant_dynamic(x, weight, bound, <attributes of rms_norm>, <of quant_dynamic>)`: the producer's
tensors, the quantiser's but its x, the producer's attributes, the quantiser's. They return what the quantiser
returns, then what the producer returns beside the quantised tensor (the sum of fused_add_rms_norm). The form
`..._keep` returns the quantised tensor too, between the two: for graphs that also read the norm as it is.

By definition the two references in sequence, so that no rounding changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from torch import Tensor
from torch._ops import OpOverload

from fuse_cache.kernels.act_and_mul.op import ACT_AND_MUL
from fuse_cache.kernels.act_and_mul.op import FAMILY as ACT_AND_MUL_FAMILY
from fuse_cache.kernels.fused_add_rms_norm.op import FAMILY as FUSED_ADD_RMS_NORM_FAMILY
from fuse_cache.kernels.fused_add_rms_norm.op import FUSED_ADD_RMS_NORM
from fuse_cache.kernels.library import Family, define
from fuse_cache.kernels.quant_dynamic.op import FAMILY as QUANT_DYNAMIC_FAMILY
from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_fp8_static.op import FAMILY as QUANT_FP8_STATIC_FAMILY
from fuse_cache.kernels.quant_fp8_static.op import QUANT_FP8_STATIC
from fuse_cache.kernels.quant_nvfp4.op import FAMILY as QUANT_NVFP4_FAMILY
from fuse_cache.kernels.quant_nvfp4.op import QUANT_NVFP4
from fuse_cache.kernels.rms_norm.op import FAMILY as RMS_NORM_FAMILY
from fuse_cache.kernels.rms_norm.op import RMS_NORM

T = TypeVar("T")

PRODUCERS: Final = {
    RMS_NORM: RMS_NORM_FAMILY,
    FUSED_ADD_RMS_NORM: FUSED_ADD_RMS_NORM_FAMILY,
    ACT_AND_MUL: ACT_AND_MUL_FAMILY,
}
QUANTISERS: Final = {
    QUANT_FP8_STATIC: QUANT_FP8_STATIC_FAMILY,
    QUANT_DYNAMIC: QUANT_DYNAMIC_FAMILY,
    QUANT_NVFP4: QUANT_NVFP4_FAMILY,
}


@dataclass(frozen=True, slots=True)
class Fused:
    """One fused operator: `keep` says that the quantised tensor is returned as well."""

    producer: Family
    quantiser: Family
    keep: bool

    @property
    def family(self) -> Family:
        """Return the operator by its parts."""
        rest = self.quantiser.tensors.removeprefix("Tensor x, ")
        results = self.quantiser.results + self.producer.results - (0 if self.keep else 1)
        return Family(
            name=f"{self.producer.name}_{self.quantiser.name}" + ("_keep" if self.keep else ""),
            tensors=f"{self.producer.tensors}, {rest}",
            attributes=f"{self.producer.attributes}, {self.quantiser.attributes}",
            results=results,
            reference=self.reference,
        )

    def arguments(self, producer: Sequence[T], quantiser: Sequence[T]) -> tuple[T, ...]:
        """Return the fused operator's arguments from all those of the two; the quantiser's x goes."""
        split, rest = self.producer.num_tensors, self.quantiser.num_tensors
        return (*producer[:split], *quantiser[1:rest], *producer[split:], *quantiser[rest:])

    def reference(self, *arguments: object) -> Tensor | tuple[Tensor, ...]:
        """Run the two references, the second on the first result of the first."""
        produced, quantised = self.split(arguments)
        value, *others = _several(self.producer.reference(*produced))
        codes = _several(self.quantiser.reference(value, *quantised))
        results = (*codes, *([value] if self.keep else []), *others)
        return results[0] if len(results) == 1 else results

    def split(self, arguments: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
        """Return the producer's arguments and the quantiser's but its x: the reverse of `arguments`."""
        split = self.producer.num_tensors
        middle = split + self.quantiser.num_tensors - 1
        end = middle + self.producer.attributes.count(",") + 1
        return (*arguments[:split], *arguments[middle:end]), (*arguments[split:middle], *arguments[end:])


def _several(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def _define_all() -> dict[tuple[OpOverload, OpOverload, bool], tuple[OpOverload, Fused]]:
    defined = {}
    for producer, producer_family in PRODUCERS.items():
        for quantiser, quantiser_family in QUANTISERS.items():
            for keep in (False, True):
                fused = Fused(producer_family, quantiser_family, keep)
                defined[producer, quantiser, keep] = (define(fused.family), fused)
    return defined


# By (producer, quantiser, keep). PER_TENSOR is for quant_dynamic alone: its scale depends on all rows, so
# that there is nothing to gain from fusing it.
FUSED: Final = _define_all()
