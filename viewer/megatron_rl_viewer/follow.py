"""Reads the lines of a file that another process appends to, each once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FilePlace:
    """How far a file was read: bytes, lines; and length and digest of the last line, which tell a
    rewritten file.
    """

    offset: int = 0
    lines: int = 0
    last_length: int = 0
    last_digest: bytes = b""


@dataclass(frozen=True)
class Line:
    """`number` from 1; `offset` in bytes; `data` with its newline."""

    number: int
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


def is_rewritten(path: Path, place: FilePlace) -> bool:
    """Whether the file no longer holds what was read: it is gone, shorter, or another line ends
    there.
    """
    if place.offset == 0:
        return False
    try:
        with open(path, "rb") as file:
            file.seek(place.offset - place.last_length)
            return digest_of_lines(file.read(place.last_length)) != place.last_digest
    except FileNotFoundError:
        return True


def digest_of_lines(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def new_lines(path: Path, place: FilePlace) -> Iterator[Line]:
    """The complete lines after `place`; an incomplete last one is left for later.

    None where there is no such file.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  closed below: the generator outlives this block
    except FileNotFoundError:
        return
    with file:
        file.seek(place.offset)
        offset = place.offset
        for number, data in enumerate(file, start=place.lines + 1):
            if not data.endswith(b"\n"):
                return
            yield Line(number, offset, data)
            offset += len(data)


def batch_of(lines: Iterator[Line], count: int, size: int) -> list[Line]:
    """The next `count` lines, or fewer that have `size` bytes together: they are held in memory."""
    found: list[Line] = []
    for line in lines:
        found.append(line)
        if len(found) == count or line.end - found[0].offset >= size:
            break
    return found


def after(place: FilePlace, line: Line) -> FilePlace:
    """The place after `line`, which was read at or after `place`."""
    return FilePlace(line.end, line.number, len(line.data), digest_of_lines(line.data))


def cut_line(path: Path, place: FilePlace) -> str | None:
    """A warning where bytes without a newline follow, as a killed writer leaves them."""
    size = path.stat().st_size if path.is_file() else 0
    return f"{path.name}:{place.lines + 1}: cut line" if size > place.offset else None
