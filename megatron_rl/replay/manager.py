"""The manager of replay: it decides what a router call records, replays or recomputes.

A pass is one run of the pipeline schedule over a mini-batch.  Routes are keyed by (micro-batch,
layer), and a pass consumes every key exactly once.  A forward runs inside `forward(micro_batch)`.
A router call outside is an activation recompute, and replays the ids that the forward of the same
(micro-batch, layer) used.  It does so also where nothing else is replayed, because a live recompute
could choose other experts than its forward.

A recompute does not say of which micro-batch it is.  The order of recomputes of a router equals the
order of its forwards under 1F1B and interleaved schedules (every layer is first-in first-out), and
the number of rows is checked.

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

from megatron_rl.replay.mismatch import Mismatch, MismatchHook
from megatron_rl.replay.router import LiveTopK, RouteOverride, install

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter


RouterHook = Callable[[int, int, Tensor, Tensor], None]
"""An observer of one router call in a forward: (index of this stage's layer, micro-batch, scores
[t, E], ids [t, K] that were used).
"""


@dataclass(frozen=True)
class Routes:
    """The routes of one micro-batch on this rank."""

    replay: Tensor | None = None
    """The ids to use, uint8 | int16 [l, t, K]; None: the router decides every row."""
    live_rows: Tensor | None = None
    """The rows, int64 [n], that route live although there is a `replay`."""
    reference: Tensor | None = None
    """The rollout's ids to compare with, uint8 | int16 [l, t, K]."""
    compared: Tensor | None = None
    """The rows of `reference` with real ids, bool [t]."""


