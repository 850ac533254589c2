"""One prompt's group, from the moment it is drawn until a step trains on it.

    WAITING --start, add--> IN_FLIGHT --last response--> COMPLETE --a step takes it--> TAKEN
       ^                     |     ^                        |
       |<------ cut short ---'     |                        |
       |                           '-- too old, in a task --|
       '---------- too old, no task in progress ------------'
    WAITING or COMPLETE --over_sample with partial = drop--> DROPPED

The scheduler makes groups, queues them, and takes them out of its queue.  A task (GenerationTask)
samples the missing responses, on a thread of its own, and `put`s them into the group; a teacher
scores them there as soon as all are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from megatron_rl.records import Prompt, Rollout, RolloutGroup


class GroupState(Enum):
    """Place of a group in the WAITING -> IN_FLIGHT -> COMPLETE -> TAKEN lifecycle."""

    WAITING = "waiting"
    """Responses are missing, and no task samples them."""
    IN_FLIGHT = "in flight"
    """Responses are missing, and a task in progress samples them."""
    COMPLETE = "complete"
    """All responses are there and scored by the group's teacher, for a step to take."""
    TAKEN = "taken"
    """A step has taken the group out of the queue and trains on it."""
    DROPPED = "dropped"
    """The group was taken out of the queue, and no step trains on it."""


@dataclass(eq=False)  # compared by identity: a prompt may be drawn twice
class Group:
    """The responses to one prompt while they are sampled, perhaps over several steps.

    For an agent's episode each turn is sampled as a group of its own, with one response: then the
    prompt is all tokens before the turn, and max_tokens and stop_token_ids are those of the turn.
    Its records are parts of the sequence (rollout/client/response.py), which begin at `start`.
    """

    prompt: Prompt
    size: int
    """Number of responses of a complete group."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """Complete responses, by their index in the group."""
    prefixes: dict[int, Rollout] = field(default_factory=dict)
    """Responses that were cut short (finish_reason abort), by index; a later request continues
    them."""
    is_due: bool = False
    """A token, perhaps of the request in progress, would be too old for the next step: this step
    waits for the group and takes it.  At most as many groups as a step takes are marked."""
    request_version: int | None = None
    """Version of the weights for which the request in progress was sent; None where no request is
    in progress."""
    troubles: list[tuple[str, str]] = field(default_factory=list)
    """(URL of a server, what failed there) of the task that samples the group now."""
    max_tokens: int | None = None
    """Longest response; None: as long as the task allows."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens at which a response ends, beside the task's."""
    server: str = ""
    """URL of the server that was asked last, whose cache may hold the prompt."""
    turn: int = 1
    """Number of the turn in its sequence."""
    start: int = 0
    """The last token of the turn before, the first one of the records of this turn: routes of
    earlier rows need not be sent again."""
    scored: RolloutGroup | None = None
    """The complete group with its rewards, where it was scored while others were sampled."""
    is_in_task: bool = False
    """A task in progress samples the missing responses (generation_task.GenerationTask)."""
    teacher: str = ""
    """Name of the teacher that scores the responses; "": none does."""
    outcome: GroupState | None = None
    """TAKEN or DROPPED once the group has left the queue (`leave`)."""

    @property
    def state(self) -> GroupState:
        """The state, derived from facts: responses arrive on the thread that samples, which could
        overwrite a state that the main thread stores.
        """
        if self.outcome is not None:
            return self.outcome
        if self.is_complete:
            return GroupState.COMPLETE
        return GroupState.IN_FLIGHT if self.is_in_task else GroupState.WAITING

    def leave(self, outcome: GroupState) -> None:
        """Take the group out of the queue, TAKEN or DROPPED."""
        assert outcome in (GroupState.TAKEN, GroupState.DROPPED) and self.outcome is None
        assert outcome is GroupState.DROPPED or self.is_complete
        self.outcome = outcome

    def wait_for(self, teacher: str) -> None:
        """Set the teacher of a sampled group, which is complete when it is scored."""
        self.teacher = teacher
        if self.scored is not None:  # these have texts and metrics of rewards
            self.rollouts = dict(enumerate(self.scored.rollouts))

    def was_taught(self) -> None:
        """Take the teacher's numbers over into `scored`, which was made before (`wait_for`)."""
        if self.scored is not None:
            rollouts = tuple(self.rollouts[index] for index in range(self.size))
            self.scored = replace(self.scored, rollouts=rollouts)

    @property
    def missing(self) -> list[int]:
        """Indices of the responses that are not complete."""
        return [index for index in range(self.size) if index not in self.rollouts]

    @property
    def is_sampled(self) -> bool:
        return len(self.rollouts) == self.size

    @property
    def is_complete(self) -> bool:
        """True if all responses are there, each scored by the group's teacher if it has one."""
        # a copy: the thread that samples may put a response
        rollouts = list(self.rollouts.values())
        is_taught = not self.teacher or all(rollout.is_taught for rollout in rollouts)
        return len(rollouts) == self.size and is_taught

    def prefix_tokens(self, index: int) -> list[int]:
        """Return the response tokens that exist of an unfinished response."""
        prefix = self.prefixes.get(index)
        return [] if prefix is None else prefix.tokens[prefix.prompt_length :].tolist()

    @property
    def first_row(self) -> int:
        """First row for which the next request needs routes, the same for all its samples.

        The rows before it are known.  The last token of a sampled sequence was never an input, and
        has no row.
        """
        prefixes = [self.prefixes.get(index) for index in self.missing]
        known = (0 if p is None or not p.has_routes else len(p.tokens) - 1 for p in prefixes)
        return self.start + min(known, default=0)

    def put(self, index: int, rollout: Rollout) -> None:
        """Set response `index`: complete, or a longer prefix than before."""
        if rollout.finish_reason == "abort":
            self.prefixes[index] = rollout
        else:
            self.rollouts[index] = rollout
            self.prefixes.pop(index, None)

    def has_oldest_version(self, version: int) -> bool:
        """Return True if `version` is the oldest version among the tokens of some response, or the
        version of the request in progress, whose tokens have not arrived.
        """
        # in this order: while the group is sampled, a response moves from the request to the
        # prefixes and then to the complete ones
        asked, responses = self.request_version, [*self.prefixes.values(), *self.rollouts.values()]
        return asked == version or any(rollout.oldest_version == version for rollout in responses)

    def drop_older(self, version: int, *, has_request: bool) -> list[Rollout]:
        """Remove and return the responses with a token of weights older than `version`: they start
        again.

        has_request: keep the prefixes, which a request may be continuing.
        """
        old = []
        for responses in (self.rollouts,) if has_request else (self.rollouts, self.prefixes):
            too_old = [i for i, rollout in responses.items() if rollout.oldest_version < version]
            old += [responses.pop(index) for index in too_old]
        if old:
            self.scored = None
        return old

    def rollout_group(self) -> RolloutGroup:
        """Return the complete group, with its rewards if it was scored."""
        return self.scored or RolloutGroup(
            self.prompt, tuple(self.rollouts[index] for index in range(self.size))
        )
