"""Model, optimizer and random generators of this rank <-> the content of a checkpoint.

Only the results of training are saved of the optimizer: the two moments of every parameter, the
float32 copy of bfloat16 weights (or the bits that the weights lack of it), under the parameter's
global name, and Adam's step count.  Tensors have the dtypes in which the optimizer keeps them.  The
count is the same for all parameters because an update is applied to all or to none.  Everything
else follows from the configuration and the position in the schedule.  So a checkpoint is
independent of the number of optimizers and ranks, of what is kept on the host, and loads into any
layout.
"""

from __future__ import annotations

# before megatron-core: makes it work without CUDA, and quiet
import megatron_rl.distributed  # noqa: F401

# isort: split
import random
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, StateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.checkpoint.torch_dist.optimizer_parts import sharded_parts, take_loaded
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.optim import core_optimizers, torch_optimizers
from megatron_rl.weights.adapters import is_adapter

# Model and optimizer ------------------------------------------------------------------------------


def sharded_state(engine: Engine) -> ShardedStateDict:
    """Return this rank's part of a checkpoint: sharded tensors only.

    Their names are the same in every layout, and they share the memory of model and optimizer.
    A load fills them, and `load_state` takes them then.
    """
    models = {
        f"model{index}": trained_tensors(engine, chunk.sharded_state_dict())
        for index, chunk in enumerate(engine.chunks)
    }
    make_moments(engine)
    states = [_optimizer_state(optimizer, models) for optimizer in inner_optimizers(engine)]
    return models | {"optimizer": {str(index): state for index, state in enumerate(states)}}


def load_state(engine: Engine, loaded: StateDict, *, adam_step: float) -> None:
    """Put a filled sharded_state into the engine.

    `adam_step` counts the updates that Adam has made.
    """
    for index, chunk in enumerate(engine.chunks):
        # with adapters, the base stays as it was loaded
        chunk.load_state_dict(loaded[f"model{index}"], strict=not engine.cfg.lora.rank)
    for index, optimizer in enumerate(inner_optimizers(engine)):
        if optimizer.optimizer is not None:  # None: no parameter of its kind on this rank
            _fill(optimizer, loaded["optimizer"][str(index)])
            set_adam_step(optimizer.optimizer, adam_step)


def trained_tensors(engine: Engine, tensors: ShardedStateDict) -> ShardedStateDict:
    """Return the adapters of a model's sharded tensors; all of these where there are none."""
    if not engine.cfg.lora.rank:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if is_adapter(name)}


def make_moments(engine: Engine) -> None:
    """Make Adam's moments, zeros, where there are none yet.

    Adam makes them in its first update: after the first rollout, too late to find out that they do
    not fit; and a checkpoint of step 0 has the same tensors as any other.
    """
    for optimizer in inner_optimizers(engine):
        if optimizer.optimizer is not None:
            fill_moments(optimizer.optimizer)


def adam_step(engine: Engine) -> float:
    """Return the updates that Adam has made, the same for every parameter.

    Raises ValueError if they differ.
    """
    steps = {
        float(step)
        for optimizer in inner_optimizers(engine)
        if optimizer.optimizer is not None
        for step in _steps_of(optimizer.optimizer)
    }
    if len(steps) > 1:
        raise ValueError(
            f"Adam has made {sorted(steps)} updates, must be the same number for every parameter"
        )
    return steps.pop() if steps else 0.0


def set_adam_step(optimizer: torch.optim.Optimizer, step: float) -> None:
    """Set Adam's step count."""
    for part in torch_optimizers(optimizer):
        counts_in_state = isinstance(part, torch.optim.Adam | torch.optim.AdamW)
        for group in part.param_groups:
            if not counts_in_state:  # TransformerEngine's
                group["step"] = int(step)
                continue
            for parameter in group["params"]:
                # one each: Adam increments it in place, a fused one on the parameter's device
                device = parameter.device if group["fused"] else "cpu"
                part.state[parameter]["step"] = torch.tensor(
                    step, dtype=torch.float32, device=device
                )


