"""Steps that count a GPU's host synchronisations and measure its memory."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from dataclasses import asdict

import torch

from megatron_rl.config import Config
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.pass_results import ReplayMode
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.plan.memory import rank_memory
from megatron_rl.records.packed import MiniBatch
from megatron_rl_tools.gpu_check.material import (
    QWEN3_MOE,
    check_batch,
    check_samples,
    check_step_config,
    engine_of,
)
from megatron_rl_tools.gpu_check.result import Findings, NotPossible, StepOutcome
from megatron_rl_tools.gpu_check.speed import real_layers
from megatron_rl_tools.gpu_check.steps import StepPlace
from megatron_rl_tools.verify_replay.random_checkpoint import write_random_checkpoint

DISPATCHER = "/transformer/moe/"
"""megatron-core's experts and dispatcher, which copy token counts to the host by design: one
synchronisation per layer."""
PEAK_LIMIT = 1.1
"""The most that measured / computed peak may be."""


def host_syncs(place: StepPlace) -> StepOutcome:
    if place.device == "cpu":
        raise NotPossible("torch.cuda.set_sync_debug_mode needs a GPU")
    findings = Findings()
    shallow, deep = (syncs_of_update(place, layers) for layers in (2, 4))
    for where in sorted(deep | shallow):
        findings.figures[where] = {"2 layers": shallow[where], "4 layers": deep[where]}
        if DISPATCHER not in where:
            findings.check(
                deep[where] <= shallow[where],
                f"{where} waits for the GPU {deep[where]} times with 4 layers, {shallow[where]}"
                " with 2",
            )
    return findings.outcome


def syncs_of_update(place: StepPlace, layers: int) -> Counter[str]:
    """Return file:line -> synchronisations of one old-logprob pass and update under R3."""
    path = place.folder / f"layers{layers}"
    path.mkdir()
    spec = write_random_checkpoint(
        QWEN3_MOE | {"num_hidden_layers": layers}, path, dtype=torch.bfloat16
    )
    with engine_of(
        check_step_config(path, place.device, replay={"mode": "R3", "measure": True})
    ) as engine:
        batch = check_batch(engine, check_samples(spec, (100, 200)))
        step(engine, batch, "R3")  # fills caches and the optimizer's state
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                torch.ones(1, device=place.device).item()
                if not caught:
                    raise RuntimeError(
                        "torch did not report a synchronisation that was there: nothing can be"
                        " counted"
                    )
                step(engine, batch, "R3")
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{entry.filename}:{entry.lineno}" for entry in caught if "synchroniz" in str(entry.message)
    )


def peak(place: StepPlace) -> StepOutcome:
    if place.device == "cpu":
        raise NotPossible("torch counts the memory of a GPU only")
    findings = Findings()
    path, spec = real_layers(place, 2)
    for recompute in ("none", "full") if place.quick else ("none", "selective", "full"):
        rows = 4096 if place.quick else 9216
        cfg = check_step_config(
            path,
            place.device,
            model={"recompute": recompute},
            run={"max_tokens_per_micro_batch": rows},
        )
        computed = rank_memory(spec, cfg, 1, 0)
        total = torch.cuda.get_device_properties(0).total_memory
        if computed.total > 0.95 * total:
            findings.not_run.append(
                f"recompute {recompute}: computed {computed.total / 2**30:.0f} of"
                f" {total / 2**30:.0f} GiB"
            )
            continue
        measured = measured_peak(cfg)
        ratio = measured / computed.total
        findings.figures[recompute] = {
            "measured GiB": measured / 2**30,
            "computed GiB": computed.total / 2**30,
            "ratio": ratio,
            "computed, by part": {name: size / 2**30 for name, size in asdict(computed).items()},
        }
        findings.check(
            ratio <= PEAK_LIMIT,
            f"recompute {recompute}: {ratio:.2f} of the dry run's peak (limit {PEAK_LIMIT})",
        )
    return findings.outcome


def measured_peak(cfg: Config) -> int:
    """Return the bytes of tensors at the peak of an update of one full micro-batch."""
    gc.collect()  # frees the previous engine
    before = torch.cuda.memory_allocated()
    with engine_of(cfg) as engine:
        rows = cfg.run.max_tokens_per_micro_batch
        batch = check_batch(engine, check_samples(engine.spec, (rows // 2, rows // 2)))
        step(engine, batch, "none")
        torch.cuda.reset_peak_memory_stats()
        step(engine, batch, "none")
        return torch.cuda.max_memory_allocated() - before


def step(engine: Engine, batch: MiniBatch, mode: ReplayMode) -> None:
    """Run the old-logprob pass and the update."""
    sums = MetricSums()
    engine.update(batch, engine.old_logprobs(batch, sums, replay=mode), sums, replay=mode)
