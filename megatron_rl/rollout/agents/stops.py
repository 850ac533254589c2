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
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_rl.launch.log_lines import encodable
from megatron_rl.records import Rollout
from megatron_rl.rollout.agents.recorded import part
from megatron_rl.rollout.agents.reply import Reply
from megatron_rl.rollout.agents.turn_text import text_of_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Match(NamedTuple):
    """The text of some tokens, without special tokens, split at the first stop text in it."""

    before: str
    """All of the text where it has no stop text."""
    stop: str | None
    after: str
    """The stop text, and what follows it."""


@dataclass(frozen=True)
class Stops:
    """The texts at which a turn ends, none of them empty."""

    texts: Sequence[str]
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def by_token(self) -> dict[int, str]:
        """The texts of one token, at which servers stop, by this token."""
        encode = self.tokenizer.encode
        # half of a surrogate pair has no tokens, and is in no text of the model
        texts = [text for text in self.texts if encodable(text) == text]
        encoded = {text: encode(text, add_special_tokens=False) for text in texts}
        return {int(ids[0]): text for text, ids in encoded.items() if len(ids) == 1}

    def cut(self, turn: Rollout) -> tuple[Rollout, Match]:
        """Return the turn up to the token that completes the first stop text, with finish_reason
        stop, and its text; the turn as it is where it has no stop text.

        turn: complete, or the beginning of one (finish_reason abort), which a match completes.
        """
        sampled = turn.tokens[turn.prompt_length :]
        if (whole := self.match(sampled)).stop is None:
            return turn, whole

        def is_complete(count: int) -> bool:
            return self.match(sampled[:count]).stop is not None

        # a beginning is complete from some number of tokens on.  Doubling it first, a long turn
        # with a stop text at its start is not decoded again and again
        most = 1
        while most < len(sampled) and not is_complete(most):
            most *= 2
        tokens = range(min(most, len(sampled)))
        count = bisect_left(tokens, True, lo=most // 2, key=is_complete)
        start = turn.prompt_length
        return part(turn, start, start + count, 0, "stop"), self.match(sampled[:count])

    def match(self, token_ids: np.ndarray) -> Match:
        """Split the text at the stop text that ends first, of these the longest.

        token_ids: int [n].
        """
        text = text_of_turn(self.tokenizer, token_ids, skip_special_tokens=True)
        places = [(place, stop) for stop in self.texts if (place := text.find(stop)) >= 0]
        if places:
            place, stop = min(places, key=lambda item: (item[0] + len(item[1]), item[0]))
            return Match(text[:place], stop, text[place:])
        # a special token has no text
        special = self.by_token.get(int(token_ids[-1])) if len(token_ids) else None
        return Match(text, special, "")


def reply_before(reply: Reply, after: str) -> Reply:
    """Return the reply without `after`, with which its text ends.

    Formats strip spaces and line ends around content and thinking, those of `after` among them.
    What lies in a tool call stays there.
    """
    name = "content" if reply.content else "reasoning"
    text: str = getattr(reply, name) or ""
    for end in (after, after.rstrip(), after.strip()):
        if end and text.endswith(end):
            kept = text.removesuffix(end)
            return replace(reply, content=kept) if reply.content else replace(reply, reasoning=kept)
    return reply
