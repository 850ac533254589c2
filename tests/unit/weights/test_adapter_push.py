"""The calls by which adapters alone reach servers, and what happens when one misbehaves."""

import base64
import hashlib
import pickle

import pytest
import torch

from megatron_rl.config import ConfigError
from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.known import find_spec
from megatron_rl.weights.hf.adapter_export import slot_weights
from megatron_rl.weights.sync.adapter_push import LOAD, UNLOAD, AdapterPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess, WeightPushError
from tests.one_rank import given
from tests.unit.weights.test_push_protocol import ControlServer, checkpoint  # noqa: F401

LORA = LoraConfig(rank=4, alpha=6.0, rslora=True, targets=("attention",))
TENSORS = {"q.lora_A.weight": torch.ones(4, 6), "q.lora_B.weight": torch.ones(8, 4) / 3}
LOADED = ["/server_info", "/server_info", LOAD, "/update_weight_version", "/model_info"]
NAME = "/update_weight_version"


class SlotServer(ControlServer):
    """Answers with the adapters that it has; `others` are those of other runs."""

    others: tuple[str, ...] = ()
    tp_size = 1

    def more(self, path: str, body: dict) -> dict:
        names = dict.fromkeys(self.others)
        for called, sent in self.calls:
            if called == LOAD:
                names[sent["lora_name"]] = None
            if called == UNLOAD:
                names.pop(sent["lora_name"], None)
        return {"loaded_adapters": dict.fromkeys(names, "__tensor__"), "tp_size": self.tp_size}

    def bodies(self, path: str) -> list[dict]:
        return [body for called, body in self.calls if called == path]

    def names(self, path: str) -> list[str]:
        return [body["lora_name"] for body in self.bodies(path)]


@pytest.fixture
def make(checkpoint):  # noqa: F811
    pushers = []

    def new(*servers, settings=None, **options):
        options = {"max_age": 1, "verifies": False, "run": "ours"} | options
        pusher = AdapterPusher(
            ServerAccess([server.url for server in servers], 5.0, settings=settings),
            PushedWeights(checkpoint, torch.bfloat16),
            LORA,
            device=torch.device("cpu"),
            **options,
        )
        pushers.append(pusher)
        return pusher

    yield new
    for pusher in pushers:
        pusher.close()


def push(pusher: AdapterPusher, version: int, **options):
    return pusher.push(lambda: given(TENSORS), version, **options)


def test_every_server_loads_the_adapter_of_a_version_then_reports_it(make):
    with SlotServer() as one, SlotServer() as two:
        two.tp_size = 2
        pusher = make(one, two, verifies=True)
        # the fake servers have no checksums of their base
        pusher.verifier.verify = lambda *_: 0
        report = push(pusher, 4)
    assert one.paths == ["/server_info", "/server_info", *LOADED[1:]]
    (body,) = one.bodies(LOAD)
    # SGLang scales by lora_alpha / r: the scale is alpha / sqrt(rank)
    assert body["config_dict"]["lora_alpha"] / body["config_dict"]["r"] == 3.0
    assert body["lora_name"] == one.bodies(NAME)[0]["new_version"] == "4@ours"
    (payload,) = body["serialized_named_tensors"]
    sent = pickle.loads(base64.b64decode(payload))  # noqa: S301  made in this process
    assert sent.keys() == TENSORS.keys() == body["expected_checksums"].keys()
    for name, tensor in sent.items():
        assert torch.equal(tensor, TENSORS[name].bfloat16())
        digest = hashlib.sha256(bytes(tensor.view(torch.uint8).flatten().tolist())).hexdigest()
        assert body["expected_checksums"][name] == digest
    assert two.bodies(LOAD)[0]["serialized_named_tensors"] == [payload, payload]
    assert (report.num_bytes, report.sent_bytes, report.verified) == (2 * 56, (112,), 4)


def test_a_push_pauses_nothing_and_unloads_what_is_too_old(make):
    with SlotServer() as server:
        pusher = make(server)
        reports = [push(pusher, version, keep_requests=True) for version in (1, 2, 3, 4)]
        assert server.names(LOAD) == [f"{version}@ours" for version in (1, 2, 3, 4)]
        assert server.names(UNLOAD) == ["1@ours", "2@ours"]
        pusher.close()
        assert server.names(UNLOAD) == [f"{version}@ours" for version in (1, 2, 3, 4)]
    assert set(server.paths) == {*LOADED, UNLOAD} and {r.verified for r in reports} == {None}
    assert "expected_checksums" not in server.bodies(LOAD)[0]


def test_a_push_that_failed_on_one_server_is_repeated(make):
    with SlotServer() as one, SlotServer(**{LOAD[1:]: [(500, 0.0)]}) as two:
        pusher = make(one, two)
        with pytest.raises(WeightPushError, match=f"{two.url}{LOAD} answered 500"):
            push(pusher, 3)
        assert NAME not in one.paths, "no request names a version that a server lacks"
        push(pusher, 3)
        assert one.names(UNLOAD) == ["3@ours"] and two.names(UNLOAD) == []
        assert one.version == two.version == "3@ours"


def test_servers_that_are_new_or_were_started_again_get_the_next_adapter(make):
    with SlotServer() as one, SlotServer() as two:
        pusher = make(one)
        push(pusher, 1)
        one.startup_time = {"load_weight": 2.5}  # it has lost its adapters
        push(pusher, 1)
        assert one.names(UNLOAD) == []
        pusher.set_urls([two.url])
        push(pusher, 1)
        assert two.names(LOAD) == ["1@ours"]


def test_only_servers_that_are_new_are_compared_with_the_base(make):
    with SlotServer() as one, SlotServer() as two:
        pusher, compared = make(one, verifies=True), []
        pusher.verifier.verify = lambda servers, digests, what: compared.append(what) or 5
        assert [push(pusher, version).verified for version in (1, 2)] == [7, 2]
        pusher.set_urls([one.url, two.url])
        assert [push(pusher, version).verified for version in (3, 4)] == [9, 4]
        assert len(compared) == 2 and "model.path = " in compared[0]


def test_a_server_with_other_settings_is_refused(make):
    with SlotServer() as server:
        settings = {server.url: {"page_size": 1}}
        with pytest.raises(WeightPushError, match="restarted with other settings: page_size"):
            push(make(server, settings=settings), 1)


def test_adapters_of_another_run_are_named(make):
    with SlotServer() as server:
        server.others = ("7@theirs", "chat")
        with pytest.raises(WeightPushError, match=r"has not loaded: 7@theirs, chat; .*7@theirs"):
            push(make(server), 1)
        assert NAME not in server.paths


def test_a_version_is_served_after_all_ranks_have_freed_memory_or_at_once(make):
    with SlotServer() as server:
        pusher = make(server)
        push(pusher, 1, serve=False)
        assert server.version == "0"
        pusher.serve(1)
        assert server.version == "1@ours"
        with pytest.raises(RuntimeError, match="colocated"):
            pusher.release_memory()


def test_attention_of_another_kind_has_no_slot():
    assert len(slot_weights(find_spec("qwen3-30b-a3b"), LORA)) == 2 * 48
    with pytest.raises(ConfigError, match=r"slots for q_proj, .* and none for model.*q_a_proj"):
        slot_weights(find_spec("deepseek-v3"), LORA)
