"""Host memory of the ranks of a node.

Sizes are in bytes.  Processes themselves, rollouts that are sampled ahead (models/fit.py) and
servers are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_rl.config import Config
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import memory
from megatron_rl.plan.grid import dp_size
from megatron_rl.plan.hardware import GIB, Hardware

FLOAT, SIZE = 4, 2
"""Bytes of a log-prob of a teacher, and of the number of its ids."""
MOST_CODE = 3
"""Most bytes of one of its ids, below 2^21 (records/token_sets.py)."""
REMEDIES = {
    "reference": "set loss.kl_coef = 0, or use more parallel.tp, pp or ep",
    "routes": "lower run.prompts_per_step or run.group_size, or use more data-parallel ranks",
    "teacher": "lower loss.teacher_top_k, or use more data-parallel ranks",
    "checkpoint": "set optim.distributed = true, or use more ranks",
    "adam": "set megatron.optimizer_cpu_offload = false, or use more ranks",
    "offload": "set rollout.release_memory = false, or use more ranks",
}
"""Part of HostBytes -> change that makes it smaller."""


@dataclass(frozen=True)
class HostBytes:
    """Host memory of one rank."""

    reference: int
    """The weights of loss.kl_coef, and room for the rank's own while those are in their place."""
    routes: int
    """Expert ids of a step's rollouts, at the longest responses: its share of the node's copies."""
    teacher: int
    """Log-probs and ids of loss.teacher_form of a step's rollouts: its share, as of the routes."""
    checkpoint: int
    """Bytes that the rank writes to a checkpoint."""
    adam: int
    """Adam's state and gradients (megatron.optimizer_cpu_offload)."""
    offload: int
    """Weights and optimizer state while servers have the GPU (rollout.release_memory)."""

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes of every part that is not empty."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: size for name, size in sizes.items() if size}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def host_bytes(spec: ModelSpec, cfg: Config, world: int, ranks_of_node: int) -> HostBytes:
    """Return the host memory of the rank that needs most, on a node of so many ranks."""
    responses = cfg.run.prompts_per_step * cfg.run.group_size
    sampled = responses * cfg.rollout.max_response_tokens
    tokens = responses * cfg.data.max_prompt_tokens + sampled
    copies = memory.route_copies(cfg.parallel, world, ranks_of_node)
    replicas = dp_size(cfg.parallel, world)
    routes = memory.host_route_bytes(spec, cfg, tokens // replicas) * copies // ranks_of_node
    teacher = teacher_token_bytes(cfg) * (sampled // replicas) * copies // ranks_of_node
    ranks = []
    for pp_rank in range(cfg.parallel.pp):
        rank = memory.rank_memory(spec, cfg, world, pp_rank)
        ranks.append(
            HostBytes(
                # with adapters, the base is the reference
                reference=2 * rank.weights if cfg.loss.kl_coef and not cfg.lora.rank else 0,
                routes=routes,
                teacher=teacher,
                checkpoint=memory.checkpoint_bytes_of_rank(spec, cfg, world, pp_rank),
                adam=memory.host_optimizer_bytes(spec, cfg, world, pp_rank),
                offload=rank.weights + rank.optimizer if cfg.rollout.release_memory else 0,
            )
        )
    return max(ranks, key=lambda rank: rank.total)


def teacher_token_bytes(cfg: Config) -> int:
    """Return the most bytes of a teacher's numbers for a sampled token.

    They are its log-prob, and a size and loss.teacher_top_k ids with their log-probs
    (records/teacher_scores.py).
    """
    if not cfg.teachers.with_servers:
        return 0
    top_k = 0 if cfg.loss.teacher_form == "token" else cfg.loss.teacher_top_k
    return FLOAT + (SIZE + top_k * (MOST_CODE + FLOAT) if top_k else 0)


def node_text(rank: HostBytes, ranks: int) -> str:
    """Return the host memory of a node's ranks as text."""
    parts = " + ".join(f"{name} {size / GIB:.2f}" for name, size in rank.parts.items())
    return f"{ranks} ranks x ({parts}) = {ranks * rank.total / GIB:.2f} GiB"


def check_host_memory(rank: HostBytes, ranks: int, hardware: Hardware) -> None:
    """Raise ValueError where a node's ranks need more than its memory, if that is known."""
    if hardware.host_memory and ranks * rank.total > hardware.host_memory:
        largest = max(rank.parts, key=lambda name: rank.parts[name])
        raise ValueError(
            f"host memory of a node: {node_text(rank, ranks)}, which must be at most the"
            f" {hardware.host_memory / GIB:.2f} GiB of a node of {hardware.name}:"
            f" {REMEDIES[largest]}; for other hardware of the dry run, --gpu"
        )
