"""The trainer's forward pass on saved tokens; no other file of the checks needs megatron_rl."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batch.pack import Sample, pack
from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import disable_tf32, make_parallel
from megatron_rl.engine.forward import Pipeline
from megatron_rl.engine.model import make_model, make_transformer_config, moe_routers
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config
from megatron_rl.records import Rollout
from megatron_rl.records.packed import PackedBatch
from megatron_rl.replay.manager import ReplayManager, Routes
from megatron_rl.weights.hf.load import load_hf


def make_forward(path: Path, dtype: str) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """Return the forward pass of a checkpoint, which loads the weights when it is called.

    Raises ModelError for a model that the trainer does not support.
    """
    model = ModelConfig.model_validate({"path": path, "dtype": dtype})
    return partial(live_routes, model, make_spec(load_hf_config(path)))


def live_routes(
    cfg: ModelConfig, spec: ModelSpec, tokens: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the experts int64 [S - 1, L, K] that the model chooses in every sequence."""
    layout = ParallelConfig()
    if cfg.is_exact:
        disable_tf32()
    parallel = make_parallel(layout)
    try:
        core = make_transformer_config(spec, cfg, layout, parallel.device)
        chunks = make_model(spec, cfg, core, parallel)
        load_hf(chunks, cfg.path, spec, parallel)
        for chunk in chunks:
            chunk.eval()
        routers = [(spec.moe_layers.index(layer), router) for layer, router in moe_routers(chunks)]
        manager = ReplayManager(routers, num_experts=spec.num_experts)
        samples = [Sample(bare_rollout(row), 0.0) for row in tokens]
        batches = [on_device(pack([sample]), parallel.device) for sample in samples]
        routes = [Routes() for _ in batches]
        passed = manager.run_pass(routes, training=False, record=True)
        with torch.no_grad(), passed as report:
            Pipeline(chunks, manager).run(batches, zero_loss, training=False)
        return [ids[:, :-1].transpose(0, 1).long().cpu().numpy() for ids in report.recorded or ()]
    finally:
        parallel.destroy()


def zero_loss(index: int, batch: PackedBatch, logits: Tensor) -> Tensor:
    return torch.zeros((), device=logits.device)


def bare_rollout(tokens: np.ndarray) -> Rollout:
    """Make a rollout with tokens only: a forward needs nothing else."""
    nothing = np.zeros(len(tokens) - 1, np.float32)
    return Rollout("canary", tokens, 1, nothing, None, "stop", nothing.astype(np.int32))


def on_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    moved: Mapping[str, Any] = {
        name: v.to(device) for name, v in vars(batch).items() if isinstance(v, Tensor)
    }
    return replace(batch, **moved)
