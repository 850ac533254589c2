"""The step that measures the speed of four layers of Qwen3-30B-A3B on one GPU against the planner;
on a CPU it runs a small model, to test the step's logic.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from megatron_rl.config import Config
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.pass_results import ReplayMode
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.models.known import KNOWN
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.hardware import HARDWARE, Assumptions, Hardware
from megatron_rl.plan.memory import rank_memory
from megatron_rl.plan.training_time import Tokens, TrainingModel
from megatron_rl.records.packed import MiniBatch
from megatron_rl_tools.gpu_check.material import (
    QWEN3_MOE,
    check_batch,
    check_samples,
    check_step_config,
    engine_of,
    uses_te,
)
from megatron_rl_tools.gpu_check.result import Figure, Findings, StepOutcome
from megatron_rl_tools.gpu_check.steps import StepPlace
from megatron_rl_tools.verify_replay.random_checkpoint import write_random_checkpoint

REPLAY_GOAL = 1.005
REPLAY_LIMIT = 1.02
"""The most that a step with R3 / without replay may take.

The goal is smaller than the limit because single measurements vary by more."""


class Variant(NamedTuple):
    name: str
    permute_fusion: bool = True
    fused_lm_head: bool = False


class Seconds(NamedTuple):
    old_logprob: float
    update: float

    @property
    def total(self) -> float:
        return self.old_logprob + self.update


def real_layers(place: StepPlace, layers: int) -> tuple[Path, ModelSpec]:
    """Write a random checkpoint with this many layers of Qwen3-30B-A3B, or on a CPU of a model a
    thousand times smaller.
    """
    path = place.folder / "model"
    path.mkdir()
    config = KNOWN["qwen3-30b-a3b"] if place.device == "cuda" else QWEN3_MOE
    return path, write_random_checkpoint(
        {**config, "num_hidden_layers": layers}, path, dtype=torch.bfloat16
    )


def speed(place: StepPlace) -> StepOutcome:
    findings = Findings()
    path, spec = real_layers(place, 4)
    sizes = (9216, 36_864) if place.device == "cuda" else (512, 1024)
    rows = sizes[:1] if place.quick else sizes
    has_te = uses_te(check_step_config(path, place.device))
    variants = [Variant("as shipped", has_te), Variant("fused LM head", has_te, True)]
    if has_te:
        variants.append(Variant("permute fusion off", False))
    else:
        findings.not_run.append("permute fusion needs TransformerEngine on a GPU")
    for count, variant in itertools.product(rows, variants):
        cfg = check_step_config(
            path,
            place.device,
            model={"recompute": "full", "fused_lm_head": variant.fused_lm_head},
            run={"max_tokens_per_micro_batch": count},
            megatron={"moe_permute_fusion": variant.permute_fusion},
        )
        name = f"{count} rows, {variant.name}"
        if place.device == "cuda":
            needed = rank_memory(spec, cfg, 1, 0).total
            total = torch.cuda.get_device_properties(0).total_memory
            if needed > 0.95 * total:
                findings.not_run.append(
                    f"{name}: computed {needed / 2**30:.0f} of {total / 2**30:.0f} GiB"
                )
                continue
        findings.figures[name] = measure(cfg, findings, name)
    return findings.outcome


def measure(cfg: Config, findings: Findings, name: str) -> dict[str, Figure]:
    count = cfg.run.max_tokens_per_micro_batch
    length = min(4608, count // 2)
    with engine_of(cfg) as engine:
        batch = check_batch(engine, check_samples(engine.spec, [length] * (count // length)))
        without, with_replay = times(engine, batch, ("none", "R3"))
        spec = engine.spec
    ratio = with_replay.total / without.total
    is_gpu = cfg.run.device == "cuda"
    findings.check(
        ratio <= REPLAY_LIMIT or not is_gpu,
        f"{name}: R3 takes {ratio:.3f} of the time without (limit {REPLAY_LIMIT}, goal"
        f" {REPLAY_GOAL})",
    )
    figures: dict[str, Figure] = {
        "tokens/s": count / without.total,
        "old-logprob s": without.old_logprob,
        "update s": without.update,
        "R3 / none": ratio,
    }
    row = hardware_here() if is_gpu else HARDWARE["cpu"]
    if row is None:
        name = torch.cuda.get_device_name()
        return figures | {"planner": f"no row for {name} in plan/hardware.py"}
    # the batch is full, and there are no other ranks to wait for
    trainer = TrainingModel(spec, cfg, 1, row, Assumptions(fill=1.0, lockstep=1.0))
    tokens = Tokens(count // length, length, length)
    computed = trainer.old_logprob(tokens).total + trainer.update(tokens).total
    return figures | {
        "planner's tokens/s": count / computed,
        "measured / planned time": without.total / computed,
    }


def times(
    engine: Engine, batch: MiniBatch, modes: Sequence[Literal["none", "R3"]], repeats: int = 5
) -> list[Seconds]:
    """Return the fastest of `repeats` alternating steps of each mode, after one warm-up."""
    seconds_of: dict[ReplayMode, list[Seconds]] = {mode: [] for mode in modes}
    for _ in range(repeats + 1):
        for mode in modes:
            sums, start = MetricSums(), now(engine)
            old = engine.old_logprobs(batch, sums, replay=mode)
            middle = now(engine)
            engine.update(batch, old, sums, replay=mode)
            seconds_of[mode].append(Seconds(middle - start, now(engine) - middle))
    return [min(seconds_of[mode][1:], key=lambda seconds: seconds.total) for mode in modes]


def now(engine: Engine) -> float:
    if engine.parallel.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def hardware_here() -> Hardware | None:
    """Return the planner's row for this GPU, by its name, or None."""
    name = torch.cuda.get_device_name().lower().replace("-", " ").split()
    return next((row for key, row in sorted(HARDWARE.items(), reverse=True) if key in name), None)
