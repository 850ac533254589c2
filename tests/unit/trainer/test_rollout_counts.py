"""Every metric of a step's rollouts against a formula of its own, over all responses or tokens of
two groups.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.records.token_sets import TokenSets
from megatron_rl.rollout.client.counters import CallStats
from megatron_rl.rollout.missing_routes import (
    MissingRouteCounts,
    MissingRoutes,
    add_missing_rows,
)
from megatron_rl.trainer import rollout_metrics
from megatron_rl.trainer.rollout_metrics import (
    count_call,
    count_groups,
    count_step,
    derived,
    peak_memory_gib,
)
from tests.unit.batch.rollouts import make_rollout, make_tree

VERSION = 7


def reduced(sums):
    return sums.reduce(None, "cpu")


@pytest.fixture
def groups():
    """Four responses, one of them three sequences; one reward is not known, one response was
    cut.
    """

    def response(name, size, seed, versions, reason="stop"):
        rollout = make_rollout(name, 3, size, seed=seed)
        sizes = 1 + np.arange(size) % 3
        mask = TokenSets.of(sizes, np.concatenate([np.arange(n) * 300 for n in sizes]))
        return replace(
            rollout, policy_versions=np.resize(np.array(versions, np.int32), size),
            sampling_mask=mask, finish_reason=reason,
            reward_metrics={"format": size / 10},
        ).with_episode(metrics={"calls": float(size)})  # fmt: skip

    def with_answer(rollout):
        """Two of its tokens are an environment's."""
        columns = ("rollout_logprobs", "policy_versions")
        changed = {name: getattr(rollout, name)[:-2] for name in columns}
        return replace(
            rollout, environment=((4, 6),), sampling_mask=None, routes_digest=None, **changed
        )

    tree = replace(make_tree("b/1"), reward_metrics={"format": 0.25})
    tree = tree.with_episode(metrics={"calls": 0.5})
    first = (with_answer(response("a/0", 6, 1, [7])), response("a/1", 6, 2, [5, 6], "length"))
    second = (response("b/0", 9, 3, [6, 7, 3]), tree)
    prompt = Prompt("a", "", (1,), "")
    return [
        RolloutGroup(
            prompt,
            first,
            np.array([0.25, -2.0], np.float32),
            penalties=np.array([-0.5, -1.0], np.float32),
        ),
        RolloutGroup(
            prompt,
            second,
            np.array([0.75, np.nan], np.float32),
            penalties=np.array([0.0, -0.5], np.float32),
        ),
    ]


def test_rewards_lengths_and_ages(groups):
    sums = MetricSums()
    count_groups(sums, groups, version=VERSION)
    responses = [rollout for group in groups for rollout in group.rollouts]
    sequences = [sequence for rollout in responses for sequence in rollout.sequences]
    ages = VERSION - np.concatenate([sequence.policy_versions for sequence in sequences])
    masks = [sequence.sampling_mask for sequence in sequences if sequence.sampling_mask is not None]
    lengths = [4, 6, 9, 19]
    expected = {
        "rollout/reward_mean": (0.25 - 2 + 0.75) / 3,
        "rollout/reward_max": 0.75,
        "rollout/reward_min": -2.0,
        "rollout/reward_std": np.std([0.25, -2, 0.75]),
        "rollout/unscored_frac": 1 / 4,
        "rollout/length_penalty_mean": -2 / 4,
        "rollout/zero_advantage_groups_frac": 1 / 2,  # one known reward is its own mean
        "rollout/response_length_mean": np.mean(lengths),
        "rollout/response_length_max": 19,
        "rollout/truncated_frac": 1 / 4,
        "reward/format": (0.6 + 0.6 + 0.9 + 0.25) / 4,
        "rollout/mixed_versions_frac": sum(
            len(set(r.policy_versions.tolist())) > 1 for r in responses
        )
        / 4,
        "rollout/staleness_mean": ages.mean(),
        "rollout/staleness_max": ages.max(),
        "rollout/staleness_0_frac": (ages == 0).mean(),
        "rollout/staleness_1_frac": (ages == 1).mean(),
        "rollout/staleness_2_up_frac": (ages >= 2).mean(),
        "rollout/kept_tokens_mean": np.concatenate([mask.sizes for mask in masks]).mean(),
        "rollout/kept_bytes_mean": sum(mask.nbytes for mask in masks) / sum(map(len, masks)),
    }
    found = derived(reduced(sums))
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert not {"rollout/reward_square_mean", "rollout/negative_reward_max"} & found.keys()


def test_equal_rewards_with_advantages_teach_something(groups):
    """advantage.kind = batch_whitened and reward."""
    equal = replace(groups[0], rewards=np.full(2, 0.1, np.float32), penalties=None)
    for value, share in ((0.1, 0.0), (0.0, 1.0), (1e-9, 1.0)):
        sums = MetricSums()
        advantages = np.full(2, value, np.float32)
        count_groups(sums, [replace(equal, advantages=advantages)], version=VERSION)
        assert derived(reduced(sums))["rollout/zero_advantage_groups_frac"] == share


def test_equal_rewards_have_no_spread_and_no_advantage(groups):
    sums = MetricSums()
    equal = replace(groups[0], rewards=np.full(2, 0.1, np.float32), penalties=None)
    for _ in range(3):
        count_groups(sums, [equal], version=VERSION)
    found = derived(reduced(sums))
    assert found["rollout/zero_advantage_groups_frac"] == 1 and found[
        "rollout/reward_std"
    ] == pytest.approx(0, abs=1e-8)
    assert "rollout/length_penalty_mean" not in found


