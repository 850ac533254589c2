"""Wrong requests of every protocol to the endpoint, and what they must not do.

    OMP_NUM_THREADS=1 python -m tests.conversations.fuzz [--num 20000] [--seed 0]

A block of requests is an episode, beside a neighbour: another episode, which asks right requests in
the meantime.  A violation is an answer that is neither 200 nor 4xx in the form of its protocol, or
none in time; an error that the endpoint logs; a refused request that is sampled or learned from; an
answered one that is not learned from; an answer of the neighbour that is not the one without the
fuzz; a right request that is not answered afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.client import RolloutClient
from tests.conversations.__main__ import LONGEST, MOST_SHOWN, client_of
from tests.conversations.model import FORMATS, RandomModel, universal_tokenizer
from tests.conversations.mutations import PATHS, Sent, mutated, valid
from tests.conversations.proof import differences, turn_of, turns
from tests.conversations.protocols import TOOLS, events
from tests.fake_server import VERSION, FakeServer

NEIGHBOUR = "neighbour"
BLOCK, AT_ONCE = 200, 8
"""Requests of an episode, and of them side by side."""
PAUSE_SECONDS = 0.01
"""Time between two requests of the neighbour."""
DEADLINE_SECONDS = 20.0
OPENAI_ERROR = {"message", "type", "param", "code"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=20_000, help="requests of each protocol")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--protocols", nargs="+", default=list(PATHS))
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    fuzz = Fuzz()
    fuzz.run(arguments.num, arguments.seed, arguments.protocols, tuple(arguments.formats))
    for name, count in sorted(fuzz.counts.items()):
        print(f"{name:36s} {count:10,}")
    for name, seconds in (("alone", fuzz.seconds_alone), ("beside the fuzz", fuzz.seconds)):
        times = sorted(seconds)
        for part, place in (("median", len(times) // 2), ("slowest", -1)):
            print(f"{f'neighbour {name}, {part}, ms':36s} {1000 * times[place]:10,.0f}")
    print(f"{'violations':36s} {len(fuzz.wrong):10,}")
    print("\n".join(fuzz.wrong[:MOST_SHOWN]))
    return bool(fuzz.wrong)


class FuzzedModel(RandomModel):
    """The neighbour's answers depend on what it asks alone: all that it asks has its name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._name = str(self.tokenizer.encode(NEIGHBOUR, add_special_tokens=False))[1:-1]
        self.of_neighbour: set[str] = set()

    def seed_of(self, prompt: list[int], sample_id: str) -> int:
        if self._name in str(prompt):
            self.of_neighbour.add(sample_id)
            return zlib.crc32(str(prompt).encode())
        return super().seed_of(prompt, sample_id)


class Fuzz:
    """All blocks, and their sums."""

    def __init__(self, questions: int = 100) -> None:
        """questions: most requests of the neighbour in a block."""
        self.questions = questions
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []
        """Times of the neighbour's answers."""
        self.seconds_alone: list[float] = []
        self.dead_key = "x" * 43
        """The key of an episode that has ended."""

    def run(
        self,
        num: int,
        seed: int,
        protocols: Iterable[str] = tuple(PATHS),
        formats: tuple[str, ...] = FORMATS,
        block: int = BLOCK,
    ) -> None:
        """Send `num` requests of each protocol."""
        tokenizer = universal_tokenizer(formats)
        blocks = list(range(0, num, block))
        for index, name in enumerate(formats):
            model = FuzzedModel(tokenizer)
            with FakeServer("ok", source=model.sample) as server:
                client = client_of(server.url, name, tokenizer, f"{__name__}:converse")
                alone = Block("chat", seed, 0, model, self)
                alone.play(client)
                self.seconds_alone += alone.seconds
                for start in blocks[index :: len(formats)]:
                    for protocol in protocols:
                        size = min(block, num - start)
                        played = Block(protocol, seed + start, size, model, self, alone.answers)
                        where = f"{protocol}, {name}, --seed {seed + start} --num {size}"
                        self.wrong += [f"{where}: {text}" for text in played.play(client)]
                        self.seconds += played.seconds
                        server.requests.clear()
                        server.served.clear()


