"""The turns that an episode had when it was cut short, for the run of its function that continues
it.

The function runs again from its start.  Where it asks for a turn with exactly the tokens that a
recorded turn was sampled for, it gets that turn, without a request; one that was cut in its middle
is continued by a request.  Where it asks for another one, because an environment answered
otherwise, the model is asked, and what follows in the record is not used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.records import EpisodeRecord, FinishReason, Rollout


class RecordedTurns:
    """The turns of an unfinished episode; the run that continues it takes each at most once."""

    def __init__(self, rollout: Rollout | None) -> None:
        """rollout: the unfinished episode (finish_reason abort), None for a new one."""
        sequences = () if rollout is None else rollout.sequences
        # a turn that two sequences begin with, after an interruption at which they went apart, was
        # sampled once
        turns = {
            identity(turn): (turn, sequence)
            for sequence in sequences
            for turn in turns_of(sequence)
        }
        self.left = list(turns.values())
        """(turn, its sequence) of turns that were not taken."""

    def take(
        self,
        tokens: Sequence[int],
        limit: int,
        stops: Collection[int] = (),
        after: Rollout | None = None,
    ) -> Rollout | None:
        """Take the recorded turn that follows `tokens`: complete, or the beginning of one (abort);
        None where there is none.

        It has at most `limit` tokens, and none of `stops` before its end.  after: the sequence that
        it continues.  Two sequences may have equal tokens, sampled with other weights: a turn of
        older weights does not continue one of newer weights.
        """
        newest = 0 if after is None else int(after.policy_versions[-1])
        for place, (turn, _) in enumerate(self.left):
            if turn.oldest_version < newest:
                continue
            if turn.prompt_length == len(tokens) and np.array_equal(
                turn.tokens[: len(tokens)], tokens
            ):
                # a turn that was cut at its limit is complete
                if turn.finish_reason == "abort" and turn.response_length == limit:
                    turn = replace(turn, finish_reason="length")
                # a turn that reached its limit would be longer or shorter with another limit
                over = limit - turn.response_length
                is_of_other_length = over < 0 or (over and turn.finish_reason == "length")
                # the last token of a complete turn may be the stop token that ended it
                end = None if turn.finish_reason == "abort" else -1
                early = turn.tokens[turn.prompt_length :][:end]
                if is_of_other_length or not set(stops).isdisjoint(early.tolist()):
                    continue  # another turn that was sampled for the same input may fit
                del self.left[place]
                return turn
        return None

    @property
    def tokens_left(self) -> int:
        """Number of sampled tokens of the turns that were not taken."""
        return sum(turn.response_length for turn, _ in self.left)

    def with_left(self, sequences: Sequence[Rollout]) -> list[Rollout]:
        """Return the sequences of the record with turns that were not taken yet, and `sequences`,
        those of the episode now, that none of them begins with.
        """
        # by identity: records with arrays have no hash
        waiting = list({id(sequence): sequence for _, sequence in self.left}.values())
        other = [
            sequence
            for sequence in sequences
            if not any(begins(whole, sequence) for whole in waiting)
        ]
        return [*waiting, *other]


def identity(turn: Rollout) -> tuple[int, bytes, bytes]:
    """Return what is equal for equal turns: length of the input, tokens and log-probs."""
    return turn.prompt_length, turn.tokens.tobytes(), turn.rollout_logprobs.tobytes()


def begins(sequence: Rollout, other: Rollout) -> bool:
    """Return True where `sequence` begins with all of `other`."""
    return np.array_equal(sequence.tokens[: len(other.tokens)], other.tokens)


def turns_of(rollout: Rollout) -> Iterator[Rollout]:
    """Yield the turns as their requests returned them: each with all tokens before it as its
    prompt.
    """
    answered = dict(rollout.environment)
    start, taken = rollout.prompt_length, 0
    ends: list[tuple[int, FinishReason]] = [*rollout.episode.turns]
    if not ends or ends[-1][0] < len(rollout.tokens):
        ends.append((len(rollout.tokens), "abort"))
    seconds = rollout.episode.turn_seconds
    for number, (end, finish_reason) in enumerate(ends):
        turn = part(rollout, start, end, taken, finish_reason)
        yield replace(turn, episode=EpisodeRecord(turn_seconds=seconds[number : number + 1]))
        taken += end - start
        start = answered.get(end, end)  # an environment may have answered nothing


def part(
    rollout: Rollout, start: int, end: int, taken: int, finish_reason: FinishReason
) -> Rollout:
    """Return tokens start..end of `rollout` as one request returned them.

    taken: number of sampled tokens before them.
    """
    sampled = slice(taken, taken + end - start)
    routes, missing, mask = rollout.routed_experts, rollout.missing_routes, rollout.sampling_mask
    return Rollout(
        id=rollout.id,
        tokens=rollout.tokens[:end],
        prompt_length=start,
        rollout_logprobs=rollout.rollout_logprobs[sampled],
        routed_experts=None if routes is None else routes[: end - 1],
        finish_reason=finish_reason,
        policy_versions=rollout.policy_versions[sampled],
        missing_routes=None if missing is None else missing[: end - 1],
        sampling_mask=None if mask is None else mask.part(taken, taken + end - start),
    )
