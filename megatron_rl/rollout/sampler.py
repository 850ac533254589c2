"""What a step samples, and when: its prompts, groups left from an earlier step, and sampling one step ahead of training.

Weights `v` are those after v steps.  A step that is trained on from weights v is sampled from weights v (synchronous) or
v - 1 (ahead).  With rollout.partial = resume, groups that were aborted because enough others were complete are continued in
the next step, from newer weights; a response with a token more than rollout.max_staleness versions older than v starts again.

    left --_start--> pending --_wait--> ahead --take--> trained on --step_done--> forgotten
      ^------------ aborted, to be resumed --'

Every rank has a Sampler, and every method but the properties is collective.  Prompts are known to all ranks, groups to leaders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.distributed import Parallel
from megatron_rl.metrics.console import ShowProgress
from megatron_rl.records import Files, Prompt, RolloutGroup
from megatron_rl.rollout.client.counters import CallStats
from megatron_rl.rollout.in_flight import copied, file_name, find_groups, read_groups, write_groups
from megatron_rl.rollout.inference import Inference, SamplingStopped
from megatron_rl.rollout.missing_routes import MissingRouteCounts, count_missing_routes
from megatron_rl.rollout.partial import PartialGroup
from megatron_rl.rollout.selection import divide_prompts, interleave


@dataclass
class Sampled:
    """The groups of a step, not scored, from when sampling starts until they are trained on.

    prompts  of all replicas, the same on every rank
    partial  this leader's groups of them, [] on other ranks: all that are sampled, then the `share` that the step trains on
    gaps, call, totals  what the leader counted meanwhile; totals since the run started
    """

    text: str
    prompts: list[Prompt]
    partial: list[PartialGroup]
    share: int
    gaps: MissingRouteCounts = field(default_factory=MissingRouteCounts)
    call: CallStats | None = None
    totals: dict[str, float] = field(default_factory=dict)

    @property
    def groups(self) -> list[RolloutGroup]:
        return [group.closed() for group in self.partial]


@dataclass
class Sampler:
    """left: this leader's groups, complete or not, whose prompts `prompts` will return next."""

    cfg: Config
    parallel: Parallel
    inference: Inference
    prompts: PromptSource
    stop_token_ids: Sequence[int]
    progress: ShowProgress
    left: list[PartialGroup] = field(default_factory=list)
    pending: Sampled | None = None
    ahead: Sampled | None = None
    started: list[PartialGroup] = field(default_factory=list)  # not trained on yet, of this step and ahead

    def step_done(self) -> None:
        """The step was trained on: of the started groups only those of `ahead` are still needed."""
        self.started = [] if self.ahead is None else list(self.ahead.partial)

    def start(self, step: int, version: int) -> Sampled:
        """Start to sample `step`, which will be trained on from weights `version`."""
        dp_size = self.parallel.dp_size
        prompts = self.prompts.take(num_prompts(self.cfg, dp_size))
        return self._start(f"step {step + 1}", prompts, self.cfg.run.prompts_per_step // dp_size, version)

    def finish(self, version: int) -> None:
        """Wait for what is being sampled, if anything, so that weights can be pushed; the trainer has `version` now."""
        if self.pending is not None:
            self.ahead = self._wait(self.pending, version)

    def take(self, step: int, version: int) -> Sampled:
        """The groups of `step`, trained on next from weights `version`: sampled ahead, or now."""
        ready, self.ahead = self.ahead, None
        return ready or self._wait(self.pending or self.start(step, version), version)

    def draw(self, prompts: list[Prompt], version: int) -> Sampled:
        """A group for each of `prompts`, sampled now, to be trained on from weights `version`."""
        return self._wait(self._start("more", prompts, len(prompts) // self.parallel.dp_size, version), version)

    def prompts_state(self) -> dict[str, object]:
        """Plain values for a checkpoint: with them PromptSource.load_state_dict first returns the prompts that were taken and
        not trained on."""
        return self.prompts.state_dict(first=[] if self.ahead is None else self.ahead.prompts)

    def files(self, *, is_step_done: bool) -> Files:
        """What a leader adds to a checkpoint: its groups, as they are now, that a run resumed after the step (or before it)
        need not sample again."""
        ahead = [] if self.ahead is None else self.ahead.partial
        groups = copied([*(ahead if is_step_done else self.started), *self.left])
        if self.inference.client is None or not groups:
            return {}
        numbers = self.prompts.numbers([group.prompt for group in groups])
        return {file_name(self.parallel.dp_rank): lambda path: write_groups(path, groups, numbers)}

    def restore(self, checkpoint: Path, accepted: Sequence[str]) -> str | None:
        """Continue the groups of a checkpoint, whose prompts come first (prompts_state); returns a line for the console.

        accepted: settings that changed since.  Then all groups are sampled again, as are those of another size, or without the
        routes or kept sets that are needed now.
        """
        if self.inference.client is None and self.parallel.rank != 0:
            return None  # neither samples nor logs
        waiting = find_groups(checkpoint)
        every = [about for found in waiting.values() for _, _, about in found]
        if not every:
            return None
        text = f"  {sum(len(about['responses']) for about in every)} responses of {len(every)} groups in flight"
        if accepted:
            return f"{text}: sampled again, as {', '.join(accepted)} changed"
        if self.inference.client is not None:
            # replicas may be others than those that saved: groups follow their prompts
            order, dp = self.prompts.peek(len(self.prompts.returned) + len(every)), self.parallel
            found = read_groups(waiting, self.prompts.prompts, order, slice(dp.dp_rank, None, dp.dp_size))
            self.left = [group for group in found if self._fits(group)]
            if len(self.left) < len(found):
                text += f"; {len(found) - len(self.left)} of this replica's {len(found)} do not fit the settings: sampled again"
        return text

    def _fits(self, group: PartialGroup) -> bool:
        rollouts = [*group.rollouts.values(), *group.prefixes.values()]
        needs_mask = self.cfg.rollout.truncation is not None
        return group.size == self.cfg.run.group_size and all(
            r.has_routes == self.cfg.needs_routes and (r.sampling_mask is not None) == needs_mask for r in rollouts
        )

    def _start(self, text: str, prompts: list[Prompt], share: int, version: int) -> Sampled:
        assert self.pending is None and self.ahead is None, "what is sampled or ready must be taken first"
        client, rollout, dp = self.inference.client, self.cfg.rollout, self.parallel
        groups = [] if client is None else [self._open(prompt) for prompt in prompts[dp.dp_rank :: dp.dp_size]]
        if client is not None:
            client.take_stats()  # discards those of evaluation and parity check
            client.drop_older(groups, version - rollout.max_staleness)
        self.started += groups  # the same objects: a checkpoint in the middle of a step saves what they hold then
        self.pending = Sampled(text, prompts, groups, share)
        self.inference.start(
            groups,
            temperature=rollout.temperature,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=self.stop_token_ids,
            truncation=rollout.truncation,
            keep=share if groups else None,  # off leaders there is nothing to keep
        )
        return self.pending

    def _open(self, prompt: Prompt) -> PartialGroup:
        """What was left of this prompt's group, or a new one.  A prompt may come twice: then so do its groups."""
        found = next((group for group in self.left if group.prompt is prompt), None)
        if found is None:
            return PartialGroup(prompt, self.cfg.run.group_size)
        self.left.remove(found)
        return found

    def _wait(self, step: Sampled, version: int) -> Sampled:
        """Finish the sampling in progress; `step.partial` and `step.prompts` are then what the step trains on."""
        self.pending = None
        with self.progress(f"{step.text}: sampling", step.share) as advance:
            try:
                complete = self.inference.wait(version, advance)
            except SamplingStopped:
                self.prompts.put_back(step.prompts)  # the next run takes them first
                self.left = [*step.partial, *self.left]
                raise
        if step.share * self.parallel.dp_size < len(step.prompts):
            self._keep(step, complete)
        client = self.inference.client
        if client is not None:
            step.call, step.totals = client.take_stats(), client.counters.totals()
            step.gaps = count_missing_routes(step.groups, dropped=step.call.dropped_without_route)
        return step

    def _keep(self, step: Sampled, complete: Sequence[PartialGroup]) -> None:
        """Over-sampling: all ranks learn which prompts were complete first; the others are resumed or dropped."""
        kept, others = divide_prompts(
            step.prompts,
            None if self.inference.client is None else [group in complete for group in step.partial],
            dp_rank=self.parallel.dp_rank,
            dp_size=self.parallel.dp_size,
            device=self.parallel.device,
        )
        assert all(len(mine) == step.share for mine in kept), "a replica kept another number of groups than its share"
        if self.cfg.rollout.partial == "resume":
            self.prompts.put_back(interleave(others))
            self.left = [group for group in step.partial if group not in complete] + self.left
        step.prompts, step.partial = interleave(kept), list(complete)


def num_prompts(cfg: Config, dp_size: int) -> int:
    """Prompts to sample in a step, over all replicas: run.prompts_per_step, and more under rollout.over_sample."""
    return math.ceil(cfg.run.prompts_per_step // dp_size * (1 + cfg.rollout.over_sample)) * dp_size
