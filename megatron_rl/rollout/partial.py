"""A group while it is sampled: complete responses, and beginnings of responses that a later request continues."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.records import Prompt, Rollout, RolloutGroup


@dataclass(eq=False)  # compared by identity: a prompt may be drawn twice
class PartialGroup:
    """One prompt's group while it is sampled, perhaps over several steps.

    rollouts: complete responses by index; prefixes: those cut short (finish_reason abort).  must: a response was dropped for
    its age, so that the group has to be among the next ones that are trained on.
    troubles: (URL of a server, what failed there) of the call that fills the group now.
    max_tokens: of a response; None: as many as the call allows.  stop_token_ids: at which it ends, beside the call's.
    server: URL of the one that was asked last.
    known: the sequence that the prompt begins with, up to its last turn: routes that need not be sent again.
    """

    prompt: Prompt
    size: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    prefixes: dict[int, Rollout] = field(default_factory=dict)
    must: bool = False
    troubles: list[tuple[str, str]] = field(default_factory=list)
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    server: str = ""
    known: Rollout | None = None

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.size) if index not in self.rollouts]

    @property
    def is_complete(self) -> bool:
        return len(self.rollouts) == self.size

    def prefix_tokens(self, index: int) -> list[int]:
        """The response tokens that exist of an unfinished response."""
        prefix = self.prefixes.get(index)
        return [] if prefix is None else prefix.tokens[prefix.prompt_length :].tolist()

    def known_of(self, index: int) -> Rollout | None:
        """What was sampled of the input of the next request for response `index`."""
        return self.prefixes.get(index, self.known)

    @property
    def first_row(self) -> int:
        """From which row on the next request needs routes, the same for all its samples.

        Before it are tokens whose rows are known; the last of a sampled sequence was never an input, and has none.
        """
        known = [self.known_of(index) for index in self.missing]
        return min((0 if k is None or not k.has_routes else len(k.tokens) - 1 for k in known), default=0)

    def put(self, index: int, rollout: Rollout) -> None:
        """Set response `index`: complete, or a longer prefix than before."""
        if rollout.finish_reason == "abort":
            self.prefixes[index] = rollout
        else:
            self.rollouts[index] = rollout
            self.prefixes.pop(index, None)

    def drop_older(self, version: int) -> list[Rollout]:
        """Remove and return the responses with a token of weights older than `version`: they start again."""
        old = []
        for found in (self.rollouts, self.prefixes):
            for index in [index for index, rollout in found.items() if rollout.oldest_version < version]:
                old.append(found.pop(index))
        self.must = self.must or bool(old)  # else a slow prompt could be dropped for its age forever
        return old

    def closed(self) -> RolloutGroup:
        """The complete group."""
        return RolloutGroup(self.prompt, tuple(self.rollouts[index] for index in range(self.size)))


async def first_to_finish(
    groups: Sequence[PartialGroup], tasks: Mapping[asyncio.Task[None], PartialGroup], keep: int
) -> list[PartialGroup]:
    """Wait for `keep` complete groups and for all with `must`; return `keep`, those with `must` first, in the order of `groups`.

    tasks: what completes the groups.  Raises what a task raised.
    """
    complete = [group for group in groups if group.is_complete]
    waiting = set(tasks)
    while len(complete) < keep or not all(group.is_complete for group in groups if group.must):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in tasks if task in done]:  # a set has no order: `tasks` makes ties repeatable
            task.result()
            complete.append(tasks[task])
    complete = sorted(complete, key=lambda group: not group.must)[:keep]
    return [group for group in groups if group in complete]
