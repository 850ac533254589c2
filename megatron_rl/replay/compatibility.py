"""What routing replay cannot be exact with, refused at start-up with reason and remedy; and the line that says what is active.

Read from megatron-core's TransformerConfig, wherever its values came from.  Sizes that core computes wrongly whatever is
replayed (expert replicas left unreduced) are refused earlier, by engine.parallel.check_sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from megatron_rl.config import Config

GRAPHS_WITHOUT_ROUTER = {"attn", "mlp", "mamba"}
"""Parts of a layer that a CUDA graph may capture while routes are replayed."""


class ReplayIncompatible(ValueError):
    """A setting with which replay would be silently off or wrong; the message names it, the reason and the remedy."""


@dataclass(frozen=True)
class Refusal:
    """key: the setting; holds: whether this configuration (and core's version, where known) has the problem."""

    key: str
    holds: Callable[[Any, Version | None], bool]
    reason: str
    remedy: str


def check_compatibility(core: Any, *, mode: str, core_version: str, measure: bool = False) -> None:
    """Raise ReplayIncompatible, naming every problem, unless replay in this mode (none, R2, R3) is exact under `core`.

    Mode none is checked too: activation recompute replays what the forward used.
    """
    problems = list(refusals(core, Version(core_version)))
    if mode != "none" and not core.num_moe_experts:
        problems.append(
            f"replay.mode = {mode}: the model has no MoE layer, nothing can be replayed; set replay.mode = none"
        )
    if measure and not core.num_moe_experts:
        problems.append("replay.measure = true: the model has no MoE layer, no routes can be compared; set it to false")
    if problems:
        raise ReplayIncompatible("; ".join(problems))


def refusals(core: Any, core_version: Version | None = None) -> Iterator[str]:
    """One line for each setting of `core` that breaks replay; rules about a version are skipped where it is None."""
    for rule in REFUSALS:
        if rule.holds(core, core_version):
            yield f"{rule.key} = {shown(core, rule.key)}: {rule.reason}; {rule.remedy}"


def compatibility_line(cfg: Config, core: Any) -> str:
    """What is active, e.g. "replay R3: tp2+sp pp2x2 ep2, recompute full, alltoall, packed"."""
    parallel, model = cfg.parallel, cfg.model
    sizes = []
    if parallel.tp > 1:
        sizes.append(f"tp{parallel.tp}" + ("+sp" if core.sequence_parallel else ""))
    if parallel.cp > 1:
        sizes.append(f"cp{parallel.cp}")
    if parallel.pp > 1:
        stages = "+".join(map(str, parallel.layers_per_stage))
        interleaved = f"x{parallel.vp}" if parallel.vp > 1 else ""
        sizes.append(f"pp{parallel.pp}{interleaved}" + (f" (layers {stages})" if stages else ""))
    if parallel.ep > 1:
        sizes.append(f"ep{parallel.ep}")
    if parallel.expert_tp != parallel.tp:
        sizes.append(f"etp{parallel.expert_tp}")
    number = f" {model.recompute_layers}" if model.recompute == "block" or model.recompute_layers > 1 else ""
    parts = [
        " ".join(sizes) or "no model parallelism",
        f"recompute {model.recompute}{number if model.recompute in ('full', 'block') else ''}",
        model.token_dispatcher,
        "padded" if model.batch_format == "bshd" else "packed",
    ]
    if getattr(core, "mtp_num_layers", None):
        parts.append("MTP layers route live")
    return f"replay {cfg.replay.mode}{', measured' if cfg.replay.measure else ''}: {', '.join(parts)}"


def shown(core: Any, key: str) -> str:
    value = getattr(core, key)
    return ",".join(str(getattr(item, "name", item)) for item in value) if isinstance(value, list) else str(value)


def has(key: str) -> Callable[[Any, Version | None], bool]:
    return lambda core, _: bool(getattr(core, key, None))


def captures_routers(core: Any, _: Version | None) -> bool:
    """An empty scope is the whole layer."""
    if getattr(core, "cuda_graph_impl", "none") in ("none", None):
        return False
    names = {getattr(scope, "name", scope) for scope in core.cuda_graph_scope}
    return not names or not names <= GRAPHS_WITHOUT_ROUTER


def uses_sinkhorn(core: Any, _: Version | None) -> bool:
    kinds = getattr(core, "moe_router_load_balancing_type", "none")
    return "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds)


def balances_experts(core: Any, _: Version | None) -> bool:
    coefficients = getattr(core, "moe_aux_loss_coeff", 0.0)
    kinds = getattr(core, "moe_router_load_balancing_type", "none")
    names, values = ([item] if not isinstance(item, list) else item for item in (kinds, coefficients))
    return any(name.endswith("aux_loss") and value for name, value in zip(names, values, strict=False))


def moves_expert_bias(core: Any, _: Version | None) -> bool:
    return bool(getattr(core, "moe_router_enable_expert_bias", False) and core.moe_router_bias_update_rate)


def scores_groups_differently(core: Any, _: Version | None) -> bool:
    """core: a group's score is the sum of its best top_k // group_topk experts.  HF and the servers: of its best two."""
    groups, kept = getattr(core, "moe_router_num_groups", None), getattr(core, "moe_router_group_topk", None)
    return bool(groups and kept and kept < groups and core.moe_router_topk // kept != 2)


def rounds_scores(core: Any, version: Version | None) -> bool:
    rounded = getattr(core, "moe_router_score_function", "softmax") == "sigmoid" or getattr(
        core, "moe_router_pre_softmax", False
    )
    half = getattr(core, "bf16", False) or getattr(core, "fp16", False)
    return bool(rounded and half and not core.moe_router_dtype and version is not None and version < Version("0.17"))


def is_interleaved(core: Any) -> bool:
    return (getattr(core, "virtual_pipeline_model_parallel_size", None) or 1) > 1


def crosses_shapes(core: Any, _: Version | None) -> bool:
    """Shapes always travel batched: in both directions at once they cross over between two ranks."""
    return is_interleaved(core) and core.variable_seq_lengths and not core.overlap_p2p_comm


REFUSALS = (
    Refusal(
        "moe_router_fusion",
        has("moe_router_fusion"),
        "the fused router returns before the replay hook, so replay would be silently off",
        "set it to false",
    ),
    Refusal(
        "moe_expert_capacity_factor",
        lambda core, _: getattr(core, "moe_expert_capacity_factor", None) is not None,
        "tokens beyond an expert's capacity are dropped, so they would not use the replayed experts",
        "remove it",
    ),
    Refusal(
        "moe_token_dropping",
        has("moe_token_dropping"),
        "dropped tokens would not use the replayed experts",
        "set it to false",
    ),
    Refusal(
        "overlap_moe_expert_parallel_comm",
        has("overlap_moe_expert_parallel_comm"),
        "combined 1F1B interleaves one micro-batch's forward with another's backward, so a router call no longer tells "
        "which micro-batch it serves",
        "set it to false",
    ),
    Refusal(
        "cuda_graph_scope",
        captures_routers,
        "a captured router keeps using the experts of the micro-batch it was captured with",
        "limit cuda_graph_scope to attn, or set cuda_graph_impl = none",
    ),
    Refusal(
        "moe_router_load_balancing_type",
        uses_sinkhorn,
        "the sinkhorn router has no replay hook",
        "use none",
    ),
    Refusal(
        "moe_enable_routing_replay",
        has("moe_enable_routing_replay"),
        "core's own replay occupies the hook, keeps its routes in a process-wide list and forgets all but the last "
        "micro-batch",
        "set it to false",
    ),
    Refusal(
        "moe_router_force_load_balancing",
        has("moe_router_force_load_balancing"),
        "the router's scores become random numbers: gate weights and live routes mean nothing",
        "set it to false",
    ),
    Refusal(
        "moe_input_jitter_eps",
        has("moe_input_jitter_eps"),
        "noise on the router's input differs between the old-logprob pass and the update",
        "remove it",
    ),
    Refusal(
        "moe_router_bias_update_rate",
        moves_expert_bias,
        "the expert bias would move with the load of replayed routes, between passes that must route alike",
        "set it to 0",
    ),
    Refusal(
        "moe_aux_loss_coeff",
        balances_experts,
        "core's balancing losses count the experts that the router would choose, not the replayed ones, and are scaled for "
        "a division by the token count that this engine does not do",
        "set it to 0",
    ),
    Refusal(
        "moe_z_loss_coeff",
        has("moe_z_loss_coeff"),
        "core scales it for a division by the token count that this engine does not do",
        "remove it",
    ),
    Refusal(
        "moe_router_group_topk",
        scores_groups_differently,
        "core scores a group by its best top_k // group_topk experts, transformers and SGLang by its best two, so live "
        "routes would come from other groups",
        "use a model with top_k = 2 x group_topk",
    ),
    Refusal(
        "moe_router_dtype",
        rounds_scores,
        "megatron-core before 0.17 rounds sigmoid and pre-softmax scores back to 16 bits, and other experts win",
        "set model.router_dtype = fp32",
    ),
    Refusal(
        "moe_router_padding_for_quantization",
        has("moe_router_padding_for_quantization"),
        "core then adds experts to the routing map behind the replay hook",
        "set it to false",
    ),
    Refusal(
        "moe_token_dispatcher_type",
        lambda core, _: getattr(core, "moe_token_dispatcher_type", None) == "flex",
        "it derives the experts anew from the gate weights, where a weight of 0 gives another expert, and has not been "
        "tested: its libraries (DeepEP, HybridEP) need GPUs",
        "use alltoall or allgather",
    ),
    Refusal(
        "batch_p2p_comm",
        lambda core, _: is_interleaved(core) and bool(core.batch_p2p_comm),
        "under the interleaved schedule batched messages of both directions cross over between two pipeline ranks (and on "
        "gloo), so stages get another micro-batch's activations",
        "set it to false and overlap_p2p_comm = true",
    ),
    Refusal(
        "overlap_p2p_comm",
        crosses_shapes,
        "under the interleaved schedule the shapes of both directions then travel in one batch and cross over",
        "set it to true",
    ),
)
