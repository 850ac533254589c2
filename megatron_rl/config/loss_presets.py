"""Every policy loss as switches of one kernel: data only.

The kernel is megatron_rl/loss, the formulas are in docs/concepts/formulation.md.

Ratios of a response token: total = pi/mu, train_infer = pi_old/mu, staleness = pi/pi_old.
Levels: token = the token's own ratio; product = that of its whole response, prod_t;
geometric = exp(mean_t log).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, expm1, inf
from typing import Literal

AdvantageKind = Literal[
    "mean", "std", "leave_one_out", "length_weighted", "rescaled_mean", "batch_whitened",
    "centred_batch_whitened", "per_reward", "reward",
]  # fmt: skip
Ratio = Literal["none", "total", "train_infer", "staleness"]
Level = Literal["token", "product", "geometric"]
RejectLevel = Literal[
    "product", "geometric", "mean_shift", "mean_tv", "mean_kl", "mean_k2", "mean_k3",
]  # fmt: skip
RejectOnly = Literal["all", "negative", "diverging"]
WeightMode = Literal["none", "truncate", "clip", "mask"]
MaskKind = Literal["ratio", "kl"]
ClipKind = Literal["none", "ratio", "tv", "kl"]
ClipAnchor = Literal["old", "rollout"]
Form = Literal["logp", "ratio", "sigmoid", "quadratic"]
FormLevel = Literal["token", "geometric"]
Penalty = Literal["none", "square", "abs"]
Select = Literal["none", "cov_band", "cov_top"]
Aggregation = Literal["sequence_sum", "sequence_mean", "kept_mean", "token_mean"]


@dataclass(frozen=True)
class LossSwitches:
    """The loss of one token is  -keep_i * W_t * A * f_t .

    `aggregation` sums it with global denominators.  A switch without a text is explained by the
    first one above whose name begins with the same word: clip_low by clip.
    """

    advantage: AdvantageKind = "mean"
    """Kind of A, used where advantage.kind = "auto\""""
    weight: Ratio = "none"
    """W_t = sg[bounded(x_t)], x_t this ratio at weight_level; none: W_t = 1"""
    weight_level: Level = "token"
    weight_mode: WeightMode = "none"
    """Bounds of W_t.  none: x; truncate: min(x, weight_high); clip: to [weight_low, weight_high];
    mask: x inside [weight_low, weight_high], else 0"""
    weight_low: float = 0.0
    weight_high: float = inf
    mask: Ratio = "none"
    """Drops single tokens (W_t = 0) by the two policies of this ratio"""
    mask_kind: MaskKind = "ratio"
    """ratio: the token's own ratio is outside [mask_low, mask_high]; kl: the divergence of "this
    token or another" between the two policies, in either direction, exceeds mask_high"""
    mask_low: float = 0.0
    mask_high: float = inf
    clip: ClipKind = "none"
    """Rule that drops a token (M_t = 0), q_t the ratio against clip_anchor
    (old: pi/pi_old, rollout: pi/mu) at clip_level
    ratio: A > 0 and q > 1 + clip_high, or A < 0 and q < 1 - clip_low (both strict)
    tv, kl: the divergence D of "this token or another" between anchor and pi exceeds the bound:
    A > 0, q > 1 and D > clip_high, or A < 0, q < 1 and D > clip_low"""
    clip_anchor: ClipAnchor = "old"
    clip_level: Level = "token"
    clip_low: float = inf
    clip_high: float = inf
    router_shift: bool = False
    """Multiply q_t first by gamma_t = sg[max(exp(-shift_t), shift_floor)], shift_t how far the
    router's probabilities moved since the old pass (replay/router_shift.py); one more forward pass
    per mini-batch"""
    shift_floor: float = 0.0
    """With router_shift, the least gamma_t"""
    dual_clip: float = inf
    """With form = ratio, a token with A < 0 and q > dual_clip counts as dual_clip * A and has no
    gradient"""
    reject: Ratio = "none"
    """Drops whole responses (keep_i = 0) whose ratio at reject_level is outside
    [reject_low, reject_high];
    reject_level: product, geometric, or the mean over tokens of |x - 1| (mean_shift), of the binary
    divergence (mean_tv, mean_kl), of log(x)^2 / 2 (mean_k2) or of x - 1 - log x (mean_k3);
    reject_only: all its tokens; negative: where A < 0; diverging: where A > 0 and x_t > 1, or A < 0
    and x_t < 1"""
    reject_level: RejectLevel = "geometric"
    reject_low: float = 0.0
    reject_high: float = inf
    reject_only: RejectOnly = "all"
    veto: Ratio = "none"
    """Drops whole responses that have a token whose own ratio is outside [veto_low, veto_high]"""
    veto_low: float = 0.0
    veto_high: float = inf
    form: Form = "logp"
    """The factor f_t.  logp: M_t log pi_t; ratio: q_t, held at its bound where M_t = 0 (PPO's min);
    sigmoid: 4/tau sigmoid(tau (q_t - 1)), no clip;
    quadratic: q_t - sign(A) p_t (q_t - 1)^2 / (2 delta), p_t the anchor's probability, no clip"""
    form_level: FormLevel = "token"
    """With form = ratio, token: q_t; geometric: its geometric mean over the response, each token
    held at its own bound"""
    tau_positive: float = 1.0
    """With form = sigmoid, tau_positive where A > 0, else tau_negative"""
    tau_negative: float = 1.0
    delta: float = 1.0
    """With form = quadratic, the shift |pi - anchor| at which the gradient changes its sign"""
    penalty: Penalty = "none"
    """Adds penalty_coef * log(q)^2 (square) or |log q| (abs) to the loss of every token, whatever
    dropped it, with the token's own q"""
    penalty_coef: float = 0.0
    penalty_dead_zone: float = 0.01
    """With penalty = abs, 0 where |log q| is at most this, by default 0.01.  In the first update of
    a step log q is the rounding of two passes, and the slope of |log q| would be its sign"""
    select: Select = "none"
    """Choice of select_share of the mini-batch's tokens, by
    cov_t = (A_t - mean A)(log pi_old_t - mean log pi_old):
    cov_band: drops (W_t = 0) that many, drawn from those with cov_low < cov < cov_high;
    cov_top: the penalty applies to those with the largest cov only"""
    select_share: float = 2e-4
    cov_low: float = -inf
    """With select = cov_band, the band of covariances"""
    cov_high: float = inf
    aggregation: Aggregation = "sequence_sum"
    """Sum over tokens and responses: see megatron_rl/loss/aggregate.py"""


