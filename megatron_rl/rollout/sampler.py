"""What a step samples, and when: its prompts, what an earlier step left of them, and sampling one step ahead of training.

Versions: weights `v` are those after v steps.  A step that is trained on from weights v is sampled from weights v (synchronous)
or v - 1 (ahead).  With rollout.partial = resume, groups that were aborted because enough others were complete go on in the next
step's sampling, from newer weights; a token more than rollout.max_staleness versions older than v is sampled anew instead.

Every rank has a Sampler, and every method but the properties is collective.  Prompts are known to all ranks, groups to leaders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.distributed import Parallel
from megatron_rl.records import Files, Prompt, RolloutGroup
from megatron_rl.rollout.client.counters import CallStats
from megatron_rl.rollout.client.response import ROUTES_MISSING_ROWS
from megatron_rl.rollout.in_flight import copied, file_name, find_groups, read_groups, write_groups
from megatron_rl.rollout.inference import Inference, SamplingStopped
from megatron_rl.rollout.missing_routes import MissingRouteCounts, count_missing_routes
from megatron_rl.rollout.over_sample import kept_prompts
from megatron_rl.rollout.partial import PartialGroup

Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Shows a text and how many of a number of things are done: metrics.console.Console.progress."""


@dataclass(frozen=True)
class Sampled:
    """Whole groups, not scored.  prompts: of all replicas; groups: this one's, [] off its leader; the rest: what the leader
    counted meanwhile, totals since the run started.  filled: what became the groups."""

    prompts: list[Prompt]
    groups: list[RolloutGroup]
    filled: Sequence[PartialGroup] = ()
    gaps: MissingRouteCounts = field(default_factory=MissingRouteCounts)
    call: CallStats | None = None
    totals: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingStep:
    """What is being sampled: prompts of all replicas and this leader's groups of them, of which each replica keeps `share`."""

    text: str
    prompts: list[Prompt]
    groups: list[PartialGroup]
    share: int
    missing_before: int