@dataclass(eq=False)
class Block:
    """An episode of wrong requests, and its neighbour."""

    protocol: str
    seed: int
    num: int
    """Number of wrong requests; 0: the neighbour is alone."""
    model: FuzzedModel
    fuzz: Fuzz
    expected: list[Any] | None = None
    """The neighbour's answers without the fuzz."""
    answers: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    read: dict[str, bool] = field(default_factory=dict)
    """Sample id of each answer that was read -> True where a stop text may have cut it."""
    wrong: list[str] = field(default_factory=list)

    def play(self, client: RolloutClient) -> list[str]:
        """Return the violations."""
        self.model.answers, self.model.of_neighbour, self.model.seed = {}, set(), self.seed
        self.draw, self.done = random.Random(f"{self.protocol} {self.seed}"), asyncio.Event()
        ids = tuple(self.model.tokenizer.encode("hi"))
        names = [self.protocol, NEIGHBOUR]
        prompts = [Prompt(id=name, text="hi", token_ids=ids, label="") for name in names]
        BLOCKS[:] = [self]
        with logged_errors() as errors:
            try:
                groups = client.generate(
                    prompts, 1, policy_version=VERSION, temperature=1.0, max_tokens=LONGEST,
                    stop_token_ids=(),
                )  # fmt: skip
            # whatever an episode fails with is a violation, and the next blocks are still tried
            except Exception as error:
                return [*self.wrong, *errors, f"{type(error).__name__}: {error}"]
        for group in groups:
            self.wrong += self.unproven(group.rollouts[0], group.prompt.id)
        if self.expected is not None and self.answers != self.expected[: len(self.answers)]:
            self.wrong.append("the neighbour got other answers")
        self.fuzz.counts["answers of neighbours"] += len(self.answers)
        return [*self.wrong, *errors]

    async def send_all(self, http: aiohttp.ClientSession, root: str, key: str) -> None:
        """Send the wrong requests, a few at a time, and then one that is right."""
        keys = {"Authorization": f"Bearer {key}", "x-api-key": key}
        waiting = [mutated(self.protocol, self.draw, self.fuzz.dead_key) for _ in range(self.num)]
        while waiting:
            batch = [waiting.pop() for _ in range(min(AT_ONCE, len(waiting)))]
            await self.send(http, root, keys, batch)
        if self.protocol in PATHS:
            body = json.dumps(valid(self.protocol, self.draw)).encode()
            right = Sent(PATHS[self.protocol], body)
            if await self.send(http, root, keys, [right]) == 0:
                self.wrong.append("a right request was not answered after the fuzz")
        self.fuzz.dead_key = key
        self.done.set()

    async def send(
        self, http: aiohttp.ClientSession, root: str, keys: Mapping[str, str], batch: list[Sent]
    ) -> int:
        """Send requests side by side, and note what they sampled as read; return its number."""
        before = self.sampled()
        numbers = await asyncio.gather(*(self.send_one(http, root, keys, sent) for sent in batch))
        new = self.sampled() - before
        if len(new) != sum(numbers):
            sent = "\n  ".join(map(str, batch))
            self.wrong.append(f"{len(new)} answers sampled, {sum(numbers)} read:\n  {sent}")
        self.read |= dict.fromkeys(new, any(b"stop" in sent.body for sent in batch))
        self.fuzz.counts[f"requests of {self.protocol}"] += len(batch)
        return len(new)

    def sampled(self) -> set[str]:
        return set(self.model.answers) - self.model.of_neighbour

    async def send_one(
        self, http: aiohttp.ClientSession, root: str, keys: Mapping[str, str], sent: Sent
    ) -> int:
        """Send a request; return the number of turns in its answer."""
        headers = {**sent.headers, **(keys if sent.has_key else {})}
        try:
            async with (
                asyncio.timeout(DEADLINE_SECONDS),
                http.request(
                    sent.method, URL(root + sent.path, encoded=True), data=sent.body,
                    headers=headers,
                ) as response,
            ):  # fmt: skip
                status, text = response.status, await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            self.wrong.append(f"no answer: {type(error).__name__}: {error}: {sent}")
            return 0
        self.fuzz.counts[f"answers with {status}"] += 1
        try:
            if sent.method == "HEAD":
                assert status == 200 or 400 <= status < 499, status
                return 0
            if status == 200:
                return num_turns(text)
            check_error(status, text, is_anthropic=sent.path.startswith(PATHS["messages"]))
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            self.wrong.append(f"{status} {text[:300]!r}: {error!r}: {sent}")
        return 0

    async def ask_beside(self, http: aiohttp.ClientSession, root: str, key: str) -> None:
        """Ask as the neighbour does, until the fuzz has ended."""
        history: list[Any] = []
        for number in range(self.fuzz.questions):
            if number % 5 == 0:
                history = []
            history.append({"role": "user", "content": f"{NEIGHBOUR} {number}"})
            body = {"messages": history, "tools": TOOLS, "return_token_ids": True}
            started = time.monotonic()
            async with http.post(
                f"{root}{PATHS['chat']}", json=body, headers={"Authorization": f"Bearer {key}"}
            ) as response:
                answer = await response.json()
            self.seconds.append(time.monotonic() - started)
            if response.status != 200:
                self.wrong.append(f"the neighbour was refused: {answer}")
                return
            self.answers.append(answer["choices"])
            history.append(answer["choices"][0]["message"])
            if self.num and self.done.is_set():
                return
            await asyncio.sleep(PAUSE_SECONDS)

    def unproven(self, rollout: Rollout | None, name: str) -> Iterator[str]:
        """Yield what the episode learns and was not read, and what was read and is not learned."""
        answers = self.model.answers
        left = set(self.model.of_neighbour) if name == NEIGHBOUR else set(self.read)
        by_first = {float(answers[key].logprobs[0]): key for key in left}
        for sequence in () if rollout is None else rollout.sequences:
            done = 0
            for start, end in turns(sequence):
                logprobs = sequence.rollout_logprobs[done : done + end - start]
                done += end - start
                key = by_first.get(float(logprobs[0]), "")
                if key not in left:
                    yield f"{name}: tokens {start} to {end} are no answer that was read"
                    continue
                left.discard(key)
                whole = len(answers[key].tokens)
                count = end - start if self.read.get(key) else whole
                turn = turn_of(sequence, start, end, logprobs)
                yield from differences(key, turn, answers[key], min(count, whole))
        yield from (f"{key}: read, but not learned from" for key in left)


