"""The body of a /generate answer -> its samples, without ever holding the interpreter for long or copying routes.

A body is nearly all routes: 67 MB of base64 for 32,768 tokens of 48 layers x 8 experts, beside 1.4 MB of tokens and log-probs.
json.loads would copy those, and hold the interpreter lock for tens of milliseconds in which no other answer is read.  So the
long values are cut out of the text first: routes stay where they are (a memoryview), lists are parsed piece by piece.
Nor does it grow while it is received: a bytearray of that size, as it grows, is moved as a whole.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

import numpy as np

Content = bytes | bytearray | memoryview
KEY = re.compile(rb'(?<!\\)"(routed_experts|output_token_logprobs|output_ids)"\s*:\s*(?=["\[])')
"""A quote inside a JSON string is escaped, so this text cannot be part of one."""
ENDS = {b"output_token_logprobs": re.compile(rb"\]\]"), b"output_ids": re.compile(rb"\]")}
BETWEEN = {b"output_token_logprobs": re.compile(rb"\],"), b"output_ids": re.compile(rb",")}
PIECE_BYTES = 64 * 1024  # parsed in about a millisecond
SCAN_BYTES = 4 << 20  # looked through in less than that
LEAST_BYTES = 64 * 1024


class Received:
    """The body of an answer as it comes: `received += chunk`, then `content()`.

    Memory for `expected` bytes (Content-Length, None without one; of these at most `max_bytes`) is reserved at once and used
    as it fills; beyond that, and without a length, it doubles.
    """

    def __init__(self, expected: str | None, max_bytes: int) -> None:
        length = int(expected) if expected is not None and expected.isdecimal() else 0
        self.memory = np.empty(max(LEAST_BYTES, min(length, max_bytes)), np.uint8)
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iadd__(self, chunk: bytes) -> Received:
        end = self.size + len(chunk)
        if end > len(self.memory):
            memory = np.empty(2 * end, np.uint8)
            memory[: self.size] = self.memory[: self.size]
            self.memory = memory
        self.memory[self.size : end] = np.frombuffer(chunk, np.uint8)
        self.size = end
        return self

    def content(self) -> memoryview:
        return self.memory.data.toreadonly()[: self.size]


def parse_body(content: Content) -> Any:
    """What json.loads(content) says, with `routed_experts` texts as read-only memoryviews of `content`.

    Raises ValueError for what is not JSON.
    """
    try:
        return parse_in_pieces(content)
    except ValueError:  # not JSON, or written in a way that the cuts do not know: json.loads is the judge
        return json.loads(bytes(content))


def parse_in_pieces(content: Content) -> Any:
    """Raises ValueError where a value does not end as expected."""
    mark, at = secrets.token_hex(16), 0
    values: list[Any] = []
    rest: list[Content] = []
    while (match := KEY.search(content, at)) is not None:
        start = match.end()
        if content[start] == ord('"'):
            end = end_of_text(content, start + 1)
            values.append(memoryview(content).toreadonly()[start + 1 : end - 1])
        else:
            close = ENDS.get(match[1], ENDS[b"output_ids"]).search(content, start)
            if close is None:
                raise ValueError("a list without an end")
            end = close.end()
            values.append(parse_list(content, start + 1, end - 1, BETWEEN.get(match[1], BETWEEN[b"output_ids"])))
        rest += [content[at:start], f'"{mark}:{len(values) - 1}"'.encode()]
        at = end
    rest.append(content[at:])
    return put_back(json.loads(b"".join(rest)), mark, values)


def end_of_text(content: Content, start: int) -> int:
    """Where the string that begins at `start` has its closing quote, plus 1.  ValueError for one with escapes, or cut."""
    characters = np.frombuffer(content, np.uint8)
    for at in range(start, len(content), SCAN_BYTES):
        piece = characters[at : at + SCAN_BYTES]
        quotes = piece == ord('"')  # found several times faster than by a regular expression
        quote = int(quotes.argmax())
        is_end = bool(quotes[quote])
        if (piece[: quote if is_end else None] == ord("\\")).any():
            raise ValueError("an escape, which base64 has not")
        if is_end:
            return at + quote + 1
    raise ValueError("a string without an end")


def parse_list(content: Content, start: int, stop: int, between: re.Pattern[bytes]) -> list[Any]:
    """The elements in content[start:stop]; `between` two of them stands its last character, after an element's end."""
    elements: list[Any] = []
    while start < stop:
        cut = between.search(content, min(start + PIECE_BYTES, stop), stop)
        end = stop if cut is None else cut.end() - 1
        elements += json.loads(b"[" + bytes(content[start:end]) + b"]")
        start = end + 1
        if start == stop:  # a comma before the closing bracket
            raise ValueError("a list that ends in a comma")
    return elements


def put_back(value: Any, mark: str, values: list[Any]) -> Any:
    """`value` with the values that were cut out in their places; `mark` is nothing a server could have sent."""
    if isinstance(value, list):
        return [put_back(item, mark, values) for item in value]
    if isinstance(value, dict):
        return {key: put_back(item, mark, values) for key, item in value.items()}
    if isinstance(value, str) and value.startswith(mark):
        return values[int(value[len(mark) + 1 :])]
    return value
