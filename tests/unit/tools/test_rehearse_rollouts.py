"""The rollouts of a rehearsal: what the configuration says of them, and those of a saved run."""

import numpy as np
import pytest

from megatron_rl.batch.pack import check_sample
from megatron_rl.batch.teacher_weights import check_top
from megatron_rl.config import load_config
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.records.token_sets import check_mask
from megatron_rl_tools.rehearse.rollouts import (
    invented_samples,
    saved_samples,
    sequence_lengths,
)
from tests.saved_run import make_material, sections


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("saved"), steps=1)


def config(material, *overrides):
    cfg = load_config(None, list(overrides), sections(material, material, steps=9))
    return cfg, make_spec(load_hf_config(cfg.model.path))


def test_they_are_as_long_as_the_configuration_allows(material):
    """Also above run.max_tokens_per_micro_batch, where a sequence is a micro-batch by itself."""
    sizes = ("--data.max_prompt_tokens", "100", "--rollout.max_response_tokens", "300")
    cases = {"1000": [400, 400, 200], "850": [400, 400], "430": [400], "256": [400]}
    for cap, lengths in cases.items():
        cfg, _ = config(material, *sizes, "--run.max_tokens_per_micro_batch", cap)
        assert sequence_lengths(cfg, 2, None) == 2 * lengths
    assert sequence_lengths(cfg, 2, 300) == [300] * 2
    with pytest.raises(ValueError, match="--length 401: must be at most 400, data.max_prompt"):
        sequence_lengths(cfg, 2, 401)


def test_turns_kept_sets_and_versions(material):
    cfg, spec = config(
        material, "--rollout.top_p", "0.9", "--rollout.top_k", "5", "--rollout.max_staleness", "2",
    )  # fmt: skip
    short, long = (s.rollout for s in invented_samples(spec, cfg, [8, 60], turns=4))
    assert (short.num_spans, long.num_spans) == (3, 4)
    assert [start < end for start, end in long.environment] == [True] * 3
    versions = long.policy_versions
    assert set(versions.tolist()) == {0, 1, 2} and (np.diff(versions) >= 0).all()
    for rollout in (short, long):
        sampled = rollout.tokens[rollout.sampled]
        assert len(rollout.rollout_logprobs) == len(sampled)
        ids = check_mask("x", rollout.sampling_mask, sampled)
        assert len(ids) == 5 * len(sampled) and ids.max() < spec.vocab_size
        routes = rollout.routed_experts
        assert routes.shape == (len(rollout.tokens) - 1, 4, 2) and routes.max() == 7
        assert (routes[..., 0] != routes[..., 1]).all()


@pytest.mark.parametrize("form", ["token", "reverse"])
def test_a_teacher_has_scored_them(material, form):
    top_k = "0" if form == "token" else "6"
    cfg, spec = config(
        material, "--teachers.big.urls", "http://10.0.0.2:1", "--teachers.big.beta", "0.5",
        "--loss.teacher_form", form, "--loss.teacher_top_k", top_k,
    )  # fmt: skip
    for sample in invented_samples(spec, cfg, [8, 60], turns=2):
        check_sample(sample)
        assert sample.teacher_weight == 0.5 and sample.rollout.is_taught
        check_top(sample.rollout, "big", cfg.loss.teacher_top_k)
        assert (sample.rollout.teacher_top is None) == (form == "token")


def test_without_them(material):
    cfg, spec = config(material, "--replay.mode", "none", "--replay.measure", "false")
    ((rollout,),) = [[s.rollout for s in invented_samples(spec, cfg, [20])]]
    assert (rollout.num_spans, rollout.sampling_mask, rollout.routed_experts) == (1, None, None)
    assert rollout.response_length == 17 and not rollout.policy_versions.any()


def test_saved_rollouts_are_the_longest_and_lose_the_layers_that_are_left_out(material):
    cfg, spec = config(material)
    every = saved_samples(material / "live", spec, cfg, 4, 1, micro_batches=100)
    lengths = [len(sample.rollout.tokens) for sample in every]
    assert len(every) == 8 and lengths == sorted(lengths, reverse=True)
    some = saved_samples(material / "live", spec, cfg, 2, 1, micro_batches=1)
    assert 0 < len(some) < 8
    assert sum(len(sample.rollout.tokens) for sample in some) <= cfg.run.max_tokens_per_micro_batch
    for sample, whole in zip(some, every, strict=False):
        routes = whole.rollout.routed_experts
        assert np.array_equal(sample.rollout.routed_experts, routes[:, :2])
        assert sample.advantage == whole.advantage
    with pytest.raises(ValueError, match="run.group_size"):
        cfg, spec = config(material, "--run.group_size", "4")
        saved_samples(material / "live", spec, cfg, 2, 1, micro_batches=1)
