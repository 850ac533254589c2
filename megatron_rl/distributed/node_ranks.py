"""The ranks of a replica by node, and memory that those of one node share.

Memory is a file without a name (memfd): no folder, and so no size of /dev/shm, limits it, and it
ends with the last process that maps it, also after a crash.  One process creates and writes it; the
others open it through /proc/PID/fd, for reading.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import DTypeLike

ALIGNMENT = 64
"""Arrays start at multiples of this number of bytes."""
FILE_BYTES = 2**30
"""Size of a file of NodeMemory.  Pages that are never written take no memory; every file takes a
file descriptor of every rank that maps it.
"""


class NodeFile(mmap.mmap):
    """A file's memory in this process.  Arrays in it keep it: it ends with the last of them."""

    fd: int | None = None
    """Descriptor by which others open it; None on those that did."""

    @classmethod
    def create(cls, size: int) -> NodeFile:
        """Return a new file of at least `size` bytes, zeros.

        Raises RuntimeError where this process has too many open files.
        """
        size = max(size, 1)
        try:
            fd = os.memfd_create("megatron_rl")
            os.ftruncate(fd, size)
            file = cls(fd, size)
        except OSError as error:
            raise _failed(f"no shared memory of {size:,} bytes", error) from error
        file.fd = fd
        file.madvise(mmap.MADV_DONTFORK)  # a child process would keep the memory
        return file

    @classmethod
    def open(cls, place: Sequence[int]) -> NodeFile:
        """Map for reading the file whose `place` another process of this node sent.

        Raises RuntimeError where that is impossible.
        """
        pid, fd, inode, size = place
        path = f"/proc/{pid}/fd/{fd}"
        try:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(opened).st_ino != inode:
                    raise FileNotFoundError(f"{path} is another file")
                file = cls(opened, size, prot=mmap.PROT_READ)
            finally:
                os.close(opened)  # the map has a descriptor of its own
        except OSError as error:
            raise _failed(f"shared memory of process {pid} cannot be mapped", error) from error
        file.madvise(mmap.MADV_DONTFORK)
        return file

    def __del__(self) -> None:
        if self.fd is not None:
            os.close(self.fd)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """(Process id, descriptor, inode, size in bytes), for `open`; of a created file."""
        assert self.fd is not None
        return os.getpid(), self.fd, os.fstat(self.fd).st_ino, len(self)

    @property
    def address(self) -> int:
        return int(np.ndarray(1, np.uint8, self).ctypes.data)

    def bytes(self, start: int, size: int) -> np.ndarray:
        """Return uint8 [size] from `start` on; it can be written where the file was created."""
        return np.ndarray(size, np.uint8, self, start)

    def array(self, start: int, dtype: DTypeLike, shape: Sequence[int]) -> np.ndarray:
        """Return the array that begins at `start`, read-only."""
        array = np.ndarray(tuple(shape), dtype, self, start)
        array.flags.writeable = False
        return array


def _failed(what: str, error: OSError) -> RuntimeError:
    return RuntimeError(
        f"{what}: {error}; the ranks of a node must be processes of one user, with enough file"
        " descriptors (ulimit -n); set parallel.share_host_memory = false for a copy of the"
        " rollouts on every rank"
    )


def file_of(array: np.ndarray) -> NodeFile | None:
    """Return the file that has the array's memory; None for other memory."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, NodeFile) else None


@dataclass
class NodeMemory:
    """Files that are filled one after the other, so that there are few.

    The memory of an array is freed with the last array of its file.
    """

    file: NodeFile | None = None
    used: int = 0

    def copy(self, array: np.ndarray) -> np.ndarray:
        """Return a read-only copy of a contiguous array in this memory."""
        if self.file is None or self.used + array.nbytes > len(self.file):
            self.file, self.used = NodeFile.create(max(FILE_BYTES, array.nbytes)), 0
        start = self.used
        self.used += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self.file.bytes(start, array.nbytes)[:] = array.reshape(-1).view(np.uint8)
        return self.file.array(start, array.dtype, array.shape)


@dataclass(frozen=True)
class NodeRanks:
    """The places of a replica's ranks on its nodes."""

    group: dist.ProcessGroup
    """The ranks of the replica, over gloo; the first one leads it."""
    firsts: tuple[int, ...]
    """For every rank of `group` the first one on its node, as ranks of `group`."""
    between: dist.ProcessGroup | None
    """The first ranks of the replica's nodes; None on other ranks, and where there is one node."""
    memory: NodeMemory = field(default_factory=NodeMemory)

    @property
    def is_shared(self) -> bool:
        """True if some node has several ranks of the replica; the same on all of them."""
        return len(set(self.firsts)) < len(self.firsts)

    @property
    def first(self) -> int:
        return self.firsts[self.group.rank()]

    @property
    def is_first(self) -> bool:
        return self.first == self.group.rank()

    @property
    def is_alone(self) -> bool:
        """True if no other rank of the replica is on this node."""
        return self.firsts.count(self.first) == 1

    def tell(
        self, files: Sequence[NodeFile] = (), values: Sequence[int] = ()
    ) -> tuple[list[NodeFile], list[int]]:
        """Return (files, values) of the first rank of this node on all its ranks.  Collective over
        the replica; other ranks pass nothing.

        Raises RuntimeError where a file cannot be mapped.
        """
        note = None
        if self.is_first:
            of_files = chain.from_iterable(file.place for file in files)
            content = np.array([len(files), *of_files, *values], np.int64)
            note = NodeFile.create(content.nbytes)
            note.bytes(0, content.nbytes)[:] = content.view(np.uint8)
        sent = torch.tensor(note.place if note else [0] * 4)
        places = [torch.empty_like(sent) for _ in self.firsts]
        dist.all_gather(places, sent, group=self.group)
        if note is None:
            note = NodeFile.open(places[self.first].tolist())
            count, *numbers = note.array(0, np.int64, (len(note) // 8,)).tolist()
            ends = range(0, 4 * count, 4)
            files, values = [NodeFile.open(numbers[i : i + 4]) for i in ends], numbers[4 * count :]
        # until all have mapped them, the files must not end
        dist.barrier(group=self.group)
        return list(files), list(values)


def firsts_of(names: Sequence[object]) -> tuple[int, ...]:
    """Return for every place the first place with the same name of a node."""
    return tuple(names.index(name) for name in names)


def node_name() -> bytes:
    """Return 8 bytes that are equal for processes that can map one another's files: of one machine
    since its start, in containers that see one another's processes.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    parts = f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.blake2b(parts.encode(), digest_size=8).digest()
