"""Which pass records, replays, recomputes: routes keyed by (micro-batch, layer), each consumed exactly once per pass.

A pass is one run of the pipeline schedule over a mini-batch.  Forward calls run inside `forward(micro_batch)`; a router
call outside it is an activation recompute and replays what the forward of the same (micro-batch, layer) used, also where
nothing else is replayed: a live recompute could flip.  Recompute order per router equals forward order under 1F1B and
interleaved schedules (each is first-in first-out per layer), and the row count is checked.

Shapes: t this rank's rows of a micro-batch, l this stage's MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rl.replay.mismatch import Mismatch
from megatron_rl.replay.router import LiveTopK, RouteOverride, install


@dataclass(frozen=True)
class Routes:
    """What one micro-batch is given on this rank.

    replay       uint8 | int16 [l, t, K] ids to use, or None: the router decides every row
    live_rows    int64 [n] rows that route live although `replay` is given
    reference    uint8 | int16 [l, t, K] the rollout's ids to compare with, or None
    compared     bool [t] rows of `reference` that hold real ids
    """

    replay: Tensor | None = None
    live_rows: Tensor | None = None
    reference: Tensor | None = None
    compared: Tensor | None = None


@dataclass
class PassState:
    """Everything that lives for one pass; dropped as a whole when it ends, however it ends."""

    routes: Sequence[Routes]
    record: bool
    training: bool
    micro_batch: int | None = None
    consumed: set[tuple[int, int]] = field(default_factory=set)
    recorded: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    to_recompute: dict[int, deque[tuple[int, Tensor]]] = field(default_factory=dict)
    mismatch: Mismatch | None = None


@dataclass(frozen=True)
class PassReport:
    """recorded: per micro-batch ids [l, t, K] of what was used (record passes only); mismatch: see mismatch.py."""

    recorded: tuple[Tensor, ...] | None
    mismatch: Mismatch | None


class ReplayManager:
    """Owns the overrides of one model's decoder routers.

    routers: (index on the model's MoE-layer axis, router) of every live decoder MoE layer on this rank.
    scores_are_logits: False where routers select by probabilities (sigmoid, pre-softmax): see mismatch.py.
    """

    def __init__(self, routers: Sequence[tuple[int, Any]], *, num_experts: int, scores_are_logits: bool = True) -> None:
        self.layers = tuple(layer for layer, _ in routers)
        assert list(self.layers) == sorted(set(self.layers)), "routers must come once each, in layer order"
        self.num_experts = num_experts
        self.scores_are_logits = scores_are_logits
        self.id_dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._local = {layer: index for index, layer in enumerate(self.layers)}
        self._routers = dict(routers)
        self._pass: PassState | None = None
        for layer, router in routers:
            install(router, RouteOverride(self, layer))

    @contextmanager
    def run_pass(self, routes: Sequence[Routes], *, training: bool, record: bool = False) -> Iterator[list[PassReport]]:
        """Run the schedule inside; afterwards the yielded list holds one PassReport.

        training: a backward follows, so a forward without gradient is a checkpointed one whose recompute will come.
        Raises RuntimeError when a (micro-batch, layer) was not consumed exactly once or a recompute is missing.
        State is dropped on any exception.
        """
        assert self._pass is None, "a replay pass is already running"
        self._pass = PassState(routes, record, training, mismatch=self._make_mismatch(routes))
        reports: list[PassReport] = []
        try:
            yield reports
            reports.append(self._finish(self._pass))
        finally:
            self._pass = None

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """Name the micro-batch whose forward runs inside.  Does nothing outside a pass (plain inference)."""
        if self._pass is None:
            yield
            return
        assert self._pass.micro_batch is None, "forward calls do not nest"
        self._pass.micro_batch = micro_batch
        try:
            yield
        finally:
            if self._pass is not None:
                self._pass.micro_batch = None

    def decide(self, layer: int, scores: Tensor, live_topk: LiveTopK) -> tuple[Tensor, Tensor]:
        """(scores [t, K] of the decided ids, ids int64 [t, K]) for this router call.

        Nothing here reads a value from the device: shapes are all that the host looks at.
        """
        state = self._pass
        if state is None:
            return live_topk(None)
        if state.micro_batch is None:
            return gather(scores, self._recompute(state, layer, scores))
        key = (state.micro_batch, layer)
        if key in state.consumed:
            raise RuntimeError(f"routes of micro-batch {key[0]}, MoE layer {layer} were asked for twice in one pass")
        state.consumed.add(key)
        local, routes = self._local[layer], state.routes[state.micro_batch]
        measures = routes.reference is not None and state.mismatch is not None
        live = live_topk(None) if routes.replay is None or measures else None
        if routes.replay is None:
            assert live is not None
            used = live
        else:
            used = gather(scores, self._replay(routes, local, scores, None if live is None else live[1], live_topk))
        if measures:
            assert live is not None and state.mismatch is not None and routes.reference is not None
            bias = getattr(self._routers[layer], "expert_bias", None)
            state.mismatch.add(local, state.micro_batch, scores, live[1], used[1], routes.reference[local], bias=bias)
        if state.record:
            state.recorded[key] = used[1].to(self.id_dtype)
        if state.training and not torch.is_grad_enabled():
            state.to_recompute.setdefault(layer, deque()).append((key[0], used[1].to(self.id_dtype)))
        return used

    def _make_mismatch(self, routes: Sequence[Routes]) -> Mismatch | None:
        """None unless every micro-batch has a reference to compare with."""
        compared = [route.compared for route in routes if route.compared is not None]
        if not compared:
            return None
        assert len(compared) == len(routes), "compare all micro-batches of a pass or none"
        return Mismatch(self.layers, compared, scores_are_logits=self.scores_are_logits)

    def _replay(self, routes: Routes, local: int, scores: Tensor, live: Tensor | None, live_topk: LiveTopK) -> Tensor:
        assert routes.replay is not None
        ids = routes.replay[local].to(device=scores.device, dtype=torch.int64)
        if len(ids) != len(scores):
            raise RuntimeError(
                f"MoE layer {self.layers[local]}: {len(ids)} rows of routes for {len(scores)} router rows"
            )
        if routes.live_rows is not None and len(routes.live_rows):
            rows = routes.live_rows
            ids = ids.index_copy(0, rows, live[rows] if live is not None else live_topk(rows)[1])
        return ids

    def _recompute(self, state: PassState, layer: int, scores: Tensor) -> Tensor:
        waiting = state.to_recompute.get(layer)
        if not waiting:
            raise RuntimeError(f"MoE layer {layer}: router called outside a forward with nothing left to recompute")
        micro_batch, ids = waiting.popleft()
        if len(ids) != len(scores):
            raise RuntimeError(
                f"MoE layer {layer}: recompute of {len(scores)} rows met micro-batch {micro_batch} with {len(ids)} rows"
            )
        return ids.to(torch.int64)

    def _finish(self, state: PassState) -> PassReport:
        expected = {(index, layer) for index in range(len(state.routes)) for layer in self.layers}
        if state.consumed != expected:
            missing = sorted(expected - state.consumed)[:4]
            raise RuntimeError(f"routes not consumed in this pass: (micro-batch, MoE layer) {missing} and perhaps more")
        left = {layer: len(queue) for layer, queue in state.to_recompute.items() if queue}
        if left:
            raise RuntimeError(
                f"activation recompute never asked for the routes of MoE layers {left} (layer: micro-batches)"
            )
        recorded = None
        if state.record:
            recorded = tuple(
                torch.stack([state.recorded[index, layer] for layer in self.layers]) if self.layers else torch.empty(0)
                for index in range(len(state.routes))
            )
        return PassReport(recorded, state.mismatch)


def gather(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The live scores [t, K] of given ids: gate weights, and with them the router's gradient, come from these."""
    return scores.gather(1, ids), ids
