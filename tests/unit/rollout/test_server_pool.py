"""Servers of a run die, by kill -9, while it samples and while it pushes: the run continues, up to
a limit.
"""

import json
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.config import ConfigError
from megatron_rl.records import Prompt
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.server import process as server_module
from megatron_rl.rollout.server import server_pool as server_pool_module
from megatron_rl.rollout.server.server_info import ServerError
from megatron_rl.rollout.server.server_pool import UNPUSHED, ServerPool
from tests.fake_server import SPEC, wait_for
from tests.one_rank import make_server_pool, one_rank_config, one_rank_inference

WEIGHTS = {f"w{i}": torch.full((2, 3), float(i)) for i in range(4)}
# one comes twice
PROMPTS = [Prompt(id=f"q{i % 5}", text="", token_ids=(5, 9, 2 + i % 5), label="") for i in range(6)]


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    """Every server started is a stub process."""

    def command(model, rollout, *, port, weight_version, **rest) -> list[str]:
        options = ["--host", rollout.host, "--port", str(port), "--weight-version", weight_version]
        return [sys.executable, "-m", "tests.stub_server", *options]

    monkeypatch.setattr(server_module, "server_command", command)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return folder


def kill(server_pool: ServerPool, index: int) -> str:
    url = server_pool.slots[index].server.url
    server_pool.slots[index].server.process.kill()
    return url


def sample(inference) -> None:
    groups = inference.generate(PROMPTS, 2, temperature=1.0, max_tokens=8, stop_token_ids=())
    assert [group.prompt.id for group in groups] == [prompt.id for prompt in PROMPTS]
    assert all(
        (rollout.policy_versions == inference.version).all()
        for group in groups
        for rollout in group.rollouts
    )


def test_servers_start_together_with_logs_and_ports_of_their_own(checkpoint):
    said: list[str] = []
    with make_server_pool(one_rank_config(checkpoint, num_servers=3), said.append) as server_pool:
        assert len(set(server_pool.take())) == 3 and not said and server_pool.lost() == []
        processes = [slot.server.process for slot in server_pool.slots]
        assert all("stub is up" in server_pool.log_path(index).read_text() for index in range(3))
    assert all(process.poll() is not None for process in processes)


def test_a_dead_server_whose_log_was_deleted_is_replaced(checkpoint):
    said: list[str] = []
    with make_server_pool(one_rank_config(checkpoint), said.append) as server_pool:
        server_pool.log_path(0).unlink()
        kill(server_pool, 0)
        assert wait_for(lambda: server_pool.restarts == 1 and server_pool.slots[0].ready, 30)
        assert server_pool.take() == [server_pool.slots[0].server.url]
    assert any("status -9; restart 1 of at most 3" in line for line in said)


def test_options_that_the_run_chooses_on_gpus_are_logged(checkpoint):
    said: list[str] = []
    rollout = one_rank_config(checkpoint).rollout
    options = {"device": "cuda", "seed": 0, "log_dir": checkpoint, "log": said.append}
    with ServerPool(checkpoint, rollout, **options):
        (line,) = said
    assert line.startswith(
        "servers start with --mem-fraction-static 0.8 --moe-runner-backend triton;"
    )


def test_the_others_serve_until_a_dead_server_is_back_with_the_new_weights(checkpoint):
    said: list[str] = []
    cfg = one_rank_config(checkpoint, num_servers=2, weight_sync="disk")
    with (
        make_server_pool(cfg, said.append) as server_pool,
        one_rank_inference(cfg, SPEC, WEIGHTS.items, server_pool) as inference,
    ):
        inference.push(version=3)
        sample(inference)
        dead = kill(server_pool, 1)
        sample(inference)  # the client continues with the other one
        assert wait_for(lambda: server_pool.restarts == 1 and server_pool.slots[1].ready, 30)
        replacement = server_pool.slots[1].server.url
        assert replacement not in set(inference.urls), "it has no weights yet"
        assert (
            inference.pusher.servers.call("GET", replacement, "/model_info")["weight_version"]
            == UNPUSHED
        )
        inference.push(version=4)
        assert set(inference.urls) == {server_pool.slots[0].server.url, replacement}
        assert (
            inference.pusher.servers.call("GET", replacement, "/model_info")["weight_version"]
            == "4"
        )
        sample(inference)
    assert any(
        dead in line and "status -9" in line and "restart 1 of at most 3" in line for line in said
    )


