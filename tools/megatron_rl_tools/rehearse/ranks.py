"""The virtual ranks: which of them to rehearse, and their processes."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl_tools.rehearse.device import PretendedGpu
from megatron_rl_tools.rehearse.groups import World
from megatron_rl_tools.rehearse.switchboard import RankFailed, Switchboard


def run_ranks(
    ranks: Sequence[int], world_size: int, program: Callable[[World], Any], gpu: PretendedGpu
) -> dict[int, Any]:
    """Run `program` on these ranks of a world, each in a process forked from this one.

    gpu: made in this process before anything that asks for CUDA was imported; each process has
    its own copy.  Returns rank -> what the program returned, or RankFailed; without the ranks that
    wait for one that failed.  Raises Disagreement (switchboard.py) where the ranks' collectives do
    not fit together.
    """
    context = multiprocessing.get_context("fork")
    pipes, processes = {}, []
    for rank in ranks:
        mine, theirs = context.Pipe()
        process = context.Process(
            target=run_rank, args=(rank, world_size, ranks, program, gpu, theirs), daemon=True
        )
        process.start()
        theirs.close()  # else the end of the process would not close the pipe
        pipes[rank] = mine
        processes.append(process)
    try:
        return Switchboard(pipes).serve()
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def run_rank(
    rank: int,
    world_size: int,
    ranks: Sequence[int],
    program: Callable[[World], Any],
    gpu: PretendedGpu,
    pipe: Any,
) -> None:
    """Run the program of one rank and send its result."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    try:
        with gpu:
            world = World(rank, world_size, ranks, gpu, pipe)
            world.start()
            result = program(world)
        gpu.recorder.end()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        result = RankFailed(rank, text, traceback.format_exc())
    pipe.send(("result", result))
    # what is left are autograd's threads, which nothing needs
    os._exit(0)
