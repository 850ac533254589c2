"""Writes the traces of the steps that run.trace names: RUN/trace/STEP/rank_00000.json.gz of every
rank.

Nothing is gathered over ranks: `megatron-rl trace RUN` merges the files.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_rl.config import Config
from megatron_rl.config.redact import Redactor
from megatron_rl.distributed import Parallel
from megatron_rl.distributed.trace_collectives import trace_collectives
from megatron_rl.launch.trace import Trace
from megatron_rl.launch.trace_file import (
    LAST,
    SharedClock,
    gpu_path,
    rank_path,
    step_folder,
    step_folder_name,
    write_trace,
)
from megatron_rl.metrics.file_writer import FileWriter


class StepTrace:
    """Traces of the steps that run.trace names; use it as a context manager.

    trace: the Trace that the parts of the run record into.  The exit writes the last step, also
    after an error, but then without the GPU, which may never answer.
    """

    def __init__(self, cfg: Config, parallel: Parallel, files: FileWriter) -> None:
        self.cfg, self.parallel, self.files = cfg, parallel, files
        self.trace = Trace(is_on=cfg.run.trace != "off")
        self._redactor = Redactor(hidden=cfg.key_variables)
        self._step: int | None = None  # the step that is traced now
        self._stack = ExitStack()

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.end(failed=kind is not None)

    def begin(self, step: int) -> None:
        """End the step before, and trace this one if it is due.  Collective if it is."""
        self.end()
        self.trace.take()  # discard what was recorded between traced steps
        if not self.cfg.run.traces(step):
            return
        group = self.parallel.host_group
        # the first barrier waits for late ranks, so that all leave the second one together
        dist.barrier(group)
        dist.barrier(group)
        self._clock = SharedClock(socket.gethostname(), time.monotonic_ns(), time.time_ns())
        self._step = step
        self._stack.enter_context(trace_collectives(self.trace))
        if self.parallel.device.type == "cuda":
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()

    def end(self, *, failed: bool = False) -> None:
        """Write what was recorded since `begin`: the step, and what followed it.

        failed: write nothing of the GPU, which may never answer.
        """
        step, self._step = self._step, None
        if step is None:
            return
        on_gpu = self.parallel.device.type == "cuda"
        if on_gpu and not failed:
            torch.cuda.synchronize()  # kernels in progress belong to the step
            self._profile.stop()
        self._stack.close()
        rank, world_size, redact = self.parallel.rank, self.parallel.world_size, self._redactor.tree
        name = LAST if self.cfg.run.trace == LAST else step_folder_name(step)
        path = rank_path(step_folder(self.cfg.run_dir, name), rank)
        write = partial(
            write_trace,
            rank=rank,
            world_size=world_size,
            step=step,
            clock=self._clock,
            redact=redact,
        )
        self.files.later(path, partial(write, path, self.trace.take()))
        if on_gpu:
            gpu = gpu_path(path.parent, rank)
            write_gpu = partial(remove, gpu) if failed else partial(export, self._profile, gpu)
            self.files.now(gpu, write_gpu)


def export(gpu_profile: profile, path: Path) -> None:
    """Write the profile of a rank, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    gpu_profile.export_chrome_trace(str(temporary))
    temporary.replace(path)


def remove(path: Path) -> None:
    """Remove the profile of an earlier step, or of an earlier attempt at this one."""
    path.unlink(missing_ok=True)
