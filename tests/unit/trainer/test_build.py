"""Building a run: rules about the size of a step, and what reward workers inherit."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from megatron_rl.config import load_config


def check(dp_size, run, parallel):
    from megatron_rl.models.fit import check_step

    sections = {"model": {"path": "x"}, "data": {"train": "x"}, "run": run, "parallel": parallel}
    check_step(load_config(None, [], sections), dp_size)


def test_replicas_get_whole_mini_batches():
    check(2, {"prompts_per_step": 8, "num_mini_batches": 4}, {})
    with pytest.raises(
        ValueError, match=r"prompts_per_step = 8 must be a multiple of 16 = data-parallel size 4"
    ):
        check(4, {"prompts_per_step": 8, "num_mini_batches": 4}, {})


def test_interleaved_stages_need_a_multiple_of_pp_responses():
    """Micro-batches come in multiples of pp, and none is empty."""
    interleaved = {"pp": 4, "vp": 2}
    check(1, {"prompts_per_step": 4, "num_mini_batches": 2, "group_size": 2}, interleaved)
    with pytest.raises(
        ValueError, match=r"6 responses per mini-batch.*multiple of parallel\.pp = 4"
    ):
        check(1, {"prompts_per_step": 4, "num_mini_batches": 2, "group_size": 3}, interleaved)
    check(1, {"prompts_per_step": 4, "num_mini_batches": 2, "group_size": 3}, {"pp": 4})


def test_the_api_key_is_kept_from_reward_workers(monkeypatch):
    from megatron_rl.rollout import standalone
    from megatron_rl.trainer import build_inference as setup

    hidden = []

    def pool(config, *, hidden_env=None):
        hidden.append(hidden_env)
        raise InterruptedError("this test needs no more")

    monkeypatch.setenv("KEY_OF_THE_SERVERS", "sesame")
    monkeypatch.setattr(setup, "RewardPool", pool)
    monkeypatch.setattr(standalone, "RewardPool", pool)
    monkeypatch.setattr(standalone, "served_model", lambda path: None)
    sections = {
        "model": {"path": "x"},
        "data": {"train": "x"},
        "rollout": {"api_key_env": "KEY_OF_THE_SERVERS"},
        "teachers": {"one": {"urls": ["http://127.0.0.1:2"], "api_key_env": "TEACHER_KEY"}},
    }
    cfg = load_config(None, [], sections)
    spec = SimpleNamespace(
        num_layers=1, moe_layers=(0,), top_k=1, num_experts=2, vocab_size=8, max_positions=256
    )
    found = setup.FoundServers(("http://127.0.0.1:1",), "bfloat16", {}, "run")
    with ExitStack() as stack, pytest.raises(InterruptedError):
        setup.make_leader(cfg, SimpleNamespace(dp_rank=0), spec, None, found, stack, None)
    with (
        pytest.raises(InterruptedError),
        standalone.StandaloneSampler(cfg, None, log_dir=Path(), console=None),
    ):
        pass
    assert hidden == [("KEY_OF_THE_SERVERS", "TEACHER_KEY")] * 2


def test_servers_on_gpus_of_the_ranks_are_refused_before_the_model_is_loaded(monkeypatch, tmp_path):
    """NCCL would refuse them at the first weight sync."""
    from megatron_rl.models.families import make_spec
    from megatron_rl.models.known import KNOWN
    from megatron_rl.plan.hardware import HARDWARE
    from megatron_rl.plan.refusals import Machine
    from megatron_rl.trainer import build, services

    sections = {"model": {"path": "x"}, "data": {"train": "x"}, "run": {"dir": str(tmp_path)}}
    rank_0 = SimpleNamespace(
        device=torch.device("cuda"), rank=0, world_size=4, destroy=lambda: None
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    readers = ("load_tokenizer", "load_prompt_files", "make_stream", "used_up_line")
    for name in (*readers, "locked", "from_rank_0"):
        monkeypatch.setattr(build, name, MagicMock())
    monkeypatch.setattr(build, "from_rank_0", lambda make, group=None: make())
    spec = make_spec(KNOWN["qwen3-30b-a3b"] | {"num_hidden_layers": 2})
    monkeypatch.setattr(build, "provider_spec", lambda model, device: spec)
    monkeypatch.setattr(build, "this_machine", lambda parallel: Machine(HARDWARE["h100"], 4, 8))
    monkeypatch.setattr(build, "make_parallel", lambda *args, **rest: rank_0)
    monkeypatch.setattr(services, "make_watchdog", lambda *args: MagicMock())
    monkeypatch.setattr(
        build, "Engine", MagicMock(side_effect=InterruptedError("the model is loaded"))
    )

    def start(rollouts=None, **rollout):
        with build.start_trainer(load_config(None, [], sections | {"rollout": rollout}), rollouts):
            raise AssertionError

    for broken in ({}, {"gpus": (3, 4)}, {"gpus": (4, 5), "server_args": ("--enable-nccl-nvls",)}):
        with pytest.raises(ValueError, match=r"rollout\.(gpus|server_args) = "):
            start(**broken)
    for rollout in ({"gpus": (4, 5)}, {"urls": ("http://a:1",)}, {"weight_sync": "disk"}):
        with pytest.raises(InterruptedError):
            start(**rollout)
    with pytest.raises(InterruptedError):
        start(Path("saved"))


@pytest.mark.parametrize(
    ("prompts", "replicas", "each"),
    [(1, 4, 1), (3, 2, 2), (4, 4, 1), (13, 2, 7), (100, 2, 8), (100, 1, 8)],
)
def test_every_replica_gets_equally_many_prompts_for_the_parity_check(prompts, replicas, each):
    from megatron_rl.engine.parity import probe_prompts

    probes = probe_prompts(list(range(prompts)), replicas)
    assert [len(probes[rank::replicas]) for rank in range(replicas)] == [each] * replicas
    assert probes[:prompts] == list(range(min(prompts, len(probes))))


def test_servers_and_sampling_are_awaited_on_the_host_group(monkeypatch):
    """Not on the default group, NCCL's, which would keep GPUs busy."""
    from megatron_rl.trainer import build_inference as build

    host = object()
    parallel = SimpleNamespace(
        rank=1, world_size=2, is_replica_leader=False, host_group=host, device=torch.device("cpu")
    )
    monkeypatch.setattr(build, "length_problems", lambda *_: [])
    groups = []

    def from_rank_0(make, group=None):
        groups.append(group)
        return build.FoundServers(("url",), "bfloat16", {}, "run")

    monkeypatch.setattr(build, "from_rank_0", from_rank_0)
    monkeypatch.setattr(build, "make_pusher", lambda *_: None)
    cfg = load_config(None, [], {"model": {"path": "x"}, "data": {"train": "x"}})
    engine = SimpleNamespace(parallel=parallel, spec=None, export_parts=iter)
    services = SimpleNamespace(console=SimpleNamespace(log=print))
    with ExitStack() as stack:
        inference, _ = build.make_inference(cfg, services, engine, None, stack)
    assert inference.group is host and groups == [host]


