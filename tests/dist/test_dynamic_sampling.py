"""Dynamic sampling on real ranks: two replicas of two ranks, whose leaders alone hold groups, end
with equal shares.
"""

import os

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.selection import Replica, refill
from tests.dist.launch import run_ranks
from tests.unit.batch.rollouts import make_rollout

DP, SHARE = 2, 3


def test_groups_that_teach_nothing_are_replaced_and_every_rank_agrees():
    """Prompt i is informative when its number says so; a replica may need more draws than the
    other.
    """
    found = run_ranks(sample_until_informative, 4, 4)
    assert len({tuple(prompts) for prompts, *_ in found}) == 1, "ranks hold different prompts"
    prompts = found[0][0]
    assert (
        all(is_informative(int(prompt)) for prompt in prompts) and len(set(prompts)) == DP * SHARE
    )
    for rank, (_, groups, rounds, sampled) in enumerate(found):
        replica, is_leader = divmod(rank, 2)[0], rank % 2 == 0
        assert groups == (prompts[replica::DP] if is_leader else [])
        assert rounds == found[0][2] >= 2 and sampled == found[0][3] > DP * SHARE


def test_what_is_missing_after_the_last_draw_is_filled_and_nothing_is_used_twice():
    found = run_ranks(sample_until_informative, 4, 1)
    prompts, _, rounds, _ = found[0]
    assert rounds == 1 and len(prompts) == len(set(prompts)) == DP * SHARE
    uniform = [prompt for prompt in prompts if not is_informative(int(prompt))]
    assert uniform, "this draw was meant to leave a replica short"
    for replica in range(DP):
        flags = [is_informative(int(prompt)) for prompt in prompts[replica::DP]]
        assert flags == sorted(flags, reverse=True), "informative groups come first"


def is_informative(number: int) -> bool:
    """Replica 0 (even numbers) finds few: one in three of its prompts; replica 1 all of its own."""
    return number % 2 == 1 or number % 3 == 0


def sample_until_informative(max_rounds: int) -> tuple[list[str], list[str], int, int]:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    dp_rank, is_leader = rank // 2, rank % 2 == 0
    taken = iter(range(2, 10_000))

    def draw(count: int) -> tuple[list[Prompt], list[RolloutGroup]]:
        prompts = [Prompt(str(next(taken)), "", (1,), "") for _ in range(count)]
        if not is_leader:
            return prompts, []
        return prompts, [group_of(prompt) for prompt in prompts[dp_rank::DP]]

    refilled = refill(
        *draw(DP * SHARE),
        draw,
        Replica(dp_rank, DP, torch.device("cpu")),
        is_leader=is_leader,
        max_rounds=max_rounds,
    )
    groups = [group.prompt.id for group in refilled.groups]
    dist.destroy_process_group()
    return [prompt.id for prompt in refilled.prompts], groups, refilled.rounds, refilled.sampled


def group_of(prompt: Prompt) -> RolloutGroup:
    rewards = np.array([1.0, 0.0] if is_informative(int(prompt.id)) else [0.0, 0.0], np.float32)
    rollouts = tuple(make_rollout(f"{prompt.id}/{k}", 1, 2) for k in range(2))
    return RolloutGroup(prompt, rollouts, rewards)
