"""Run the engine's own passes with hooks on its routers, on every rank, and check what they used
and returned.

A round is an old-logprob pass and an update (lr 0, so weights stay).  R3 replays the given routes
in both.  R2 records the routes of the first and replays them in the second; the routers' weights
are changed in between, so that only the record can give those routes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batch.pack import Sample
from megatron_rl.config import Config
from megatron_rl.distributed import Parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.model import moe_routers
from megatron_rl.engine.pass_results import OldPass, ReplayMode
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.models.spec import ModelSpec
from megatron_rl.records.packed import MiniBatch
from megatron_rl_tools.verify_replay.episodes import wrong_batch
from megatron_rl_tools.verify_replay.faults import FaultInjector, has_room
from megatron_rl_tools.verify_replay.fingerprints import (
    Given,
    Key,
    Owner,
    Route,
    logprob_keys,
    make_batch,
    owners_on_rank,
)
from megatron_rl_tools.verify_replay.outcome_checks import PassOutcome
from megatron_rl_tools.verify_replay.router_hooks import (
    Expected,
    RouteCheck,
    Seen,
    Watch,
    check_consumed,
    check_gates,
    check_live_rows,
    check_pads,
    first_failure,
    gather_seen,
    name_wrong_rows,
)
from megatron_rl_tools.verify_replay.router_kinds import set_expert_bias

T = TypeVar("T")
Rows = list[list[Owner]]
"""The owner of every row of this rank's routers, by micro-batch."""


