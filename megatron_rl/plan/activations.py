"""Bytes of activations on one rank: what a layer keeps for backward, what exists beside it while it
runs, and the LM head.

With TransformerEngine's layers the rules are counts of what autograd, core's dispatcher and the
layers hold, which `megatron-rl rehearse` shows by line.  Sizes are in bytes.

t: rows of the largest micro-batch on one context-parallel rank; h, f: hidden size, expert size; k:
experts per token; Q, K: widths of queries and of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import Config, ModelConfig
from megatron_rl.models.spec import ModelSpec, padded_vocab_size
from megatron_rl.plan.grid import element_size, rows, sequence_shards, wants_te
from megatron_rl.weights.adapters import OUTSIDE, is_target

LOGITS_CHUNK = 256 << 20
"""Logits that exist at a time with model.fused_lm_head (engine/fused_logprobs.py, CHUNK_BYTES)."""
FLOAT32_BLOCK = 128 << 20
"""A block of logits in float32 (engine/shards.py, BLOCK_BYTES); the forward pass has two."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for one micro-batch."""

    kept: int
    """Kept for backward."""
    experts: int
    """Of these, those of the MoE part."""
    passing: int
    """The most that exist beside them while the layer runs forward or backward."""


def layer_bytes(spec: ModelSpec, cfg: Config, *, is_moe: bool, skew: float = 1.0) -> LayerBytes:
    """Return the bytes of one layer for the largest micro-batch.

    skew: rows of this rank's experts / mean over ranks; permuted rows are those of its tokens.
    """
    if not wants_te(cfg):
        return local_layer_bytes(spec, cfg, is_moe=is_moe, skew=skew)
    tp, size, t = cfg.parallel.tp, element_size(cfg), rows(cfg)
    shards, h = sequence_shards(cfg), spec.hidden_size
    # inputs and outputs of two norms; the output of the layer is the next one's input
    attention = t * (4 * h // shards + attention_numbers(spec, tp, shards))
    incoming = t * h // shards  # the gradient of the layer's output
    if not is_moe:
        # gate and up, and their product; backward adds the gradients of gate and up
        mlp, backward = 3 * t * spec.ffn_size // tp, 2 * t * spec.ffn_size // tp
        return LayerBytes((attention + mlp) * size, 0, (incoming + backward) * size)
    experts, passing = expert_numbers(spec, cfg, skew)
    return LayerBytes((attention + experts) * size, experts * size, (incoming + passing) * size)


def attention_numbers(spec: ModelSpec, tp: int, shards: int) -> int:
    """Return the numbers per row that attention keeps, without the norms of the layer.

    Queries before and after rotation and the output, 3 Q; keys and values before and after, 4 K.
    Latent attention: queries and keys of all heads, values and the output, and the latents before
    and after their norms.
    """
    if not spec.is_mla:
        return (3 * spec.num_heads + 4 * spec.num_kv_heads) * spec.head_dim // tp
    heads = 2 * (spec.qk_nope_dim + spec.qk_rope_dim + spec.v_head_dim) * spec.num_heads // tp
    return heads + 2 * (spec.q_lora_rank + spec.kv_lora_rank + spec.qk_rope_dim) // shards


def expert_numbers(spec: ModelSpec, cfg: Config, skew: float) -> tuple[int, int]:
    """Return the numbers that the MoE part keeps, and the most that pass through it.

    It keeps k times per row the dispatched row (h), and gate, up and their product (3 f), the
    router's logits and probabilities and the map of rows in 32 bits (8 per row and expert), and
    gate, up and product of shared experts.

    core's dispatcher refers to the rows of every stage until the MoE part has run: permuted and
    received ones, the experts' output, and that in the order of the ranks.  With etp > 1 that one
    takes the dtype of the router's probabilities, and so does its reduce-scatter.
    """
    parallel, h, f = cfg.parallel, spec.hidden_size, spec.expert_ffn_size
    t, shards, etp = rows(cfg), sequence_shards(cfg), cfg.parallel.expert_tp
    mine = t // shards * spec.top_k
    received = mine * skew
    # every tensor rank of an expert computes the rows of all of them, for its part of the expert
    computed = received * etp
    kept = computed * (h + 3 * f // etp) + t // shards * 8 * spec.num_experts
    kept += 3 * t * spec.shared_ffn_size // parallel.tp
    is_sorted = spec.num_experts // parallel.ep > 1
    passing = mine + computed
    if parallel.ep > 1 and (is_sorted or etp > 1):  # else received rows are the kept ones
        passing += received
    if is_sorted:
        passing += computed
    if etp > 1:
        wide = {"fp32": 4, "fp64": 8, "model": 0}[cfg.model.router_dtype] // element_size(cfg)
        passing += wide * computed + max(wide, 1) * received
    # in backward: the gradients of the output, and of gate and up
    return int(kept), int(max(passing * h, computed * (h + 2 * f // etp)))


def local_layer_bytes(
    spec: ModelSpec, cfg: Config, *, is_moe: bool, skew: float = 1.0
) -> LayerBytes:
    """Return the bytes of a layer without TransformerEngine, as measured on a CPU.

    It also keeps keys and values once per query head, the norm of every head, silu(gate), and the
    rows that return from experts.
    """
    kept, experts = moved_bytes(spec, cfg, is_moe=is_moe, skew=skew)
    passing = 0
    if is_moe:
        # rows permuted, sorted by expert, and those that return
        routed = rows(cfg) // sequence_shards(cfg) * spec.top_k * skew * cfg.parallel.expert_tp
        passing = int(3 * routed * spec.hidden_size * element_size(cfg))
    return LayerBytes(kept, experts, passing)


def moved_bytes(
    spec: ModelSpec, cfg: Config, *, is_moe: bool, num_rows: int | None = None, skew: float = 1.0
) -> tuple[int, int]:
    """Return the bytes of the inputs and outputs of a layer's matrix products, and those of its MoE
    part: what a forward pass writes, and reads again, outside of the products.

    Attention: inputs and outputs of two norms (4 h), queries, keys and values before and after
    rotation, its output, and the residual.  Experts, k times per row: the dispatched and the
    returned row (2 h), and gate, up and their product (3 f).
    """
    parallel, size = cfg.parallel, element_size(cfg)
    tp, sequence, h = parallel.tp, sequence_shards(cfg), spec.hidden_size
    t = rows(cfg) if num_rows is None else num_rows
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
    returned = h * parallel.expert_tp
    dispatched = skew * (returned + gated * spec.expert_ffn_size)
    routed = int(spec.top_k * (returned + dispatched))
    experts = t // sequence * (h + routed + 2 * spec.num_experts)
    experts += t * gated * spec.shared_ffn_size // tp
    return (attention + experts) * size, experts * size


def recomputed(model: ModelConfig, number: int) -> str:
    """Return the part of a layer that is recomputed: "layer", "experts" or "".

    number: its place in its pipeline chunk.
    """
    in_block = model.recompute == "block" and number < model.recompute_layers
    if model.recompute == "full" or in_block:
        return "layer"
    return "experts" if model.recompute == "selective" else ""


def head_bytes(spec: ModelSpec, cfg: Config) -> int:
    """Return the most bytes that the LM head and the log-probs take on a last stage."""
    t, h, size = rows(cfg), spec.hidden_size, element_size(cfg)
    norms = 2 * t * h // sequence_shards(cfg) * size  # input and output of the final norm
    logits, gradient, d_hidden = (
        logits_bytes(spec, cfg),
        head_gradient_bytes(spec, cfg),
        t * h * size,
    )
    if cfg.model.fused_lm_head:
        # gathered rows and their gradient; the weight's gradient comes after the logits
        return norms + 2 * d_hidden + max(logits + blocks(spec, cfg), gradient)
    # float32 blocks are gone before the gradients of weight and rows are computed
    return norms + logits + max(blocks(spec, cfg), gradient + d_hidden)


def blocks(spec: ModelSpec, cfg: Config) -> int:
    """Return the bytes of logits in float32 beside those in 16 bits."""
    if element_size(cfg) != 2:
        return 0
    columns = padded_vocab_size(spec, cfg.parallel.tp) // cfg.parallel.tp
    return 2 * min(FLOAT32_BLOCK, 4 * columns * rows(cfg))


def logits_bytes(spec: ModelSpec, cfg: Config) -> int:
    """Return the bytes of logits [T, V / tp] in the model's dtype; the gradient overwrites them.

    With model.fused_lm_head only a chunk of rows exists at a time.
    """
    columns = padded_vocab_size(spec, cfg.parallel.tp) // cfg.parallel.tp
    num_bytes = rows(cfg) * columns * element_size(cfg)
    return min(num_bytes, LOGITS_CHUNK) if cfg.model.fused_lm_head else num_bytes


def head_gradient_bytes(spec: ModelSpec, cfg: Config) -> int:
    """Return the bytes of the gradient [V / tp, h] of the LM head's weight, which exists until it
    is added to the float32 gradients, or multiplied with A and B of its adapter.

    With model.fused_lm_head nothing reads it: core's hook wants one where gradients are reduced
    while backward runs.  An adapter reads it: it is summed over chunks in float32, then rounded.
    With gradient accumulation fusion it is in `buffer_bytes`.
    """
    fused, size = cfg.model.fused_lm_head, element_size(cfg)
    columns = padded_vocab_size(spec, cfg.parallel.tp) // cfg.parallel.tp
    if cfg.lora.rank:
        is_made = is_target(OUTSIDE["lm_head"], cfg.lora.targets)
        size += 4 * (fused and size == 2)
    elif fused:
        is_made = cfg.overlaps_grad_reduce
    else:
        is_made = not cfg.megatron.is_on("gradient_accumulation_fusion")
    return is_made * columns * spec.hidden_size * size


def buffer_bytes(spec: ModelSpec, cfg: Config, *, is_last: bool) -> int:
    """Return the bytes of buffers that stay on a rank, is_last: of the last stage.

    core's buffer of gathered rows [T, h], which the LM head makes under sequence parallelism; and
    with gradient accumulation fusion a gradient that nothing reads for every shape of weights.
    """
    has_head = is_last and not cfg.model.fused_lm_head
    size = element_size(cfg)
    gathers = has_head and sequence_shards(cfg) > 1
    num_bytes = rows(cfg) * spec.hidden_size * size if gathers else 0
    if not cfg.megatron.is_on("gradient_accumulation_fusion"):
        return num_bytes
    tp, h = cfg.parallel.tp, spec.hidden_size
    shapes = 3 * h * (spec.ffn_size + spec.shared_ffn_size) // tp
    shapes += 3 * h * spec.expert_ffn_size // cfg.parallel.expert_tp
    if has_head:
        shapes += padded_vocab_size(spec, tp) // tp * h
    return num_bytes + shapes * size
