"""Seconds of one step: rollout, old-logprob, update, weight sync; by data sheets and assumptions (docs/design/cost_model.md)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import memory
from megatron_rl.plan.hardware import Assumptions, Hardware, rates
from megatron_rl.plan.lengths import Lengths, make_lengths
from megatron_rl.plan.server_time import SERVED, DecodeModel, Sampling, ServerPlan
from megatron_rl.plan.training_time import Parts, TrainingModel, tokens_of


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.  overlaps: its rollout runs while the previous step trains."""

    rollout: Sampling
    old_logprob: Parts
    update: Parts
    """All of the step's updates."""
    weight_sync: float
    overlaps: bool

    @property
    def total(self) -> float:
        trained = self.old_logprob.total + self.update.total
        both = max(self.rollout.total, trained) if self.overlaps else self.rollout.total + trained
        return both + self.weight_sync


def step_time(
    spec: ModelSpec, cfg: Config, world: int, server_pool: ServerPlan, hardware: Hardware, assumed: Assumptions
) -> StepTime:
    """What `cfg` takes on `world` trainer ranks and these servers.  Raises ValueError if the servers cannot hold the model."""
    old_logprob, update = training_time(spec, cfg, world, hardware, assumed)
    return StepTime(
        rollout=DecodeModel(spec, server_pool, hardware, assumed).sample(cfg, lengths_of(cfg, assumed)),
        old_logprob=old_logprob,
        update=update,
        weight_sync=weight_sync_seconds(spec, cfg, world, hardware, assumed),
        overlaps=cfg.rollout.samples_ahead,
    )


def training_time(
    spec: ModelSpec, cfg: Config, world: int, hardware: Hardware, assumed: Assumptions
) -> tuple[Parts, Parts]:
    """(old-logprob passes, updates) of a step.  A reference policy adds one pass per mini-batch to the former."""
    trainer = TrainingModel(spec, cfg, world, hardware, assumed)
    tokens = tokens_of(cfg, lengths_of(cfg, assumed), assumed)
    passes = cfg.run.num_mini_batches * (2 if cfg.loss.kl_coef else 1)
    return trainer.old_logprob(tokens) * passes, trainer.update(tokens) * cfg.run.num_mini_batches


def lengths_of(cfg: Config, assumed: Assumptions) -> Lengths:
    """Assumed response lengths.  Raises ValueError for a mean that is not below the cap."""
    cap = cfg.rollout.max_response_tokens
    return make_lengths(assumed.mean_response * cap, cap)


def weight_sync_seconds(spec: ModelSpec, cfg: Config, world: int, hardware: Hardware, assumed: Assumptions) -> float:
    """Every tensor is gathered on rank 0, then sent, bucket after bucket; one broadcast reaches all servers."""
    size, rate = SERVED * memory.full_model(spec).total, rates(hardware, assumed)
    gathered = size / rate.link(world) if world > 1 else 0.0
    sent = {
        "distributed": size / rate.network,
        "disk": 2 * size / assumed.disk,  # written, then read
        "colocated": size / rate.memory,
    }[cfg.rollout.weight_sync]
    tensors = 3 * len(spec.moe_layers) * spec.num_experts + 12 * spec.num_layers
    return gathered + sent + tensors * assumed.tensor_seconds
