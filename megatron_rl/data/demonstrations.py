"""Rows to learn by heart: a conversation, or a prompt and its response, with the tokens that are
learned (SFT).

A row has "messages" whose last one is the assistant's, or a prompt (text or messages) under the
keys of data/rows.py and a response.  It may have an "id" and "tools", a list or its JSON text.
Shapes: S tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from megatron_rl.config import DataConfig
from megatron_rl.config.sections import SftConfig
from megatron_rl.data.rows import (
    PROMPT_KEYS,
    BrokenRow,
    DataError,
    JsonRow,
    check_no_media,
    check_text,
    checked_unicode,
    describe_broken_rows,
    first_key,
    kind,
    parse_line,
    prompt_messages,
    read_rows,
    required,
)
from megatron_rl.records import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

CONVERSATION_KEYS = ("messages", *(key for key in PROMPT_KEYS if key != "messages"))
RESPONSE_KEYS = ("response", "completion", "output", "answer")
"""The keys that "auto" tries, in this order."""

NO_TEMPLATE = DataConfig.model_fields["template"].default
NOT_READ: dict[str, tuple[tuple[object, ...], str]] = {
    "reasoning": ((), "name it reasoning_content"),
    "thinking": ((), "name it reasoning_content"),
    "function_call": ((), "write it as one of tool_calls"),
    "weight": ((1,), "make a prompt of the turns before, and a response of the one to learn"),
}
"""Keys of a turn that no format reads, and without which it would be another one -> (values that
change nothing, what to do).
"""
Objects: TypeAlias = Sequence[Mapping[str, object]]


class Render(Protocol):
    """Writes messages in the model's chat format."""

    def __call__(
        self, messages: Objects, tools: Objects, *, last_only: bool
    ) -> tuple[Sequence[int], Sequence[bool]]:
        """Return tokens [S], and which of them are learned [S]: those of the assistant's turns, or
        of the last.  Raises ValueError for messages that cannot be written.
        """


@dataclass(frozen=True)
class Demonstration(Prompt):
    """A row with its answers, in the place of a prompt."""

    tokens: np.ndarray = field(kw_only=True, compare=False, repr=False)
    """int32 [S]; the last one is learned."""
    spans: tuple[tuple[int, int], ...] = field(kw_only=True, compare=False)
    """(start, end) of each span of tokens that is learned, in order; the first start is above 0."""

    @property
    def rollout(self) -> Rollout:
        """The row as the response that a policy would have sampled, with log-probs of 0."""
        count = sum(end - start for start, end in self.spans)
        return Rollout(
            id=f"{self.id}/0",
            tokens=self.tokens.astype(np.int64),
            prompt_length=self.spans[0][0],
            rollout_logprobs=np.zeros(count, np.float32),
            routed_experts=None,
            finish_reason="stop",
            policy_versions=np.zeros(count, np.int32),
            environment=tuple((end, start) for (_, end), (start, _) in pairwise(self.spans)),
        )


@dataclass(frozen=True)
class DemonstrationFile:
    """The rows of a file, or of the folder of a run."""

    path: Path
    rows: list[Demonstration]
    note: str = ""
    """A count of the rows that were left out, and why."""

    @property
    def line(self) -> str:
        """A line about the file for the log."""
        tokens = sum(end - start for row in self.rows for start, end in row.spans)
        text = f"{len(self.rows)} rows of {self.path}, {tokens} tokens to learn"
        return f"{text}; {self.note}" if self.note else text


def make_demonstration(
    name: str, tokens: Sequence[int] | np.ndarray, learned: Sequence[bool] | np.ndarray, source: str
) -> Demonstration:
    """Return the row without the tokens after the last learned one, which no learned token sees.

    Raises DataError where nothing is learned, or the first token, which nothing predicts.
    """
    mask = np.asarray(learned, bool)
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    spans = tuple(zip(edges[::2], edges[1::2], strict=True))
    if not spans:
        raise DataError("no token of the assistant in it, so there is nothing to learn")
    if spans[0][0] == 0:
        raise DataError("its first token is the assistant's, which nothing predicts; add a prompt")
    kept = np.asarray(tokens, np.int32)[: spans[-1][1]]
    # in the place of a label: the order of the data is bound to what is learned
    digest = hashlib.blake2b(kept.tobytes() + repr(spans).encode(), digest_size=16).hexdigest()
    return Demonstration(name, "", (), digest, source=source, tokens=kept, spans=spans)


