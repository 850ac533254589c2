"""Conversations of an episode: which of its token sequences a list of messages continues.

A client sends the whole list of messages with every request, as OpenAI's API requires.  The longest
turn whose messages are the beginning of the list is continued from its tokens as they were sampled.
A new sequence starts from the rendered messages where there is no such turn (the first request, a
history that was shortened or edited), or where the format would change sampled tokens
(agent.history = split).  Sampled tokens are never tokenized again inside a sequence.

Messages are compared as they were returned: role, text, names and arguments of tool calls.  Ids of
calls may differ, and thinking may be left out; other thinking than was returned is another history.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megatron_rl.rollout.agents.branch import Branch
from megatron_rl.rollout.agents.chat import Chat, Message, text_of
from megatron_rl.rollout.agents.episode import Input, Turn
from megatron_rl.rollout.agents.prefill import NO_PREFILL, Prefill, encoded
from megatron_rl.rollout.agents.sequences import Answer, EpisodeOfSequences, Place, Sequences
from megatron_rl.rollout.agents.tools import Tools


@dataclass(eq=False)
class Node:
    """A sampled turn, as messages name it."""

    place: Place
    asked_for: Input
    """Its input, without the beginning that the request gave."""
    thinking: list[str | None]
    """Thinking of each of the assistant's messages up to this turn, None where there is none or it
    is not known."""


@dataclass(frozen=True)
class Asked:
    """The messages that a turn answers."""

    digest: bytes
    """Digest of the tools and of the messages."""
    thinking: list[str | None]
    """Thinking of the assistant's messages among them."""
    prefill: Prefill
    """The beginning of the turn that the request gave."""
    window: int
    """Input.window of the turn."""


class Digested(NamedTuple):
    """A message of a request."""

    before: bytes
    """Digest of the tools, of the chat_template_kwargs and of the messages before it."""
    text: tuple[object, str] | None
    """Role and content, None where it has anything else."""
    digest: bytes
    """Digest of all that, and of the message."""


