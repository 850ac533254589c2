"""Requests and answers of OpenAI's chat completions, as far as a sampler for training can serve
them.

A field that would change how tokens are sampled is refused, unless its value is that of the run:
log-probs of the trainer would be those of another distribution.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.rollout.agents.chat import Message
from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.question import MODEL, ApiError, Json, Question, split_prefill

FULL_SOFTMAX = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,)}
"""Field -> allowed values, where the run does not truncate (rollout.top_p, top_k, min_p)."""
ANY_TEXT = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
}
"""Field -> allowed values, in every run."""
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "seed",
)
"""Fields that a client may send for the service's own bookkeeping, and the seed: every sample is
drawn with the server's own numbers, as the choices of a group must differ."""


def error_body(error: ApiError) -> Json:
    """Return an error in OpenAI's form."""
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    return {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    }


Request = TypeVar("Request", bound=BaseModel)


class StreamOptions(BaseModel):
    include_usage: bool = False


class FunctionName(BaseModel):
    name: Annotated[str, Field(min_length=1)]


class NamedTool(BaseModel):
    """A tool_choice that names a function."""

    type: Literal["function"]
    function: FunctionName


class CompletionRequest(BaseModel):
    """The fields of a request that are read."""

    model_config = ConfigDict(extra="forbid")

    model: str = MODEL
    messages: list[Json]
    tools: list[Json] = []
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    """required or a function: the answer is sampled freely, as a grammar would change the
    distribution; one without the call is counted (rollout/missing_tool_calls_total)."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1  # as OpenAI's API
    stop: str | list[str] = []
    temperature: float | None = None
    logprobs: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    continue_final_message: bool = False
    """The last message is the assistant's, and the answer continues it."""
    add_generation_prompt: bool | None = None
    """As for other servers: false where the last message is continued, else true."""
    chat_template_kwargs: Json = {}
    """Settings of the format, such as enable_thinking; see Chat.with_template."""

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
            self.limit,
            self.stops,
            self.n,
            prefill,
            self.chat_template_kwargs,
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

    def _logprobs(
        self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase
    ) -> list[list[Json]]:
        return [sampled_logprobs(turn, tokenizer) if self.logprobs else [] for turn in turns]


def read_request(
    content: object, temperature: float, truncation: Truncation | None = None
) -> CompletionRequest:
    """Read the body of a request.  Raises ApiError, naming the field, for a request that would not
    be sampled as the run samples.
    """
    return checked(CompletionRequest, content, WITHOUT_EFFECT, temperature, truncation)


def checked(
    kind: type[Request],
    content: object,
    without_effect: Collection[str],
    temperature: float = 1.0,
    truncation: Truncation | None = None,
) -> Request:
    """Read the body of a request of any protocol.

    without_effect: its fields that change nothing.  temperature, truncation: those of the run.
    Raises ApiError, naming the field.
    """
    if not isinstance(content, Mapping):
        raise ApiError(400, f"body: must be a JSON object, got {type(content).__name__}")
    asked = {
        name: value
        for name, value in content.items()
        if value is not None and name not in without_effect
    }
    of_run = FULL_SOFTMAX
    if truncation is not None:
        of_run = {name: (value,) for name, value in truncation._asdict().items()}
    # the fields of these tables are checked here; the model below knows all others
    for name, allowed in {**of_run, **ANY_TEXT}.items():
        if name in asked and (value := asked.pop(name)) not in allowed:
            raise ApiError(
                400,
                f"{name} = {value!r}: must be {allowed[0]!r} in training; remove it",
                param=name,
            )
    # rho would compare distributions of two temperatures
    if (other := asked.get("temperature")) not in (None, temperature):
        raise ApiError(
            400,
            f"temperature = {other!r:.40}: must be the run's, {temperature:g}"
            " (rollout.temperature); remove it",
            param="temperature",
        )
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        # without the alternatives of a union, such as literal['auto','none','required']
        name = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
        why = "is not known here; remove it" if first["type"] == "extra_forbidden" else first["msg"]
        raise ApiError(400, f"{name} = {first['input']!r:.80}: {why}", param=name) from error


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
        }
        for index, (turn, logprobs) in enumerate(zip(turns, tokens, strict=True))
    ]
    return {**head("chat.completion", request), "choices": choices, "usage": usage(turns)}


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
        yield {
            **same,
            "choices": [
                {"index": index, "delta": delta, "finish_reason": None, "logprobs": content}
            ],
        }
        end = {"index": index, "delta": {}, "finish_reason": finish_reason(turn), "logprobs": None}
        yield {**same, "choices": [end]}
    if request.stream_options.include_usage:
        yield {**same, "choices": [], "usage": usage(turns)}


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


def usage(turns: Sequence[Turn]) -> Json:
    """Return numbers of tokens.  The input counts once, as the choices share it."""
    prompt, sampled = turns[0].num_prompt_tokens, sum(len(turn.token_ids) for turn in turns)
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
