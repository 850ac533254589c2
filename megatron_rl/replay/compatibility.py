"""Settings with which routing replay is not exact, which are refused at start-up with reason and
remedy; and a line that says what is active.

The settings are read from megatron-core's TransformerConfig, whatever set them.  Sizes that core
computes wrongly also without replay (expert replicas left unreduced) are refused earlier, by
models.fit.check_sizes.
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
    """The error for a setting with which replay would be off or wrong without notice.

    The message names the setting, the reason and the remedy.
    """


class CoreSettings:
    """megatron-core's TransformerConfig of any version; a setting that the version does not have is
    None, which means off.
    """

    def __init__(self, config: object) -> None:
        self._config = config

    def __getattr__(self, key: str) -> Any:
        return getattr(self._config, key, None)


@dataclass(frozen=True)
class Refusal:
    """A rule: a setting of core that breaks replay."""

    key: str
    """The name of the setting in core."""
    text: str
    """The reason and the remedy, "reason; remedy"."""
    problem: Callable[[CoreSettings], object] | None = None
    """Return a true value where the setting breaks replay; None: where it is on."""
    fixed_in: Version | None = None
    """The first version of core that does not have the problem."""

    def holds(self, core: CoreSettings, version: Version | None) -> bool:
        """Return True where the setting breaks replay.

        version: that of core; None where it is not known, and rules that depend on it are skipped.
        """
        if self.fixed_in is not None and (version is None or version >= self.fixed_in):
            return False
        return bool(getattr(core, self.key) if self.problem is None else self.problem(core))


def check_compatibility(
    config: object, *, mode: str, core_version: str, measure: bool = False
) -> None:
    """Raise ReplayIncompatible, naming every problem, unless replay in this mode (none, R2, R3) is
    exact under `config`.

    Mode none is checked too, because an activation recompute replays what its forward used.
    """
    problems = list(refusals(config, Version(core_version)))
    has_experts = bool(CoreSettings(config).num_moe_experts)
    if mode != "none" and not has_experts:
        problems.append(
            f"replay.mode = {mode}: the model has no MoE layer, nothing can be replayed; set"
            " replay.mode = none"
        )
    if measure and not has_experts:
        problems.append(
            "replay.measure = true: the model has no MoE layer, no routes can be compared; set it"
            " to false"
        )
    if problems:
        raise ReplayIncompatible("; ".join(problems))


def refusals(config: object, core_version: Version | None = None) -> Iterator[str]:
    """Yield one line for every setting of core's `config` that breaks replay."""
    core = CoreSettings(config)
    for rule in REFUSALS:
        if rule.holds(core, core_version):
            names = [str(getattr(item, "name", item)) for item in as_list(getattr(core, rule.key))]
            yield f"{rule.key} = {','.join(names)}: {rule.text}"


def compatibility_line(cfg: Config, core: object) -> str:
    """Return a line that says what is active, for instance "replay R3: tp2+sp pp2x2 ep2, recompute
    full, alltoall, packed".
    """
    parallel, model = cfg.parallel, cfg.model
    sizes = []
    if parallel.tp > 1:
        sizes.append(f"tp{parallel.tp}" + ("+sp" if CoreSettings(core).sequence_parallel else ""))
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
    recompute = f"recompute {model.recompute}"
    if model.recompute == "block" or (model.recompute == "full" and model.recompute_layers > 1):
        recompute += f" {model.recompute_layers}"
    parts = [
        " ".join(sizes) or "no model parallelism",
        recompute,
        model.token_dispatcher,
        "padded" if model.batch_format == "bshd" else "packed",
    ]
    if CoreSettings(core).mtp_num_layers:
        parts.append("MTP layers route live")
    measured = ", measured" if cfg.replay.measure else ""
    return f"replay {cfg.replay.mode}{measured}: {', '.join(parts)}"


def captures_routers(core: CoreSettings) -> bool:
    """Return True where a CUDA graph captures routers."""
    if core.cuda_graph_impl in ("none", None):
        return False
    # core 0.19 has cuda_graph_modules, and empties the former cuda_graph_scope
    scopes = core.cuda_graph_modules or core.cuda_graph_scope or []
    names = {getattr(scope, "name", scope) for scope in as_list(scopes)}
    return not names or not names <= GRAPHS_WITHOUT_ROUTER  # an empty scope is the entire layer


def balances_experts(core: CoreSettings) -> bool:
    """Return True where a balancing loss has a coefficient that is not 0.

    Without a kind of loss, which core has by default and this program has not, it has no effect:
    whoever sets it expects a loss.
    """
    return any(as_list(core.moe_aux_loss_coeff))


