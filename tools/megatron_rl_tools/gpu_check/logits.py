"""Steps that compare the trainer's log-probs with transformers' and with those of a second pass."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.batch.pack import Sample
from megatron_rl.config import Config
from megatron_rl.distributed import disable_tf32
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl_tools.gpu_check.material import (
    QWEN3_MOE,
    SMALL,
    check_batch,
    check_samples,
    check_step_config,
    engine_of,
    uses_te,
)
from megatron_rl_tools.gpu_check.result import Figure, Findings, StepOutcome
from megatron_rl_tools.gpu_check.steps import StepPlace
from megatron_rl_tools.verify_replay.fingerprints import logprob_keys
from megatron_rl_tools.verify_replay.random_checkpoint import write_random_checkpoint

LENGTHS = (37, 64, 150, 201)
LIMIT = 2.0
"""The limit is this many times transformers' difference between bf16 and float32."""
Logprobs = dict[tuple[str, int], float]
"""(rollout, position) -> log-prob of the next token."""


def against_transformers(place: StepPlace) -> StepOutcome:
    """Compare with transformers in float32; the trainer replays its experts, so that a difference
    is not a changed choice.
    """
    disable_tf32()
    findings = Findings()
    for family, settings in SMALL.items():
        path = place.folder / family
        path.mkdir()
        spec = write_random_checkpoint(settings, path, dtype=torch.bfloat16)
        samples = check_samples(spec, LENGTHS)
        exact, routes = transformers_logprobs(path, samples, torch.float32, place.device)
        rounded, _ = transformers_logprobs(path, samples, torch.bfloat16, place.device)
        limit = LIMIT * mean_difference(rounded, exact)
        figures: dict[str, Figure] = {"transformers bf16 against float32": limit / LIMIT}
        for form in ("thd", "bshd"):
            mode = "R3" if spec.moe_layers else "none"
            cfg = check_step_config(
                path, place.device, model={"batch_format": form}, replay={"mode": mode}
            )
            ours, layers = trainer_logprobs(cfg, pass_with_routes(samples, routes))
            difference = mean_difference(ours, exact)
            figures[form] = {"against float32": difference, "layers": layers}
            findings.check(
                difference <= limit,
                f"{family}, {form}: mean |difference| {difference:.2g} nats (limit {limit:.2g})",
            )
        findings.figures[family] = figures
    return findings.outcome


def identical_passes(place: StepPlace) -> StepOutcome:
    findings = Findings()
    path = place.folder / "model"
    path.mkdir()
    spec = write_random_checkpoint(
        QWEN3_MOE | {"num_experts_per_tok": 8}, path, dtype=torch.bfloat16
    )
    samples = check_samples(spec, LENGTHS * (1 if place.quick else 8))
    has_te = uses_te(check_step_config(path, place.device))
    for is_fused in (False, True):
        if is_fused and not has_te:
            findings.not_run.append("moe_permute_fusion = true needs TransformerEngine on a GPU")
            continue
        cfg = check_step_config(path, place.device, megatron={"moe_permute_fusion": is_fused})
        with engine_of(cfg) as engine:
            batch = check_batch(engine, samples)
            first, second = (
                torch.cat(engine.old_logprobs(batch, MetricSums(), replay="none").logprobs)
                for _ in range(2)
            )
        differing = float((first != second).float().mean())
        findings.figures[f"moe_permute_fusion = {is_fused}"] = {
            "fraction of log-probs that differ": differing,
            "largest difference": float((first - second).abs().max()),
        }
        # without the fusion a GPU adds up experts in any order
        findings.check(
            not differing or (place.device == "cuda" and not is_fused),
            f"moe_permute_fusion = {is_fused}: {differing:.1%} of log-probs differ between"
            " identical passes",
        )
    return findings.outcome


def mean_difference(
    one: Mapping[tuple[str, int], float], other: Mapping[tuple[str, int], float]
) -> float:
    """Return the mean of |difference| over the tokens of `one`, in nats.

    Raises KeyError for a token that `other` lacks.
    """
    return float(np.mean([abs(value - other[key]) for key, value in one.items()]))


def trainer_logprobs(cfg: Config, samples: Sequence[Sample]) -> tuple[Logprobs, str]:
    """Return the log-probs of response tokens, and the implementation of the layers."""
    with engine_of(cfg) as engine:
        return logprobs_by_position(engine, samples), engine.core_config.transformer_impl


def logprobs_by_position(engine: Engine, samples: Sequence[Sample]) -> Logprobs:
    rollouts = {sample.rollout.id: sample.rollout for sample in samples}
    batch = check_batch(engine, samples)
    passed = engine.old_logprobs(batch, MetricSums(), replay=engine.cfg.replay.mode)
    logprobs: Logprobs = {}
    for micro_batch, values in zip(batch.micro_batches, passed.logprobs, strict=True):
        packed = [rollouts[name] for name in micro_batch.rollout_ids]
        keys = logprob_keys(packed, micro_batch.cu_seqlens.tolist(), 0, 1)
        pairs = zip(keys, values.tolist(), strict=True)
        logprobs |= {key: value for key, value in pairs if key is not None}
    return logprobs


def pass_with_routes(samples: Sequence[Sample], routes: Mapping[str, np.ndarray]) -> list[Sample]:
    """Return the samples with these experts, uint8 [S - 1, L, K]; unchanged for a dense model."""
    if not routes:
        return list(samples)
    changed = []
    for sample in samples:
        ids = routes[sample.rollout.id]
        rollout = replace(sample.rollout, routed_experts=ids, routes_digest=None)
        changed.append(replace(sample, rollout=rollout))
    return changed


@torch.no_grad()
def transformers_logprobs(
    path: Path, samples: Sequence[Sample], dtype: torch.dtype, device: str
) -> tuple[Logprobs, dict[str, np.ndarray]]:
    """Return the log-probs of every next token, and the experts of every token but the last.

    Sequences are computed one by one.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.eval().to(device)
    logprobs: Logprobs = {}
    routes: dict[str, np.ndarray] = {}
    for sample in samples:
        rollout, calls = sample.rollout, list[torch.Tensor]()
        tokens = torch.from_numpy(rollout.tokens).to(device)
        with expert_calls(model, calls):
            logits = model(tokens[None], use_cache=False).logits[0]
        values = logits[:-1].float().log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].tolist()
        logprobs |= {(rollout.id, position): value for position, value in enumerate(values)}
        if calls:
            layers = torch.stack([ids[:-1] for ids in calls], 1)
            routes[rollout.id] = layers.cpu().numpy().astype(np.uint8)
    del model
    gc.collect()
    return logprobs, routes


@contextmanager
def expert_calls(model: Any, calls: list[torch.Tensor]) -> Iterator[None]:
    """Collect the ids [S, K] with which the experts of each layer are called: their second argument
    in every family.
    """
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[1]))
        for layer in model.model.layers
        if (module := getattr(layer.mlp, "experts", None)) is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
