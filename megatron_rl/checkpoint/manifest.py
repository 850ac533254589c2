"""The digest manifest of a folder, by which damage is found before anything is loaded.

It has the size and the BLAKE2b of every file.  MANIFEST is two lines of text: a JSON object, and
the BLAKE2b of that line.  A file's digest is the BLAKE2b of the digests of its blocks of BLOCK
bytes, so that threads share large files (hashlib releases the GIL).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

MANIFEST = "manifest.json"
BLOCK = 2**26
"""Bytes of a block."""
BUFFER = 2**20
"""Bytes that a thread reads at once."""
DIGEST_BYTES = 32
MAX_THREADS = 8


class ManifestError(ValueError):
    """A manifest that is missing or is not what was written."""


class FileDigest(NamedTuple):
    """Size and digest of one file."""

    size: int
    """Bytes."""
    blake2b: str
    """Hexadecimal digits."""


class Facts(TypedDict):
    """Facts about a checkpoint, by which `folder.retire` chooses."""

    step: int
    serial: int
    """Number of the save into this folder, from 1."""
    value: float | None
    """Value of checkpoint.best_metric; None: not known."""
    metric: NotRequired[str]
    """The metric of `value`: a resumed run may name another one."""


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    files: dict[str, FileDigest]
    """Name relative to the folder -> digest."""
    facts: Facts
    digest: str
    """Digest of the manifest itself."""


def digest_files(folder: Path, names: Iterable[str]) -> dict[str, FileDigest]:
    """Compute the digests of files `names` of `folder` on a few threads.

    Raises OSError for one that cannot be read.
    """
    names = list(names)
    sizes = {name: (folder / name).stat().st_size for name in names}
    blocks = [(name, start) for name in names for start in range(0, sizes[name], BLOCK)]
    # threads are enough: reads and hashes of large buffers release the GIL
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda block: _digest_block(folder / block[0], block[1]), blocks))
    # in the order of the blocks, so that the digest does not depend on the threads
    combined = {name: _blake2b() for name in names}
    for (name, _), digest in zip(blocks, digests, strict=True):
        combined[name].update(digest)
    return {name: FileDigest(sizes[name], combined[name].hexdigest()) for name in names}


def manifest_text(files: Mapping[str, FileDigest], facts: Facts) -> str:
    """Return the content of MANIFEST."""
    line = json.dumps({"files": dict(sorted(files.items())), "facts": facts})
    return f"{line}\n{_digest_text(line)}\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of `folder`.

    Raises ManifestError, naming the file, when it is missing, cut or altered.
    """
    path = folder / MANIFEST
    try:
        # two lines, and nothing after the last newline
        line, digest, end = path.read_bytes().decode().split("\n")
    except FileNotFoundError as error:
        raise ManifestError(f"{path}: missing; every complete checkpoint has one") from error
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path}: cannot be read ({error})") from error
    if end or digest != _digest_text(line):
        raise ManifestError(f"{path}: its text does not match its own digest")
    content = json.loads(line)
    files = {name: FileDigest(*entry) for name, entry in content["files"].items()}
    return Manifest(files, content["facts"], digest)


def damage(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """Return one line for each damaged file among `names` (default: all) of `folder`.

    The line names the file; there is none when the files are as written.
    """
    problems, present = [], []
    for name in manifest.files if names is None else names:
        path, expected = folder / name, manifest.files[name].size
        try:
            size = path.stat().st_size
        except OSError as error:
            reason = "missing" if isinstance(error, FileNotFoundError) else error
            problems.append(f"{path}: {reason}")
            continue
        if size != expected:
            problems.append(f"{path}: {size} bytes, {expected} were written")
        else:
            present.append(name)
    try:
        digests = digest_files(folder, present)
    except OSError as error:
        return [*problems, f"{error.filename}: {error.strerror}"]
    # sizes first: they are cheap, and only files of the right size are read
    wrong = [name for name in present if digests[name] != manifest.files[name]]
    return problems + [
        f"{folder / name}: its bytes are not those that were written (BLAKE2b differs)"
        for name in wrong
    ]


def _digest_block(path: Path, start: int) -> bytes:
    digest, left = _blake2b(), BLOCK
    try:
        # without a buffer, and not a block at once: on every thread of every rank that would be
        # gigabytes per host
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while left and (data := file.read(min(left, BUFFER))):
                digest.update(data)
                left -= len(data)
    except OSError as error:  # an error of a read does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.digest()


def _digest_text(text: str) -> str:
    return _blake2b(text.encode()).hexdigest()


def _blake2b(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES)
