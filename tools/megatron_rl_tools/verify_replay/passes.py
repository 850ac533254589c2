"""Run the engine's own passes with hooks on its routers, on every rank, and check what they used
and returned.

Steps of a round: old-logprob pass, update (lr 0, so weights stay).  R3 replays the given routes in
both.  R2 records the first and replays it in the second; the routers' weights are changed in
between, so only the record can give those routes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from megatron_rl.records import MiniBatch
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
from megatron_rl_tools.verify_replay.router_hooks import (
    Expected,
    RouteCheck,
    Seen,
    Watch,
    check_consumed,
    check_gates,
    check_live_rows,
    check_pads,
    gather_seen,
    name_wrong_rows,
)
from megatron_rl_tools.verify_replay.router_kinds import set_expert_bias

T = TypeVar("T")
Rows = list[list[Owner]]


@dataclass(frozen=True)
class PassOutcome:
    """Results of a run with known routes, for comparison with another layout.

    logprobs: (rollout, position) -> log pi_old; gradients: HF name -> float32 tensor, on rank 0
    only.
    """

    loss: float
    logprobs: dict[tuple[str, int], float]
    gradients: dict[str, Tensor]


class Proof:
    """One engine in one layout, with hooks on its routers; `fault` breaks the routes of one rank.

    spec: of the model; its kind of router may be another than the checkpoint's.
    """

    def __init__(
        self,
        cfg: Config,
        parallel: Parallel,
        given: Given,
        spec: ModelSpec,
        *,
        fault: str | None = None,
    ) -> None:
        self.engine = Engine(cfg, parallel, total_updates=100, spec=spec)
        self.parallel = parallel
        self.mode = cfg.replay.mode
        self.given = given
        self.routers = [
            (spec.moe_layers.index(layer), router)
            for layer, router in moe_routers(self.engine.chunks)
        ]
        set_expert_bias(self.routers)
        self.watch = Watch(self.routers, spec.top_k, spec.router)
        self.fault = self._make_fault(fault) if fault else None

    def run_rounds(self) -> tuple[list[RouteCheck], dict[Key, Route]]:
        """(a): both rounds.

        Returns the checks and the routes that the last round must have used.
        """
        seen: dict[tuple[str, int], list[Seen]] = {}  # (pass, round) -> rows of all ranks
        expected: list[Expected] = []
        for index in range(len(self.given.samples)):
            batch, rows = self.batch(index)
            self._start_round(rows)
            old = self.engine.old_logprobs(batch, MetricSums(), replay=self.mode)
            forward = self._take(rows)
            if self.mode == "R2":
                given = {
                    (*row.who, row.layer): row.consumed for row in forward if row.who is not None
                }
                with self.other_routers():
                    self._update(batch, old, self.mode)
            else:
                given = self.given.routes(index)
                seen["old-logprob forward", index] = forward
                self._update(batch, old, self.mode)
            for row in self._take(rows):
                seen.setdefault((f"update {row.kind}", index), []).append(row)
            earlier = expected[-1].given if expected else {}
            expected.append(
                Expected(given, earlier, self.given.places(index), self.given.forwards(index))
            )
        return [*self.check_episodes(), *self._check(seen, expected)], given

    def check_episodes(self) -> list[RouteCheck]:
        """(a): the packed tokens, the mask and the log-probs of episodes of several turns are those
        of their requests.
        """
        requests = self.given.requests
        if not requests:
            return []
        replica = self.parallel.dp_rank
        batches = [self.batch(index)[0] for index in range(len(self.given.samples))]
        found = [
            wrong
            for batch in batches
            if (wrong := wrong_batch(requests, batch, replica)) is not None
        ]
        everywhere = [wrong for wrongs in self._gather(found) for wrong in wrongs]
        if everywhere:
            hint, detail = everywhere[0]
            return [RouteCheck("(a) tokens and mask", False, detail, hint)]
        turns = sum(len(own) for own in requests.values())
        cached = sum(request.is_cached for own in requests.values() for request in own)
        detail = (
            f"{len(requests)} episodes, {turns} requests, {cached} of them with a prefix in the"
            " cache"
        )
        return [RouteCheck("(a) tokens and mask", True, detail)]

    def replay_live(self) -> tuple[RouteCheck, OldPass, float]:
        """(b): record a live pass, train on it live and again with the record: equal loss, equal
        gradients, bit by bit.

        Leaves the gradients of the replayed update in place.
        """
        batch, _ = self.batch(-1)
        old = self.engine.old_logprobs(batch, MetricSums(), replay="R2")
        live_loss = self._update(batch, old, "none")
        live = self.gradients()
        noise = 0.0
        # atomics add in any order: how far is the live pass from itself?
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
        """One old-logprob pass and update of the last round with these routes (R3); leaves the
        gradients in place.
        """
        batch, _ = self.batch(-1, routes)
        old = self.engine.old_logprobs(batch, MetricSums(), replay="R3")
        loss = self._update(batch, old, "R3")
        self.watch.take()
        return old, loss

    def outcome(self, old: OldPass, loss: float) -> PassOutcome:
        """Results of the last update, gathered.

        Collective, and final: overwrites the weights with their gradients.
        """
        for model in self.engine.models:
            for parameter in model.parameters():
                parameter.data.copy_(parameter.main_grad)
        gradients = {
            name: tensor.float().cpu().clone()
            for name, tensor in self.engine.export()
            if tensor is not None
        }
        mine: dict[tuple[str, int], float] = {}
        batch, _ = self.batch(-1)
        if self.parallel.is_last_stage:
            cp = self.parallel.cp_rank, self.parallel.cp_size
            for samples, micro_batch, values in zip(
                self._mine(-1), batch.micro_batches, old.logprobs, strict=True
            ):
                keys = logprob_keys(
                    [sample.rollout for sample in samples], micro_batch.cu_seqlens.tolist(), *cp
                )
                for who, value in zip(keys, values.tolist(), strict=True):
                    if who is not None:
                        mine[who] = value
        everyone: list[dict[tuple[str, int], float]] = [{}] * self.parallel.world_size
        dist.all_gather_object(everyone, mine)
        return PassOutcome(
            loss, {key: value for part in everyone for key, value in part.items()}, gradients
        )

    def gradients(self) -> list[Tensor]:
        return [p.main_grad.clone() for model in self.engine.models for p in model.parameters()]

    def batch(self, index: int, routes: dict[Key, Route] | None = None) -> tuple[MiniBatch, Rows]:
        """This replica's mini-batch of a round, and who must be in each row of this rank's routers."""
        replicas = self.given.samples[index]
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
        """Inside, every router has other weights, equal on all ranks that share it."""
        saved = [router.weight.data.clone() for _, router in self.routers]
        for layer, router in self.routers:
            noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(layer))
            router.weight.data.copy_(noise)
        try:
            yield
        finally:
            for (_, router), weight in zip(self.routers, saved, strict=True):
                router.weight.data.copy_(weight)

    def _mine(self, index: int) -> Sequence[Sequence[Sample]]:
        return self.given.samples[index][self.parallel.dp_rank]

    def _update(self, batch: MiniBatch, old: OldPass, mode: ReplayMode) -> float:
        sums = MetricSums()
        self.engine.update(batch, old, sums, replay=mode)
        return sums.reduce(dist.group.WORLD, self.parallel.device)["train/loss"]

    def _take(self, rows: Rows) -> list[Seen]:
        return gather_seen(name_wrong_rows(self.watch.take(), rows, self.parallel.rank))

    def _difference(self, others: list[Tensor]) -> float:
        """Largest absolute difference of the gradients now from `others`, over the job; NaN counts
        as infinite.
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
        """One check per pass, over all rounds: the first that fails, or the last."""
        spec = self.engine.spec
        everything = range(len(spec.moe_layers))
        passes: dict[str, Container[int]] = (
            {"old-logprob forward": everything} if self.mode == "R3" else {}
        )
        passes["update forward"] = everything
        if again := {
            layer for layers in self._gather(recomputed_layers(self.engine)) for layer in layers
        }:
            passes["update recompute"] = again
        rounds = range(len(expected))
        checks = [
            first_failure(
                check_consumed(
                    f"(a) {name}", seen.get((name, index), []), expected[index], spec.top_k, layers
                )
                for index in rounds
            )
            for name, layers in passes.items()
        ]
        checks.append(
            check_gates("(a) gate weights", max(self._gather(self.watch.gate_error)), spec.router)
        )
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

    def _gather(self, mine: T) -> list[T]:
        everyone: list[Any] = [None] * self.parallel.world_size
        dist.all_gather_object(everyone, mine)
        return everyone

    def _start_round(self, rows: Rows) -> None:
        if self.fault is not None:
            self.fault.start_round(*self._split(rows))

    def _split(self, rows: Rows) -> tuple[list[list[int]], list[list[int]]]:
        """Rows that are pads, and rows that have a route (R2 records last tokens too, but they do
        not matter).
        """
        has_route = {
            key[:2] for index in range(len(self.given.samples)) for key in self.given.routes(index)
        }
        pads = [[row for row, who in enumerate(micro_batch) if who is None] for micro_batch in rows]
        return pads, [
            [row for row, who in enumerate(micro_batch) if who in has_route] for micro_batch in rows
        ]

    def _make_fault(self, fault: str) -> FaultInjector | None:
        """On the last rank where the fault has room.

        Raises ValueError where it has none anywhere.  Collective.
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
        step = self.engine.layout.width(batch.micro_batches[0].cu_seqlens)
        return (
            FaultInjector(self.engine.manager, fault, step) if self.parallel.rank == last else None
        )


def recomputed_layers(engine: Engine) -> list[int]:
    """MoE layers on this rank whose routers run again in the backward: of block recompute, the
    first of each chunk.
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


def first_failure(checks: Iterable[RouteCheck]) -> RouteCheck:
    """The first check that failed, or the last of all."""
    for check in checks:
        if not check.passed:
            break
    return check


def batch_with_routes(sample: Sample, routes: dict[Key, Route]) -> Sample:
    """The sample with these routes in place of its own."""
    experts = sample.rollout.routed_experts
    assert experts is not None
    table = experts.copy()
    for position in range(table.shape[0]):
        for layer in range(table.shape[1]):
            table[position, layer] = routes[sample.rollout.id, position, layer]
    # made again
    return replace(
        sample, rollout=replace(sample.rollout, routed_experts=table, routes_digest=None)
    )
