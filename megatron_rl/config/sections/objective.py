"""[batch], [advantage], [replay], [loss]: what a step maximises, and on which tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Annotated, Literal

from pydantic import Field, field_validator

from megatron_rl.config import loss_presets as presets
from megatron_rl.config import loss_rules
from megatron_rl.config.base import (
    AboveZero,
    Bound,
    Count,
    Finite,
    NotNegative,
    Positive,
    Section,
    Share,
    nearest,
)
from megatron_rl.config.loss_presets import PRESETS, SUPERVISED, AdvantageKind, LossSwitches


class BatchConfig(Section):
    """Choice of responses that a step trains on (DAPO, arXiv 2503.14476); all off by default."""

    dynamic_sampling: bool = False
    """Replace groups whose responses all get the same reward by newly sampled ones."""
    max_sampling_rounds: Positive = 4
    """dynamic_sampling: draws after the first; groups still missing then are filled with groups of
    equal rewards."""
    overlong_cache: Count = 0
    """Overlong shaping: within this many tokens of rollout.max_response_tokens the reward falls, by
    up to 1; 0 = off."""
    length_penalty: NotNegative = 0.0
    """Length shaping: subtracted from the reward, times length / rollout.max_response_tokens; 0 =
    off."""
    filter_truncated: bool = False
    """Overlong filtering: responses that reached the length limit leave the loss and its
    denominators."""


class AdvantageConfig(Section):
    """Advantages from rewards."""

    kind: Literal["auto"] | AdvantageKind = "auto"
    """auto: that of the loss preset (minirl: mean).  Formulas: batch/advantage.py."""
    rewards: dict[str, Finite] = Field(default_factory=dict)
    """kind = per_reward (GDPO): weight of each reward, by the name of a metric that reward.function
    returns."""
    weight: NotNegative = 1.0
    """Factor of the advantages from rewards, beside the terms of teachers; 0: rewards are measured
    only (docs/guides/distillation.md)."""

    @field_validator("kind", mode="before")
    @classmethod
    def check_kind(cls, value: object) -> object:
        if value == "remax":
            raise ValueError(
                "is not supported: its baseline is the reward of a greedy response to the prompt, "
                "one more to be sampled that is not trained on "
                "(docs/concepts/formulation.md#one-kernel); set kind = leave_one_out, whose "
                "baseline is the mean reward of the prompt's other responses"
            )
        return value

    def problems(self) -> Iterator[str]:
        if self.kind == "per_reward" and len(self.rewards) < 2:
            yield (
                "kind = per_reward needs rewards with at least 2 names, got "
                f"{list(self.rewards)}: write rewards = {{ correct = 1.0, format = 0.5 }}, names "
                "of metrics that reward.function returns; or set kind = std, which is for one "
                "reward"
            )
        if self.rewards and not any(self.rewards.values()):
            yield (
                f"rewards = {self.rewards}: every weight is 0, so every advantage would be 0; set "
                "one of them to another number"
            )
        if self.rewards and self.kind != "per_reward":
            yield (
                f"rewards has no effect with kind = {self.kind}: set kind = per_reward, or remove "
                "it"
            )


class ReplayConfig(Section):
    """Routing replay: which experts training uses."""

    mode: Literal["none", "R2", "R3"] = "R3"
    """Source of the experts: none = the live router; R2 = the old-logprob pass; R3 = the
    rollout."""
    measure: bool = True
    """Compare the live top-k with the rollout's experts in the old-logprob pass (needs routes from
    the server)."""
    on_missing_route: Literal["error", "live", "mask_token", "drop_sample"] = "error"
    """Treatment of a token for which the server sent no route: stop the run; live = the router
    chooses; mask_token = live, and the token it predicts leaves the loss; drop_sample = sample
    again."""
    missing_route_budget: Share = 0.01
    """Largest share of a step's response tokens (separately: of its prompt tokens) without a
    route, or of samples dropped for that; above it the run stops."""


class LossConfig(Section):
    """The policy loss: a preset, and overrides of its switches (docs/concepts/formulation.md)."""

    name: str = "minirl"
    """A preset, or `package.module:function` (docs/guides/algorithms.md)."""
    # the switches, with the preset's value where None: their texts are in LossSwitches
    weight: presets.Ratio | None = None
    weight_level: presets.Level | None = None
    weight_mode: presets.WeightMode | None = None
    weight_low: Bound | None = None
    weight_high: Annotated[float, Field(gt=0)] | None = None
    """minirl: 5, the upper truncation of the importance weight pi/mu; inf = no truncation."""
    # tokens and responses that are left out
    mask: presets.Ratio | None = None
    mask_kind: presets.MaskKind | None = None
    mask_low: Bound | None = None
    mask_high: Bound | None = None
    clip: presets.ClipKind | None = None
    clip_anchor: presets.ClipAnchor | None = None
    clip_level: presets.Level | None = None
    clip_low: Bound | None = None
    clip_high: Bound | None = None
    router_shift: bool | None = None
    shift_floor: Share | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    reject: presets.Ratio | None = None
    reject_level: presets.RejectLevel | None = None
    reject_low: Bound | None = None
    reject_high: Bound | None = None
    reject_only: presets.RejectOnly | None = None
    veto: presets.Ratio | None = None
    veto_low: Bound | None = None
    veto_high: Bound | None = None
    # the objective of a token
    form: presets.Form | None = None
    form_level: presets.FormLevel | None = None
    tau_positive: AboveZero | None = None
    tau_negative: AboveZero | None = None
    delta: AboveZero | None = None
    # terms that a token adds
    penalty: presets.Penalty | None = None
    penalty_coef: NotNegative | None = None
    penalty_dead_zone: NotNegative | None = None
    select: presets.Select | None = None
    select_share: Annotated[float, Field(gt=0, le=1)] | None = None
    cov_low: float | None = None
    cov_high: float | None = None
    # sum over tokens
    aggregation: presets.Aggregation | None = None
    scale: AboveZero = 1.0
    """Constant factor on the loss, e.g. 1 / max_response_tokens; never data-dependent."""
    # terms beside the policy loss
    entropy_coef: Finite = 0.0
    """Bonus on the full-vocabulary entropy, per token; 0 = off."""
    kl_coef: NotNegative = 0.0
    """Penalty on the KL to the model as loaded, per token; 0 = off.  Costs one more forward pass
    per mini-batch."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL of kl_coef (docs/concepts/formulation.md#optional-terms)."""
    kl_weight: Literal["none", "staleness", "total"] = "none"
    """Multiplies the KL of kl_coef by a ratio, with gradient: staleness = pi/pi_old, total =
    pi/mu.  Unbiased off policy."""

    # terms of teachers ([teachers.NAME])
    teacher_form: Literal["token", "reverse", "forward"] = "token"
    """Term of a teacher: token = of the sampled token, in its advantage; reverse, forward = KL
    over its teacher_top_k most probable tokens, in the loss (docs/guides/distillation.md)."""
    teacher_top_k: Count = 0
    """Tokens that a teacher names in every place, with teacher_form = reverse or forward."""

    @property
    def switches(self) -> LossSwitches:
        """The preset's switches, replaced by those that are set here."""
        names = {field.name for field in fields(LossSwitches)}
        is_set = self.model_dump(include=names, exclude_none=True)
        return replace({**PRESETS, **SUPERVISED}.get(self.name, LossSwitches()), **is_set)

    @property
    def corrects_age(self) -> bool:
        """True if a ratio to mu, which may be older than pi_old, weights a token's gradient.

        A custom loss is trusted.
        """
        switches = self.switches
        return (
            ":" in self.name
            or switches.weight in ("total", "train_infer")
            or (switches.form != "logp" and switches.clip_anchor == "rollout")
        )

    def problems(self) -> Iterator[str]:
        if ":" in self.name:  # a custom loss may read any switch
            return
        # str, not Literal: package.module:function is a name too
        if self.name not in {**PRESETS, **SUPERVISED}:
            hint = nearest(self.name, PRESETS)
            yield f"name = {self.name!r} is not a known loss{hint}; or package.module:function"
        is_set = {key for key, value in self if value is not None}
        yield from loss_rules.problems(self.name, self.switches, is_set)
