"""Weights of a real SGLang server change while it samples (rollout.weight_update = in_place):
versions, log-probs and experts of every token are those of the forward that sampled it."""

from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file

from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.inference import Inference
from megatron_rl.rollout.server.server_info import check_in_place, server_info
from tests.e2e.reference import TIE, TINY_SPEC, as_sampled, assert_is_from, hf_logprobs_and_routes
from tests.e2e.test_rollout import running_requests
from tests.fake_server import wait_for
from tests.one_rank import make_server_pool, one_rank_config, one_rank_inference
from tests.tiny import changed_checkpoint, random_checkpoint

pytestmark = pytest.mark.slow

MAX_TOKENS, GROUP = 200, 4
PROMPTS = [
    Prompt(id=f"q{i}", text="", token_ids=(5, 9, 13, 40, 7, 22, 31, 8 + i), label="")
    for i in range(4)
]
SETTINGS = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "stop_token_ids": ()}


class Checkpoints(dict[int, Path]):
    """Version -> weights, so different that every mistake shows."""

    def __missing__(self, version: int) -> Path:
        self[version] = changed_checkpoint(
            self[0].parent / f"version_{version}", self[0], 0.1, seed=version
        )
        return self[version]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Checkpoints:
    # without an end token, so that requests are still in flight when weights change
    return Checkpoints(
        {0: random_checkpoint(tmp_path_factory.mktemp("in_place") / "version_0", eos_token_id=None)}
    )


@pytest.fixture(scope="module")
def inference(checkpoints):
    """With a server of its own, started as a run with in_place starts it; it has weights 0."""
    cfg = one_rank_config(
        checkpoints[0],
        weight_update="in_place",
        max_staleness=3,
        max_total_tokens=8192,
        max_running_requests=16,
    )
    pushed = {"version": 0}

    def export():
        return load_file(checkpoints[pushed["version"]] / "model.safetensors").items()

    with (
        make_server_pool(cfg) as pool,
        one_rank_inference(cfg, TINY_SPEC, export, pool) as inference,
    ):
        check_in_place(server_info(inference.urls[0]), cfg.rollout)
        inference.next_weights = lambda: pushed.update(version=inference.version + 1)
        inference.push(0)
        yield inference


def push(inference: Inference) -> None:
    """The next weights."""
    inference.next_weights()
    inference.push(inference.version + 1, keep_requests=True)


def sample(inference: Inference, groups: list[Group]) -> None:
    """Start to; requests are in flight on return."""
    inference.start(groups, is_open=True, **SETTINGS)
    with httpx.Client(base_url=inference.urls[0], timeout=60) as http:
        assert wait_for(lambda: running_requests(http) > 0, 60)


def finish(inference: Inference, groups: list[Group]) -> list[Rollout]:
    inference.wait(inference.version, is_enough=lambda: all(group.is_complete for group in groups))
    inference.end("abort")
    counters = inference.client.counters
    assert (
        counters.dropped.total()
        == counters.failures.total()
        == counters.lost_samples
        == counters.cut_samples
        == 0
    )
    return [rollout for group in groups for rollout in group.rollout_group().rollouts]


def test_every_token_is_of_the_forward_that_its_version_names(inference, checkpoints):
    first = inference.version
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]
    sample(inference, groups)
    for _ in range(2):
        push(inference)
        inference.renew(groups, first)
    rollouts = finish(inference, groups)
    for rollout in rollouts:
        assert rollout.response_length == MAX_TOKENS and rollout.missing_routes is None
        logprobs, lost = as_sampled(checkpoints, rollout)
        assert np.abs(rollout.rollout_logprobs - logprobs).max() < 1e-4
        assert (lost <= TIE).all()
    mixed = [rollout for rollout in rollouts if rollout.is_mixed]
    assert len(mixed) > len(rollouts) // 2 and inference.version == first + 2
    # the reference can tell: with the version before for one token its log-prob is another
    versions = mixed[0].policy_versions.copy()
    versions[np.flatnonzero(np.diff(versions))[0] + 1] = versions[0]
    wrong, _ = as_sampled(checkpoints, replace(mixed[0], policy_versions=versions))
    assert np.abs(mixed[0].rollout_logprobs - wrong).max() > 1e-3


def test_a_request_after_a_sync_finds_no_keys_of_older_weights(inference, checkpoints):
    """The prefix cache still has the prompts, computed by the weights before."""
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]
    sample(inference, groups)
    push(inference)
    more = [Group(prompt, GROUP) for prompt in PROMPTS]
    inference.renew([*groups, *more], inference.version - 1)
    for rollout in finish(inference, [*groups, *more])[-GROUP * len(PROMPTS) :]:
        assert set(rollout.policy_versions.tolist()) == {inference.version}
        assert_is_from(checkpoints[inference.version], rollout)


def test_routes_that_a_retraction_computed_with_other_weights_are_missing(inference, checkpoints):
    first = inference.version
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]
    sample(inference, groups)
    push(inference)
    inference.renew(groups, first)
    for call, body in (("pause_generation", {"mode": "retract"}), ("continue_generation", {})):
        httpx.post(f"{inference.urls[0]}/{call}", json=body, timeout=60).raise_for_status()
    rollouts = finish(inference, groups)
    assert any(rollout.is_mixed for rollout in rollouts)
    for rollout in rollouts:
        assert set(rollout.policy_versions.tolist()) <= {first, first + 1}
        if not rollout.is_mixed:
            continue
        assert rollout.missing_routes.all()
        before = rollout.policy_versions == first
        logprobs, _ = hf_logprobs_and_routes(checkpoints[first], rollout, 1.0)
        assert np.abs(rollout.rollout_logprobs - logprobs)[before].max() < 1e-4


def test_what_would_be_too_old_is_aborted_and_starts_again(inference, checkpoints):
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]
    sample(inference, groups)
    push(inference)
    inference.renew(groups, inference.version)  # k = 0: every response in flight is too old
    counters = inference.client.counters
    inference.wait(inference.version, is_enough=lambda: all(group.is_complete for group in groups))
    inference.end("abort")
    assert counters.stale_samples > 0
    for rollout in (rollout for group in groups for rollout in group.rollout_group().rollouts):
        assert set(rollout.policy_versions.tolist()) == {inference.version}
        assert_is_from(checkpoints[inference.version], rollout)
