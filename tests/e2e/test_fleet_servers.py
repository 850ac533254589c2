"""Two real SGLang servers: what they serve after every push, and what is left of a run when one is killed with -9.

PUSHES (environment, default 20) is the number of pushes for each transport.
"""

import itertools
import os
import threading
import time

import pytest
from safetensors.torch import load_file

from megatron_rl.records import Prompt
from megatron_rl.rollout.handshake import check_alike, check_server, server_info
from tests.e2e.reference import TINY_SPEC, assert_is_from
from tests.fake_server import wait_for
from tests.one_rank import make_fleet, one_rank_config, one_rank_serving
from tests.tiny import random_checkpoint

pytestmark = pytest.mark.slow

PUSHES = int(os.environ.get("PUSHES", "20"))
PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(5, 9, 13, 40, 7, 22, 31, 8 + i % 2), label="") for i in range(12)]
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
def fleet(config):
    start = time.monotonic()
    with make_fleet(config) as fleet:
        print(f"two servers up in {time.monotonic() - start:.1f} s")
        infos = [server_info(url) for url in fleet.take()]
        check_alike(infos)
        for info in infos:
            check_server(info, TINY_SPEC, want_routes=True, dtype="float32")
            assert info.weight_version == "unpushed"
        yield fleet


@pytest.fixture
def serve(config, fleet):
    """serve(transport, export) -> context manager of a Serving on both servers."""

    def make(transport, export):
        rollout = config.rollout.model_copy(update={"push": transport})
        return one_rank_serving(config.model_copy(update={"rollout": rollout}), TINY_SPEC, export, fleet)

    return make


def assert_every_server_serves(serving, checkpoint, num_servers: int) -> None:
    """The same prompt as ever: a prefix cached under other weights would give other log-probs or routes."""
    client, urls = serving.client, serving.urls
    assert len(urls) == num_servers
    for url in urls:
        client.set_urls([url])
        for group in serving.generate(PROMPTS[:1], 2, temperature=1.0, max_tokens=12, stop_token_ids=()):
            for rollout in group.rollouts:
                assert (rollout.policy_versions == serving.version).all()
                assert_is_from(checkpoint, rollout)
    client.set_urls(urls)


@pytest.mark.parametrize("transport", ["distributed", "disk", "colocated"])
def test_both_servers_serve_the_new_model_after_every_push(transport, serve, tmp_path):
    seconds = []
    checkpoints = [random_checkpoint(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3)]
    weights = [load_file(checkpoint / "model.safetensors") for checkpoint in checkpoints]
    served = 0
    with serve(transport, lambda: weights[served].items()) as serving:
        for push in range(PUSHES):
            served = push % 3
            start = time.monotonic()
            serving.push(next(VERSIONS))
            seconds.append(time.monotonic() - start)
            assert_every_server_serves(serving, checkpoints[served], 2)
        assert serving.client.counters.dropped.total() == 0
    print(f"{transport}: {PUSHES} pushes to 2 servers, median {sorted(seconds)[PUSHES // 2]:.2f} s, max {max(seconds):.2f} s")


def test_a_kill_during_generation_loses_nothing(serve, fleet, tiny_checkpoint):
    weights = load_file(tiny_checkpoint / "model.safetensors")
    with serve("distributed", weights.items) as serving:
        serving.push(next(VERSIONS))
        progress = threading.Event()
        killed = fleet.slots[1].server

        def kill():
            assert progress.wait(120)
            killed.process.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        start, restarts = time.monotonic(), fleet.restarts
        groups = serving.generate(PROMPTS, 4, temperature=1.0, max_tokens=200, stop_token_ids=(), on_progress=progress.set)
        print(f"killed one of two while sampling: {len(groups)} groups after {time.monotonic() - start:.1f} s")
        thread.join()
        assert [group.prompt.id for group in groups] == [prompt.id for prompt in PROMPTS]
        assert all(len(group.rollouts) == 4 for group in groups)
        for group in groups:
            assert_is_from(tiny_checkpoint, group.rollouts[0])
        assert wait_for(lambda: fleet.restarts == restarts + 1, 10)
        start = time.monotonic()
        assert wait_for(lambda: fleet.slots[1].ready, 300)
        print(f"its replacement answered {time.monotonic() - start:.1f} s later")
        serving.push(next(VERSIONS))
        assert_every_server_serves(serving, tiny_checkpoint, 2)


@pytest.mark.parametrize("transport", ["distributed", "disk", "colocated"])
def test_a_kill_during_a_push_heals(transport, serve, fleet, tmp_path):
    checkpoint = random_checkpoint(tmp_path / "new", seed=5)
    weights = load_file(checkpoint / "model.safetensors")
    armed = []

    def export():
        for index, item in enumerate(weights.items()):
            yield item
            if armed and index == len(weights) // 2:
                armed.pop().process.kill()

    with serve(transport, export) as serving:
        serving.push(next(VERSIONS))
        armed.append(fleet.slots[0].server)
        serving.pusher.bucket_bytes = 100_000  # several buckets: it dies between two of them
        start, restarts = time.monotonic(), fleet.restarts
        serving.push(next(VERSIONS))
        print(f"{transport}: killed one of two in a push, the other had the version after {time.monotonic() - start:.1f} s")
        assert fleet.restarts == restarts + 1
        assert_every_server_serves(serving, checkpoint, 1)
        assert wait_for(lambda: fleet.slots[0].ready, 300)
        serving.push(next(VERSIONS))
        assert_every_server_serves(serving, checkpoint, 2)
