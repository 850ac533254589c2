"""Spans of this rank's collectives: the times at which it waits for others.

For the time of a traced step the functions of torch.distributed are replaced, as no hook of torch
reports when a call of any backend begins and ends.  Calls of `torch.distributed.NAME` are seen,
which is how megatron-core and this package call them.  (torch.profiler has them too, with every
operator: 100 times the events.)

On a CPU a collective returns when it is done, so its span is the wait for the slowest rank and the
transfer.  NCCL's return when they are queued: there torch's profile of the GPU has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import Signature, signature
from typing import Any

import torch.distributed as dist

from megatron_rl.launch.trace import Trace

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "barrier", "all_gather", "all_gather_into_tensor",
    "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv", "all_gather_object",
    "gather_object", "broadcast_object_list", "scatter_object_list",
)  # fmt: skip


@contextmanager
def trace_collectives(trace: Trace) -> Iterator[None]:
    """Record a span of each call inside the block, and of each wait for one that was started."""
    before = {name: getattr(dist, name) for name in (*COLLECTIVES, "P2POp")}
    replaced = {name: traced(trace, name, before[name]) for name in COLLECTIVES}
    originals = {function: before[name] for name, function in replaced.items()}

    def p2p_op(op: Callable[..., Any], *args: Any, **kwargs: Any) -> dist.P2POp:
        """Make a P2POp with torch's own isend or irecv, to which P2POp compares `op`."""
        return before["P2POp"](originals.get(op, op), *args, **kwargs)

    for name, function in (replaced | {"P2POp": p2p_op}).items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def traced(trace: Trace, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with trace.span(
            name, "collective", ranks=dist.get_world_size(group_of_call(parameters, args, kwargs))
        ):
            result = function(*args, **kwargs)
        return watched(trace, name, result)

    return call


def group_of_call(
    parameters: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dist.ProcessGroup | None:
    """Return the group of a call, which names it by position or keyword.

    A batch of P2POps has the group of its first.
    """
    values = parameters.bind(*args, **kwargs).arguments
    batch: Sequence[dist.P2POp] = values.get("p2p_op_list", ())
    group: dist.ProcessGroup | None = batch[0].group if batch else values.get("group")
    return group


def watched(trace: Trace, name: str, result: Any) -> Any:
    """Return the result of a collective; the `wait` of a call in progress is recorded."""
    if isinstance(result, list):
        return [watched(trace, name, item) for item in result]
    return TracedWork(trace, name, result) if isinstance(result, dist.Work) else result


class TracedWork:
    """A dist.Work whose `wait` is recorded."""

    def __init__(self, trace: Trace, name: str, work: dist.Work) -> None:
        self._trace, self._name, self._work = trace, name, work

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._trace.span(f"wait for {self._name}", "collective"):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