def load_demonstrations(
    path: Path,
    data: DataConfig,
    sft: SftConfig,
    tokenizer: Tokenizer,
    render: Render | None,
    source: str = "",
) -> DemonstrationFile:
    """Return every row of `path`, in file order.

    render: writes messages; None without agent.renderer.
    Raises DataError listing the first broken rows, as load_prompts.  A row longer than
    sft.max_row_tokens is broken, or is left out and counted, as data.on_long_prompt says.
    """
    if data.chat_template and render is None:
        raise DataError(
            f"{path}: data.chat_template = true needs agent.renderer, the chat format of the model,"
            " such as qwen3; set it, or data.chat_template = false for plain prompts and responses"
        )
    reader = RowReader(data, sft, tokenizer, render, source or Path(path).stem, source)
    rows, errors, num_long = [], [], 0
    for number, raw in read_rows(Path(path)):
        try:
            values = parse_line(raw) if isinstance(raw, bytes) else without_nulls(raw)
            row = reader.read(number, values)
            if len(row.tokens) <= sft.max_row_tokens:
                rows.append(row)
            elif data.on_long_prompt == "drop":
                num_long += 1
            else:
                raise DataError(
                    f"{len(row.tokens)} tokens, sft.max_row_tokens = {sft.max_row_tokens}; raise"
                    " the limit, or set data.on_long_prompt = drop"
                )
        # of DataError, and of a format that cannot hold the messages
        except ValueError as error:
            errors.append(BrokenRow(number, str(error)))
    if errors:
        raise DataError(describe_broken_rows(Path(path), errors))
    limit = f"sft.max_row_tokens = {sft.max_row_tokens}"
    if not rows:
        raise DataError(f"{path}: no rows in it within {limit}")
    return DemonstrationFile(
        Path(path), rows, f"{num_long} rows left out, longer than {limit}" if num_long else ""
    )


@dataclass
class RowReader:
    """Reads rows of one file, whose first row decides the keys."""

    data: DataConfig
    sft: SftConfig
    tokenizer: Tokenizer
    render: Render | None
    stem: str
    """Beginning of the ids of rows that have none."""
    source: str
    prompt_key: str = ""
    response_key: str = ""

    def read(self, number: int, row: JsonRow) -> Demonstration:
        """Return a row.  Raises ValueError, without its place, for one that cannot be used."""
        if not self.prompt_key:
            self.prompt_key = first_key(row, self.data.prompt_key, CONVERSATION_KEYS)
            self.response_key = first_key(row, self.sft.response_key, RESPONSE_KEYS)
        name = f"{self.stem}:{number}"
        if row.get("id") is not None:
            name = checked_unicode(str(row["id"]), "id")
        tokens, learned = self._tokens(row)
        return make_demonstration(name, tokens, learned, self.source)

    def _tokens(self, row: JsonRow) -> tuple[Sequence[int], Sequence[bool]]:
        value = required(row, self.prompt_key)
        last_only = True  # the earlier turns of a prompt are not learned
        if isinstance(value, list) and is_conversation(value):
            last_only = False
            check_no_media(row)
            messages = value
            self._check_conversation(messages)
        else:
            messages = prompt_messages(row, self.prompt_key, self.data)
            response = required(row, self.response_key)
            if not isinstance(response, str):
                raise DataError(f"{self.response_key!r} must be text, got {kind(response)}")
            check_text(response, self.response_key)
            if not self.data.chat_template:
                return self._plain(messages[-1]["content"], response)
            messages.append({"role": "assistant", "content": response})
        assert self.render is not None
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        return self.render(messages, tools_of(row), last_only=last_only)

    def _check_conversation(self, messages: Sequence[Mapping[str, object]]) -> None:
        if not self.data.chat_template:
            raise DataError(
                f"{self.prompt_key!r} is a conversation, which needs data.chat_template = true"
            )
        if self.data.template != NO_TEMPLATE:
            raise DataError(
                f"{self.prompt_key!r} is a conversation, on which template = {self.data.template!r}"
                " (of data, its source or eval) has no effect; remove it, or write the row as a"
                " prompt and a response"
            )
        check_keys(messages)

    def _plain(self, prompt: str, response: str) -> tuple[list[int], list[bool]]:
        """Return the tokens of a prompt, and those that the model writes, up to its end token.

        Each text is encoded by itself, as a prompt is before it is sampled from.
        """
        first, last = self.tokenizer([prompt, response], add_special_tokens=False)["input_ids"]
        tokens = [*first, *last, self.tokenizer.eos_token_id]
        return tokens, [index >= len(first) for index in range(len(tokens))]


def is_conversation(value: Sequence[Any]) -> bool:
    """Return True for messages of which the last is the assistant's."""
    return (
        bool(value)
        and all(isinstance(message, dict) for message in value)
        and value[-1].get("role") == "assistant"
    )


def without_nulls(value: Any) -> Any:
    """Return a value of a parquet column without the null fields of its objects: a column has the
    fields of the objects in all rows, so that an argument that a call lacks is read as null.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def check_keys(messages: Sequence[Mapping[str, object]]) -> None:
    """Raise DataError for a turn of the assistant with a key that would be lost."""
    for index, message in enumerate(messages):
        for key, (harmless, fix) in NOT_READ.items():
            value = message.get(key) if message.get("role") == "assistant" else None
            if value not in (None, "", *harmless):
                raise DataError(
                    f"{key!r} of message {index + 1} is not read, and the turn would be learned"
                    f" without it, got {value!r:.40}; {fix}"
                )


def tools_of(row: JsonRow) -> list[Mapping[str, object]]:
    """Return the row's tools, in the form of OpenAI's API."""
    tools = row.get("tools") or []
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise DataError(f"'tools' is not JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"'tools' must be a list of objects, or its JSON text, got {tools!r:.80}")
    return tools


def shared_rows(train: Sequence[DemonstrationFile], held_out: DemonstrationFile) -> int:
    """Return the number of held-out rows that are also trained on."""
    known = {row.label for file in train for row in file.rows}
    return sum(row.label in known for row in held_out.rows)
