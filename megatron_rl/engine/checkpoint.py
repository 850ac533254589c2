"""Checkpoints of the whole run state with megatron-core's dist_checkpointing: model, optimizer, schedule, data cursor.

A checkpoint is written to a hidden directory and renamed when it is complete, so `latest` never sees a half-written one.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_rl.engine.engine import Engine

OPTIMIZER_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def save_checkpoint(engine: Engine, folder: Path, step: int, progress: dict[str, Any]) -> Path:
    """Write `folder`/step_NNNNNN after `step` finished steps.  Collective.  `progress` holds plain values (cursor, version)."""
    final = folder / f"step_{step:06d}"
    temporary = folder / f".step_{step:06d}.tmp"
    if engine.parallel.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(
        run_state(engine, is_loading=False) | {"progress": {"step": step, **progress}}, str(temporary)
    )
    dist.barrier()
    if engine.parallel.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
    dist.barrier()
    return final


def load_checkpoint(engine: Engine, path: Path) -> dict[str, Any]:
    """Restore the engine from `path`; returns the saved `progress`.  Collective.

    Raises ValueError for the distributed optimizer without a GPU: megatron-core then restores Adam's step counts wrongly.
    """
    if engine.cfg.optim.distributed and engine.parallel.device.type == "cpu":
        raise ValueError(
            f"checkpoint.resume from {path}: optim.distributed = true cannot be resumed on a CPU (megatron-core restores Adam's "
            "step counts wrongly there); set optim.distributed = false, or checkpoint.resume = false to start over"
        )
    state = run_state(engine, is_loading=True) | {"progress": {}}
    loaded = dist_checkpointing.load(state, str(path))
    for index, chunk in enumerate(engine.chunks):
        chunk.load_state_dict(loaded[f"model{index}"])
    engine.optimizer.core.load_state_dict(loaded["optimizer"])
    engine.optimizer.scheduler.num_steps = 0  # core's load adds the saved count to it
    engine.optimizer.scheduler.load_state_dict(loaded["schedule"])
    return dict(loaded["progress"])


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    found = [
        path
        for path in folder.glob("step_*")
        if re.fullmatch(r"step_\d+", path.name) and (path / "metadata.json").exists()
    ]
    return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def run_state(engine: Engine, *, is_loading: bool) -> dict[str, Any]:
    """The sharded state dict that core saves, or fills when loading."""
    models = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(engine.chunks)}
    metadata = OPTIMIZER_METADATA if engine.cfg.optim.distributed else None
    optimizer = engine.optimizer.core.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    schedule = engine.optimizer.scheduler.state_dict()
    return {**models, "optimizer": optimizer, "schedule": schedule}
