"""Layouts that fit: every tp, cp, pp, ep, etp that the ranks and the model allow, fastest first by the step-time model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_rl.config import Config, ParallelConfig
from megatron_rl.models.fit import check_fit, check_sizes, check_step
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import memory
from megatron_rl.plan.grid import dp_size
from megatron_rl.plan.memory import Memory
from megatron_rl.plan.training_time import Parts, TrainingModel

RECOMPUTE = ("none", "selective", "full")  # fastest first, smallest last


@dataclass(frozen=True)
class Candidate:
    """A layout with the least recompute that fits, the memory of its fullest pipeline rank, and its computed seconds."""

    cfg: Config
    memory: Memory
    old_logprob: Parts
    update: Parts
    """All updates of a step."""

    @property
    def key(self) -> tuple[float, ...]:
        """Sort key: seconds, to two digits; then ranks that share a sequence, and memory."""
        p = self.cfg.parallel
        seconds = self.old_logprob.total + self.update.total
        return (float(f"{seconds:.2g}"), p.tp * p.cp * p.pp, p.pp, p.ep, seconds, self.memory.total)


def candidates(trainer: TrainingModel, device_bytes: float) -> list[Candidate]:
    """Layouts of the trainer's ranks whose fullest rank uses at most `device_bytes`, fastest first; the rest is as in its cfg."""
    found = []
    spec, world = trainer.spec, trainer.world
    for parallel in layouts(spec, world, trainer.hardware.per_node):
        for recompute in RECOMPUTE:
            model = trainer.cfg.model.model_copy(update={"recompute": recompute})
            trial = trainer.cfg.model_copy(update={"parallel": parallel, "model": model})
            try:
                check_sizes(parallel, world)
                check_fit(spec, model, parallel)
                check_step(trial, dp_size(parallel, world))
            except ValueError:
                break  # no recompute makes these sizes fit the model
            used = max(
                (memory.rank_memory(spec, trial, world, pp) for pp in range(parallel.pp)), key=lambda each: each.total
            )
            if used.total <= device_bytes:
                found.append(Candidate(trial, used, *replace(trainer, cfg=trial).training()))
                break
    return sorted(found, key=lambda each: each.key)


def layouts(spec: ModelSpec, world: int, per_node: int) -> Iterator[ParallelConfig]:
    """Powers of two, and divisors of the layer count for pp; tensor and context ranks stay inside a node."""
    twos = [1 << power for power in range(world.bit_length()) if world % (1 << power) == 0]
    depths = [
        pp for pp in range(1, spec.num_layers + 1) if world % pp == 0 and (spec.num_layers % pp == 0 or pp in twos)
    ]
    # tensor and context ranks exchange data in every layer: only over the links of a node
    for tp in (size for size in twos if size <= per_node):
        for cp in (size for size in twos if size * tp <= per_node):
            for pp in (pp for pp in depths if world % (tp * cp * pp) == 0):
                stages = () if spec.num_layers % pp == 0 else uneven_stages(spec.num_layers, pp)
                for ep in (size for size in twos if size == 1 or (spec.moe_layers and spec.num_experts % size == 0)):
                    for etp in sorted({1, tp}):  # experts replicated over tensor ranks, or sharded like the dense part
                        if world % (etp * ep * pp) == 0:
                            yield ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, layers_per_stage=stages)


def uneven_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """As equal as possible; one layer less first on the last stage (LM head), then on the first, then from the end."""
    most = -(-num_layers // pp)
    order = [pp - 1, 0, *range(pp - 2, 0, -1)]
    short = set(order[: most * pp - num_layers])
    return tuple(most - (stage in short) for stage in range(pp))
