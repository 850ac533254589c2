"""Groups sampled from a real SGLang server: the answers are what the model computes, and no process
is left.
"""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch

from megatron_rl.batch.pack import Sample, pack
from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.engine.logprobs import token_logprobs
from megatron_rl.records import Prompt
from megatron_rl.records.row_sets import sets_of_tokens
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.server.sampling_defaults import (
    check_masks,
    check_sampling,
    is_scaled,
    probe_logprobs,
)
from megatron_rl.rollout.server.server_info import ServerError, check_server, server_info
from tests.e2e.reference import TIE, TINY_SPEC, assert_is_from, hf_model, lost_probability
from tests.fake_server import wait_for
from tests.referee import forced, rollout_routes

PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(5, 9, 2 + i, 40, 7), label="") for i in range(6)]


@pytest.fixture
def sample(sglang_server, rollout_config):
    """sample(prompts, group_size, **overrides) -> (groups, client) with the weights the shared
    server has now.
    """
    version = int(server_info(sglang_server.url).weight_version)

    def call(prompts=PROMPTS, group_size=4, want_routes=True, **overrides):
        client = RolloutClient(
            [sglang_server.url], rollout_config, SampleRules(TINY_SPEC, want_routes)
        )
        settings = {
            "temperature": 1.0,
            "max_tokens": 24,
            "stop_token_ids": (1, 2),
            "policy_version": version,
        }
        return client.generate(prompts, group_size, **(settings | overrides)), client

    return call


def test_logprobs_and_routes_are_the_models(sample, tiny_checkpoint):
    groups, client = sample()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 24 and len({rollout.id for rollout in rollouts}) == 24
    assert len({tuple(rollout.tokens) for rollout in rollouts}) > 12  # samples, not copies
    for group in groups:
        for rollout in group.rollouts:
            assert tuple(rollout.tokens[: rollout.prompt_length]) == group.prompt.token_ids
            assert rollout.routed_experts.shape == (len(rollout.tokens) - 1, 4, 2)
            assert rollout.finish_reason == ("stop" if rollout.tokens[-1] in (1, 2) else "length")
            assert rollout.finish_reason == "stop" or rollout.response_length == 24
            assert_is_from(tiny_checkpoint, rollout)
    assert (client.counters.requests, client.counters.retries, client.counters.dropped.total()) == (
        6,
        0,
        0,
    )


def test_logprobs_are_of_the_tempered_distribution_and_zero_is_greedy(sample, tiny_checkpoint):
    groups, _ = sample(temperature=0.6)
    for rollout in groups[0].rollouts:
        assert_is_from(tiny_checkpoint, rollout, temperature=0.6)
    groups, _ = sample(temperature=0.0, want_routes=False)
    for group in groups:
        assert len({tuple(rollout.tokens) for rollout in group.rollouts}) == 1
        assert_is_from(tiny_checkpoint, group.rollouts[0])
        assert group.rollouts[0].routed_experts is None


@pytest.mark.parametrize(
    "truncation", [Truncation(0.9, 20, 0.0), Truncation(1.0, 5, 0.0), Truncation(0.99, 64, 0.4)]
)
def test_logprobs_over_kept_sets_are_the_trainers(sample, tiny_checkpoint, truncation):
    groups, _ = sample(temperature=0.7, truncation=truncation)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 24 and len({tuple(rollout.tokens) for rollout in rollouts}) > 12
    with_sets, without = zip(
        *(differences(tiny_checkpoint, rollout, 0.7) for rollout in rollouts), strict=True
    )
    sizes = np.concatenate([rollout.sampling_mask.sizes for rollout in rollouts])
    assert sizes.max() <= truncation.top_k and sizes.mean() > 1.5
    with_sets, without = np.concatenate(with_sets), np.concatenate(without)
    print(f"{truncation}: kept {sizes.mean():.1f} of 64; "
          f"|log mu~ - log pi~| max {with_sets.max():.1e}, "
          f"|log mu~ - log pi| mean {without.mean():.2f} max {without.max():.2f}")  # fmt: skip
    assert with_sets.max() <= 1e-4 and without.mean() > 0.05


