"""One training run: what `train` holds in its hands.  setup.py builds it and takes it down.

Who does what: every rank trains; the leader of each data-parallel replica samples, scores and records its share of the
prompts; rank 0 pushes weights and reports.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.batch.penalties import with_penalties
from megatron_rl.batch.split import all_reduce_ints
from megatron_rl.batch.transfer import share_groups
from megatron_rl.checkpoint.save_policy import CheckpointPolicy
from megatron_rl.config import Config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.distributed import Parallel
from megatron_rl.engine.engine import Engine, OldPass
from megatron_rl.evaluate import evaluate
from megatron_rl.launch.watchdog import Watchdog
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.metrics.report import write_report
from megatron_rl.metrics.sinks import Sinks
from megatron_rl.records import Files, Prompt, RolloutGroup, StepResult
from megatron_rl.reward.failures import KINDS
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.dynamic_sampling import refill
from megatron_rl.rollout.inference import Inference, SamplingStopped
from megatron_rl.rollout.missing_routes import MissingRouteCounts, check_missing_routes, count_missing_routes
from megatron_rl.rollout.recorder import Recorder
from megatron_rl.rollout.sampler import Sampled, Sampler, num_prompts
from megatron_rl.rollout.saved import SavedRollouts
from megatron_rl.rollout.standalone import score_groups
from megatron_rl.trainer.rollout_metrics import check_age, count_call, count_groups, count_missing_rows
from megatron_rl.weights.hf.export import write_hf_checkpoint

TIMED = ("rollout", "reward", "split", "old_logprob", "update", "weight_sync")


@dataclass
class Leader:
    """What only the leader of a data-parallel replica has."""

    client: RolloutClient
    rewards: RewardPool
    recorder: Recorder


@dataclass
class Trainer:
    """Every method but `score` and `record` is collective: all ranks call it at the same place."""

    cfg: Config
    parallel: Parallel
    engine: Engine
    tokenizer: Any
    prompts: PromptSource
    eval_sets: dict[str, list[Prompt]]
    leader: Leader | None
    inference: Inference | None
    sinks: Sinks | None
    console: Console
    checkpoint_policy: CheckpointPolicy
    saved: SavedRollouts | None = (
        None  # rollouts to train on instead of sampling: then there is no leader and no serving
    )
    watchdog: Watchdog | None = None
    first_step: int = 0
    step: int = -1  # the one that is being worked on
    policy_version: int = 0
    sums: MetricSums = field(default_factory=MetricSums)
    gaps: MissingRouteCounts = field(default_factory=MissingRouteCounts)  # of this replica's draws of the step so far
    seconds: dict[str, float] = field(default_factory=dict)
    step_started: float = field(default_factory=time.monotonic)
    client_totals: dict[str, float] = field(
        default_factory=dict
    )  # of the leader's client, when it last sampled for a step
    sampler: Sampler | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.inference is not None:
            self.sampler = Sampler(
                self.cfg,
                self.parallel,
                self.inference,
                self.prompts,
                [self.tokenizer.eos_token_id],
                self.console.progress,
            )

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add this rank's wall-clock seconds inside to time/`stage` of the step."""
        start = time.monotonic()
        self._enter(stage)
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start

    def _enter(self, stage: str) -> None:
        if self.watchdog is not None:
            self.watchdog.enter(stage, self.step)

    def my_share(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of this rank's data-parallel replica."""
        return list(prompts[self.parallel.dp_rank :: self.parallel.dp_size])

    def take_samples(self, step: int) -> tuple[list[Prompt], list[RolloutGroup]]:
        """run.prompts_per_step prompts and this replica's groups of them, [] off its leader: sampled ahead, or now.

        Raises ValueError on every rank where rows without a route stop the run (see rollout/missing_routes.py).  Under dynamic sampling
        the budget is judged by `refill`, over all draws of the step.
        """
        return self._counted(self._sampler.take(step, self.policy_version))

    def sample_ahead(self, step: int) -> None:
        """Begin to sample `step`, the next one, from the weights that the servers have; where rollout.max_staleness allows it."""
        if self.inference is not None and self.cfg.rollout.samples_ahead and step < self.cfg.run.num_steps:
            self._sampler.start(step, self.policy_version + 1)

    def finish_sampling(self, version: int) -> None:
        """Wait for what is sampled ahead, so that the trainer's weights, `version` now, can be pushed."""
        if self.inference is not None:
            with suppress(SamplingStopped):  # `end` saves what is trained
                self._sampler.finish(version)

    def stop_sampling(self) -> None:
        """From another thread: a signal came, and sampling may take longer than its grace."""
        if self.leader is not None:
            self.leader.client.stop()

    def _counted(self, sampled: Sampled) -> tuple[list[Prompt], list[RolloutGroup]]:
        self._check_missing_routes(sampled.groups, sampled.gaps, is_last=not self.cfg.batch.dynamic_sampling)
        if sampled.call is not None:
            count_call(self.sums, sampled.call, self.parallel)
            self.client_totals = sampled.totals
        return sampled.prompts, [self._with_text(group) for group in sampled.groups]

    def load(self, step: int) -> list[RolloutGroup]:
        """The saved groups of this replica, scored, on each of its ranks.  Raises ValueError as `sample` does."""
        assert self.saved is not None
        self.prompts.take(num_prompts(self.cfg, self.parallel.dp_size))  # a later run with a server goes on behind them
        with self.time("rollout"):
            groups = self.saved.groups(step, self.parallel.dp_rank, self.parallel.dp_size)
            self._check_missing_routes(
                groups, count_missing_routes(groups) if self.parallel.is_replica_leader else MissingRouteCounts()
            )
        return groups

    def _check_missing_routes(
        self, groups: Sequence[RolloutGroup], counts: MissingRouteCounts, *, is_last: bool = True
    ) -> None:
        """Collective.  counts: of this replica, on one of its ranks; zeros elsewhere.  is_last: no draw of the step follows."""
        if not self.cfg.needs_routes:
            return
        count_missing_rows(self.sums, counts)
        self.gaps += counts
        if is_last or self.cfg.replay.on_missing_route == "error":
            total = MissingRouteCounts(*all_reduce_ints(self.gaps.values(), dist.ReduceOp.SUM, dist.group.WORLD))
            check_missing_routes(total, self.cfg.replay, groups)
        if is_last:
            self.gaps = MissingRouteCounts()

    @property
    def _sampler(self) -> Sampler:
        assert self.sampler is not None, "saved rollouts are loaded, not sampled"
        return self.sampler

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
        self, prompts: Sequence[Prompt], groups: Sequence[RolloutGroup]
    ) -> tuple[list[Prompt], list[RolloutGroup]]:
        """DAPO's dynamic sampling: other prompts and groups in place of those whose responses all score alike."""

        def draw(count: int) -> tuple[list[Prompt], list[RolloutGroup]]:
            more = self.prompts.take(count)
            with self.time("rollout"):
                more, sampled = self._counted(self._sampler.draw(more, self.policy_version))
            with self.time("reward"):
                return more, with_penalties(self.score(sampled), self.cfg)

        refilled = refill(
            prompts,
            with_penalties(groups, self.cfg),  # a penalty can take a group's advantage away, or give it one
            draw,
            max_rounds=self.cfg.batch.max_sampling_rounds,
            dp_rank=self.parallel.dp_rank,
            dp_size=self.parallel.dp_size,
            is_leader=self.leader is not None,
            device=self.parallel.device,
        )
        self._check_missing_routes(refilled.groups, MissingRouteCounts())
        if self.parallel.rank == 0:
            self.sums.add("rollout/sampling_rounds", 1 + refilled.rounds)
            self.sums.add("rollout/discarded_groups_frac", refilled.sampled - len(refilled.prompts), refilled.sampled)
        return refilled.prompts, refilled.groups

    def record(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Write rollouts.jsonl (saved ones are written already) and count what the step line shows of them."""
        if not self.parallel.is_replica_leader:
            return
        if self.leader is not None:
            check_age(groups, version=self.policy_version, max_staleness=self.cfg.rollout.max_staleness)
            self.leader.recorder.record(step, groups)
            self._count_recoveries(self.leader)
        if self.cfg.replay.on_missing_route == "mask_token":
            self.sums.add_total("replay/masked_tokens_total", count_missing_routes(groups).missing_response_rows)
        count_groups(self.sums, groups, version=self.policy_version)

    def _count_recoveries(self, leader: Leader) -> None:
        """What went wrong and was made good, since the run started, as of the end of the step's own sampling."""
        rewards = leader.rewards.counters
        for name, count in self.client_totals.items():
            self.sums.add_total(name, count)
        for kind in ("unformatted", *KINDS):
            self.sums.add_total(f"reward/{kind}_total", rewards[kind])

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
        if self.inference is not None:
            self.inference.push(version)
        self.policy_version = version

    def report(self, step: int, passes: Sequence[OldPass]) -> StepResult:
        """The step is done: reduce its metrics over the job, write them down and start counting anew."""
        if self.sampler is not None:
            self.sampler.step_done()
        mismatch = self.engine.mismatch(passes)
        if self.inference is not None:
            self.sums.add_total("rollout/server_restarts_total", self.inference.restarts)
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
        self.checkpoint_policy.add_previous_totals(metrics)
        self.checkpoint_policy.note(step + 1, metrics)
        result = StepResult(step, self.policy_version, metrics, per_layer)
        if self.sinks is not None:
            self.sinks.write(result)
            self.console.step(result, self.cfg.run.num_steps)
        return result

    def evaluate(self, step: int) -> None:
        """avg@k and pass@k on every evaluation set with the weights the servers hold, after `step` finished steps."""
        if not self.eval_sets:
            return
        self._enter("evaluate")
        try:
            metrics = evaluate(
                self.eval_sets,
                self.cfg.eval,
                self.cfg.reward.on_error,
                self._sample_and_score,
                dp_rank=self.parallel.dp_rank,
                dp_size=self.parallel.dp_size,
                device=self.parallel.device,
            )
        except SamplingStopped:
            return  # a signal: the next place to stop saves
        self.checkpoint_policy.note(step, metrics)
        if self.sinks is not None:
            self.sinks.write(StepResult(step - 1, self.policy_version, metrics))
            self.console.evaluation(step, metrics)
        self.step_started = time.monotonic()

    def is_due(self, step: int, every: int) -> bool:
        """Whether something with this period (0 = only at the end) is due after `step`; the last step is `finish`'s."""
        return every > 0 and (step + 1) % every == 0 and step + 1 < self.cfg.run.num_steps

    def begin(self, step: int) -> None:
        """Note where to go on should a signal end the run before step `step` has trained anything."""
        self.step = step
        self.checkpoint_policy.begin(step, self._progress())

    def stop_if_signalled(self) -> None:
        """Before the step has trained anything: when a signal came, raises StoppedBySignal once all is saved."""
        self.checkpoint_policy.stop_if_signalled(lambda: self._files(is_step_done=False))

    def end(self, step: int) -> None:
        """Checkpoint behind `step`, when it is due or a signal came: then raises StoppedBySignal."""
        self._enter("checkpoint")
        is_due = self.is_due(step, self.cfg.checkpoint.every)
        self.checkpoint_policy.end(step + 1, self._progress(), self._files, is_due=is_due)
        self.step_started = time.monotonic()

    def resume(self) -> None:
        """Continue from a checkpoint, as [checkpoint] says, and say what was restored."""
        restored = self.checkpoint_policy.resume()
        if restored is None:
            return
        cursor = restored.progress["prompts"]
        self.first_step, self.policy_version = restored.step, restored.progress["policy_version"]
        self.prompts.load_state_dict(cursor)
        restored.lines.append(
            f"  policy version {self.policy_version}; epoch {cursor['epoch'] + 1} of the data, after {cursor['position']} of "
            f"{cursor['num_prompts']} prompts"
        )
        if self.sampler is not None and (line := self.sampler.restore(restored.path, restored.accepted)):
            restored.lines.append(line)
        for line in restored.lines:
            self.console.log(line)

    def finish(self) -> None:
        """Last evaluation, checkpoint, HF export, report."""
        self.evaluate(step=self.cfg.run.num_steps)
        self._enter("checkpoint")
        self.checkpoint_policy.end(self.cfg.run.num_steps, self._progress(), self._files, is_due=True)
        self.checkpoint_policy.wait()
        self._enter("export")
        if self.cfg.checkpoint.export_hf:
            write_hf_checkpoint(self.engine.export(), self.cfg.model.path, self.cfg.run_dir / "hf")
            self.console.log(f"HF checkpoint {self.cfg.run_dir / 'hf'}")
        if self.sinks is not None:
            self.sinks.flush()
            self.console.log(f"report {write_report(self.cfg.run_dir)}")
        dist.barrier()

    def _progress(self) -> dict[str, Any]:
        """What a checkpoint holds of the run itself: plain values."""
        prompts = self.prompts.state_dict() if self.sampler is None else self.sampler.prompts_state()
        return {"policy_version": self.policy_version, "prompts": prompts}

    def _files(self, *, is_step_done: bool = True) -> Files:
        return {} if self.sampler is None else self.sampler.files(is_step_done=is_step_done)

    def _with_text(self, group: RolloutGroup) -> RolloutGroup:
        texts = self.tokenizer.batch_decode(
            [rollout.tokens[rollout.prompt_length :] for rollout in group.rollouts], skip_special_tokens=True
        )
        rollouts = tuple(replace(r, response_text=text) for r, text in zip(group.rollouts, texts, strict=True))
        return replace(group, rollouts=rollouts)

    def _sample_and_score(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        assert self.inference is not None
        groups = self.inference.generate(
            prompts,
            self.cfg.eval.samples,
            temperature=self.cfg.eval.temperature,
            max_tokens=self.cfg.eval.max_response_tokens or self.cfg.rollout.max_response_tokens,
            stop_token_ids=[self.tokenizer.eos_token_id],
            id_prefix="eval/",
        )
        return [] if self.leader is None else score_groups(groups, self.leader.rewards, self.tokenizer)

    def _times(self, metrics: dict[str, float]) -> dict[str, float]:
        """time/*: this rank's seconds since the last report; `other` is what no stage accounts for."""
        total = time.monotonic() - self.step_started
        self.step_started += total
        times = {f"time/{name}": self.seconds.get(name, 0.0) for name in TIMED}
        times["time/other"] = total - sum(times.values())
        times["time/step"] = total
        self.seconds = {}
        return times
