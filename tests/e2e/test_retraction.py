"""Responses that a real SGLang server takes back and computes again: kept, with the model's
log-probs and routes.
"""

import threading
import time
from pathlib import Path

import httpx
import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.server.server_info import server_info
from megatron_rl.rollout.server.server_pool import ServerPool
from tests.e2e.reference import TINY_SPEC, assert_is_from, wrong_tokens
from tests.e2e.test_rollout import running_requests
from tests.fake_server import wait_for

SETTINGS = {"temperature": 1.0, "stop_token_ids": (1,)}


def prompts(number: int) -> list[Prompt]:
    return [
        Prompt(id=f"q{i}", text="", token_ids=(5, 9, 2 + i, 40, 7, 22, 31, 8), label="")
        for i in range(number)
    ]


def check(groups: list[RolloutGroup], client: RolloutClient, checkpoint: Path) -> None:
    """No sample was refused, some were retracted, and there is no wrong row in any."""
    counters = client.counters
    assert counters.dropped.total() == counters.failures.total() == counters.redrawn_samples == 0
    assert 0 < counters.retracted_samples < counters.retracted_tokens
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert rollout.missing_routes is None and rollout.routed_experts is not None
        assert_is_from(checkpoint, rollout)


def test_retracted_responses_are_kept_and_every_row_is_the_models(
    sglang_server, rollout_config, tiny_checkpoint
):
    """Retracted on demand: what a full KV cache does to one request, this does to all that run."""

    def retract() -> None:
        with httpx.Client(base_url=sglang_server.url, timeout=60) as http:
            for _ in range(2):
                assert wait_for(lambda: running_requests(http) > 0, 20)
                time.sleep(0.05)
                http.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
                http.post("/continue_generation", json={}).raise_for_status()

    client = RolloutClient(
        [sglang_server.url], rollout_config, SampleRules(TINY_SPEC, want_routes=True)
    )
    version = int(server_info(sglang_server.url).weight_version)
    thread = threading.Thread(target=retract)
    thread.start()
    groups = client.generate(prompts(4), 4, max_tokens=160, policy_version=version, **SETTINGS)
    thread.join()
    check(groups, client, tiny_checkpoint)


SERVERS = {
    "as_started": (),
    "no_overlap": ("--disable-overlap-schedule",),
    "chunks_of_16": ("--chunked-prefill-size", "16"),
    "chunks_of_16_no_overlap": ("--chunked-prefill-size", "16", "--disable-overlap-schedule"),
    "mixed_chunks": ("--chunked-prefill-size", "64", "--enable-mixed-chunk"),
    "no_prefix_cache": ("--disable-radix-cache",),
    "four_steps": ("--num-continuous-decode-steps", "4"),
    "two_ranks": ("--tp-size", "2"),
    "parsers": (
        "--reasoning-parser",
        "qwen3",
        "--tool-call-parser",
        "qwen25",
        "--grammar-backend",
        "none",
    ),
}
"""Options of a server whose KV cache is too small for its requests."""
CACHE_TOKENS = 1500
LEAST_TOKENS = 10_000


def shared_prompts(number: int) -> list[Prompt]:
    """40 to 71 tokens, of which all share 24: more than one chunk of 16, and hits in the prefix
    cache.
    """
    shared = [3 + i * 7 % 61 for i in range(24)]
    return [
        Prompt(
            id=f"q{i}",
            text="",
            token_ids=(*shared, *(3 + (i * 5 + j * 11) % 61 for j in range(16 + i % 32))),
            label="",
        )
        for i in range(number)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "num_servers"),
    [*((options, 1) for options in SERVERS.values()), ((), 2), ((), 4)],
    ids=[*SERVERS, "two_servers", "four_servers"],
)
def test_every_row_of_a_crowded_server_is_the_models(
    options, num_servers, tiny_checkpoint, tmp_path, monkeypatch
):
    """Retraction, eviction from the prefix cache and hits in it: 10,000 tokens pass through 1,500
    slots.  None is wrong.
    """
    # as 4,096 is to responses of 16,000 tokens
    monkeypatch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "16")
    if "--tp-size" in options:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    cfg = RolloutConfig(
        dtype="float32",
        max_total_tokens=CACHE_TOKENS,
        server_args=options,
        num_servers=num_servers,
        port=0,
    )
    pool = ServerPool(
        tiny_checkpoint, cfg, device="cpu", log_dir=tmp_path, log=print, seed=0, weight_version="0"
    )  # fmt: skip
    with pool:
        client = RolloutClient(pool.take(), cfg, SampleRules(TINY_SPEC, want_routes=True))
        groups = client.generate(
            shared_prompts(32 * num_servers), 8, max_tokens=160, policy_version=0, **SETTINGS
        )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    wrong = [wrong_tokens(tiny_checkpoint, rollout) for rollout in rollouts]
    tokens, counters = sum(rollout.response_length for rollout in rollouts), client.counters
    print(
        f"{' '.join(options) or 'no option'}, {num_servers} server(s): {tokens:,} response tokens,"
        f" {sum(len(rollout.tokens) - 1 for rollout in rollouts):,} rows,"
        f" {counters.retracted_samples} of {len(rollouts)} retracted,"
        f" {sum(each[0] for each in wrong)} log-probs and {sum(each[1] for each in wrong)} rows"
        " wrong"
    )
    assert tokens >= LEAST_TOKENS and counters.retracted_samples > 0
    assert counters.dropped.total() == counters.failures.total() == counters.redrawn_samples == 0
    assert all(rollout.missing_routes is None for rollout in rollouts)
    assert all(each == (0, 0) for each in wrong)
