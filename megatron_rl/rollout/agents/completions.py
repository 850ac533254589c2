"""Requests and answers of OpenAI's chat completions, as far as a sampler for training can serve
them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, FailFast, Field

from megatron_rl.rollout.agents.chat import Message
from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.fields import RequestFields
from megatron_rl.rollout.agents.question import MODEL, ApiError, Json, Question, split_prefill

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def error_body(error: ApiError) -> Json:
    """Return an error in OpenAI's form."""
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    return {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    }


class StreamOptions(BaseModel):
    include_usage: bool = False


class FunctionName(BaseModel):
    name: Annotated[str, Field(min_length=1)]


class NamedTool(BaseModel):
    """A tool_choice that names a function."""

    type: Literal["function"]
    function: FunctionName


class CompletionRequest(RequestFields):
    """The fields of a request that are read."""

    without_effect: ClassVar = {
        **dict.fromkeys(
            ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
            "bookkeeping and caches of the service",
        ),
        "prediction": "a hint that saves time",
        "seed": "samples of a group must differ",
    }
    refused: ClassVar = {
        "audio": "the model writes text",
        "modalities": "the model writes text",
        "function_call": "an older form of tool_choice",
        "functions": "an older form of tools",
        "reasoning_effort": "the format may have such a setting: chat_template_kwargs",
        "verbosity": "the prompt must say it",
        "web_search_options": "no tools of a server are here",
    }

    model: str = MODEL
    """Any name."""
    messages: Annotated[list[Json], FailFast()]
    """Text only; a developer's message is the system's where the format has no such role."""
    tools: list[Json] = Field(default_factory=list)
    """Tools of type function."""
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    """With required or a function the answer is sampled freely, as a grammar would change the
    distribution; answers without that call are counted (`rollout/missing_tool_calls_total`)."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """At most what is left of the context."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """At most what is left of the context."""
    n: Annotated[int, Field(ge=1, le=128)] = 1  # as OpenAI's API
    """Sequences of their own; where nothing follows, the last one is the response."""
    stop: str | list[str] = Field(default_factory=list)
    """Any texts: the answer ends before the first match."""
    temperature: float | None = None
    """Only the run's (`rollout.temperature`)."""
    logprobs: bool = False
    """Log-probs of the sampled tokens are returned, without alternatives."""
    return_token_ids: bool = False
    """The answer has `prompt_token_ids`, and each choice `token_ids`, as in vLLM."""
    stream: bool = False
    """The turn in two chunks, after it was sampled."""
    stream_options: StreamOptions = StreamOptions()
    """`include_usage`."""
    continue_final_message: bool = False
    """The last message is the assistant's, and the answer continues it."""
    add_generation_prompt: bool | None = None
    """Must be false where the last message is continued, else true, as SGLang requires."""
    chat_template_kwargs: Json = Field(default_factory=dict)
    """Settings that the format of `agent.renderer` has, such as `enable_thinking`."""

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def must_call(self) -> str | None:
        """The tool that the answer must call, "" for any; None: it need not."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return "" if self.tool_choice == "required" else None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def question(self) -> Question:
        tools = [] if self.tool_choice == "none" else self.tools
        messages, prefill = self._opened()
        return Question(
            messages,
            tools,
            self.must_call,
            limit=self.limit,
            stops=self.stops,
            n=self.n,
            prefill=prefill,
            template=self.chat_template_kwargs,
        )

    def _opened(self) -> tuple[Sequence[Message], str]:
        """Return the messages that are answered, and the beginning of the answer.

        Raises ApiError for a last message that does not fit continue_final_message.
        """
        is_answer = bool(self.messages) and self.messages[-1].get("role") == "assistant"
        if self.add_generation_prompt is self.continue_final_message:
            raise ApiError(
                400,
                f"add_generation_prompt = {self.add_generation_prompt}: must be the opposite of"
                f" continue_final_message, {self.continue_final_message}; remove it",
                param="add_generation_prompt",
            )
        if is_answer and not self.continue_final_message:
            raise ApiError(
                400,
                "messages: must end with a message that is not the assistant's, which the model"
                " answers; or set continue_final_message = true and add_generation_prompt = false",
                param="messages",
            )
        if self.continue_final_message and not is_answer:
            raise ApiError(
                400,
                "continue_final_message = True: the last message must be the assistant's; remove"
                " it",
                param="continue_final_message",
            )
        return split_prefill(self.messages) if is_answer else (self.messages, "")

    def answer(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Json:
        return completion(self, turns, self._logprobs(turns, tokenizer))

    def events(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        for chunk in chunks(self, turns, self._logprobs(turns, tokenizer)):
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    def prompt_token_ids_of(self, turns: Sequence[Turn]) -> Json:
        """Return the field with the tokens of the input, which the choices share."""
        if not self.return_token_ids:
            return {}
        return {"prompt_token_ids": list(turns[0].prompt_token_ids)}

    def token_ids_of(self, turn: Turn) -> Json:
        return {"token_ids": list(turn.token_ids)} if self.return_token_ids else {}

    def _logprobs(
        self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase
    ) -> list[list[Json]]:
        return [sampled_logprobs(turn, tokenizer) if self.logprobs else [] for turn in turns]


def completion(
    request: CompletionRequest, turns: Sequence[Turn], tokens: Sequence[list[Json]]
) -> Json:
    """Return the answer with one choice for each turn.

    tokens: logprobs of the tokens of each turn, empty where they were not asked for.
    """
    choices = [
        {
            "index": index,
            "message": message_of(turn),
            "finish_reason": finish_reason(turn),
            "logprobs": {"content": logprobs, "refusal": None} if request.logprobs else None,
            **request.token_ids_of(turn),
        }
        for index, (turn, logprobs) in enumerate(zip(turns, tokens, strict=True))
    ]
    return {
        **head("chat.completion", request),
        **request.prompt_token_ids_of(turns),
        "choices": choices,
        "usage": usage(turns, len(turns)),
    }


def chunks(
    request: CompletionRequest, turns: Sequence[Turn], tokens: Sequence[list[Json]]
) -> Iterator[Json]:
    """Yield the answer for stream = true: two chunks for each choice."""
    same = head("chat.completion.chunk", request)
    for index, (turn, logprobs) in enumerate(zip(turns, tokens, strict=True)):
        delta = message_of(turn)
        if isinstance(calls := delta.get("tool_calls"), list):
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        content = {"content": logprobs, "refusal": None} if request.logprobs else None
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": content}
        choice |= request.token_ids_of(turn)
        yield {**same, **request.prompt_token_ids_of(turns), "choices": [choice]}
        end = {"index": index, "delta": {}, "finish_reason": finish_reason(turn), "logprobs": None}
        yield {**same, "choices": [end]}
    if request.stream_options.include_usage:
        yield {**same, "choices": [], "usage": usage(turns, len(turns))}


def head(kind: str, request: CompletionRequest) -> Json:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def message_of(turn: Turn) -> Json:
    """Return the message as OpenAI writes it: content is null beside tool calls without text."""
    message = turn.message
    return {**message, "content": message["content"] or (None if "tool_calls" in message else "")}


def finish_reason(turn: Turn) -> str:
    has_calls = turn.finish_reason == "stop" and "tool_calls" in turn.message
    return "tool_calls" if has_calls else turn.finish_reason


def usage(turns: Sequence[Turn], n: int) -> Json:
    """Return numbers of tokens.  The input of `n` choices counts once, as they share it."""
    prompt = sum(turn.num_prompt_tokens for turn in turns[::n])
    sampled = sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def models() -> Json:
    return {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_rl"}],
    }


def sampled_logprobs(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> list[Json]:
    """Return the log-probs with which the tokens were sampled, in OpenAI's format."""
    texts: Sequence[str] = tokenizer.convert_ids_to_tokens(list(turn.token_ids))
    return [
        {"token": text, "logprob": value, "bytes": None, "top_logprobs": []}
        for text, value in zip(texts, turn.logprobs, strict=True)
    ]
