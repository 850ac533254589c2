"""Over-sampling on real ranks: two replicas of two ranks keep other prompts each, and every rank agrees which."""

import os

import torch
import torch.distributed as dist

from megatron_rl.batch.over_sample import kept_prompts
from megatron_rl.records import Prompt
from tests.dist.launch import run_ranks

DP, SAMPLED, SHARE = 2, 5, 3
KEPT = ([0, 2, 3], [1, 2, 4])  # of each replica's five prompts


def test_every_rank_knows_which_prompts_were_kept_and_whose_they_are():
    found = run_ranks(agree, 4)
    expected = [f"{DP * KEPT[replica][i] + replica}" for i in range(SHARE) for replica in range(DP)]
    assert found == [expected] * 4
    assert [expected[replica::DP] for replica in range(DP)] == [["0", "4", "6"], ["3", "5", "9"]]


def agree() -> list[str]:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    dp_rank, is_leader = rank // 2, rank % 2 == 0
    prompts = [Prompt(str(i), "", (1,), "") for i in range(DP * SAMPLED)]
    mine = prompts[dp_rank::DP]
    kept = kept_prompts(
        prompts,
        [mine[i] for i in KEPT[dp_rank]] if is_leader else None,
        share=SHARE,
        dp_rank=dp_rank,
        dp_size=DP,
        device=torch.device("cpu"),
    )
    dist.destroy_process_group()
    return [prompt.id for prompt in kept]
