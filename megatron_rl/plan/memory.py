"""Parameters and bytes of one rank, from the model's sizes and the configuration.

Weights, gradients and optimizer state are exact, up to the padding of megatron-core's buffers.
Activations: activations.py.  Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_rl.config import Config, ParallelConfig
from megatron_rl.models.spec import ModelSpec, padded_vocab_size
from megatron_rl.plan.activations import buffer_bytes, head_bytes, layer_bytes, recomputed
from megatron_rl.plan.adam_bytes import adam_bytes
from megatron_rl.plan.adapter_sizes import (
    AdaptedWeight,
    adapted_weights,
    adapter_parameters,
    merged_bytes,
)
from megatron_rl.plan.grid import (
    dp_size,
    element_size,
    expert_dp_size,
    micro_batches_in_flight,
    place,
    rank_layers,
    rows,
    sequence_shards,
    stage_layers,
    wants_te,
)
from megatron_rl.weights.adapters import OUTSIDE

WORKSPACE = 5 * 32 << 20
"""Bytes that TransformerEngine keeps for cuBLAS: 32 MiB for each of 5 streams (2.11.0,
cpp_extensions/gemm.py)."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one rank."""

    dense: int
    """Parameters that every data- and context-parallel rank has."""
    experts: int
    """Parameters that every expert replica has."""

    @property
    def total(self) -> int:
        return self.dense + self.experts

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept from forward to backward."""
    routes: int
    """Expert ids of a mini-batch's micro-batches, under R2 of all mini-batches of a step, at the
    longest responses."""
    working: int
    """The larger of two that never exist together, the LM head's tensors and those of a layer that
    runs or is recomputed; and buffers that stay.
    """

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def rank_parameters(
    spec: ModelSpec, parallel: ParallelConfig, pp_rank: int, *, te: bool = False
) -> Parameters:
    """Return the parameters of one rank of this pipeline stage.

    te: the layers are TransformerEngine's (see `wants_te`).
    """
    layers = rank_layers(spec, parallel, pp_rank)
    num_moe = len(set(layers) & set(spec.moe_layers))
    total = Parameters(0, 0)
    for is_moe, count in ((True, num_moe), (False, len(layers) - num_moe)):
        layer = layer_parameters(spec, parallel, is_moe=is_moe, te=te)
        total += Parameters(count * layer.dense, count * layer.experts)
    table = padded_vocab_size(spec, parallel.tp) // parallel.tp * spec.hidden_size
    is_first, is_last = pp_rank == 0, pp_rank == parallel.pp - 1
    # tied embeddings need one table on one rank, but a copy on the last of several stages
    tables = 1 if is_first and is_last and spec.tie_embeddings else is_first + is_last
    return total + Parameters(tables * table + spec.hidden_size * is_last, 0)  # + the final norm


def trained_parameters(spec: ModelSpec, cfg: Config, pp_rank: int) -> Parameters:
    """Return the parameters of one rank that have a gradient: all, or those of adapters."""
    if not cfg.lora.rank:
        return rank_parameters(spec, cfg.parallel, pp_rank, te=wants_te(cfg))
    return Parameters(*adapter_parameters(adapted(spec, cfg, pp_rank), cfg.lora.rank))


def adapted(spec: ModelSpec, cfg: Config, pp_rank: int) -> list[AdaptedWeight]:
    """Return the weights of one rank that have adapters."""
    places: list[int | str] = [*rank_layers(spec, cfg.parallel, pp_rank)]
    places += [OUTSIDE["embedding"]] * (pp_rank == 0)
    places += [OUTSIDE["lm_head"]] * (pp_rank == cfg.parallel.pp - 1)
    return adapted_weights(spec, cfg, places, te=wants_te(cfg))


def full_model(spec: ModelSpec) -> Parameters:
    """Return the parameters of the whole model."""
    return rank_parameters(spec, ParallelConfig(), 0)


def layer_parameters(
    spec: ModelSpec, parallel: ParallelConfig, *, is_moe: bool, te: bool = False
) -> Parameters:
    h, tp = spec.hidden_size, parallel.tp
    dense = 2 * h + attention_parameters_of_rank(spec, tp, te=te)  # 2 h: the layer's norms
    if not is_moe:
        return Parameters(dense + 3 * h * spec.ffn_size // tp, 0)
    dense += h * spec.num_experts + 3 * h * spec.shared_ffn_size // tp + h * spec.shared_gate
    local_experts = spec.num_experts // parallel.ep
    return Parameters(dense, local_experts * 3 * h * spec.expert_ffn_size // parallel.expert_tp)


def attention_parameters_of_rank(spec: ModelSpec, tp: int, *, te: bool = False) -> int:
    """Return the attention parameters of one layer on one tensor rank.

    Matrices are sharded over tp.  Norms of single heads are replicated, with TransformerEngine also
    MLA's down-projections.
    """
    h = spec.hidden_size
    if spec.is_mla:
        q_dim = spec.num_heads * (spec.qk_nope_dim + spec.qk_rope_dim)
        kv_dim = spec.num_heads * (spec.qk_nope_dim + spec.v_head_dim)
        up = (spec.q_lora_rank or h) * q_dim + spec.kv_lora_rank * kv_dim
        down = h * (spec.q_lora_rank + spec.kv_lora_rank + spec.qk_rope_dim)
        sharded = up + spec.num_heads * spec.v_head_dim * h
        norms = spec.q_lora_rank + spec.kv_lora_rank
        return sharded // tp + (down if te else down // tp) + norms
    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norms = {"none": 0, "head": 2 * spec.head_dim, "vector": (q_dim + kv_dim) // tp}[spec.qk_norm]
    bias = (q_dim + 2 * kv_dim) // tp if spec.qkv_bias else 0
    return (h * (q_dim + 2 * kv_dim) + q_dim * h) // tp + norms + bias


def rank_memory(
    spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int, *, skew: float = 1.0
) -> Memory:
    """Return the bytes on one rank of this pipeline stage at the peak of the update.

    skew: rows of its experts / mean over ranks.
    """
    parallel = cfg.parallel
    parameters = rank_parameters(spec, parallel, pp_rank, te=wants_te(cfg))
    kept, beside = activation_bytes(spec, cfg, pp_rank, skew=skew)
    is_last = pp_rank == parallel.pp - 1
    head = head_bytes(spec, cfg) if is_last else 0
    size, adam = element_size(cfg), adam_bytes(cfg)
    trained = trained_parameters(spec, cfg, pp_rank)
    adapters = trained.total if cfg.lora.rank else 0
    return Memory(
        weights=(parameters.total + adapters) * size,
        gradients=trained.total * adam.gradient,
        optimizer=int(updated_parameters(trained, cfg, world_size) * adam.device),
        activations=kept,
        routes=device_route_bytes(spec, cfg, world_size, pp_rank),
        working=max(beside, head)
        + buffer_bytes(spec, cfg, is_last=is_last)
        + WORKSPACE * wants_te(cfg)
        + merged_bytes(adapted(spec, cfg, pp_rank), size, te=wants_te(cfg)),
    )


def host_optimizer_bytes(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> int:
    """Return the bytes of Adam's state and gradients that one rank keeps on its host; 0 without
    optimizer_cpu_offload.
    """
    trained = trained_parameters(spec, cfg, pp_rank)
    return int(updated_parameters(trained, cfg, world_size) * adam_bytes(cfg).host)


def update_bytes(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> int:
    """Return the most bytes of float32 copies that Adam makes on one rank's device in an update,
    where its state or the gradients have 16 bits.
    """
    trained = trained_parameters(spec, cfg, pp_rank)
    return int(updated_parameters(trained, cfg, world_size) * adam_bytes(cfg).update)


def updated_parameters(parameters: Parameters, cfg: Config, world_size: int) -> int:
    """Return the parameters that one rank updates."""
    if not cfg.optim.distributed:
        return parameters.total
    return optimizer_share(parameters, cfg, world_size)


def optimizer_share(parameters: Parameters, cfg: Config, world_size: int) -> int:
    """Return the parameters per rank where replicas share them, as a distributed optimizer does."""
    share = parameters.dense // (dp_size(cfg.parallel, world_size) * cfg.parallel.cp)
    return share + parameters.experts // expert_dp_size(cfg.parallel, world_size)


def checkpoint_bytes_of_rank(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> int:
    """Return the bytes of a checkpoint that one rank of this pipeline stage writes: its share of
    weights and of Adam's state.

    On a GPU this is also the host memory of a save and of its copy in the background.  Nothing is
    gathered, so a save takes no device memory.
    """
    share = optimizer_share(trained_parameters(spec, cfg, pp_rank), cfg, world_size)
    return share * (element_size(cfg) + adam_bytes(cfg).saved)


def activation_bytes(
    spec: ModelSpec, cfg: Config, pp_rank: int, *, skew: float = 1.0
) -> tuple[int, int]:
    """Return the bytes that the micro-batches in flight keep for backward, and the most that exist
    beside them while one layer runs or is recomputed.

    skew: rows of this rank's experts / mean over ranks.
    """
    parallel = cfg.parallel
    chunks = stage_layers(spec, parallel)[pp_rank :: parallel.pp]
    in_flight = micro_batches_in_flight(cfg, pp_rank)
    per_layer = {
        is_moe: layer_bytes(spec, cfg, is_moe=is_moe, skew=skew) for is_moe in (False, True)
    }
    # a recomputed layer keeps only its input, and a stage its output
    inputs = rows(cfg) * spec.hidden_size * element_size(cfg) // sequence_shards(cfg)
    kept = worst = 0
    for chunk in chunks:
        for number, layer in enumerate(chunk):
            bytes_ = per_layer[layer in spec.moe_layers]
            what = recomputed(cfg.model, number)
            again = {"layer": bytes_.kept, "experts": bytes_.experts, "": 0}[what]
            kept += inputs if what == "layer" else bytes_.kept - again
            worst = max(worst, again + bytes_.passing)
    kept += inputs * (len(chunks) - (pp_rank == parallel.pp - 1))
    # `kept` covers all vp chunks, `in_flight` counts passes over one
    return kept * in_flight // parallel.vp, worst


def device_route_bytes(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> int:
    """Return the largest size of expert ids on one rank of this pipeline stage."""
    ids = device_route_ids(spec, cfg, world_size, pp_rank)
    return route_bytes(spec, cfg, ids, cfg.run.num_mini_batches)


def route_bytes(spec: ModelSpec, cfg: Config, ids: float, mini_batches: int) -> int:
    """Return the bytes of expert ids on a device, with so many ids in each mini-batch of a step.

    The rollouts' ids are those of one mini-batch.  R2 records the ids of all mini-batches before
    the first update; so does loss.router_shift, with a float32 for every id.
    """
    of_rollouts = cfg.needs_routes and cfg.replay.mode != "R2"
    return int(of_rollouts * ids * id_bytes(spec)) + recorded_bytes(spec, cfg, ids, mini_batches)


def recorded_bytes(spec: ModelSpec, cfg: Config, ids: float, mini_batches: int) -> int:
    """Return the bytes of what the old-logprob pass records on a device for all updates, and
    so of what is there during Adam's update, too; arguments as of `route_bytes`.
    """
    sizes = (cfg.replay.mode == "R2") * id_bytes(spec)
    sizes += cfg.loss.switches.router_shift * (id_bytes(spec) + 4)
    return int(ids * mini_batches * sizes)


def device_recorded_bytes(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> int:
    """Return the largest size of `recorded_bytes` on one rank of this pipeline stage."""
    ids = device_route_ids(spec, cfg, world_size, pp_rank)
    return recorded_bytes(spec, cfg, ids, cfg.run.num_mini_batches)


def device_route_ids(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> float:
    """Return the largest number of ids of this stage's layers for this rank's rows of one
    mini-batch.
    """
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    responses = cfg.run.prompts_per_step * cfg.run.group_size / cfg.run.num_mini_batches
    tokens = responses * longest / dp_size(cfg.parallel, world_size)
    return route_ids(spec, cfg, pp_rank, tokens)


def route_ids(spec: ModelSpec, cfg: Config, pp_rank: int, tokens: float) -> float:
    """Return the number of ids on one rank of this pipeline stage for so many rows of a replica."""
    layers = len(set(rank_layers(spec, cfg.parallel, pp_rank)) & set(spec.moe_layers))
    # context ranks, and with sequence parallelism tensor ranks, have the ids of their own rows
    shared = cfg.parallel.cp * (cfg.parallel.tp if cfg.parallel.use_sequence_parallel else 1)
    return tokens * layers * spec.top_k / shared


def id_bytes(spec: ModelSpec) -> int:
    return 1 if spec.num_experts <= 256 else 2  # uint8 or int16


def host_route_bytes(spec: ModelSpec, cfg: Config, tokens_of_replica: int) -> int:
    """Return the bytes of one copy of the expert ids of a replica's rollouts, of all layers."""
    if not cfg.needs_routes:
        return 0
    return tokens_of_replica * len(spec.moe_layers) * spec.top_k * id_bytes(spec)


def route_copies(parallel: ParallelConfig, world_size: int, per_node: int) -> int:
    """Return the largest number of copies of a replica's expert ids on a node of `per_node` ranks:
    one of every replica that has ranks there, without parallel.share_host_memory one on every rank.
    """
    if not parallel.share_host_memory:
        return min(per_node, world_size)
    replicas = [place(rank, parallel, world_size).replica for rank in range(world_size)]
    starts = range(0, world_size, per_node)
    return max(len(set(replicas[start : start + per_node])) for start in starts)
