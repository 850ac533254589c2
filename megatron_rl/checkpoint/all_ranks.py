"""Exchanges between ranks about a save or a load, so that all of them succeed or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from megatron_rl.checkpoint.folder import CheckpointError
from megatron_rl.engine.engine import Engine

T = TypeVar("T")


def gather_values(value: T) -> list[T]:
    """Return the value of every rank, on every rank.  Collective."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def gather_on_rank_0(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the value of every rank on rank 0, and [] on the others.  Collective.

    `group` has all ranks, over gloo.
    """
    values: list[T | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, group=group)
    return cast(list[T], values or [])


def on_every_rank(work: Callable[[], T]) -> T:
    """Return the result of `work` on this rank.

    Collective: an error on any rank is raised as CheckpointError on all of them.
    """
    # nothing is raised before all ranks know: a rank that raised alone would leave the others
    # waiting in the next collective
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # raised below, on every rank
        failure = f"rank {dist.get_rank()}: {reason_of_error(error)}"
    if failures := [text for text in gather_values(failure) if text is not None]:
        raise CheckpointError(failures[0])
    return cast(T, result)


def reason_of_error(error: BaseException) -> str:
    """Name the first OSError among the causes of an error, or the error itself where there is none.

    torch reports a full disk as an unexpected position in its file; the OSError is its cause.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = cause or error
    return f"{type(reason).__name__}: {reason}"


def layout_name(engine: Engine) -> str:
    """Return the parallel sizes above 1, such as "tp2 ep4", or "one rank"."""
    parallel = engine.parallel
    sizes = {
        axis: getattr(parallel, f"{axis}_size")
        for axis in ("tp", "pp", "vp", "cp", "ep", "etp", "dp")
    }
    return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one rank"
