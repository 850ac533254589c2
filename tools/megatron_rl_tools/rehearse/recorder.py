"""The record of one virtual rank: operations, memory, host synchronisations and defects.

Bytes are those of the pretended GPU.  A place is "file:line(function) <- file:line(function)": the
innermost two lines outside torch, or the autograd node in a backward pass.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROUNDING = 512
"""Bytes: CUDA's caching allocator gives multiples of it."""
NEW_PEAK = 1.002
"""The lines of a peak are noted again when it has grown by this factor: noting costs time."""
HERE = str(Path(__file__).parent)


@dataclass
class Allocation:
    """A storage on the pretended GPU."""

    storage: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    place: str
    is_known: bool = False
    """True while the values of its tensors are known (values.py)."""


@dataclass
class PhaseMemory:
    """Bytes of a phase."""

    start: int
    peak: int = 0
    end: int = 0
    by_place: dict[str, int] = field(default_factory=dict)
    """The allocations that are alive at the peak, by line."""


class Recorder:
    """The record of one rank.  `phase` names the part of the step that runs."""

    def __init__(self) -> None:
        self.phase = "build"
        self.events: list[tuple[Any, ...]] = []
        """("op", phase, name, place, kind, flops, bytes, dtype), ("post", phase, call) and
        ("wait", phase, call), in the order of the program."""
        self.syncs: Counter[tuple[str, str, str]] = Counter()
        """(phase, what, place): the host waits for the device."""
        self.copies: dict[tuple[str, str, str], list[int]] = {}
        """(phase, kind, place) -> [number, bytes] of copies to the device."""
        self.problems: Counter[tuple[str, str, str]] = Counter()
        """(phase, text, place): what fails or is slow on a GPU."""
        self.invented: Counter[tuple[str, str, str]] = Counter()
        """(phase, what, place): a host value that only a GPU could know."""
        self.not_known: Counter[tuple[str, str]] = Counter()
        """(operation, place): a size that no rule gives; what depends on it is a guess."""
        self.memory: dict[str, PhaseMemory] = {}
        self.allocations: dict[int, Allocation] = {}
        self.live = self.peak = 0
        self.is_merging = False
        self._by_place: Counter[str] = Counter()
        self._noted = 0.0

    def begin(self, phase: str) -> None:
        """Start a phase; the previous one ends."""
        self.end()
        self.phase = phase
        self.peak, self._noted = self.live, 0.0
        self.memory[phase] = PhaseMemory(self.live)
        self._note_peak()

    def end(self) -> None:
        if (memory := self.memory.get(self.phase)) is not None:
            memory.peak, memory.end = max(memory.peak, self.peak), self.live

    def operation(
        self, name: str, kind: str, *, flops: int, num_bytes: int, dtype: torch.dtype | None
    ) -> None:
        if self.is_merging and kind == "memory":
            return
        text = "" if dtype is None else str(dtype).removeprefix("torch.")
        self.events.append(("op", self.phase, name, place(), kind, flops, num_bytes, text))

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Record no operation through memory, and no peak before the end: one kernel runs."""
        self.is_merging = True
        try:
            yield
        finally:
            self.is_merging = False
        self._note_growth()

    def sync(self, what: str) -> None:
        self.syncs[self.phase, what, place()] += 1

    def copy(self, kind: str, num_bytes: int) -> None:
        entry = self.copies.setdefault((self.phase, kind, place()), [0, 0])
        entry[0] += 1
        entry[1] += num_bytes

    def problem(self, text: str) -> None:
        self.problems[self.phase, text, place()] += 1

    def allocate(self, tensor: torch.Tensor) -> Allocation | None:
        """Count the storage of a tensor, unless it was counted; None for an empty one."""
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self.allocations.get(key)
        if known is not None and known.storage() is storage:
            return known
        num_bytes = rounded(storage.nbytes())
        reference = weakref.ref(storage, partial(self._free, key))
        made = self.allocations[key] = Allocation(reference, num_bytes, place())
        self._grow(num_bytes, made.place)
        return made

    def ignore(self, tensor: torch.Tensor) -> None:
        """Count no memory for a tensor that stands for a view of another one."""
        if (allocation := self.allocate(tensor)) is not None:
            self._grow(-allocation.num_bytes, allocation.place)
            allocation.num_bytes = 0

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Note that a storage has so many bytes from now on."""
        allocation = self.allocations.get(id(storage))
        if allocation is None:
            return
        change = rounded(num_bytes) - allocation.num_bytes
        allocation.num_bytes += change
        self._grow(change, allocation.place)

    def reset_peak(self) -> None:
        self.end()
        self.peak = self.live

    def data(self) -> dict[str, Any]:
        """Return the record as plain data, for JSON."""
        counters = {
            name: [[*key, count] for key, count in getattr(self, name).items()]
            for name in ("syncs", "problems", "invented", "not_known")
        }
        return counters | {
            "events": self.events,
            "copies": [[*key, *entry] for key, entry in self.copies.items()],
            "memory": {phase: asdict(memory) for phase, memory in self.memory.items()},
        }

    def _grow(self, num_bytes: int, where: str) -> None:
        self.live += num_bytes
        self._by_place[where] += num_bytes
        if not self.is_merging:
            self._note_growth()

    def _note_growth(self) -> None:
        if self.live > self.peak:
            self.peak = self.live
            if self.live > self._noted * NEW_PEAK:
                self._note_peak()

    def _note_peak(self) -> None:
        self._noted = self.live
        if self.phase in self.memory:
            places = {key: size for key, size in self._by_place.items() if size > 0}
            self.memory[self.phase].by_place = places

    def _free(self, key: int, reference: object) -> None:
        allocation = self.allocations.pop(key, None)
        if allocation is not None:
            self.live -= allocation.num_bytes
            self._by_place[allocation.place] -= allocation.num_bytes


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // ROUNDING) * ROUNDING


def place() -> str:
    """Return the two innermost lines outside torch and this package, or the autograd node."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < 2:
        name = shown_name(frame.f_code.co_filename)
        if name:
            lines.append(f"{name}:{frame.f_lineno}({frame.f_code.co_name})")
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    if node is not None and len(lines) < 2:
        lines.append(f"backward of {node.name().removesuffix('Backward0')}")
    return " <- ".join(lines)


@cache
def shown_name(path: str) -> str:
    """Return the path from its package on; "" for files that a place leaves out."""
    if path.startswith((HERE, "<")) or "/torch/" in path or "/lib/python3" in path:
        parts = path.split("site-packages/")
        if len(parts) == 1 or parts[1].startswith(("torch/", "typing_extensions")):
            return ""
    if "site-packages/" in path:
        return path.split("site-packages/")[1]
    for package in ("megatron_rl_tools/", "megatron_rl/", "megatron/core/"):
        if f"/{package}" in path:
            return package + path.rsplit(f"/{package}", 1)[1]
    return path.rpartition("/")[2]
