"""gpu-check's step of the groups of a weight sync, over gloo into a receiver: what the receiver has
after each part, and what the step notes.
"""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.weights.sync.push import WeightPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from megatron_rl_tools.gpu_check import group_steps
from megatron_rl_tools.gpu_check.result import Findings, NotPossible
from megatron_rl_tools.gpu_check.steps import StepPlace
from tests.fake_receiver import fingerprint, receivers
from tests.one_rank import given

TENSORS, SHAPE = 12, (20, 30)


@pytest.fixture(scope="module")
def receiver(tmp_path_factory):
    file = tmp_path_factory.mktemp("first") / "model.safetensors"
    save_file({"nothing": torch.zeros(1)}, file)
    with receivers(file, 1) as (process,):
        yield process


@pytest.fixture
def trained(tmp_path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    tensors = {f"layers.{index:02d}.weight": torch.randn(SHAPE) for index in range(TENSORS)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def run(receiver, trained: Path, number: int) -> tuple[dict, Findings, list[str]]:
    weights = load_file(trained / "model.safetensors")
    pusher = WeightPusher(
        ServerAccess([receiver.url], 20),
        PushedWeights(trained, torch.float32),
        TransportSettings("distributed", 1, torch.device("cpu"), trained / "unused"),
    )
    pusher.bucket_bytes = 2 * weights["layers.00.weight"].nbytes
    findings, checked = Findings(), list[str]()

    def check(version: int, after: str) -> None:
        state = receiver.state()
        values = {name: fingerprint(tensor) for name, tensor in weights.items()}
        assert {name: state["held"][name] for name in values} == values
        assert state["weight_version"] == str(version) and not state["paused"]
        checked.append(after)

    figures = group_steps.join_and_leave(pusher, partial(given, weights), number, check, findings)
    return figures, findings, checked


@pytest.mark.parametrize("number", group_steps.SOURCES)
def test_all_parts_of_the_step(number, receiver, trained, capsys):
    figures, findings, checked = run(receiver, trained, number)
    assert checked == ["repeated weight syncs", "leaving the groups", "an aborted one"]
    assert findings.problems == [] and figures["buckets"] == TENSORS // 2
    assert "aborted, as it must be" in (text := capsys.readouterr().out), text
    assert "must run between" in text, "the server's own reason"
    assert not [name for name in figures if "GiB" in name], "of GPUs only"
    json.dumps(figures)


def test_every_source_has_a_group_of_its_own_and_leaves_it(receiver, trained, monkeypatch):
    names: list[str] = []
    left: list[str] = []
    monkeypatch.setattr(
        group_steps.WeightPusher,
        "close",
        lambda pusher: left.extend(each.sender.group_name for each in pusher.transport.sources),
    )
    send = group_steps.Distributed.send

    def watched(source, servers, bucket, version, turn):
        calls = send(source, servers, bucket, version, turn)
        names.append(source.sender.group_name)
        return calls

    monkeypatch.setattr(group_steps.Distributed, "send", watched)
    run(receiver, trained, 4)
    first = names[: TENSORS // 2]
    assert first == [*first[:4], *first[:2]] and len(set(first)) == 4, "in turn"
    assert not set(left) & set(first), "all groups are new after leaving"
    assert len(set(names)) == 4 + 4 + 1, "and one more after the abort"


def test_an_abort_that_stops_nothing_is_a_problem(receiver, trained, monkeypatch):
    class NeverRefused(group_steps.SeveralSources):
        def send(self, *arguments):
            self.refused = None
            return super().send(*arguments)

    monkeypatch.setattr(group_steps, "SeveralSources", NeverRefused)
    _, findings, _ = run(receiver, trained, 1)
    assert findings.problems == ["1 sources: a refused bucket did not stop the weight sync"]


def test_one_gpu_is_not_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(NotPossible, match="needs two GPUs.*torch sees 1"):
        group_steps.weight_sync_group(StepPlace("cuda", tmp_path, True, Path(sys.executable)))
