"""Parameters and bytes of one rank, from the model's sizes and the configuration.

Weights, gradients and optimizer state are exact, up to the padding of megatron-core's buffers;
activations are those of the layers' matrices (docs/design/cost_model.md).  Bytes throughout; T rows
of a micro-batch on one context-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate

from megatron_rl.config import Config, ModelConfig, ParallelConfig
from megatron_rl.models.spec import ModelSpec, padded_vocab_size
from megatron_rl.plan.grid import dp_size, expert_dp_size


@dataclass(frozen=True)
class Parameters:
    """Elements on one rank: dense ones are on every data- and context-parallel rank, experts on
    every expert replica.
    """

    dense: int
    experts: int

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
    reference: int
    activations: int
    """Kept from forward to backward."""
    routes: int
    """Expert ids of a mini-batch's micro-batches, at the longest responses."""
    working: int
    """The larger of the logits and one layer that is being recomputed: both are short-lived, and
    never together.
    """

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def stage_layers(spec: ModelSpec, parallel: ParallelConfig) -> list[list[int]]:
    """0-based layers of each of the pp x vp stages, in forward order; stage i is on pipeline rank i
    % pp.
    """
    stages = parallel.pp * parallel.vp
    counts = parallel.layers_per_stage or (spec.num_layers // stages,) * stages
    ends = accumulate(counts)
    return [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]


def rank_layers(spec: ModelSpec, parallel: ParallelConfig, pp_rank: int) -> list[int]:
    """The layers of one pipeline rank, over its chunks."""
    return [
        layer for stage in stage_layers(spec, parallel)[pp_rank :: parallel.pp] for layer in stage
    ]


def rank_parameters(
    spec: ModelSpec, parallel: ParallelConfig, pp_rank: int, *, te: bool = False
) -> Parameters:
    """What one rank of this pipeline stage holds; te: in TransformerEngine's layers (`wants_te`)."""
    layers = rank_layers(spec, parallel, pp_rank)
    num_moe = len(set(layers) & set(spec.moe_layers))
    total = Parameters(0, 0)
    for is_moe, count in ((True, num_moe), (False, len(layers) - num_moe)):
        each = layer_parameters(spec, parallel, is_moe=is_moe, te=te)
        total += Parameters(count * each.dense, count * each.experts)
    table = padded_vocab_size(spec, parallel.tp) // parallel.tp * spec.hidden_size
    is_first, is_last = pp_rank == 0, pp_rank == parallel.pp - 1
    # tied embeddings need one table on one rank, but a copy on the last of several stages
    tables = 1 if is_first and is_last and spec.tie_embeddings else is_first + is_last
    return total + Parameters(tables * table + spec.hidden_size * is_last, 0)  # + the final norm


def full_model(spec: ModelSpec) -> Parameters:
    """All parameters, each once."""
    return rank_parameters(spec, ParallelConfig(), 0)


def layer_parameters(
    spec: ModelSpec, parallel: ParallelConfig, *, is_moe: bool, te: bool = False
) -> Parameters:
    h, tp = spec.hidden_size, parallel.tp
    dense = 2 * h + attention_parameters_of_rank(spec, tp, te=te)  # 2 h: the layer's norms
    if not is_moe:
        return Parameters(dense + 3 * h * spec.ffn_size // tp, 0)
    dense += h * spec.num_experts + 3 * h * spec.shared_ffn_size // tp + h * spec.shared_gate
    return Parameters(
        dense, spec.num_experts // parallel.ep * 3 * h * spec.expert_ffn_size // parallel.expert_tp
    )


def attention_parameters_of_rank(spec: ModelSpec, tp: int, *, te: bool = False) -> int:
    """Matrices are sharded over tp, norms of single heads replicated; with TransformerEngine also
    MLA's down-projections.
    """
    h = spec.hidden_size
    if spec.is_mla:
        q_dim = spec.num_heads * (spec.qk_nope_dim + spec.qk_rope_dim)
        up = (spec.q_lora_rank or h) * q_dim + spec.kv_lora_rank * spec.num_heads * (
            spec.qk_nope_dim + spec.v_head_dim
        )
        down = h * (spec.q_lora_rank + spec.kv_lora_rank + spec.qk_rope_dim)
        sharded = up + spec.num_heads * spec.v_head_dim * h
        norms = spec.q_lora_rank + spec.kv_lora_rank
        return sharded // tp + (down if te else down // tp) + norms
    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norms = {"none": 0, "head": 2 * spec.head_dim, "vector": (q_dim + kv_dim) // tp}[spec.qk_norm]
    bias = (q_dim + 2 * kv_dim) // tp if spec.qkv_bias else 0
    return (h * (q_dim + 2 * kv_dim) + q_dim * h) // tp + norms + bias


def rank_memory(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> Memory:
    """Bytes on one rank of this pipeline stage in the update, at its peak."""
    parallel = cfg.parallel
    held = rank_parameters(spec, parallel, pp_rank, te=wants_te(cfg))
    kept, recomputed = activation_bytes(spec, cfg, pp_rank)
    size = element_size(cfg)
    owned = held.total
    if cfg.optim.distributed:
        owned = held.dense // (dp_size(parallel, world_size) * parallel.cp)
        owned += held.experts // expert_dp_size(parallel, world_size)
    return Memory(
        weights=held.total * size,
        gradients=held.total * 4,  # core accumulates them in float32
        # Adam's two moments, and a float32 copy of 16-bit weights
        optimizer=owned * (12 if size == 2 else 8),
        reference=held.total * size if cfg.loss.kl_coef else 0,  # a frozen copy of the weights
        activations=kept,
        routes=device_route_bytes(spec, cfg, world_size, pp_rank),
        working=max(recomputed, logits_bytes(spec, cfg) if pp_rank == parallel.pp - 1 else 0),
    )


def checkpoint_bytes_of_rank(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> int:
    """What one rank of this pipeline stage writes of a checkpoint: its share of weights, float32
    weights and two moments.

    On a GPU this is also the host memory of a save, and of the background's copy.  Nothing is
    gathered: the device needs none.
    """
    held = rank_parameters(spec, cfg.parallel, pp_rank, te=wants_te(cfg))
    share = held.dense // (dp_size(cfg.parallel, world_size) * cfg.parallel.cp)
    share += held.experts // expert_dp_size(cfg.parallel, world_size)
    has_copy = cfg.optim.distributed or element_size(cfg) == 2  # of the weights, in float32
    return share * (element_size(cfg) + 8 + 4 * has_copy)


def activation_bytes(spec: ModelSpec, cfg: Config, pp_rank: int) -> tuple[int, int]:
    """(kept of the micro-batches in flight, one layer or its experts while recomputed)."""
    parallel = cfg.parallel
    chunks = stage_layers(spec, parallel)[pp_rank :: parallel.pp]
    in_flight = micro_batches_in_flight(cfg, pp_rank)
    per_layer = {is_moe: layer_bytes(spec, cfg, is_moe=is_moe) for is_moe in (False, True)}
    # a recomputed layer keeps only its input
    inputs = (
        rows(cfg)
        * spec.hidden_size
        * element_size(cfg)
        // (parallel.tp if parallel.use_sequence_parallel else 1)
    )
    kept = 0
    worst = 0
    for chunk in chunks:
        for number, layer in enumerate(chunk):
            full, experts = per_layer[layer in spec.moe_layers]
            what = recomputed(cfg.model, number)
            again = {"layer": full, "experts": experts, "": 0}[what]
            kept += inputs if what == "layer" else full - again
            worst = max(worst, again)
    # kept is of all vp chunks, in_flight counts passes of one
    return kept * in_flight // parallel.vp, worst


def recomputed(model: ModelConfig, number: int) -> str:
    """Recomputed part of a layer, which is `number` in its pipeline chunk: "layer", "experts" or
    "".
    """
    if model.recompute == "full" or (
        model.recompute == "block" and number < model.recompute_layers
    ):
        return "layer"
    return "experts" if model.recompute == "selective" else ""


def layer_bytes(
    spec: ModelSpec, cfg: Config, *, is_moe: bool, num_rows: int | None = None
) -> tuple[int, int]:
    """(all, those of the MoE part) that one layer keeps for backward, for one micro-batch of
    `num_rows`, default: a full one.

    Attention: two norms' inputs and outputs (4 h), queries, keys, values before and after rotation,
    its output, the residual.  Experts: each row, k times: dispatched and returned (2 h), and gate,
    up and their product (3 f).  Layers without TransformerEngine also keep keys and values once per
    query head, the norm of each head, and silu(gate).
    """
    parallel, size = cfg.parallel, element_size(cfg)
    tp = parallel.tp
    sequence = tp if parallel.use_sequence_parallel else 1
    t, h = rows(cfg) if num_rows is None else num_rows, spec.hidden_size
    head = spec.head_dim if not spec.is_mla else spec.qk_nope_dim + spec.qk_rope_dim
    local = not wants_te(cfg)
    heads = 3 * spec.num_heads + 4 * spec.num_kv_heads
    heads += (
        2 * spec.num_heads + (spec.num_heads + spec.num_kv_heads) * (spec.qk_norm != "none")
    ) * local
    gated = 3 + local
    attention = t * (5 * h // sequence + heads * head // tp)
    if not is_moe:
        return (attention + t * (h // sequence + gated * spec.ffn_size // tp)) * size, 0
    # every expert tensor rank sees the rows of all of them, for its part of the expert
    routed = spec.top_k * (2 * h * parallel.expert_tp + gated * spec.expert_ffn_size)
    experts = (
        t // sequence * (h + routed + 2 * spec.num_experts) + t * gated * spec.shared_ffn_size // tp
    )
    return (attention + experts) * size, experts * size


def logits_bytes(spec: ModelSpec, cfg: Config) -> int:
    """[T, V / tp] in the model's precision; the gradient overwrites them.

    With model.fused_lm_head: one chunk of rows.
    """
    # 1024: typical chunk of engine/fused_logprobs.py, which depends on the vocabulary
    held = min(rows(cfg), 1024) if cfg.model.fused_lm_head else rows(cfg)
    return held * (padded_vocab_size(spec, cfg.parallel.tp) // cfg.parallel.tp) * element_size(cfg)


def rows(cfg: Config) -> int:
    """Rows of a full micro-batch on one context-parallel rank."""
    return cfg.run.max_tokens_per_micro_batch // cfg.parallel.cp


def element_size(cfg: Config) -> int:
    return 2 if cfg.model.dtype == "bfloat16" else 4


def wants_te(cfg: Config) -> bool:
    """Whether layers are TransformerEngine's on a GPU where it is installed."""
    return cfg.run.device != "cpu" and cfg.model.layer_spec != "local" and not cfg.model.is_exact


def micro_batches_in_flight(cfg: Config, pp_rank: int) -> int:
    """Chunk passes whose activations a rank holds at the same time, under 1F1B or its interleaved
    form.
    """
    pp, vp = cfg.parallel.pp, cfg.parallel.vp
    if vp == 1:
        return pp - pp_rank  # the first stage runs ahead of the last one by pp - 1
    return 2 * (pp - pp_rank - 1) + (vp - 1) * pp + 1


def device_route_bytes(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> int:
    """Of this stage's layers for this rank's rows, at most: ids of one mini-batch, and with
    loss.router_shift those of all mini-batches of a step with a float32 each."""
    ids = device_route_ids(spec, cfg, world_size, pp_rank)
    held = ids * id_bytes(spec) if cfg.needs_routes or cfg.replay.mode == "R2" else 0
    if cfg.loss.switches.router_shift:
        held += ids * cfg.run.num_mini_batches * (id_bytes(spec) + 4)
    return int(held)


def device_route_ids(spec: ModelSpec, cfg: Config, world_size: int, pp_rank: int) -> float:
    """Number of ids of this stage's layers for this rank's rows of one mini-batch, at most."""
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    responses = cfg.run.prompts_per_step * cfg.run.group_size / cfg.run.num_mini_batches
    tokens = responses * longest / dp_size(cfg.parallel, world_size)
    layers = len(set(rank_layers(spec, cfg.parallel, pp_rank)) & set(spec.moe_layers))
    # each context and, with sequence parallelism, tensor rank holds the ids of its own rows
    shared = cfg.parallel.cp * (cfg.parallel.tp if cfg.parallel.use_sequence_parallel else 1)
    return tokens * layers * spec.top_k / shared


def id_bytes(spec: ModelSpec) -> int:
    return 1 if spec.num_experts <= 256 else 2  # uint8 or int16


def host_route_bytes(spec: ModelSpec, cfg: Config, tokens_of_replica: int) -> int:
    """Expert ids of one step on each rank's host: all layers of its replica's rollouts."""
    if not cfg.needs_routes:
        return 0
    return tokens_of_replica * len(spec.moe_layers) * spec.top_k * id_bytes(spec)