def scores_groups_differently(core: CoreSettings) -> bool:
    """Return True where core ranks groups of experts by other sums than HF and the servers.

    A group's score in core is the sum of its best top_k // group_topk experts, in HF and the
    servers that of its best two.
    """
    groups, kept = core.moe_router_num_groups, core.moe_router_group_topk
    return bool(groups and kept and kept < groups and core.moe_router_topk // kept != 2)


def rounds_scores(core: CoreSettings) -> bool:
    """Return True where core before 0.17 rounds the router's scores to 16 bits."""
    is_rounded = core.moe_router_score_function == "sigmoid" or core.moe_router_pre_softmax
    return bool(is_rounded and (core.bf16 or core.fp16) and not core.moe_router_dtype)


def is_interleaved(core: CoreSettings) -> bool:
    return (core.virtual_pipeline_model_parallel_size or 1) > 1


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


REFUSALS = (
    Refusal(
        "moe_router_fusion",
        "the fused router returns before the replay hook, so replay would be silently off; set it"
        " to false",
    ),
    Refusal(
        "moe_expert_capacity_factor",
        "tokens beyond an expert's capacity are dropped, so they would not use the replayed"
        " experts; remove it",
        lambda core: core.moe_expert_capacity_factor is not None,
    ),
    Refusal(
        "moe_token_dropping", "dropped tokens would not use the replayed experts; set it to false"
    ),
    Refusal(
        "overlap_moe_expert_parallel_comm",
        "combined 1F1B interleaves one micro-batch's forward with another's backward, so a router"
        " call no longer tells which micro-batch it serves; set it to false",
    ),
    Refusal(
        "cuda_graph_scope",
        "a captured router keeps using the experts of the micro-batch it was captured with; limit"
        " cuda_graph_scope to attn, or set cuda_graph_impl = none",
        captures_routers,
    ),
    Refusal(
        "moe_router_load_balancing_type",
        "its routing has no replay hook; use none",
        lambda core: {"sinkhorn", "quantile_balancing"}.intersection(
            map(str, as_list(core.moe_router_load_balancing_type))
        ),
    ),
    Refusal(
        "moe_enable_routing_replay",
        "core's own replay occupies the hook, keeps its routes in a process-wide list and forgets"
        " all but the last micro-batch; set it to false",
    ),
    Refusal(
        "moe_router_force_load_balancing",
        "the router's scores become random numbers: gate weights and live routes mean nothing; set"
        " it to false",
    ),
    Refusal(
        "moe_input_jitter_eps",
        "noise on the router's input differs between the old-logprob pass and the update;"
        " remove it",
    ),
    Refusal(
        "moe_router_bias_update_rate",
        "the expert bias would move with the load of replayed routes, between passes that must use"
        " the same routes; set it to 0",
        lambda core: core.moe_router_enable_expert_bias and core.moe_router_bias_update_rate,
    ),
    Refusal(
        "moe_aux_loss_coeff",
        "core's balancing losses count the experts that the router would choose, not the replayed"
        " ones, and are scaled for a division by the token count that this engine does not do; set"
        " it to 0",
        balances_experts,
    ),
    Refusal(
        "moe_z_loss_coeff",
        "core scales it for a division by the token count that this engine does not do; remove it",
    ),
    Refusal(
        "moe_router_group_topk",
        "core scores a group by its best top_k // group_topk experts, transformers and SGLang by"
        " its best two, so live routes would come from other groups; use a model with top_k = 2 x"
        " group_topk",
        scores_groups_differently,
    ),
    Refusal(
        "moe_router_dtype",
        "megatron-core before 0.17 rounds sigmoid and pre-softmax scores back to 16 bits, and other"
        " experts win; set model.router_dtype = fp32",
        rounds_scores,
        fixed_in=Version("0.17"),
    ),
    Refusal(
        "moe_router_padding_for_quantization",
        "core then adds experts to the routing map after the replay hook; set it to false",
    ),
    Refusal(
        "moe_token_dispatcher_type",
        "it derives the experts again from the gate weights, where a weight of 0 gives another"
        " expert, and has not been tested: its libraries (DeepEP, HybridEP) need GPUs; use alltoall"
        " or allgather",
        lambda core: core.moe_token_dispatcher_type == "flex",
    ),
    Refusal(
        "batch_p2p_comm",
        "under the interleaved schedule batched messages of both directions cross over between two"
        " pipeline ranks (and on gloo), so stages get another micro-batch's activations; set it to"
        " false and overlap_p2p_comm = true",
        lambda core: is_interleaved(core) and core.batch_p2p_comm,
    ),
    Refusal(
        "overlap_p2p_comm",
        "under the interleaved schedule the shapes of both directions then travel in one batch and"
        " cross over; set it to true",
        lambda core: (
            is_interleaved(core) and core.variable_seq_lengths and not core.overlap_p2p_comm
        ),
    ),
)
