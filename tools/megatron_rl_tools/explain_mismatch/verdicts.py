"""The rules that turn evidence into a verdict, as data, and the functions that read them.

A condition is "NAME OPERATOR VALUE" or "NAME OPERATOR [FACTOR *] NAME".  It is false if a name was
not measured.  The verdict is made of the rules that hold at the first level that has any: proofs,
then what a trial removed, then symptoms.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl_tools.explain_mismatch.evidence import Evidence

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne,
}  # fmt: skip
Level = Literal[1, 2, 3]
PROOF: Level = 1
TRIAL: Level = 2
SYMPTOM: Level = 3


@dataclass(frozen=True)
class VerdictRule:
    """One cause of a mismatch.  {NAME} and {NAME:FORMAT} in its texts stand for evidence.

    The share of the KL that the cause explains is 1 - after / before.
    """

    name: str
    level: Level
    when: tuple[str, ...]
    """Conditions, all of which must hold."""
    text: str
    key: str
    """The setting to change."""
    value: str
    """Its new value, or what to do."""
    before: str = "kl.live"
    """Name of the KL with the cause."""
    after: str = ""
    """Name of the KL without the cause."""


@dataclass(frozen=True)
class Verdict:
    """A cause with its evidence, and what to change."""

    name: str
    cause: str
    share: float | None
    """Share of KL(mu, pi_old) that goes away without the cause, 0 to 1; None if not measured."""
    key: str
    value: str


MISMATCH = "diff.worst > limit.diff"
TRIED = "diff.base > limit.diff"
"""A trial counts only if more than rounding remains without it, with the server's routes if they
are right."""
GONE = 0.2
"""A trial that leaves less than this part of the difference has found the cause."""

NOT_FINITE: tuple[VerdictRule, ...] = (
    VerdictRule(
        "trainer_not_finite", PROOF, ("not_finite.trainer > 0",),
        "the trainer has {not_finite.trainer:.0f} of {not_finite.tokens:.0f} log-probs not finite",
        "model.path", "a checkpoint of finite tensors; with one, compare in float32",
    ),
    VerdictRule(
        "server_not_finite", PROOF, ("not_finite.server > 0",),
        "the server has {not_finite.server:.0f} of {not_finite.tokens:.0f} log-probs not finite",
        "rollout.dtype", "one that holds the model's values, and a checkpoint that is finite",
    ),
)  # fmt: skip

RULES: tuple[VerdictRule, ...] = (
    *NOT_FINITE,
    # the answer itself
    VerdictRule(
        "routes_shifted", PROOF, ("routes.row_shift != 0",),
        "the server's routes are those of other rows: row j has the experts of row j "
        "{routes.row_offset:+.0f}; shifted back {routes.row_shift_overlap:.1%} of the experts "
        "agree, as they are {routes.overlap:.1%}",
        "rollout.urls",
        "a server that returns row j for the forward of token j; look for what edits its answers",
        before="kl.replay", after="kl.routes_mended",
    ),
    VerdictRule(
        "routes_layers_shifted", PROOF, ("routes.layer_shift != 0", "routes.row_shift == 0"),
        "the server's routes are in another order of layers: rolled by {routes.layer_shift:.0f} "
        "layers {routes.layer_shift_overlap:.1%} of the experts agree, as they are "
        "{routes.overlap:.1%}",
        "rollout.urls", "a server version whose routes have the decoder's layers in order",
        before="kl.replay", after="kl.routes_mended",
    ),
    VerdictRule(
        "routes_of_another_request", PROOF, ("routes.foreign > 0",),
        "{routes.foreign:.0%} of the responses carry the routes of another response",
        "rollout.urls", "the servers' own addresses: what is between mixes up answers",
        before="kl.replay", after="kl.live",
    ),
    VerdictRule(
        "routes_wrong", PROOF,
        (
            "diff.live <= limit.diff", "diff.replay > limit.diff", "diff.replay > 2 * diff.live",
            "routes.row_shift == 0", "routes.layer_shift == 0", "routes.foreign == 0",
        ),
        "log-probs agree to {diff.live:.1e} nats as they are, and differ by {diff.replay:.1e} "
        "with the server's routes: what it returns are not the routes of the forward that "
        "sampled ({routes.overlap:.1%} of the experts agree)",
        "rollout.urls",
        "the servers' own addresses; look for what mixes up answers, and at unproven settings of "
        "the server",
        before="kl.replay", after="kl.live",
    ),
    VerdictRule(
        "logprobs_shifted", PROOF, ("logprobs.shift != 0", MISMATCH),
        "the server's log-probs are those of other tokens: entry i is that of token i "
        "{logprobs.offset:+.0f}; shifted back the mean difference is {logprobs.shift_diff:.1e}, "
        "as they are {diff.live:.1e}",
        "rollout.urls",
        "a server that returns each log-prob with its token; look for what edits its answers",
        after="kl.logprobs_shifted",
    ),
    VerdictRule(
        "stale_cache", PROOF, ("cache.differ > 0.01",),
        "the server's prefix cache is of other weights: computed again without it, "
        "{cache.differ:.1%} of what it returned for the same tokens differs",
        "/flush_cache",
        "call it after every change of weights (a weight sync of this project does)",
        after="kl.fresh",
    ),
    # weights
    VerdictRule(
        "bias_missing", PROOF, ("weights.bias_zero >= 1",),
        "the expert bias is zero on one side: {weights.names}",
        "model.path",
        "a checkpoint with e_score_correction_bias; look at the server's log for tensors that it "
        "skipped",
        after="kl.their_weights",
    ),
    VerdictRule(
        "router_rounded", PROOF, ("weights.router_rounded >= 1",),
        "the server's routers are rounded: {weights.names}",
        "rollout.quantize_keep",
        "the routers' names; if the server rounds them itself, its dtype option",
        after="kl.their_weights",
    ),
    VerdictRule(
        "quantised", PROOF, ("weights.quantised >= 1",),
        "the server holds quantised tensors: {weights.names}",
        "rollout.quantize", "fp8 where that is meant; else start the server without quantisation",
        after="kl.their_weights",
    ),
    VerdictRule(
        "experts_swapped", PROOF, ("weights.swapped >= 1",),
        "experts or parts of tensors are in another order on the server: {weights.names}",
        "model.path",
        "load the checkpoint again on the server; look for a converter that orders experts "
        "otherwise",
        after="kl.their_weights",
    ),
    VerdictRule(
        "tensor_moved", PROOF, ("weights.moved >= 1",),
        "a tensor of the server holds the values of another one: {weights.names}",
        "tie_word_embeddings",
        "equal on both sides; if another tensor moved, look at the converter's names",
        after="kl.their_weights",
    ),
    VerdictRule(
        "weights_changed", PROOF, ("weights.changed >= 1",),
        "tensors of the server are changed in a known way: {weights.names}",
        "model.path", "the same on the server: load it again",
        after="kl.their_weights",
    ),
    VerdictRule(
        "stale_weights", PROOF,
        ("weights.share > 0.5", "weights.unnamed > 0", "weights.relative < 0.3"),
        "the server holds another version of the same weights: {weights.wrong:.0f} of "
        "{weights.compared:.0f} tensors differ, by {weights.relative:.1%} of their size (weight "
        "version {server.weight_version})",
        "rollout.weight_sync",
        "let it reach this server: send the weights again, or start it on this checkpoint",
        after="kl.their_weights",
    ),
    VerdictRule(
        "other_checkpoint", PROOF,
        ("weights.share > 0.5", "weights.unnamed > 0", "weights.relative >= 0.3"),
        "the server holds another checkpoint: {weights.wrong:.0f} of {weights.compared:.0f} "
        "tensors differ, by {weights.relative:.0%} of their size",
        "model.path", "the checkpoint that the server was started with",
        after="kl.their_weights",
    ),
    VerdictRule(
        "other_weights", PROOF,
        ("weights.share > 0.5", "weights.unnamed > 0", "weights.is_loaded == 0"),
        "the server holds other weights: {weights.wrong:.0f} of {weights.compared:.0f} tensors "
        "differ; an earlier version, or another checkpoint (weight version "
        "{server.weight_version})",
        "model.path", "the checkpoint that the server has, or send the weights again",
    ),
    VerdictRule(
        "wrong_tensor", PROOF, ("weights.unnamed >= 1", "weights.share <= 0.5"),
        "{weights.wrong:.0f} of {weights.compared:.0f} tensors differ: {weights.names}",
        "model.path", "load these tensors again on the server; look for errors in its log",
        after="kl.their_weights",
    ),
    # settings
    VerdictRule(
        "config_differs", PROOF, ("config.differ >= 1",),
        "the server computes with another config.json: {config.text}",
        "{config.first}", "equal on both sides",
        after="kl.their_config",
    ),
    VerdictRule(
        "precision", PROOF,
        ("dtype.differ == 1", "diff.worst > limit.exact", "diff.worst <= limit.diff"),
        "rounding: the trainer computes in {dtype.trainer}, the server in {dtype.server}; "
        "transformers' own difference between the two is {floor.diff:.1e} nats, this pair's "
        "{diff.live:.1e}",
        "rollout.dtype",
        "{dtype.trainer}; model.dtype = {dtype.server} would leave {diff.same_precision:.1e} nats",
        after="kl.exact",
    ),
    # what a trial removed
    VerdictRule(
        "temperature", TRIAL, (TRIED, f"trial.temperature.diff < {GONE} * diff.base"),
        "the server's log-probs are of temperature {trial.temperature.value:.3g}, the trainer's "
        "of {sampling.temperature:.3g}",
        "rollout.temperature",
        "{trial.temperature.value:.3g}; or mend what changes the requests, or "
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
        after="trial.temperature.kl",
    ),
    VerdictRule(
        "rope_theta", TRIAL, (TRIED, f"trial.rope_theta.diff < {GONE} * diff.base"),
        "the server computes rotary embeddings with rope_theta = {trial.rope_theta.value:g}, the "
        "trainer with {model.rope_theta:g}",
        "rope_theta", "{trial.rope_theta.value:g} in the config.json that is wrong",
        after="trial.rope_theta.kl",
    ),
    VerdictRule(
        "norm_eps", TRIAL, (TRIED, f"trial.norm_eps.diff < {GONE} * diff.base"),
        "the server's norms have rms_norm_eps = {trial.norm_eps.value:g}, the trainer's "
        "{model.rms_eps:g}",
        "rms_norm_eps", "{trial.norm_eps.value:g} in the config.json that is wrong",
        after="trial.norm_eps.kl",
    ),
    VerdictRule(
        "gate_normalisation", TRIAL, (TRIED, f"trial.gate_normalisation.diff < {GONE} * diff.base"),
        "gate weights are normalised on one side only (norm_topk_prob)",
        "norm_topk_prob", "equal in both config.json",
        after="trial.gate_normalisation.kl",
    ),
    VerdictRule(
        "gate_factor", TRIAL, (TRIED, f"trial.gate_factor.diff < {GONE} * diff.base"),
        "the server's gate weights are scaled by {trial.gate_factor.value:.3g}, the trainer's by "
        "{model.scaling_factor:.3g}",
        "routed_scaling_factor", "{trial.gate_factor.value:.3g} in the config.json that is wrong",
        after="trial.gate_factor.kl",
    ),
    VerdictRule(
        "bias_not_used", TRIAL, ("trial.no_bias.overlap > 0.99", "routes.overlap < 0.95"),
        "the server selects experts without the expert bias: {trial.no_bias.overlap:.1%} of the "
        "experts agree without it, {routes.overlap:.1%} with it",
        "e_score_correction_bias", "load it on the server",
        after="trial.no_bias.kl",
    ),
    VerdictRule(
        "router_rounded_trial", TRIAL, (TRIED, f"trial.rounded_router.diff < {GONE} * diff.base"),
        "the server's routers compute with weights rounded to bfloat16",
        "rollout.quantize_keep", "the routers' names",
        after="trial.rounded_router.kl",
    ),
    VerdictRule(
        "trainer_engine", TRIAL,
        (MISMATCH, "referee.server <= limit.diff", "referee.trainer > limit.diff"),
        "the trainer does not compute its own checkpoint: transformers agrees with the server to "
        "{referee.server:.1e} nats, with the trainer to {referee.trainer:.1e}",
        "model.layer_spec", "local, and compare again; report it with the model's config.json",
    ),
    # symptoms
    VerdictRule(
        "output_head", SYMPTOM, (MISMATCH, "hidden.diff < 1e-3", "floor.diff == 0"),
        "the hidden states after the last norm agree to {hidden.diff:.1e}, the log-probs do not: "
        "the output head, or what is done with the logits",
        "tie_word_embeddings", "equal on both sides; compare lm_head.weight",
    ),
    VerdictRule(
        "nothing_in_common", SYMPTOM, (MISMATCH, "routes.overlap <= 1.1 * routes.others_overlap"),
        "the server's experts agree with the trainer's ({routes.overlap:.1%}) no more than with "
        "those of other responses ({routes.others_overlap:.1%}): another model, or answers to "
        "other requests",
        "model.path", "the checkpoint of the server; then compare again",
    ),
    VerdictRule(
        "after_the_routers", SYMPTOM,
        (MISMATCH, "flips.share == 0", "diff.worst > 100 * limit.diff"),
        "every router of every layer agrees, the log-probs differ by {diff.worst:.1e} nats: the "
        "experts of the last layer, the last norm, the output head, or what is done with the "
        "logits",
        "tie_word_embeddings",
        "equal on both sides; compare lm_head.weight and the sampling settings",
    ),
    VerdictRule(
        "only_routes", SYMPTOM, (MISMATCH, "diff.replay <= limit.diff", "flips.clear > 0"),
        "with the server's routes both engines agree ({diff.replay:.1e} nats): only the choice "
        "of experts differs, first in MoE layer {flips.first_layer:.0f}, by up to "
        "{flips.first_gap:.2g} where margins are {flips.first_margin:.2g}: router, or its bias. "
        "Half of the KL goes with the routes of the first {routes.half_layers:.0f} of "
        "{routes.layers:.0f} MoE layers",
        "replay.mode", "R3, and find the router tensor that differs",
        after="kl.replay",
    ),
    VerdictRule(
        "layer", SYMPTOM, (MISMATCH, "flips.first_layer >= 0"),
        "they part before the router of MoE layer {flips.first_layer:.0f}: below it no router "
        "disagrees clearly; there by up to {flips.first_gap:.2g} where margins are "
        "{flips.first_margin:.2g}. Suspects: that layer's attention and norms, its router, and "
        "the experts of the layer below. Unproven settings of the server: {server.unusual}",
        "model.path",
        "one checkpoint on both sides: compare the tensors of these modules, then leave out such "
        "settings",
        after="kl.replay",
    ),
    VerdictRule(
        "unexplained", SYMPTOM, (MISMATCH,),
        "log mu and log pi differ by {diff.live:.1e} nats (limit {limit.diff:.1e}), and nothing "
        "that was tried removes it. Unproven settings of the server: {server.unusual}",
        "rollout.server_args", "without these, one after the other; see docs/guides/mismatch.md",
    ),
)  # fmt: skip


def verdicts_of(evidence: Evidence, rules: Sequence[VerdictRule] = RULES) -> list[Verdict]:
    """Return the verdicts of the first level that has one, the largest share first; [] for a
    healthy pair.
    """
    for level in (PROOF, TRIAL, SYMPTOM):
        matches = [
            rule
            for rule in rules
            if rule.level == level and all(holds(condition, evidence) for condition in rule.when)
        ]
        if level == SYMPTOM:
            matches = matches[:1]  # from the narrowest to the widest
        if matches:
            verdicts = [
                Verdict(
                    rule.name,
                    fill_text(rule.text, evidence),
                    share(rule, evidence),
                    fill_text(rule.key, evidence),
                    fill_text(rule.value, evidence),
                )
                for rule in matches
            ]
            return sorted(verdicts, key=known_share, reverse=True)
    return []


def known_share(verdict: Verdict) -> float:
    """Return the share to sort by: verdicts without one come last."""
    return -1.0 if verdict.share is None else verdict.share


def holds(condition: str, evidence: Evidence) -> bool:
    name, sign, *right = condition.split()
    left = evidence.number(name)
    factor, reference = (float(right[0]), right[2]) if len(right) == 3 else (1.0, right[0])
    try:
        limit: float | None = float(reference)
    except ValueError:
        limit = evidence.number(reference)
    return left is not None and limit is not None and OPERATORS[sign](left, factor * limit)


def share(rule: VerdictRule, evidence: Evidence) -> float | None:
    before, after = evidence.number(rule.before), evidence.number(rule.after)
    if before is None or after is None or before <= 0:
        return None
    return min(1.0, max(0.0, 1 - after / before))


def fill_text(text: str, evidence: Evidence) -> str:
    """Fill in the values of {NAME} and {NAME:FORMAT}."""

    def value_of(match: re.Match[str]) -> str:
        value = evidence.get(match[1])
        if value is None:
            return "not measured"
        return value if isinstance(value, str) else format(value, match[2] or "g")

    return re.sub(r"\{([\w./]+):?([^}]*)\}", value_of, text)
