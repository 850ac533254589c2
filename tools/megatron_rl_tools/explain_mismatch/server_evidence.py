"""Evidence from what a server reports: its config.json and the checksums of its tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl_tools.explain_mismatch.evidence import Evidence
from megatron_rl_tools.explain_mismatch.server_side import ServerFacts
from megatron_rl_tools.explain_mismatch.weights import Comparison

SAME_CONFIG = (
    "rope_theta", "rope_parameters", "rope_scaling", "rms_norm_eps", "norm_topk_prob",
    "routed_scaling_factor",
    "num_experts_per_tok", "n_group", "topk_group", "topk_method", "scoring_func",
    "tie_word_embeddings", "head_dim",
    "partial_rotary_factor", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "attention_bias", "use_qk_norm",
    "n_shared_experts", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step",
    "sliding_window",
)  # fmt: skip
"""Keys of config.json that change what is computed."""


def config_evidence(path: Path, facts: ServerFacts) -> Evidence:
    """Keys of config.json that change what is computed and differ; nothing where the server's
    cannot be read here.
    """
    found = Evidence()
    if not facts.config:
        return found
    ours = load_hf_config(path)
    ours = ours.get("text_config", ours)
    differ = [key for key in SAME_CONFIG if ours.get(key) != facts.config.get(key)]
    try:  # a newer config.json may say the same in other keys
        if make_spec(ours) == make_spec(dict(facts.config)):
            differ = []
    except ValueError:
        pass
    found.add("config", differ=float(len(differ)))
    if differ:
        text = "; ".join(
            f"{key} = {facts.config.get(key)} on the server, {ours.get(key)} in the trainer's"
            for key in differ
        )
        found.add("config", text=text, first=differ[0])
    return found


def weight_evidence(found: Comparison) -> Evidence:
    """Counts by kind of change, and the names as text."""
    evidence = Evidence()
    evidence.add(
        "weights", compared=float(found.compared), kept_dtypes=", ".join(found.dtypes) or "none"
    )
    if not found.compared:
        return evidence
    changes = found.changes

    def count(*words: str, only: str = "") -> float:
        return float(
            sum(
                any(word in change for word in words) and only in name
                for name, change in changes.items()
            )
        )

    shown = [
        f"{name}: {changes.get(name, 'other values')}"
        for name in sorted(found.wrong, key=lambda each: each not in changes)
    ]
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    evidence.add(
        "weights",
        wrong=float(len(found.wrong)),
        share=len(found.wrong) / found.compared,
        names="; ".join(shown[:5]) + more,
    )
    evidence.add(
        "weights", bias_zero=count("zeros", only="e_score_correction_bias"), quantised=count("fp8"),
        router_rounded=count("rounded to bfloat16", "rounded to float16", only=".gate."),
        swapped=count("swapped", "rolled"),
        moved=count("holds "), is_loaded=float(found.is_loaded),
    )  # fmt: skip
    evidence.add("weights", unnamed=float(found.unnamed))
    named = sum(
        evidence.number(f"weights.{kind}") or 0.0
        for kind in ("bias_zero", "quantised", "router_rounded", "swapped", "moved")
    )
    evidence.add("weights", changed=float(len(changes)) - named)
    if found.relative:
        evidence.add("weights", relative=float(np.median(list(found.relative.values()))))
    return evidence
