"""Conversations of an episode: which of its token sequences a list of messages continues.

A client sends the whole list of messages with every request, as OpenAI's API wants it.  The longest turn whose messages are
the beginning of the list is continued from its tokens as they were sampled; where there is none (the first request, a history
that was shortened or edited), or where the format would change what was sampled (agent.history = split), a new sequence
starts from the rendered messages.  Nothing that was sampled is tokenized again inside a sequence.

Messages are compared as they were returned: role, text, names and arguments of tool calls.  Ids of calls may differ, and
thinking may be left out; other thinking than was returned is another history.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from megatron_rl.rollout.agents.chat import Chat, Message, Schema, text_of
from megatron_rl.rollout.agents.tools import Tools
from megatron_rl.rollout.client.counters import RolloutCounters

if TYPE_CHECKING:
    from megatron_rl.rollout.agents.branch import Branch
    from megatron_rl.rollout.agents.episode import Turn
    from megatron_rl.rollout.agents.session import Session


@dataclass(eq=False)
class Node:
    """A sampled turn: the sequence that holds it, the tokens of its input, and its own.

    thinking: of the assistant's messages up to this turn, None where there is none or it is not known.
    is_open: nothing follows in that sequence yet.
    """

    branch: Branch
    num_prompt_tokens: int
    completion: tuple[int, ...]
    thinking: list[str | None]
    is_open: bool = True

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.branch.token_ids[: self.num_prompt_tokens]


class Conversations:
    """Of one episode.  Requests may come in parallel, also for the same messages."""

    def __init__(self, session: Session, chat: Chat, counters: RolloutCounters) -> None:
        self._session, self._chat, self._counters = session, chat, counters
        self._nodes: dict[bytes, list[Node]] = {}  # by the digest of tools and messages

    async def generate(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Turn:
        """The model's answer to `messages`; its `reply` is read in the model's format.

        Raises ValueError for messages that the format cannot hold, and what Branch.generate raises.
        """
        if wrong := [message for message in messages if not isinstance(message, Mapping)]:
            raise ValueError(f"messages: {wrong[0]!r:.80} must be a mapping; an object of openai's has model_dump()")
        if not messages or messages[-1].get("role") == "assistant":
            raise ValueError("messages: must end with a message that is not the assistant's, which the model answers")
        digests = digests_of(messages, tools.schemas)
        node = self._found(messages, digests)
        thinking = thinking_of(messages) if node is None else node.thinking
        branch = None if node is None else self._continued(node, messages, tools.schemas)
        if branch is None:
            branch = self._branch(self._chat.render(messages, tools.schemas))
        turn = await branch.generate(max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        read = partial(branch.read, self._chat, turn.num_prompt_tokens, turn.token_ids, tools.schemas)
        turn = replace(turn, tools=tools, read=read)
        branch.turns[-1] = turn
        reply = turn.reply
        self._counters.tool_calls += len(reply.tool_calls)
        self._counters.tool_errors += sum(bool(tools.problem_of(call)) for call in reply.tool_calls)
        node = Node(branch, turn.num_prompt_tokens, turn.token_ids, [*thinking, reply.reasoning])
        self._nodes.setdefault(chained(digests[-1], reply.message), []).append(node)
        return turn

    def _found(self, messages: Sequence[Message], digests: Sequence[bytes]) -> Node | None:
        """The longest turn that `messages` continue: one that nothing follows yet, where several are equal but for thinking that
        was left out.  None where the last of the assistant's messages was not sampled here."""
        end, given = last_answer(messages), thinking_of(messages)
        equal = [] if end is None else self._nodes.get(digests[end], [])
        nodes = [node for node in equal if all(a in (None, b) for a, b in zip(given, node.thinking, strict=True))]
        return next((node for node in nodes if node.is_open), nodes[0] if nodes else None)

    def _continued(self, node: Node, messages: Sequence[Message], schemas: Sequence[Schema]) -> Branch | None:
        """The sequence of `node` with the messages after it; None where the format would change what was sampled."""
        added = messages[(last_answer(messages) or 0) + 1 :]
        tokens = self._chat.continuation(node.prompt, node.completion, added, schemas)
        if tokens is None:
            return None
        if not node.is_open:
            return self._branch([*node.prompt, *node.completion, *tokens])
        node.is_open = False
        node.branch.observe(tokens)
        node.branch.note(added)
        return node.branch

    def _branch(self, token_ids: Sequence[int]) -> Branch:
        """Raises ContextFull where no sequence can be that long: a client may shorten its history then."""
        session = self._session
        most, setting = session.sequence_limit or (None, "")
        session.is_refused = most is not None and len(token_ids) >= most
        if session.is_refused:
            raise session.full(f"{len(token_ids)} tokens of messages are more than {setting} allows")
        return session.branch(token_ids)


def last_answer(messages: Sequence[Message]) -> int | None:
    return max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=None)


def thinking_of(messages: Sequence[Message]) -> list[str | None]:
    """Of each of the assistant's messages; None where it was left out."""
    return [
        str(message.get("reasoning_content") or "") or None
        for message in messages
        if message.get("role") == "assistant"
    ]


def digests_of(messages: Sequence[Message], schemas: Sequence[Schema]) -> list[bytes]:
    """Digest of the tools and the messages up to and with each."""
    first = chained(b"", [dict(schema) for schema in schemas])
    return list(accumulate(messages, chained, initial=first))[1:]


def chained(digest: bytes, value: object) -> bytes:
    """Digest of everything before and `value`."""
    if isinstance(value, Mapping):
        value = [value.get("role"), text_of(value.get("content")), [call_of(each) for each in as_list(value)]]
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(digest + text.encode(), digest_size=16).digest()


def as_list(message: Mapping[str, object]) -> list[object]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, Sequence) else []


def call_of(call: object) -> list[object]:
    """Name and arguments of a call in a message, however their JSON is written."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"messages: tool call {str(call)[:80]!r}, must have a function with name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else it stays as the model wrote it
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]
