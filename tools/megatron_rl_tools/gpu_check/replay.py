"""Steps that check routing replay and checkpoints in bf16, with the layers of this device."""

from __future__ import annotations

import math

import torch
from safetensors.torch import load_file

from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
from megatron_rl.checkpoint.folder import latest_checkpoint
from megatron_rl.checkpoint.state import adam_step, inner_optimizers
from megatron_rl.distributed import make_parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.optim import torch_optimizers
from megatron_rl_tools.convert.convert_hf import convert
from megatron_rl_tools.gpu_check.material import (
    QWEN3_MOE,
    check_batch,
    check_samples,
    check_step_config,
    engine_of,
)
from megatron_rl_tools.gpu_check.memory_steps import step
from megatron_rl_tools.gpu_check.result import Figure, Findings, StepOutcome
from megatron_rl_tools.gpu_check.steps import StepPlace
from megatron_rl_tools.verify_replay.fingerprints import make_given
from megatron_rl_tools.verify_replay.passes import Proof
from megatron_rl_tools.verify_replay.random_checkpoint import write_random_checkpoint
from megatron_rl_tools.verify_replay.verify_replay import shape_of

COMBINATIONS = [
    (mode, recompute) for mode in ("R3", "R2") for recompute in ("none", "full", "selective")
]
QUICK = [("R3", "none"), ("R3", "full"), ("R2", "selective")]
SAVE_LIMIT = 1.1
"""The most that the peak of a save / the memory before it may be."""


def replay_layouts(place: StepPlace) -> StepOutcome:
    """Check each mode with each kind of recompute: the experts that routers used, and the gradients
    of a replayed live pass.
    """
    findings = Findings()
    path = place.folder / "model"
    path.mkdir()
    spec = write_random_checkpoint(QWEN3_MOE, path, dtype=torch.bfloat16)
    fixed = {"lr": 0.0, "weight_decay": 0.0, "distributed": False, "clip_grad": 0.0}
    for mode, recompute in QUICK if place.quick else COMBINATIONS:
        cfg = check_step_config(
            path,
            place.device,
            model={"recompute": recompute},
            replay={"mode": mode, "measure": False},
            optim=fixed,
        )
        parallel = make_parallel(cfg.parallel, device=place.device, timeout_minutes=5)
        try:
            proof = Proof(cfg, parallel, make_given(shape_of(spec, parallel, 2)), spec)
            checks, _ = proof.run_rounds()
            checks.append(proof.replay_live()[0])
        finally:
            parallel.destroy()
        name = f"{mode}, recompute {recompute}"
        findings.figures[name] = {check.name: check.detail for check in checks}
        for check in checks:
            findings.check(check.passed, f"{name}: {check.name}: {check.detail}")
    return findings.outcome


def checkpoint(place: StepPlace) -> StepOutcome:
    """Check that a new engine which loads the checkpoint of one update makes the same second
    update, and that the converter writes the same weights.
    """
    findings = Findings()
    path = place.folder / "model"
    path.mkdir()
    # 0.2 G parameters
    wider = {"hidden_size": 1024, "num_experts": 32, "moe_intermediate_size": 512}
    size = {} if place.quick or place.device == "cpu" else wider
    spec = write_random_checkpoint(QWEN3_MOE | size, path, dtype=torch.bfloat16)
    cfg = check_step_config(
        path, place.device, replay={"mode": "R3", "measure": False}, optim={"lr": 1e-3}
    )
    samples = check_samples(spec, (50, 90, 120))
    with engine_of(cfg) as engine:
        step(engine, check_batch(engine, samples), "R3")
        saved, moments = weights(engine), optimizer_state(engine)
        findings.figures |= save(engine, place, findings)
        step(engine, check_batch(engine, samples), "R3")
        continued = weights(engine)
    folder = latest_checkpoint(place.folder / "checkpoints")
    assert folder is not None
    with engine_of(cfg) as engine:
        Checkpointer(engine, place.folder / "checkpoints").load(folder)
        is_same = are_same(weights(engine), saved)
        findings.check(is_same, "the loaded weights are not the saved ones")
        is_same = are_same(optimizer_state(engine), moments)
        findings.check(is_same, "the loaded optimizer state is not the saved one")
        step(engine, check_batch(engine, samples), "R3")
        resumed = weights(engine)
    # torch's max keeps NaN, Python's may not
    differences = [(resumed[name] - tensor).abs().max() for name, tensor in continued.items()]
    difference = float(torch.stack(differences).max())
    findings.check(math.isfinite(difference), "weights after the second update are not finite")
    findings.figures["largest difference after the second update"] = difference
    if place.device == "cpu":  # on a GPU atomics add gradients in any order
        findings.check(
            difference == 0, f"a resumed update differs from the continued one by {difference:.2g}"
        )
    convert(folder, place.folder / "hf", config=path)
    written = {
        name: tensor
        for file in (place.folder / "hf").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    problem = "the converted HF checkpoint does not have the saved weights"
    findings.check(are_same(written, saved), problem)
    findings.figures["tensors converted"] = len(written)
    return findings.outcome


def save(engine: Engine, place: StepPlace, findings: Findings) -> dict[str, Figure]:
    on_gpu = place.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated() if on_gpu else 0
    writer = Checkpointer(engine, place.folder / "checkpoints")
    writer.save(Snapshot(1, {}))
    writer.wait()
    if not on_gpu:
        findings.not_run.append("peak memory of a save: torch counts the memory of a GPU only")
        return {}
    ratio = torch.cuda.max_memory_allocated() / allocated
    findings.check(
        ratio <= SAVE_LIMIT,
        f"a save needs {ratio:.2f} times the memory before it (limit {SAVE_LIMIT})",
    )
    return {"GiB before the save": allocated / 2**30, "peak of the save / before": ratio}


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Return HF name -> a copy on the host."""
    return {name: tensor.cpu().clone() for name, tensor in engine.export() if tensor is not None}


def optimizer_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return a copy on the host of every tensor of the optimizers, by position and name."""
    state = {"step": torch.tensor(adam_step(engine))}
    for number, optimizer in enumerate(inner_optimizers(engine)):
        parts = torch_optimizers(optimizer.optimizer) if optimizer.optimizer is not None else []
        for part_number, part in enumerate(parts):
            parameters = [tensor for group in part.param_groups for tensor in group["params"]]
            for index, parameter in enumerate(parameters):
                place = f"{number}.{part_number}.{index}"
                state[place] = parameter.detach().cpu().clone()
                for name, value in part.state[parameter].items():
                    if isinstance(value, torch.Tensor):
                        state[f"{place}.{name}"] = value.detach().cpu().clone()
    return state


def are_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.equal(other[name].to(tensor.dtype)) for name, tensor in one.items()
    )