def test_the_only_server_dies_while_it_samples_and_nothing_is_lost(checkpoint, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "0.5")
    cfg = one_rank_config(checkpoint, weight_sync="disk", max_concurrency=2, max_retries=0)
    with (
        make_server_pool(cfg) as server_pool,
        one_rank_inference(cfg, SPEC, WEIGHTS.items, server_pool) as inference,
    ):
        inference.push(version=7)
        log = server_pool.log_path(0)
        killer = threading.Thread(
            target=lambda: (
                wait_for(lambda: log.read_text().count("generating") >= 4, 30),
                kill(server_pool, 0),
            )
        )
        killer.start()
        sample(inference)
        killer.join()
        assert server_pool.restarts == 1 and inference.version == 7
        counters = inference.client.counters
        assert counters.samples == 2 * len(PROMPTS), (
            "groups that were whole when it died are not sampled again"
        )


def test_after_a_death_the_rest_of_a_step_sampled_ahead_comes_from_the_newer_weights(
    checkpoint, monkeypatch
):
    monkeypatch.setenv("STUB_SECONDS", "0.5")
    cfg = one_rank_config(checkpoint, weight_sync="disk", max_concurrency=2, max_retries=0)
    with (
        make_server_pool(cfg) as server_pool,
        one_rank_inference(cfg, SPEC, WEIGHTS.items, server_pool) as inference,
    ):
        inference.push(version=7)
        groups = [Group(prompt, 2) for prompt in PROMPTS]
        inference.start(groups, temperature=1.0, max_tokens=8, stop_token_ids=())
        assert wait_for(lambda: server_pool.log_path(0).read_text().count("generating") >= 4, 30)
        kill(server_pool, 0)
        inference.wait(version=8)
        assert inference.version == 8
        versions = [
            {int(v) for r in group.rollout_group().rollouts for v in r.policy_versions}
            for group in groups
        ]
    assert sorted(map(tuple, versions)) == sorted(
        [(7,)] * versions.count({7}) + [(8,)] * versions.count({8})
    )
    assert versions.count({7}) >= 2 and versions.count({8}) >= 2


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_server_that_dies_in_a_push_gets_no_request_before_it_is_replaced(
    num_servers, checkpoint
):
    kills = ["armed"]

    def export():
        for name, tensor in WEIGHTS.items():
            yield name, tensor
            if kills and inference.version == 1:
                kills.pop()
                dead.append(kill(server_pool, num_servers - 1))

    dead: list[str] = []
    cfg = one_rank_config(checkpoint, weight_sync="disk", num_servers=num_servers)
    with (
        make_server_pool(cfg) as server_pool,
        one_rank_inference(cfg, SPEC, export, server_pool) as inference,
    ):
        inference.push(version=1)
        inference.push(version=2)
        assert len(dead) == 1 and dead[0] not in inference.urls and inference.version == 2
        sample(inference)
        assert wait_for(lambda: all(slot.ready for slot in server_pool.slots), 30)
        inference.push(version=3)
        assert len(inference.urls) == num_servers
        sample(inference)


def test_a_server_that_hangs_is_killed_and_replaced(checkpoint, monkeypatch):
    monkeypatch.setattr(server_pool_module, "ANSWER_SECONDS", 3.0)
    said: list[str] = []
    with make_server_pool(one_rank_config(checkpoint, num_servers=2), said.append) as server_pool:
        _, hung = server_pool.take()
        server_pool.slots[1].server.process.send_signal(signal.SIGSTOP)
        assert server_pool.lost() == [hung] and server_pool.restarts == 1
    assert any(hung in line and "does not answer within 3 s: killed" in line for line in said)


