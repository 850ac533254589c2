"""Evidence from a server: its config.json, the checksums of its tensors, and the same tokens in one
forward.

Shapes: S tokens of a sequence, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.records import Rollout
from megatron_rl_tools.explain_mismatch.evidence import (
    NO_ROUTE,
    Evidence,
    difference,
    kl,
    overlap,
    served_routes,
)
from megatron_rl_tools.explain_mismatch.server_side import Fresh, ServerFacts
from megatron_rl_tools.explain_mismatch.trainer_side import Half, logprobs
from megatron_rl_tools.explain_mismatch.weights import Comparison

SAME_CONFIG = (
    "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor",
    "rms_norm_eps", "hidden_act", "tie_word_embeddings",
    "norm_topk_prob", "routed_scaling_factor", "num_experts_per_tok", "n_group", "topk_group",
    "topk_method", "scoring_func", "n_shared_experts", "first_k_dense_replace",
    "mlp_only_layers", "decoder_sparse_step",
    "head_dim", "num_attention_heads", "num_key_value_heads", "attention_bias", "use_qk_norm",
    "sliding_window",
)  # fmt: skip
"""Keys of config.json that change what is computed."""


def config_evidence(path: Path, facts: ServerFacts) -> Evidence:
    """Compare the keys of config.json that change what is computed.

    The result is empty if the server's config.json cannot be read here.
    """
    evidence = Evidence()
    if not facts.config:
        return evidence
    ours = load_hf_config(path)
    ours = ours.get("text_config", ours)
    differ = [key for key in SAME_CONFIG if ours.get(key) != facts.config.get(key)]
    try:  # a newer config.json may say the same in other keys
        if make_spec(ours) == make_spec(dict(facts.config)):
            differ = []
    except ValueError:
        pass
    evidence.add("config", differ=float(len(differ)))
    if differ:
        text = "; ".join(
            f"{key} = {facts.config.get(key)} on the server, {ours.get(key)} in the trainer's"
            for key in differ
        )
        evidence.add("config", text=text, first=differ[0])
    return evidence


def fresh_evidence(
    rollouts: Sequence[Rollout],
    fresh: Sequence[Fresh],
    live: Sequence[Half],
    *,
    temperature: float,
    server_dtype: str,
) -> Evidence:
    """Compare the sampled tokens, whose prompts are partly from the prefix cache, with one forward
    over all of them.
    """
    evidence = Evidence()
    if temperature == 1.0:  # that of the forward's log-probs
        again = [forward.logprobs for forward in fresh]
        mu = [rollout.rollout_logprobs for rollout in rollouts]
        evidence.add("cache", logprob_diff=difference(mu, again))
        evidence.add("kl", fresh=kl(again, logprobs(live)))
    if server_dtype == "float32":  # rounding flips routes in other precisions
        evidence.add("cache", differ=cache_difference(rollouts, fresh))
    return evidence


def cache_difference(rollouts: Sequence[Rollout], fresh: Sequence[Fresh]) -> float | None:
    """Return the share of the prompts' experts that differ in one forward, of the rows that have a
    route in both; None if no row has.  Only the prompt's rows come from the cache.
    """
    parts = []
    for rollout, forward in zip(rollouts, fresh, strict=True):
        served, again = served_routes(rollout), forward.routes
        if served is None or again is None:
            continue
        rows = slice(rollout.prompt_length - 1)
        if forward.missing_routes is not None:
            served = np.where(forward.missing_routes[:, None, None], NO_ROUTE, served)
        if (served[rows] != NO_ROUTE).any():
            parts.append(1 - overlap(served[rows], again[rows].astype(np.int64)))
    return float(np.mean(parts)) if parts else None


def weight_evidence(comparison: Comparison) -> Evidence:
    """Count the changed tensors by kind of change, and list their names as text."""
    evidence = Evidence()
    evidence.add("weights", compared=float(comparison.compared))
    evidence.add("weights", kept_dtypes=", ".join(comparison.dtypes) or "none")
    if not comparison.compared:
        return evidence
    changes = comparison.changes

    def count(*words: str, only: str = "") -> float:
        matches = (
            any(word in change for word in words) and only in name
            for name, change in changes.items()
        )
        return float(sum(matches))

    shown = [
        f"{name}: {changes.get(name, 'other values')}"
        for name in sorted(comparison.wrong, key=lambda wrong: wrong not in changes)
    ]
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    evidence.add(
        "weights",
        wrong=float(len(comparison.wrong)),
        share=len(comparison.wrong) / comparison.compared,
        names="; ".join(shown[:5]) + more,
    )
    evidence.add(
        "weights",
        bias_zero=count("zeros", only="e_score_correction_bias"),
        quantised=count("fp8"),
        router_rounded=count("rounded to bfloat16", "rounded to float16", only=".gate."),
        swapped=count("swapped", "rolled"),
        moved=count("holds "),
        is_loaded=float(comparison.is_loaded),
    )
    evidence.add("weights", unnamed=float(comparison.unnamed))
    named = sum(
        evidence.number(f"weights.{kind}") or 0.0
        for kind in ("bias_zero", "quantised", "router_rounded", "swapped", "moved")
    )
    evidence.add("weights", changed=float(len(changes)) - named)
    if comparison.relative:
        evidence.add("weights", relative=float(np.median(list(comparison.relative.values()))))
    return evidence
