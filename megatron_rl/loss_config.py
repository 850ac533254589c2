"""Settings of the policy loss and of advantages.  Imports no torch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl import presets
from megatron_rl.presets import PRESETS, AdvantageKind, Switches
from megatron_rl.section import Bound, Section, nearest


class AdvantageConfig(Section):
    kind: Literal["auto"] | AdvantageKind = "auto"
    """auto: as the loss preset has it (minirl: mean).  Formulas: batch/advantage.py."""


class LossConfig(Section):
    """A preset and, where set, other positions of its switches.  Meaning: megatron_rl/presets.py, docs/algorithm.md."""

    name: str = "minirl"
    """A preset, or `package.module:function` (docs/algorithm.md, Your own loss)."""
    weight: presets.Ratio | None = None
    weight_level: presets.Level | None = None
    weight_mode: presets.WeightMode | None = None
    weight_low: Bound | None = None
    weight_high: Annotated[float, Field(gt=0)] | None = None
    """minirl: 5, the upper truncation of the importance weight pi/mu; inf = no truncation."""
    clip: presets.ClipKind | None = None
    clip_anchor: presets.ClipAnchor | None = None
    clip_level: presets.Level | None = None
    clip_low: Bound | None = None
    clip_high: Bound | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    reject: presets.Ratio | None = None
    reject_level: presets.SequenceLevel | None = None
    reject_low: Bound | None = None
    reject_high: Bound | None = None
    reject_negative_only: bool | None = None
    form: presets.Form | None = None
    aggregation: presets.Aggregation | None = None
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Constant factor on the loss, e.g. 1 / max_response_tokens; never data-dependent."""
    entropy_coef: float = 0.0
    """Bonus on the full-vocabulary entropy, per token; 0 = off."""
    kl_coef: Bound = 0.0
    """Penalty on the KL to the model as it was loaded, per token; 0 = off.  On: one more forward pass per mini-batch."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"

    @property
    def switches(self) -> Switches:
        """The preset's switches, with those set here."""
        given = {field.name: getattr(self, field.name, None) for field in fields(Switches)}
        return replace(PRESETS.get(self.name, Switches()), **{k: v for k, v in given.items() if v is not None})

    @model_validator(mode="after")
    def check_switches(self) -> LossConfig:
        if ":" in self.name:  # a user's function may read any switch
            return self
        if self.name not in PRESETS:
            raise ValueError(
                f"name = {self.name!r} is no loss{nearest(self.name, list(PRESETS))}; or package.module:function"
            )
        presets.check(self.name, self.switches, given={key for key, value in self if value is not None})
        return self
