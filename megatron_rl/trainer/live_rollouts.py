"""Rollouts from SGLang servers.

Every method is collective unless it says otherwise.  The leader of each data-parallel replica
samples, scores and saves its replica's share of the prompts; every rank sends its part of the
weights to the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch.penalties import with_penalties
from megatron_rl.batch.transfer import share_groups
from megatron_rl.config import Config
from megatron_rl.config.parity_limits import parity_limits
from megatron_rl.data.prompt_stream import PromptStream
from megatron_rl.distributed import Parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.parity import PARITY_TOKENS, SAMPLES_PER_PROMPT, compare, probe_prompts
from megatron_rl.evaluate import evaluate
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.events import Events
from megatron_rl.records import Files, Prompt, RolloutGroup, with_routes, without_routes
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import for_evaluation
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.inference import Inference, SamplingStopped
from megatron_rl.rollout.missing_routes import MissingRouteCounts, MissingRoutes
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl.rollout.scheduler import Sampled, Scheduler
from megatron_rl.rollout.scoring import score_groups
from megatron_rl.rollout.selection import refill as refill_groups
from megatron_rl.rollout.selection import replica_of
from megatron_rl.rollout.unique_ids import with_unique_ids
from megatron_rl.trainer.rollout_metrics import (
    check_age,
    count_call,
    count_requests_to_teachers,
    count_step,
    pass_counts,
)
from megatron_rl.trainer.rollout_source import RolloutSource, restore_prompts
from megatron_rl.trainer.step_meter import StepMeter


@dataclass
class Leader:
    """Parts that only the leader of a data-parallel replica has."""

    client: RolloutClient
    rewards: RewardPool
    recorder: Recorder


@dataclass
class LiveRollouts(RolloutSource):
    """Rollouts that SGLang servers sample during the run."""

    cfg: Config
    parallel: Parallel
    engine: Engine
    tokenizer: Any
    prompts: PromptStream
    eval_sets: Mapping[str, Sequence[Prompt]]
    inference: Inference
    leader: Leader | None
    """None on ranks that do not lead their replica."""
    meter: StepMeter
    console: Console
    policy_version: int = 0
    events: Events = field(default_factory=Events)

    def __post_init__(self) -> None:
        self.restarts = 0  # restarts of servers that were reported
        self.missing_routes = MissingRoutes(self.cfg)
        self.scheduler = Scheduler(
            self.cfg,
            self.parallel,
            self.inference,
            self.prompts,
            [self.tokenizer.eos_token_id],
            self.console.progress,
            self.score_ready,
        )

    def start(self, first_step: int) -> None:
        """Send the weights, then check parity: the engine's log-probs of a few sampled responses
        against the servers'.
        """
        # version 0, too: a server serves only after a weight sync
        self.sync_weights(self.policy_version)
        self.meter.enter("parity check: sampling")
        groups = self.probe(
            probe_prompts(self.prompts.prompts, self.parallel.dp_size),
            SAMPLES_PER_PROMPT,
            max_tokens=min(PARITY_TOKENS, self.cfg.rollout.max_response_tokens),
        )
        limits = parity_limits(self.cfg, self.inference.dtype)
        self.give_memory_to_trainer()  # the engine needs its weights
        self.meter.enter("parity check")
        parity = compare(self.engine, groups, self.cfg)
        self.console.log(parity.line(limits))
        parity.check(limits, self.console.log)

    def is_used_up(self) -> bool:
        return not self.scheduler.can_take(self.cfg.run.prompts_per_step)

    def sample(self, step: int) -> list[RolloutGroup]:
        self.serve()
        prompts, groups = self.draw(self.scheduler.take, step)
        if self.cfg.batch.dynamic_sampling:
            prompts, groups = self.refill(prompts, groups)
        with self.meter.time("split"):
            # before the groups are shared: all ranks of the replica must see the same ids
            named = with_unique_ids(without_routes(groups))
            return self.on_every_rank(with_routes(named, groups), prompts)

    def give_memory_to_trainer(self) -> None:
        self.inference.give_memory_to_trainer()

    def serve(self) -> None:
        """Send the weights to servers that have released their memory; call it before anything that
        samples.
        """
        if not self.inference.servers_have_memory:
            self._push()

    def record(self, groups: Sequence[RolloutGroup], step: int) -> None:
        plain = without_routes(groups)
        if self.leader is not None:
            # independent of the scheduler, and before anything is saved or trained on
            check_age(
                plain, version=self.policy_version, max_staleness=self.cfg.rollout.max_staleness
            )
            recorder = self.leader.recorder
            chosen = recorder.choice.of(step + 1, len(groups))  # those whose tensors are saved
            recorder.record(
                step + 1, [groups[i] if i in chosen else part for i, part in enumerate(plain)]
            )
            for name, count in self.leader.rewards.totals().items():
                self.meter.sums.add_total(name, count)
        count_step(self.cfg, self.parallel, self.meter.sums, plain, self.policy_version)

    def sync_weights(self, version: int) -> None:
        # a signal is handled later: the step is trained, and its checkpoint must be saved
        with self.meter.time("rollout"), suppress(SamplingStopped):
            self.scheduler.prepare_sync()
        self.policy_version = version
        # with rollout.release_memory the servers get them from `serve`, before they sample next
        if self.inference.servers_have_memory:
            self._push()

    def _push(self) -> None:
        text = f"version {self.policy_version}"
        event = self.events.timed("weight_sync", self.meter.step + 1, text)
        with self.meter.time("weight_sync"), event:
            keeps = self.cfg.rollout.weight_update == "in_place"
            self.inference.push(self.policy_version, keep_requests=keeps)
        if self.parallel.rank == 0 and (report := self.inference.last_push) is not None:
            self.meter.sums.add_total("perf/weight_sync_gib", report.num_bytes / 2**30)

    def evaluate(self) -> dict[str, float]:
        if not self.eval_sets:
            return {}
        self.serve()
        self.meter.enter("evaluate")
        cfg, parallel = self.cfg, self.parallel
        with suppress(SamplingStopped):
            # only one task is sampled at a time: end the one that samples later steps; the next
            # step continues its groups
            self.scheduler.end_sampling()
            return evaluate(
                self.eval_sets,
                cfg.eval,
                cfg.reward.on_error,
                self.sample_for_evaluation,
                dp_rank=parallel.dp_rank,
                dp_size=parallel.dp_size,
                device=parallel.device,
            )
        return {}

    def finish_step(self) -> None:
        self.scheduler.step_done()
        if self.leader is not None:
            # not earlier: what the weight sync cut short belongs to this step
            for name, count in self.leader.client.counters.totals().items():
                self.meter.sums.add_total(name, count)
            if (teachers := self.leader.client.teachers) is not None:
                count_requests_to_teachers(self.meter.sums, teachers, self.parallel)
        if self.parallel.rank == 0:  # the same on every rank
            for name, value in (self.prompts.metrics() | self.inference.teacher_seconds()).items():
                self.meter.sums.add(name, value, 1)
        restarts = self.inference.restarts
        self.meter.sums.add_total("rollout/server_restarts_total", restarts)
        if restarts > self.restarts:
            self.events.add(
                "server_restart", self.meter.step + 1, f"{restarts - self.restarts} replaced"
            )
            self.restarts = restarts

    def state_dict(self) -> dict[str, Any]:
        return {"policy_version": self.policy_version, "prompts": self.scheduler.prompts_state()}

    def files(self, *, is_step_done: bool) -> Files:
        return self.scheduler.files(is_step_done=is_step_done)

    def restore(
        self, state: Mapping[str, Any], checkpoint: Path, accepted: Sequence[str]
    ) -> list[str]:
        lines = [restore_prompts(self, self.prompts, state)]
        in_flight = self.scheduler.restore(checkpoint, accepted)
        return [*lines, in_flight] if in_flight else lines

    def stop(self) -> None:
        if self.leader is not None:
            self.leader.client.stop(keep_parts=True)

    def draw(
        self, take: Callable[..., Sampled], *arguments: object
    ) -> tuple[list[Prompt], list[RolloutGroup]]:
        """Call `take`, a method of the scheduler; return the prompts of all replicas and this
        replica's scored groups.
        """
        with self.meter.time("rollout"):
            sampled = take(*arguments, self.policy_version)
            # with dynamic sampling `refill` checks the sum over all draws
            is_last = not self.cfg.batch.dynamic_sampling
            plain = without_routes(sampled.groups)
            self.missing_routes.check(
                self.meter.sums, plain, sampled.missing_routes, is_last=is_last
            )
            if sampled.stats is not None:
                count_call(self.meter.sums, sampled.stats, self.parallel)
        with self.meter.time("reward"):
            scored = self.score(sampled.groups, for_training=True)
            self.note_pass_rates(sampled.prompts, scored)
            return sampled.prompts, scored

    def note_pass_rates(self, prompts: Sequence[Prompt], scored: Sequence[RolloutGroup]) -> None:
        """Note the pass rates of a draw on every rank (data.sampling = pass_rate).

        prompts: those of all replicas.  scored: this replica's groups on its leader, else [].
        """
        if self.cfg.data.sampling == "uniform":
            return
        counts = pass_counts(without_routes(scored), self.cfg.data.pass_reward)
        table = torch.zeros(len(prompts), 2, dtype=torch.int32, device=self.parallel.device)
        if self.leader is not None:
            table[self.parallel.dp_rank :: self.parallel.dp_size] = torch.from_numpy(counts).to(
                table.device
            )
        # only leaders contribute: the sum has every prompt once
        dist.all_reduce(table)
        passed, counted = table.cpu().numpy().T
        self.prompts.note(prompts, passed, counted)

    def score_ready(self, groups: Sequence[Group]) -> None:
        """Score complete groups for training while others are sampled.  Not collective."""
        if self.leader is not None and groups:
            closed = [self.scheduler.rollout_group(group) for group in groups]
            scored = self._scored(closed, self.leader.rewards, for_training=True, is_last=False)
            for group, scored_group in zip(groups, scored, strict=True):
                group.scored = scored_group

    def _scored(
        self,
        groups: Sequence[RolloutGroup],
        pool: RewardPool,
        *,
        for_training: bool,
        is_last: bool = True,
    ) -> list[RolloutGroup]:
        scored = score_groups(
            without_routes(groups),
            pool,
            self.tokenizer,
            for_training=for_training,
            is_last=is_last,
        )
        return with_routes(scored, groups)

    def score(self, groups: Sequence[RolloutGroup], *, for_training: bool) -> list[RolloutGroup]:
        """Return the groups with texts and rewards, when all replicas have theirs; [] on ranks that
        do not lead a replica.
        """
        scored: list[RolloutGroup] = []
        if self.leader is not None:
            unscored = [group for group in groups if group.rewards is None]
            new = iter(self._scored(unscored, self.leader.rewards, for_training=for_training))
            scored = [next(new) if group.rewards is None else group for group in groups]
        # wait on the host: the next collective may be NCCL's, which would keep GPUs busy
        dist.barrier(self.parallel.host_group)
        return scored

    def refill(
        self, prompts: Sequence[Prompt], groups: Sequence[RolloutGroup]
    ) -> tuple[list[Prompt], list[RolloutGroup]]:
        """Replace the groups whose rewards are all equal with groups of other prompts: DAPO's
        dynamic sampling (arXiv 2503.14476).
        """

        def draw_more(count: int) -> tuple[list[Prompt], list[RolloutGroup]]:
            more, scored = self.draw(self.scheduler.take_more, count)
            return more, self._with_penalties(scored)

        refilled = refill_groups(
            prompts,
            # with penalties: they can make equal rewards differ, and the reverse
            self._with_penalties(groups),
            draw_more,
            replica_of(self.parallel),
            is_leader=self.leader is not None,
            max_rounds=self.cfg.batch.max_sampling_rounds,
            can_draw=self.scheduler.can_take,
        )
        # The step's last call, without new counts: it compares the sum over all draws with
        # replay.missing_route_budget, and sets it back to 0.
        self.missing_routes.check(
            self.meter.sums, without_routes(refilled.groups), MissingRouteCounts()
        )
        if self.parallel.rank == 0:
            self.meter.sums.add("rollout/sampling_rounds", 1 + refilled.rounds)
            discarded = refilled.sampled - len(refilled.prompts)
            self.meter.sums.add("rollout/discarded_groups_frac", discarded, refilled.sampled)
        return refilled.prompts, refilled.groups

    def _with_penalties(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        return with_routes(with_penalties(without_routes(groups), self.cfg), groups)

    def on_every_rank(
        self, groups: Sequence[RolloutGroup], prompts: Sequence[Prompt]
    ) -> list[RolloutGroup]:
        """Return the leader's scored groups on every rank of its replica."""
        return share_groups(
            groups if self.leader is not None else None,
            self.prompts_of_replica(prompts),
            self.parallel.node,
        )

    def prompts_of_replica(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts of this rank's data-parallel replica."""
        return list(prompts[self.parallel.dp_rank :: self.parallel.dp_size])

    def sample_for_evaluation(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Return eval.samples scored responses to each of this replica's prompts; [] on ranks that
        do not lead a replica.
        """
        with self.console.progress("evaluation: sampling", len(prompts), "prompts") as advance:
            groups = self.inference.generate(
                prompts,
                self.cfg.eval.samples,
                **for_evaluation(self.cfg, [self.tokenizer.eos_token_id], "eval/"),
                on_progress=advance,
            )
        return self.score(without_routes(groups), for_training=False)

    def probe(
        self, prompts: Sequence[Prompt], num_samples: int, max_tokens: int
    ) -> list[RolloutGroup]:
        """Return responses for the parity check, on every rank of the replica; rewards are 0."""
        self.serve()
        groups = self.inference.generate(
            self.prompts_of_replica(prompts),
            num_samples,
            temperature=self.cfg.rollout.temperature,
            max_tokens=max_tokens,
            stop_token_ids=[self.tokenizer.eos_token_id],
            id_prefix="parity/",
            single_turn=True,  # an environment adds nothing to what is compared
        )
        groups = [
            replace(group, rewards=np.zeros(len(group.rollouts), np.float32)) for group in groups
        ]
        return self.on_every_rank(groups, prompts)
