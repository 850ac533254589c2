"""Parameters and bytes of one rank, from the model's sizes and the configuration.

Weights, gradients and optimizer state are exact, up to the padding of megatron-core's buffers.
Activations are the inputs and outputs of the layers' matrix products (docs/design/cost_model.md).
Sizes are in bytes.  T: rows of a micro-batch on one context-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate

from megatron_rl.config import Config, ModelConfig, ParallelConfig
from megatron_rl.models.spec import ModelSpec, padded_vocab_size
from megatron_rl.plan.adam_bytes import adam_bytes
from megatron_rl.plan.adapter_sizes import (
    AdaptedWeight,
    adapted_weights,
    adapter_parameters,
    merged_bytes,
)
from megatron_rl.plan.grid import dp_size, expert_dp_size, place

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
    """Expert ids of a mini-batch's micro-batches, at the longest responses."""
    working: int
    """The larger of two that never exist together: the logits with the gradient of the LM head's
    weight, and one layer that is being recomputed.
    """

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def stage_layers(spec: ModelSpec, parallel: ParallelConfig) -> list[list[int]]:
    """Return the 0-based layers of each of the pp x vp stages, in forward order.

    Stage i is on pipeline rank i % pp.
    """
    stages = parallel.pp * parallel.vp
    counts = parallel.layers_per_stage or (spec.num_layers // stages,) * stages
    ends = accumulate(counts)
    return [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]


def rank_layers(spec: ModelSpec, parallel: ParallelConfig, pp_rank: int) -> list[int]:
    """Return the layers of one pipeline rank, over its chunks."""
    return [
        layer for stage in stage_layers(spec, parallel)[pp_rank :: parallel.pp] for layer in stage
    ]


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
    return adapted_weights(spec, cfg, rank_layers(spec, cfg.parallel, pp_rank), te=wants_te(cfg))


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
    kept, recomputed = activation_bytes(spec, cfg, pp_rank, skew=skew)
    head = logits_bytes(spec, cfg) + head_gradient_bytes(spec, cfg)
    size, adam = element_size(cfg), adam_bytes(cfg)
    trained = trained_parameters(spec, cfg, pp_rank)
    adapters = trained.total if cfg.lora.rank else 0
    return Memory(
        weights=(parameters.total + adapters) * size,
        gradients=trained.total * adam.gradient,
        optimizer=int(updated_parameters(trained, cfg, world_size) * adam.device),
        activations=kept,
        routes=device_route_bytes(spec, cfg, world_size, pp_rank),
        working=max(recomputed, head if pp_rank == parallel.pp - 1 else 0)
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
    """Return the bytes that the micro-batches in flight keep for backward, and the most that one
    layer takes while it is recomputed.

    skew: rows of this rank's experts / mean over ranks.
    """
    parallel = cfg.parallel
    chunks = stage_layers(spec, parallel)[pp_rank :: parallel.pp]
    in_flight = micro_batches_in_flight(cfg, pp_rank)
    per_layer = {
        is_moe: layer_bytes(spec, cfg, is_moe=is_moe, skew=skew) for is_moe in (False, True)
    }
    # a recomputed layer keeps only its input
    sequence_shards = parallel.tp if parallel.use_sequence_parallel else 1
    inputs = rows(cfg) * spec.hidden_size * element_size(cfg) // sequence_shards
    kept = worst = 0
    for chunk in chunks:
        for number, layer in enumerate(chunk):
            full, experts = per_layer[layer in spec.moe_layers]
            what = recomputed(cfg.model, number)
            again = {"layer": full, "experts": experts, "": 0}[what]
            kept += inputs if what == "layer" else full - again
            passing = passing_bytes(spec, cfg, skew) if again and layer in spec.moe_layers else 0
            worst = max(worst, again + passing)
    # `kept` covers all vp chunks, `in_flight` counts passes over one
    return kept * in_flight // parallel.vp, worst


def passing_bytes(spec: ModelSpec, cfg: Config, skew: float) -> int:
    """Return the bytes of rows that exist while experts run and that backward does not keep: rows
    permuted, sorted by expert, and those that return.
    """
    sequence = cfg.parallel.tp if cfg.parallel.use_sequence_parallel else 1
    rows_of_experts = rows(cfg) // sequence * spec.top_k * skew * cfg.parallel.expert_tp
    return int(3 * rows_of_experts * spec.hidden_size * element_size(cfg))


def recomputed(model: ModelConfig, number: int) -> str:
    """Return the part of a layer that is recomputed: "layer", "experts" or "".

    number: its place in its pipeline chunk.
    """
    in_block = model.recompute == "block" and number < model.recompute_layers
    if model.recompute == "full" or in_block:
        return "layer"
    return "experts" if model.recompute == "selective" else ""


def layer_bytes(
    spec: ModelSpec, cfg: Config, *, is_moe: bool, num_rows: int | None = None, skew: float = 1.0
) -> tuple[int, int]:
    """Return the bytes that one layer keeps for backward of one micro-batch, and those of its MoE
    part alone.

    Attention keeps inputs and outputs of two norms (4 h), queries, keys and values before and after
    rotation, its output, and the residual.  Experts keep, k times per row, the dispatched and the
    returned row (2 h), and gate, up and their product (3 f).  Layers without TransformerEngine also
    keep keys and values once per query head, the norm of every head, and silu(gate).
    num_rows: by default those of a full micro-batch.
    skew: rows of this rank's experts / mean over ranks; returned rows are those of its tokens.
    """
    parallel, size = cfg.parallel, element_size(cfg)
    tp = parallel.tp
    sequence = tp if parallel.use_sequence_parallel else 1
    t, h = rows(cfg) if num_rows is None else num_rows, spec.hidden_size
    head = spec.head_dim if not spec.is_mla else spec.qk_nope_dim + spec.qk_rope_dim
    local = not wants_te(cfg)
    heads = 3 * spec.num_heads + 4 * spec.num_kv_heads
    if local:
        normed = spec.num_heads + spec.num_kv_heads if spec.qk_norm != "none" else 0
        heads += 2 * spec.num_heads + normed
    gated = 3 + local
    attention = t * (5 * h // sequence + heads * head // tp)
    if not is_moe:
        return (attention + t * (h // sequence + gated * spec.ffn_size // tp)) * size, 0
    # every tensor rank of an expert computes the rows of all of them, for its part of the expert
    returned = h * parallel.expert_tp
    dispatched = skew * (returned + gated * spec.expert_ffn_size)
    routed = int(spec.top_k * (returned + dispatched))
    experts = t // sequence * (h + routed + 2 * spec.num_experts)
    experts += t * gated * spec.shared_ffn_size // tp
    return (attention + experts) * size, experts * size


def logits_bytes(spec: ModelSpec, cfg: Config) -> int:
    """Return the bytes of logits [T, V / tp] in the model's dtype; the gradient overwrites them.

    With model.fused_lm_head only a chunk of rows exists at a time.
    """
    # 1024: a typical chunk of engine/fused_logprobs.py, whose size depends on the vocabulary
    at_once = min(rows(cfg), 1024) if cfg.model.fused_lm_head else rows(cfg)
    columns = padded_vocab_size(spec, cfg.parallel.tp) // cfg.parallel.tp
    return at_once * columns * element_size(cfg)


def head_gradient_bytes(spec: ModelSpec, cfg: Config) -> int:
    """Return the bytes of the gradient [V / tp, h] of the LM head's weight, which exists beside the
    logits until it is added to the float32 gradients.

    0 where it is added to them directly: with gradient accumulation fusion, and with
    model.fused_lm_head unless gradients are reduced while backward runs.
    """
    fields = cfg.megatron.fields
    if cfg.model.fused_lm_head:
        size = 4 if fields.get("overlap_grad_reduce") else 0  # summed over chunks in float32
    else:
        size = 0 if fields.get("gradient_accumulation_fusion") else element_size(cfg)
    return padded_vocab_size(spec, cfg.parallel.tp) // cfg.parallel.tp * spec.hidden_size * size


def rows(cfg: Config) -> int:
    """Return T, the rows of a full micro-batch on one context-parallel rank."""
    return cfg.run.max_tokens_per_micro_batch // cfg.parallel.cp


def element_size(cfg: Config) -> int:
    return 2 if cfg.model.dtype == "bfloat16" else 4


def wants_te(cfg: Config) -> bool:
    """Return True if layers are TransformerEngine's on a GPU where it is installed."""
    return cfg.run.device != "cpu" and cfg.model.layer_spec != "local" and not cfg.model.is_exact


def micro_batches_in_flight(cfg: Config, pp_rank: int) -> int:
    """Return how many passes over a chunk have activations on a rank at the same time, under 1F1B
    or its interleaved form.
    """
    pp, vp = cfg.parallel.pp, cfg.parallel.vp
    if vp == 1:
        return pp - pp_rank  # the first stage runs ahead of the last one by pp - 1
    return 2 * (pp - pp_rank - 1) + (vp - 1) * pp + 1


def device_route_bytes(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> int:
    """Return the largest size of expert ids on one rank of this pipeline stage.

    These are the ids of one mini-batch; loss.router_shift adds those of all mini-batches of a step,
    with a float32 for every id.
    """
    ids = device_route_ids(spec, cfg, world_size, pp_rank)
    size = ids * id_bytes(spec) if cfg.needs_routes or cfg.replay.mode == "R2" else 0
    if cfg.loss.switches.router_shift:
        size += ids * cfg.run.num_mini_batches * (id_bytes(spec) + 4)
    return int(size)


def device_route_ids(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> float:
    """Return the largest number of ids of this stage's layers for this rank's rows of one
    mini-batch.
    """
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    responses = cfg.run.prompts_per_step * cfg.run.group_size / cfg.run.num_mini_batches
    tokens = responses * longest / dp_size(cfg.parallel, world_size)
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