@dataclass
class Sampler:
    """left: this leader's groups, whole or not, whose prompts `prompts` will give next."""

    cfg: Config
    parallel: Parallel
    inference: Inference
    prompts: PromptSource
    stop_token_ids: Sequence[int]
    progress: Progress
    left: list[PartialGroup] = field(default_factory=list)
    pending: PendingStep | None = None
    ahead: Sampled | None = None
    started: list[PartialGroup] = field(default_factory=list)  # what was not trained on yet, of this step and ahead

    @property
    def share(self) -> int:
        """Groups that a replica trains on in a step."""
        return self.cfg.run.prompts_per_step // self.parallel.dp_size

    def step_done(self) -> None:
        """The step is behind us: of what was begun only `ahead` is still to be trained on."""
        self.started = [] if self.ahead is None else list(self.ahead.filled)

    def start(self, step: int, version: int) -> None:
        """Begin to sample `step`, which will be trained on from weights `version`."""
        self._start(
            f"step {step + 1}", self.prompts.take(num_prompts(self.cfg, self.parallel.dp_size)), self.share, version
        )

    def finish(self, version: int) -> None:
        """Wait for what is being sampled, if anything, so that weights can be pushed; the trainer has `version` now."""
        if self.pending is None:
            return
        now, self.pending = self.pending, None
        with self.progress(f"{now.text}: sampling", now.share) as advance:
            try:
                filled = self.inference.wait(version, advance)
            except SamplingStopped:
                self.prompts.put_back(now.prompts)  # their turn is still to come
                self.left = [*now.groups, *self.left]
                raise
        self.ahead = self._sampled(now, filled)

    def take(self, step: int, version: int) -> Sampled:
        """The groups of `step`, trained on next from weights `version`: sampled ahead, or now."""
        if self.ahead is None and self.pending is None:
            self.start(step, version)
        self.finish(version)
        return self._take_ahead()

    def draw(self, prompts: list[Prompt], version: int) -> Sampled:
        """A group for each of `prompts`, sampled now, to be trained on from weights `version`; nothing may be under way."""
        assert self.ahead is None, "what is ready must be taken first"
        self._start("more", prompts, len(prompts) // self.parallel.dp_size, version)
        self.finish(version)
        return self._take_ahead()

    def _take_ahead(self) -> Sampled:
        assert self.ahead is not None, "nothing was sampled"
        taken, self.ahead = self.ahead, None
        return taken

    def prompts_state(self) -> dict[str, Any]:
        """Plain values for a checkpoint: PromptSource.load_state_dict makes the prompts that were drawn and not trained on come
        again, first."""
        return self.prompts.state_dict(first=[] if self.ahead is None else self.ahead.prompts)

    def files(self, *, is_step_done: bool) -> Files:
        """What a leader adds to a checkpoint: its groups, as they are now, that a run resumed behind the step, or else before it,
        need not sample again."""
        ahead = [] if self.ahead is None else self.ahead.filled
        groups = copied([*(ahead if is_step_done else self.started), *self.left])
        if self.inference.client is None or not groups:
            return {}
        numbers = self.prompts.numbers([group.prompt for group in groups])
        return {file_name(self.parallel.dp_rank): lambda path: write_groups(path, groups, numbers)}

    def restore(self, checkpoint: Path, accepted: Sequence[str]) -> str | None:
        """Go on with the groups of a checkpoint, whose prompts come first (prompts_state); a line about them for people.

        accepted: settings that changed since.  Then all are sampled anew, as are groups of another size, or without the routes
        that are needed now.
        """
        if self.inference.client is None and self.parallel.rank != 0:
            return None  # neither samples nor speaks
        waiting = find_groups(checkpoint)
        every = [about for found in waiting.values() for _, _, about in found]
        if not every:
            return None
        text = f"  {sum(len(about['responses']) for about in every)} responses of {len(every)} groups in flight"
        if accepted:
            return f"{text}: sampled anew, as {', '.join(accepted)} changed"
        if self.inference.client is not None:
            order, dp = self.prompts.peek(len(self.prompts.returned) + len(every)), self.parallel
            found = read_groups(waiting, self.prompts.prompts, order, slice(dp.dp_rank, None, dp.dp_size))
            self.left = [group for group in found if self._fits(group)]
            if len(self.left) < len(found):
                text += f"; {len(found) - len(self.left)} of this replica's {len(found)} do not fit the settings: sampled anew"
        return text

    def _fits(self, group: PartialGroup) -> bool:
        rollouts = [*group.rollouts.values(), *group.prefixes.values()]
        has_routes = {rollout.routed_experts is not None for rollout in rollouts}
        return group.size == self.cfg.run.group_size and has_routes <= {self.cfg.needs_routes}

    def _start(self, text: str, prompts: list[Prompt], share: int, version: int) -> None:
        client, rollout = self.inference.client, self.cfg.rollout
        groups = [] if client is None else self._open(prompts[self.parallel.dp_rank :: self.parallel.dp_size])
        missing_before = 0
        if client is not None:
            client.take_stats()  # of evaluation and parity check
            client.drop_older(groups, version - rollout.max_staleness)
            missing_before = client.counters.dropped[ROUTES_MISSING_ROWS]
        self.started += groups
        self.pending = PendingStep(text, prompts, groups, share, missing_before)
        self.inference.start(
            groups,
            temperature=rollout.temperature,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=self.stop_token_ids,
            keep=share if groups else None,
        )

    def _open(self, prompts: Sequence[Prompt]) -> list[PartialGroup]:
        """What was left of these prompts' groups, or new ones.  A prompt may come twice, as its groups then do."""

        def groups() -> Iterator[PartialGroup]:
            for prompt in prompts:
                found = next((group for group in self.left if group.prompt is prompt), None)
                if found is not None:
                    self.left.remove(found)
                yield found or PartialGroup(prompt, self.cfg.run.group_size)

        return list(groups())

    def _sampled(self, now: PendingStep, filled: Sequence[PartialGroup]) -> Sampled:
        prompts = now.prompts
        if now.share * self.parallel.dp_size < len(prompts):
            prompts, others = kept_prompts(
                prompts,
                [group.prompt for group in filled] if self.inference.client is not None else None,
                share=now.share,
                dp_rank=self.parallel.dp_rank,
                dp_size=self.parallel.dp_size,
                device=self.parallel.device,
            )
            if self.cfg.rollout.partial == "resume":
                self.prompts.put_back(others)
                self.left = [group for group in now.groups if group not in filled] + self.left
        client = self.inference.client
        groups = [group.closed() for group in filled]
        if client is None:
            return Sampled(prompts, groups, filled)
        dropped = client.counters.dropped[ROUTES_MISSING_ROWS] - now.missing_before
        gaps = count_missing_routes(groups, dropped=dropped)
        return Sampled(prompts, groups, filled, gaps, client.take_stats(), client.counters.totals())


def num_prompts(cfg: Config, dp_size: int) -> int:
    """Prompts to sample in a step, over all replicas: run.prompts_per_step, and more under rollout.over_sample."""
    return math.ceil(cfg.run.prompts_per_step // dp_size * (1 + cfg.rollout.over_sample)) * dp_size
