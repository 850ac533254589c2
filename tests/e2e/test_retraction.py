"""Responses that a real SGLang server takes back and computes again: kept, with the model's log-probs and routes."""

import threading
import time
from pathlib import Path

import httpx
import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.server.process import launch_server
from megatron_rl.rollout.server.server_info import server_info
from tests.e2e.reference import TINY_SPEC, assert_is_from
from tests.e2e.test_rollout import running_requests
from tests.fake_server import wait_for

SETTINGS = {"temperature": 1.0, "stop_token_ids": (1,)}


def prompts(number: int) -> list[Prompt]:
    return [Prompt(id=f"q{i}", text="", token_ids=(5, 9, 2 + i, 40, 7, 22, 31, 8), label="") for i in range(number)]


def check(groups: list[RolloutGroup], client: RolloutClient, checkpoint: Path) -> None:
    """No sample was refused, some were retracted, and there is no wrong row in any."""
    counters = client.counters
    assert counters.dropped.total() == counters.failures.total() == counters.redrawn_samples == 0
    assert 0 < counters.retracted_samples < counters.retracted_tokens
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert rollout.missing_routes is None and rollout.routed_experts is not None
        assert_is_from(checkpoint, rollout)


def test_retracted_responses_are_kept_and_every_row_is_the_models(sglang_server, rollout_config, tiny_checkpoint):
    """Retracted on demand: what a full KV cache does to one request, this does to all that run."""

    def retract() -> None:
        with httpx.Client(base_url=sglang_server.url, timeout=60) as http:
            for _ in range(2):
                assert wait_for(lambda: running_requests(http) > 0, 20)
                time.sleep(0.05)
                http.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
                http.post("/continue_generation", json={}).raise_for_status()

    client = RolloutClient([sglang_server.url], rollout_config, spec=TINY_SPEC, want_routes=True)
    version = int(server_info(sglang_server.url).weight_version)
    thread = threading.Thread(target=retract)
    thread.start()
    groups = client.generate(prompts(4), 4, max_tokens=160, policy_version=version, **SETTINGS)
    thread.join()
    check(groups, client, tiny_checkpoint)


@pytest.mark.slow
def test_a_full_kv_cache_takes_responses_back_and_none_is_lost(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "16")  # as 4,096 is to responses of 16,000 tokens
    cfg = RolloutConfig(dtype="float32", max_total_tokens=1500, max_running_requests=64)
    with launch_server(tiny_checkpoint, cfg, device="cpu", log_path=tmp_path / "log", seed=0) as server:
        client = RolloutClient([server.url], cfg, spec=TINY_SPEC, want_routes=True)
        groups = client.generate(prompts(32), 16, max_tokens=200, policy_version=0, **SETTINGS)
    check(groups, client, tiny_checkpoint)
