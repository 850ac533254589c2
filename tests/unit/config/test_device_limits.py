"""Limits that are "auto" depend on the device; a number applies to every device."""

import pytest

from megatron_rl.config import CheckpointConfig, RolloutConfig
from megatron_rl.launch.signals import LAUNCHER, grace_period


def test_limits_of_servers():
    default, chosen = RolloutConfig(), RolloutConfig(start_timeout_seconds=5, probe_timeout_seconds="7")
    assert [default.start_seconds(device) for device in ("cpu", "cuda")] == [300.0, 1200.0]
    assert [default.probe_seconds(device) for device in ("cpu", "cuda")] == [60.0, 600.0]
    assert {chosen.start_seconds(device) for device in ("cpu", "cuda")} == {5.0}
    assert {chosen.probe_seconds(device) for device in ("cpu", "cuda")} == {7.0}


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