@dataclass
class ReplayPass:
    """The state of one pass, and its results after it.  The manager drops it when the pass ends or
    fails.
    """

    routes: Sequence[Routes]
    """The routes of every micro-batch."""
    record: bool
    """Keep the ids that are used."""
    training: bool
    """A backward follows."""
    mismatch: Mismatch | None
    """The comparison with the rollout's routes (mismatch.py); None where nothing is compared."""
    router_hook: RouterHook | None = None
    recorded: tuple[Tensor, ...] | None = None
    """The ids [l, t, K] of every micro-batch, after a pass that records."""
    micro_batch: int | None = None
    """The micro-batch whose forward runs now; None between forwards."""
    consumed: set[tuple[int, int]] = field(default_factory=set)
    """The (micro-batch, layer) pairs whose forward has been decided."""
    used: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(micro-batch, layer) -> the ids [t, K] that were used, in a pass that records."""
    to_recompute: dict[int, deque[tuple[int, Tensor]]] = field(default_factory=dict)
    """Layer -> the (micro-batch, ids [t, K]) of forwards that will be recomputed, oldest first."""


class ReplayManager:
    """The owner of the overrides on the decoder routers of one model.

    routers: (index on the model's MoE-layer axis, router) of every live decoder MoE layer on this
    rank, in layer order.
    num_experts: E, which decides the dtype of ids, uint8 or int16.
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
        # index on the model's axis -> index among this stage's layers
        self._stage_layers = {layer: index for index, layer in enumerate(self.layers)}
        self._routers = dict(routers)
        self._pass: ReplayPass | None = None
        self._mismatch_hook: MismatchHook | None = None
        for layer, router in routers:
            install(router, RouteOverride(self.decide, layer))

    @contextmanager
    def run_pass(
        self,
        routes: Sequence[Routes],
        *,
        training: bool,
        record: bool = False,
        router_hook: RouterHook | None = None,
    ) -> Iterator[ReplayPass]:
        """Run the schedule inside; the yielded pass has its results afterwards.

        routes: those of every micro-batch.
        training: a backward follows, so a forward without gradient is a checkpointed one, which
        will be recomputed.
        record: keep the ids that are used, in ReplayPass.recorded.
        router_hook: called by every router of a forward; it must not wait for the device.
        Raises RuntimeError when a (micro-batch, layer) was not consumed exactly once, or when a
        recompute is missing.
        """
        assert self._pass is None, "a replay pass is already running"
        mismatch = self._make_mismatch(routes)
        self._pass = state = ReplayPass(routes, record, training, mismatch, router_hook)
        try:
            yield state
            self._finish(state)
        finally:
            self._pass = None  # also after an error: the next pass must not use these routes

    @contextmanager
    def with_mismatch_hook(self, hook: MismatchHook) -> Iterator[None]:
        """Call `hook` with every comparison of the passes inside: see Mismatch."""
        self._mismatch_hook = hook
        try:
            yield
        finally:
            self._mismatch_hook = None

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """Name the micro-batch whose forward runs inside.  Outside a pass (plain inference) this
        has no effect.
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
        """Return (scores [t, K] of the decided ids, ids int64 [t, K]) for one router call.

        Nothing here reads a value from the device, because every layer would wait for it: only
        shapes are read.
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
        stage_layer, routes = self._stage_layers[layer], state.routes[state.micro_batch]
        live: Tensor | None = None  # the live choice, where it is computed
        # replayed rows need their live choice only where the mismatch is measured
        if routes.replay is None or state.mismatch is not None:
            used = live_topk(None)
            live = used[1]
        if routes.replay is not None:
            ids = self._with_live_rows(
                routes.replay[stage_layer], layer, routes.live_rows, scores, live, live_topk
            )
            used = gather(scores, ids)
        if state.mismatch is not None and live is not None and routes.reference is not None:
            bias = getattr(self._routers[layer], "expert_bias", None)
            state.mismatch.add(
                stage_layer,
                state.micro_batch,
                scores,
                live,
                used[1],
                routes.reference[stage_layer],
                bias=bias,
            )
        if state.router_hook is not None:
            state.router_hook(stage_layer, state.micro_batch, scores, used[1])
        if state.record:
            state.used[key] = used[1].to(self.id_dtype)
        # a forward without gradient before a backward: core checkpoints this layer, and will run it
        # again in the backward
        if state.training and not torch.is_grad_enabled():
            waiting = state.to_recompute.setdefault(layer, deque())
            waiting.append((key[0], used[1].to(self.id_dtype)))
        return used

    def _make_mismatch(self, routes: Sequence[Routes]) -> Mismatch | None:
        """Return the comparison of a pass; None where the micro-batches have no reference."""
        compared = [route.compared for route in routes if route.compared is not None]
        if not compared:
            return None
        assert len(compared) == len(routes), "compare all micro-batches of a pass or none"
        return Mismatch(
            self.layers,
            compared,
            scores_are_logits=self.scores_are_logits,
            hook=self._mismatch_hook,
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
        """Return int64 [t, K]: `replay`, with the live choice in the rows `live_rows`.

        live: the live choice of all rows, where it is known; else it is computed for `live_rows`.
        """
        ids = replay.to(device=scores.device, dtype=torch.int64)
        if len(ids) != len(scores):  # core does not check this: it would route by these ids
            raise RuntimeError(
                f"MoE layer {layer}: {len(ids)} rows of routes for {len(scores)} router rows"
            )
        if live_rows is None or not len(live_rows):
            return ids
        live_ids = live_topk(live_rows)[1] if live is None else live[live_rows]
        return ids.index_copy(0, live_rows, live_ids)

    def _recompute(self, state: ReplayPass, layer: int, scores: Tensor) -> Tensor:
        """Return the ids int64 [t, K] that the forward of this recompute used."""
        waiting = state.to_recompute.get(layer)
        if not waiting:
            raise RuntimeError(
                f"MoE layer {layer}: router called outside a forward with nothing left to recompute"
            )
        # the oldest, because schedules run backwards in the order of the forwards
        micro_batch, ids = waiting.popleft()
        if len(ids) != len(scores):
            raise RuntimeError(
                f"MoE layer {layer}: recompute of {len(scores)} rows, but micro-batch {micro_batch}"
                f" has {len(ids)}"
            )
        return ids.to(torch.int64)

    def _finish(self, state: ReplayPass) -> None:
        """Check that every route was consumed and every recompute made, and stack the record."""
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
                # a stage without MoE layers records nothing
                else torch.empty(0)
                for index in micro_batches
            )


def gather(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the live scores [t, K] of ids [t, K], and the ids.

    Gate weights come from these scores, and with them the gradient of the router.
    """
    return scores.gather(1, ids), ids
