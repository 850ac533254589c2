"""Seconds of one step: rollout, old-logprob, update, push, from data sheets and named assumptions (docs/design/cost_model.md)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import memory
from megatron_rl.plan.hardware import Assumptions, Hardware
from megatron_rl.plan.lengths import Lengths, make_lengths
from megatron_rl.plan.server_time import SERVED, DecodeModel, Sampling, ServerPlan
from megatron_rl.plan.training_time import Parts, TrainingModel, tokens_of


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.  overlaps: its rollout runs while the step before trains."""

    rollout: Sampling
    old_logprob: Parts
    update: Parts
    """All of the step's updates."""
    push: float
    overlaps: bool

    @property
    def total(self) -> float:
        trained = self.old_logprob.total + self.update.total
        both = max(self.rollout.total, trained) if self.overlaps else self.rollout.total + trained
        return both + self.push


def step_time(
    spec: ModelSpec, cfg: Config, world: int, server_pool: ServerPlan, hardware: Hardware, assumed: Assumptions
) -> StepTime:
    """What `cfg` takes on `world` trainer ranks and this fleet.  Raises ValueError where the servers cannot hold the model."""
    old_logprob, update = training_time(spec, cfg, world, hardware, assumed)
    return StepTime(
        rollout=DecodeModel(spec, server_pool, hardware, assumed).sample(cfg, lengths_of(cfg, assumed)),
        old_logprob=old_logprob,
        update=update,
        push=push_seconds(spec, cfg, world, hardware, assumed),
        overlaps=cfg.rollout.samples_ahead,
    )


def training_time(
    spec: ModelSpec, cfg: Config, world: int, hardware: Hardware, assumed: Assumptions
) -> tuple[Parts, Parts]:
    """(old-logprob passes, updates) of a step.  A reference policy adds its own pass to the former."""
    trainer = TrainingModel(spec, cfg, world, hardware, assumed)
    tokens = tokens_of(cfg, lengths_of(cfg, assumed), assumed)
    passes = cfg.run.num_mini_batches * (2 if cfg.loss.kl_coef else 1)
    return trainer.old_logprob(tokens) * passes, trainer.update(tokens) * cfg.run.num_mini_batches


def lengths_of(cfg: Config, assumed: Assumptions) -> Lengths:
    """Raises ValueError for a mean that is not below the cap."""
    cap = cfg.rollout.max_response_tokens
    return make_lengths(assumed.mean_response * cap, cap)


def push_seconds(spec: ModelSpec, cfg: Config, world: int, hardware: Hardware, assumed: Assumptions) -> float:
    """Every tensor is gathered on rank 0 and sent, one bucket behind the other; a broadcast reaches all servers at once."""
    whole = memory.whole_model(spec)
    size = SERVED * (whole.dense + whole.experts)
    network, nvlink = hardware.network * assumed.network, hardware.nvlink * assumed.nvlink
    gathered = size / (nvlink if world <= hardware.per_node else network) if world > 1 else 0.0
    sent = {
        "distributed": size / network,
        "disk": 2 * size / assumed.disk,  # written, then read
        "colocated": size / (hardware.bandwidth * assumed.bandwidth),
    }[cfg.rollout.weight_sync]
    tensors = 3 * len(spec.moe_layers) * spec.num_experts + 12 * spec.num_layers
    return gathered + sent + tensors * assumed.tensor_seconds
