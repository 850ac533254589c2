"""Every policy loss as switches of one kernel.  Data only: the kernel is megatron_rl/loss, the formulas are in
docs/concepts/formulation.md.

Ratios of a response token: total = pi/mu, train_infer = pi_old/mu, staleness = pi/pi_old.
Levels: token = the token's own ratio; product = that of its whole response, prod_t; geometric = exp(mean_t log).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

AdvantageKind = Literal["mean", "std", "leave_one_out", "batch_whitened", "centred_batch_whitened"]
Ratio = Literal["none", "total", "train_infer", "staleness"]
Level = Literal["token", "product", "geometric"]
SequenceLevel = Literal["product", "geometric"]
WeightMode = Literal["none", "truncate", "clip", "mask"]
ClipKind = Literal["none", "ratio", "tv", "kl"]
ClipAnchor = Literal["old", "rollout"]
Form = Literal["logp", "ratio"]
Aggregation = Literal["sequence_sum", "sequence_mean", "kept_mean", "token_mean"]


@dataclass(frozen=True)
class LossSpec:
    """The loss of one token is  -keep_i * W_t * A * f_t ; `aggregation` sums it with global denominators.

    advantage       kind of A, used where advantage.kind = "auto"
    weight          W_t = sg[bounded(x_t)], x_t this ratio at weight_level; none: W_t = 1
    weight_mode     none: x;  truncate: min(x, weight_high);  clip: to [weight_low, weight_high];
                    mask: x inside [weight_low, weight_high], else 0
    clip            what drops a token (M_t = 0), q_t the ratio against clip_anchor (old: pi/pi_old, rollout: pi/mu) at clip_level
                    ratio: A > 0 and q > 1 + clip_high, or A < 0 and q < 1 - clip_low (both strict)
                    tv, kl: the divergence D of "this token or another" between anchor and pi exceeds the bound:
                    A > 0, q > 1 and D > clip_high, or A < 0, q < 1 and D > clip_low
    dual_clip       form = ratio: a token with A < 0 and q > dual_clip counts as dual_clip * A and has no gradient
    reject          drops whole responses (keep_i = 0) whose ratio at reject_level is outside [reject_low, reject_high];
                    reject_negative_only: only those with A < 0
    form            logp: f_t = M_t log pi_t;  ratio: f_t = q_t, held at its bound where M_t = 0 (PPO's min)
    aggregation     see megatron_rl/loss/aggregate.py
    """

    advantage: AdvantageKind = "mean"
    weight: Ratio = "none"
    weight_level: Level = "token"
    weight_mode: WeightMode = "none"
    weight_low: float = 0.0
    weight_high: float = inf
    clip: ClipKind = "none"
    clip_anchor: ClipAnchor = "old"
    clip_level: Level = "token"
    clip_low: float = inf
    clip_high: float = inf
    dual_clip: float = inf
    reject: Ratio = "none"
    reject_level: SequenceLevel = "geometric"
    reject_low: float = 0.0
    reject_high: float = inf
    reject_negative_only: bool = False
    form: Form = "logp"
    aggregation: Aggregation = "sequence_sum"


MINIRL = LossSpec("mean", "total", weight_mode="truncate", weight_high=5.0, clip="ratio", clip_low=0.2, clip_high=0.27)
PPO = LossSpec(form="ratio", clip="ratio", clip_low=0.2, clip_high=0.2)
GRPO = replace(PPO, advantage="std", aggregation="sequence_mean")
DAPO = replace(PPO, advantage="std", aggregation="token_mean", clip_high=0.28)
REINFORCE = LossSpec()

PRESETS: dict[str, LossSpec] = {
    "minirl": MINIRL,  # arXiv 2512.01374, Eq. 7
    "minirl_no_is": replace(MINIRL, weight="staleness"),  # the ablations of that paper
    "minirl_length_norm": replace(MINIRL, aggregation="sequence_mean"),
    "minirl_no_clip": replace(MINIRL, clip="none", clip_low=inf, clip_high=inf),
    "reinforce": REINFORCE,
    "rloo": replace(REINFORCE, advantage="leave_one_out"),
    "reinforce_pp": replace(PPO, advantage="batch_whitened", aggregation="token_mean"),
    "grpo": GRPO,
    "dapo": DAPO,
    "dr_grpo": PPO,  # GRPO without its division by std and by length
    "gspo": replace(GRPO, clip_level="geometric", clip_low=3e-4, clip_high=4e-4),
    "cispo": LossSpec("std", "staleness", weight_mode="clip", weight_low=0.8, weight_high=1.27, aggregation="token_mean"),
    "decoupled_ppo": replace(PPO, weight="train_infer"),
    "tis": replace(DAPO, weight="train_infer", weight_mode="truncate", weight_high=2.0),
    "icepop": replace(GRPO, weight="train_infer", weight_mode="mask", weight_low=0.5, weight_high=5.0, aggregation="kept_mean"),
    "seq_mis": replace(DAPO, weight="train_infer", weight_level="product", weight_mode="mask", weight_high=2.0),
    "geo_rs": replace(DAPO, reject="train_infer", reject_low=0.999, reject_high=1.001),
    "opsm": replace(GRPO, reject="staleness", reject_low=0.9999, reject_negative_only=True),
    "dppo": replace(MINIRL, clip="tv", clip_anchor="rollout", clip_low=0.15, clip_high=0.15),
}  # fmt: skip


def check(name: str, s: LossSpec, given: set[str]) -> None:
    """Raise ValueError for switches of the loss `name` that contradict each other, or a `given` one that another turns off."""
    for key, has_effect, needs in rules(s):
        if key in given and not has_effect:
            raise ValueError(f"loss.{key} = {getattr(s, key)} has no effect with loss.name = {name}: set {needs}")
    for low, high in (("weight_low", "weight_high"), ("reject_low", "reject_high")):
        if getattr(s, low) > getattr(s, high):
            raise ValueError(f"loss.{low} = {getattr(s, low)} must not exceed loss.{high} = {getattr(s, high)}")
    # a divergence has a bound of its own, not one of the ratio
    if s.clip in ("tv", "kl") and (s.form == "ratio" or s.clip_level != "token"):
        raise ValueError(
            f"loss.clip = {s.clip} is defined for single tokens and has no bound to clip a ratio to: set loss.form = logp and "
            "loss.clip_level = token"
        )
    if s.reject != "none" and (s.reject_low, s.reject_high) == (0.0, inf):
        raise ValueError(
            f"loss.reject = {s.reject} with loss.name = {name} rejects nothing: set loss.reject_low or loss.reject_high"
        )
    if s.clip != "none" and inf in (s.clip_low, s.clip_high):
        raise ValueError(f"loss.clip = {s.clip} with loss.name = {name} needs loss.clip_low and loss.clip_high")


def rules(s: LossSpec) -> list[tuple[str, bool, str]]:
    """(key, whether setting it has an effect, what must be set for that)."""
    weighs, clips, rejects = s.weight != "none", s.clip != "none", s.reject != "none"
    bounded = weighs and s.weight_mode != "none"
    return [
        ("weight_level", weighs, "loss.weight"),
        ("weight_mode", weighs or s.weight_mode == "none", "loss.weight"),
        ("weight_low", bounded and s.weight_mode != "truncate", "loss.weight, and loss.weight_mode = clip or mask"),
        ("weight_high", bounded, "loss.weight and loss.weight_mode"),
        ("clip_anchor", clips or s.form == "ratio", "loss.clip"),
        ("clip_level", clips or s.form == "ratio", "loss.clip"),
        ("clip_low", clips, "loss.clip"),
        ("clip_high", clips, "loss.clip"),
        ("dual_clip", s.clip == "ratio" and s.form == "ratio", "loss.clip = ratio and loss.form = ratio"),
        ("reject_level", rejects, "loss.reject"),
        ("reject_low", rejects, "loss.reject"),
        ("reject_high", rejects, "loss.reject"),
        ("reject_negative_only", rejects, "loss.reject"),
    ]
