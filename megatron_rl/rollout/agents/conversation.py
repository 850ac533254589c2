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
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Protocol

from megatron_rl.rollout.agents.branch import Branch, EpisodeOfBranch
from megatron_rl.rollout.agents.chat import Chat, Message, Schema, text_of
from megatron_rl.rollout.agents.episode import ContextFull, Turn
from megatron_rl.rollout.agents.prefill import NO_PREFILL, Prefill, encoded
from megatron_rl.rollout.agents.tools import Tools
from megatron_rl.rollout.client.counters import RolloutCounters

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Node:
    """A sampled turn in its sequence."""

    branch: Branch
    num_prompt_tokens: int
    """Number of tokens of its input."""
    completion: tuple[int, ...]
    """Tokens of the turn."""
    thinking: list[str | None]
    """Thinking of each of the assistant's messages up to this turn, None where there is none or it
    is not known."""
    is_open: bool = True
    """Nothing follows in the sequence yet."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.branch.token_ids[: self.num_prompt_tokens]


@dataclass(eq=False)
class Answer:
    """A turn that is not part of the episode yet."""

    branch: Branch
    digest: bytes
    """Digest of the tools and of the messages that it answers."""
    thinking: list[str | None]
    """Thinking of the assistant's messages among them."""
    prefill: Prefill
    """The beginning of the turn that the request gave."""
    turn: Turn | None = None
    """None while it is sampled."""


class EpisodeOfConversations(EpisodeOfBranch, Protocol):
    """The part of a Session that conversations need."""

    is_refused: bool

    @property
    def is_stopped(self) -> bool: ...
    def branch(self, token_ids: Sequence[int]) -> Branch: ...
    def full(self, why: str) -> ContextFull: ...


class Conversations:
    """The conversations of one episode.  Requests may come in parallel, also for the same
    messages.
    """

    def __init__(
        self, session: EpisodeOfConversations, chat: Chat, counters: RolloutCounters
    ) -> None:
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
        """Sample the model's answer to `messages`; its `reply` is read in the model's format.

        Raises ValueError for messages that the format cannot hold, and what Branch.generate raises.
        """
        with self.reading() as answers:
            return await self.sample(
                answers, messages, tools, max_tokens=max_tokens, stop_token_ids=stop_token_ids
            )

    @contextlib.contextmanager
    def reading(self) -> Iterator[list[Answer]]:
        """Accept the answers that are sampled inside as part of the episode when the block ends.

        Where the block raises, they are dropped and counted.  Where it raises because sampling has
        ended, they are kept: the same request of the run that continues this episode gets them.
        """
        answers: list[Answer] = []
        try:
            yield answers
        except BaseException:
            if not self._session.is_stopped:
                self._drop(answers)
            raise
        for answer in answers:
            self._accept(answer)

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
        to `answers` of `reading`.

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
            branch = self._branch([*tokens, *start.token_ids])
        # added before it is sampled, so that `reading` drops a turn that was cut short
        answers.append(answer := Answer(branch, digests[-1], thinking, start))
        turn = await branch.sample(
            max_tokens=max_tokens, stop_token_ids=stop_token_ids, stops=stops
        )
        assert turn.read is not None  # the session has a chat format
        read = partial(turn.read, chat=chat, tools=tools.schemas, prefill=start)
        answer.turn = replace(turn, tools=tools, read=read, prefill=start.text)
        return answer.turn

    def _accept(self, answer: Answer) -> None:
        branch, turn = answer.branch, answer.turn
        assert turn is not None
        branch.accept(turn)
        # the reply is read here, as the next request names the turn by its message
        reply = turn.reply
        self._counters.tool_calls += len(reply.tool_calls)
        self._counters.tool_errors += sum(
            bool(turn.tools.problem_of(call)) for call in reply.tool_calls
        )
        self._counters.missing_tool_calls += turn.tools.lacks_call(reply.tool_calls)
        start = answer.prefill
        node = Node(
            branch,
            turn.num_prompt_tokens - len(start.token_ids),
            (*start.token_ids, *turn.token_ids),
            [*answer.thinking, reply.reasoning],
        )
        # the next request names the turn by the joined message
        joined = {**reply.message, "content": f"{start.text}{reply.message['content']}"}
        self._nodes.setdefault(chained(answer.digest, joined), []).append(node)

    def _prefill(self, text: str) -> Prefill:
        """Return the beginning of an answer.  Raises ContextFull where no sequence can hold it."""
        longest = (self._session.sequence_limit or (None,))[0]
        start = encoded(text, self._session.tokenizer, longest)
        self._check_length(len(start.token_ids))
        return start

    def _drop(self, answers: Sequence[Answer]) -> None:
        tokens = [tokens for answer in answers if (tokens := answer.branch.drop())]
        self._counters.unread_turns += len(tokens)
        self._counters.unread_tokens += sum(tokens)
        if tokens:
            logger.warning(
                "rollout %s: a request failed, or its client did not read the answer: %d turns of"
                " %d tokens are not learned from",
                self._session.name,
                len(tokens),
                sum(tokens),
            )

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
        return next((node for node in nodes if node.is_open), nodes[0] if nodes else None)

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
        tokens = chat.continuation(node.prompt, node.completion, added, tools.schemas)
        if tokens is None:
            return None
        start.check(chat, [*node.prompt, *node.completion, *tokens])
        tokens += start.token_ids
        # another request has continued this turn: the second one gets a sequence with equal tokens
        if not node.is_open:
            return self._branch([*node.prompt, *node.completion, *tokens])
        node.is_open = False
        node.branch.observe(tokens)
        node.branch.note(added)
        return node.branch

    def _branch(self, token_ids: Sequence[int]) -> Branch:
        """Open a sequence.  Raises ContextFull where no sequence can be that long: a client may
        shorten its history then.
        """
        self._check_length(len(token_ids))
        return self._session.branch(token_ids)

    def _check_length(self, num_tokens: int) -> None:
        session = self._session
        most, setting = session.sequence_limit or (None, "")
        session.is_refused = most is not None and num_tokens >= most
        if session.is_refused:
            raise session.full(f"{num_tokens} tokens of messages are more than {setting} allows")


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
