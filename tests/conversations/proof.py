"""Random clients, and the proof that an episode learns what its client read, and nothing else."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np

from megatron_rl.records import Prompt, Rollout
from tests.conversations.model import TEXTS, RandomModel, Sampled
from tests.conversations.protocols import Client, Message

PROTOCOLS = ("chat", "messages", "responses")
STOPS = (("STOP",), ("P tw", "\n\n"), ("e",), ("\U0001f600",), ("zz", " "))
FEW_TOKENS = 5
LONG_NAME = 8 << 20
"""Letters of a model's name, which is in every answer, so that no kernel holds the answer."""


class Program:
    """An agent whose every step is random."""

    def __init__(self, seed: int, model: RandomModel) -> None:
        self.seed, self.draw, self.model = seed, random.Random(seed), model
        self.counts: Counter[str] = Counter()
        self.read: dict[str, tuple[str, ...]] = {}
        """Sample id of each answer that was read -> the stop texts of its request."""
        self.history: list[Message] = []
        self.raw: str | list[int] | None = None
        """The prompt of /v1/completions that continues the episode now; None: messages do."""
        self.protocol = self.draw.choice(PROTOCOLS)
        self.tools = self.draw.random() < 0.6

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def text(self) -> str:
        return "".join(self.draw.choice(TEXTS) for _ in range(self.draw.randrange(1, 4)))

    async def run(self, client: Client) -> None:
        if self.chance(0.5):
            self.history.append({"role": "system", "content": self.text() or "s"})
        self.history.append({"role": "user", "content": self.text() or "u"})
        for _ in range(self.draw.randrange(1, 8)):
            self.counts["turns"] += 1
            await self.turn(client)

    async def turn(self, client: Client) -> None:
        if self.chance(0.15):
            self.protocol = self.draw.choice(PROTOCOLS)
        events = {
            self.ask: 10, self.ask_twice: 1, self.ask_in_parallel: 1, self.hang_up: 1,
            self.cut_stream: 0.7, self.edit: 1, self.compact: 0.5, self.refused: 0.5,
        }  # fmt: skip
        event = self.draw.choices(list(events), list(events.values()))[0]
        self.counts[event.__name__] += 1
        await event(client)

    # Events ---------------------------------------------------------------------------------------

    async def ask(self, client: Client) -> None:
        self.go_on(await self.request(client, self.input(), self.settings()))

    async def ask_twice(self, client: Client) -> None:
        prompt, settings = self.input(), self.settings()
        first = await self.request(client, prompt, settings)
        self.go_on(await self.request(client, prompt, settings) or first)

    async def ask_in_parallel(self, client: Client) -> None:
        """Two requests of the same history, the second with another last message."""
        prompt, settings = self.input(), self.settings()
        other = prompt
        if self.raw is None:
            other = [*self.history[:-1], {"role": "user", "content": self.text() or "o"}]
        requests = [(prompt, settings), (other, settings)]
        self.go_on(await self.requests(client, requests))

    async def hang_up(self, client: Client) -> None:
        """The client ends its request before it is answered, and asks again.

        Where it asked for several answers, all but one are sampled by then.
        """
        prompt, settings = self.input(), self.settings()
        model = self.model
        model.passing = settings.get("n", 1) - 1
        model.waiting.clear()
        model.released.clear()
        model.hold = True
        asked = asyncio.create_task(client.ask(self.door, prompt, **settings))
        waits = asyncio.get_running_loop().run_in_executor(None, model.waiting.wait, 10)
        await asyncio.wait([asked, waits], return_when=asyncio.FIRST_COMPLETED)
        # answers that pass arrive at the endpoint
        await asyncio.sleep(0.05 if settings.get("n", 1) > 1 else 0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        # the endpoint sees that the connection is closed
        await asyncio.sleep(0.02)
        model.hold = False
        model.released.set()
        model.waiting.set()
        await waits
        await asyncio.sleep(0.01)
        self.go_on(await self.request(client, self.input(), self.settings()))

    async def cut_stream(self, client: Client) -> None:
        """The client reads the beginning of a stream, hangs up, and asks again.

        An answer is read when all of it is written: a short one is, as the kernel holds what the
        client leaves.  Of a long one, which no kernel holds, nothing is learned from.
        """
        prompt, settings = self.input(), {**self.settings(), "stream": True, "n": 1}
        if self.door not in ("chat", "completions"):
            del settings["n"]
        is_long, before = self.chance(0.5), set(self.model.answers)
        name = "m" * LONG_NAME if is_long else "m"
        begun = await client.cut(self.door, prompt, model=name, **settings)
        await asyncio.sleep(0.05)  # the endpoint sees that the connection is closed
        new = set(self.model.answers) - before
        assert len(new) == begun, "a refused request was sampled, or an answered one was not"
        self.counts["streams cut before they were written"] += begun and is_long
        if not is_long:
            self.read |= dict.fromkeys(new, settings.get("stops", ()))
        self.go_on(await self.request(client, self.input(), self.settings()))

    async def edit(self, client: Client) -> None:
        """An earlier message changes, or the last ones go."""
        self.raw = None
        users = [i for i, message in enumerate(self.history) if message["role"] == "user"]
        end = self.draw.choice(users)
        self.history = self.history[: end + 1]
        if self.chance(0.5):
            self.history[end] = {"role": "user", "content": self.text() or "e"}
        await self.ask(client)

    async def compact(self, client: Client) -> None:
        """A summary takes the place of the history."""
        self.raw = None
        self.history = [{"role": "user", "content": f"summary: {self.text()}"}]
        await self.ask(client)

    async def refused(self, client: Client) -> None:
        """A request that the endpoint must refuse."""
        asked = [{"role": "user", "content": "x"}]
        assert not await client.ask("chat", asked, tools=False, template={"unknown": 1})

    # Requests -------------------------------------------------------------------------------------

    @property
    def door(self) -> str:
        return self.protocol if self.raw is None else "completions"

    def input(self) -> Any:
        if self.raw is not None:
            return self.raw
        history = list(self.history)
        begins = self.protocol in ("chat", "messages") and self.chance(0.08)
        if begins:  # without spaces at the end, which Anthropic's clients may not send
            history.append({"role": "assistant", "content": self.draw.choice(["Well", "a, ü"])})
        return history

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"stream": self.chance(0.3)}
        if self.door != "completions":
            settings["tools"] = self.tools
        if self.door in ("chat", "completions") and self.chance(0.2):
            settings["n"] = self.draw.randrange(2, 4)
        if self.door != "responses" and self.chance(0.25):
            settings["stops"] = self.draw.choice(STOPS)
        if self.chance(0.1):
            settings["limit"] = FEW_TOKENS
        return settings

    async def request(self, client: Client, prompt: Any, settings: Any) -> list[Message]:
        return await self.requests(client, [(prompt, settings)])

    async def requests(self, client: Client, pairs: Sequence[Any]) -> list[Message]:
        """Send requests side by side, and note what they sampled as read."""
        before = set(self.model.answers)
        self.counts[f"requests of {self.door}"] += len(pairs)
        answers = await asyncio.gather(
            *(client.ask(self.door, prompt, **settings) for prompt, settings in pairs)
        )
        new = set(self.model.answers) - before
        self.counts["requests refused"] += sum(not answer for answer in answers)
        # a refused request samples nothing
        assert len(new) == sum(map(len, answers)), "an answer was sampled twice, or not at all"
        if self.raw is not None:
            inputs = {self.model.answers[name].prompt for name in new}
            assert inputs <= {tuple(self.raw)}, "the model did not read the prompt as it was given"
        self.read |= dict.fromkeys(new, pairs[0][1].get("stops", ()))
        return self.draw.choice([answer for answer in answers if answer] or [[]])

    def go_on(self, answers: list[Message]) -> None:
        """Continue with one of the answers."""
        if not answers:  # as a program does whose history became too long, or is in no format
            self.raw = None
            self.history = [{"role": "user", "content": self.text() or "n"}]
            return
        answer = self.draw.choice(answers)
        if "role" not in answer or ("ids" in answer and self.chance(0.1)):
            more = self.model.tokenizer.encode(self.text() or "w", add_special_tokens=False)
            self.raw = [*answer["ids"], *more]
            return
        self.history.append(answer)
        calls = answer.get("tool_calls") or ()
        for call in calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": self.text() or "r"}
            self.history.append(result)
        if not calls:
            self.history.append({"role": "user", "content": self.text() or "v"})

    def kept(self, name: str, stops: Sequence[str]) -> int:
        """Return the number of an answer's tokens up to the one that completes a stop text."""
        tokens = self.model.answers[name].tokens
        for count in range(1, len(tokens) + 1):
            text = self.model.tokenizer.decode(list(tokens[:count]), skip_special_tokens=True)
            if any(stop in text for stop in stops):
                return count
        return len(tokens)


