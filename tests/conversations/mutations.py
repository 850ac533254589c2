"""Valid requests of each protocol, and random changes that make most of them wrong.

A change is one of the structure (a field goes, or has another value), of the text of the body, of
the header, or of path and method.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.conversations.protocols import FUNCTIONS, TOOLS

Json = dict[str, Any]

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
"""Protocol -> path of its requests."""
OTHER_PATHS = (
    "/", "/v1", "/v1/", "/v1/models", "/v1/embeddings", "/v1/messages/batches",
    "/v1/messages/count_tokens", "/v1/responses/resp_1", "/v1/chat/completions/../../etc/passwd",
    "/v1/%00", "/v1/%2e%2e/x", "/v1/messages%2Fcount_tokens", "//v1/messages", "/v1/ch%ffat",
)  # fmt: skip
METHODS = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POST")
DEPTHS = (20, 150, 500, 700, 800, 850, 880, 900, 920, 940, 960, 980, 1100, 3000, 20_000)
DEEP = {f"@{kind} {depth}@": depth for depth in DEPTHS for kind in ("lists", "objects", "text")}
"""Text -> the depth of the JSON that takes its place; the JSON of `text` stays a text."""
KINDS = (
    "text", "image_url", "image", "input_image", "input_audio", "file", "document", "refusal",
    "tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use", "reasoning",
    "function_call", "function_call_output", "item_reference", "computer_call", "message", "x",
)  # fmt: skip
PARTS: tuple[Any, ...] = (
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}},
    {"type": "input_image", "image_url": "https://example.com/x.png"},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    {"type": "text"}, {"type": "text", "text": None}, {"type": "text", "text": ["x"]},
    {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]},
    {"type": "tool_use", "id": 1, "name": None, "input": "x"},
    {"type": "function_call", "call_id": None, "name": {}, "arguments": []},
    {"type": "web_search_20250305", "name": "web_search"},
    {"role": "robot", "content": "x"}, {"role": "tool", "content": "x"},
    {"role": "tool", "tool_call_id": "unknown", "content": "x"},
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": None}]},
    {"role": "assistant", "content": "x", "tool_calls": "x"},
)  # fmt: skip
SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 0.5, 1e308, -0.0, 2**31, 2**63, 2**64, -(2**63) - 1,
    10**30, 10**4000, float("nan"), float("inf"), "", " ", "x", "0", "null", "a\0b", "\ud800",
    "\udfff tail", "pair \ud83d\ude00", "\u202e", "<|im_end|>", "<tool_call>", "{{ 7 * 7 }}",
    "{% for x in y %}", "__import__('os').system('id')", "../../etc/passwd", "x" * 300,
    "assistant", "system", "tool", "function", "developer", [], {}, [[]], [None], [0], [""], [{}],
    {"": ""}, {"x": None}, {"type": None}, {"role": None}, {"__proto__": {}}, [[0], ["x"]],
    ["x", 1], {"a": float("nan")}, [True, False],
)  # fmt: skip
LONG = ("x" * 20_000, " ", "\ud800", "word ", "<|im_end|>", "\U0001f600")
"""Texts of which long ones are made."""
FIELDS = (
    "top_p", "top_k", "min_p", "temperature", "presence_penalty", "logit_bias", "response_format",
    "parallel_tool_calls", "stop", "stop_sequences", "n", "seed", "stream", "stream_options",
    "tool_choice", "max_tokens", "max_completion_tokens", "max_output_tokens", "logprobs", "echo",
    "top_logprobs", "functions", "audio", "modalities", "thinking", "reasoning", "metadata",
    "store", "background", "include", "previous_response_id", "conversation", "truncation", "text",
    "input", "prompt", "messages", "system", "instructions", "tools", "model", "suffix", "best_of",
    "stop_token_ids", "add_special_tokens", "return_token_ids", "continue_final_message",
    "add_generation_prompt", "chat_template_kwargs", "service_tier", "container", "\ud800", "",
)  # fmt: skip
NUM_CHANGES = (1, 1, 1, 2, 3)


@dataclass(frozen=True)
class Sent:
    """A request as it goes to the endpoint."""

    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    has_key: bool = True
    """The headers of the client's key are sent besides."""

    def __str__(self) -> str:
        body = re.sub(rb"(.)\1{40,}", rb"\1...\1", self.body, flags=re.DOTALL)
        return f"{self.method} {self.path} {self.headers} {body[:2000]!r}"


