"""How far apart trainer and server may be before step 0, although they hold the same weights: one row per pair of precisions.

Two measures of the same rollouts: the mean of |log mu - log pi| over response tokens, and the expert overlap, the mean over
(token, layer) of the share of the K experts that both sides chose.  By benchmarks/parity.py, with equal weights: the limits that
warn lie above what untrained models of 4 layers differ by (trained ones differ less), those that stop a run above an untrained
mixture of experts of 48 layers, and below wrong models (docs/benchmarks.md, "Trainer against server: limits").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config.config import Config
    from megatron_rl.config.rollout import RolloutConfig

ASSUMED_DTYPE = "bfloat16"
"""For a server that does not say its precision: SGLang's auto is bfloat16 or float16, and this one has the wider limits."""


@dataclass(frozen=True)
class ParityLimits:
    """Limits of one pair.  trainer: model.dtype; server: float32, bfloat16, float16, or fp8 (rollout.quantize).

    logprob_diff: nats, at most; expert_overlap: share in 0..1, at least.  Beyond warn_* the run says so, beyond max_ or min_ it
    stops.
    """

    trainer: str
    server: str
    warn_logprob_diff: float
    max_logprob_diff: float
    warn_expert_overlap: float
    min_expert_overlap: float


LIMITS = {
    (limits.trainer, limits.server): limits
    for limits in (
        ParityLimits("float32", "float32", 1e-4, 1e-3, 0.999, 0.99),
        ParityLimits("float32", "bfloat16", 0.15, 0.3, 0.96, 0.9),
        ParityLimits("float32", "float16", 0.05, 0.3, 0.98, 0.9),
        ParityLimits("float32", "fp8", 0.3, 0.4, 0.9, 0.8),
        ParityLimits("bfloat16", "float32", 0.15, 0.3, 0.96, 0.9),
        ParityLimits("bfloat16", "bfloat16", 0.15, 0.3, 0.96, 0.9),
        ParityLimits("bfloat16", "float16", 0.15, 0.3, 0.96, 0.9),
        ParityLimits("bfloat16", "fp8", 0.3, 0.4, 0.9, 0.8),
    )
}


def parity_limits(cfg: Config, server_dtype: str) -> ParityLimits:
    """The limits of this run: those that [rollout] sets, else those of the pair.  server_dtype: as the server says it, or "auto".

    Raises ValueError where a limit that is set has no effect beside the other one's default.
    """
    served = server_dtype if ("float32", server_dtype) in LIMITS else ASSUMED_DTYPE
    pair = LIMITS[cfg.model.dtype, "fp8" if cfg.rollout.quantize == "fp8" else served]
    rollout = cfg.rollout
    max_diff = of(rollout.parity_max_logprob_diff, pair.max_logprob_diff)
    warn_diff = of(rollout.parity_warn_logprob_diff, min(pair.warn_logprob_diff, max_diff))
    min_overlap = of(rollout.parity_min_expert_overlap, pair.min_expert_overlap)
    warn_overlap = of(rollout.parity_warn_expert_overlap, max(pair.warn_expert_overlap, min_overlap))
    check_order(warn_diff, max_diff, warn_overlap, min_overlap)
    return ParityLimits(pair.trainer, pair.server, warn_diff, max_diff, warn_overlap, min_overlap)


def of(setting: float | str, default: float) -> float:
    return default if isinstance(setting, str) else setting


def check_order(warn_diff: float, max_diff: float, warn_overlap: float, min_overlap: float) -> None:
    """Raise ValueError where a run would stop before it warned."""
    if warn_diff > max_diff:
        raise ValueError(
            f"rollout.parity_warn_logprob_diff = {warn_diff:g} has no effect: a run stops above parity_max_logprob_diff = "
            f"{max_diff:g}; lower it, or raise parity_max_logprob_diff"
        )
    if warn_overlap < min_overlap:
        raise ValueError(
            f"rollout.parity_warn_expert_overlap = {warn_overlap:g} has no effect: a run stops below parity_min_expert_overlap = "
            f"{min_overlap:g}; raise it, or lower parity_min_expert_overlap"
        )


def check_parity_keys(rollout: RolloutConfig) -> None:
    """check_order for what is set in [rollout], whatever the pair will be."""
    check_order(
        of(rollout.parity_warn_logprob_diff, 0.0),
        of(rollout.parity_max_logprob_diff, float("inf")),
        of(rollout.parity_warn_expert_overlap, 1.0),
        of(rollout.parity_min_expert_overlap, 0.0),
    )
