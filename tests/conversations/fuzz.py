"""Broken requests of every protocol, and what the endpoint did wrong with them.

    OMP_NUM_THREADS=1 python -m tests.conversations.fuzz [--num 20000] [--seed 0]

A request is a valid one with a few random changes of its JSON, bytes, key, path or method.  Wrong
is: no answer within a minute; a status other than 200 and 4xx; an error that does not have the
form of its protocol; a refused request that was sampled from; what an episode learns that its
client did not read, and the opposite; an episode that no valid request can end.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from tests.conversations.__main__ import MOST_SHOWN, client_of, converse
from tests.conversations.model import RandomModel, universal_tokenizer
from tests.conversations.proof import Program
from tests.conversations.protocols import FUNCTIONS, TOOLS, Client
from tests.fake_server import FakeServer

FORMAT = "qwen3"
IN_AN_EPISODE = 50
DEEP = 2000
LATE_SECONDS = 0.05
"""Time for the answers of a request that was refused to arrive."""
LONG = "long " * 20_000
PATHS = {
    "chat": "chat/completions",
    "completions": "completions",
    "messages": "messages",
    "responses": "responses",
}
JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf"),
    "", "x", "\x00", "\ud800", "\U0001f600", "assistant", "tool", "developer", "image_url",
    "required", [], {}, [None], [[]], {"type": "text"}, {"type": "image_url"}, {"a": {"b": [1]}},
    {"type": "input_image", "image_url": "file:///etc/passwd"}, {"type": "function"}, [1, 2, 3],
    [2**31], [-5], {"type": "tool_result", "tool_use_id": "no", "content": []},
)  # fmt: skip
NAMES = ("n", "stop", "seed", "logprobs", "temperature", "top_p", "tools", "tool_choice", "stream",
         "max_tokens", "response_format", "logit_bias", "echo", "suffix", "system", "thinking",
         "input", "prompt", "previous_response_id", "store", "metadata", "chat_template_kwargs",
         "return_token_ids", "unknown")  # fmt: skip


def valid_requests() -> dict[str, list[dict[str, Any]]]:
    """Requests that the endpoint serves, by protocol."""
    call = {"name": "search", "arguments": '{"q": "x y"}'}
    history = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "a",
         "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]  # fmt: skip
    blocks = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "x y"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "r"},
            {"type": "text", "text": "v"}]},
    ]  # fmt: skip
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "function_call", "call_id": "c1", **call},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
    ]
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    flat = [{"type": "function", **each, "strict": False} for each in FUNCTIONS]
    return {
        "chat": [
            {"model": "m", "messages": [{"role": "user", "content": "u"}], "n": 2, "stop": ["e"]},
            {"model": "m", "messages": history, "tools": TOOLS, "stream": True, "max_tokens": 50},
        ],
        "completions": [
            {"model": "m", "prompt": "u", "max_tokens": 50, "stop": "e"},
            {"model": "m", "prompt": [[5, 9, 2]], "max_tokens": 50, "return_token_ids": True},
        ],
        "messages": [
            {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "u"}]},
            {"model": "m", "max_tokens": 50, "messages": blocks, "tools": tools, "stream": True,
             "system": [{"type": "text", "text": "s"}], "stop_sequences": ["e"]},
        ],
        "responses": [
            {"model": "m", "input": "u", "instructions": "s", "max_output_tokens": 50},
            {"model": "m", "input": items, "tools": flat, "stream": True},
        ],
    }  # fmt: skip


VALID = valid_requests()


class Change:
    """Random changes of a request."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def of_json(self, body: dict[str, Any]) -> dict[str, Any]:
        body = copy.deepcopy(body)
        for _ in range(self.draw.choice((1, 1, 1, 2, 3))):
            place, key = self.draw.choice([*places(body), (body, self.draw.choice(NAMES))])
            kind = self.draw.choice(("delete", "junk", "junk", "junk", "wrap", "twice", "long"))
            if kind == "delete" and key in list(keys(place)):
                del place[key]
            elif kind == "wrap" and key in list(keys(place)):
                place[key] = self.draw.choice(([place[key]], {"type": place[key]}))
            elif kind == "twice" and isinstance(place, list):
                place.insert(self.draw.randrange(len(place) + 1), copy.deepcopy(place[key]))
            elif kind == "long" and self.draw.random() < 0.1:
                place[key] = self.draw.choice(
                    (LONG, [1] * 5000, dict.fromkeys(map(str, range(500))))
                )
            else:
                place[key] = copy.deepcopy(self.draw.choice(JUNK))
        return body

    def of_bytes(self, content: bytes) -> bytes:
        kind = self.draw.randrange(6)
        cut = self.draw.randrange(len(content))
        if kind == 0:
            return content[:cut]
        if kind == 1:
            return content[:cut] + bytes([self.draw.randrange(256)]) + content[cut + 1 :]
        if kind == 2:  # a key twice: the last one counts
            return b'{"messages": 3, "input": [], "prompt": null, ' + content[1:]
        if kind == 3:
            return b"[" * DEEP + content + b"]" * DEEP
        if kind == 4:
            return self.draw.choice((b"", b"null", b"[]", b'"x"', b"\xff\xfe{}", b"{}{}"))
        return b'{"messages": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}"


