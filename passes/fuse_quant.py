"""Fuses a producer (norm, add + norm, gated activation) with the quantisation of what it produces.

The quantised values are never read back from memory, and never written where nothing else reads them. What
norm + quant and activation + quant have in common; each is a pass of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

from torch import fx
from torch._ops import OpOverload

from fuse_cache.kernels.fused_quant.op import FUSED, PRODUCERS, QUANTISERS
from fuse_cache.kernels.quant_dynamic.op import QUANT_DYNAMIC
from fuse_cache.kernels.quant_dynamic.reference import PER_TENSOR
from fuse_cache.passes.base import NearMiss, Outcome, Reason, Setting
from fuse_cache.passes.between import Between, look_behind, orphan_reason, unread_quantisation
from fuse_cache.passes.implementations import obstacle as kernel_obstacle
from fuse_cache.passes.reading import is_call, size_bytes
from fuse_cache.passes.rewrite import NoRoom, erase_dead, insert_call, make_room, take_over


class QuantFusion:
    """One run over a graph, whose candidates are producers of one kind and the quantisations behind them.

    Every candidate is fused or gets exactly one near miss.
    """

    def __init__(
        self, graph: fx.Graph, name: str, producers: Collection[OpOverload], kind: str, setting: Setting
    ) -> None:
        self.outcome = Outcome()
        self._graph = graph
        self._name = name
        self._setting = setting
        self._producers = producers
        self._kind = kind  # In words.
        self._kept: dict[fx.Node, str] = {}  # What fused operators still return, and for which quantisation.
        self._blamed: dict[fx.Node, tuple[Reason, str]] = {}  # Why a producer's quantisation was not fused.

    def run(self, *, with_orphans: bool) -> Outcome:
        """Fuse all that can be; `with_orphans` also names the quantisations that follow no producer."""
        for node in list(self._graph.nodes):
            if is_call(node, QUANTISERS):
                self._quantisation(node, with_orphans=with_orphans)
        for node in self._graph.nodes:
            if is_call(node, self._producers):
                self._miss(node, *(self._blamed.get(node) or unread_quantisation(node)))
        return self.outcome

    def _quantisation(self, quant: fx.Node, *, with_orphans: bool) -> None:
        source = quant.args[0]
        assert isinstance(source, fx.Node)
        between = look_behind(source)
        if (other := self._kept.get(between.origin)) is not None:
            self._miss(quant, Reason.EXTRA_USER, f"the {self._kind} is fused with another one, {other}")
            return
        producer = between.origin
        if not is_call(producer, self._producers):
            # Another pass's, if a producer of another kind stands behind it.
            if with_orphans and not is_call(producer, PRODUCERS):
                self._miss(quant, *orphan_reason(producer, source))
            return
        obstacle = self._obstacle(quant, between) or self._fuse(quant, source, producer)
        if obstacle is not None:
            self._miss(quant, *obstacle)
            self._blamed.setdefault(
                producer, (obstacle[0], f"{quant.name} is not fused with it for that reason")
            )

    def _obstacle(self, quant: fx.Node, between: Between) -> tuple[Reason, str] | None:
        """Say why this quantisation cannot be fused with the producer behind it."""
        if between.obstacle is not None:
            return between.obstacle
        if is_call(quant, QUANT_DYNAMIC) and quant.args[2] == PER_TENSOR:
            detail = "one scale for the whole tensor is known only when every row has been computed"
            return Reason.GUARD, detail
        return None

    def _fuse(self, quant: fx.Node, source: fx.Node, producer: fx.Node) -> tuple[Reason, str] | None:
        others = [user for user in source.users if user is not quant]
        assert isinstance(quant.target, OpOverload)
        assert isinstance(producer.target, OpOverload)
        target, fused = FUSED[producer.target, quant.target, bool(others)]
        arguments = fused.arguments(producer.args, quant.args)
        results = _results_of(quant) + ([source] if others else []) + _results_of(producer)[1:]
        olds = [node for node in results if node is not None]
        if (missing := kernel_obstacle(target, arguments, self._setting)) is not None:
            return missing.reason, missing.detail
        operands = [argument for argument in arguments if isinstance(argument, fx.Node)]
        anchor = make_room(self._graph, [producer, quant, *olds], operands)
        if anchor is NoRoom.WRITE:
            return Reason.GUARD, f"a write stands between the {self._kind} and the quantisation"
        if isinstance(anchor, NoRoom):
            return Reason.EXTRA_USER, f"what the quantisation needs is computed from the {self._kind}"
        values = (*_values(quant), *([source.meta["val"]] if others else []), *_values(producer)[1:])
        self.outcome.bytes_saved += size_bytes(source) * (1 if others else 2)
        self.outcome.candidates += 1
        self.outcome.matches += 1
        value = values if len(values) > 1 else values[0]
        news = insert_call(anchor, target, arguments, value, quant)
        for old, new in zip(results, news, strict=True):
            if old is not None:
                take_over(old, new)
            if old is source and others:
                self._kept[new] = news[0].name
        erase_dead(self._graph, *olds, quant, source, producer, *news)
        return None

    def _miss(self, node: fx.Node, reason: Reason, detail: str) -> None:
        self.outcome.candidates += 1
        self.outcome.near_misses.append(NearMiss(self._name, reason, node.name, detail))


def _results_of(node: fx.Node) -> list[fx.Node | None]:
    """Return the node of each result, None where nothing reads it."""
    value = node.meta["val"]
    if not isinstance(value, (tuple, list)):
        return [node]
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return [items.get(place) for place in range(len(value))]


def _values(node: fx.Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
