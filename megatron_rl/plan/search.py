"""Layouts that fit: every tp, cp, pp, ep, etp that these ranks and this model allow, judged by memory and by communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.config import Config, ParallelConfig
from megatron_rl.models.fit import check_fit, check_sizes
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import memory
from megatron_rl.plan.memory import Memory

RECOMPUTE = ("none", "selective", "full")  # from fast to lean


@dataclass(frozen=True)
class Candidate:
    """A layout with the leanest-needed recompute, and the bytes of its fullest pipeline rank."""

    parallel: ParallelConfig
    recompute: str
    memory: Memory

    def key(self, gpus_per_node: int) -> tuple[int, ...]:
        """Less is better: what crosses nodes in every layer, recompute, ranks that share a sequence, pipeline, memory."""
        p = self.parallel
        inside = p.tp * p.cp <= gpus_per_node and p.expert_tp * p.ep <= gpus_per_node
        return (not inside, RECOMPUTE.index(self.recompute), p.tp * p.cp * p.pp, p.pp, p.ep, self.memory.total)


def candidates(spec: ModelSpec, cfg: Config, world: int, device_bytes: float, *, gpus_per_node: int = 8) -> list[Candidate]:
    """Layouts of `world` ranks whose fullest rank stays under `device_bytes`, best first; `cfg` gives everything else."""
    found = []
    for parallel in layouts(spec, world, gpus_per_node):
        for recompute in RECOMPUTE:
            model = cfg.model.model_copy(update={"recompute": recompute})
            trial = cfg.model_copy(update={"parallel": parallel, "model": model})
            try:
                check_sizes(parallel, world)
                check_fit(spec, model, parallel)
            except ValueError:
                break
            used = max((memory.rank_memory(spec, trial, world, pp) for pp in range(parallel.pp)), key=lambda each: each.total)
            if used.total <= device_bytes:
                found.append(Candidate(parallel, recompute, used))
                break
    return sorted(found, key=lambda each: each.key(gpus_per_node))


def layouts(spec: ModelSpec, world: int, gpus_per_node: int) -> Iterator[ParallelConfig]:
    """Powers of two, and divisors of the layer count for pp; tensor and context ranks stay inside a node."""
    twos = [1 << power for power in range(world.bit_length()) if world % (1 << power) == 0]
    depths = [pp for pp in range(1, min(spec.num_layers, world) + 1) if spec.num_layers % pp == 0 and world % pp == 0]
    for tp in (size for size in twos if size <= gpus_per_node):
        for cp in (size for size in twos if size * tp <= gpus_per_node):
            for pp in depths:
                if world % (tp * cp * pp):
                    continue
                for ep in (size for size in twos if size == 1 or (spec.moe_layers and spec.num_experts % size == 0)):
                    for etp in sorted({1, tp}):
                        if world % (etp * ep * pp) == 0:
                            yield ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
