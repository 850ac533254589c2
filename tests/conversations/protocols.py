"""Requests of a client in each protocol of the endpoint, without a client library.

A history is a list of OpenAI's chat messages.  An answer of the assistant's also has, under
`raw:PROTOCOL`, what the protocol returned, which the next request of the same protocol sends back
as it is; and under `ids` the tokens of its request and answer, where the protocol returns them.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

Message = dict[str, Any]

FUNCTIONS = [
    {"name": name, "description": "", "parameters": {"type": "object"}}
    for name in ("search", "run")
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


def plain(message: Mapping[str, Any]) -> Message:
    return {key: value for key, value in message.items() if ":" not in key and key != "ids"}


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of every event of a stream."""
    data = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(event) for event in data if event != "[DONE]"]


class Client:
    """A client of one episode.  `ask` returns the assistant's messages, one for each choice; []
    where the endpoint refused the request.
    """

    def __init__(self, http: httpx.AsyncClient, root_url: str, key: str) -> None:
        self._http, self._root, self._key = http, root_url, key
        self.refusals: list[str] = []

    async def ask(
        self, protocol: str, history: Sequence[Message], **settings: Any
    ) -> list[Message]:
        path, body, read = getattr(self, protocol)(history, **settings)
        headers = {"Authorization": f"Bearer {self._key}", "x-api-key": self._key}
        response = await self._http.post(f"{self._root}/v1/{path}", json=body, headers=headers)
        if response.status_code != 200:
            assert response.status_code == 400, f"{response.status_code}: {response.text}"
            self.refusals.append(response.text)
            return []
        return read(response.text)

    async def cut(
        self, protocol: str, history: Sequence[Message], *, model: str, **settings: Any
    ) -> bool:
        """Ask, and hang up when the answer begins; return False where the request was refused."""
        path, body, _ = getattr(self, protocol)(history, **settings)
        content = json.dumps(body | {"model": model}).encode()
        url, loop = urlsplit(self._root), asyncio.get_running_loop()
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nx-api-key: {self._key}\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        with socket.socket() as connection:
            # the kernel holds little of what is not read
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, (url.hostname, url.port))
            await loop.sock_sendall(connection, head.encode() + content)
            return (await loop.sock_recv(connection, 200)).startswith(b"HTTP/1.1 200")

    # Protocols: (path, body, reader of the answer) ------------------------------------------------

    def chat(self, history, *, tools, stream=False, n=1, stops=(), limit=None, template=None):
        body = {"model": "m", "messages": [plain(message) for message in history], "n": n}
        body |= {"stream": stream, "return_token_ids": True}
        body |= {"tools": TOOLS} if tools else {}
        body |= {"stop": list(stops)} if stops else {}
        body |= {"max_tokens": limit} if limit else {}
        body |= {"chat_template_kwargs": template} if template else {}
        if history[-1]["role"] == "assistant":
            body["continue_final_message"] = True
        return "chat/completions", body, read_chat_stream if stream else read_chat

    def messages(self, history, *, tools, stream=False, n=1, stops=(), limit=None, template=None):
        system = [plain(message)["content"] for message in history if message["role"] == "system"]
        body = {"model": "m", "max_tokens": limit or 4000, "messages": as_blocks(history)}
        body |= {"system": "\n".join(system)} if system else {}
        body |= {"stop_sequences": list(stops)} if stops else {}
        body |= {"stream": stream}
        body |= {"chat_template_kwargs": template} if template else {}
        if tools:
            body["tools"] = [
                {"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS
            ]
        return "messages", body, read_messages_stream if stream else read_messages

    def responses(self, history, *, tools, stream=False, n=1, stops=(), limit=None, template=None):
        body: dict[str, Any] = {"model": "m", "stream": stream, "input": as_items(history)}
        answered = [i for i, message in enumerate(history) if "raw:responses" in message]
        if answered and (known := history[answered[-1]].get("id:responses")):
            body["previous_response_id"] = known
            body["input"] = as_items(history[answered[-1] + 1 :])
        body |= {"max_output_tokens": limit} if limit else {}
        body |= {"chat_template_kwargs": template} if template else {}
        if tools:
            body["tools"] = [{"type": "function", **each, "strict": False} for each in FUNCTIONS]
        return "responses", body, read_responses_stream if stream else read_responses

    def completions(self, prompt, *, stream=False, n=1, stops=(), limit=None):
        body = {"model": "m", "prompt": prompt, "n": n, "stream": stream, "return_token_ids": True}
        body |= {"stop": list(stops)} if stops else {}
        return "completions", body | {"max_tokens": limit or 200}, read_completions


# Answers --------------------------------------------------------------------------------------


def with_ids(message: Message, choice: Mapping[str, Any], prompt: Sequence[int]) -> Message:
    return {**message, "ids": [*prompt, *choice["token_ids"]]}


def read_chat(text: str) -> list[Message]:
    answer = json.loads(text)
    return [
        with_ids(choice["message"], choice, answer["prompt_token_ids"])
        for choice in answer["choices"]
    ]


def read_chat_stream(text: str) -> list[Message]:
    messages = []
    for event in events(text):
        for choice in event["choices"]:
            if choice["finish_reason"] is None:
                delta = choice["delta"]
                for call in delta.get("tool_calls") or ():
                    del call["index"]
                messages.append(with_ids(delta, choice, event["prompt_token_ids"]))
    return messages


def read_completions(text: str) -> list[Message]:
    """Answers have no role, but `text` and `ids`."""
    answers = [json.loads(text)] if text.startswith("{") else events(text)
    return [
        {"text": choice["text"], "ids": [*choice["prompt_token_ids"], *choice["token_ids"]]}
        for answer in answers
        for choice in answer["choices"]
        if "token_ids" in choice
    ]


def read_messages(text: str) -> list[Message]:
    return [from_blocks(json.loads(text)["content"])]


def read_messages_stream(text: str) -> list[Message]:
    blocks: list[dict[str, Any]] = []
    for event in events(text):
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        if event["type"] == "content_block_delta":
            for key, value in event["delta"].items():
                if key == "partial_json":
                    blocks[-1]["input"] = json.loads(value)
                elif key != "type":
                    blocks[-1][key] = blocks[-1].get(key, "") + value
    return [from_blocks(blocks)]


def from_blocks(blocks: list[dict[str, Any]]) -> Message:
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    message: Message = {"role": "assistant", "content": text, "raw:messages": blocks}
    calls = [
        call_of(block["id"], block["name"], json.dumps(block["input"]))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return message | ({"tool_calls": calls} if calls else {})


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def read_responses(text: str) -> list[Message]:
    return [from_items(json.loads(text))]


def read_responses_stream(text: str) -> list[Message]:
    ends = ("response.completed", "response.incomplete")
    (last,) = [event for event in events(text) if event["type"] in ends]
    return [from_items(last["response"])]


def from_items(response: Mapping[str, Any]) -> Message:
    items = response["output"]
    message: Message = {"role": "assistant", "content": "", "raw:responses": items}
    calls = []
    for item in items:
        if item["type"] == "message":
            message["content"] += "".join(part["text"] for part in item["content"])
        if item["type"] == "function_call":
            calls.append(call_of(item["call_id"], item["name"], item["arguments"]))
    message |= {"tool_calls": calls} if calls else {}
    return message | {"id:responses": response["id"]}


# Histories ------------------------------------------------------------------------------------


def as_blocks(history: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of Anthropic's protocol."""
    blocks = []
    for message in history:
        if message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            content: Any = [{**result, "content": message["content"]}]
            blocks.append({"role": "user", "content": content})
        elif message["role"] == "user":
            blocks.append({"role": "user", "content": message["content"]})
        elif message["role"] == "assistant":
            content = message.get("raw:messages") or [
                *([{"type": "text", "text": message["content"]}] if message["content"] else []),
                *map(as_use, message.get("tool_calls") or ()),
            ]
            blocks.append({"role": "assistant", "content": content})
    return blocks


def as_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"text": function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def as_items(history: Sequence[Message]) -> list[dict[str, Any]]:
    """The items of Responses."""
    items: list[dict[str, Any]] = []
    for message in history:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **output})
        elif "raw:responses" in message:
            items += message["raw:responses"]
        else:
            if message["content"]:
                items.append({"role": message["role"], "content": message["content"]})
            items += [
                {"type": "function_call", "call_id": call["id"], **call["function"]}
                for call in message.get("tool_calls") or ()
            ]
    return items
