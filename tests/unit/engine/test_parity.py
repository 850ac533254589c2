"""The parity check: its limits, results and messages; the comparison itself runs in tests/e2e."""

import math
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError, load_config
from megatron_rl.config.parity_limits import LIMITS, parity_limits
from megatron_rl.engine.parity import ParityError, ParityReport

RECIPES = Path(__file__).resolve().parents[3] / "examples/qwen3_30b_a3b"
SERVED = ("float32", "bfloat16", "float16", "fp8")


def config(trainer="bfloat16", **rollout):
    sections = {
        "model": {"path": "x", "dtype": trainer},
        "data": {"train": "x"},
        "rollout": rollout,
    }
    return load_config(None, [], sections)


def verdict(limits, mean, overlap):
    """ "fits", "warned" or "refused", and the message."""
    said = []
    try:
        ParityReport(mean, mean, overlap, overlap).check(limits, said.append)
    except ParityError as error:
        return "refused", str(error)
    return ("warned", said[0]) if said else ("fits", "")


@pytest.mark.parametrize(
    ("trainer", "served", "mean", "overlap", "expected"),
    [
        ("float32", "float32", 3e-7, None, "fits"),
        ("float32", "float32", 3e-7, 1.0, "fits"),
        ("float32", "float32", 5e-4, 1.0, "warned"),
        ("float32", "float32", 5e-3, 1.0, "refused"),  # what bfloat16 rounds to
        ("float32", "float32", 3e-7, 0.95, "refused"),
        ("bfloat16", "bfloat16", 4.7e-3, 0.998, "fits"),  # the demo's model
        ("bfloat16", "bfloat16", 4.7e-3, None, "fits"),
        ("bfloat16", "bfloat16", 0.2, 0.998, "warned"),
        ("bfloat16", "bfloat16", 0.36, 0.998, "refused"),  # temperature 0.7 instead of 1
        ("bfloat16", "bfloat16", 4.7e-3, 0.88, "refused"),
        ("float32", "bfloat16", 8e-3, 0.997, "fits"),
        ("bfloat16", "bfloat16", math.nan, 1.0, "refused"),  # not one finite log-prob
        ("float32", "float32", math.nan, None, "refused"),
    ],
)
def test_parity_limits(trainer, served, mean, overlap, expected):
    assert verdict(parity_limits(config(trainer), served), mean, overlap)[0] == expected


def test_every_pair_has_limits_that_warn_before_they_refuse():
    assert LIMITS.keys() == {
        (trainer, served) for trainer in ("float32", "bfloat16") for served in SERVED
    }
    for limits in LIMITS.values():
        assert 0 < limits.warn_logprob_diff < limits.max_logprob_diff
        assert 1 > limits.warn_expert_overlap > limits.min_expert_overlap > 0.5
    pair = parity_limits(config(quantize="fp8"), "bfloat16")
    assert (pair.trainer, pair.server) == ("bfloat16", "fp8")
    assert parity_limits(config(), "auto") == parity_limits(config(), "bfloat16"), (
        "a server that does not say its dtype"
    )


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_30b_recipes_may_differ_by_what_bf16_rounds_to(recipe):
    """Measured with bf16 on both sides (results/benchmarks.md): small models fit, an untrained one
    of 48 layers starts.
    """
    cfg = load_config(recipe, [])
    limits = parity_limits(cfg, cfg.rollout.dtype)
    assert (limits.trainer, limits.server) == ("bfloat16", "bfloat16")
    assert verdict(limits, 0.08, 0.98)[0] == "fits"
    assert verdict(limits, 0.23, 0.965)[0] == "warned"


def test_limits_can_be_set_and_errors_name_the_key_to_set():
    kind, text = verdict(parity_limits(config(), "bfloat16"), 0.4, 0.8)
    assert (
        kind == "refused"
        and "trainer bfloat16, server bfloat16" in text
        and "same checkpoint" in text
    )
    assert (
        "mean |log mu - log pi| = 4.00e-01 is above rollout.parity_max_logprob_diff = 0.3" in text
    )
    assert "expert overlap = 0.8000 is below rollout.parity_min_expert_overlap = 0.9" in text
    wide = config(parity_max_logprob_diff=0.5, parity_min_expert_overlap=0.7)
    kind, text = verdict(parity_limits(wide, "bfloat16"), 0.3, 0.8)
    assert (
        kind == "warned"
        and "3.00e-01 is above rollout.parity_warn_logprob_diff = 0.15, more than" in text
    )
    wide = config(
        parity_max_logprob_diff=0.5, parity_warn_logprob_diff=0.4, parity_min_expert_overlap=0.7
    )
    assert (
        "rollout.parity_warn_expert_overlap"
        in verdict(parity_limits(wide, "bfloat16"), 0.3, 0.8)[1]
    )
    narrow = config(parity_max_logprob_diff=1e-3, parity_min_expert_overlap=0.999)
    assert verdict(parity_limits(narrow, "bfloat16"), 2e-3, 1.0)[0] == "refused"
    assert verdict(parity_limits(narrow, "bfloat16"), 5e-4, 0.998)[0] == "refused"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"parity_warn_logprob_diff": 0.5, "parity_max_logprob_diff": 0.2},
        "parity_warn_logprob_diff = 0.5 has no effect"),
        ({"parity_warn_expert_overlap": 0.8, "parity_min_expert_overlap": 0.9},
        "warn_expert_overlap = 0.8 has no effect"),
        ({"parity_max_logprob_diff": 0.0}, "rollout.parity_max_logprob_diff = 0.0"),
        ({"parity_min_expert_overlap": 1.5}, "rollout.parity_min_expert_overlap = 1.5"),
    ],
)  # fmt: skip
def test_limits_without_effect_or_out_of_range_are_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        config(**keys)


def test_a_warning_beyond_the_pairs_own_refusal_is_refused_once_the_pair_is_known():
    with pytest.raises(
        ValueError,
        match=r"parity_warn_logprob_diff = 0\.9 has no effect.*parity_max_logprob_diff = 0\.3",
    ):
        parity_limits(config(parity_warn_logprob_diff=0.9), "bfloat16")


def test_an_overlap_without_routes_has_no_effect():
    sections = {
        "model": {"path": "x"}, "data": {"train": "x"},
        "rollout": {"parity_min_expert_overlap": 0.5},
        "replay": {"mode": "none", "measure": False},
    }  # fmt: skip
    with pytest.raises(
        ConfigError,
        match=r"rollout\.parity_min_expert_overlap = 0\.5 has no effect with replay\.mode = none",
    ):
        load_config(None, [], sections)
