"""Model, optimizer and random generators of this rank -> what a checkpoint holds, and back.

Optimizer: only what training made goes in: the two moments (and the float32 copy of bfloat16 weights) of every parameter, under
the parameter's own global name, and Adam's step count, which all parameters share because an update is applied or skipped
whole.  Everything else of it follows from the configuration and the schedule's position.  So a checkpoint knows nothing of how
many optimizers or ranks there were, and loads into any layout.
"""

from __future__ import annotations

import megatron_rl.distributed  # noqa: F401  before megatron-core: makes it work without CUDA, and quiet

# isort: split
import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_rl.engine.engine import Engine

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


# Model and optimizer ------------------------------------------------------------------------------------------------


def sharded_state(engine: Engine) -> dict[str, Any]:
    """What dist_checkpointing saves of this rank: sharded tensors only, whose names are the same in every layout.

    Collective with the distributed optimizer, which gathers its state.
    """
    models = _models(engine)
    parts = [_tensors_of(_optimizer_state(optimizer, models)) for optimizer in inner_optimizers(engine)]
    return models | {"optimizer": {str(index): tensors for index, tensors in enumerate(parts)}}


class Loading:
    """The same for a load: `request` is what dist_checkpointing fills; `apply` puts the outcome into the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        models = _models(engine)
        states = [_optimizer_state(optimizer, models, is_loading=True) for optimizer in inner_optimizers(engine)]
        tensors = {str(index): _tensors_of(state) for index, state in enumerate(states)}
        self.request: dict[str, Any] = models | {"optimizer": tensors}

    def apply(self, loaded: dict[str, Any], *, adam_step: float) -> None:
        """`loaded`: the filled request; `adam_step`: updates that Adam has made."""
        for index, chunk in enumerate(self._engine.chunks):
            chunk.load_state_dict(loaded[f"model{index}"])
        for index, optimizer in enumerate(inner_optimizers(self._engine)):
            if optimizer.optimizer is None:  # no parameter of its kind on this rank
                continue
            _fill(optimizer, loaded["optimizer"][str(index)])
            set_adam_step(optimizer.optimizer, adam_step)


def adam_step(engine: Engine) -> float:
    """Updates that Adam has made: the same for every parameter.  ValueError should they differ."""
    steps = {
        float(step)
        for optimizer in inner_optimizers(engine)
        if optimizer.optimizer is not None
        for step in _steps_of(optimizer.optimizer)
    }
    if len(steps) > 1:
        raise ValueError(f"Adam has made {sorted(steps)} updates, rule: equally many of every parameter")
    return steps.pop() if steps else 0.0


def set_adam_step(optimizer: torch.optim.Optimizer, step: float) -> None:
    """A count of its own for every parameter: Adam increments it in place."""
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        for entry in optimizer.state.values():
            entry["step"] = torch.tensor(step, dtype=torch.float32)
    else:  # fused ones count in their parameter groups
        for group in optimizer.param_groups:
            group["step"] = int(step)


def inner_optimizers(engine: Engine) -> list[MegatronOptimizer]:
    """core keeps one optimizer for dense and one for expert parameters where their ranks differ."""
    core = engine.optimizer.core
    return list(getattr(core, "chained_optimizers", [core]))


def _models(engine: Engine) -> dict[str, Any]:
    return {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(engine.chunks)}


def _optimizer_state(
    optimizer: MegatronOptimizer, models: dict[str, Any], *, is_loading: bool = False
) -> dict[str, Any]:
    """core's structure, sharded tensors among plain values; {} where this rank has none of the optimizer's parameters."""
    if optimizer.optimizer is None:
        return {}
    _fill_moments(optimizer.optimizer)
    is_distributed = isinstance(optimizer, DistributedOptimizer)
    return optimizer.sharded_state_dict(models, is_loading=is_loading and is_distributed, metadata=METADATA)


def _fill(optimizer: MegatronOptimizer, tensors: dict[str, Any]) -> None:
    """Copy loaded tensors, in core's structure, into an optimizer."""
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        for entry in inner.state.values():
            entry.pop("step", None)  # core would look for every entry among the tensors
        optimizer.load_parameter_state_from_fully_reshardable(tensors["param_state"])
        return
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    for index, moments in tensors.get("optimizer", tensors)["state"].items():  # torch numbers parameters in this order
        for name, value in moments.items():
            inner.state[parameters[index]][name].copy_(value)
    masters = [tensor for group in tensors.get("fp32_from_fp16_params", []) for tensor in group]
    if masters:
        ours = [tensor for group in optimizer.fp32_from_float16_groups for tensor in group]
        for mine, loaded in zip(ours, masters, strict=True):
            mine.data.copy_(loaded)


def _fill_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zeros before the first update, so that a checkpoint of step 0 has the same parts as every other."""
    missing = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state[p]]
    for parameter in missing:
        optimizer.state[parameter] = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
    if missing:
        set_adam_step(optimizer, 0.0)


def _steps_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for entry in optimizer.state.values():
        if "step" in entry:
            yield entry["step"]
    for group in optimizer.param_groups:
        if group["params"] and "step" in group:
            yield group["step"]


def _tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    return extract_matching_values(state, lambda value: isinstance(value, ShardedBase))[0]


# Random generators --------------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Tensor]:
    """Every random generator of this process: python, numpy, torch, cuda (where there is one), megatron-core's tracker."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    assert (version, name) == (3, "MT19937")
    state = {
        "python/words": torch.tensor(words, dtype=torch.int64),
        "python/gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy/keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy/position": torch.tensor([position, has_gauss]),
        "numpy/cached": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    return state | {f"tracker/{name}": value.clone() for name, value in tracker.get_states().items()}


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Put back what rng_state() gave.  ValueError where this process has other generators."""
    have, tracker = rng_state(), tensor_parallel.get_cuda_rng_tracker()
    if state.keys() != have.keys():
        differing = ", ".join(sorted(state.keys() ^ have.keys()))
        raise ValueError(f"random generators {differing} are on one side only; resume on the same kind of device")
    gauss = state["python/gauss"].tolist()
    random.setstate((3, tuple(state["python/words"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = state["numpy/position"].tolist()
    keys = state["numpy/keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(state["numpy/cached"])))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    tracker.set_states({name: state[f"tracker/{name}"] for name in tracker.get_states()})