def keys(place: Any) -> Iterator[Any]:
    yield from place if isinstance(place, dict) else range(len(place))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) inside a value."""
    if isinstance(value, dict | list):
        for key in keys(value):
            yield value, key
            yield from places(value[key])


class Fuzz(Program):
    """A client of one protocol that sends `num` broken requests, and a valid one at the end."""

    def __init__(self, seed: int, model: RandomModel, protocol: str, num: int) -> None:
        super().__init__(seed, model)
        self.protocol, self.num = protocol, num
        self.change = Change(self.draw)
        self.wrong: list[str] = []

    async def run(self, client: Client) -> None:
        for _ in range(self.num):
            await self.send(client)
        before = set(self.model.answers)
        if not await client.ask("chat", [{"role": "user", "content": "u"}], tools=False):
            self.wrong.append("a valid request was refused at the end")
        self.read |= dict.fromkeys(set(self.model.answers) - before, ())

    async def send(self, client: Client) -> None:
        content = json.dumps(self.change.of_json(self.draw.choice(VALID[self.protocol]))).encode()
        if self.chance(0.1):
            content = self.change.of_bytes(content)
        method, path, headers = "POST", PATHS[self.protocol], None
        if self.chance(0.05):
            headers = self.draw.choice(
                ({"x": "y"}, {"Authorization": "Bearer no"}, {"Authorization": "Basic a"},
                 {"x-api-key": "é".encode()}, {"Authorization": "Bearer " + "k" * 5000})
            )  # fmt: skip
        elif self.chance(0.03):
            method = self.draw.choice(("GET", "PUT", "DELETE", "PATCH"))
        elif self.chance(0.03):
            path += self.draw.choice(("/", "?x=1", "/count_tokens", "%00", "/x" * 100))
        before = set(self.model.answers)
        shown = f"{method} {path} {content[:300]!r}"
        try:
            answer = await client.send(method, path, content, headers)
        except httpx.HTTPError as error:
            self.wrong.append(f"{error!r} to {shown}")
            return
        new = set(self.model.answers) - before
        self.counts[f"{self.protocol}: {answer.status_code}"] += 1
        self.wrong += [
            f"{what}: {answer.text[:200]!r} to {shown}" for what in problems(answer, path)
        ]
        if answer.status_code != 200:
            await asyncio.sleep(LATE_SECONDS if has_several(content) else 0)
            if new and not has_several(content):
                self.wrong.append(f"a refused request was sampled from: {shown}")
            return
        self.read |= dict.fromkeys(new, stops_of(self.protocol, content))


def problems(answer: httpx.Response, path: str) -> Iterator[str]:
    """Yield what is wrong with the form of an answer."""
    status = answer.status_code
    if status != 200 and not 400 <= status < 500:
        yield f"status {status}"
    if "Traceback" in answer.text or 'File "' in answer.text:
        yield "a traceback"
    if status == 200:
        return
    try:
        body = answer.json()
        error = body["error"]
        is_right = isinstance(error["message"], str) and isinstance(error["type"], str)
        is_right = is_right and (body.get("type") == "error") == path.startswith("messages")
    except (ValueError, KeyError, TypeError):
        is_right = False
    if not is_right:
        yield "not the form of an error"


def has_several(content: bytes) -> bool:
    """True for a request of several prompts: one that is too long is refused while others are
    sampled.
    """
    try:
        prompts = json.loads(content)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int)


def stops_of(protocol: str, content: bytes) -> tuple[str, ...]:
    """The stop texts of a request that was served."""
    body = json.loads(content)
    stops = body.get("stop_sequences" if protocol == "messages" else "stop")
    if protocol == "responses" or not stops:
        return ()
    return (stops,) if isinstance(stops, str) else tuple(stops)


def fuzz(num: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Return counts and what was wrong, of `num` broken requests of each protocol."""
    tokenizer = universal_tokenizer((FORMAT,))
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    model = RandomModel(tokenizer)
    with FakeServer("ok", source=model.sample) as server:
        client = client_of(server.url, FORMAT, tokenizer)
        for protocol in PATHS:
            for number in range(-(-num // IN_AN_EPISODE)):
                program = Fuzz(seed + number, model, protocol, IN_AN_EPISODE)
                texts = [*converse(client, model, program, counts), *program.wrong]
                wrong += [f"{protocol}, seed {seed + number}: {text}" for text in texts]
                server.requests.clear()
                server.served.clear()
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=20_000, help="requests of each protocol")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    counts, wrong = fuzz(arguments.num, arguments.seed)
    for name, count in sorted(counts.items()):
        print(f"{name:28s} {count:10,}")
    print(f"{'wrong':28s} {len(wrong):10,}")
    print("\n".join(wrong[:MOST_SHOWN]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
