"""Largest difference between trainer and server before step 0, with equal weights.

One row per pair of precisions limits two measures of the same rollouts: the mean of |log mu - log
pi| over response tokens, and the expert overlap, the mean over (token, layer) of the fraction of
the K experts that both sides chose.  The warning limits are above what untrained models of 4 layers
differ by (trained ones differ less), the stopping limits above what an untrained MoE of 48 layers
differs by, and below wrong models (benchmarks/parity.py; results/benchmarks.md, "Trainer
against server: limits").
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from megatron_rl.config.all_sections import AllSections
from megatron_rl.config.sections import RolloutConfig

ASSUMED_DTYPE = "bfloat16"
"""Precision of a server that does not report it: SGLang's auto is bfloat16 or float16, and bfloat16
has the wider limits."""


@dataclass(frozen=True)
class ParityLimits:
    """Limits of one pair of precisions."""

    trainer: str
    """model.dtype."""
    server: str
    """float32, bfloat16, float16, or fp8 (rollout.quantize)."""
    warn_logprob_diff: float
    """Mean difference in nats above which a run warns."""
    max_logprob_diff: float
    """Mean difference in nats above which it stops."""
    warn_expert_overlap: float
    """Overlap, from 0 to 1, below which a run warns."""
    min_expert_overlap: float
    """Overlap, from 0 to 1, below which it stops."""


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
NO_LIMITS = ParityLimits("", "", 0.0, inf, 1.0, 0.0)  # no default contradicts any setting


def parity_limits(cfg: AllSections, server_dtype: str) -> ParityLimits:
    """Return the limits of this run: those that [rollout] sets, else those of the pair.

    server_dtype: as reported, or "auto".  Raises ValueError for a limit that has no effect beside
    the other one's default.
    """
    # a server may report a precision that has no row, e.g. auto
    served = server_dtype if ("float32", server_dtype) in LIMITS else ASSUMED_DTYPE
    precision = "fp8" if cfg.rollout.quantize == "fp8" else served
    return with_settings(LIMITS[cfg.model.dtype, precision], cfg.rollout)


def check_parity_keys(rollout: RolloutConfig) -> None:
    """Raise ValueError for limits in [rollout] that contradict each other for every pair."""
    with_settings(NO_LIMITS, rollout)


def with_settings(pair: ParityLimits, rollout: RolloutConfig) -> ParityLimits:
    """Replace limits of the pair by those that [rollout] sets.

    Raises ValueError if a run would stop before it warned.
    """

    def setting(name: str, default: float) -> float:
        value = getattr(rollout, f"parity_{name}")
        return default if value == "auto" else value

    # a default that warns gives way to a tighter limit that stops
    max_diff = setting("max_logprob_diff", pair.max_logprob_diff)
    warn_diff = setting("warn_logprob_diff", min(pair.warn_logprob_diff, max_diff))
    min_overlap = setting("min_expert_overlap", pair.min_expert_overlap)
    warn_overlap = setting("warn_expert_overlap", max(pair.warn_expert_overlap, min_overlap))
    if warn_diff > max_diff:
        raise ValueError(
            f"rollout.parity_warn_logprob_diff = {warn_diff:g} has no effect: a run stops above "
            f"parity_max_logprob_diff = {max_diff:g}; lower it, or raise parity_max_logprob_diff"
        )
    if warn_overlap < min_overlap:
        raise ValueError(
            f"rollout.parity_warn_expert_overlap = {warn_overlap:g} has no effect: a run stops "
            f"below parity_min_expert_overlap = {min_overlap:g}; raise it, or lower "
            "parity_min_expert_overlap"
        )
    return ParityLimits(pair.trainer, pair.server, warn_diff, max_diff, warn_overlap, min_overlap)
