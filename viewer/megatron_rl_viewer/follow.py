"""Read each line of a file once while another process appends to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FilePlace:
    """The place up to which a file was read.

    Length and digest of the last line show whether the file was written again.
    """

    offset: int = 0
    """Bytes that were read."""
    lines: int = 0
    """Lines that were read."""
    last_length: int = 0
    last_digest: bytes = b""


@dataclass(frozen=True)
class Line:
    """A complete line of a file."""

    number: int
    """Its number in the file, from 1."""
    offset: int
    """Bytes before it."""
    data: bytes
    """Its bytes with the newline."""

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


def is_rewritten(path: Path, place: FilePlace) -> bool:
    """Return whether the file no longer holds what was read: it is gone or shorter, or another line
    ends at `place`.
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
    """Yield the complete lines after `place`; an incomplete last line is left for later.

    Yields nothing if there is no such file.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  closed by the `with` below
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
    """Return the next `count` lines, or fewer that have `size` bytes: they are kept in memory."""
    batch: list[Line] = []
    for line in lines:
        batch.append(line)
        if len(batch) == count or line.end - batch[0].offset >= size:
            break
    return batch


def after(place: FilePlace, line: Line) -> FilePlace:
    """Return the place after `line`, which was read at or after `place`."""
    return FilePlace(line.end, line.number, len(line.data), digest_of_lines(line.data))


def cut_line(path: Path, place: FilePlace) -> str | None:
    """Return a warning if bytes without a newline follow, as a killed writer leaves them."""
    size = path.stat().st_size if path.is_file() else 0
    return f"{path.name}:{place.lines + 1}: cut line" if size > place.offset else None


def stat_of(path: Path) -> tuple[int, int]:
    """Return (bytes, time of the last change in ns); zeros if there is no such file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns
