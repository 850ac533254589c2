"""Values that cross from the program of the model to the tests, as JSON of plain data.

A value is written by its base type: None, booleans and text as they are, others as [TAG, CONTENT].
What an iterator of Python would still yield crosses as a list, and becomes an iterator again.
What is read is made of exact built-in types, so that no code of the model runs where a value is
compared.  Any other object stays where it is, and ["object", NUMBER] stands for it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import IO, Any

MOST_BYTES = 4 << 20
"""Longest message."""
MOST_ENTRIES = 10_000
"""Values that are taken of an iterator, which may have no end."""
ITERATORS = ("builtins", "itertools", "_collections")
"""Modules of types of iterators; one of a user's class has methods, and stays an object."""
KINDS: dict[str, tuple[Any, Callable[[list[Any]], object]]] = {
    "list": (list, list),
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
    "deque": (deque, deque),
    "dict_keys": (type({}.keys()), lambda entries: dict.fromkeys(entries).keys()),
    "dict_values": (type({}.values()), lambda entries: dict(enumerate(entries)).values()),
    "dict_items": (type({}.items()), lambda entries: dict(entries).items()),
}
"""By tag, a type of collections and what makes one."""


class NotPlain(ValueError):
    """A value that cannot cross."""


def encode(value: object, keep: Callable[[object], object]) -> object:
    """Return the value as JSON holds it.

    keep: returns what stands for an object that is no plain data.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    # numbers as text in base 16: exact, and without the limit of decimal digits
    if isinstance(value, int):
        return ["int", int.__format__(value, "x")]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", [float.hex(value.real), float.hex(value.imag)]]
    if isinstance(value, bytes | bytearray):
        return [type_name(value, (bytes, bytearray)), bytes(value).hex()]
    if isinstance(value, dict):
        pairs = [[encode(k, keep), encode(v, keep)] for k, v in dict.items(value)]
        return ["dict", pairs]
    if isinstance(value, range):
        return ["range", [encode(end, keep) for end in (value.start, value.stop, value.step)]]
    for tag, (kind, _) in KINDS.items():
        if isinstance(value, kind):
            return [tag, [encode(entry, keep) for entry in kind.__iter__(value)]]
    if isinstance(value, Iterator) and type(value).__module__ in ITERATORS:
        return ["iterator", [encode(entry, keep) for entry in entries_of(value)]]
    return keep(value)


def entries_of(value: Iterable[object]) -> list[object]:
    """Return the values that an iterable yields.  Raises NotPlain for more than MOST_ENTRIES."""
    entries = list(islice(value, MOST_ENTRIES + 1))
    if len(entries) > MOST_ENTRIES:
        raise NotPlain(f"an iterator of more than {MOST_ENTRIES} values")
    return entries


def type_name(value: object, kinds: tuple[type, ...]) -> str:
    return next(kind.__name__ for kind in kinds if isinstance(value, kind))


def decode(content: Any, find: Callable[[int], object]) -> object:
    """Return the value that `encode` wrote.

    find: returns the object that a number stands for.  Raises NotPlain for anything else.
    """
    if content is None or isinstance(content, bool | str):
        return content
    try:
        tag, inner = content
        return decode_tagged(tag, inner, find)
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise NotPlain(f"not plain data: {error}") from None


def decode_tagged(tag: str, inner: Any, find: Callable[[int], object]) -> object:
    if tag == "int":
        return int(inner, 16)
    if tag == "float":
        return float.fromhex(inner)
    if tag == "complex":
        return complex(*map(float.fromhex, inner))
    if tag in ("bytes", "bytearray"):
        return bytes.fromhex(inner) if tag == "bytes" else bytearray.fromhex(inner)
    if tag == "dict":
        return {decode(k, find): decode(v, find) for k, v in inner}
    if tag == "object":
        return find(inner)
    entries: list[Any] = [decode(entry, find) for entry in inner]
    if tag == "iterator":
        return iter(entries)
    return range(*entries) if tag == "range" else KINDS[tag][1](entries)


def write_message(file: IO[bytes], message: object) -> None:
    """Write one line of JSON to a binary file."""
    line = json.dumps(message).encode()
    if len(line) >= MOST_BYTES:
        raise NotPlain(f"{len(line)} bytes, {MOST_BYTES} at most")
    file.write(line + b"\n")
    file.flush()


def read_message(file: IO[bytes]) -> Any:
    """Read one line of JSON.  Raises EOFError at the end, NotPlain for a line that is none."""
    line = file.readline(MOST_BYTES)
    if not line:
        raise EOFError("no answer: the program has ended")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotPlain(f"not JSON: {error}") from None
