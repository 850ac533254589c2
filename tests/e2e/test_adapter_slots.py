"""A real SGLang server with slots for adapters keeps its base and gets A and B alone.  Every token
has the log-prob and the experts of transformers on merged weights, and the version of the adapter
that its request named.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_rl.config import Config, load_config
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.inference import Inference
from megatron_rl.rollout.server.adapter_slots import check_slots, max_age, slot_options
from megatron_rl.rollout.server.process import launch_server
from megatron_rl.rollout.server.server_info import ServerError, check_settings, server_info
from megatron_rl.weights.hf.peft_folder import ROOT
from megatron_rl.weights.sync.adapter_push import UNLOAD, AdapterPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess, WeightPushError
from tests.e2e.reference import TINY_SPEC, assert_is_from, wrong_tokens
from tests.e2e.test_rollout import running_requests
from tests.e2e.test_train import make_material, start
from tests.fake_server import wait_for
from tests.one_rank import given
from tests.tiny import changed_checkpoint, random_checkpoint

RANK, SCALE, TENSORS, GROUP = 4, 3.0, 39, 4
PROMPTS = [
    Prompt(id=f"q{i}", text="", token_ids=(5, 9, 13, 40, 7, 22, 31, 8 + i), label="")
    for i in range(4)
]
SETTINGS = {"temperature": 1.0, "max_tokens": 200, "stop_token_ids": ()}


class Adapters:
    """Adapters of the attention, by version, and checkpoints that have them merged."""

    def __init__(self, base: Path) -> None:
        self.base, self.weights = base, load_file(base / "model.safetensors")

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(version)
        tensors = {}
        for name, weight in self.weights.items():
            if "self_attn" in name and name.endswith("_proj.weight"):
                module = ROOT + name.removesuffix(".weight")
                rows, columns = weight.shape
                tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns) * 0.1
                tensors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK) * 0.1
        return tensors

    def merged(self, version: int) -> Path:
        folder = self.base.parent / f"merged_{version}"
        if not folder.exists():
            tensors, merged = self.tensors(version), dict(self.weights)
            for name in self.weights:
                module = ROOT + name.removesuffix(".weight")
                if (a := tensors.get(f"{module}.lora_A.weight")) is not None:
                    merged[name] = merged[name] + SCALE * tensors[f"{module}.lora_B.weight"] @ a
            folder.mkdir()
            save_file(merged, folder / "model.safetensors", {"format": "pt"})
            (folder / "config.json").write_text((self.base / "config.json").read_text())
        return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Adapters:
    # without an end token, so that requests are still in flight when weights change
    return Adapters(random_checkpoint(tmp_path_factory.mktemp("slots") / "base", eos_token_id=None))


@pytest.fixture(scope="module")
def cfg(adapters) -> Config:
    sections = {
        "run": {"device": "cpu", "dir": str(adapters.base.parent / "runs")},
        "model": {"path": str(adapters.base), "dtype": "float32"},
        "data": {"train": "none.jsonl"},
        # SGLang itself ignores rslora
        "lora": {"rank": RANK, "alpha": 6.0, "rslora": True, "targets": ["attention"]},
        "rollout": {
            "dtype": "float32", "weight_sync": "adapter", "weight_update": "in_place",
            "max_staleness": 2, "max_total_tokens": 8192, "max_running_requests": 16,
            "request_timeout_seconds": 60.0, "max_retries": 1,
        },
    }  # fmt: skip
    return load_config(None, [], sections)


@pytest.fixture(scope="module")
def server(cfg):
    options = slot_options(cfg, "cpu")
    rollout = cfg.rollout.model_copy(update={"server_args": options})
    log_path = cfg.run_dir / "server.log"
    with launch_server(cfg.model.path, rollout, device="cpu", log_path=log_path, seed=0) as server:
        info = server_info(server.url)
        check_settings(info, cfg.rollout, want_routes=True)
        check_slots(info, cfg)
        with pytest.raises(ServerError, match="enable_lora"):  # a run that sends merged weights
            check_settings(
                info, cfg.rollout.model_copy(update={"weight_sync": "disk"}), want_routes=True
            )
        yield server


@contextmanager
def new_pusher(cfg: Config, url: str, run: str, base: Path | None = None):
    pusher = AdapterPusher(
        ServerAccess([url], 60.0),
        PushedWeights(base or cfg.model.path, torch.float32),
        cfg.lora,
        device=torch.device("cpu"),
        max_age=max_age(cfg),
        verifies=True,
        run=run,
    )
    try:
        yield pusher
    finally:
        pusher.close()


@pytest.fixture
def inference(cfg, server, adapters):
    """Return the Inference of a run; its next push sends the adapter of the next version."""
    run = "0a0b0c0d"
    client = RolloutClient(
        [server.url],
        cfg.rollout,
        SampleRules(TINY_SPEC, want_routes=True, by_adapter=True),
        run=run,
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with new_pusher(cfg, server.url, run) as pusher:
            inference = Inference(
                lambda: given(adapters.tensors(inference.version + 1)),
                client=client, pusher=pusher, server_pool=None, urls=[server.url], log=print,
            )  # fmt: skip
            yield inference
    finally:
        dist.destroy_process_group()


def loaded(url: str) -> list[str]:
    models = httpx.get(f"{url}/v1/models").json()["data"]
    return [model["id"] for model in models if model["parent"]]


@pytest.mark.slow
def test_a_run_has_the_log_probs_of_its_adapters(tmp_path):
    material = make_material(tmp_path, num_hidden_layers=3)
    lora = ("--lora.rank", "4", "--lora.targets", "attention", "--optim.lr", "0.05")
    process = start(material, tmp_path, steps=3, push="adapter", extra=lora)
    assert process.wait(600) == 0, (tmp_path / "output.txt").read_text()
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    largest = [row["train/logratio_abs_max"] for row in rows if "train/logratio_abs_max" in row]
    assert len(largest) == 3 and max(largest) < 1e-4


def rollouts_of(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollout_group().rollouts]


def test_a_server_samples_from_the_adapter_of_each_sync(inference, adapters, server):
    for version in (1, 2):
        inference.push(version)
        groups = inference.generate(PROMPTS, 2, **SETTINGS | {"max_tokens": 24})
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts:
            assert rollout.has_routes and set(rollout.policy_versions.tolist()) == {version}
            assert_is_from(adapters.merged(version), rollout)
            assert wrong_tokens(adapters.base, rollout)[0] > 0  # the reference can tell
    assert loaded(server.url) == ["1@0a0b0c0d", "2@0a0b0c0d"]


def test_a_sync_sends_a_and_b_and_verifies_them_and_the_base(inference, adapters):
    size = sum(tensor.nbytes for tensor in adapters.tensors(1).values())
    whole = sum(tensor.nbytes for tensor in adapters.weights.values())
    reports = [inference.pusher.push(inference.export, version) for version in (1, 2)]
    for report, verified in zip(reports, (TENSORS + 32, 32), strict=True):
        assert (report.num_bytes, report.verified) == (size, verified)
        assert report.num_bytes < 0.1 * whole


def test_a_request_in_flight_keeps_its_adapter(inference, adapters, server):
    inference.push(1)
    groups = [Group(prompt, GROUP) for prompt in PROMPTS]
    inference.start(groups, is_open=True, **SETTINGS)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert wait_for(lambda: running_requests(http) > 0, 60)
    inference.push(2, keep_requests=True)
    more = [Group(prompt, GROUP) for prompt in PROMPTS]
    inference.renew([*groups, *more], 1)
    inference.wait(2, is_enough=lambda: all(group.is_complete for group in [*groups, *more]))
    inference.end("abort")
    counters = inference.client.counters
    assert counters.dropped.total() == counters.failures.total() == counters.aborts == 0
    for version, some in ((1, groups), (2, more)):
        for rollout in rollouts_of(some):
            assert rollout.response_length == 200 and rollout.missing_routes is None
            assert set(rollout.policy_versions.tolist()) == {version}
            assert_is_from(adapters.merged(version), rollout)


def test_adapters_that_no_request_can_name_are_unloaded(inference, cfg, server):
    for version in range(1, 7):
        inference.push(version)
        assert loaded(server.url) == [
            f"{kept}@0a0b0c0d" for kept in range(max(1, version - max_age(cfg)), version + 1)
        ]
    inference.push(6)  # again, as after another server died
    assert len(loaded(server.url)) == 1 + max_age(cfg)
    inference.pusher.close()
    assert loaded(server.url) == []


def test_another_runs_adapters_are_refused_by_name(inference, cfg, server, adapters):
    with new_pusher(cfg, server.url, "ffffffff") as other:
        other.push(lambda: given(adapters.tensors(3)), 3)
        with pytest.raises(WeightPushError, match=r"not loaded: 3@ffffffff; another run uses it"):
            inference.push(1)
    inference.push(1)
    assert loaded(server.url) == ["1@0a0b0c0d"]


def test_a_server_with_another_base_is_refused(cfg, server, adapters):
    base = changed_checkpoint(adapters.base.parent / "other", adapters.base, 0.1)
    with (
        new_pusher(cfg, server.url, "eeeeeeee", base) as pusher,
        pytest.raises(WeightPushError, match=r"does not hold the weights of model.path = .*other"),
    ):
        pusher.push(lambda: given(adapters.tensors(1)), 1)
    assert loaded(server.url) == []


def test_a_server_that_lost_the_adapter_is_asked_again(inference, server):
    inference.push(1)
    httpx.post(server.url + UNLOAD, json={"lora_name": "1@0a0b0c0d"}).raise_for_status()
    inference.client.run = "11111111"  # a name that the server never had
    with pytest.raises(RolloutError, match=r"after 2 requests.*no_adapter"):
        inference.generate(PROMPTS[:1], 1, **SETTINGS)
    inference.pusher.loaded[server.url].clear()
