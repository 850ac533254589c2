"""Texts at which a turn ends.

Servers know tokens, not texts: they stop at a text of one token, and for all others a turn is cut
after it was sampled.  The token that completes the first match is the turn's last one, whatever
part of it follows the match.  It was sampled, so it is learned from, as the end of the turn; the
client gets the text before the match.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_rl.records import Rollout
from megatron_rl.rollout.agents.chat import Reply
from megatron_rl.rollout.agents.recorded import part


class Match(NamedTuple):
    """Where a turn ended at a stop text."""

    before: str
    """The turn's text before it."""
    stop: str


@dataclass(frozen=True)
class Stops:
    """The texts at which a turn ends, none of them empty."""

    texts: Sequence[str]
    tokenizer: PreTrainedTokenizerBase

    @property
    def by_token(self) -> dict[int, str]:
        """The texts of one token, at which servers stop, by this token."""
        encoded = {
            text: self.tokenizer.encode(text, add_special_tokens=False) for text in self.texts
        }
        return {int(ids[0]): text for text, ids in encoded.items() if len(ids) == 1}

    def cut(self, turn: Rollout) -> tuple[Rollout, Match | None]:
        """Return the turn up to the token that completes the first match, with finish_reason stop;
        the turn as it is, and None, where nothing matches.

        turn: complete, or the beginning of one (finish_reason abort), which a match completes.
        """
        sampled = turn.tokens[turn.prompt_length :]
        if not self.texts or self.match(sampled) is None:
            return turn, None
        # in the first n tokens there is a match from some n on
        count = bisect_left(
            range(len(sampled)), True, key=lambda n: self.match(sampled[:n]) is not None
        )
        start = turn.prompt_length
        return part(turn, start, start + count, 0, "stop"), self.match(sampled[:count])

    def match(self, token_ids: np.ndarray) -> Match | None:
        """Return the match that ends first, of these the longest; None without one."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        matches = [
            Match(text[:place], stop) for stop in self.texts if (place := text.find(stop)) >= 0
        ]
        if matches:
            return min(
                matches, key=lambda match: (len(match.before) + len(match.stop), match.before)
            )
        # a special token has no text
        special = self.by_token.get(int(token_ids[-1])) if len(token_ids) else None
        return None if special is None else Match(text, special)


def reply_before(reply: Reply, stop: str) -> Reply:
    """Return the reply without the stop text that ended it, and what follows it in its token."""
    content, reasoning = text_before(reply.content, stop), text_before(reply.reasoning or "", stop)
    return replace(reply, content=content, reasoning=None if reply.reasoning is None else reasoning)


def text_before(text: str, stop: str) -> str:
    """Return the text before the stop text; all of it where it is in another part of the reply."""
    place = text.find(stop)
    if place < 0 and stop.strip():
        # formats strip spaces and line ends around a text, the stop's own among them
        place = text.rfind(stop.strip())
    return text if place < 0 else text[:place]
