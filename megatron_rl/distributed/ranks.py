"""Work that all ranks of a job do together, in which each of them may fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from megatron_rl.distributed.groups import Parallel

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job, as one of them sees them; by default it is the only one."""

    rank: int = 0
    group: dist.ProcessGroup | None = None
    """All ranks, over gloo; None: this one is alone."""
    store: dist.Store = field(default_factory=dist.HashStore)
    """The job's key-value store, with a connection of its own."""

    @classmethod
    def of(cls, parallel: Parallel) -> Ranks:
        """Return the ranks of a job with this layout."""
        return cls(parallel.rank, parallel.host_group, parallel.store() or dist.HashStore())

    def together(self, work: Callable[[], T], expected: type[Exception]) -> list[T]:
        """Return the result of work() on each rank, in their order.  Collective.

        Results are small, plain data.  Where some ranks raise `expected`, every rank raises it,
        with all messages.  Where one raises anything else, it raises that, and the others
        RuntimeError.
        """
        value, error = None, None
        try:
            value = work()
        except Exception as caught:  # raised below, when the other ranks know
            error = caught
        outcome = (value, None if error is None else (isinstance(error, expected), str(error)))
        outcomes = [outcome]
        if self.group is not None:
            outcomes = [outcome] * self.group.size()
            dist.all_gather_object(outcomes, outcome, group=self.group)
        failures = [
            (rank, *failure) for rank, (_, failure) in enumerate(outcomes) if failure is not None
        ]
        if not failures:
            return [cast(T, result) for result, _ in outcomes]
        unexpected = [(rank, text) for rank, is_expected, text in failures if not is_expected]
        # a rank's own error has its traceback
        if error is not None and (len(failures) == 1 or not isinstance(error, expected)):
            raise error
        if unexpected:
            raise RuntimeError(f"rank {unexpected[0][0]} stopped: {unexpected[0][1]}") from error
        raise expected("; ".join(f"rank {rank}: {text}" for rank, _, text in failures)) from error

    def on_rank_0(self, work: Callable[[], T], expected: type[Exception]) -> T:
        """Return on every rank what work() returns on rank 0.  Raises as `together` does."""
        return cast(T, self.together(lambda: work() if self.rank == 0 else None, expected)[0])