MINIRL = LossSwitches(
    weight="total", weight_mode="truncate", weight_high=5.0,
    clip="ratio", clip_low=0.2, clip_high=0.27,
)  # fmt: skip
PPO = LossSwitches(form="ratio", clip="ratio", clip_low=0.2, clip_high=0.2)
GRPO = replace(PPO, advantage="std", aggregation="sequence_mean")
DAPO = replace(PPO, advantage="std", aggregation="token_mean", clip_high=0.28)
UNCLIPPED = LossSwitches(advantage="std", form="ratio", aggregation="token_mean")
REINFORCE = LossSwitches()
TIS = replace(DAPO, weight="train_infer", weight_mode="truncate", weight_high=2.0)
DPPO = replace(
    MINIRL, weight_high=20.0, clip="tv", clip_anchor="rollout", clip_low=0.15, clip_high=0.15
)
FREE_DPPO = replace(DPPO, weight_mode="none", weight_high=inf)  # without truncation
GMPO = replace(GRPO, form_level="geometric", clip_low=-expm1(-0.4), clip_high=expm1(0.4))

PRESETS: dict[str, LossSwitches] = {
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
    "cispo": LossSwitches(
        advantage="std", weight="staleness", weight_mode="clip", weight_low=0.8, weight_high=1.27,
        aggregation="token_mean",
    ),
    "decoupled_ppo": replace(PPO, weight="train_infer"),
    "tis": TIS,
    "icepop": replace(
        GRPO, weight="train_infer", weight_mode="mask", weight_low=0.5, weight_high=5.0,
        aggregation="kept_mean",
    ),
    "kpop": replace(GRPO, mask="train_infer", mask_kind="kl", mask_high=2.0),
    "dis": LossSwitches(
        weight="total", weight_mode="mask", weight_low=0.8, weight_high=1.28,
        aggregation="token_mean",
    ),
    "seq_mis": replace(
        DAPO, weight="train_infer", weight_level="product", weight_mode="mask", weight_high=2.0,
    ),
    "geo_rs": replace(DAPO, reject="train_infer", reject_low=0.999, reject_high=1.001),
    "opsm": replace(GRPO, reject="total", reject_low=exp(-0.5), reject_only="negative"),
    "dppo": DPPO,
    "dppo_tau": replace(
        FREE_DPPO, clip_low=0.2, clip_high=0.2, penalty="square", penalty_coef=1e-3,
        aggregation="token_mean",
    ),
    "drpo": LossSwitches(form="quadratic", clip_anchor="rollout", delta=12.5),
    "vaco": replace(
        TIS, reject="train_infer", reject_level="mean_shift", reject_high=0.2,
        reject_only="diverging",
    ),
    "sapo": LossSwitches(
        advantage="std", form="sigmoid", tau_positive=1.0, tau_negative=1.05,
        aggregation="sequence_mean",
    ),
    "gmpo": GMPO,
    "rspo": replace(GMPO, router_shift=True, shift_floor=0.8),
    "clip_cov": replace(
        DAPO, clip_low=1.0, clip_high=1.0, select="cov_band", cov_low=1.0, cov_high=5.0,
    ),
    "kl_cov": replace(
        UNCLIPPED, select="cov_top", select_share=2e-3, penalty="abs", penalty_coef=1.0,
    ),
    "gpg": replace(REINFORCE, advantage="rescaled_mean", aggregation="token_mean"),
    "opo": replace(REINFORCE, advantage="length_weighted"),
}  # fmt: skip

SFT = "sft"
"""loss.name of supervised training (megatron_rl/sft.py): the mean of -log pi over learned tokens,
which is REINFORCE with a reward of 1 for every row.
"""
SUPERVISED: dict[str, LossSwitches] = {
    SFT: LossSwitches(advantage="reward", aggregation="token_mean")
}