def num_turns(text: str) -> int:
    """Return the number of turns in an answer with status 200.  Raises for one in no form."""
    if text.startswith(("data:", "event:")):
        parts = events(text)
        last = parts[-1]
        if "choices" in last:
            assert text.endswith("data: [DONE]\n\n")
            choices = [choice for part in parts for choice in part["choices"]]
            return sum(choice["finish_reason"] is not None for choice in choices)
        assert last["type"] in ("message_stop", "response.completed", "response.incomplete"), last
        return 1
    answer = json.loads(text)
    if answer.get("object") == "list" or "input_tokens" in answer:
        return 0
    if "choices" in answer:
        return len(answer["choices"])
    assert answer.get("type") == "message" or answer["object"] == "response", answer
    return 1


def check_error(status: int, text: str, *, is_anthropic: bool) -> None:
    """Raise where an answer is no error in the form of its protocol."""
    assert 400 <= status < 499, "status"
    assert "Traceback" not in text and 'File \\"' not in text, "a traceback"
    body = json.loads(text)
    error = body["error"]
    assert error["message"] and isinstance(error["message"], str), "no message"
    assert isinstance(error["type"], str), "no type"
    if is_anthropic:
        assert body["type"] == "error" and body.keys() == {"type", "error"}, "form"
        assert error.keys() <= {"type", "message", "code"}, "form"
    else:
        assert body.keys() == {"error"} and error.keys() == OPENAI_ERROR, "form"


class logged_errors(logging.Handler):
    """Collect what is logged as an error, by the endpoint's server or by the event loop."""

    def __enter__(self) -> list[str]:
        self.texts: list[str] = []
        logging.getLogger().addHandler(self)
        return self.texts

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:
            return
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            lines = traceback.format_exception(record.exc_info[1], limit=-6)
            text += f": {''.join(lines)[-3000:]}"
        self.texts.append(f"logged: {text}")


async def converse(session: Any, prompt: Prompt) -> Any:
    """The agent function: the wrong requests, or those of the neighbour."""
    (block,) = BLOCKS
    endpoint = await session.open_endpoint()
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        is_neighbour = prompt.id == NEIGHBOUR
        act = block.ask_beside if is_neighbour else block.send_all
        await act(http, endpoint.root_url, endpoint.api_key)
    return session.finish(1.0)


BLOCKS: list[Block] = []
"""The block that runs now."""

if __name__ == "__main__":
    # the agent function is in the module that has this name
    from tests.conversations import fuzz as module

    sys.exit(module.main())
