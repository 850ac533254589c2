"""Two real SGLang servers: what they serve after every push, and how a run continues when one is
killed with -9.

PUSHES (environment, default 20) is the number of pushes for each transport.
"""

import itertools
import os
import threading
import time

import pytest
from safetensors.torch import load_file

from megatron_rl.records import Prompt
from megatron_rl.rollout.server.server_info import check_identical, check_server, server_info
from tests.e2e.reference import TINY_SPEC, assert_is_from
from tests.fake_server import wait_for
from tests.one_rank import make_server_pool, one_rank_config, one_rank_inference
from tests.tiny import random_checkpoint

pytestmark = pytest.mark.slow

PUSHES = int(os.environ.get("PUSHES", "20"))
PROMPTS = [
    Prompt(id=f"q{i}", text="", token_ids=(5, 9, 13, 40, 7, 22, 31, 8 + i % 2), label="")
    for i in range(12)
]
VERSIONS = itertools.count(1)


@pytest.fixture(scope="module")
def config(tiny_checkpoint):
    return one_rank_config(
        tiny_checkpoint,
        num_servers=2,
        max_total_tokens=4096,
        max_running_requests=16,
        max_server_restarts=4,
        request_timeout_seconds=120.0,
    )


@pytest.fixture(scope="module")
def server_pool(config):
    start = time.monotonic()
    with make_server_pool(config) as server_pool:
        print(f"two servers up in {time.monotonic() - start:.1f} s")
        infos = [server_info(url) for url in server_pool.take()]
        check_identical(infos)
        for info in infos:
            check_server(info, TINY_SPEC, want_routes=True, dtype="float32")
            assert info.weight_version == "unpushed"
        yield server_pool


@pytest.fixture
def serve(config, server_pool):
    """serve(transport, export) -> context manager of a Serving on both servers."""

    def make(transport, export):
        rollout = config.rollout.model_copy(update={"weight_sync": transport})
        return one_rank_inference(
            config.model_copy(update={"rollout": rollout}), TINY_SPEC, export, server_pool
        )

    return make


def assert_every_server_serves(inference, checkpoint, num_servers: int) -> None:
    """The same prompt as ever: a prefix cached under other weights would give other log-probs or
    routes.
    """
    client, urls = inference.client, inference.urls
    assert len(urls) == num_servers
    for url in urls:
        client.set_urls([url])
        for group in inference.generate(
            PROMPTS[:1], 2, temperature=1.0, max_tokens=12, stop_token_ids=()
        ):
            for rollout in group.rollouts:
                assert (rollout.policy_versions == inference.version).all()
                assert_is_from(checkpoint, rollout)
    client.set_urls(urls)


@pytest.mark.parametrize("transport", ["distributed", "disk", "colocated"])
def test_both_servers_serve_the_new_model_after_every_push(transport, serve, tmp_path):
    seconds = []
    checkpoints = [random_checkpoint(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3)]
    weights = [load_file(checkpoint / "model.safetensors") for checkpoint in checkpoints]
    served = 0
    with serve(transport, lambda: weights[served].items()) as inference:
        for push in range(PUSHES):
            served = push % 3
            start = time.monotonic()
            inference.push(next(VERSIONS))
            seconds.append(time.monotonic() - start)
            assert_every_server_serves(inference, checkpoints[served], 2)
        assert inference.client.counters.dropped.total() == 0
    print(
        f"{transport}: {PUSHES} pushes to 2 servers, median {sorted(seconds)[PUSHES // 2]:.2f} s,"
        f" max {max(seconds):.2f} s"
    )


def test_a_kill_during_generation_loses_nothing(serve, server_pool, tiny_checkpoint):
    weights = load_file(tiny_checkpoint / "model.safetensors")
    with serve("distributed", weights.items) as inference:
        inference.push(next(VERSIONS))
        progress = threading.Event()
        killed = server_pool.slots[1].server

        def kill():
            assert progress.wait(120)
            killed.process.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        start, restarts = time.monotonic(), server_pool.restarts
        groups = inference.generate(
            PROMPTS, 4, temperature=1.0, max_tokens=200, stop_token_ids=(), on_progress=progress.set
        )
        print(
            f"killed one of two while sampling: {len(groups)} groups after"
            f" {time.monotonic() - start:.1f} s"
        )
        thread.join()
        assert [group.prompt.id for group in groups] == [prompt.id for prompt in PROMPTS]
        assert all(len(group.rollouts) == 4 for group in groups)
        for group in groups:
            assert_is_from(tiny_checkpoint, group.rollouts[0])
        assert wait_for(lambda: server_pool.restarts == restarts + 1, 10)
        start = time.monotonic()
        assert wait_for(lambda: server_pool.slots[1].ready, 300)
        print(f"its replacement answered {time.monotonic() - start:.1f} s later")
        inference.push(next(VERSIONS))
        assert_every_server_serves(inference, tiny_checkpoint, 2)


@pytest.mark.parametrize("transport", ["distributed", "disk", "colocated"])
def test_a_kill_during_a_push_heals(transport, serve, server_pool, tmp_path):
    checkpoint = random_checkpoint(tmp_path / "new", seed=5)
    weights = load_file(checkpoint / "model.safetensors")
    armed = []

    def export():
        for index, item in enumerate(weights.items()):
            yield item
            if armed and index == len(weights) // 2:
                armed.pop().process.kill()

    with serve(transport, export) as inference:
        inference.push(next(VERSIONS))
        armed.append(server_pool.slots[0].server)
        inference.pusher.bucket_bytes = 100_000  # several buckets: it dies between two of them
        start, restarts = time.monotonic(), server_pool.restarts
        inference.push(next(VERSIONS))
        print(
            f"{transport}: killed one of two in a push, the other had the version after"
            f" {time.monotonic() - start:.1f} s"
        )
        assert server_pool.restarts == restarts + 1
        assert_every_server_serves(inference, checkpoint, 1)
        assert wait_for(lambda: server_pool.slots[0].ready, 300)
        inference.push(next(VERSIONS))
        assert_every_server_serves(inference, checkpoint, 2)
