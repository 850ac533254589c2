"""The names of weight versions: two runs that push to one server have the same numbers, and never
take each other's tokens.
"""

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.weights.version import new_run_name, read_version_name, version_name
from tests.fake_server import SPEC, VERSION, FakeServer
from tests.faults.samples import honest_sample


def test_a_name_has_the_version_and_the_run():
    run = new_run_name()
    assert read_version_name(version_name(12, run)) == (12, run) and run != new_run_name()
    assert version_name(12, "") == "12" and read_version_name("12") == (12, "")
    for name in ("unpushed", "", "@", "updating to 4@ab", "-1@ab", "007@ab", "12@"):
        with pytest.raises(ValueError, match="must be an integer, or INTEGER@RUN"):
            read_version_name(name)


@pytest.mark.parametrize(
    ("pushed_by", "run", "is_taken"),
    [
        ("", "", True),
        ("ours", "ours", True),
        ("theirs", "ours", False),
        ("", "ours", False),
        ("theirs", "", False),
    ],
)
def test_a_token_of_another_runs_weights_is_not_taken(pushed_by, run, is_taken):
    def source(body, prompt, sample_id):
        sample = honest_sample(body, prompt, sample_id)
        name = version_name(VERSION, pushed_by)
        sample["meta_info"] |= {
            "weight_version": name,
            "weight_versions": [{"version": name, "start": 0, "end": 5}],
        }
        return sample

    with FakeServer("ok", source=source) as server:
        client = RolloutClient(
            [server.url], RolloutConfig(max_retries=1), SampleRules(SPEC, want_routes=True), run=run
        )
        arguments = [Prompt("q", "", (3, 4, 5), "")], 2
        settings = {
            "temperature": 1.0,
            "max_tokens": 8,
            "stop_token_ids": [1],
            "policy_version": VERSION,
        }
        if is_taken:
            (group,) = client.generate(*arguments, **settings)
            assert all(
                rollout.policy_versions.tolist() == [VERSION] * 5 for rollout in group.rollouts
            )
            return
        with pytest.raises(
            RolloutError,
            match=rf"'{version_name(VERSION, pushed_by)}'.*expected {version_name(VERSION, run)}",
        ):
            client.generate(*arguments, **settings)
        assert client.counters.dropped["stale_version"] == 4
