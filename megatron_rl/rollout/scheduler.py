"""The scheduler: it decides what is sampled, when, and which groups a step trains on.

The rules are in docs/design/architecture.md#scheduler, the states of a group in group.py.

Weights `v` are those after v steps.  Step v starts from weights v; its tokens were sampled by
weights v - k .. v, where k is rollout.max_staleness.  A queue holds the prompts that are sampled,
oldest first, each with its group:

    source --_open--> queue --_take--> removed --step_done--> forgotten

The queue holds the groups of this step, with over_sample some more, and those of `steps_ahead`
further steps.  If it were longer, groups would be too old when a step takes them.  Synchronous
steps (max_staleness = 0), over-sampling (over_sample), partial rollouts (partial = resume) and
sampling ahead (steps_ahead > 0) differ in these numbers, and in how sampling ends when weights
change (rollout.weight_update).

Every rank has a Scheduler, and every method is collective.  The leader of a data-parallel replica
is the rank that has its client, which samples.  All ranks know the prompts; only leaders have the
groups.  Each replica has equally many prompts in the queue, so every rank knows how many to add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.batch.transfer import in_node_memory
from megatron_rl.config import Config
from megatron_rl.config.exact import as_written
from megatron_rl.data.prompt_stream import PromptStream
from megatron_rl.distributed import Parallel
from megatron_rl.metrics.console import ShowProgress
from megatron_rl.records import Files, Prompt, RolloutGroup, without_routes
from megatron_rl.rollout.client.counters import CallStats, drop_older
from megatron_rl.rollout.garbage_collection import return_free_memory
from megatron_rl.rollout.group import Group, GroupState
from megatron_rl.rollout.group_files import (
    copied,
    file_name,
    find_groups,
    read_groups,
    write_groups,
)
from megatron_rl.rollout.inference import Inference, SamplingStopped
from megatron_rl.rollout.missing_routes import MissingRouteCounts, count_missing_routes
from megatron_rl.rollout.selection import divide_prompts, interleave, replica_of


@dataclass(frozen=True)
class Sampled:
    """Groups that a step trains on, not all scored yet."""

    prompts: list[Prompt]
    """Prompts of all replicas, the same on every rank."""
    groups: list[RolloutGroup]
    """This leader's groups, in the order of its prompts; [] on other ranks."""
    missing_routes: MissingRouteCounts
    """Missing routes that the leader counted in `groups`, and the samples dropped for them."""
    stats: CallStats | None
    """Work of the client since the groups before these; None on ranks without a client."""


