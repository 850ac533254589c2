"""`.metadata` of a checkpoint, put together from what every rank has pickled.

Rank 0 only copies bytes.  torch's format is one pickle with the place of every part of every rank.
A pickle is a program for a machine with a stack, so that it can be written in pieces.  The
beginning leaves the object and an empty dictionary on the stack; each rank's piece puts its places
into that dictionary; the end gives the dictionary to the object.

Pieces have protocol 3, the last in which a memo entry has an explicit index: the entries of a piece
overwrite those of the one before.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

PROTOCOL = 3
FIELD = b"storage_data"
EMPTY = pickle.EMPTY_DICT + pickle.BINPUT + b"\0"
"""Beginning of the pickle of a dictionary; the first number is its own, which nothing refers to."""


def beginning(metadata: Metadata) -> bytes:
    """Pickle the metadata without the places, which core does not know yet.

    Its copy of all ranks' plans, half of the file, is no field and is left out: only core's own
    check of a plan that it loads has a use for it.
    """
    object_only = pickle.dumps(replace(metadata), PROTOCOL).removesuffix(pickle.STOP)
    field = pickle.BINUNICODE + len(FIELD).to_bytes(4, "little") + FIELD
    return object_only + pickle.EMPTY_DICT + field + pickle.EMPTY_DICT


def piece(results: Iterable[WriteResult]) -> bytes:
    """Pickle the places of one rank's parts."""
    places = {result.index: result.storage_data for result in results}
    pickled = pickle.dumps(places, PROTOCOL)
    head = pickle.PROTO + bytes([PROTOCOL]) + EMPTY
    assert pickled.startswith(head), "another pickle than CPython's"
    return pickled.removeprefix(head).removesuffix(pickle.STOP)


def complete(start: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the content of the file."""
    yield start
    yield from pieces
    yield pickle.SETITEM + pickle.BUILD + pickle.STOP
