"""Search for layouts that fit: every tp, cp, pp, ep and etp that ranks and model allow, fastest
first by the step-time model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron_rl.config import Config, ParallelConfig
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.hardware import HARDWARE
from megatron_rl.plan.memory import Memory
from megatron_rl.plan.phases import fullest, update_copies
from megatron_rl.plan.refusals import Machine, check_core, check_gpus, check_layout, check_leaders
from megatron_rl.plan.training_time import Parts, TrainingModel

RECOMPUTE = ("none", "selective", "full")
"""Fastest first, smallest last.  model.fused_lm_head takes less time than the next one."""


@dataclass(frozen=True)
class Candidate:
    """A layout with the least recompute that fits, where the LM head is fused only if it must be,
    and its computed seconds per step.
    """

    cfg: Config
    memory: Memory
    """Memory of its fullest pipeline rank."""
    old_logprob: Parts
    update: Parts
    """All updates of a step."""

    @property
    def key(self) -> tuple[float, ...]:
        """Sort key: seconds to two digits, then ranks that share a sequence, then memory."""
        p = self.cfg.parallel
        seconds = self.old_logprob.total + self.update.total
        # two digits, as the model of time is no more exact: among equals the simpler layout comes
        # first
        return (float(f"{seconds:.2g}"), p.tp * p.cp * p.pp, p.pp, p.ep, seconds, self.memory.total)


@dataclass
class Search:
    """Layouts of the trainer's ranks that start and fit; other settings are those of its cfg."""

    trainer: TrainingModel
    device_bytes: float
    """The fullest rank uses at most this many bytes."""
    candidates: list[Candidate] = field(default_factory=list)
    """Fastest first."""
    refusals: list[str] = field(default_factory=list)
    """Messages of the other layouts, each once."""

    def __post_init__(self) -> None:
        hardware = self.trainer.hardware
        ranks = min(self.trainer.world, hardware.per_node)
        # an empty environment: the plan is for a machine without this one's CUDA_VISIBLE_DEVICES
        self.machine = Machine(hardware, ranks, hardware.per_node, {}, self.trainer.assumed)
        refused: dict[str, None] = {}
        for parallel in layouts(self.trainer.spec, self.trainer.world, hardware.per_node):
            try:
                self.candidates.extend(self._least_recompute(parallel))
            except ValueError as error:  # no recompute makes these sizes fit
                refused[str(error)] = None
        self.candidates.sort(key=lambda candidate: candidate.key)
        self.refusals.extend(refused)

    def _least_recompute(self, parallel: ParallelConfig) -> Iterator[Candidate]:
        """Yield the layout with the least recompute that fits, if any does.

        Raises ValueError for a layout that cannot start.
        """
        spec, world, cfg = self.trainer.spec, self.trainer.world, self.trainer.cfg
        heads = sorted({cfg.model.fused_lm_head, True})
        for recompute, fused in itertools.product(RECOMPUTE, heads):
            choice = {"recompute": recompute, "fused_lm_head": fused}
            model = cfg.model.model_copy(update=choice)
            trial = cfg.model_copy(update={"parallel": parallel, "model": model})
            check_layout(spec, trial, world)
            check_leaders(trial, world, self.machine.ranks)
            used = fullest(spec, trial, world, self.trainer.assumed)
            # Adam's float32 copies exist where there are no activations
            state = used.weights + used.gradients + used.optimizer
            if max(used.total, state + update_copies(spec, trial, world)) <= self.device_bytes:
                if self.trainer.hardware.name != HARDWARE["cpu"].name:
                    check_gpus(spec, trial, world, self.machine)
                check_core(spec, trial)
                yield Candidate(trial, used, *replace(self.trainer, cfg=trial).training())
                return


def layouts(spec: ModelSpec, world: int, per_node: int) -> Iterator[ParallelConfig]:
    """Yield layouts of powers of two; pp may also divide the number of layers."""
    twos = [1 << power for power in range(world.bit_length()) if world % (1 << power) == 0]
    depths = [
        pp
        for pp in range(1, spec.num_layers + 1)
        if world % pp == 0 and (spec.num_layers % pp == 0 or pp in twos)
    ]
    expert_shards = [
        size for size in twos if size == 1 or (spec.moe_layers and spec.num_experts % size == 0)
    ]
    # tensor and context ranks exchange data in every layer: only over the links of a node
    for tp in (size for size in twos if size <= per_node):
        for cp in (size for size in twos if size * tp <= per_node):
            for pp in (pp for pp in depths if world % (tp * cp * pp) == 0):
                stages = () if spec.num_layers % pp == 0 else uneven_stages(spec.num_layers, pp)
                for ep in expert_shards:
                    # experts replicated over tensor ranks, or sharded like the dense part
                    for etp in sorted({1, tp}):
                        if world % (etp * ep * pp) == 0:
                            yield ParallelConfig(
                                tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, layers_per_stage=stages
                            )


def uneven_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """Return numbers of layers per stage that differ by at most one.

    The stages with one layer less are the last one, which has the LM head, then the first one, then
    those before the last.
    """
    most = -(-num_layers // pp)
    order = [pp - 1, 0, *range(pp - 2, 0, -1)]
    short = set(order[: most * pp - num_layers])
    return tuple(most - (stage in short) for stage in range(pp))
