"""Prompts that a client wrote itself, as token ids or as text, without a chat format.

Token ids are taken as they are.  Where they begin with the tokens of a sequence up to the end of a
sampled turn, they continue that sequence, whichever protocol began it.  A text is encoded
once.  Where it begins with an earlier text and what was sampled for it, special tokens and stop
texts included, only what follows is encoded, and continues that sequence.  So the model reads what
the client wrote, and a text without the token that ended the turn is another one.

All other prompts begin a sequence.  Sampled tokens are never tokenized again inside a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from megatron_rl.launch.log_lines import encodable
from megatron_rl.rollout.agents.branch import Branch
from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.long_texts import encoded_up_to
from megatron_rl.rollout.agents.sequences import Answer, EpisodeOfSequences, Place, Sequences
from megatron_rl.rollout.agents.turn_text import text_of_turn

RawPrompt = str | Sequence[int]


class RawPrompts:
    """The prompts of one episode.  Requests may come in parallel, also for the same prompt."""

    def __init__(self, session: EpisodeOfSequences, sequences: Sequences) -> None:
        self._session, self._sequences = session, sequences
        self._texts: dict[Branch, str] = {}  # up to the last turn
        self._ends: list[tuple[int, Place]] = []  # length of the text up to a place

    def begin(
        self, answers: list[Answer], prompt: RawPrompt, *, add_special_tokens: bool = True
    ) -> Answer:
        """Return the answer to `prompt`, which `sample` completes, and add it to `answers` of
        Sequences.reading.

        add_special_tokens: the tokenizer adds its special tokens to a text that begins a sequence.

        Raises EpisodeError for an empty prompt and for token ids outside the vocabulary, and
        ContextFull for one that no sequence can hold.
        """
        if isinstance(prompt, str):
            prompt = encodable(prompt)
            branch = self._of_text(prompt, add_special_tokens)
        else:
            branch = self._of_tokens(self._session.check_tokens(prompt, "the prompt has"))
        # added before it is sampled, so that `reading` drops a turn that was cut short
        answers.append(answer := Answer(branch, partial(self._accepted, prompt)))
        return answer

    async def sample(
        self,
        answer: Answer,
        *,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
    ) -> Turn:
        """Sample the turn of `answer`.  Raises what Branch.sample raises."""
        answer.turn = await answer.branch.sample(
            max_tokens=max_tokens, stop_token_ids=stop_token_ids, stops=stops
        )
        return answer.turn

    def _of_tokens(self, token_ids: Sequence[int]) -> Branch:
        place = self._sequences.place_in(token_ids)
        if place is None:
            return self._sequences.begin(token_ids)
        return self._sequences.extend(place, token_ids[place.end :])

    def _of_text(self, text: str, add_special_tokens: bool) -> Branch:
        tokenizer = self._session.tokenizer
        longest = (self._session.sequence_limit or (None,))[0]
        # the longest first, and of equal ones a place that nothing follows yet
        for end, place in sorted(
            self._ends, key=lambda item: (item[0], item[1].is_open), reverse=True
        ):
            if text.startswith(self._texts[place.branch][:end]):
                added = encoded_up_to(tokenizer, text[end:], longest)
                return self._sequences.extend(place, added)
        ids = encoded_up_to(tokenizer, text, longest, add_special_tokens=add_special_tokens)
        return self._sequences.begin(ids)

    def _accepted(self, prompt: RawPrompt, place: Place, turn: Turn) -> None:
        if isinstance(prompt, str):
            ids, tokenizer = np.asarray(turn.token_ids), self._session.tokenizer
            text = prompt + text_of_turn(tokenizer, ids, skip_special_tokens=False)
            self._texts[place.branch] = text
            self._ends.append((len(text), place))