def test_client_and_weight_sync_of_a_run_name_its_versions_alike(monkeypatch):
    """By the number alone a run would take tokens that another one's weights sampled for its
    own.
    """
    from megatron_rl.trainer import build_inference as build

    given = {}
    monkeypatch.setattr(
        build,
        "RolloutClient",
        lambda *_, **settings: given.update(client=settings["run"]) or SimpleNamespace(),
    )
    monkeypatch.setattr(build, "RewardPool", lambda *_, **settings: ExitStack())
    monkeypatch.setattr(build, "make_runner", lambda *_: None)
    monkeypatch.setattr(
        build,
        "WeightPusher",
        lambda *_, **settings: given.update(pusher=settings["run"]) or SimpleNamespace(close=None),
    )
    monkeypatch.setattr(build.Ranks, "of", lambda parallel: None)
    cfg = load_config(None, [], {"model": {"path": "x"}, "data": {"train": "x"}})
    found = build.FoundServers(("http://127.0.0.1:1",), "bfloat16", {}, "5f0c9a1e")
    parallel = SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=1)
    spec = SimpleNamespace(vocab_size=8, max_positions=256)
    recording = SimpleNamespace(recorder=lambda *_: None)
    services = SimpleNamespace(recording=recording, trace=None)
    with ExitStack() as stack:
        build.make_leader(cfg, parallel, spec, None, found, stack, services)
        build.make_pusher(cfg, parallel, found, None, stack)
        stack.pop_all()
    assert given == {"client": "5f0c9a1e", "pusher": "5f0c9a1e"}


def test_colocated_has_one_source_on_gpus_and_else_all_on_this_machine(monkeypatch):
    from megatron_rl.trainer import build_inference as build

    def config(way):
        return load_config(
            None,
            [],
            {"model": {"path": "x"}, "data": {"train": "x"}, "rollout": {"weight_sync": way}},
        )

    cpu, gpu = (
        SimpleNamespace(device=torch.device(name), rank=0, world_size=32)
        for name in ("cpu", "cuda")
    )
    ways = ("distributed", "disk", "colocated")
    assert [build.max_sources(config(way), gpu) for way in ways] == [1, 32, 1]
    assert [build.max_sources(config(way), cpu) for way in ways] == [1, 32, 32]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    others = (
        {"rollout": {"host": "0.0.0.0", "api_key_env": "KEY"}},
        {"rollout": {"host": "10.0.0.1", "api_key_env": "KEY"}},
        {"rollout": {"urls": ["http://10.0.0.1:1"]}},
    )
    base = {"model": {"path": "x"}, "data": {"train": "x"}}
    most = ["--rollout.weight_sync_sources", "16"]
    reached = [
        build.max_sources(load_config(None, most, base | other), gpu) for other in ({}, *others)
    ]
    assert reached == [1, 1, 16, 16], "ranks on other machines cannot send to 127.0.0.1"
    monkeypatch.setattr(build, "WeightPusher", lambda *_, **settings: SimpleNamespace(close=None))
    monkeypatch.setattr(build.Ranks, "of", lambda parallel: None)
    found = build.FoundServers(("http://127.0.0.1:1",), "bfloat16", {}, "run")
    with ExitStack() as stack:
        with pytest.raises(
            ValueError,
            match=r"colocated with 32 training ranks, 8 of them on this machine: without GPUs",
        ):
            build.make_pusher(config("colocated"), cpu, found, None, stack)
        build.make_pusher(config("colocated"), gpu, found, None, stack)
        stack.pop_all()
