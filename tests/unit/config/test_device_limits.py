"""Limits that are "auto" depend on the device; a number applies to every device."""

import pytest

from megatron_rl.config import CheckpointConfig, RolloutConfig, load_config
from megatron_rl.launch.signals import LAUNCHER, grace_period


def test_limits_of_servers():
    default, chosen = (
        RolloutConfig(),
        RolloutConfig(start_timeout_seconds=5, probe_timeout_seconds="7"),
    )
    assert [default.start_seconds(device) for device in ("cpu", "cuda")] == [900.0, 1200.0]
    assert [default.probe_seconds(device) for device in ("cpu", "cuda")] == [60.0, 600.0]
    assert {chosen.start_seconds(device) for device in ("cpu", "cuda")} == {5.0}
    assert {chosen.probe_seconds(device) for device in ("cpu", "cuda")} == {7.0}


def test_servers_fail_to_start_before_the_watchdog_ends_the_run():
    def config(minutes, **rollout):
        run = {"collective_timeout_minutes": minutes}
        return load_config(
            None,
            [],
            {"model": {"path": "m"}, "data": {"train": "t"}, "run": run, "rollout": rollout},
        )

    assert [config(30).start_seconds(device) for device in ("cpu", "cuda")] == [900.0, 1200.0]
    assert config(3).start_seconds("cuda") == pytest.approx(0.81 * 180)
    assert config(3, start_timeout_seconds=160).start_seconds("cpu") == 160
    with pytest.raises(
        ValueError,
        match=r"rollout\.start_timeout_seconds = 162 must be below 162, 90 % of run\.coll.* = 3: ",
    ):
        config(3, start_timeout_seconds=162)
    config(3, start_timeout_seconds=900, urls=["http://a:1"])


@pytest.mark.parametrize(
    ("variables", "device", "expected"),
    [
        ({}, "cpu", 25.0),
        ({}, "cuda", 600.0),
        ({"TORCHELASTIC_RUN_ID": "x"}, "cuda", 25.0),  # plain torchrun kills its ranks after 30 s
        ({"TORCHELASTIC_RUN_ID": "x", LAUNCHER: "1"}, "cuda", 600.0),
        ({"TORCHELASTIC_RUN_ID": "x", LAUNCHER: "1"}, "cpu", 25.0),
    ],
)
def test_grace_period(variables, device, expected, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", LAUNCHER):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert grace_period(CheckpointConfig().grace_seconds, device) == expected
    assert grace_period(CheckpointConfig(grace_seconds=3).grace_seconds, device) == 3.0
