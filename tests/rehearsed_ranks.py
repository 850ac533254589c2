"""Small programs of virtual ranks, for tests/unit/tools/test_rehearse_ranks.py.

    python -m tests.rehearsed_ranks NAME [RANK ...]

Prints as JSON what the program NAME returned on each rank, or the text of a disagreement.  A
process of its own, because the pretended GPU must be loaded before torch.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from typing import Any

from megatron_rl_tools.rehearse import native

WORLD_SIZE = 4
MILLION = 1_000_000


def main() -> int:
    name, *ranks = sys.argv[1:]
    warnings.simplefilter("ignore")
    library = native.load()
    import torch.distributed  # noqa: F401

    native.install_guard(library)
    from megatron_rl_tools.rehearse.device import PretendedGpu
    from megatron_rl_tools.rehearse.ranks import run_ranks
    from megatron_rl_tools.rehearse.recorder import Recorder
    from megatron_rl_tools.rehearse.switchboard import Disagreement, RankFailed

    gpu = PretendedGpu(Recorder(), 80 << 30)
    chosen = [int(rank) for rank in ranks] or list(range(WORLD_SIZE))
    try:
        results: Any = run_ranks(chosen, WORLD_SIZE, PROGRAMS[name], gpu)
        results = {
            rank: result.error if isinstance(result, RankFailed) else result
            for rank, result in results.items()
        }
    except Disagreement as error:
        results = str(error)
    print(json.dumps(results))
    return 0


def healthy(world: Any) -> list[Any]:
    """All kinds of calls, over two groups and two backends, and their values."""
    import torch
    from torch import distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    host = dist.new_group(backend="gloo")
    mine, rank = pairs[world.rank // 2], world.rank
    dist.all_reduce(torch.empty(MILLION, device="cuda"))
    objects: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(objects, {"rank": rank})
    hosts: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(hosts, rank, group=host)
    total = torch.tensor([rank + 1], device="cuda")
    dist.all_reduce(total, group=mine)
    received = torch.empty(2, dtype=torch.int64, device="cuda")
    sent = torch.tensor([rank, 7], device="cuda")
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.irecv, received, (rank - 1) % WORLD_SIZE),
        dist.P2POp(dist.isend, sent, (rank + 1) % WORLD_SIZE),
    ])  # fmt: skip
    for work in works:
        work.wait()
    counts = [[1, 2, 3, 4][(rank + other) % WORLD_SIZE] for other in range(WORLD_SIZE)]
    rows = torch.empty(sum(counts), 1000, device="cuda")
    output = torch.empty_like(rows)
    dist.all_to_all_single(output, rows, counts, counts)
    halves = torch.empty(MILLION // WORLD_SIZE, device="cuda")
    dist.reduce_scatter_tensor(halves, torch.empty(MILLION, device="cuda"))
    dist.all_gather_into_tensor(torch.empty(MILLION, device="cuda"), halves)
    parts = [torch.empty(MILLION, device="cuda") for _ in range(WORLD_SIZE * (rank == 2))]
    dist.gather(torch.empty(MILLION, device="cuda"), parts or None, dst=2)
    dist.scatter(torch.empty(MILLION, device="cuda"), parts or None, src=2)
    dist.barrier(group=host)
    problems = [text for _, text, _ in world.gpu.recorder.problems]
    return [objects, hosts, total.tolist(), received.tolist(), problems]


def faulty(kind: str) -> Any:
    """Return a program in which rank 1 does something else than the others."""

    def program(world: Any) -> None:
        import torch
        from torch import distributed as dist

        def reduce(size: int, dtype: torch.dtype = torch.float32) -> None:
            dist.all_reduce(torch.empty(size, device="cuda", dtype=dtype))

        is_wrong = world.rank == 1
        if not (is_wrong and kind == "skips"):
            reduce(MILLION)
        if is_wrong and kind == "repeats":
            reduce(MILLION)
        if is_wrong and kind == "reorders":
            reduce(3 * MILLION)
            reduce(2 * MILLION)
        else:
            reduce(2 * MILLION)
            reduce(3 * MILLION)
        reduce(MILLION, torch.bfloat16 if is_wrong and kind == "dtype" else torch.float32)
        reduce(MILLION + (is_wrong and kind == "size"))
        if is_wrong and kind == "branch":
            dist.barrier()
        if is_wrong and kind == "reduction":
            dist.all_reduce(torch.empty(MILLION, device="cuda"), op=dist.ReduceOp.MAX)
        else:
            reduce(MILLION)
        if kind == "gather":
            parts = [torch.empty(MILLION, device="cuda") for _ in range(4 * (world.rank == 0))]
            dist.gather(torch.empty(MILLION + is_wrong, device="cuda"), parts or None, dst=0)
        if kind == "uneven" and world.rank == 0:
            dist.send(torch.empty(MILLION, device="cuda"), 1)
        if kind == "uneven" and is_wrong:
            dist.recv(torch.empty(2 * MILLION, device="cuda"), 0)
        if kind == "never sent" and is_wrong:
            dist.recv(torch.empty(2, device="cuda"), 0)
        if not (is_wrong and kind == "ends early"):
            reduce(4 * MILLION)

    return program


def raises(world: Any) -> None:
    """Rank 1 fails as a user's loss might; the others then wait for it, or have ended."""
    import torch
    from torch import distributed as dist

    dist.all_reduce(torch.empty(MILLION, device="cuda"))
    if world.rank == 1:
        raise ValueError("loss.name: no such term")
    dist.all_reduce(torch.empty(MILLION, device="cuda"))  # only compared: does not wait
    if world.rank == 2:
        objects: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(objects, world.rank)


