"""Layouts that fit: every tp, cp, pp, ep, etp that the ranks and the model allow, fastest first by
the step-time model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron_rl.config import Config, ParallelConfig
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.hardware import HARDWARE
from megatron_rl.plan.memory import Memory
from megatron_rl.plan.phases import fullest
from megatron_rl.plan.refusals import Machine, check_core, check_gpus, check_layout
from megatron_rl.plan.training_time import Parts, TrainingModel

RECOMPUTE = ("none", "selective", "full")  # fastest first, smallest last


@dataclass(frozen=True)
class Candidate:
    """A layout with the least recompute that fits, the memory of its fullest pipeline rank, and its
    computed seconds.
    """

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


@dataclass
class Search:
    """Layouts of the trainer's ranks that start and whose fullest rank uses at most `device_bytes`,
    fastest first; the rest is as in the trainer's cfg.

    refusals: of layouts that the model and the ranks allow otherwise, each message once.
    """

    trainer: TrainingModel
    device_bytes: float
    found: list[Candidate] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        hardware = self.trainer.hardware
        ranks = min(self.trainer.world, hardware.per_node)
        # not this machine's CUDA_VISIBLE_DEVICES: the plan is for another one
        self.machine = Machine(hardware, ranks, hardware.per_node, {}, self.trainer.assumed)
        refused: dict[str, None] = {}
        for parallel in layouts(
            self.trainer.spec, self.trainer.world, self.trainer.hardware.per_node
        ):
            try:
                self.found.extend(self._least_recompute(parallel))
            except ValueError as error:  # no recompute makes these sizes fit
                refused[str(error)] = None
        self.found.sort(key=lambda each: each.key)
        self.refusals.extend(refused)

    def _least_recompute(self, parallel: ParallelConfig) -> Iterator[Candidate]:
        """The layout with the least recompute that fits, if any does.

        Raises ValueError where it cannot start.
        """
        spec, world, cfg = self.trainer.spec, self.trainer.world, self.trainer.cfg
        for recompute in RECOMPUTE:
            model = cfg.model.model_copy(update={"recompute": recompute})
            trial = cfg.model_copy(update={"parallel": parallel, "model": model})
            check_layout(spec, trial, world)
            used = fullest(spec, trial, world)
            if used.total <= self.device_bytes:
                if self.trainer.hardware.name != HARDWARE["cpu"].name:
                    check_gpus(spec, trial, world, self.machine)
                check_core(spec, trial)
                yield Candidate(trial, used, *replace(self.trainer, cfg=trial).training())
                return


def layouts(spec: ModelSpec, world: int, per_node: int) -> Iterator[ParallelConfig]:
    """Powers of two, and divisors of the layer count for pp; tensor and context ranks stay inside a
    node.
    """
    twos = [1 << power for power in range(world.bit_length()) if world % (1 << power) == 0]
    depths = [
        pp
        for pp in range(1, spec.num_layers + 1)
        if world % pp == 0 and (spec.num_layers % pp == 0 or pp in twos)
    ]
    # tensor and context ranks exchange data in every layer: only over the links of a node
    for tp in (size for size in twos if size <= per_node):
        for cp in (size for size in twos if size * tp <= per_node):
            for pp in (pp for pp in depths if world % (tp * cp * pp) == 0):
                stages = () if spec.num_layers % pp == 0 else uneven_stages(spec.num_layers, pp)
                for ep in (
                    size
                    for size in twos
                    if size == 1 or (spec.moe_layers and spec.num_experts % size == 0)
                ):
                    # experts replicated over tensor ranks, or sharded like the dense part
                    for etp in sorted({1, tp}):
                        if world % (etp * ep * pp) == 0:
                            yield ParallelConfig(
                                tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, layers_per_stage=stages
                            )


def uneven_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """As equal as possible; one layer less first on the last stage (LM head), then on the first,
    then from the end.
    """
    most = -(-num_layers // pp)
    order = [pp - 1, 0, *range(pp - 2, 0, -1)]
    short = set(order[: most * pp - num_layers])
    return tuple(most - (stage in short) for stage in range(pp))