def valid(protocol: str, draw: random.Random) -> Json:
    """Return the body of a request that is right."""
    is_long = draw.random() < 0.5
    body: Json = {"model": "m", "stream": draw.random() < 0.3}
    if protocol == "completions":
        prompts = ["a text", [5, 6, 7], ["one", "two"], [[5, 6], [7]]]
        body |= {"prompt": draw.choice(prompts), "max_tokens": 20, "return_token_ids": True}
        return body | ({"stop": ["STOP"], "n": 2, "logprobs": 1, "echo": False} if is_long else {})
    call = {"name": "search", "arguments": '{"q": "x"}'}
    if protocol == "chat":
        calls = [{"id": "c1", "type": "function", "function": call}]
        more = [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
        ]
        body |= {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
        if is_long:
            body["messages"] += more
            body |= {"tools": copy.deepcopy(TOOLS), "tool_choice": "auto", "n": 2}
            body |= {"stop": ["STOP"], "logprobs": True, "stream_options": {"include_usage": True}}
            body |= {"temperature": 1.0, "top_p": 1, "max_tokens": 50, "chat_template_kwargs": {}}
        return body
    if protocol == "messages":
        use = {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "x"}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "found"}
        thought = {"type": "thinking", "thinking": "hm", "signature": "none"}
        body |= {"max_tokens": 50, "messages": [{"role": "user", "content": "u"}]}
        if is_long:
            body["messages"] += [
                {"role": "assistant", "content": [thought, {"type": "text", "text": "t"}, use]},
                {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
            ]
            tools = [{"name": tool["name"], "input_schema": {}} for tool in FUNCTIONS]
            body |= {"system": [{"type": "text", "text": "s"}], "tools": tools}
            body |= {"tool_choice": {"type": "auto"}, "stop_sequences": ["STOP"], "metadata": {}}
        return body
    body |= {"input": "u" if draw.random() < 0.3 else [{"role": "user", "content": "u"}]}
    if is_long:
        text = [{"type": "output_text", "text": "t", "annotations": []}]
        body["input"] = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text"}]},
            {"type": "message", "role": "assistant", "content": text},
            {"type": "function_call", "call_id": "c1", **call},
            {"type": "function_call_output", "call_id": "c1", "output": "found"},
        ]
        tools = [{"type": "function", **copy.deepcopy(tool)} for tool in FUNCTIONS]
        body |= {"tools": tools, "tool_choice": "auto", "instructions": "i", "store": True}
        body |= {"text": {"format": {"type": "text"}}, "max_output_tokens": 50, "include": []}
    return body


def mutated(protocol: str, draw: random.Random, dead_key: str) -> Sent:
    """Return a request with one to three changes.

    dead_key: the key of an episode that has ended.
    """
    body: Any = valid(protocol, draw)
    kind = draw.random()
    for _ in range(draw.choice(NUM_CHANGES) if kind < 0.9 else 0):
        body = changed(body, draw)
    text = with_depths(json.dumps(body))
    path = PATHS[protocol]
    if protocol == "messages" and draw.random() < 0.2:
        path += "/count_tokens"
    sent = Sent(path, text.encode(), headers={"Content-Type": "application/json"})
    if 0.75 < kind < 0.9:
        return replace(sent, body=broken(text, draw))
    return wrong_head(sent, draw, dead_key) if kind > 0.9 else sent


# Changes of the structure -------------------------------------------------------------------------


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def changed(body: Any, draw: random.Random) -> Any:
    """Return the body with one change; it is changed in place."""
    inside = list(places(body)) if isinstance(body, dict | list) else []
    if not inside or draw.random() < 0.01:
        return weird(draw)
    container, key = draw.choice(inside)
    kind = draw.randrange(9)
    if kind == 0:
        del container[key]
    elif kind <= 3:
        container[key] = weird(draw)
    elif kind == 4:
        container[key] = draw.choice([[container[key]], {"type": container[key]}, [[], {}]])
    elif kind == 5 and isinstance(container, list):
        container.insert(key, copy.deepcopy(draw.choice([container[key], *PARTS])))
    elif kind == 5:
        container[draw.choice(["type", "role", "name", "content", "id"])] = weird(draw)
    elif kind == 6:
        target = body if isinstance(body, dict) else {}
        target[draw.choice(FIELDS)] = weird(draw)
    elif kind == 7:
        container[key] = draw.choice([draw.choice(KINDS), copy.deepcopy(draw.choice(PARTS))])
    else:
        other, name = draw.choice(inside)
        container[key] = copy.deepcopy(other[name])
    return body