class Conversations:
    """The conversations of one episode.  Requests may come in parallel, also for the same
    messages.
    """

    def __init__(self, session: EpisodeOfSequences, sequences: Sequences, chat: Chat) -> None:
        self._session, self._sequences, self._chat = session, sequences, chat
        self._nodes: dict[bytes, list[Node]] = {}  # by the digest of tools and messages
        self._digested: list[Digested] = []  # of the last request

    async def generate(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Turn:
        """Sample the model's answer to `messages`; its `reply` is read in the model's format.

        Raises ValueError for messages that the format cannot hold, and what Branch.generate raises.
        """
        with self._sequences.reading() as answers:
            return await self.sample(
                answers, messages, tools, max_tokens=max_tokens, stop_token_ids=stop_token_ids
            )

    async def sample(
        self,
        answers: list[Answer],
        messages: Sequence[Message],
        tools: Tools,
        *,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        prefill: str = "",
        template: Mapping[str, object] | None = None,
    ) -> Turn:
        """Sample a turn as `generate` does, which also ends at one of the texts `stops`, and add it
        to `answers` of Sequences.reading.

        prefill: text with which the answer begins; the turn is what follows it.  template:
        chat_template_kwargs; with others than a turn had, messages do not continue it, as they may
        change how its input is written.
        """
        if wrong := [message for message in messages if not is_mapping(message)]:
            raise ValueError(
                f"messages: {wrong[0]!r:.80} must be a mapping; an object of openai's has"
                " model_dump()"
            )
        if not messages or messages[-1].get("role") == "assistant":
            raise ValueError(
                "messages: must end with a message that is not the assistant's, which the model"
                " answers"
            )
        start = self._prefill(prefill) if prefill else NO_PREFILL
        chat = self._chat.with_template(template or {})
        first = chained(b"", [*map(dict, tools.schemas), chat.template])
        self._digested = digested(messages, first, self._digested)
        digests = [message.digest for message in self._digested]
        node = self._continued_turn(messages, digests)
        thinking = thinking_of(messages) if node is None else node.thinking
        branch = None if node is None else self._continued(node, messages, tools, start, chat)
        if branch is None:
            tokens = chat.render(messages, tools.schemas)
            start.check(chat, tokens)
            branch = self._sequences.begin([*tokens, *start.token_ids])
        asked = Asked(digests[-1], thinking, start, branch.next_input.window)
        # added before it is sampled, so that `reading` drops a turn that was cut short
        answers.append(answer := Answer(branch, partial(self._accepted, asked)))
        turn = await branch.sample(
            max_tokens=max_tokens, stop_token_ids=stop_token_ids, stops=stops
        )
        assert turn.read is not None  # the session has a chat format
        read = partial(turn.read, chat=chat, tools=tools.schemas, prefill=start)
        answer.turn = replace(turn, tools=tools, read=read, prefill=start.text)
        return answer.turn

    def _accepted(self, asked: Asked, place: Place, turn: Turn) -> None:
        # the reply is read here, as the next request names the turn by its message
        reply, counters, start = turn.reply, self._session.counters, asked.prefill
        counters.tool_calls += len(reply.tool_calls)
        counters.tool_errors += sum(bool(turn.tools.problem_of(call)) for call in reply.tool_calls)
        counters.missing_tool_calls += turn.tools.lacks_call(reply.tool_calls)
        asked_for = Input(asked.window, turn.num_prompt_tokens - len(start.token_ids))
        node = Node(place, asked_for, [*asked.thinking, reply.reasoning])
        # the next request names the turn by the joined message
        joined = {**reply.message, "content": f"{start.text}{reply.message['content']}"}
        self._nodes.setdefault(chained(asked.digest, joined), []).append(node)

    def _prefill(self, text: str) -> Prefill:
        """Return the beginning of an answer.  Raises ContextFull where no sequence can hold it."""
        longest = (self._session.sequence_limit or (None,))[0]
        start = encoded(text, self._session.tokenizer, longest)
        self._sequences.check_length(len(start.token_ids))
        return start

    def _continued_turn(self, messages: Sequence[Message], digests: Sequence[bytes]) -> Node | None:
        """Return the longest turn that `messages` continue, None where the last of the assistant's
        messages was not sampled here.

        Several turns may be equal but for thinking that was left out: one that nothing follows yet
        is preferred.
        """
        end, thinking = last_answer(messages), thinking_of(messages)
        equal = [] if end is None else self._nodes.get(digests[end], [])
        # a message without thinking is equal to one with any
        nodes = [
            node
            for node in equal
            if all(a in (None, b) for a, b in zip(thinking, node.thinking, strict=True))
        ]
        return next((node for node in nodes if node.place.is_open), nodes[0] if nodes else None)

    def _continued(
        self,
        node: Node,
        messages: Sequence[Message],
        tools: Tools,
        start: Prefill,
        chat: Chat,
    ) -> Branch | None:
        """Return the sequence of `node` with the messages after it and the beginning of the answer;
        None where the format would change sampled tokens.
        """
        # there is an answer, as `node` is the last one
        written = chat.with_written_ids(messages)  # answers of calls name those before
        added = written[(last_answer(messages) or 0) + 1 :]
        (window, begin), sequence = node.asked_for, node.place.branch
        prompt, completion = sequence.span(window, begin), sequence.span(begin, node.place.end)
        tokens = chat.continuation(prompt, completion, added, tools.schemas)
        if tokens is None:
            return None
        start.check(chat, [*prompt, *completion, *tokens])
        branch = self._sequences.extend(node.place, [*tokens, *start.token_ids])
        # the messages of a new sequence are its start
        if branch is node.place.branch:
            branch.note(added)
        return branch


def is_mapping(message: object) -> bool:
    # the type first, as isinstance takes longer
    return type(message) is dict or isinstance(message, Mapping)


def last_answer(messages: Sequence[Message]) -> int | None:
    places = range(len(messages) - 1, -1, -1)
    return next((i for i in places if messages[i].get("role") == "assistant"), None)


def thinking_of(messages: Sequence[Message]) -> list[str | None]:
    """Return the thinking of each of the assistant's messages; None where it was left out."""
    return [
        str(message.get("reasoning_content") or "") or None
        for message in messages
        if message.get("role") == "assistant"
    ]


def digested(
    messages: Sequence[Message], first: bytes, known: Sequence[Digested]
) -> list[Digested]:
    """Return the digests of the messages, of which those that an earlier request had are `known`.

    first: digest of the tools and of the chat_template_kwargs.
    """
    digests: list[Digested] = []
    for index, message in enumerate(messages):
        before = digests[-1].digest if digests else first
        content = message.get("content")
        # only a text cannot have been changed in place since then
        text = None
        if isinstance(content, str) and not message.get("tool_calls"):
            text = (message.get("role"), content)
        same = known[index] if index < len(known) else None
        if text is None or same is None or (same.before, same.text) != (before, text):
            same = Digested(before, text, chained(before, message))
        digests.append(same)
    return digests


def chained(digest: bytes, value: object) -> bytes:
    """Return the digest of `value` after everything that `digest` stands for."""
    if isinstance(value, Mapping):
        value = [
            value.get("role"),
            text_of(value.get("content")),
            [call_of(call) for call in calls_of(value)],
        ]
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(digest + text.encode(), digest_size=16).digest()


def calls_of(message: Mapping[str, object]) -> list[object]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, Sequence) else []


def call_of(call: object) -> list[object]:
    """Return name and arguments of a call in a message, in whatever way their JSON is written: 3.0
    is 3, as JavaScript writes it.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(
            f"messages: tool call {str(call)[:80]!r}, must have a function with name and arguments"
        )
    arguments = function.get("arguments")
    # where that fails, they stay as the model wrote them
    with contextlib.suppress(ValueError, RecursionError):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
        arguments = json.loads(text, parse_float=number)
    return [function.get("name"), arguments]


def number(text: str) -> float:
    """Return the number of a JSON text, an int where it is whole."""
    value = float(text)
    return int(value) if value.is_integer() else value
