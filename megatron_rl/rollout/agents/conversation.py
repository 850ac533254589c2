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
from itertools import accumulate

from megatron_rl.rollout.agents.branch import Branch
from megatron_rl.rollout.agents.chat import Chat, Message, Schema, text_of
from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.prefill import NO_PREFILL, Prefill, encoded
from megatron_rl.rollout.agents.sequences import Answer, EpisodeOfSequences, Place, Sequences
from megatron_rl.rollout.agents.tools import Tools


@dataclass(eq=False)
class Node:
    """A sampled turn, as messages name it."""

    place: Place
    num_prompt_tokens: int
    """Number of tokens of its input, without the beginning that the request gave."""
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


class Conversations:
    """The conversations of one episode.  Requests may come in parallel, also for the same
    messages.
    """

    def __init__(self, session: EpisodeOfSequences, sequences: Sequences, chat: Chat) -> None:
        self._session, self._sequences, self._chat = session, sequences, chat
        self._nodes: dict[bytes, list[Node]] = {}  # by the digest of tools and messages

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
        if wrong := [message for message in messages if not isinstance(message, Mapping)]:
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
        digests = digests_of(messages, tools.schemas, chat.template)
        node = self._continued_turn(messages, digests)
        thinking = thinking_of(messages) if node is None else node.thinking
        branch = None if node is None else self._continued(node, messages, tools, start, chat)
        if branch is None:
            tokens = chat.render(messages, tools.schemas)
            start.check(chat, tokens)
            branch = self._sequences.begin([*tokens, *start.token_ids])
        asked = Asked(digests[-1], thinking, start)
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
        node = Node(
            place,
            turn.num_prompt_tokens - len(start.token_ids),
            [*asked.thinking, reply.reasoning],
        )
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
        added = messages[(last_answer(messages) or 0) + 1 :]
        before = node.place.tokens
        prompt, completion = before[: node.num_prompt_tokens], before[node.num_prompt_tokens :]
        tokens = chat.continuation(prompt, completion, added, tools.schemas)
        if tokens is None:
            return None
        start.check(chat, [*before, *tokens])
        branch = self._sequences.extend(node.place, [*tokens, *start.token_ids])
        # the messages of a new sequence are its start
        if branch is node.place.branch:
            branch.note(added)
        return branch


def last_answer(messages: Sequence[Message]) -> int | None:
    return max(
        (i for i, message in enumerate(messages) if message.get("role") == "assistant"),
        default=None,
    )


def thinking_of(messages: Sequence[Message]) -> list[str | None]:
    """Return the thinking of each of the assistant's messages; None where it was left out."""
    return [
        str(message.get("reasoning_content") or "") or None
        for message in messages
        if message.get("role") == "assistant"
    ]


def digests_of(
    messages: Sequence[Message], schemas: Sequence[Schema], template: str
) -> list[bytes]:
    """Return for each message the digest of the tools, of the chat_template_kwargs and of the
    messages up to it, itself included.
    """
    first = chained(b"", [*map(dict, schemas), template])
    return list(accumulate(messages, chained, initial=first))[1:]


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
    """Return name and arguments of a call in a message, in whatever way their JSON is written."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(
            f"messages: tool call {str(call)[:80]!r}, must have a function with name and arguments"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # where that fails, they stay as the model wrote them
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]