class Proof:
    """An engine in one layout, with hooks on its routers; `fault` breaks the routes of one rank.

    spec: the model's; its kind of router may differ from the checkpoint's.
    """

    def __init__(
        self,
        cfg: Config,
        parallel: Parallel,
        inputs: Given,
        spec: ModelSpec,
        *,
        fault: str | None = None,
    ) -> None:
        self.engine = Engine(cfg, parallel, total_updates=100, spec=spec)
        self.parallel = parallel
        self.mode = cfg.replay.mode
        self.inputs = inputs
        self.routers = [
            (spec.moe_layers.index(layer), router)
            for layer, router in moe_routers(self.engine.chunks)
        ]
        set_expert_bias(self.routers)
        self.watch = Watch(self.routers, spec.top_k, spec.router)
        self.fault = self._make_fault(fault) if fault else None

    def run_rounds(self) -> tuple[list[RouteCheck], dict[Key, Route]]:
        """Run check (a) over all rounds.

        Returns the checks, and the routes that the last round must have used.
        """
        seen: dict[tuple[str, int], list[Seen]] = {}  # (pass, round) -> rows of all ranks
        expected: list[Expected] = []
        for index in range(len(self.inputs.samples)):
            batch, rows = self.batch(index)
            self._start_round(rows)
            old = self.engine.old_logprobs(batch, MetricSums(), replay=self.mode)
            forward = self._take(rows)
            if self.mode == "R2":
                named = [(row.who, row) for row in forward if row.who is not None]
                routes = {(*who, row.layer): row.consumed for who, row in named}
                with self.other_routers():
                    self._update(batch, old, self.mode)
            else:
                routes = self.inputs.routes(index)
                seen["old-logprob forward", index] = forward
                self._update(batch, old, self.mode)
            for row in self._take(rows):
                seen.setdefault((f"update {row.kind}", index), []).append(row)
            earlier = expected[-1].routes if expected else {}
            places, forwards = self.inputs.places(index), self.inputs.forwards(index)
            expected.append(Expected(routes, earlier, places, forwards))
        return [*self.check_episodes(), *self._check(seen, expected)], routes

    def check_episodes(self) -> list[RouteCheck]:
        """Check (a) for episodes of several turns: packed tokens, mask and log-probs are those of
        their requests.
        """
        requests = self.inputs.requests
        if not requests:
            return []
        replica = self.parallel.dp_rank
        batches = [self.batch(index)[0] for index in range(len(self.inputs.samples))]
        findings = [
            wrong
            for batch in batches
            if (wrong := wrong_batch(requests, batch, replica)) is not None
        ]
        everywhere = [wrong for wrongs in self._gather(findings) for wrong in wrongs]
        if everywhere:
            hint, detail = everywhere[0]
            return [RouteCheck("(a) tokens and mask", False, detail, hint)]
        turns = [request for episode in requests.values() for request in episode]
        cached = sum(request.is_cached for request in turns)
        detail = (
            f"{len(requests)} episodes, {len(turns)} requests, {cached} of them with a prefix in"
            " the cache"
        )
        return [RouteCheck("(a) tokens and mask", True, detail)]

    def replay_live(self) -> tuple[RouteCheck, OldPass, float]:
        """Check (b): record a live pass, train on it live and again with the record, and compare
        loss and gradients bit by bit.

        Leaves the gradients of the replayed update in place.
        """
        batch, _ = self.batch(-1)
        old = self.engine.old_logprobs(batch, MetricSums(), replay="R2")
        live_loss = self._update(batch, old, "none")
        live = self.gradients()
        noise = 0.0
        # atomics add in any order: measure how far the live pass is from itself
        if self.parallel.device.type == "cuda":
            self._update(batch, old, "none")
            noise = self._difference(live)
        loss = self._update(batch, old, "R2")
        worst = self._difference(live)
        self.watch.take()
        passed = worst <= 4 * noise and (loss == live_loss or noise > 0)
        detail = f"loss {loss:.9g}" + (" equal" if loss == live_loss else f", live {live_loss:.9g}")
        detail += (
            "; gradients equal in every bit"
            if worst == 0
            else f"; gradients differ by up to {worst:.3g}"
        )
        if noise:
            detail += f" (this device's own noise between two live passes: {noise:.3g})"
        return RouteCheck("(b) replay of a live pass", passed, detail), old, loss

    def known_routes(self, routes: dict[Key, Route]) -> tuple[OldPass, float]:
        """Run the old-logprob pass and update of the last round with these routes (R3).

        Leaves the gradients in place.
        """
        batch, _ = self.batch(-1, routes)
        old = self.engine.old_logprobs(batch, MetricSums(), replay="R3")
        loss = self._update(batch, old, "R3")
        self.watch.take()
        return old, loss

    def outcome(self, old: OldPass, loss: float) -> PassOutcome:
        """Gather the results of the last update.

        Collective, and final: it overwrites the weights with their gradients, which the export then
        gathers by HF name.
        """
        for model in self.engine.models:
            for parameter in model.parameters():
                parameter.data.copy_(parameter.main_grad)
        gradients = {
            name: tensor.float().cpu().clone()
            for name, tensor in self.engine.export()
            if tensor is not None
        }
        ours: dict[tuple[str, int], float] = {}
        batch, _ = self.batch(-1)
        if self.parallel.is_last_stage:
            cp = self.parallel.cp_rank, self.parallel.cp_size
            samples_of_replica = self.inputs.samples[-1][self.parallel.dp_rank]
            parts = zip(samples_of_replica, batch.micro_batches, old.logprobs, strict=True)
            for samples, micro_batch, values in parts:
                rollouts = [sample.rollout for sample in samples]
                keys = logprob_keys(rollouts, micro_batch.cu_seqlens.tolist(), *cp)
                for who, value in zip(keys, values.tolist(), strict=True):
                    if who is not None:
                        ours[who] = value
        everyone: list[dict[tuple[str, int], float]] = [{}] * self.parallel.world_size
        dist.all_gather_object(everyone, ours)
        logprobs = {key: value for part in everyone for key, value in part.items()}
        return PassOutcome(loss, logprobs, gradients)

    def gradients(self) -> list[Tensor]:
        return [p.main_grad.clone() for model in self.engine.models for p in model.parameters()]

    def batch(self, index: int, routes: dict[Key, Route] | None = None) -> tuple[MiniBatch, Rows]:
        """Return this replica's mini-batch of a round, and the owner of every row of this rank's
        routers.
        """
        replicas = self.inputs.samples[index]
        if routes is not None:
            replicas = tuple(
                tuple(
                    tuple(batch_with_routes(sample, routes) for sample in micro_batch)
                    for micro_batch in replica
                )
                for replica in replicas
            )
        place = self.parallel
        batch = make_batch(replicas, place.dp_rank, self.engine.pack_rule)
        padded = self.engine.cfg.model.batch_format == "bshd"
        part = (
            (place.tp_rank, place.tp_size) if self.engine.core_config.sequence_parallel else (0, 1)
        )
        rows = [
            owners_on_rank(
                [sample.rollout for sample in samples],
                micro_batch.cu_seqlens.tolist(),
                place.cp_rank,
                place.cp_size,
                *part,
                padded,
            )
            for samples, micro_batch in zip(
                replicas[place.dp_rank], batch.micro_batches, strict=True
            )
        ]
        return batch, rows

    @contextmanager
    def other_routers(self) -> Iterator[None]:
        """Give every router other weights inside the context, equal on all ranks that share it."""
        saved = [router.weight.data.clone() for _, router in self.routers]
        for layer, router in self.routers:
            # seeded by layer: tensor-parallel ranks have copies of a router's weight
            noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(layer))
            router.weight.data.copy_(noise)
        try:
            yield
        finally:
            for (_, router), weight in zip(self.routers, saved, strict=True):
                router.weight.data.copy_(weight)

    def _update(self, batch: MiniBatch, old: OldPass, mode: ReplayMode) -> float:
        sums = MetricSums()
        self.engine.update(batch, old, sums, replay=mode)
        return sums.reduce(dist.group.WORLD, self.parallel.device)["train/loss"]

    def _take(self, rows: Rows) -> list[Seen]:
        return gather_seen(name_wrong_rows(self.watch.take(), rows, self.parallel.rank))

    def _difference(self, others: list[Tensor]) -> float:
        """Return the largest absolute difference of the current gradients from `others` over all
        ranks; NaN counts as infinite.
        """
        worst = torch.zeros((), dtype=torch.float64, device=self.parallel.device)
        for gradient, other in zip(self.gradients(), others, strict=True):
            difference = (gradient - other).abs().amax() if gradient.numel() else worst
            worst = torch.maximum(worst, difference.double().nan_to_num(nan=float("inf")))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def _check(
        self, seen: dict[tuple[str, int], list[Seen]], expected: list[Expected]
    ) -> list[RouteCheck]:
        """Return one check per pass, over all rounds: the first that fails, or the last."""
        spec = self.engine.spec
        everything = range(len(spec.moe_layers))
        passes: dict[str, Container[int]] = (
            {"old-logprob forward": everything} if self.mode == "R3" else {}
        )
        passes["update forward"] = everything
        recomputed = self._gather(recomputed_layers(self.engine))
        if again := {layer for layers in recomputed for layer in layers}:
            passes["update recompute"] = again
        checks = []
        for name, layers in passes.items():
            rounds = [(seen.get((name, at), []), routes) for at, routes in enumerate(expected)]
            checks.append(
                first_failure(
                    check_consumed(f"(a) {name}", rows, routes, spec.top_k, layers)
                    for rows, routes in rounds
                )
            )
        gate_error = max(self._gather(self.watch.gate_error))
        checks.append(check_gates("(a) gate weights", gate_error, spec.router))
        if self.mode == "R3":
            sizes = spec.top_k, spec.num_experts, self.parallel.ep_size
            checks.append(
                first_failure(
                    check_live_rows("(a) last tokens", rows, expected[index])
                    for (_, index), rows in seen.items()
                )
            )
            checks.append(
                first_failure(check_pads("(a) pads", rows, *sizes) for rows in seen.values())
            )
        return checks

    def _gather(self, value: T) -> list[T]:
        everyone: list[Any] = [None] * self.parallel.world_size
        dist.all_gather_object(everyone, value)
        return everyone

    def _start_round(self, rows: Rows) -> None:
        if self.fault is not None:
            self.fault.start_round(*self._split(rows))

    def _split(self, rows: Rows) -> tuple[list[list[int]], list[list[int]]]:
        """Return the rows that are pads and the rows that have a route, by micro-batch.

        R2 records routes of last tokens too, but nothing depends on them.
        """
        rounds = range(len(self.inputs.samples))
        has_route = {key[:2] for index in rounds for key in self.inputs.routes(index)}
        pads = [[row for row, who in enumerate(owners) if who is None] for owners in rows]
        routed = [[row for row, who in enumerate(owners) if who in has_route] for owners in rows]
        return pads, routed

    def _make_fault(self, fault: str) -> FaultInjector | None:
        """Make the injector on the last rank that has room for the fault.  Collective.

        Raises ValueError if no rank has room.
        """
        room: list[bool] = [False] * self.parallel.world_size
        batch, rows = self.batch(0)
        dist.all_gather_object(room, has_room(fault, self.engine.manager, *self._split(rows)))
        if not any(room):
            raise ValueError(
                f"--break {fault}: no rank has room for it: layer needs two MoE layers on a stage,"
                " order needs --micro-batches 2, the others two tokens on a rank, pad also two"
                " pads"
            )
        last = max(rank for rank, has in enumerate(room) if has)
        step = self.engine.layout.row_stride(batch.micro_batches[0].cu_seqlens)
        if self.parallel.rank != last:
            return None
        return FaultInjector(self.engine.manager, fault, step)


def recomputed_layers(engine: Engine) -> list[int]:
    """Return the MoE layers on this rank whose routers run again in the backward; with block
    recompute, those are the first ones of each chunk.
    """
    model, spec = engine.cfg.model, engine.spec
    if model.recompute == "none":
        return []
    return [
        spec.moe_layers.index(layer.layer_number - 1)
        for chunk in engine.chunks
        for index, layer in enumerate(chunk.decoder.layers)
        if layer.layer_number - 1 in spec.moe_layers
        and (model.recompute != "block" or index < model.recompute_layers)
    ]


def batch_with_routes(sample: Sample, routes: dict[Key, Route]) -> Sample:
    """Return the sample with these routes instead of its own."""
    experts = sample.rollout.routed_experts
    assert experts is not None
    table = experts.copy()
    for position in range(table.shape[0]):
        for layer in range(table.shape[1]):
            table[position, layer] = routes[sample.rollout.id, position, layer]
    # without the old digest: the rollout computes one of the new routes
    rollout = replace(sample.rollout, routed_experts=table, routes_digest=None)
    return replace(sample, rollout=rollout)