@pytest.mark.parametrize("agent", [False, True])
def test_a_step_is_counted_once_per_replica_with_its_episodes(groups, agent):
    sections = {"agent": {"function": "module.function"}} if agent else {}
    base = {
        "model": {"path": "m"},
        "data": {"train": "d"},
        "replay": {"mode": "R3", "on_missing_route": "mask_token"},
    }
    cfg = load_config(None, [], base | sections)
    missing = np.zeros(len(groups[0].rollouts[0].tokens) - 1, bool)
    missing[[0, 2, 3, 6]] = True  # the first is of the prompt alone, the third of the environment
    first = (replace(groups[0].rollouts[0], missing_routes=missing), groups[0].rollouts[1])
    groups = [replace(groups[0], rollouts=first), groups[1]]
    sums = MetricSums()
    count_step(cfg, SimpleNamespace(is_replica_leader=False), sums, groups, VERSION)
    assert reduced(sums) == {}
    count_step(cfg, SimpleNamespace(is_replica_leader=True), sums, groups, VERSION)
    found = reduced(sums)
    assert found["replay/masked_tokens_total"] == 2 and found["rollout/response_length_max"] == 19
    expected = {
        "rollout/sequences_mean": 6 / 4,
        "rollout/sequences_max": 3,
        "rollout/turns_mean": 7 / 4,
        "rollout/turns_max": 3,
        "rollout/environment_length_mean": 2 / 4,
        "episode/calls": (6 + 6 + 9 + 0.5) / 4,
    }
    assert {name: found[name] for name in expected if name in found} == (
        pytest.approx(expected) if agent else {}
    )
    stopped = base | {"replay": {"mode": "R3", "on_missing_route": "error"}} | sections
    count_step(
        load_config(None, [], stopped),
        SimpleNamespace(is_replica_leader=True),
        sums := MetricSums(),
        groups,
        7,
    )
    assert "replay/masked_tokens_total" not in reduced(sums)


def test_missing_rows_of_all_draws():
    sums = MetricSums()
    for _ in range(2):
        counts = MissingRouteCounts(
            missing_response_rows=1,
            response_rows=10,
            missing_prompt_rows=3,
            prompt_rows=12,
            dropped=2,
        )
        add_missing_rows(sums, counts)
    assert reduced(sums) == {
        "replay/missing_rows_total": 8,
        "replay/dropped_samples_total": 4,
        "replay/missing_route_frac": 0.1,
        "replay/prompt_missing_route_frac": 0.25,
    }


def test_throughput_is_of_all_replicas_and_seconds_are_of_every_request():
    parallel, sums = SimpleNamespace(dp_size=4, device=torch.device("cpu")), MetricSums()
    count_call(sums, CallStats(2.0, 100, [1.0, 3.0], [], 40, 10), parallel)
    found = reduced(sums)
    assert found["rollout/tokens_per_second"] == 200 and found["rollout/cache_hit_frac"] == 0.25
    assert found["rollout/request_seconds_max"] == 3
    assert found["rollout/request_seconds_median"] == pytest.approx(1, rel=0.02)
    assert not any(name.startswith("rollout/environment_seconds") for name in found)
    count_call(sums := MetricSums(), CallStats(2.0, 100, [1.0], [0.5, 0.25], 40, 10), parallel)
    assert reduced(sums)["rollout/environment_seconds_mean"] == 0.375


def test_discarded_lengths_are_of_the_kinds_that_the_client_counts():
    totals = {f"rollout/{kind}_{unit}_total": value for kind, unit, value in (
        ("dropped", "tokens", 10.0), ("dropped", "samples", 2.0), ("stale", "tokens", 30.0),
        ("stale", "samples", 2.0),
        ("cancelled", "tokens", 4.0), ("cancelled", "samples", 0.0),
    )}  # fmt: skip
    assert derived(totals) == totals | {"rollout/discarded_length_mean": 11}
    for none in ({}, dict.fromkeys(totals, 0.0)):
        assert derived(none) == none


def test_training_speed_is_of_the_stages_that_train():
    times = {
        "perf/step_tokens": 600.0,
        "time/old_logprob": 1.0,
        "time/update": 2.0,
        "time/step": 50.0,
    }
    found = derived(times)
    assert found["perf/train_tokens_per_second"] == 200 and "perf/step_tokens" not in found
    assert "perf/train_tokens_per_second" not in derived({"perf/step_tokens": 600.0})
    assert derived(times | {"time/update": 0.0})["perf/train_tokens_per_second"] == 600


def test_memory_is_in_gib_since_the_step_before_on_gpus(monkeypatch):
    reset = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 29)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    device = torch.device("cuda", 0)
    assert peak_memory_gib(device) == 1.5 and reset == [device]
    usage = SimpleNamespace(ru_maxrss=5 << 19)  # KiB
    monkeypatch.setattr(rollout_metrics.resource, "getrusage", lambda who: usage)
    assert peak_memory_gib(torch.device("cpu")) == 2.5 and reset == [device]


def test_without_replay_no_route_is_missing():
    """And nothing is asked of the other ranks: there is no process group here."""
    cfg = load_config(
        None,
        [],
        {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "replay": {"mode": "none", "measure": False},
        },
    )
    missing, sums = MissingRoutes(cfg), MetricSums()
    missing.check(sums, [], MissingRouteCounts(missing_response_rows=3, response_rows=9))
    assert reduced(sums) == {} and missing.counts == MissingRouteCounts()
