"""Messages <-> tokens in a model's own chat format, by the `renderers` library: sampled tokens are
kept as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, cast

from megatron_rl.launch.log_lines import encodable
from megatron_rl.rollout.agents.call_ids import client_id, with_written_ids
from megatron_rl.rollout.agents.known_texts import KnownTexts
from megatron_rl.rollout.agents.learned import LearnedTurns
from megatron_rl.rollout.agents.long_texts import CHARACTERS_PER_TOKEN
from megatron_rl.rollout.agents.reply import Reply, ToolCall, to_call

if TYPE_CHECKING:
    from renderers import Message as FormatMessage
    from renderers import RenderedTokens, Renderer, ToolSpec
    from transformers import PreTrainedTokenizerBase

NOT_NAMED = ("auto", "default", "custom")
"""Names that guess the format: a wrong guess trains on text that the model never sees when it is
served."""
ROLES = ("system", "developer", "user", "assistant", "tool")
RENDER_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)
"""Exceptions of renderers for messages that their format cannot hold."""
MAX_VARIANTS = 16
"""Number of the formats with other chat_template_kwargs that are kept."""

Message = Mapping[str, object]
"""A message with keys as in OpenAI's API: {"role": "tool", "content": "4"}."""
Schema = Mapping[str, object]
"""A tool, as in OpenAI's API: {"type": "function", "function": {"name": ..., "description": ...,
"parameters": ...}}.
"""