def dies(world: Any) -> None:
    """Rank 1 is ended while it waits, as by a lack of memory; the others come later."""
    from torch import distributed as dist

    if world.rank == 1:
        threading.Timer(0.5, os._exit, [1]).start()
    else:
        time.sleep(2)
    for _ in range(2):
        dist.all_gather_object([None] * WORLD_SIZE, world.rank)


def crossed(world: Any) -> list[Any]:
    """Two groups of the same ranks, used in another order by rank 1; returns the events."""
    import torch
    from torch import distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if world.rank == 1:
        groups.reverse()
    if world.rank < 2:
        for group in groups:
            dist.all_reduce(torch.empty(MILLION, device="cuda"), group=group)
    return list(world.gpu.recorder.events)


def memory(world: Any) -> dict[str, Any]:
    """A linear layer and its backward pass in bfloat16, and what is left of them."""
    import torch

    recorder = world.gpu.recorder
    layer = torch.nn.Linear(1024, 2048, bias=False, device="cuda", dtype=torch.bfloat16)
    weights = recorder.live
    rows = torch.empty(512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output = layer(rows)
    forward = recorder.live
    output.sum().backward()
    gemms = [event for event in recorder.events if event[0] == "op" and event[4] == "gemm"]
    mask = torch.empty(10, device="cuda") > 0
    mask.nonzero()
    torch.empty(4, device="cuda").to("cpu")
    torch.ones(1 << 20).to("cuda")
    return {
        "weights": weights, "forward": forward, "flops": [event[5] for event in gemms],
        "syncs": [what for _, what, _ in recorder.syncs],
        "guessed": [name for name, _ in recorder.not_known],
        "copies": [[kind, *entry] for (_, kind, _), entry in recorder.copies.items()],
    }  # fmt: skip


def values(world: Any) -> list[Any]:
    """Compute with small tensors whose values are known, until one is not."""
    import torch

    counts = torch.tensor([3, 0, 5], device="cuda")
    ends = counts.cumsum(0)
    view = counts[1:]
    view += 1
    unknown = torch.empty(3, dtype=torch.int64, device="cuda")
    counts.add_(unknown)
    expert = torch.repeat_interleave(torch.tensor([0, 1], device="cuda"), ends[:2])
    return [ends.tolist(), view.tolist(), list(expert.shape), len(world.gpu.recorder.invented)]


FAULTS = (
    "skips", "repeats", "reorders", "dtype", "size", "branch", "reduction", "uneven", "never sent",
    "ends early", "gather",
)  # fmt: skip
PROGRAMS: dict[str, Any] = {
    "healthy": healthy,
    "crossed": crossed,
    "raises": raises,
    "dies": dies,
    "memory": memory,
    "values": values,
    **{kind: faulty(kind) for kind in FAULTS},
}

if __name__ == "__main__":
    sys.exit(main())
