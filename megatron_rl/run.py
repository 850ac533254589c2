"""One training run: what `train` holds in its hands.  setup.py builds it and takes it down.

Who does what: every rank trains; the leader of each data-parallel replica samples, scores and records its share of the
prompts; rank 0 pushes weights and reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch.advantage import is_uniform
from megatron_rl.batch.dynamic_sampling import refill
from megatron_rl.batch.gaps import GapCounts, check_gaps, count_gaps
from megatron_rl.batch.over_sample import kept_prompts
from megatron_rl.batch.share import share_groups
from megatron_rl.batch.split import agree
from megatron_rl.checkpoint.keeper import Keeper
from megatron_rl.config import Config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.engine.engine import Engine, OldPass
from megatron_rl.engine.parallel import Parallel
from megatron_rl.evaluate import evaluate
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.metrics.report import write_report
from megatron_rl.metrics.sinks import Sinks
from megatron_rl.metrics.spread import tabulate
from megatron_rl.records import Prompt, RolloutGroup, StepResult
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.client import RolloutClient
from megatron_rl.rollout.counters import CallStats
from megatron_rl.rollout.recorder import Recorder
from megatron_rl.rollout.samples import ROUTES_GAP
from megatron_rl.rollout.saved import SavedRollouts
from megatron_rl.serving import Serving
from megatron_rl.weights.export import write_hf_checkpoint

TIMED = ("rollout", "reward", "split", "old_logprob", "update", "push")


@dataclass
class Leader:
    """What only the leader of a data-parallel replica has."""

    client: RolloutClient
    rewards: RewardPool
    recorder: Recorder


@dataclass
class Run:
    """Every method but `score` and `record` is collective: all ranks call it at the same place."""

    cfg: Config
    parallel: Parallel
    engine: Engine
    tokenizer: Any
    prompts: PromptSource
    eval_sets: dict[str, list[Prompt]]
    leader: Leader | None
    serving: Serving | None
    sinks: Sinks | None
    console: Console
    keeper: Keeper
    saved: SavedRollouts | None = None  # rollouts to train on instead of sampling: then there is no leader and no serving
    first_step: int = 0
    policy_version: int = 0
    sums: MetricSums = field(default_factory=MetricSums)
    seconds: dict[str, float] = field(default_factory=dict)
    step_started: float = field(default_factory=time.monotonic)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add this rank's wall-clock seconds inside to time/`stage` of the step."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start

    def my_share(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of this rank's data-parallel replica."""
        return list(prompts[self.parallel.dp_rank :: self.parallel.dp_size])

    @property
    def num_prompts(self) -> int:
        """Prompts to sample in a step, over all replicas: run.prompts_per_step, and more under rollout.over_sample."""
        share = self.cfg.run.prompts_per_step // self.parallel.dp_size
        return math.ceil(share * (1 + self.cfg.rollout.over_sample)) * self.parallel.dp_size

    def sample_step(self, prompts: list[Prompt], step: int) -> tuple[list[Prompt], list[RolloutGroup]]:
        """run.prompts_per_step of `prompts`, those whose groups were complete first, and what `sample` gives for them."""
        share = self.cfg.run.prompts_per_step // self.parallel.dp_size
        groups = self.sample(prompts, step, keep=share)
        if share * self.parallel.dp_size == len(prompts):
            return prompts, groups
        kept = kept_prompts(
            prompts,
            [group.prompt for group in groups] if self.leader is not None else None,
            share=share,
            dp_rank=self.parallel.dp_rank,
            dp_size=self.parallel.dp_size,
            device=self.parallel.device,
        )
        return kept, groups

    def sample(self, prompts: Sequence[Prompt], step: int, keep: int | None = None) -> list[RolloutGroup]:
        """G responses to each prompt of this replica, from the servers.  [] on ranks that are not its leader.

        keep: only to the first so many of this replica's prompts whose groups are complete.
        Raises ValueError on every rank where rows without a route stop the run (see batch/gaps.py).
        """
        groups, counts = self._generate(prompts, step, keep)
        self._check_gaps(groups, counts)
        return groups

    def load(self, step: int) -> list[RolloutGroup]:
        """The saved groups of this replica, scored, on each of its ranks.  Raises ValueError as `sample` does."""
        assert self.saved is not None
        self.prompts.take(self.num_prompts)  # a later run with a server goes on behind the saved prompts
        with self.time("rollout"):
            groups = self.saved.groups(step, self.parallel.dp_rank, self.parallel.dp_size)
            self._check_gaps(groups, count_gaps(groups) if self.parallel.is_replica_leader else GapCounts())
        return groups

    def _check_gaps(self, groups: Sequence[RolloutGroup], counts: GapCounts) -> None:
        """Collective.  counts: of this replica, on one of its ranks; zeros on the others."""
        if self.cfg.needs_routes:
            self._count_gaps(counts)
            total = GapCounts(*agree(counts.values(), dist.ReduceOp.SUM, dist.group.WORLD))
            check_gaps(total, self.cfg.replay, groups)

    def _count_gaps(self, counts: GapCounts) -> None:
        self.sums.add_total("replay/gap_rows_total", counts.rows)
        self.sums.add_total("replay/dropped_samples_total", counts.dropped)
        self.sums.add("replay/gap_frac", counts.response_gaps, counts.response_rows)
        self.sums.add("replay/prompt_gap_frac", counts.prompt_gaps, counts.prompt_rows)

    def _generate(
        self, prompts: Sequence[Prompt], step: int, keep: int | None
    ) -> tuple[list[RolloutGroup], GapCounts]:
        """Collective, with the servers; what is counted is this leader's."""
        mine, cfg = self.my_share(prompts), self.cfg
        dropped_before = self._dropped_for_gaps()
        if self.leader is not None:
            self.leader.client.take_stats()  # of evaluation and handshake
        with self.console.progress(f"step {step + 1}: sampling", total=keep or len(mine)) as advance:
            groups = self._serving.generate(
                mine,
                cfg.run.group_size,
                temperature=cfg.rollout.temperature,
                max_tokens=cfg.rollout.max_response_tokens,
                stop_token_ids=[self.tokenizer.eos_token_id],
                keep=keep,
                on_progress=advance,
            )
        if self.leader is not None:
            self._count_call(self.leader.client.take_stats())
        counts = count_gaps(groups, dropped=self._dropped_for_gaps() - dropped_before)
        return [self._with_text(group) for group in groups], counts

    def _dropped_for_gaps(self) -> int:
        return 0 if self.leader is None else self.leader.client.counters.dropped[ROUTES_GAP]

    @property
    def _serving(self) -> Serving:
        assert self.serving is not None, "saved rollouts are loaded, not sampled"
        return self.serving

    def _count_call(self, call: CallStats) -> None:
        seconds = torch.tensor(call.request_seconds, dtype=torch.float64, device=self.parallel.device)
        everything = torch.ones_like(seconds, dtype=torch.bool), torch.zeros_like(seconds, dtype=torch.int64)
        self.sums.add_spread("rollout/request_seconds", tabulate(seconds, *everything, 1))
        self.sums.add("rollout/tokens_per_second", call.tokens * self.parallel.dp_size, call.seconds)

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Fill `rewards`; [] stays []."""
        if self.leader is None:
            return list(groups)
        items = [
            (group.prompt.text, rollout.response_text, group.prompt.label)
            for group in groups
            for rollout in group.rollouts
        ]
        rewards = iter(self.leader.rewards.score(items))
        return [
            replace(group, rewards=np.array([next(rewards) for _ in group.rollouts], np.float32)) for group in groups
        ]

    def refill(
        self, prompts: Sequence[Prompt], groups: Sequence[RolloutGroup], step: int
    ) -> tuple[list[Prompt], list[RolloutGroup]]:
        """DAPO's dynamic sampling: other prompts and groups in place of those whose responses all score alike."""

        def draw(count: int) -> tuple[list[Prompt], list[RolloutGroup]]:
            more = self.prompts.take(count)
            with self.time("rollout"):
                sampled = self.sample(more, step)
            with self.time("reward"):
                return more, self.score(sampled)

        refilled = refill(
            prompts,
            groups,
            draw,
            max_rounds=self.cfg.batch.max_sampling_rounds,
            dp_rank=self.parallel.dp_rank,
            dp_size=self.parallel.dp_size,
            is_leader=self.leader is not None,
            device=self.parallel.device,
        )
        if self.parallel.rank == 0:
            self.sums.add("rollout/sampling_rounds", 1 + refilled.rounds)
            self.sums.add("rollout/discarded_groups_frac", refilled.sampled - len(refilled.prompts), refilled.sampled)
        return refilled.prompts, refilled.groups

    def record(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Write rollouts.jsonl (saved ones are written already) and count what the step line shows of them."""
        if not self.parallel.is_replica_leader:
            return
        if self.leader is not None:
            self.leader.recorder.record(step, groups)
            self._count_recoveries(self.leader)
        if self.cfg.replay.on_gap == "mask_token":
            self.sums.add_total("replay/masked_tokens_total", count_gaps(groups).response_gaps)
        for group in groups:
            rewards = np.asarray(group.rewards)
            self.sums.add("rollout/reward_mean", float(rewards.sum()), len(rewards))
            if group.penalties is not None:
                self.sums.add("rollout/overlong_penalty_mean", float(group.penalties.sum()), len(rewards))
            self.sums.add("rollout/zero_advantage_groups_frac", float(is_uniform(group)), 1)
            for rollout in group.rollouts:
                self.sums.add("rollout/response_length_mean", rollout.response_length, 1)
                self.sums.add("rollout/truncated_frac", float(rollout.finish_reason == "length"), 1)

    def _count_recoveries(self, leader: Leader) -> None:
        """What went wrong and was made good, since the run started."""
        client, rewards = leader.client.counters, leader.rewards.counters
        for name, count in client.totals().items():
            self.sums.add_total(name, count)
        self.sums.add_total("reward/timeouts_total", rewards["timeouts"])
        self.sums.add_total("reward/errors_total", rewards["errors"])
        self.sums.add_total("reward/crashes_total", rewards["crashes"])

    def share(self, groups: Sequence[RolloutGroup], prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """The leader's scored groups on every rank of its replica."""
        return share_groups(
            groups if self.leader is not None else None,
            self.my_share(prompts),
            group=self.parallel.replica_group,
            leader=self.parallel.replica_leader,
            device=self.parallel.device,
        )

    def push(self, version: int) -> None:
        """Give the servers the current weights as `version`; on return all that are sampled from have confirmed it.

        With saved rollouts there is no server, and only the number changes.
        """
        if self.serving is not None:
            self.serving.push(version)
        self.policy_version = version

    def report(self, step: int, passes: Sequence[OldPass]) -> StepResult:
        """Reduce the step's metrics over the job, write them down and start counting anew."""
        mismatch = self.engine.mismatch(passes)
        if self.serving is not None:
            self.sums.add_total("rollout/server_restarts_total", self.serving.restarts)
        metrics = self.sums.reduce(dist.group.WORLD, self.parallel.device)
        self.sums = MetricSums()
        weight, square = metrics.get("train/is_weight_mean", 0.0), metrics.pop("train/is_weight_square_mean", 0.0)
        if passes:
            metrics["train/ess"] = weight**2 / square if square else 0.0
        per_layer: dict[str, list[float]] = {}
        if mismatch is not None:
            values = {f"routing/{name}": value for name, value in vars(mismatch).items()}
            per_layer = {name: value for name, value in values.items() if isinstance(value, list)}
            metrics |= {name: value for name, value in values.items() if name not in per_layer}
        metrics |= self._times(metrics)
        self.keeper.carry_on(metrics)
        self.keeper.note(step + 1, metrics)
        result = StepResult(step, self.policy_version, metrics, per_layer)
        if self.sinks is not None:
            self.sinks.write(result)
            self.console.step(result, self.cfg.run.num_steps)
        return result

    def evaluate(self, step: int) -> None:
        """avg@k and pass@k on every evaluation set with the weights the servers hold, after `step` finished steps."""
        if not self.eval_sets:
            return
        metrics = evaluate(
            self.eval_sets,
            self.cfg.eval,
            self._sample_and_score,
            dp_rank=self.parallel.dp_rank,
            dp_size=self.parallel.dp_size,
            device=self.parallel.device,
        )
        self.keeper.note(step, metrics)
        if self.sinks is not None:
            self.sinks.write(StepResult(step - 1, self.policy_version, metrics))
            self.console.evaluation(step, metrics)
        self.step_started = time.monotonic()

    def is_due(self, step: int, every: int) -> bool:
        """Whether something with this period (0 = only at the end) is due after `step`; the last step is `finish`'s."""
        return every > 0 and (step + 1) % every == 0 and step + 1 < self.cfg.run.num_steps

    def begin(self, step: int) -> None:
        """Note where to go on should a signal end the run before step `step` has trained anything."""
        self.keeper.begin(step, self._progress())

    def end(self, step: int) -> None:
        """Checkpoint behind `step`, when it is due or a signal came: then raises StoppedBySignal."""
        self.keeper.end(step + 1, self._progress(), is_due=self.is_due(step, self.cfg.checkpoint.every))
        self.step_started = time.monotonic()

    def resume(self) -> None:
        """Continue from a checkpoint, as [checkpoint] says, and say what was restored."""
        restored = self.keeper.resume()
        if restored is None:
            return
        cursor = restored.progress["prompts"]
        self.first_step, self.policy_version = restored.step, restored.progress["policy_version"]
        self.prompts.load_state_dict(cursor)
        restored.lines.append(
            f"  policy version {self.policy_version}; epoch {cursor['epoch'] + 1} of the data, after {cursor['position']} of "
            f"{cursor['num_prompts']} prompts"
        )
        for line in restored.lines:
            self.console.say(line)

    def finish(self) -> None:
        """Last evaluation, checkpoint, HF export, report."""
        self.evaluate(step=self.cfg.run.num_steps)
        self.keeper.end(self.cfg.run.num_steps, self._progress(), is_due=True)
        self.keeper.wait()
        if self.cfg.checkpoint.export_hf:
            write_hf_checkpoint(self.engine.export(), self.cfg.model.path, self.cfg.run_dir / "hf")
            self.console.say(f"HF checkpoint {self.cfg.run_dir / 'hf'}")
        if self.sinks is not None:
            self.sinks.flush()
            self.console.say(f"report {write_report(self.cfg.run_dir)}")
        dist.barrier()

    def _progress(self) -> dict[str, Any]:
        """What a checkpoint holds of the run itself: plain values."""
        return {"policy_version": self.policy_version, "prompts": self.prompts.state_dict()}

    def _with_text(self, group: RolloutGroup) -> RolloutGroup:
        texts = self.tokenizer.batch_decode(
            [rollout.tokens[rollout.prompt_length :] for rollout in group.rollouts], skip_special_tokens=True
        )
        rollouts = tuple(replace(r, response_text=text) for r, text in zip(group.rollouts, texts, strict=True))
        return replace(group, rollouts=rollouts)

    def _sample_and_score(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        groups = self._serving.generate(
            prompts,
            self.cfg.eval.samples,
            temperature=self.cfg.eval.temperature,
            max_tokens=self.cfg.rollout.max_response_tokens,
            stop_token_ids=[self.tokenizer.eos_token_id],
            id_prefix="eval/",
        )
        return self.score([self._with_text(group) for group in groups])

    def _times(self, metrics: dict[str, float]) -> dict[str, float]:
        """time/*: this rank's seconds since the last report; `other` is what no stage accounts for."""
        total = time.monotonic() - self.step_started
        self.step_started += total
        times = {f"time/{name}": self.seconds.get(name, 0.0) for name in TIMED}
        times["time/other"] = total - sum(times.values())
        times["time/step"] = total
        self.seconds = {}
        return times