class Chat:
    """agent.renderer with the model's tokenizer."""

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        history: Literal["keep", "split"] = "keep",
        longest: int | None = None,
        template: str = "",
    ) -> None:
        """history: agent.history; split follows the format, which may drop the thinking of earlier
        turns.  longest: tokens of the longest sequence, None where that is not known.  template:
        `template` of with_template.

        Raises ValueError, naming the key, where the library does not know the format.
        """
        from renderers import create_renderer  # here: it takes a second
        from renderers.configs import config_from_name

        self.name, self._tokenizer, self._longest = name, tokenizer, longest
        self.template = template
        """JSON of the chat_template_kwargs that are not the format's default, "" without any."""
        try:
            if name in NOT_NAMED:
                raise ValueError("must be the name of one format")
            # many templates drop the thinking of earlier turns, but a sequence cannot lose tokens
            # that were sampled
            self._config = type(config_from_name(name))(
                thinking_retention="all" if history == "keep" else None,
                **json.loads(template or "{}"),
            )
            self._renderer: Renderer = create_renderer(KnownTexts(tokenizer), self._config)
        # renderers asserts that tokens exist
        except (ValueError, KeyError, AttributeError, AssertionError) as error:
            raise ValueError(
                f"agent.renderer = {name!r}: {error}; it must be the format of the model at"
                " model.path"
            ) from error
        self._developer = "developer" if self._has_role("developer") else "system"
        self._writes_ids = self._has_ids()
        # a cache of this object: as a decorator it would keep every tokenizer alive
        self._variant = lru_cache(MAX_VARIANTS)(
            lambda template: Chat(name, tokenizer, history, longest, template)
        )

    def with_template(self, values: Mapping[str, object]) -> Chat:
        """Return the format with `values` of chat_template_kwargs; itself where they change
        nothing.

        Raises ValueError, naming those that the format has, for others, and for wrong values.
        """
        known = sorted(type(self._config).template_field_names())
        if unknown := [name for name in values if name not in known]:
            raise ValueError(
                f"chat_template_kwargs: agent.renderer = {self.name!r} has no {unknown[0]!r:.40};"
                f" it has: {', '.join(known) or 'none'}; remove it"
            )
        try:
            config = type(self._config)(**{**self._config.model_dump(exclude_unset=True), **values})
        except ValueError as error:
            raise ValueError(f"chat_template_kwargs: {error}") from error
        # as the format reads them: 0 is false
        before, after = (own.model_dump(mode="json") for own in (self._config, config))
        changed = {name: after[name] for name in values if after[name] != before[name]}
        return self._variant(json.dumps(changed, sort_keys=True)) if changed else self

    def _has_role(self, role: str) -> bool:
        """Return True if the format writes messages of this role.  It may skip or refuse others."""
        probe = [{"role": role, "content": "a"}, {"role": "user", "content": "b"}]
        rendered = self._probed(probe)
        return rendered is not None and 0 in rendered.message_indices

    def _has_ids(self) -> bool:
        """Return True if the format writes the ids of calls."""
        name = "functions.f:7"
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        probe: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        rendered = self._probed(probe)
        return rendered is not None and name in self._tokenizer.decode(rendered.token_ids)

    def _probed(self, messages: Sequence[Message]) -> RenderedTokens | None:
        try:
            return self._renderer.render(cast("list[FormatMessage]", messages))
        except RENDER_ERRORS:
            return None

    def with_written_ids(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return `messages` with the ids of calls that the format writes."""
        return with_written_ids(messages) if self._writes_ids else messages

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a turn."""
        return list(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Return the tokens of a conversation from its start, with those that open the model's
        turn.  Raises ValueError for messages that the format cannot hold.
        """
        shortened = [self._shortened(message) for message in messages]
        return list(self._rendered(shortened, tools, add_generation_prompt=True).token_ids)

    def num_tokens(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> int:
        """Return the number of tokens that `render` returns for messages of any length; it takes
        seconds for megabytes.
        """
        return len(self._rendered(messages, tools, add_generation_prompt=True).token_ids)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Schema], *, add_generation_prompt: bool
    ) -> RenderedTokens:
        written = [self._to_format(message) for message in self.with_written_ids(messages)]
        try:
            rendered = self._renderer.render(
                written, tools=to_specs(tools), add_generation_prompt=add_generation_prompt
            )
        except RENDER_ERRORS as error:
            raise ValueError(
                f"agent.renderer = {self.name!r} cannot write these messages: {error}"
            ) from error
        self._check_all_written(written, rendered)
        return rendered

    def demonstration(
        self, messages: Sequence[Message], tools: Sequence[Schema] = (), *, last_only: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of a complete conversation, and which of them are learned: those that
        the model would sample in the assistant's turns, or in the last, with those that end them.

        Raises ValueError for messages that the format cannot hold, for learned turns that it writes
        without their thinking or their end, and for a format that does not say what is sampled.
        """
        turns = LearnedTurns(
            self.name,
            lambda messages: self._rendered(messages, tools, add_generation_prompt=False),
            self._tokenizer.decode,
            self.stop_token_ids,
            self._opening,
        )
        return turns.read([to_format(message) for message in messages], last_only=last_only)

    @cached_property
    def _opening(self) -> list[int]:
        """Tokens that open the model's turn, after a question."""
        question = [{"role": "user", "content": "a"}]
        alone = self._rendered(question, (), add_generation_prompt=False)
        return self.render(question)[len(alone.token_ids) :]

    def continuation(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
    ) -> list[int] | None:
        """Return the tokens that follow `prompt` and the turn `completion`: those of `messages`,
        and those that open the next turn.

        prompt: the last tokens of the input, from the end of an earlier turn on, all that follow
        which the format wrote; or all of them.

        None where the format would change sampled tokens.  Raises ValueError for messages that it
        cannot hold.
        """
        start = [*prompt, *completion]
        written = self.with_written_ids(messages)
        added = [self._to_format(self._shortened(message)) for message in written]
        try:
            rendered = self._renderer.bridge_to_next_turn(
                list(prompt), list(completion), added, tools=to_specs(tools)
            )
        except RENDER_ERRORS as error:
            raise ValueError(
                f"agent.renderer = {self.name!r} cannot write these messages: {error}"
            ) from error
        if rendered is None or list(rendered.token_ids[: len(start)]) != start:
            return None
        self._check_all_written(added, rendered)
        return list(rendered.token_ids[len(start) :])

    def _to_format(self, message: Message) -> FormatMessage:
        """Return `message` as the format reads it; a developer's is the system's where it has no
        such role.
        """
        clean = to_format(message)
        if clean["role"] != "developer":
            return clean
        return cast("FormatMessage", {**clean, "role": self._developer})

    def _shortened(self, message: Message) -> Message:
        """Shorten a text that no sequence can hold, to a length that none can hold either: to
        encode megabytes takes seconds, in which no episode continues.
        """
        text = text_of(message.get("content"))
        if self._longest is None or len(text) <= CHARACTERS_PER_TOKEN * (self._longest + 1):
            return message
        start = text[: CHARACTERS_PER_TOKEN * (self._longest + 1)]
        fits = len(self._tokenizer.encode(start, add_special_tokens=False)) <= self._longest
        return message if fits else {**message, "content": start}

    def _check_all_written(
        self, messages: Sequence[FormatMessage], rendered: RenderedTokens
    ) -> None:
        """Raise ValueError for a message without tokens: formats skip roles that they do not
        know.
        """
        written = set(rendered.message_indices)
        for index, message in enumerate(messages):
            text = text_of(message["content"]).strip()
            if not text or index in written:
                continue
            if text not in self._tokenizer.decode(rendered.token_ids):
                raise ValueError(
                    f"messages: agent.renderer = {self.name!r} does not write the one with role ="
                    f" {message['role']!r} ({text[:40]!r}); give it another role"
                )

    def extend(
        self, prompt: Sequence[int], completion: Sequence[int], messages: Sequence[Message]
    ) -> list[int]:
        """Return `continuation`; raise ValueError where there is none."""
        tokens = self.continuation(prompt, completion, messages)
        if tokens is None:
            raise ValueError(
                f"agent.renderer = {self.name!r} cannot continue the"
                f" {len(prompt) + len(completion)} tokens so far with"
                f" {[message.get('role') for message in messages]} without changing sampled tokens"
            )
        return tokens

    def parse(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        tools: Sequence[Schema] = (),
        turn: str = "",
    ) -> Reply:
        """Parse the turn `completion`, which follows `prompt` (see `continuation`).

        turn: a name that no other turn of the episode has.
        """
        # Formats number their calls, or do not name them: a client needs ids that differ in the
        # whole episode (call_ids.py), and an episode which continues those that it had
        try:
            parsed = self._renderer.parse_response(
                list(completion), tools=to_specs(tools), prompt_ids=list(prompt)
            )
        # json and renderers raise for thousands of brackets or digits
        except (ValueError, RecursionError) as error:
            text = self._tokenizer.decode(completion, skip_special_tokens=True)
            call_id = client_id(turn, 0, None)
            return Reply("", None, (ToolCall(call_id, "", text, text, str(error)),))
        calls = tuple(
            to_call(call, client_id(turn, number, call.id))
            for number, call in enumerate(parsed.tool_calls)
        )
        return Reply(parsed.content, parsed.reasoning_content, calls)


def to_format(message: Message) -> FormatMessage:
    """Return `message` with the keys that formats read.  Raises ValueError for a wrong role or
    content.
    """
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"messages: role = {role!r}, must be one of {', '.join(ROLES)}")
    clean: dict[str, object] = {"role": role, "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        clean["tool_calls"] = calls
    for key in ("tool_call_id", "name", "reasoning_content"):
        if message.get(key) is not None:
            clean[key] = message[key]
    return cast("FormatMessage", clean)


def text_of(content: object) -> str:
    """Return the text of a content: text, or OpenAI's list of text parts.  Raises ValueError for
    anything else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return encodable(content)
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return encodable("".join(str(part.get("text", "")) for part in content))
    raise ValueError(
        f"messages: content = {str(content)[:80]!r}, must be text or a list of text parts"
    )


def to_specs(tools: Sequence[Schema]) -> list[ToolSpec] | None:
    """Return tools in the form that chat templates get."""
    return cast("list[ToolSpec]", [dict(tool) for tool in tools]) if tools else None
