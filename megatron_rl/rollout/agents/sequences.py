"""The sequences of an episode that requests begin and continue, in every protocol.

The input of a request continues a sequence after a turn that was sampled in it, or begins another
one.  Conversations (messages in a chat format) and RawPrompts (text and token ids) decide which; a
sequence that one of them began may be continued by either.  The answer of a request is part of the
episode when it was written to its client.
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.rollout.agents.branch import Branch, EpisodeOfBranch
from megatron_rl.rollout.agents.episode import Turn

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Place:
    """The end of a sampled turn, from which a request may continue its sequence."""

    branch: Branch
    end: int
    """Number of tokens of the sequence up to here."""
    is_open: bool = True
    """Nothing follows in the sequence yet."""

    @property
    def tokens(self) -> Sequence[int]:
        return self.branch.span(0, self.end)


@dataclass(eq=False)
class Answer:
    """A turn that is not part of the episode yet."""

    branch: Branch
    accepted: Callable[[Place, Turn], None]
    """Called with the turn, and the place where it ends, when it is part of the episode."""
    turn: Turn | None = None
    """None while it is sampled."""


class EpisodeOfSequences(EpisodeOfBranch, Protocol):
    """The part of a Session that its sequences need."""

    @property
    def is_stopped(self) -> bool: ...
    def branch(self, token_ids: Sequence[int]) -> Branch: ...


class Sequences:
    """The sequences of one episode.  Requests may come in parallel, also with the same input."""

    def __init__(self, session: EpisodeOfSequences) -> None:
        self._session = session
        self._places: list[Place] = []

    @contextlib.contextmanager
    def reading(self) -> Iterator[list[Answer]]:
        """Accept the answers that are sampled inside as part of the episode when the block ends.

        Where the block raises, they are dropped and counted.  Where it raises because sampling has
        ended, they are kept: the same request of the run that continues this episode gets them.
        """
        answers: list[Answer] = []
        try:
            yield answers
        except BaseException:
            if not self._session.is_stopped:
                self._drop(answers)
            raise
        for answer in answers:
            self._accept(answer)

    def _accept(self, answer: Answer) -> None:
        branch, turn = answer.branch, answer.turn
        assert turn is not None
        branch.accept(turn)
        self._places.append(place := Place(branch, turn.num_prompt_tokens + len(turn.token_ids)))
        answer.accepted(place, turn)

    def _drop(self, answers: Sequence[Answer]) -> None:
        counters = self._session.counters
        tokens = [tokens for answer in answers if (tokens := answer.branch.drop())]
        counters.unread_turns += len(tokens)
        counters.unread_tokens += sum(tokens)
        if tokens:
            logger.warning(
                "rollout %s: a request failed, or its client hung up before the answer: %d turns of"
                " %d tokens are not learned from",
                self._session.name,
                len(tokens),
                sum(tokens),
            )

    def place_in(self, token_ids: Sequence[int]) -> Place | None:
        """Return the last place up to which `token_ids` are the tokens of a sequence, None where
        there is none.  Of equal ones, a place that nothing follows yet is preferred.
        """
        tokens = array("q", token_ids)
        # the longest first, as comparing it with all others would take long
        places = sorted(self._places, key=lambda place: (place.end, place.is_open), reverse=True)
        return next((p for p in places if p.branch.starts(tokens, p.end)), None)

    def extend(self, place: Place, token_ids: Sequence[int]) -> Branch:
        """Return the sequence of `place` with `token_ids` after it, which are not learned from.

        Where another request has continued it, this is a new sequence with equal tokens.  Raises
        ContextFull where they leave no room for a turn: the sequence stays as it was, and another
        request may continue it.
        """
        if not place.is_open:
            return self.begin([*place.tokens, *token_ids])
        place.branch.check_room(len(token_ids))
        place.is_open = False
        place.branch.observe(token_ids)
        return place.branch

    def begin(self, token_ids: Sequence[int]) -> Branch:
        """Return a new sequence.  Raises ContextFull where no sequence can be that long: a client
        may shorten its input then.
        """
        self.check_length(len(token_ids))
        return self._session.branch(token_ids)

    def check_length(self, num_tokens: int) -> None:
        """Raise ContextFull for an input of more tokens than a sequence can have."""
        session = self._session
        most, setting = session.sequence_limit or (None, "")
        if most is not None and num_tokens >= most:
            raise session.full(f"{num_tokens} tokens of input are more than {setting} allows")
