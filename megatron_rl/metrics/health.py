"""The health of a run, in words: the rules of docs/guides/trouble.md as one table (RULES), and what
was left out, replaced or repeated in the last steps (left_out.py).

A rule compares the median of the last WINDOW steps, because single steps are noise, with a limit or
with earlier values of the run.  An event that must never happen (replay of other experts) needs no
window.  The limits are chosen, not measured: values at which the direction that the guide describes
is clear.  The limits of first_order/total_p95 follow examples/paper_long.  This module imports no
torch, because the report, the end of a run and the viewer use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from megatron_rl.metrics.left_out import ENTRIES, LeftOut, entry_of

if TYPE_CHECKING:  # it loads torch
    from megatron_rl.records.packed import StepResult

WINDOW = 5
"""The number of steps of a median, which the first WINDOW - 1 steps do not have."""
BACK = 10
"""The number of steps between two values that show a sudden change."""
RECENT = 20
"""The number of steps for which an event that must never happen is shown."""

Level = Literal["ok", "watch", "bad"]
COLLAPSE, MISMATCH = "docs/guides/trouble.md", "docs/guides/mismatch.md"
FIRST, SPLIT = f"{COLLAPSE}#read-these-first", f"{COLLAPSE}#the-split-logratio"
CLIPPING = f"{COLLAPSE}#clipping-truncation-sample-size"
BATCH, ROUTING = f"{COLLAPSE}#the-batch", f"{COLLAPSE}#routing-routing"
TEACHERS = "docs/guides/distillation.md#what-can-go-wrong"


@dataclass(frozen=True)
class Finding:
    """A statement about the health of a run at its last step."""

    level: Level
    """bad: by the guide this precedes a collapse, or a step was wrong."""
    title: str
    since_step: int | None
    """The step from which the finding holds without a gap to the last step."""
    text: str
    advice: str
    metric: str
    guide: str
    """A page of the repository with its anchor."""

    @property
    def since(self) -> str:
        return "" if self.since_step is None else f" since step {self.since_step}"

    def to_json(self) -> dict[str, str | int | None]:
        """Return the fields, with `advice` under the key "try", which the viewer reads."""
        return {"try" if name == "advice" else name: value for name, value in vars(self).items()}


class Curves:
    """The metrics of n steps, NaN where a step has no value, and the settings of the run as
    {"section.key": value}.
    """

    def __init__(
        self,
        steps: Sequence[int],
        metrics: Mapping[str, Sequence[float]],
        settings: Mapping[str, object],
    ) -> None:
        self.steps, self.settings = list(steps), settings
        self._metrics = {name: np.array(values, float) for name, values in metrics.items()}

    def values(self, name: str) -> np.ndarray:
        return self._metrics.get(name, np.full(len(self.steps), np.nan))

    def recent(self, entry: LeftOut) -> np.ndarray:
        """Return float [n], what was counted in the last RECENT steps, for every step."""
        return recent_sum(entry.added(self.values(entry.metric), self.steps[0]))

    def median(self, name: str) -> np.ndarray:
        """Return float [n], the median of the last WINDOW steps, for every step; NaN where one of
        them has no value.
        """
        values = self.values(name)
        if len(values) < WINDOW:
            return np.full(len(values), np.nan)
        medians = np.median(np.lib.stride_tricks.sliding_window_view(values, WINDOW), axis=1)
        # the first windows are incomplete
        return np.concatenate([np.full(WINDOW - 1, np.nan), medians])


@dataclass(frozen=True)
class Condition:
    """A condition on the metrics of a run, for every step."""

    holds: Callable[[Curves], np.ndarray]
    """Return bool [n]; a comparison with NaN is False."""
    rule: str
    """The condition in words, for the finding."""


def above(name: str, limit: float) -> Condition:
    return Condition(lambda curves: curves.median(name) > limit, f"above {limit:g}")


def below(name: str, limit: float) -> Condition:
    return Condition(lambda curves: curves.median(name) < limit, f"below {limit:g}")


def grew(name: str, factor: float, floor: float) -> Condition:
    def holds(curves: Curves) -> np.ndarray:
        median = curves.median(name)
        # fmin ignores NaN: steps without a value
        return (median > floor) & (median > factor * np.fmin.accumulate(median))

    return Condition(holds, f"above {factor:g} x its lowest so far, and above {floor:g}")


def lost(name: str, share: float, floor: float) -> Condition:
    """Hold where the median is `share` below its highest value so far, which was above `floor`.

    `floor` must be positive: a share of a value near 0 or below says nothing.
    """

    def holds(curves: Curves) -> np.ndarray:
        median = curves.median(name)
        highest = np.fmax.accumulate(median)
        return (highest > floor) & (median < (1 - share) * highest)

    return Condition(holds, f"{share:.0%} below its highest so far, which was above {floor:g}")


def fell(name: str, factor: float) -> Condition:
    def holds(curves: Curves) -> np.ndarray:
        median = curves.median(name)
        # the median BACK steps before every step; NaN, which fulfils nothing, for the first ones
        earlier = np.concatenate([np.full(min(BACK, len(median)), np.nan), median[:-BACK]])
        return median * factor < earlier

    return Condition(holds, f"below 1/{factor:g} of what it was {BACK} steps before")


def happened(name: str) -> Condition:
    def holds(curves: Curves) -> np.ndarray:
        return recent_sum(curves.values(name) > 0) > 0

    return Condition(holds, f"above 0 in one of the last {RECENT} steps")


def recent_sum(values: np.ndarray) -> np.ndarray:
    """Return [n], the sum of the last RECENT values, for every step."""
    sums = np.cumsum(values)
    return sums - np.concatenate([np.zeros(min(RECENT, len(sums))), sums[:-RECENT]])


def under_r3(condition: Condition) -> Condition:
    def holds(curves: Curves) -> np.ndarray:
        return condition.holds(curves) & (curves.settings.get("replay.mode") == "R3")

    return Condition(holds, condition.rule)


@dataclass(frozen=True)
class HealthRule:
    """Two conditions on a metric and what to say where they hold; bad counts where both hold."""

    metric: str
    title: str
    text: str
    advice: str
    guide: str
    watch: Condition | None = None
    bad: Condition | None = None


RULES = (
    HealthRule(
        "first_order/total_p95", "The first-order approximation breaks",
        "For the worst twentieth of the responses the token-level surrogate no longer follows the"
        " sequence-level objective.",
        "Compare first_order/train_infer_p95 and first_order/staleness_p95. The first: use R3,"
        " serve in a more precise dtype, check the weight sync. The second: clip, fewer"
        " mini-batches, a lower learning rate.",
        FIRST, watch=above("first_order/total_p95", 1.0), bad=above("first_order/total_p95", 2.5),
    ),
    HealthRule(
        "train/kl_mu_pi_k3", "The engines drift apart",
        "KL(mu, pi_old) between the servers and the trainer, on the same weights, grows.",
        "Use R3, serve in a more precise dtype, check the weight sync.",
        f"{MISMATCH}#later-it-grows", watch=grew("train/kl_mu_pi_k3", 10, 0.01),
        bad=above("train/kl_mu_pi_k3", 0.1),
    ),
    HealthRule(
        "logratio/f2_frac", "Extreme tokens",
        "Tokens whose probability differs by more than a factor of 2 between the engines. arXiv"
        " 2510.11370 saw collapse coincide with a share above 0.1.",
        "See whether tokens with flips are the wide ones (logratio/train_infer_std by flips): then"
        " use R3, else look at precision and kernels.",
        SPLIT, watch=above("logratio/f2_frac", 0.02), bad=above("logratio/f2_frac", 0.1),
    ),
    HealthRule(
        "train/entropy", "Entropy falls sharply",
        "The policy became almost certain within a few steps.",
        "Keep the importance weight, lower the learning rate.",
        FIRST, watch=fell("train/entropy", 4),
    ),
    HealthRule(
        "train/entropy", "Entropy explodes",
        "The policy becomes random.",
        "Look at the gradient norm and at the KL since that step; lower the learning rate.",
        FIRST, bad=grew("train/entropy", 4, 1.0),
    ),
    HealthRule(
        "train/ess", "Few tokens carry the weight",
        "The effective sample size of the importance weights is small: the gradient is as noisy as"
        " that share of the tokens.",
        "Look at logratio/train_infer_p99 and logratio/staleness_p99 for the part that grows;"
        " lower loss.weight_high.",
        CLIPPING, watch=below("train/ess", 0.5), bad=below("train/ess", 0.1),
    ),
    HealthRule(
        "train/tis_truncated_frac", "Many truncated weights",
        "The weight of these tokens is biased.",
        "Look at the tail of logratio/train_infer (p99, max): use R3 or a more precise dtype on"
        " the servers.",
        CLIPPING, watch=above("train/tis_truncated_frac", 0.02),
    ),
    HealthRule(
        "train/clip_low_frac", "Many tokens clipped low",
        "The policy moves away from bad responses faster than an update allows.",
        "Use fewer mini-batches or a lower learning rate.",
        CLIPPING, watch=above("train/clip_low_frac", 0.25),
    ),
    HealthRule(
        "train/clip_high_frac", "Many tokens clipped high",
        "The policy moves towards good responses faster than an update allows.",
        "Use fewer mini-batches or a lower learning rate.",
        CLIPPING, watch=above("train/clip_high_frac", 0.25),
    ),
    HealthRule(
        "train/rejected_frac", "Most responses are rejected",
        "loss.reject leaves little to learn from.",
        "Widen loss.reject, or find why the engines disagree.",
        CLIPPING, watch=above("train/rejected_frac", 0.5),
    ),
    HealthRule(
        "optim/grad_norm", "The gradient norm grows",
        "It is far above its lowest value, for several steps.",
        "Lower the learning rate; look at train/ess and at the clip fractions since that step.",
        CLIPPING, watch=grew("optim/grad_norm", 20, 1.0),
    ),
    HealthRule(
        "optim/empty_updates", "Updates without a gradient",
        "Every response was filtered, clipped or without advantage: nothing was learned.",
        "Look at rollout/zero_advantage_groups_frac: the data is too easy or too hard.",
        BATCH, watch=above("optim/empty_updates", 0.0),
    ),
    HealthRule(
        "rollout/zero_advantage_groups_frac", "Prompts that teach nothing",
        "Almost all groups score the same throughout.",
        "The data is too easy or too hard: other prompts, or batch.dynamic_sampling.",
        BATCH, watch=above("rollout/zero_advantage_groups_frac", 0.9),
    ),
    HealthRule(
        "rollout/truncated_frac", "Responses are cut",
        "Many reach rollout.max_response_tokens, and mostly score 0.",
        "Raise rollout.max_response_tokens, or shape the length (batch.overlong_cache).",
        BATCH, watch=above("rollout/truncated_frac", 0.5),
    ),
    HealthRule(
        "rollout/reward_mean", "The reward falls",
        "It is the last to move: look at the other curves before it.",
        "Resume from a checkpoint before that step, with clipping, a lower learning rate or fewer"
        " mini-batches.",
        BATCH, watch=lost("rollout/reward_mean", 0.3, 0.05),
        bad=lost("rollout/reward_mean", 0.6, 0.05),
    ),
    HealthRule(
        "teacher/reverse_kl", "The student leaves its teacher",
        "KL(mu, pi_T) grows, which distillation lowers; rewards may pull against the teacher.",
        "Look at reward and teacher by source: a higher beta, or a lower advantage.weight.",
        TEACHERS, watch=grew("teacher/reverse_kl", 2.0, 0.1),
    ),
    HealthRule(
        "routing/replayed_mismatch", "Replay does not replay",
        "Under R3 training must use the experts of the rollout, for every token that has a route.",
        "Stop, and check the layout: megatron-rl verify-replay.",
        ROUTING, bad=under_r3(happened("routing/replayed_mismatch")),
    ),
)  # fmt: skip


def examine(
    steps: Sequence[int],
    metrics: Mapping[str, Sequence[float]],
    settings: Mapping[str, object] | None = None,
) -> list[Finding]:
    """Return the findings that hold at the last step, the worst first; where none does, one finding
    of level "ok".

    steps: numbers of the steps, from 1; metrics: name -> its value in each of them, NaN for none.
    """
    curves = Curves(steps, metrics, settings or {})
    counters = [entry for name in sorted(metrics) if (entry := entry_of(name)) and entry.is_alarm]
    if curves.steps:
        candidates = [
            *(apply(rule, curves) for rule in RULES),
            *(apply_counter(entry, curves) for entry in counters),
        ]
        findings = [finding for finding in candidates if finding is not None]
        if findings:
            return sorted(findings, key=lambda finding: finding.level != "bad")
    looked = sum(bool(np.isfinite(curves.values(rule.metric)).any()) for rule in RULES)
    text = (
        f"{looked} of {len(RULES)} rules and {len(counters)} counters had values to look at, in"
        f" {len(curves.steps)} steps."
    )
    if len(curves.steps) < WINDOW:
        text += f" Most rules need {WINDOW} steps."
    return [Finding("ok", "Nothing stands out", None, text, "", "", FIRST)]


def examine_results(
    results: Sequence[StepResult], settings: Mapping[str, object] | None = None
) -> list[Finding]:
    """`examine` for the lines of metrics.jsonl, without an evaluation before the first step."""
    trained = [result for result in results if result.step >= 0]
    names = {name for result in trained for name in result.metrics}
    metrics = {name: [result.metrics.get(name, math.nan) for result in trained] for name in names}
    return examine([result.step + 1 for result in trained], metrics, settings)


def apply(rule: HealthRule, curves: Curves) -> Finding | None:
    """Return the finding of a rule; None unless one of its conditions holds at the last step."""
    levels: tuple[tuple[Level, Condition | None], ...] = (("watch", rule.watch), ("bad", rule.bad))
    conditions = {level: condition for level, condition in levels if condition is not None}
    holds = {level: condition.holds(curves) for level, condition in conditions.items()}
    reached = [level for level in conditions if holds[level][-1]]
    if not reached:
        return None
    worst = reached[-1]  # "bad" comes after "watch"
    # the stretch may start with the milder condition
    since = since_step(curves, np.any(list(holds.values()), axis=0))
    now = curves.median(rule.metric)[-1]
    value = "" if np.isnan(now) else f" Median of the last {WINDOW} steps: {now:.3g}."
    text = f"{rule.text}{value} The rule: {conditions[worst].rule}."
    return Finding(worst, rule.title, since, text, rule.advice, rule.metric, rule.guide)


def apply_counter(entry: LeftOut, curves: Curves) -> Finding | None:
    """Return the finding of a counter; None where it counted nothing in the last RECENT steps."""
    recent = curves.recent(entry)
    amount = recent[-1]
    if not amount > 0:
        return None
    steps = min(RECENT, len(curves.steps))
    share, said = amount / steps, f"{amount:.0f} in the last {steps} steps"
    if entry.per == "steps":
        said = f"In {amount:.0f} of the last {steps} steps"
    elif entry.of:
        of = ENTRIES[entry.of]
        # at most 1, also where the base has counted less than the entry
        share = amount / max(curves.recent(of)[-1], amount)
        said += f", {share:.2%} of the {of.label}"
    is_above = entry.bad_above is not None and share > entry.bad_above
    rule = f"above {entry.bad_above:.0%}" if is_above else "any"
    level: Level = "bad" if is_above or entry.level == "bad" else "watch"
    title = entry.label[0].upper() + entry.label[1:]
    text = f"{entry.text} {said}. The rule: {rule}."
    return Finding(
        level, title, since_step(curves, recent > 0), text, entry.advice, entry.metric, entry.guide
    )


def since_step(curves: Curves, holds: np.ndarray) -> int:
    """Return the number of the step from which `holds` [n] is True to the end."""
    # argmin finds the last False; one is appended for a condition that has always held
    return curves.steps[len(holds) - int(np.argmin(np.append(holds[::-1], False)))]
