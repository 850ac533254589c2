"""The beginning of an answer that the client wrote: its tokens are the end of the model's input,
and the model continues it.

The tokens of the text are never learned from.  They follow those that open the model's turn, so
that the format reads them and what was sampled as one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_rl.launch.log_lines import encodable
from megatron_rl.rollout.agents.chat import Chat, Schema
from megatron_rl.rollout.agents.long_texts import encoded_up_to
from megatron_rl.rollout.agents.reply import Reply
from megatron_rl.rollout.agents.stops import reply_before

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prefill:
    """Text with which the model's turn begins."""

    text: str = ""
    token_ids: tuple[int, ...] = ()

    def check(self, chat: Chat, prompt: Sequence[int]) -> None:
        """Raise ValueError where the format would not read the text as that of an answer: its
        generation prompt opens a thought, or the text has tokens of the format.

        prompt: the tokens up to those that open the model's turn.
        """
        if not self.text:
            return
        reply = chat.parse(prompt, self.token_ids)
        if reply.tool_calls or reply.content.strip() != self.text.strip():
            raise ValueError(
                f"messages: agent.renderer = {chat.name!r} does not read {self.text[:40]!r} as the"
                " beginning of an answer's text: the answer may begin with a thought, or the text"
                " has tokens of the format; let the user's message say how to begin"
            )

    def read(
        self,
        chat: Chat,
        prompt: Sequence[int],
        response: Sequence[int],
        after: str,
        tools: Sequence[Schema],
        name: str = "",
    ) -> Reply:
        """Parse the turn of this text and `response`; return the part of it that follows the text.

        prompt: the tokens before the text.  after: the end of the turn's text that is no part of
        the reply.  name: the turn's.
        """
        turn = [*self.token_ids, *response]
        whole = reply_before(chat.parse(prompt, turn, tools, name), after)
        # formats strip spaces around the content
        for start in (self.text, self.text.lstrip()):
            if whole.content.startswith(start):
                return replace(whole, content=whole.content[len(start) :])
        if whole.content and whole.content == self.text.strip():
            return replace(whole, content="")
        # the model wrote something after which the format reads the text otherwise
        reply = chat.parse([*prompt, *self.token_ids], response, tools, name)
        return reply_before(reply, after)


NO_PREFILL = Prefill()


def encoded(text: str, tokenizer: PreTrainedTokenizerBase, longest: int | None) -> Prefill:
    """Return the text with its tokens; see encoded_up_to for `longest`."""
    return Prefill(encodable(text), tuple(encoded_up_to(tokenizer, text, longest)))
