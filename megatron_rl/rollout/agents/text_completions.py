"""Requests and answers of OpenAI's (legacy) completions, as far as a sampler for training can serve
them, with the token ids that clients of SGLang and vLLM exchange.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megatron_rl.rollout.agents.completions import StreamOptions, usage
from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.fields import RequestFields
from megatron_rl.rollout.agents.question import MODEL, Json, RawQuestion
from megatron_rl.rollout.agents.raw_prompts import RawPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_PROMPTS = 128
"""Limit of the prompts of a request, the same as that of `n`."""


def is_prompt(value: object) -> bool:
    """Return True for a text, and for token ids."""
    if isinstance(value, str):
        return True
    # the type itself: true and false are no token ids
    return isinstance(value, list) and set(map(type, value)) == {int}


def as_prompts(value: object) -> list[RawPrompt]:
    """Return the prompts of a request, which may have one or a list of them."""
    if is_prompt(value):
        return [cast("RawPrompt", value)]
    if not isinstance(value, list) or not value or not all(map(is_prompt, value)):
        raise PydanticCustomError("prompt", "must be a text, token ids, or a list of either")
    if len(value) > MOST_PROMPTS:
        rule = f"{len(value)} prompts: a request may have {MOST_PROMPTS}"
        raise PydanticCustomError("prompt", rule)
    return cast("list[RawPrompt]", value)


class TextCompletionRequest(RequestFields):
    """The fields of a request that are read."""

    without_effect: ClassVar = {
        "user": "bookkeeping of the service",
        "seed": "samples of a group must differ",
    }
    refused: ClassVar = {"suffix": "the model writes what follows the prompt"}

    model: str = MODEL
    """Any name."""
    prompt: Annotated[list[str | list[int]], BeforeValidator(as_prompts)]
    """A text, token ids, or a list of either (at most 128), each a sequence of its own."""
    max_tokens: Annotated[int, Field(ge=1)] = 16  # as OpenAI's API
    """16 where it is not given; at most what is left of the context."""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    """Sequences of their own for each prompt; where nothing follows, the last one is the
    response."""
    best_of: Literal[1] = 1
    """Only 1: the best of several is a sample of another distribution."""
    echo: Literal[False] = False
    """Only false: the answer has sampled tokens alone."""
    stop: str | list[str] = Field(default_factory=list)
    """Any texts: the answer ends before the first match."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end the answer, which has them as its last."""
    temperature: float | None = None
    """Only the run's (`rollout.temperature`)."""
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 or 1: log-probs of the sampled tokens are returned, without alternatives."""
    stream: bool = False
    """The turn in two chunks, after it was sampled."""
    stream_options: StreamOptions = StreamOptions()
    """`include_usage`."""
    add_special_tokens: bool = True
    """False: a text that begins a sequence gets none of the tokens that the tokenizer adds."""
    return_token_ids: bool = False
    """Each choice has `prompt_token_ids` and `token_ids`, as in vLLM."""

    @property
    def question(self) -> RawQuestion:
        return RawQuestion(
            prompts=self.prompt,
            limit=self.max_tokens,
            stops=[self.stop] if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            n=self.n,
            add_special_tokens=self.add_special_tokens,
        )

    def answer(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Json:
        choices = [
            {**self._choice(turn, tokenizer), "index": index, "finish_reason": turn.finish_reason}
            for index, turn in enumerate(turns)
        ]
        return {**self._head(), "choices": choices, "usage": usage(turns, self.n)}

    def events(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        """Yield the answer with two chunks for each choice, after it was sampled."""
        for chunk in self._chunks(turns, tokenizer):
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    def _chunks(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Iterator[Json]:
        same = self._head()
        for index, turn in enumerate(turns):
            text = {**self._choice(turn, tokenizer), "index": index, "finish_reason": None}
            yield {**same, "choices": [text]}
            end = {"text": "", "logprobs": None, "index": index}
            yield {**same, "choices": [{**end, "finish_reason": turn.finish_reason}]}
        if self.stream_options.include_usage:
            yield {**same, "choices": [], "usage": usage(turns, self.n)}

    def _head(self) -> Json:
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }

    def _choice(self, turn: Turn, tokenizer: PreTrainedTokenizerBase) -> Json:
        """Return the text of a turn, and what was asked for besides."""
        choice: Json = {"text": turn.text, "logprobs": None}
        if self.logprobs is not None:
            choice["logprobs"] = {
                "tokens": tokenizer.convert_ids_to_tokens(list(turn.token_ids)),
                "token_logprobs": list(turn.logprobs),
                "top_logprobs": None,
                "text_offset": None,
            }
        if self.return_token_ids:
            choice["prompt_token_ids"] = list(turn.prompt_token_ids)
            choice["token_ids"] = list(turn.token_ids)
        return choice
