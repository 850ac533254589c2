"""What is sampled, and when, and which groups a step trains on.  States and rules:
docs/design/architecture.md#scheduler.

Weights `v` are those after v steps.  Step v is trained on from weights v; its tokens are of weights
v - k .. v, where k is rollout.max_staleness.  A queue holds the prompts that are sampled, oldest
first, each with its group:

    source --_open--> queue: in progress <-> complete --_take--> trained on --step_done--> forgotten
                        ^-- too old: sampled again --'

The queue holds the groups of this step, with over_sample some more, and those of `steps_ahead`
further ones: longer, it would hold groups that are too old when they are trained on.  Synchronous
steps, over-sampling, partial rollouts, sampling ahead and continuous sampling differ in these
numbers, and in how sampling ends when weights change (rollout.weight_update).

Every rank has a Scheduler, and every method is collective.  Prompts are known to all ranks, groups
to leaders; each replica has equally many in the queue, so that every rank knows how many to add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.distributed import Parallel
from megatron_rl.metrics.console import ShowProgress
from megatron_rl.records import Files, Prompt, RolloutGroup
from megatron_rl.rollout.client.counters import CallStats, drop_older
from megatron_rl.rollout.inference import Inference, SamplingStopped
from megatron_rl.rollout.missing_routes import MissingRouteCounts, count_missing_routes
from megatron_rl.rollout.partial import (
    PartialGroup,
    copied,
    file_name,
    find_groups,
    read_groups,
    write_groups,
)
from megatron_rl.rollout.selection import divide_prompts, interleave


@dataclass(frozen=True)
class Sampled:
    """Groups that a step trains on, not scored.

    prompts  of all replicas, the same on every rank
    groups   this leader's, of its prompts in their order; [] on other ranks
    gaps, call  what the leader counted since the groups before these; call: None on other ranks
    """

    prompts: list[Prompt]
    groups: list[RolloutGroup]
    gaps: MissingRouteCounts
    call: CallStats | None


@dataclass
class Scheduler:
    """queue: prompts of all replicas, oldest first; prompt i belongs to replica i % dp.  groups:
    this leader's, of its prompts.

    taken: this leader's groups that the step in progress removed from the queue.  restored: groups
    of a checkpoint, whose prompts are not in the queue yet.
    steps_ahead: how many steps after this one are sampled while it trains.  call: what the client
    did since `_take`.
    score: called with complete groups of a leader while it waits for others; may set their
    `scored`.
    """

    cfg: Config
    parallel: Parallel
    inference: Inference
    prompts: PromptSource
    stop_token_ids: Sequence[int]
    progress: ShowProgress
    score: Callable[[Sequence[PartialGroup]], None] = lambda groups: None
    queue: list[Prompt] = field(default_factory=list)
    groups: list[PartialGroup] = field(default_factory=list)
    taken: list[PartialGroup] = field(default_factory=list)
    restored: list[PartialGroup] = field(default_factory=list)
    steps_ahead: int = 0
    call: CallStats = field(default_factory=CallStats)

    @property
    def share(self) -> int:
        """Groups of a step on each replica."""
        return self.cfg.run.prompts_per_step // self.parallel.dp_size

    @property
    def trains_on_all(self) -> bool:
        """Whether every group that is started is trained on: over_sample drops none."""
        return not self.cfg.rollout.over_sample or self.cfg.rollout.partial == "resume"

    def take(self, step: int, version: int) -> Sampled:
        """The groups of `step`, trained on next from weights `version`, which the servers have."""
        self.steps_ahead = min(self.cfg.rollout.steps_ahead, self.cfg.run.num_steps - 1 - step)
        over = num_prompts(self.cfg, self.parallel.dp_size) // self.parallel.dp_size - self.share
        return self._take(f"step {step + 1}", self.share, over, version)

    def take_more(self, num_prompts: int, version: int) -> Sampled:
        """So many further groups for the same step, over all replicas."""
        return self._take("more", num_prompts // self.parallel.dp_size, 0, version)

    def finish(self) -> None:
        """Before the servers' weights change, or they are used for other things: nothing is in
        flight afterwards.
        """
        if self.inference.pending is not None:
            self.inference.end("drain" if self.cfg.rollout.weight_update == "drain" else "abort")
            self._take_stats()

    def prepare_sync(self) -> None:
        """Before the servers' weights change: with rollout.weight_update = in_place they keep what
        is sampled for later steps.
        """
        if not (self.cfg.rollout.weight_update == "in_place" and self.steps_ahead):
            self.finish()

    def step_done(self) -> None:
        """The step was trained on."""
        self.taken = []

    def prompts_state(self) -> dict[str, object]:
        """Plain values for a checkpoint: with them PromptSource.load_state_dict first returns the
        prompts of the queue.
        """
        return self.prompts.state_dict(first=self.queue)

    def files(self, *, is_step_done: bool) -> Files:
        """What a leader adds to a checkpoint: its groups, as they are now, that a run resumed after
        the step (or before it) need not sample again.  A step that is abandoned ends sampling."""
        if is_step_done:
            with suppress(SamplingStopped):  # the step is saved for it
                self.finish()
        else:
            self.inference.stop(keep_parts=True)
        groups = copied([*(() if is_step_done else self.taken), *self.groups, *self.restored])
        if self.inference.client is None or not groups:
            return {}
        numbers = self.prompts.numbers([group.prompt for group in groups])
        return {file_name(self.parallel.dp_rank): lambda path: write_groups(path, groups, numbers)}

    def restore(self, checkpoint: Path, accepted: Sequence[str]) -> str | None:
        """Continue the groups of a checkpoint, whose prompts come first (prompts_state); returns a
        line for the console.

        accepted: settings that changed since.  Then all groups are sampled again, as are those of
        another size, or without the routes or kept sets that are needed now.
        """
        if self.inference.client is None and self.parallel.rank != 0:
            return None  # neither samples nor logs
        waiting = find_groups(checkpoint)
        every = [about for found in waiting.values() for _, _, about in found]
        if not every:
            return None
        text = (
            f"  {sum(len(about['responses']) for about in every)} responses of {len(every)} groups"
            " in flight"
        )
        if accepted:
            return f"{text}: sampled again, as {', '.join(accepted)} changed"
        if self.inference.client is not None:
            # replicas may be others than those that saved: groups follow their prompts
            order, dp = self.prompts.peek(len(self.prompts.returned) + len(every)), self.parallel
            found = read_groups(
                waiting, self.prompts.prompts, order, slice(dp.dp_rank, None, dp.dp_size)
            )
            self.restored = [group for group in found if self._fits(group)]
            if len(self.restored) < len(found):
                missing = len(found) - len(self.restored)
                text += (
                    f"; {missing} of this replica's {len(found)} do not fit the settings: sampled"
                    " again"
                )
        return text

    def _fits(self, group: PartialGroup) -> bool:
        rollouts = [*group.rollouts.values(), *group.prefixes.values()]
        needs_mask = self.cfg.rollout.truncation is not None
        return group.size == self.cfg.run.group_size and all(
            r.has_routes == self.cfg.needs_routes and (r.sampling_mask is not None) == needs_mask
            for r in rollouts
        )

    def _take(self, text: str, share: int, over: int, version: int) -> Sampled:
        """Sample the queue until `share` groups are complete on each replica, and all that are due;
        take those, then the complete ones of the oldest prompts.  over: further groups that are
        sampled for the same step."""
        oldest = version - self.cfg.rollout.max_staleness
        self.inference.renew(self.groups, oldest)
        added = self._open(share + over + self.steps_ahead * self.share)
        is_new = self.inference.pending is None
        if self.inference.client is not None:
            drop_older(self.groups if is_new else added, oldest, self.inference.client.counters)
        self._mark_due(share, version)
        if is_new:
            self._start(share)
        else:
            self.inference.add(added)
        with self.progress(f"{text}: sampling", share) as advance:
            shown = 0

            def show() -> None:
                nonlocal shown
                ready = [group for group in self.groups if group.is_complete][:share]
                advance(len(ready) - shown)
                shown = len(ready)
                if shown < share and self.trains_on_all:
                    self.score([group for group in ready if group.scored is None])

            self.inference.wait(version, show, lambda: self._are_complete(share))
        prompts, groups = self._choose(share)
        self._take_stats()
        call, self.call = self.call, CallStats()
        self.taken += groups
        closed = [group.closed() for group in groups]
        gaps = count_missing_routes(closed, dropped=call.dropped_without_route)
        return Sampled(prompts, closed, gaps, None if self.inference.client is None else call)

    def _open(self, size: int) -> list[PartialGroup]:
        """Fill the queue to `size` prompts of each replica; returns this leader's new groups."""
        dp = self.parallel
        prompts = self.prompts.take(max(0, size * dp.dp_size - len(self.queue)))
        self.queue += prompts
        if self.inference.client is None:
            return []
        added = [self._group(prompt) for prompt in prompts[dp.dp_rank :: dp.dp_size]]
        self.groups += added
        return added

    def _group(self, prompt: Prompt) -> PartialGroup:
        """What a checkpoint has of this prompt's group, or a new one.

        A prompt may come twice: then so do its groups.
        """
        found = next((group for group in self.restored if group.prompt is prompt), None)
        if found is None:
            return PartialGroup(prompt, self.cfg.run.group_size)
        self.restored.remove(found)
        return found

    def _start(self, share: int) -> None:
        """Sample the queue: until a step's share is complete, or until `finish` if sampling goes
        ahead.
        """
        rollout, client = self.cfg.rollout, self.inference.client
        if client is not None:
            client.take_stats()  # discards those of evaluation and parity check
        self.inference.start(
            self.groups,
            keep=share if self.groups else None,  # off leaders there is nothing to keep
            is_open=self.steps_ahead > 0,
            temperature=rollout.temperature,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=self.stop_token_ids,
            truncation=rollout.truncation,
        )

    def _mark_due(self, share: int, version: int) -> None:
        """Groups that would be too old for the next step, as far as this one has room."""
        k = self.cfg.rollout.max_staleness
        due = [group for group in self.groups if k and group.begins_at(version - k)][:share]
        for group in self.groups:
            group.is_due = group in due

    def _are_complete(self, share: int) -> bool:
        complete = sum(group.is_complete for group in self.groups)
        return complete >= share and all(group.is_complete for group in self.groups if group.is_due)

    def _choose(self, share: int) -> tuple[list[Prompt], list[PartialGroup]]:
        """Remove from the queue what the step trains on: (prompts of all replicas, this leader's
        groups).
        """
        complete = [group for group in self.groups if group.is_complete]
        # else in the order of their prompts
        first = sorted(complete, key=lambda group: not group.is_due)[:share]
        mine = [group for group in self.groups if group in first]
        if share * self.parallel.dp_size == len(self.queue):
            prompts, self.queue, self.groups = self.queue, [], []
            return prompts, mine
        kept, others = divide_prompts(
            self.queue,
            None if self.inference.client is None else [group in mine for group in self.groups],
            dp_rank=self.parallel.dp_rank,
            dp_size=self.parallel.dp_size,
            device=self.parallel.device,
        )
        assert all(len(prompts) == share for prompts in kept), (
            "a replica kept another number of groups than its share"
        )
        self.queue, self.groups = (
            interleave(others),
            [group for group in self.groups if group not in mine],
        )
        # their requests were aborted
        if self.inference.pending is None and self.cfg.rollout.partial == "drop":
            self.taken += self.groups
            self.queue, self.groups = [], []
        return interleave(kept), mine

    def _take_stats(self) -> None:
        if self.inference.client is not None:
            self.call += self.inference.client.take_stats()


def num_prompts(cfg: Config, dp_size: int) -> int:
    """Prompts to sample for a step, over all replicas: run.prompts_per_step, and more under
    rollout.over_sample.
    """
    return math.ceil(cfg.run.prompts_per_step // dp_size * (1 + cfg.rollout.over_sample)) * dp_size
