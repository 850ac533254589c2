"""The tokens of a complete conversation that SFT learns: those that the model would sample.

Shapes: S tokens of a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from renderers import RenderedTokens

Message = Mapping[str, object]


@dataclass(frozen=True)
class Written:
    """A conversation in a chat format."""

    tokens: np.ndarray
    """int64 [S]"""
    sampled: np.ndarray
    """bool [S]: the tokens that the model would sample."""
    places: np.ndarray
    """int64 [S]: the index of each token's message, below 0 for tokens of none."""

    def sampled_of(self, index: int) -> np.ndarray:
        """Return the positions of the sampled tokens of message `index`."""
        return np.flatnonzero(self.sampled & (self.places == index))

    def with_end(self, index: int, token: int) -> Written:
        """Return the conversation with one more token, which the model samples in message
        `index`.
        """
        return Written(
            np.append(self.tokens, token),
            np.append(self.sampled, True),
            np.append(self.places, index),
        )


@dataclass(frozen=True)
class LearnedTurns:
    """Says which tokens of conversations are learned, in one chat format.

    Messages are those of chat.to_format: their content is text.
    """

    name: str
    """agent.renderer"""
    render: Callable[[Sequence[Message]], RenderedTokens]
    decode: Callable[[np.ndarray], str]
    stops: Sequence[int]
    """Tokens at which sampling of a turn stops."""
    opening: list[int]
    """Tokens that open the model's turn when it is sampled."""

    def read(self, messages: Sequence[Message], *, last_only: bool) -> tuple[list[int], list[bool]]:
        """Return the tokens [S], and which of them are learned [S]; see Chat.demonstration."""
        written = self._with_last_end(messages)
        learned = np.zeros(len(written.tokens), bool)
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        for index in turns[-1:] if last_only else turns:
            self._check_end(written, messages, index)
            self._check_thinking(written, messages, index)
            learned[self._of_turn(written, index)] = True
        return written.tokens.tolist(), learned.tolist()

    def _written(self, messages: Sequence[Message]) -> Written:
        rendered = self.render(messages)
        if len(rendered.sampled_mask) != len(rendered.token_ids):
            raise ValueError(
                f"agent.renderer = {self.name!r} does not say which tokens the model samples: it"
                " cannot be used for SFT; use the format of the model's family"
            )
        return Written(
            np.asarray(rendered.token_ids, np.int64),
            np.asarray(rendered.sampled_mask, bool),
            np.asarray(rendered.message_indices, np.int64),
        )

    def _with_last_end(self, messages: Sequence[Message]) -> Written:
        """Return the conversation with the token that ends its last turn.

        Some formats end a turn with the role of the message after it, which the model samples, or
        leave the last turn open: the token is read from the conversation with such a message.
        """
        written, last = self._written(messages), len(messages) - 1
        if self._ends(written, last):
            return written
        role = "tool" if messages[-1].get("tool_calls") else "user"
        longer = self._written([*messages, {"role": role, "content": "a"}])
        if not self._ends(longer, last):
            return written
        return written.with_end(last, int(longer.tokens[longer.sampled_of(last)[-1]]))

    def _ends(self, written: Written, index: int) -> bool:
        """Return True if the last sampled token of message `index` stops sampling."""
        positions = written.sampled_of(index)
        return positions.size > 0 and int(written.tokens[positions[-1]]) in self.stops

    def _check_end(self, written: Written, messages: Sequence[Message], index: int) -> None:
        if self._ends(written, index):
            return
        if index == len(messages) - 1:
            place, fix = "", "use the format of the model's family"
        else:
            place = f" before one with role = {messages[index + 1].get('role')!r}"
            fix = "make a row that ends with this turn"
        raise ValueError(
            f"messages: agent.renderer = {self.name!r} writes no token that stops the model at the"
            f" end of message {index + 1}{place}: the turn would be learned without its end; {fix}"
        )

    def _check_thinking(self, written: Written, messages: Sequence[Message], index: int) -> None:
        thinking, content = thinking_of(messages[index])
        if not thinking:
            return
        text = self.decode(written.tokens[written.sampled_of(index)])
        _, is_learned, after = text.partition(thinking)
        # the answer may have the words of the thinking, but formats write the thinking before it
        if is_learned and (content in after or content not in text):
            return
        if index == len(messages) - 1:
            fix = "remove the thinking, or use a format that has it"
        else:
            fix = (
                "make a row that ends with this turn, and remove the thinking from the turns before"
                " (reasoning_content, or <think> in the content)"
            )
        raise ValueError(
            f"messages: agent.renderer = {self.name!r} leaves out the thinking of message"
            f" {index + 1}, as it does when the model is served: the turn would be learned without"
            f" it; {fix}"
        )

    def _of_turn(self, written: Written, index: int) -> np.ndarray:
        """Return the positions of the tokens of message `index` that are learned: the sampled ones,
        and those before them that no prompt has.
        """
        sampled = written.sampled_of(index)
        first = int(np.flatnonzero(written.places == index)[0])
        after = first + len(self.opening)
        # GLM-4.5 calls the line break of "<|assistant|>\n<think>" a part of the prompt, which ends
        # before it
        if self.opening and written.tokens[first:after].tolist() == self.opening:
            sampled = np.union1d(sampled, np.arange(after, sampled[0]))
        return sampled


def thinking_of(message: Message) -> tuple[str, str]:
    """Return the thinking of a turn, "" without any, and the text after it."""
    content = str(message["content"])
    if thinking := str(message.get("reasoning_content") or "").strip():
        return thinking, content.strip()
    # as formats read a turn without reasoning_content
    before, end, after = content.partition("</think>")
    return (before.split("<think>")[-1].strip(), after.strip()) if end else ("", content)
