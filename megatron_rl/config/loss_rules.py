"""Rules between the switches of a loss."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from megatron_rl.config.loss_presets import LossSwitches

SOFT = ("sigmoid", "quadratic")


def problems(name: str, s: LossSwitches, is_set: set[str]) -> Iterator[str]:
    """Yield why switches of the loss `name` contradict each other, or have no effect though set."""
    for keys, has_effect, needs in effects(s):
        for key in keys.split():
            if key in is_set and not has_effect:
                value = f"{key} = {getattr(s, key)}"
                yield f"loss.{value} has no effect with loss.name = {name}: set {needs}"
    yield from bound_problems(name, s)
    yield from form_problems(name, s)
    yield from token_problems(name, s)


def form_problems(name: str, s: LossSwitches) -> Iterator[str]:
    """Yield what is wrong with the form of the objective and with the clip."""
    # any form but logp is a ratio with gradient: pi/pi_old, which lacks pi_old/mu, or all of pi/mu
    fitting = "train_infer" if s.clip_anchor == "old" else "none"
    if s.form != "logp" and s.weight not in ("none", fitting):
        yield (
            f"loss.weight = {s.weight} with loss.form = {s.form} counts a ratio twice, which "
            f"loss.clip_anchor = {s.clip_anchor} puts into that form: set loss.weight = {fitting}, "
            "or loss.form = logp"
        )
    # SAPO and DRPO replace the clip: beyond their bound the gradient fades or turns back, and a
    # clip would cut that off
    if s.form in SOFT and s.clip != "none":
        yield f"loss.form = {s.form} is a soft bound, which replaces the clip: set loss.clip = none"
    if s.form == "quadratic" and s.clip_level != "token":
        yield (
            "loss.form = quadratic bounds the probability of single tokens: set loss.clip_level = "
            "token"
        )
    # RSPO rescales the ratio that is clipped and differentiated, by the routers of pi and pi_old
    if s.router_shift and (s.form != "ratio" or s.clip_anchor != "old"):
        yield (
            "loss.router_shift = true rescales the ratio pi/pi_old of the objective: set loss.form "
            "= ratio and loss.clip_anchor = old"
        )
    # a divergence has a bound of its own, not one of the ratio
    if s.clip in ("tv", "kl") and (s.form == "ratio" or s.clip_level != "token"):
        yield (
            f"loss.clip = {s.clip} is defined for single tokens and has no bound to clip a ratio "
            "to: set loss.form = logp and loss.clip_level = token"
        )
    if s.form_level == "geometric" and s.clip_level != "token":
        yield (
            "loss.form_level = geometric takes the mean of ratios that were clipped token by "
            f"token; with loss.clip_level = {s.clip_level} they are those of the response already: "
            "set loss.clip_level = token, or loss.form_level = token"
        )
    if s.form_level == "geometric" and s.clip_low >= 1 and s.clip == "ratio":
        yield (
            f"loss.clip_low = {s.clip_low} with loss.form_level = geometric must be below 1: a "
            "ratio is never 0 or less"
        )
    if s.clip != "none" and inf in (s.clip_low, s.clip_high):
        yield f"loss.clip = {s.clip} with loss.name = {name} needs loss.clip_low and loss.clip_high"


def token_problems(name: str, s: LossSwitches) -> Iterator[str]:
    """Yield what is wrong with the choice of tokens for the mask, the penalty and the mean."""
    # n_i counts all sequences of a response, which may be in several micro-batches: it must be
    # known before the first of them
    masking_weight = s.weight if s.weight_mode == "mask" else "none"
    for key, ratio in (("mask", s.mask), ("weight", masking_weight)):
        if s.aggregation == "kept_mean" and ratio in ("total", "staleness"):
            yield (
                f"loss.{key} = {ratio} masks by pi, but loss.aggregation = kept_mean counts the "
                f"kept tokens before the update: set loss.{key} = train_infer, or loss.aggregation "
                "= sequence_mean"
            )
    if s.select == "cov_top" and s.penalty == "none":
        yield (
            "loss.select = cov_top says to which tokens the penalty applies: set loss.penalty and "
            "loss.penalty_coef"
        )
    if s.select == "cov_band" and not s.cov_low < s.cov_high:  # NaN neither
        yield (
            f"loss.cov_low = {s.cov_low} must be below loss.cov_high = {s.cov_high}: no token is "
            "in the band"
        )
    if s.select == "cov_band" and -inf == s.cov_low and s.cov_high == inf:
        yield "loss.select = cov_band needs loss.cov_low or loss.cov_high"
    if s.penalty != "none" and not s.penalty_coef:
        yield (
            f"loss.penalty = {s.penalty} with loss.name = {name} adds nothing: set "
            "loss.penalty_coef above 0"
        )


def bound_problems(name: str, s: LossSwitches) -> Iterator[str]:
    """Yield what is wrong with the bounds of the weight, the mask, the rejection and the veto."""
    for stage in ("weight", "mask", "reject", "veto"):
        low, high = getattr(s, f"{stage}_low"), getattr(s, f"{stage}_high")
        if low > high:
            yield f"loss.{stage}_low = {low} must not exceed loss.{stage}_high = {high}"
        if stage != "weight" and getattr(s, stage) != "none" and (low, high) == (0.0, inf):
            verb = {"mask": "masks", "reject": "rejects", "veto": "vetoes"}[stage]
            yield (
                f"loss.{stage} = {getattr(s, stage)} with loss.name = {name} {verb} nothing: set "
                f"loss.{stage}_low or loss.{stage}_high"
            )
    # a mean divergence is 0 where the two policies agree: a lower bound would drop those responses
    if s.reject != "none" and s.reject_level.startswith("mean_") and s.reject_low > 0:
        yield (
            f"loss.reject_low = {s.reject_low} with loss.reject_level = {s.reject_level} rejects "
            "the responses with the least divergence: set loss.reject_low = 0 and loss.reject_high"
        )


def effects(s: LossSwitches) -> list[tuple[str, bool, str]]:
    """Return (switches, whether setting them has an effect, what must be set for that)."""
    weighs, clips, punishes = s.weight != "none", s.clip != "none", s.penalty != "none"
    bounded = weighs and s.weight_mode != "none"
    has_bound = s.weight_high < inf or (s.weight_mode != "truncate" and s.weight_low > 0)
    return [
        ("weight_level", weighs, "loss.weight"),
        (
            "weight_mode", s.weight_mode == "none" or (weighs and has_bound),
            "loss.weight, and loss.weight_high or weight_low",
        ),
        (
            "weight_low", bounded and s.weight_mode != "truncate",
            "loss.weight, and loss.weight_mode = clip or mask",
        ),
        ("weight_high", bounded, "loss.weight and loss.weight_mode"),
        ("mask_kind mask_high", s.mask != "none", "loss.mask"),
        # a divergence is 0 where the two policies agree: it has no lower bound
        (
            "mask_low", s.mask != "none" and s.mask_kind == "ratio",
            "loss.mask and loss.mask_kind = ratio",
        ),
        ("clip_anchor", clips or punishes or s.form != "logp", "loss.clip"),
        ("clip_level", clips or s.form != "logp", "loss.clip"),
        ("clip_low clip_high", clips, "loss.clip"),
        (
            "dual_clip", s.clip == "ratio" and s.form == "ratio" and s.form_level == "token",
            "loss.clip = ratio, loss.form = ratio and loss.form_level = token",
        ),
        ("shift_floor", s.router_shift, "loss.router_shift = true"),
        ("reject_level reject_low reject_high reject_only", s.reject != "none", "loss.reject"),
        ("veto_low veto_high", s.veto != "none", "loss.veto"),
        ("form_level", s.form == "ratio", "loss.form = ratio"),
        ("tau_positive tau_negative", s.form == "sigmoid", "loss.form = sigmoid"),
        ("delta", s.form == "quadratic", "loss.form = quadratic"),
        ("penalty_coef", punishes, "loss.penalty"),
        ("penalty_dead_zone", s.penalty == "abs", "loss.penalty = abs"),
        ("select_share", s.select != "none", "loss.select"),
        ("cov_low cov_high", s.select == "cov_band", "loss.select = cov_band"),
    ]  # fmt: skip
