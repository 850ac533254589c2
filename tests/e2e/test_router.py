"""Servers with a router in front: samples through smg are the workers'; sglang-router drops expert
ids.  Both are named.

ROUTER_PYTHON (environment): an interpreter that has smg 1.13.0 (`pip install smg`), and perhaps
sglang-router 0.3.2, in an environment of its own; without it these tests are skipped.
"""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.request import RolloutError
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.server.ports import free_port
from megatron_rl.rollout.server.server_info import ServerError, check_server, server_info
from tests.e2e.reference import TINY_SPEC, assert_is_from
from tests.e2e.test_push import PROMPT, make_pusher, next_version  # noqa: F401
from tests.fake_server import wait_for
from tests.tiny import random_checkpoint

pytestmark = pytest.mark.slow

PUSHES = int(os.environ.get("PUSHES", "20"))
PYTHON = os.environ.get("ROUTER_PYTHON", "")


@contextmanager
def router(module: str, worker: str, log_path: Path):
    """A router of `module` in front of one worker; yields its URL once it answers a request."""
    if (
        not PYTHON
        or subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True).returncode
    ):
        pytest.skip(f"ROUTER_PYTHON = {PYTHON!r} must name a Python that can import {module}")
    port, prometheus = free_port(), free_port()
    command = [
        PYTHON,
        "-m",
        f"{module}.launch_router",
        "--worker-urls",
        worker,
        "--policy",
        "round_robin",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(prometheus)]
    url = f"http://127.0.0.1:{port}"
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}

    def answers() -> bool:
        try:
            return (
                httpx.post(f"{url}/generate", json=body, timeout=10, trust_env=False).status_code
                == 200
            )
        except httpx.TransportError:
            return False

    with open(log_path, "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            assert wait_for(answers, 90), log_path.read_text()[-3000:]
            yield url
        finally:
            process.kill()


def sample(url, rollout_config, version: int):
    client = RolloutClient([url], rollout_config, SampleRules(TINY_SPEC, want_routes=True))
    settings = {
        "temperature": 1.0,
        "max_tokens": 12,
        "stop_token_ids": (),
        "policy_version": version,
    }
    (group,) = client.generate([PROMPT], 2, **settings)
    return group.rollouts


@pytest.mark.parametrize("transport", ["distributed", "disk", "colocated"])
def test_through_smg_every_sample_is_the_new_models(
    transport,
    make_pusher,  # noqa: F811
    sglang_server,
    rollout_config,
    tmp_path,
):
    """Weights are pushed to the worker itself: a router passes no control call on."""
    pusher = make_pusher(transport)
    checkpoints = [random_checkpoint(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3)]
    first = next_version(sglang_server)
    with router("smg", sglang_server.url, tmp_path / "smg.log") as url:
        for push in range(PUSHES):
            checkpoint = checkpoints[push % 3]
            pusher.push(load_file(checkpoint / "model.safetensors").items(), first + push)
            for rollout in sample(url, rollout_config, first + push):
                assert_is_from(checkpoint, rollout)
        with pytest.raises(ServerError, match="is a router in front of SGLang servers"):
            server_info(url)


def test_a_real_router_that_drops_expert_ids_is_named(sglang_server, rollout_config, tmp_path):
    with router("sglang_router", sglang_server.url, tmp_path / "router.log") as url:
        with pytest.raises(
            ServerError, match="is a router in front of SGLang servers.*drops return_routed_experts"
        ):
            check_server(server_info(url), TINY_SPEC, want_routes=True)
        version = int(server_info(sglang_server.url).weight_version)
        # and a client that skips the check gets no samples
        with pytest.raises(RolloutError, match="routes_missing"):
            sample(url, rollout_config, version)
