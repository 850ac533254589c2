"""The turns that an episode had when it was cut short, for the run of its function that continues
it.

The function runs again from its start.  Where it asks for a turn with exactly the tokens that a
recorded turn was sampled for, it gets that turn, without a request; one that was cut in its middle
is continued by a request.  Where it asks for another one, because an environment answered
otherwise, the model is asked, and what follows in the record is not used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.records import EpisodeRecord, FinishReason, Rollout
from megatron_rl.rollout.client.response import join_parts


@dataclass(frozen=True)
class RecordedTurn:
    """A turn in the sequence that has it."""

    sequence: Rollout
    start: int
    """Number of tokens of its input."""
    end: int
    """Index after its last token."""
    taken: int
    """Number of sampled tokens before it."""
    finish_reason: FinishReason
    seconds: tuple[tuple[float, float], ...]
    """Entry of EpisodeRecord.turn_seconds, () where it is not known."""

    @property
    def tokens(self) -> np.ndarray:
        return self.sequence.tokens[self.start : self.end]

    @property
    def oldest_version(self) -> int:
        versions = self.sequence.policy_versions
        return int(versions[self.taken : self.taken + self.end - self.start].min())

    def rollout(self, first: int = 0) -> Rollout:
        """Return the record that a request returned, without its first `first` tokens."""
        reason = self.finish_reason
        turn = part(self.sequence, self.start, self.end, self.taken, reason, first)
        return replace(turn, episode=EpisodeRecord(turn_seconds=self.seconds))


class RecordedTurns:
    """The turns of an unfinished episode; the run that continues it takes each at most once."""

    def __init__(self, rollout: Rollout | None) -> None:
        """rollout: the unfinished episode (finish_reason abort), None for a new one."""
        sequences = () if rollout is None else rollout.sequences
        # a turn that two sequences begin with, after an interruption at which they went apart, was
        # sampled once
        turns = {key: turn for sequence in sequences for key, turn in identified(sequence)}
        self.left = list(turns.values())
        """Turns that were not taken."""

    def take(
        self,
        tokens: Sequence[int],
        limit: int,
        stops: Collection[int] = (),
        after: Rollout | None = None,
        first: int = 0,
    ) -> Rollout | None:
        """Take the recorded turn that follows `tokens`: complete, or the beginning of one (abort);
        None where there is none.

        It has at most `limit` tokens, and none of `stops` before its end.  after: the turn
        before in the sequence.  Two sequences may have equal tokens, sampled
        with other weights: a turn of older weights does not continue one of newer weights.  first:
        the first token of the record that is returned.
        """
        newest = 0 if after is None else int(after.policy_versions[-1])
        for place, turn in enumerate(self.left):
            if turn.start != len(tokens) or turn.oldest_version < newest:
                continue
            if not np.array_equal(turn.sequence.tokens[: turn.start], tokens):
                continue
            # a turn that was cut at its limit is complete
            length = turn.end - turn.start
            if turn.finish_reason == "abort" and length == limit:
                turn = replace(turn, finish_reason="length")
            # a turn that reached its limit would be longer or shorter with another limit
            over = limit - length
            is_of_other_length = over < 0 or (over and turn.finish_reason == "length")
            # the last token of a complete turn may be the stop token that ended it
            early = turn.tokens[: None if turn.finish_reason == "abort" else -1]
            if is_of_other_length or not set(stops).isdisjoint(early.tolist()):
                continue  # another turn that was sampled for the same input may fit
            del self.left[place]
            return turn.rollout(first)
        return None

    @property
    def tokens_left(self) -> int:
        """Number of sampled tokens of the turns that were not taken."""
        return sum(turn.end - turn.start for turn in self.left)

    def with_left(self, sequences: Sequence[Rollout]) -> list[Rollout]:
        """Return the sequences of the record with turns that were not taken yet, and `sequences`,
        those of the episode now, that none of them begins with.

        They are in the order of `sequences`, in which turns are asked for: equal inputs get
        recorded turns in this order.
        """
        waiting = [turn.sequence for turn in self.left]
        ordered: list[Rollout] = []
        for sequence in sequences:
            ordered += [whole for whole in waiting if begins(whole, sequence)] or [sequence]
        # by identity: records with arrays have no hash.  Those that were not asked for yet are last
        return list({id(sequence): sequence for sequence in [*ordered, *waiting]}.values())


def identified(sequence: Rollout) -> Iterator[tuple[tuple[int, bytes, bytes], RecordedTurn]]:
    """Yield the turns, with what is equal for equal ones: length of the input, tokens (a digest)
    and log-probs.
    """
    digest, known = hashlib.blake2b(), 0
    for turn in places_of(sequence):
        digest.update(np.ascontiguousarray(sequence.tokens[known : turn.end]).data)
        known = turn.end
        logprobs = sequence.rollout_logprobs[turn.taken : turn.taken + turn.end - turn.start]
        yield (turn.start, digest.digest(), logprobs.tobytes()), turn


def begins(sequence: Rollout, other: Rollout) -> bool:
    """Return True where `sequence` begins with all of `other`."""
    return np.array_equal(sequence.tokens[: len(other.tokens)], other.tokens)


def turns_of(rollout: Rollout) -> Iterator[Rollout]:
    """Yield the turns as their requests returned them: each with all tokens before it as its
    prompt.
    """
    return (turn.rollout() for turn in places_of(rollout))


def places_of(rollout: Rollout) -> Iterator[RecordedTurn]:
    """Yield the turns of a sequence; the last one may be cut short (abort)."""
    answered = dict(rollout.environment)
    start, taken = rollout.prompt_length, 0
    ends: list[tuple[int, FinishReason]] = [*rollout.episode.turns]
    if not ends or ends[-1][0] < len(rollout.tokens):
        ends.append((len(rollout.tokens), "abort"))
    seconds = rollout.episode.turn_seconds
    for number, (end, reason) in enumerate(ends):
        yield RecordedTurn(rollout, start, end, taken, reason, seconds[number : number + 1])
        taken += end - start
        start = answered.get(end, end)  # an environment may have answered nothing


def part(
    rollout: Rollout,
    start: int,
    end: int,
    taken: int,
    finish_reason: FinishReason,
    first: int = 0,
) -> Rollout:
    """Return tokens start..end of `rollout` as one request returned them, with those from `first`
    on as their prompt.

    taken: number of sampled tokens before them.
    """
    sampled = slice(taken, taken + end - start)
    routes, missing, mask = rollout.routed_experts, rollout.missing_routes, rollout.sampling_mask
    return Rollout(
        id=rollout.id,
        tokens=rollout.tokens[first:end],
        prompt_length=start - first,
        rollout_logprobs=rollout.rollout_logprobs[sampled],
        routed_experts=None if routes is None else routes[first : end - 1],
        finish_reason=finish_reason,
        policy_versions=rollout.policy_versions[sampled],
        missing_routes=None if missing is None else missing[first : end - 1],
        sampling_mask=None if mask is None else mask.part(taken, taken + end - start),
    )


def with_rewards(
    parts: Sequence[Rollout], rewards: tuple[float, ...], messages: tuple[Mapping[str, object], ...]
) -> Rollout:
    """Return the sequence of these turns; the last ones may have got no reward."""
    rollout = join_parts(*parts)
    if rewards:  # every span has one in the record
        rewards += (0.0,) * (rollout.num_spans - len(rewards))
    return rollout.with_episode(turn_rewards=rewards, messages=messages)