# Proof ----------------------------------------------------------------------------------------


def violations(rollout: Rollout | None, program: Program) -> Iterable[str]:
    """Yield what an episode learns that its client did not read as the model sampled it, and what
    it does not learn that was read.
    """
    answers = program.model.answers
    by_first: dict[float, list[str]] = {}
    for name in answers:
        by_first.setdefault(float(answers[name].logprobs[0]), []).append(name)
    left = dict(program.read)
    for sequence in () if rollout is None else rollout.sequences:
        done = 0
        for start, end in turns(sequence):
            logprobs = sequence.rollout_logprobs[done : done + end - start]
            done += end - start
            names = by_first.get(float(np.float32(logprobs[0])))
            if names is None:
                yield f"tokens {start} to {end} of a sequence are no answer's"
                continue
            wrong = []
            # a served model may give two answers that begin alike
            for name in [name for name in names if name in left]:
                turn = turn_of(sequence, start, end, logprobs)
                count = program.kept(name, left[name])
                wrong = list(differences(name, turn, answers[name], count))
                if not wrong:
                    break
            else:
                yield from wrong or [f"{names}: learned twice, or not read"]
                continue
            del left[name]
        if done != len(sequence.rollout_logprobs):
            yield "a sequence has log-probs of no turn"
    for name in left:
        yield f"{name}: read, but not learned from"


