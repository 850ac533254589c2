"""Over-sampling on real ranks: two replicas of two ranks keep different prompts, and every rank
knows which.
"""

import os

import torch
import torch.distributed as dist

from megatron_rl.records import Prompt
from megatron_rl.rollout.selection import Replica, divide_prompts, interleave
from tests.dist.launch import run_ranks

DP, SAMPLED, SHARE = 2, 5, 3
KEPT = ([0, 2, 3], [1, 2, 4])  # of each replica's five prompts


def test_every_rank_knows_which_prompts_were_kept_and_whose_they_are():
    found = run_ranks(all_reduce_ints, 4)
    expected = [f"{DP * KEPT[replica][i] + replica}" for i in range(SHARE) for replica in range(DP)]
    assert found == [(expected, ["2", "1", "8", "7"])] * 4
    assert [expected[replica::DP] for replica in range(DP)] == [["0", "4", "6"], ["3", "5", "9"]]


def all_reduce_ints() -> tuple[list[str], list[str]]:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    dp_rank, is_leader = rank // 2, rank % 2 == 0
    prompts = [Prompt(str(i), "", (1,), "") for i in range(DP * SAMPLED)]
    flags = [i in KEPT[dp_rank] for i in range(SAMPLED)] if is_leader else None
    replica = Replica(dp_rank, DP, torch.device("cpu"))
    kept, left = divide_prompts(prompts, flags, replica)
    dist.destroy_process_group()
    return [prompt.id for prompt in interleave(kept)], [prompt.id for prompt in interleave(left)]


# A step's sampling --------------------------------------------------------------------------------


def test_a_step_continues_with_the_groups_that_were_complete_first(tmp_path):
    """Two replicas of one rank need 2 groups each and sample 3; the first request of each never
    ends unless it is cancelled.
    """
    found = run_ranks(sample_a_step, 2, tmp_path)
    (prompts, _, metrics), (others, _, _) = found
    assert prompts == others and len(set(prompts)) == 4
    for rank, (_, groups, _) in enumerate(found):
        assert groups == prompts[rank::2]
    assert (
        metrics["rollout/cancelled_groups_total"] == 2
        and metrics["rollout/cancelled_samples_total"] == 4
    )
    assert metrics["rollout/cancelled_tokens_total"] == 8 and metrics["rollout/retries_total"] == 0
    assert metrics["rollout/tokens_per_second"] > 0
    assert metrics["rollout/request_seconds_max"] >= metrics["rollout/request_seconds_median"] > 0


def sample_a_step(folder) -> tuple[list[str], list[str], dict[str, float]]:
    from types import SimpleNamespace

    from megatron_rl.config import load_config
    from megatron_rl.data.prompts import PromptSource
    from megatron_rl.distributed import make_parallel
    from megatron_rl.metrics.console import Console
    from megatron_rl.reward.pool import Rewarded
    from megatron_rl.rollout.client.client import RolloutClient
    from megatron_rl.rollout.client.sampling import SampleRules
    from megatron_rl.rollout.inference import Inference
    from megatron_rl.rollout.saved.rollout_recorder import Recorder
    from megatron_rl.trainer.live_rollouts import Leader, LiveRollouts
    from megatron_rl.trainer.step_meter import StepMeter
    from tests.fake_server import SPEC, VERSION, FakeServer

    def zeros(groups, **_):
        return [[Rewarded(0.0) for _ in episodes] for episodes in groups]

    dist.init_process_group("gloo")
    settings = {
        "run": {"prompts_per_step": 4, "group_size": 2},
        "rollout": {"over_sample": 0.5, "max_response_tokens": 8},
    }
    cfg = load_config(
        None, [], {"model": {"path": "unused"}, "data": {"train": "unused"}} | settings
    )
    parallel = make_parallel(cfg.parallel, device="cpu", timeout_minutes=2)
    source = PromptSource(
        [Prompt(str(i), "", (3, 4, 5), "") for i in range(6)], seed=0, shuffle=False
    )
    tokenizer = SimpleNamespace(eos_token_id=1, batch_decode=lambda rows, **_: [""] * len(rows))
    with FakeServer("slow", "ok") as server:
        client = RolloutClient([server.url], cfg.rollout, SampleRules(SPEC, want_routes=True))
        leader = Leader(
            client,
            SimpleNamespace(totals=dict, score_episodes=zeros),
            Recorder(folder, dp_rank=dist.get_rank()),
        )
        inference = Inference(
            iter,
            client,
            pusher=None,
            server_pool=None,
            urls=[server.url],
            log=print,
            version=VERSION,
        )
        rollouts = LiveRollouts(
            cfg,
            parallel,
            None,
            tokenizer,
            source,
            {},
            inference,
            leader,
            StepMeter(),
            Console(enabled=False),
            VERSION,
        )
        prompts, groups = rollouts.draw(rollouts.scheduler.take, 0)
        rollouts.record(groups, 0)
        rollouts.finish_step()
    metrics = rollouts.meter.sums.reduce(dist.group.WORLD, "cpu")
    parallel.destroy()
    dist.destroy_process_group()
    return [prompt.id for prompt in prompts], [group.prompt.id for group in groups], metrics