@dataclass
class Scheduler:
    """The queue of one rank, and the rules by which it is filled, sampled and taken from."""

    cfg: Config
    parallel: Parallel
    inference: Inference
    prompts: PromptStream
    stop_token_ids: Sequence[int]
    progress: ShowProgress
    score: Callable[[Sequence[Group]], None] = lambda groups: None
    """Called with complete groups of a leader while it waits for others; may set their `scored`."""
    queue: list[Prompt] = field(default_factory=list)
    """Prompts of all replicas, oldest first; prompt i belongs to replica i % dp."""
    groups: list[Group] = field(default_factory=list)
    """This leader's groups of the queue, in the order of its prompts."""
    removed: list[Group] = field(default_factory=list)
    """This leader's groups that left the queue in the step in progress, TAKEN or DROPPED."""
    restored: list[Group] = field(default_factory=list)
    """Groups of a checkpoint, whose prompts are not in the queue yet."""
    steps_ahead: int = 0
    """Number of steps after this one that are sampled while it trains."""
    stats: CallStats = field(default_factory=CallStats)
    """Work of the client since the last groups were taken."""

    @property
    def share(self) -> int:
        """Number of groups of a step on each replica."""
        return self.cfg.run.prompts_per_step // self.parallel.dp_size

    def take(self, step: int, version: int) -> Sampled:
        """Return the groups of `step`, which starts from the servers' weights `version`."""
        # the last steps of a run have fewer steps after them
        self.steps_ahead = min(self.cfg.rollout.steps_ahead, self.cfg.run.num_steps - 1 - step)
        over = num_prompts(self.cfg, self.parallel.dp_size) // self.parallel.dp_size - self.share
        return self._take(f"step {step + 1}", self.share, over, version)

    def can_take(self, count: int) -> bool:
        """Return True if there are prompts for `count` groups over all replicas."""
        waiting = len(self.queue)
        return waiting + self.prompts.num_available(max(0, count - waiting)) >= count

    def take_more(self, count: int, version: int) -> Sampled:
        """Return further groups for the same step, `count` over all replicas."""
        return self._take("more", count // self.parallel.dp_size, 0, version)

    def end_sampling(self) -> None:
        """End sampling, before the servers' weights change or an evaluation uses them.  No group is
        in flight afterwards.
        """
        if self.inference.pending is not None:
            self.inference.end("drain" if self.cfg.rollout.weight_update == "drain" else "abort")
            self._take_stats()

    def prepare_sync(self) -> None:
        """End sampling before the servers' weights change, unless rollout.weight_update = in_place
        lets the servers keep the requests of later steps.
        """
        if not (self.cfg.rollout.weight_update == "in_place" and self.steps_ahead):
            self.end_sampling()

    def step_done(self) -> None:
        """Forget the groups that the step has trained on."""
        self.removed = []

    def prompts_state(self) -> dict[str, object]:
        """Return plain values for a checkpoint: PromptStream.load_state_dict(values) first returns
        the prompts of the queue.
        """
        return self.prompts.state_dict(first=self.queue)

    def files(self, *, is_step_done: bool) -> Files:
        """Return a leader's file in a checkpoint: its groups as they are now, which a resumed run
        need not sample again.

        is_step_done: True: a resumed run begins with the next step.  False: the step is abandoned
        and a resumed run repeats it, so the groups in `taken` are saved, too.  Both end sampling.
        """
        if is_step_done:
            with suppress(SamplingStopped):  # the signal is the reason for this checkpoint
                self.end_sampling()
        else:
            self.inference.stop(keep_parts=True)
        groups = copied([*(() if is_step_done else self.removed), *self.groups, *self.restored])
        if self.inference.client is None or not groups:
            return {}
        numbers = self.prompts.numbers([group.prompt for group in groups])
        return {file_name(self.parallel.dp_rank): lambda path: write_groups(path, groups, numbers)}

    def restore(self, checkpoint: Path, accepted: Sequence[str]) -> str | None:
        """Continue the groups of a checkpoint, whose prompts come first (prompts_state); return a
        line for the console.

        accepted: changed settings that matter for training and that checkpoint.allow_changes names.
        If there are any, all groups are sampled again.  So are groups of another size, or without
        the routes or kept sets that are needed now.
        """
        if self.inference.client is None and self.parallel.rank != 0:
            return None  # this rank neither samples nor logs
        waiting = find_groups(checkpoint)
        headers = [header for places in waiting.values() for _, _, header in places]
        if not headers:
            return None
        num_responses = sum(len(header["responses"]) for header in headers)
        text = f"  {num_responses} responses of {len(headers)} groups in flight"
        if accepted:
            return f"{text}: sampled again, as {', '.join(accepted)} changed"
        if self.inference.client is not None:
            # the number of replicas may have changed: groups follow their prompts
            most = len(self.prompts.returned) + len(headers)
            # data that is not repeated may end before
            order = self.prompts.peek(self.prompts.num_available(most))
            part = slice(self.parallel.dp_rank, None, self.parallel.dp_size)
            groups = read_groups(waiting, self.prompts.prompts, order, part)
            self.restored = [group for group in groups if self._fits(group)]
            if misfits := len(groups) - len(self.restored):
                text += (
                    f"; {misfits} of this replica's {len(groups)} do not fit the settings: sampled"
                    " again"
                )
        return text

    def _fits(self, group: Group) -> bool:
        """Return True if the group has the size, routes and kept sets that this run needs."""
        rollouts = [*group.rollouts.values(), *group.prefixes.values()]
        needs_mask = self.cfg.rollout.truncation is not None
        return group.size == self.cfg.run.group_size and all(
            r.has_routes == self.cfg.needs_routes and (r.sampling_mask is not None) == needs_mask
            for r in rollouts
        )

    def _take(self, text: str, share: int, over: int, version: int) -> Sampled:
        """Wait until each replica has `share` complete groups, and every group that is due is
        complete.  Take the groups that are due first, then the complete ones of the oldest prompts.

        over: number of further groups that are sampled for the same step.
        """
        oldest = version - self.cfg.rollout.max_staleness
        # A task in progress (in_place) drops what is too old on its own thread.  Without a task, or
        # for groups of a checkpoint that the task does not have yet, drop_older does it.
        self.inference.renew(self.groups, oldest)
        added = self._open(share + over + self.steps_ahead * self.share)
        is_new = self.inference.pending is None
        if self.inference.client is not None:
            drop_older(self.groups if is_new else added, oldest, self.inference.client.counters)
        self._mark_due(share, version)
        if is_new:
            # only leaders have groups
            self._start(self.groups, share if self.groups else None, is_open=self.steps_ahead > 0)
        else:
            self.inference.add(added)
        with self.progress(f"{text}: sampling", share) as advance:
            shown = 0

            def show() -> None:
                nonlocal shown
                ready = self._complete()[:share]
                advance(len(ready) - shown)
                shown = len(ready)
                if shown < share and self.cfg.rollout.trains_on_all:
                    self.score([group for group in ready if group.scored is None])

            self.inference.wait(version, show, lambda: self._are_complete(share))
        prompts, groups = self._choose(share)
        self._take_stats()
        stats, self.stats = self.stats, CallStats()
        self.removed += groups
        if self.inference.time_shared_teachers is not None:
            with self.progress(f"{text}: teachers", len(groups)) as advance:
                self._teach_one_by_one(prompts, groups, version, lambda: advance(1))
        closed = [self.rollout_group(group) for group in groups]
        plain = without_routes(closed)
        missing = count_missing_routes(plain, dropped=stats.dropped_without_route)
        return Sampled(prompts, closed, missing, None if self.inference.client is None else stats)

    def rollout_group(self, group: Group) -> RolloutGroup:
        """Return the complete group, with its routes where the ranks of this node can map them."""
        if group.scored is None and not self.parallel.node.is_alone:
            for index, rollout in group.rollouts.items():
                group.rollouts[index] = in_node_memory(rollout, self.parallel.node)
            return_free_memory()  # group by group, so that few responses have two copies
        return group.rollout_group()

    def _open(self, size: int) -> list[Group]:
        """Fill the queue to `size` prompts of each replica, as far as there are prompts; return
        this leader's new groups.
        """
        dp = self.parallel
        missing = self.prompts.num_available(max(0, size * dp.dp_size - len(self.queue)))
        # every replica has equally many prompts in the queue
        prompts = self.prompts.take(missing - missing % dp.dp_size)
        self.queue += prompts
        if self.inference.client is None:
            return []
        added = [self._group(prompt) for prompt in prompts[dp.dp_rank :: dp.dp_size]]
        self.groups += added
        return added

    def _group(self, prompt: Prompt) -> Group:
        """Return the prompt's group from the checkpoint, or a new one.

        A prompt that comes twice has two groups.
        """
        teacher = self.cfg.teachers.name_for(prompt.source)
        if teacher in self.cfg.teachers.time_shared:
            teacher = ""  # it scores after sampling (_teach_one_by_one)
        restored = next((group for group in self.restored if group.prompt is prompt), None)
        if restored is None:
            return Group(prompt, self.cfg.run.group_size, teacher=teacher)
        self.restored.remove(restored)
        restored.teacher = teacher
        return restored

    def _start(
        self, groups: Sequence[Group], keep: int | None = None, *, is_open: bool = False
    ) -> None:
        """Start a task on these groups: until `keep` of them are complete, or all, or until
        `finish` if it is open.
        """
        rollout, client = self.cfg.rollout, self.inference.client
        if client is not None:
            client.take_stats()  # discard those of evaluation and parity check
        self.inference.start(
            groups,
            keep=keep,
            is_open=is_open,
            temperature=rollout.temperature,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=self.stop_token_ids,
            truncation=rollout.truncation,
        )

    def _teach_one_by_one(
        self,
        prompts: Sequence[Prompt],
        groups: Sequence[Group],
        version: int,
        advance: Callable[[], None],
    ) -> None:
        """Let the teachers that have GPU memory only while they score do so, one after the other.

        prompts: those of all replicas.  groups: this leader's, which are sampled: a task on them
        asks their teacher alone.
        """
        teachers, name_for = self.inference.time_shared_teachers, self.cfg.teachers.name_for
        assert teachers is not None and self.inference.pending is None, "sampling has not ended"
        wanted = {name_for(prompt.source) for prompt in prompts}
        with teachers.timed("teacher/turn_seconds"):
            self.inference.release_servers()
            for name in (name for name in teachers.names if name in wanted):
                teachers.wake(name)
                taught = [group for group in groups if name_for(group.prompt.source) == name]
                for group in taught:
                    group.wait_for(name)
                self._start(taught)
                self.inference.wait(version, advance)
                for group in taught:
                    group.was_taught()

    def _mark_due(self, share: int, version: int) -> None:
        """Mark the groups that would be too old for the next step, at most as many as this step
        takes.
        """
        # with k = 0 no group stays in the queue for the next step
        k = self.cfg.rollout.max_staleness
        # the next step starts from version + 1, and refuses tokens older than version + 1 - k
        due = [group for group in self.groups if k and group.has_oldest_version(version - k)][
            :share
        ]
        for group in self.groups:
            group.is_due = group in due

    def _complete(self) -> list[Group]:
        return [group for group in self.groups if group.state is GroupState.COMPLETE]

    def _are_complete(self, share: int) -> bool:
        due = (group for group in self.groups if group.is_due)
        return len(self._complete()) >= share and all(group.is_complete for group in due)

    def _choose(self, share: int) -> tuple[list[Prompt], list[Group]]:
        """Remove from the queue what the step trains on: return the prompts of all replicas and
        this leader's groups.
        """
        # those that are due come first, then the others in the order of their prompts
        first = sorted(self._complete(), key=lambda group: not group.is_due)[:share]
        groups = [group for group in self.groups if group in first]
        for group in groups:
            group.leave(GroupState.TAKEN)
        # every prompt is taken: no rank needs to ask the others which
        if share * self.parallel.dp_size == len(self.queue):
            prompts, self.queue, self.groups = self.queue, [], []
            return prompts, groups
        is_leader = self.inference.client is not None
        kept, others = divide_prompts(
            self.queue,
            [group in groups for group in self.groups] if is_leader else None,
            replica_of(self.parallel),
        )
        assert all(len(prompts) == share for prompts in kept), (
            "a replica kept another number of groups than its share"
        )
        self.queue = interleave(others)
        self.groups = [group for group in self.groups if group not in groups]
        # over_sample: the task has ended, and its other requests were aborted
        if self.inference.pending is None and self.cfg.rollout.partial == "drop":
            for group in self.groups:
                group.leave(GroupState.DROPPED)
            # until the step is done: a checkpoint from before the step has them
            self.removed += self.groups
            self.queue, self.groups = [], []
        return interleave(kept), groups

    def _take_stats(self) -> None:
        if self.inference.client is not None:
            self.stats += self.inference.client.take_stats()


def num_prompts(cfg: Config, dp_size: int) -> int:
    """Return the number of prompts that are sampled for a step, over all replicas:
    run.prompts_per_step, and more with rollout.over_sample.
    """
    share = cfg.run.prompts_per_step // dp_size
    return math.ceil(share * (1 + as_written(cfg.rollout.over_sample))) * dp_size