class Turn(NamedTuple):
    """A turn of a sequence: what is before it, its tokens, their log-probs and experts."""

    before: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    routes: np.ndarray | None


def turn_of(sequence: Rollout, start: int, end: int, logprobs: np.ndarray) -> Turn:
    tokens, routes = sequence.tokens, sequence.routed_experts
    # the row of a token has the experts of the pass that sampled the next one
    rows = None if routes is None else routes[start - 1 : end - 1]
    return Turn(tokens[:start], tokens[start:end], logprobs, rows)


def differences(name: str, turn: Turn, sampled: Sampled, count: int) -> Iterable[str]:
    """Yield how a turn differs from the first `count` tokens of an answer."""
    if tuple(turn.tokens) != sampled.tokens[:count]:
        yield f"{name}: tokens {turn.tokens}, sampled {sampled.tokens[:count]}"
    elif not np.array_equal(turn.logprobs, sampled.logprobs[:count]):
        yield f"{name}: other log-probs"
    if tuple(turn.before) != sampled.prompt:
        yield f"{name}: the tokens before it are not its input"
    first = len(sampled.prompt) - 1
    if turn.routes is None or not np.array_equal(turn.routes, sampled.routes[first:][:count]):
        yield f"{name}: other experts"


def turns(sequence: Rollout) -> Iterable[tuple[int, int]]:
    starts = [sequence.prompt_length, *(end for _, end in sequence.environment)]
    ends = [*(start for start, _ in sequence.environment), len(sequence.tokens)]
    return zip(starts, ends, strict=True)


async def converse(session: Any, prompt: Prompt) -> Any:
    """The agent function: the conversation that PROGRAMS has for the prompt."""
    program = PROGRAMS[prompt.id]
    endpoint = await session.open_endpoint()
    async with httpx.AsyncClient(timeout=60) as http:
        client = Client(http, endpoint.root_url, endpoint.api_key)
        await program.run(client)
    if not program.read:
        before = set(program.model.answers)
        await session.generate(max_tokens=1)  # an episode has at least one turn
        program.read = dict.fromkeys(set(program.model.answers) - before, ())
    program.counts["sequences"] += 1
    return session.finish(1.0)


PROGRAMS: dict[str, Program] = {}
