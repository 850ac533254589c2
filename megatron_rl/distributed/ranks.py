"""Work that all ranks of a job do together, in which each of them may fail, and its order between
them.
"""

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
    """The ranks of a job, as one of them sees them; by default it is the only one.

    group: all of them, over gloo.  store: the job's key-value store.
    """

    rank: int = 0
    group: dist.ProcessGroup | None = None
    store: dist.Store = field(default_factory=dist.HashStore)

    @classmethod
    def of(cls, parallel: Parallel) -> Ranks:
        """Of a job with this layout.  Each has a connection of its own to the store."""
        return cls(parallel.rank, parallel.host_group, parallel.store() or dist.HashStore())

    def together(self, work: Callable[[], T], expected: type[Exception]) -> list[T]:
        """The result of work() on each rank, in their order (small, plain data).  Collective: it
        waits for all of them.

        Where some raise `expected`, every rank raises it, with all messages.  Where one raises
        anything else, it raises that, and the others RuntimeError.
        """
        value, error = None, None
        try:
            value = work()
        except Exception as caught:  # raised below, when the other ranks know
            error = caught
        mine = (value, None if error is None else (isinstance(error, expected), str(error)))
        outcomes = [mine]
        if self.group is not None:
            outcomes = [mine] * self.group.size()
            dist.all_gather_object(outcomes, mine, group=self.group)
        failures = [(rank, *found) for rank, (_, found) in enumerate(outcomes) if found is not None]
        if not failures:
            return [cast(T, result) for result, _ in outcomes]
        unexpected = [(rank, text) for rank, is_expected, text in failures if not is_expected]
        if error is not None and (len(failures) == 1 or not isinstance(error, expected)):
            raise error
        if unexpected:
            raise RuntimeError(f"rank {unexpected[0][0]} stopped: {unexpected[0][1]}") from error
        raise expected("; ".join(f"rank {rank}: {text}" for rank, _, text in failures)) from error

    def on_rank_0(self, work: Callable[[], T], expected: type[Exception]) -> T:
        """What work() returns on rank 0, on every rank; see `together`."""
        return cast(T, self.together(lambda: work() if self.rank == 0 else None, expected)[0])
