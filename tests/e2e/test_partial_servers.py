"""Responses and episodes that a real SGLang server cut short and continued under other weights:
each token is of its recorded version."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config import AgentConfig
from megatron_rl.records import Prompt, Rollout, version_spans
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.server.server_info import server_info
from megatron_rl.weights.sync.push import WeightPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from tests.e2e.reference import TIE, TINY_SPEC, hf_logprobs_and_routes, hf_model, lost_probability
from tests.one_rank import given
from tests.referee import forced, rollout_routes
from tests.tiny import random_checkpoint
from tests.words import word_tokenizer

pytestmark = pytest.mark.slow

MAX_TOKENS, GROUP = 200, 4
PROMPTS = [
    Prompt(id=f"q{i}", text="", token_ids=(5, 9, 13, 40, 7, 22, 31, 8 + i), label="")
    for i in range(6)
]


@pytest.fixture
def push(sglang_server, tiny_checkpoint, tmp_path):
    """push(checkpoint) -> the version that the shared server has then; in the end it has its own
    weights again.
    """
    pusher = WeightPusher(
        ServerAccess([sglang_server.url], 60.0),
        PushedWeights(tiny_checkpoint, torch.float32),
        TransportSettings(
            "disk", bucket_mb=64, device=torch.device("cpu"), disk_dir=tmp_path / "weights"
        ),
    )

    def call(checkpoint: Path) -> int:
        version = int(server_info(sglang_server.url).weight_version) + 1
        pusher.push(lambda: given(load_file(checkpoint / "model.safetensors")), version)
        return version

    yield call
    call(tiny_checkpoint)
    pusher.close()


def test_every_token_is_of_the_version_it_names(push, sglang_server, rollout_config, tmp_path):
    """Real responses, cut where an abort could cut them, continue under other weights, twice; and
    with one group kept, uncut.
    """
    settings = {"partial": "resume", "over_sample": 1.0, "max_staleness": 4}
    cfg = rollout_config.model_copy(update=settings)
    client = RolloutClient([sglang_server.url], cfg, SampleRules(TINY_SPEC, want_routes=True))
    checkpoints: dict[int, Path] = {}
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]
    for seed in (11, 12, 13):
        checkpoint = random_checkpoint(tmp_path / str(seed), seed=seed)
        version = push(checkpoint)
        checkpoints[version] = checkpoint
        sampling = Sampling(1.0, MAX_TOKENS, (1, 2), version, "")
        client.fill(groups, sampling, keep=1)  # whatever is aborted by then
        client.fill(groups, sampling)
        if seed != 13:
            groups = [Group(group.prompt, GROUP, prefixes=cut_all(group)) for group in groups]
    assert (
        client.counters.lost_samples
        == client.counters.dropped.total()
        == 0
        < client.counters.resumed_samples
    )
    rollouts = [rollout for group in groups for rollout in group.rollout_group().rollouts]
    for rollout in rollouts:
        assert tuple(rollout.tokens[: rollout.prompt_length]) in {
            prompt.token_ids for prompt in PROMPTS
        }
        assert rollout.finish_reason == ("stop" if rollout.tokens[-1] in (1, 2) else "length")
        assert not set(rollout.tokens[rollout.prompt_length : -1].tolist()) & {1, 2}, (
            "it continued after its end"
        )
        assert_is_from_its_versions(checkpoints, rollout)
    spans = [len(version_spans(rollout.policy_versions)) for rollout in rollouts]
    assert sum(number > 1 for number in spans) > len(spans) // 2 and max(spans) == 3
    print(f"{len(spans)} responses in {sum(spans)} spans; {client.counters}")


async def three_turns(session, prompt):
    for turn in range(3):
        await session.generate(max_tokens=60)
        session.observe([7 + turn, 50 - turn, 20])
    return session.finish()


def test_episodes_continue_under_the_weights_of_a_push(
    push, sglang_server, rollout_config, tmp_path
):
    """One of six groups is complete; the episodes of the others are cut wherever they are, and
    weights are pushed, twice.
    """
    settings = {"partial": "resume", "over_sample": 1.0, "max_staleness": 4}
    cfg = rollout_config.model_copy(update=settings)
    agent = AgentConfig(function=f"{__name__}:three_turns")
    runner = EpisodeRunner(agent, word_tokenizer(), TINY_SPEC.vocab_size, cfg.max_retries)
    client = RolloutClient(
        [sglang_server.url], cfg, SampleRules(TINY_SPEC, want_routes=True), episodes=runner
    )
    checkpoints: dict[int, Path] = {}
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]
    for seed, keep in ((21, 1), (22, 3), (23, len(groups))):
        checkpoint = random_checkpoint(tmp_path / str(seed), seed=seed)
        version = push(checkpoint)
        checkpoints[version] = checkpoint
        client.fill(groups, Sampling(1.0, MAX_TOKENS, (1, 2), version, ""), keep=keep)
    counters = client.counters
    assert counters.lost_samples == counters.dropped.total() == counters.diverged_episodes == 0
    assert counters.resumed_episodes > 0 < counters.cut_samples
    rollouts = [rollout for group in groups for rollout in group.rollout_group().rollouts]
    for rollout in rollouts:
        assert rollout.num_spans == len(rollout.episode.turns) == 3
        assert_is_from_its_versions(checkpoints, rollout)
    spans = [version_spans(rollout.policy_versions) for rollout in rollouts]
    in_a_turn = [
        bool((np.diff(rollout.policy_versions)[np.diff(rollout.sampled) == 1] > 0).any())
        for rollout in rollouts
    ]
    assert any(in_a_turn) and any(len(each) > 1 for each in spans)
    print(
        f"{len(spans)} episodes in {sum(map(len, spans))} spans, {sum(in_a_turn)} changed in a"
        f" turn; {counters}"
    )


def cut_all(group: Group) -> dict[int, Rollout]:
    """Two thirds of every response of more than one token."""
    return {
        k: cut(r, r.response_length * 2 // 3)
        for k, r in group.rollouts.items()
        if r.response_length > 1
    }


def cut(rollout: Rollout, num_tokens: int) -> Rollout:
    """What an abort after so many response tokens would have left of it."""
    size = rollout.prompt_length + num_tokens
    return replace(
        rollout,
        tokens=rollout.tokens[:size],
        rollout_logprobs=rollout.rollout_logprobs[:num_tokens],
        policy_versions=rollout.policy_versions[:num_tokens],
        routed_experts=rollout.routed_experts[: size - 1],
        routes_digest=None,
        finish_reason="abort",
    )


def assert_is_from_its_versions(checkpoints: dict[int, Path], rollout: Rollout) -> None:
    """Log-probs within 1e-4, and every expert, of transformers' forward under the version that
    sampled the token, or the token that the row predicts."""
    versions = rollout.policy_versions
    # row j: of the first sampled token after j; what an environment wrote was computed for the turn
    # that follows it
    of_row = versions[np.searchsorted(rollout.sampled, np.arange(1, len(rollout.tokens)))]
    assert rollout.missing_routes is None and rollout.routed_experts is not None
    recorded = np.sort(rollout.routed_experts, axis=-1)
    for version in np.unique(versions).tolist():
        rows = of_row == version
        _, routes = hf_logprobs_and_routes(checkpoints[version], rollout, 1.0)
        # the rows of other versions are not this one's: the test tells them apart
        if rollout.is_mixed:
            assert not np.array_equal(recorded[~rows], routes[~rows])
        # with the recorded experts in its rows: near ties are rounding, and later tokens follow
        chosen = replace(
            rollout,
            routed_experts=np.where(rows[:, None, None], recorded, routes),
            routes_digest=None,
        )
        with forced(hf_model(checkpoints[version]), rollout_routes(chosen)):
            logprobs, _ = hf_logprobs_and_routes(checkpoints[version], chosen, 1.0)
            lost = lost_probability(checkpoints[version], chosen)
        assert np.abs(rollout.rollout_logprobs - logprobs)[versions == version].max() < 1e-4
        assert (lost[rows] <= TIE).all()