def test_one_death_too_many_stops_with_the_last_log_lines(checkpoint):
    cfg = one_rank_config(checkpoint, weight_sync="disk", max_server_restarts=1)
    with (
        make_server_pool(cfg) as server_pool,
        one_rank_inference(cfg, SPEC, WEIGHTS.items, server_pool) as inference,
    ):
        inference.push(version=0)
        kill(server_pool, 0)
        sample(inference)
        dead = kill(server_pool, 0)
        with pytest.raises(
            ServerError, match=r"rollout\.max_server_restarts = 1 restarts are spent"
        ) as caught:
            sample(inference)
    assert (
        dead in str(caught.value)
        and "status -9" in str(caught.value)
        and "stub is up" in str(caught.value)
    )


def test_without_restarts_the_first_death_stops(checkpoint):
    cfg = one_rank_config(checkpoint, weight_sync="disk", max_server_restarts=0)
    with (
        make_server_pool(cfg) as server_pool,
        one_rank_inference(cfg, SPEC, WEIGHTS.items, server_pool) as inference,
    ):
        inference.push(version=0)
        dead = kill(server_pool, 0)
        with pytest.raises(ServerError, match="max_server_restarts = 0") as caught:
            inference.push(version=1)
    assert dead in str(caught.value) and server_pool.restarts == 0


def test_a_server_that_never_answers_is_stopped_with_the_others(checkpoint, monkeypatch):
    command = server_module.server_command

    def one_sleeps(*args, **settings):
        if any("server_1" in str(path) for path in (checkpoint.parent / "runs/run").glob("*")):
            return ["sleep", "600"]
        return command(*args, **settings)

    monkeypatch.setattr(server_module, "server_command", one_sleeps)
    cfg = one_rank_config(checkpoint, num_servers=3, start_timeout_seconds=3.0)
    server_pool = make_server_pool(cfg)
    start = time.monotonic()
    with pytest.raises(
        ServerError, match=r"was not ready after rollout\.start_timeout_seconds = 3"
    ):
        with server_pool:
            pass
    assert time.monotonic() - start < 300
    assert all(slot.server.process.poll() is not None for slot in server_pool.slots)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"server_args": ("--host", "0.0.0.0")}, r"server_args has --host.*rollout\.host"),
        ({"server_args": ("--api-key=secret",)}, r"--api-key.*rollout\.api_key_env"),
        ({"server_args": ("--admin-api", "x")}, "--admin-api"),
        ({"server_args": ("--log-level", "info"), "api_key_env": "KEY"}, "logs its API key"),
        ({"urls": ("http://a:1",), "num_servers": 2}, "num_servers = 2.*no effect"),
        ({"num_servers": 2, "gpus": (0, 1, 2)}, r"gpus = \[0, 1, 2\].*multiple of num_servers = 2"),
        ({"num_servers": 2, "gpus": (1, 1)}, "distinct"),
    ],
)
def test_settings_that_break_a_rule_are_refused(rollout, message, checkpoint):
    with pytest.raises(ConfigError, match=message) as caught:
        one_rank_config(checkpoint, **rollout)
    assert "secret" not in str(caught.value)


def test_gpus_are_dealt_out_in_order(checkpoint, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        server_module, "spawn", lambda command, device, log, gpus: seen.setdefault(command[6], gpus)
    )
    server_pool = make_server_pool(
        one_rank_config(checkpoint, num_servers=2, gpus=(4, 5, 6, 7), port=30000)
    )
    monkeypatch.setattr(server_module, "check_port_is_free", lambda host, port: None)
    for index in range(2):
        server_pool._start(index)
    assert seen == {"30000": (4, 5), "30001": (6, 7)}


def test_any_log_level_is_allowed_without_a_key(checkpoint):
    one_rank_config(checkpoint, server_args=("--log-level", "info", "--tp-size", "2"))
