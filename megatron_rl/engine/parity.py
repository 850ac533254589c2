"""The parity check of trainer and servers before the first step: both compute the same model, and
the servers return expert ids.

Trainer and servers have the same weights then, because version 0 or the resumed version has just
been synced.  They differ by rounding only; the limits depend on the two dtypes
(config/parity_limits.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch.distributed as dist

from megatron_rl.batch.pack import Sample
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import Config
from megatron_rl.config.parity_limits import ParityLimits
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Prompt, RolloutGroup

PROMPTS_PER_REPLICA, SAMPLES_PER_PROMPT, PARITY_TOKENS = 8, 4, 64
"""At most 8 prompts x 4 responses x 64 tokens of a replica are compared: enough tokens for a mean
difference of log-probs, and soon sampled."""

FIX = (
    "Trainer and server do not compute the same model: give both the same checkpoint,"
    " rollout.temperature and rope settings, and check model.dtype, rollout.dtype and the server's"
    " own options"
)


class ParityError(RuntimeError):
    """Trainer and server do not compute the same model."""


@dataclass(frozen=True)
class ParityReport:
    """Differences between trainer and servers."""

    logprob_diff_mean: float
    """Mean of |log mu - log pi| over response tokens, in nats; NaN where none was finite."""
    logprob_diff_max: float
    """Largest |log mu - log pi|, in nats."""
    experts_equal: float | None
    """Fraction of (token, layer) with equal expert sets; None without routes."""
    expert_overlap: float | None
    """Mean over (token, layer) of the fraction of the K experts that both sides chose; None without
    routes."""

    def line(self, limits: ParityLimits) -> str:
        """Return the report and its limits in one line."""
        experts = "experts not compared"
        if self.experts_equal is not None and self.expert_overlap is not None:
            experts = (
                f"expert overlap {self.expert_overlap:.2%} (at least"
                f" {100 * limits.min_expert_overlap:g}%), {self.experts_equal:.2%} of (token,"
                " layer) equal"
            )
        return (
            f"parity: trainer {limits.trainer}, server {limits.server}: |log mu - log pi| mean"
            f" {self.logprob_diff_mean:.1e} max {self.logprob_diff_max:.1e} (mean at most"
            f" {limits.max_logprob_diff:g}); {experts}"
        )

    def check(self, limits: ParityLimits, log: Callable[[str], None]) -> None:
        """Raise ParityError beyond the limits; log a warning for an unusually large difference."""
        pair = f"of a {limits.trainer} trainer and a {limits.server} server"
        if refused := self._beyond(
            max_logprob_diff=limits.max_logprob_diff, min_expert_overlap=limits.min_expert_overlap
        ):
            raise ParityError(
                f"{self.line(limits)}: {'; '.join(refused.values())}, the limit {pair}. {FIX}. If"
                " they agree, and this model is known to differ by that much, set"
                f" {' and '.join(refused)}"
            )
        warned = self._beyond(
            warn_logprob_diff=limits.warn_logprob_diff,
            warn_expert_overlap=limits.warn_expert_overlap,
        )
        for key, text in warned.items():
            log(
                f"WARNING: parity: {text}, more than equal weights {pair} usually differ by: watch"
                f" train/logratio_abs_mean and routing/router_mismatch; set {key} if this is normal"
                " for this model"
            )

    def _beyond(self, **limits: float) -> dict[str, str]:
        """Return {setting: message} of the limits that are exceeded.

        limits: by the names of their settings without rollout.parity_.
        """
        exceeded = {}
        for name, limit in limits.items():
            key = f"rollout.parity_{name}"
            if name.endswith("logprob_diff"):
                # "not <=" is also true of NaN, where no token had finite log-probs
                if not self.logprob_diff_mean <= limit:
                    exceeded[key] = (
                        f"mean |log mu - log pi| = {self.logprob_diff_mean:.2e} is above {key} ="
                        f" {limit:g}"
                    )
            elif self.expert_overlap is not None and not self.expert_overlap >= limit:
                exceeded[key] = (
                    f"expert overlap = {self.expert_overlap:.4f} is below {key} = {limit:g}"
                )
        return exceeded


def compare(engine: Engine, groups: Sequence[RolloutGroup], cfg: Config) -> ParityReport:
    """Compare the servers' responses with the training engine's forward under live routing.

    Collective.  groups: this replica's rollouts of probe_prompts.
    """
    # the advantage is not used: nothing is trained
    samples = [Sample(rollout, 0.0) for group in groups for rollout in group.rollouts]
    batch = make_mini_batch(
        samples,
        max_tokens=cfg.run.max_tokens_per_micro_batch,
        rule=engine.pack_rule,
        dp_group=engine.parallel.dp_group,
    )
    sums = MetricSums()
    old = engine.old_logprobs(batch, sums, replay="none")
    report = engine.mismatch([old])
    metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
    return ParityReport(
        logprob_diff_mean=metrics["train/logratio_abs_mean"],
        logprob_diff_max=metrics["train/logratio_abs_max"],
        experts_equal=None if report is None else 1 - report.router_mismatch,
        expert_overlap=None if report is None else report.expert_overlap,
    )


def probe_prompts(prompts: Sequence[Prompt], dp_size: int) -> list[Prompt]:
    """Return equally many prompts for every replica, 1 to PROMPTS_PER_REPLICA, repeated where there
    are too few.
    """
    share = min(PROMPTS_PER_REPLICA, -(-len(prompts) // dp_size))
    return list(islice(cycle(prompts), share * dp_size))
