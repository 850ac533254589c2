"""Records of one push, a weight sync of the settings: how it was opened, what was sent, and its
report.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.weights.hf.export import Batch
from megatron_rl.weights.sync.transports import Targets


@dataclass(frozen=True)
class PushReport:
    """Measures of one push."""

    seconds: float
    """Duration of the push, without a later `serve`."""
    num_bytes: int
    """Bytes of one copy of the weights, not of one for each server."""
    num_buckets: int
    refused_flushes: int
    """Times that servers refused to empty their caches, because a finished request still counted as
    running (push.py)."""
    sent_bytes: tuple[int, ...]
    """Bytes of `num_bytes` that each rank sent."""
    verified: int | None = None
    """Tensors whose checksums were compared, over all servers; None: this push was not verified."""


@dataclass(frozen=True)
class Opened:
    """A push that rank 0 has opened, as every rank knows it."""

    name: str
    """Unique in the job's store."""
    refused: int
    """Refused flushes."""
    restarted: frozenset[str]
    """URLs of the servers that were started again since the last push."""
    is_due: bool
    """The servers' checksums are compared."""
    hash_export: bool
    """Rank 0 hashes the export for that."""
    is_part: bool
    """Only the tensors that training changes are sent (PushedWeights.changing)."""
    targets: Targets


@dataclass
class Sent:
    """The buckets of all sources."""

    is_part: bool = False
    """They have only the tensors that training changes."""
    num_bytes: int = 0
    num_buckets: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    """HF name -> number of its bucket."""

    def add(self, number: int, batch: Batch) -> None:
        self.num_buckets += 1
        self.num_bytes += batch.num_bytes
        self.numbers.update((tensor.name, number) for tensor in batch.tensors)
