"""The handshake with the servers: same model on both sides, expert ids come back, log-probs agree.  Before step 0.

Trainer and servers hold the same weights at this point (version 0, or the resumed version, has just been pushed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_rl.batch.pack import Sample
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import Config
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import RolloutGroup

PROMPTS_PER_REPLICA = 8
SAMPLES_PER_PROMPT = 4

TOLERANCES = {  # serving and training precision -> (mean |log mu - log pi|, least fraction of equal expert sets)
    True: (1e-4, 0.999),
    False: (0.2, 0.8),
}


class ParityError(RuntimeError):
    """Trainer and server disagree about the model they both should hold."""


@dataclass(frozen=True)
class ParityReport:
    """mean and max |log mu - log pi| over sampled tokens; fraction of (token, layer) with equal expert sets, or None."""

    logprob_diff_mean: float
    logprob_diff_max: float
    experts_equal: float | None
    flip_margin_max: float | None

    def agrees(self, *, same_precision: bool) -> bool:
        """Whether the difference is one of precision.  False where no log-prob was finite: the mean is NaN then."""
        limit, least = TOLERANCES[same_precision]
        return self.logprob_diff_mean <= limit and (self.experts_equal is None or self.experts_equal >= least)

    def line(self, *, same_precision: bool) -> str:
        """One line for people."""
        limit, least = TOLERANCES[same_precision]
        experts = (
            "not compared"
            if self.experts_equal is None
            else f"{self.experts_equal:.2%} of (token, layer) equal (at least {least:.1%})"
        )
        return (
            f"handshake: |log mu - log pi| mean {self.logprob_diff_mean:.1e} max {self.logprob_diff_max:.1e} "
            f"(mean at most {limit:.0e}); experts {experts}"
        )


def check_parity(engine: Engine, groups: Sequence[RolloutGroup], cfg: Config, *, same_precision: bool) -> ParityReport:
    """Compare the servers' answer with the training engine's own forward, routing live.  Collective.

    groups: this replica's probe rollouts.  Raises ParityError when the difference is not one of precision.
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
    result = ParityReport(
        logprob_diff_mean=metrics["train/logratio_abs_mean"],
        logprob_diff_max=metrics["train/logratio_abs_max"],
        experts_equal=None if report is None else 1 - report.router_mismatch,
        flip_margin_max=None if report is None else report.flip_margin_max,
    )
    if not result.agrees(same_precision=same_precision):
        raise ParityError(
            f"{result.line(same_precision=same_precision)}: trainer and server do not compute the same model. "
            "Rule: the same checkpoint, temperature and precision on both sides; check rollout.dtype, model.dtype and the "
            "server's options"
        )
    return result
