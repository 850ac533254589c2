"""Responses that a real SGLang server cut short and went on with under other weights: each token is of the version it names."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client import RolloutClient
from megatron_rl.rollout.handshake import server_info
from megatron_rl.rollout.partial import OpenGroup
from megatron_rl.rollout.request import Sampling
from megatron_rl.weights.push import WeightPusher
from tests.e2e.reference import TINY_SPEC, hf_logprobs_and_routes
from tests.tiny import random_checkpoint

pytestmark = pytest.mark.slow

MAX_TOKENS = 200
PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(5, 9, 13, 40, 7, 22, 31, 8 + i), label="") for i in range(8)]
SIZES = (1, 1, 1, 1, 1, 4, 4, 4)  # the first single response to end cuts the others short


@pytest.fixture
def push(sglang_server, tiny_checkpoint, tmp_path):
    """push(checkpoint) -> the version that the shared server has then; in the end it has its own weights again."""
    pusher = WeightPusher(
        [sglang_server.url],
        checkpoint=tiny_checkpoint,
        dtype=torch.float32,
        transport="disk",
        bucket_mb=64,
        device=torch.device("cpu"),
        timeout_seconds=60.0,
        disk_dir=tmp_path / "weights",
    )

    def call(checkpoint: Path) -> int:
        version = int(server_info(sglang_server.url).weight_version) + 1
        pusher.push(load_file(checkpoint / "model.safetensors").items(), version)
        return version

    yield call
    call(tiny_checkpoint)
    pusher.close()


def test_every_token_is_of_the_version_it_names(push, sglang_server, rollout_config, tmp_path):
    settings = {"partial": "resume", "over_sample": 1.0, "max_staleness": 4}
    cfg = rollout_config.model_copy(update=settings)
    client = RolloutClient([sglang_server.url], cfg, spec=TINY_SPEC, want_routes=True)
    left = [OpenGroup(prompt, size) for prompt, size in zip(PROMPTS, SIZES, strict=True)]
    checkpoints, whole = {}, []
    for seed in (11, 12, 13, 14):
        checkpoint = random_checkpoint(tmp_path / str(seed), seed=seed)
        version = push(checkpoint)
        checkpoints[version] = checkpoint
        sampling = Sampling(1.0, MAX_TOKENS, (1, 2), version, "")
        kept = client.fill(left, sampling, keep=len(left) if seed == 14 else 1)
        whole += kept
        left = [group for group in left if group not in kept]
    assert not left and client.counters.lost_samples == client.counters.dropped.total() == 0
    rollouts = [rollout for group in whole for rollout in group.closed().rollouts]
    for rollout in rollouts:
        assert tuple(rollout.tokens[: rollout.prompt_length]) in {prompt.token_ids for prompt in PROMPTS}
        assert rollout.finish_reason == ("stop" if rollout.tokens[-1] in (1, 2) else "length")
        assert not set(rollout.tokens[rollout.prompt_length : -1].tolist()) & {1, 2}, "it went on after its end"
        assert rollout.finish_reason == "stop" or rollout.response_length == MAX_TOKENS
        assert_is_from_its_versions(checkpoints, rollout)
    mixed = [rollout for rollout in rollouts if rollout.is_mixed]
    assert len(mixed) >= 3 and max(len(set(rollout.policy_versions.tolist())) for rollout in mixed) >= 3
    spans = sum(len(set(rollout.policy_versions.tolist())) for rollout in rollouts)
    print(f"{len(rollouts)} responses, {len(mixed)} of several versions, {spans} spans; {client.counters}")


def assert_is_from_its_versions(checkpoints: dict[int, Path], rollout: Rollout) -> None:
    """Log-probs within 1e-4, and every expert, of transformers' forward under the version that sampled the token, or the
    token that the row predicts."""
    versions = rollout.policy_versions
    of_row = np.concatenate([np.full(rollout.prompt_length - 1, versions[0]), versions])
    assert rollout.missing_routes is None and rollout.routed_experts is not None
    recorded = np.sort(rollout.routed_experts, axis=-1)
    for version in np.unique(versions).tolist():
        logprobs, routes = hf_logprobs_and_routes(checkpoints[version], rollout, 1.0)
        assert np.abs(rollout.rollout_logprobs - logprobs)[versions == version].max() < 1e-4
        assert np.array_equal(recorded[of_row == version], routes[of_row == version])
        if rollout.is_mixed:  # the rows of other versions are not this one's: the test tells them apart
            assert not np.array_equal(recorded[of_row != version], routes[of_row != version])