@torch.no_grad()
def differences(checkpoint, rollout, temperature):
    """|log mu~ - log pi~| over the kept sets, and |log mu~ - log pi| over the vocabulary, of each
    sampled token.
    """
    batch = pack([Sample(rollout, 0.0)])
    # with the recorded experts: a near tie is rounding, and all later tokens follow from it
    with forced(hf_model(checkpoint), rollout_routes(rollout)):
        logits = hf_model(checkpoint)(torch.from_numpy(rollout.tokens)[None]).logits[0]
        assert (lost_probability(checkpoint, rollout) <= TIE).all()
    kept = sets_of_tokens(batch.sampling_masks, batch.set_index.numpy())
    found = token_logprobs(logits, batch.labels, kept, vocab_size=64, temperature=temperature)
    mu = batch.rollout_logprobs
    both = (mu - found.logprobs).abs(), (mu - found.logprobs - found.log_mass).abs()
    return [values[batch.loss_mask].numpy() for values in both]


def test_kept_sets_of_a_response_that_was_cut_and_continued(
    sglang_server, rollout_config, tiny_checkpoint
):
    cfg = rollout_config.model_copy(
        update={"partial": "resume", "over_sample": 1.0, "max_staleness": 1}
    )
    client = RolloutClient([sglang_server.url], cfg, SampleRules(TINY_SPEC, want_routes=True))
    version = int(server_info(sglang_server.url).weight_version)
    sampling = Sampling(1.0, 200, (), version, truncation=Truncation(0.9, 20, 0.0))
    groups = [
        Group(prompt, 4, max_tokens=None if index else 4) for index, prompt in enumerate(PROMPTS)
    ]
    client.fill(groups, sampling, keep=1)
    client.fill(groups, sampling)
    assert client.counters.resumed_samples > 0 and client.counters.dropped.total() == 0
    for rollout in (rollout for group in groups for rollout in group.rollout_group().rollouts):
        assert differences(tiny_checkpoint, rollout, 1.0)[0].max() <= 1e-4


def test_a_server_that_cannot_return_the_sets_is_refused_with_its_reason(sglang_server):
    with httpx.Client(base_url=sglang_server.url, timeout=60) as http:
        check_masks(http, Truncation(0.9, 20, 0.0))
        with pytest.raises(
            ServerError,
            match=r"1 < top_k <= 4096; got top_k=5000.*rollout\.top_p = 0\.9, top_k = 5000",
        ):
            check_masks(http, Truncation(0.9, 5000, 0.0))


def test_the_server_is_asked_whether_its_logprobs_follow_the_temperature(
    sglang_server, rollout_config
):
    check_sampling(
        sglang_server.url, rollout_config.model_copy(update={"temperature": 0.6}), vocab_size=64
    )
    with httpx.Client(base_url=sglang_server.url) as http:
        plain, scaled = (
            probe_logprobs(http, temperature, vocab_size=64) for temperature in (1.0, 0.6)
        )
    assert len(plain) == 16 and is_scaled(plain, scaled, 0.6) and not is_scaled(plain, plain, 0.6)


def test_samples_of_other_weights_are_never_returned(sample, sglang_server):
    with pytest.raises(RolloutError, match="stale_version") as caught:
        sample(PROMPTS[:1], policy_version=999)
    assert sglang_server.url in str(caught.value)


def test_samples_cut_short_by_a_pause_are_sampled_again(sample, sglang_server, tiny_checkpoint):
    def interrupt():
        with httpx.Client(base_url=sglang_server.url, timeout=60) as http:
            assert wait_for(lambda: running_requests(http) > 0, 20)
            http.post("/pause_generation", json={"mode": "abort"}).raise_for_status()
            http.post("/continue_generation", json={}).raise_for_status()

    thread = threading.Thread(target=interrupt)
    thread.start()
    # long enough to be running when it comes
    groups, client = sample(max_tokens=200, stop_token_ids=())
    thread.join()
    assert client.counters.dropped["aborted"] > 0 and client.counters.retries > 0
    for group in groups:
        assert len(group.rollouts) == 4
        assert_is_from(tiny_checkpoint, group.rollouts[0])