def weird(draw: random.Random) -> Any:
    if draw.random() < 0.02:
        return draw.choice(LONG) * draw.choice([1, 300, 50])
    if draw.random() < 0.1:
        return draw.choice(list(DEEP))
    if draw.random() < 0.05:
        return [copy.deepcopy(draw.choice(SCALARS)) for _ in range(draw.choice([1, 3, 200]))]
    return copy.deepcopy(draw.choice(SCALARS))


def with_depths(text: str) -> str:
    for name, depth in DEEP.items():
        if name in text:
            lists, objects = "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth
            deep = objects if name.startswith("@objects") else lists
            quoted = name if name.startswith("@text") else f'"{name}"'
            text = text.replace(quoted, deep)
    return text


# Changes of the text and of the head --------------------------------------------------------------


def broken(text: str, draw: random.Random) -> bytes:
    """Return the body as bytes that are no JSON, or other JSON than before."""
    content = text.encode()
    place = draw.randrange(len(content))
    changes = (
        lambda: content[:place],
        lambda: content[:place] + bytes([draw.randrange(256)]) + content[place:],
        lambda: content[:place] + content[place + 1 :],
        lambda: content + content,
        lambda: content.replace(b"{", b'{"messages": 1, "model": "twice", ', 1),
        lambda: content[:-1] + b', "model": "second", "stream": false, "n": 1}',
        lambda: text.encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: content[:place] + b"\xff\xfe\xed\xa0\x80" + content[place:],
        lambda: b"",
        lambda: b"{" * draw.choice([5, 5000]),
        lambda: b'{"a":' * draw.choice([5, 990, 50_000]),
        lambda: b"[" * 100_000,
        lambda: b"\0" * 100,
        lambda: b"1" * draw.choice([10, 5000]),
        lambda: b"--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n--x--",
        lambda: content.replace(b'"', b"'"),
        lambda: content[:-1] + b', "x": NaN, "y": -Infinity, "z": 1e999}',
    )  # fmt: skip
    return draw.choice(changes)()


def wrong_head(sent: Sent, draw: random.Random, dead_key: str) -> Sent:
    """Return the request with another path, method, type or key."""
    kind = draw.randrange(4)
    if kind == 0:
        return replace(sent, path=draw.choice(OTHER_PATHS), method=draw.choice(METHODS))
    if kind == 1:
        return replace(sent, method=draw.choice(METHODS))
    if kind == 2:
        name, value = draw.choice(
            [
                ("Content-Type", "text/html"), ("Content-Type", "multipart/form-data"),
                ("Content-Type", "application/json; charset=no-such"), ("Content-Type", ""),
                ("Content-Encoding", "gzip"), ("Content-Encoding", "deflate"),
                ("Content-Encoding", "br"), ("Content-Encoding", "x"), ("Expect", "x"),
                ("Expect", "100-continue"), ("X-Long", "x" * 7000), ("Accept", "image/png"),
                ("Range", "bytes=0-1"), ("If-Match", "x"), ("Cookie", "\xff=;;"),
                ("Upgrade", "websocket"), ("anthropic-version", "\xff"),
            ]
        )  # fmt: skip
        return replace(sent, headers={**sent.headers, name: value})
    keys = (dead_key, dead_key[:-1], "", " ", "x" * 5000, "\xff", "\u20ac", "../..", "null")
    key = draw.choice(keys)
    heads = (
        {"Authorization": f"Bearer {key}"}, {"Authorization": key}, {"x-api-key": key},
        {"Authorization": f"Basic {key}", "x-api-key": key}, {},
    )  # fmt: skip
    return replace(sent, headers={**sent.headers, **draw.choice(heads)}, has_key=False)
