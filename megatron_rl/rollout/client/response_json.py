"""The body of a /generate answer -> its samples, without holding the interpreter lock for long and
without copying routes.

A body is nearly all routes: 67 MB of base64 for 32,768 tokens of 48 layers x 8 experts, beside 1.4
MB of tokens and log-probs.  json.loads would copy the routes, and hold the interpreter lock for
tens of milliseconds in which no other answer is read.  So the long values are cut out of the text
first: routes stay where they are (a memoryview), and lists are parsed piece by piece.
"""

from __future__ import annotations

import json
import re
import secrets

import numpy as np
import orjson

from megatron_rl.rollout.client.pages import empty

Content = bytes | bytearray | memoryview
LONG_VALUES = (
    b"routed_experts",
    b"output_token_logprobs",
    b"output_token_sampling_mask",
    b"output_token_sampling_logprobs",
    b"output_ids",
)
KEY = re.compile(rb'(?<!\\)"(' + b"|".join(LONG_VALUES) + rb')"\s*:\s*(?=["\[])')
"""A key and its colon before a long value.  A quote inside a JSON string is escaped, so this text
cannot be part of one."""
# ends of a list of lists, written without spaces, and of a flat list
NESTED, FLAT = re.compile(rb"\]\]"), re.compile(rb"\]")
ENDS = {b"output_token_logprobs": NESTED, b"output_token_sampling_mask": NESTED}
BETWEEN = {key: re.compile(rb"\],") for key in ENDS}
BETWEEN_FLAT = re.compile(rb",")
PIECE_BYTES = 64 * 1024  # parsed in about a millisecond
SCAN_BYTES = 4 << 20  # searched in less than that
MIN_BYTES = 64 * 1024
"""Least memory that is reserved for a body: all of it where the length is unknown."""


class Received:
    """The body of an answer as it arrives: `received += chunk`, then `content()`.

    Memory for `expected` bytes (Content-Length, None without one), at most `max_bytes`, is reserved
    first: a bytearray would be moved again and again as it grows to that size.  Beyond that size,
    and without a length, the memory doubles.
    """

    def __init__(self, expected: str | None, max_bytes: int) -> None:
        length = int(expected) if expected is not None and expected.isdecimal() else 0
        self.memory = empty((max(MIN_BYTES, min(length, max_bytes)),), np.uint8)
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iadd__(self, chunk: bytes) -> Received:
        end = self.size + len(chunk)
        if end > len(self.memory):
            memory = empty((2 * end,), np.uint8)
            memory[: self.size] = self.memory[: self.size]
            self.memory = memory
        self.memory[self.size : end] = np.frombuffer(chunk, np.uint8)
        self.size = end
        return self

    def content(self) -> memoryview:
        return self.memory.data.toreadonly()[: self.size]


def parse_body(content: Content) -> object:
    """Return what json.loads(content) returns, but with `routed_experts` texts as read-only
    memoryviews of `content`.

    Raises ValueError for what is not JSON.
    """
    try:
        return orjson.loads(content) if len(content) <= PIECE_BYTES else parse_in_pieces(content)
    except ValueError:
        # not JSON (NaN is none for orjson), or formatted in a way that the cuts do not expect:
        # json.loads decides
        return json.loads(bytes(content))


def parse_in_pieces(content: Content) -> object:
    """Parse a body around its long values.

    Raises ValueError where a value does not end as expected.
    """
    # random, so that no text of a server can be taken for a mark
    mark, at = secrets.token_hex(16), 0
    values: list[object] = []
    pieces: list[Content] = []
    while (match := KEY.search(content, at)) is not None:
        start = match.end()
        if content[start] == ord('"'):
            end = end_of_text(content, start + 1)
            values.append(memoryview(content).toreadonly()[start + 1 : end - 1])
        else:
            close = ENDS.get(match[1], FLAT).search(content, start)
            if close is None:
                raise ValueError("a list without an end")
            end = close.end()
            between = BETWEEN.get(match[1], BETWEEN_FLAT)
            values.append(parse_list(content, start + 1, end - 1, between))
        pieces += [content[at:start], f'"{mark}:{len(values) - 1}"'.encode()]
        at = end
    pieces.append(content[at:])
    return restore_values(orjson.loads(b"".join(pieces)), mark, values)


def end_of_text(content: Content, start: int) -> int:
    """Return the index after the closing quote of the string that begins at `start`.

    Raises ValueError for a string with escapes or without an end.
    """
    characters = np.frombuffer(content, np.uint8)
    for at in range(start, len(content), SCAN_BYTES):
        piece = characters[at : at + SCAN_BYTES]
        quotes = piece == ord('"')  # several times faster than a regular expression
        quote = int(quotes.argmax())
        is_end = bool(quotes[quote])
        if (piece[: quote if is_end else None] == ord("\\")).any():
            raise ValueError("an escape, which base64 does not have")
        if is_end:
            return at + quote + 1
    raise ValueError("a string without an end")


def parse_list(content: Content, start: int, stop: int, between: re.Pattern[bytes]) -> list[object]:
    """Return the elements in content[start:stop]; `between` matches the end of an element and the
    comma after it.
    """
    elements: list[object] = []
    while start < stop:
        cut = between.search(content, min(start + PIECE_BYTES, stop), stop)
        end = stop if cut is None else cut.end() - 1  # without the comma
        elements += orjson.loads(b"[" + bytes(content[start:end]) + b"]")
        start = end + 1
        if start == stop:  # a comma before the closing bracket
            raise ValueError("a list that ends in a comma")
    return elements


def restore_values(value: object, mark: str, values: list[object]) -> object:
    """Return `value` with the values that were cut out in place of their marks."""
    if isinstance(value, list):
        return [restore_values(item, mark, values) for item in value]
    if isinstance(value, dict):
        return {key: restore_values(item, mark, values) for key, item in value.items()}
    if isinstance(value, str) and value.startswith(mark):
        return values[int(value[len(mark) + 1 :])]
    return value
