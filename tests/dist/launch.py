"""Run a function on n gloo ranks, each a process of its own with real megatron-core.

Ranks are forked from a server process that has imported megatron-core once: an import costs each
rank 5 s of CPU time.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from megatron_rl.rollout.server.ports import free_port

PRELOAD = (
    "megatron_rl.trainer.build",
    "megatron_rl_tools.verify_replay.passes",
    "tests.dist.engines",
)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0
) -> list[Any]:
    """Call `fn(*args)` on every rank and return the results in rank order (plain picklable values,
    no tensors).

    `fn` is a module-level function; it finds RANK, WORLD_SIZE and MASTER_ADDR in its environment,
    as under torchrun, and may build and destroy several layouts in turn.  A rank that raises or
    dies fails the call with its traceback or exit code; all ranks end then, and after `timeout`
    seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    results = context.Queue()
    port = free_port()
    ranks = [
        context.Process(
            target=_run, args=(fn, rank, world_size, port, args, dict(os.environ), results)
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        return _collect(ranks, results, timeout)
    finally:
        for process in ranks:
            # with their children: megatron-core's checkpoint writer starts a helper that outlives a
            # kill
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _collect(ranks: list[Any], results: Any, timeout: float) -> list[Any]:
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(values) < len(ranks):
        try:
            rank, error, value = results.get(timeout=0.5)
        except queue.Empty:
            died = [
                i
                for i, process in enumerate(ranks)
                if i not in values and process.exitcode not in (None, 0)
            ]
            if died:
                raise RuntimeError(
                    f"rank {died[0]} died with exit code {ranks[died[0]].exitcode}"
                ) from None
            if time.monotonic() > deadline:
                waiting = [i for i in range(len(ranks)) if i not in values]
                raise TimeoutError(
                    f"ranks {waiting} had not finished after {timeout:.0f} s"
                ) from None
            continue
        if error is not None:
            raise RuntimeError(f"rank {rank} of {len(ranks)} failed:\n{error}")
        values[rank] = value
    return [values[rank] for rank in range(len(ranks))]


def _run(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    args: tuple[Any, ...],
    environ: dict[str, str],
    results: Any,
) -> None:
    os.setpgrp()
    os.environ.clear()  # the server's environment is that of the first test
    os.environ.update(environ)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        value = fn(*args)
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise
    results.put((rank, None, value))


def build(
    path: Any,
    *,
    dtype: str = "float32",
    load: bool = True,
    model: dict[str, Any] | None = None,
    **layout: Any,
) -> Any:
    """On a rank: (chunks, spec, config, parallel) of a checkpoint in this layout.

    End with parallel.destroy().
    """
    import torch.distributed as dist

    from megatron_rl.config import ModelConfig, ParallelConfig
    from megatron_rl.distributed import make_parallel
    from megatron_rl.engine.model import make_model, make_transformer_config
    from megatron_rl.models.families import make_spec
    from megatron_rl.models.spec import load_hf_config
    from megatron_rl.weights.hf.load import load_hf

    if not dist.is_initialized():  # kept for the layouts that follow in this process
        dist.init_process_group("gloo")
    model_cfg, parallel_cfg = (
        ModelConfig(path=path, dtype=dtype, **(model or {})),
        ParallelConfig(**layout),
    )
    parallel = make_parallel(parallel_cfg, device="cpu", timeout_minutes=2)
    spec = make_spec(load_hf_config(path))
    config = make_transformer_config(spec, model_cfg, parallel_cfg, parallel.device)
    chunks = make_model(spec, model_cfg, config, parallel)
    if load:
        load_hf(chunks, path, spec, parallel)
    return chunks, spec, config, parallel