def inner_optimizers(engine: Engine) -> list[MegatronOptimizer]:
    """Return core's optimizers of this rank."""
    return core_optimizers(engine.optimizer.core)


def _optimizer_state(optimizer: MegatronOptimizer, models: ShardedStateDict) -> ShardedStateDict:
    """Return sharded tensors in core's structure.

    It is {} where this rank has none of the optimizer's parameters.
    """
    if optimizer.optimizer is None:
        return {}
    if isinstance(optimizer, DistributedOptimizer):
        return sharded_parts(optimizer, models)
    state = optimizer.sharded_state_dict(models, is_loading=False)
    tensors: ShardedStateDict = extract_matching_values(
        state, lambda value: isinstance(value, ShardedBase)
    )[0]
    return tensors


def _fill(optimizer: MegatronOptimizer, tensors: StateDict) -> None:
    """Copy loaded tensors, in core's structure, into an optimizer."""
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        take_loaded(optimizer)
        return
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    # torch numbers parameters in this order
    for index, moments in tensors.get("optimizer", tensors)["state"].items():
        for name, value in moments.items():
            inner.state[parameters[index]][name].copy_(value)
    masters = [tensor for group in tensors.get("fp32_from_fp16_params", []) for tensor in group]
    if masters:
        ours = [tensor for group in optimizer.fp32_from_float16_groups for tensor in group]
        for master, loaded in zip(ours, masters, strict=True):
            master.data.copy_(loaded)


def fill_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create zero moments and step counts as the optimizer's first update would."""
    missing = [
        (part, parameter)
        for part in torch_optimizers(optimizer)
        for group in part.param_groups
        for parameter in group["params"]
        if not part.state[parameter]
    ]
    for part, parameter in missing:
        if hasattr(part, "initialize_state"):  # TransformerEngine's, whose state has its own dtypes
            has_low_bits = getattr(part, "store_param_remainders", False)
            has_low_bits = has_low_bits and parameter.dtype is torch.bfloat16
            part.initialize_state(parameter, has_low_bits)
        else:
            part.state[parameter] = {
                name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")
            }
    if missing:
        set_adam_step(optimizer, 0.0)
    if isinstance(optimizer, HybridDeviceOptimizer):
        # core's map from its parameters to the state of its parts, which an update makes
        optimizer._sync_sub_optimizers_state_to_hdo()


def _steps_of(optimizer: torch.optim.Optimizer) -> Iterator[float | Tensor]:
    for part in torch_optimizers(optimizer):
        for entry in part.state.values():
            if "step" in entry:
                yield entry["step"]
        for group in part.param_groups:
            if group["params"] and "step" in group:
                yield group["step"]


# Random generators --------------------------------------------------------------------------------


def rng_state() -> dict[str, Tensor]:
    """Return the state of every random generator of this process.

    These are Python's, numpy's, torch's, CUDA's (where there is one) and megatron-core's tracker.
    """
    version, numbers, gauss = random.getstate()
    # numpy's global generator, which user code may draw from
    legacy = cast(tuple[str, NDArray[np.uint32], int, int, float], np.random.get_state())
    name, keys, position, has_gauss, cached = legacy
    assert (version, name) == (3, "MT19937")
    state = {
        "python/words": torch.tensor(numbers),
        "python/gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy/keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy/position": torch.tensor([position, has_gauss]),
        "numpy/cached": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    return state | {
        f"tracker/{name}": value.clone() for name, value in tracker.get_states().items()
    }


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Restore the result of rng_state().

    Raises ValueError where this process has other generators.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if differing := state.keys() ^ rng_state().keys():
        names = ", ".join(sorted(differing))
        raise ValueError(
            f"random generators {names} are only in the checkpoint or only here; resume on the same"
            " kind of device"
        )
    gauss = state["python/gauss"].tolist()
    random.setstate((3, tuple(state["python/words"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = state["numpy/position"].tolist()
    keys = state["numpy/keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(state["numpy/cached"])))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    tracker.set_states({name: state[f"tracker/{name}"] for name in tracker.get_states()})
