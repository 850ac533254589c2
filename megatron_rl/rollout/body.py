"""The body of a /generate answer -> its samples, without ever holding the interpreter for long or copying routes.

A body is nearly all routes: 67 MB of base64 for 32,768 tokens of 48 layers x 8 experts, beside 1.4 MB of tokens and log-probs.
json.loads would copy those, and hold the interpreter lock for tens of milliseconds in which no other answer is read.  So the
long values are cut out of the text first: routes stay where they are (a memoryview), lists are parsed piece by piece.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

KEY = re.compile(rb'(?<!\\)"(routed_experts|output_token_logprobs|output_ids)"\s*:\s*(?=["\[])')
"""A quote inside a JSON string is escaped, so this text cannot be part of one."""
LIST_ENDS = {b"output_token_logprobs": b"]]", b"output_ids": b"]"}
PIECE_BYTES = 64 * 1024  # parsed in about a millisecond
SCAN_BYTES = 4 << 20  # looked through in less than that


def parse_body(content: bytes | bytearray) -> Any:
    """What json.loads(content) says, with `routed_experts` texts as read-only memoryviews of `content`.

    Raises ValueError for what is not JSON.
    """
    try:
        return parse_in_pieces(content)
    except ValueError:  # not JSON, or written in a way that the cuts do not know: json.loads is the judge
        return json.loads(content)


def parse_in_pieces(content: bytes | bytearray) -> Any:
    """Raises ValueError where a value does not end as expected."""
    mark, at = secrets.token_hex(16), 0
    values: list[Any] = []
    rest: list[bytes | bytearray] = []
    while (match := KEY.search(content, at)) is not None:
        start = match.end()
        if content[start] == ord('"'):
            end = end_of_text(content, start + 1)
            values.append(memoryview(content).toreadonly()[start + 1 : end - 1])
        else:
            close = LIST_ENDS.get(match[1], b"]")
            end = content.index(close, start) + len(close)
            values.append(parse_list(content, start + 1, end - 1, nested=len(close) > 1))
        rest += [content[at:start], f'"{mark}:{len(values) - 1}"'.encode()]
        at = end
    rest.append(content[at:])
    return put_back(json.loads(b"".join(rest)), mark, values)


def end_of_text(content: bytes | bytearray, start: int) -> int:
    """Where the string that begins at `start` has its closing quote, plus 1.  ValueError for one with escapes, or cut."""
    for at in range(start, len(content), SCAN_BYTES):
        quote = content.find(b'"', at, at + SCAN_BYTES)
        if content.find(b"\\", at, at + SCAN_BYTES if quote < 0 else quote) >= 0:
            raise ValueError("an escape, which base64 has not")
        if quote >= 0:
            return quote + 1
    raise ValueError("a string without an end")


def parse_list(content: bytes | bytearray, start: int, stop: int, *, nested: bool) -> list[Any]:
    """The elements in content[start:stop], which are lists if `nested`, else numbers."""
    between = b"]," if nested else b","
    elements: list[Any] = []
    while start < stop:
        cut = content.find(between, start + PIECE_BYTES, stop)
        end = stop if cut < 0 else cut + len(between) - 1
        elements += json.loads(b"[" + content[start:end] + b"]")
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
