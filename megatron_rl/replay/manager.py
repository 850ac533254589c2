"""Which pass records, replays, recomputes: routes keyed by (micro-batch, layer), each consumed
exactly once per pass.

A pass is one run of the pipeline schedule over a mini-batch.  Forward calls run inside
`forward(micro_batch)`; a router call outside it is an activation recompute and replays what the
forward of the same (micro-batch, layer) used, also where nothing else is replayed: a live recompute
could choose other experts than its forward.  Recompute order per router equals forward order under
1F1B and interleaved schedules (each is first-in first-out per layer), and the row count is checked.

Shapes: t this rank's rows of a micro-batch, l this stage's MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.replay.mismatch import Mismatch, ObserveRoutes
from megatron_rl.replay.router import LiveTopK, RouteOverride, install

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter


WatchRouters = Callable[[int, int, Tensor, Tensor], None]
"""(this stage's layer, micro-batch, scores [t, E], ids [t, K] that were used) of one router call in
a forward.
"""


@dataclass(frozen=True)
class Routes:
    """The routes of one micro-batch on this rank."""

    replay: Tensor | None = None
    """Uint8 | int16 [l, t, K] ids to use; None: the router decides every row."""
    live_rows: Tensor | None = None  # int64 [n] rows that route live although `replay` is given
    reference: Tensor | None = None  # uint8 | int16 [l, t, K] the rollout's ids to compare with
    compared: Tensor | None = None  # bool [t] rows of `reference` that hold real ids


@dataclass
class ReplayPass:
    """State of one pass, and after it its results; the manager drops it when the pass ends or
    fails.

    recorded: per micro-batch ids [l, t, K] that were used, after a recording pass; mismatch: see
    mismatch.py, or None.
    """

    routes: Sequence[Routes]
    record: bool
    training: bool
    mismatch: Mismatch | None
    watch: WatchRouters | None = None
    recorded: tuple[Tensor, ...] | None = None
    micro_batch: int | None = None  # whose forward runs now
    consumed: set[tuple[int, int]] = field(default_factory=set)  # (micro-batch, layer)
    used: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # their ids, where `record`
    to_recompute: dict[int, deque[tuple[int, Tensor]]] = field(default_factory=dict)
    """Layer -> (micro-batch, ids)."""


class ReplayManager:
    """Owns the overrides of one model's decoder routers.

    routers: (index on the model's MoE-layer axis, router) of every live decoder MoE layer on this
    rank, in layer order.
    scores_are_logits: False where routers select by probabilities (sigmoid, pre-softmax): see
    mismatch.py.
    """

    def __init__(
        self,
        routers: Sequence[tuple[int, TopKRouter]],
        *,
        num_experts: int,
        scores_are_logits: bool = True,
    ) -> None:
        self.layers = tuple(layer for layer, _ in routers)
        assert list(self.layers) == sorted(set(self.layers)), (
            "routers must come once each, in layer order"
        )
        self.scores_are_logits = scores_are_logits
        self.id_dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._local = {layer: index for index, layer in enumerate(self.layers)}
        self._routers = dict(routers)
        self._pass: ReplayPass | None = None
        self._observe: ObserveRoutes | None = None
        for layer, router in routers:
            install(router, RouteOverride(self.decide, layer))

    @contextmanager
    def run_pass(
        self,
        routes: Sequence[Routes],
        *,
        training: bool,
        record: bool = False,
        watch: WatchRouters | None = None,
    ) -> Iterator[ReplayPass]:
        """Run the schedule inside; afterwards the yielded pass has its results.

        watch: called by every router of a forward, and must not wait for the device.
        training: a backward follows, so a forward without gradient is a checkpointed one whose
        recompute will come. Raises RuntimeError when a (micro-batch, layer) was not consumed
        exactly once or a recompute is missing.
        """
        assert self._pass is None, "a replay pass is already running"
        self._pass = state = ReplayPass(
            routes, record, training, self._make_mismatch(routes), watch
        )
        try:
            yield state
            self._finish(state)
        finally:
            self._pass = None  # also after an error: the next pass must not find this one's routes

    @contextmanager
    def observed(self, observe: ObserveRoutes) -> Iterator[None]:
        """Call `observe` with every comparison that a pass inside makes: see Mismatch."""
        self._observe = observe
        try:
            yield
        finally:
            self._observe = None

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """Name the micro-batch whose forward runs inside.

        Does nothing outside a pass (plain inference).
        """
        state = self._pass
        if state is None:
            yield
            return
        assert state.micro_batch is None, "forward calls do not nest"
        state.micro_batch = micro_batch
        try:
            yield
        finally:
            state.micro_batch = None  # from here on a router call is a recompute

    def decide(self, layer: int, scores: Tensor, live_topk: LiveTopK) -> tuple[Tensor, Tensor]:
        """(scores [t, K] of the decided ids, ids int64 [t, K]) for this router call.

        Nothing here reads a value from the device, which would wait for it in every layer: only
        shapes are looked at.
        """
        state = self._pass
        if state is None:
            return live_topk(None)
        if state.micro_batch is None:
            return gather(scores, self._recompute(state, layer, scores))
        key = (state.micro_batch, layer)
        if key in state.consumed:
            raise RuntimeError(
                f"routes of micro-batch {key[0]}, MoE layer {layer} were requested twice in one"
                " pass"
            )
        state.consumed.add(key)
        local, routes = self._local[layer], state.routes[state.micro_batch]
        live: Tensor | None = None
        # replayed rows need their live top-k only where it is measured
        if routes.replay is None or state.mismatch is not None:
            used = live_topk(None)
            live = used[1]
        if routes.replay is not None:
            ids = self._with_live_rows(
                routes.replay[local], layer, routes.live_rows, scores, live, live_topk
            )
            used = gather(scores, ids)
        if state.mismatch is not None and live is not None and routes.reference is not None:
            bias = getattr(self._routers[layer], "expert_bias", None)
            state.mismatch.add(
                local, state.micro_batch, scores, live, used[1], routes.reference[local], bias=bias
            )
        if state.watch is not None:
            state.watch(local, state.micro_batch, scores, used[1])
        if state.record:
            state.used[key] = used[1].to(self.id_dtype)
        # core checkpoints this layer: it will run again in backward
        if state.training and not torch.is_grad_enabled():
            state.to_recompute.setdefault(layer, deque()).append(
                (key[0], used[1].to(self.id_dtype))
            )
        return used

    def _make_mismatch(self, routes: Sequence[Routes]) -> Mismatch | None:
        """None unless every micro-batch has a reference to compare with."""
        compared = [route.compared for route in routes if route.compared is not None]
        if not compared:
            return None
        assert len(compared) == len(routes), "compare all micro-batches of a pass or none"
        return Mismatch(
            self.layers, compared, scores_are_logits=self.scores_are_logits, observe=self._observe
        )

    def _with_live_rows(
        self,
        replay: Tensor,
        layer: int,
        live_rows: Tensor | None,
        scores: Tensor,
        live: Tensor | None,
        live_topk: LiveTopK,
    ) -> Tensor:
        """int64 [t, K]: `replay`, with the router's own choice (`live`, where it is known) in
        `live_rows`.
        """
        ids = replay.to(device=scores.device, dtype=torch.int64)
        if len(ids) != len(scores):  # core would not notice: it silently routes what it is given
            raise RuntimeError(
                f"MoE layer {layer}: {len(ids)} rows of routes for {len(scores)} router rows"
            )
        if live_rows is None or not len(live_rows):
            return ids
        return ids.index_copy(
            0, live_rows, live_topk(live_rows)[1] if live is None else live[live_rows]
        )

    def _recompute(self, state: ReplayPass, layer: int, scores: Tensor) -> Tensor:
        waiting = state.to_recompute.get(layer)
        if not waiting:
            raise RuntimeError(
                f"MoE layer {layer}: router called outside a forward with nothing left to recompute"
            )
        # the oldest: schedules run backwards in the order of the forwards
        micro_batch, ids = waiting.popleft()
        if len(ids) != len(scores):
            raise RuntimeError(
                f"MoE layer {layer}: recompute of {len(scores)} rows, but micro-batch {micro_batch}"
                f" has {len(ids)}"
            )
        return ids.to(torch.int64)

    def _finish(self, state: ReplayPass) -> None:
        """Check that every route was consumed, and keep the record."""
        micro_batches = range(len(state.routes))
        expected = {(index, layer) for index in micro_batches for layer in self.layers}
        if state.consumed != expected:
            missing = sorted(expected - state.consumed)[:4]
            raise RuntimeError(
                f"routes not consumed in this pass: (micro-batch, MoE layer) {missing} and perhaps"
                " more"
            )
        left = {layer: len(queue) for layer, queue in state.to_recompute.items() if queue}
        if left:
            raise RuntimeError(
                f"activation recompute never requested the routes of MoE layers {left} (layer:"
                " micro-batches)"
            )
        if state.record:
            state.recorded = tuple(
                torch.stack([state.used[index, layer] for layer in self.layers])
                if self.layers
                else torch.empty(0)
                for index in micro_batches
            )


def gather(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The live scores [t, K] of given ids: gate weights, and with them the router's gradient, come
    from these.
    """
    return scores.gather(1, ids), ids