def test_a_long_prompt_is_prefilled_once_and_its_copies_are_still_the_models(
    sample, tiny_checkpoint
):
    prompt = Prompt(
        id="long", text="", token_ids=tuple(3 + i * 7 % 61 for i in range(200)), label=""
    )
    (group,), client = sample([prompt], group_size=8)
    assert (
        client.counters.requests == 1
        and len({tuple(rollout.tokens) for rollout in group.rollouts}) > 1
    )
    for rollout in group.rollouts:
        assert rollout.missing_routes is None
        assert_is_from(tiny_checkpoint, rollout)


def test_groups_that_are_not_needed_any_more_are_aborted_on_the_server(
    sample, sglang_server, tiny_checkpoint
):
    """Short prompts finish at their end token, long ones run on: with one group kept, the others
    are cut short.
    """
    groups, client = sample(max_tokens=200, keep=1)
    assert len(groups) == 1 and client.counters.cancelled_groups == 5
    assert client.counters.aborts_failed == 0 and client.counters.retries == 0
    assert (
        0 < client.counters.cancelled_samples <= 20 and client.counters.cancelled_tokens < 20 * 200
    )
    assert_is_from(tiny_checkpoint, groups[0].rollouts[0])
    with httpx.Client(base_url=sglang_server.url, timeout=60) as http:
        assert wait_for(lambda: running_requests(http) == 0, 3), (
            "the server still samples aborted requests"
        )


def running_requests(http: httpx.Client) -> int:
    loads = http.get("/v1/loads").json()["loads"]
    return sum(load["num_running_reqs"] for load in loads)


def test_the_server_describes_itself_and_a_wrong_one_is_refused(sglang_server):
    info = server_info(sglang_server.url)
    assert (info.num_layers, info.num_experts, info.top_k, info.vocab_size) == (4, 8, 2, 64)
    assert (info.dtype, info.routed_experts, info.route_width) == ("float32", True, 8)
    check_server(info, TINY_SPEC, want_routes=True, dtype="float32")
    with pytest.raises(ServerError, match="experts = 8, this run needs 16"):
        check_server(info, replace(TINY_SPEC, num_experts=16), want_routes=True)


def test_an_idle_server_leaves_the_cores_to_the_trainer(sglang_server):
    processes = [sglang_server.process.pid, *descendants(sglang_server.process.pid)]
    before = cpu_seconds(processes)
    time.sleep(2.0)
    # the scheduler alone takes 2.0 without --sleep-on-idle
    assert cpu_seconds(processes) - before < 0.5


OWNER = """
import sys, time
from pathlib import Path
from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.server.process import launch_server
cfg = RolloutConfig(api_key_env="SERVER_KEY", max_total_tokens=1024)
server = launch_server(Path(sys.argv[1]), cfg, device="cpu", log_path=Path(sys.argv[2]), seed=0)
print(server.url, server.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_server_with_a_key_shows_it_to_nobody_and_dies_with_its_killed_owner(
    tiny_checkpoint, tmp_path
):
    log_path = tmp_path / "log"
    command = [sys.executable, "-c", OWNER, str(tiny_checkpoint), str(log_path)]
    environment = os.environ | {"SERVER_KEY": "sesame-7351"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            line = owner.stdout.readline()
            assert line, log_path.read_text()[-2000:]
            url, pid = line.split()[0], int(line.split()[1])
            processes = [pid, *descendants(pid)]
            assert len(processes) >= 3  # server, scheduler, detokenizer
            assert httpx.get(f"{url}/model_info").status_code == 401
            with pytest.raises(ServerError, match="api_key_env"):
                server_info(url)
            assert server_info(url, {"Authorization": "Bearer sesame-7351"}).routed_experts
            assert "sesame" not in log_path.read_text()
            assert not any(
                "sesame" in " ".join(psutil.Process(each).cmdline()) for each in processes
            )
        finally:
            owner.kill()
    assert wait_for(lambda: not any(is_running(each) for each in processes), 10)


def descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def cpu_seconds(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
