"""Parity of trainer and servers: same model on both sides, expert ids come back, log-probs agree.
Before step 0.

Trainer and servers hold the same weights at this point (version 0, or the resumed version, has just
been pushed), so they differ by rounding only; the limits depend on the two precisions
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

PROMPTS_PER_REPLICA = 8
SAMPLES_PER_PROMPT = 4

FIX = (
    "Trainer and server do not compute the same model: give both the same checkpoint,"
    " rollout.temperature and rope settings, and check model.dtype, rollout.dtype and the server's"
    " own options"
)


class ParityError(RuntimeError):
    """Trainer and server do not compute the same model."""


@dataclass(frozen=True)
class ParityReport:
    """Differences of trainer and server; the last two None without routes.

    logprob_diff_mean, logprob_diff_max: of |log mu - log pi| over response tokens, nats; NaN where
    none was finite.
    experts_equal: share of (token, layer) with equal expert sets.
    expert_overlap: mean over (token, layer) of the share of the K experts that both sides chose.
    """

    logprob_diff_mean: float
    logprob_diff_max: float
    experts_equal: float | None
    expert_overlap: float | None

    def line(self, limits: ParityLimits) -> str:
        """The report and its limits in one line."""
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
        """Raise ParityError beyond the limits; log a warning where the difference is larger than
        usual.
        """
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
        """{key of the configuration: message} of the `limits` (by key without rollout.parity_) that
        are exceeded.
        """
        exceeded = {}
        for name, limit in limits.items():
            key = f"rollout.parity_{name}"
            if name.endswith("logprob_diff"):
                # also NaN, where no token had finite log-probs
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
    """Compare the servers' responses with the training engine's own forward, routing live.
    Collective.

    groups: this replica's probe rollouts.
    """
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
    """The same number of prompts for each replica, 1 to PROMPTS_PER_REPLICA; repeated where there
    are too few.
    """
    share = min(PROMPTS_PER_REPLICA, -(-len(prompts) // dp_size))
    return list(islice(cycle(prompts), share * dp_size))
