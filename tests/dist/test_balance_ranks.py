"""Real ranks redistribute sequences: each is on one rank, once, with its own routes, advantage and
share of the loss.
"""

import pytest

from tests.dist.launch import run_ranks

CAP = 40
RULES = {
    "packed": {},
    "equal rows": {"equal_sizes": True, "pad_multiple": 8, "sequence_multiple": 2},
    "padded, equal": {"equal_sizes": True, "padded": True, "sequence_multiple": 4},
    "interleaved": {"count_multiple": 2},
}
# once more, with every replica a pod of its own
IN_PODS = ("packed", "padded, equal", "interleaved")


def make_samples(replica):
    """8 on each replica, of very unequal lengths: replica 0 holds the long ones."""
    from megatron_rl.batch.pack import Sample
    from tests.unit.batch.rollouts import make_rollout

    length = (12, 5, 2)[replica]
    return [
        Sample(
            make_rollout(f"{replica}/{k}", 2, length + k, seed=100 * replica + k),
            replica + k / 8,
            in_loss=k != 3,
        )
        for k in range(8)
    ]


def deal(rules, in_pods):
    """Contents of every micro-batch of this rank: rollout -> values that no other rollout has."""
    import torch.distributed as dist

    from megatron_rl.batch import assignment as plan
    from megatron_rl.batch.pack import PackRule
    from megatron_rl.batch.split import make_mini_batch

    dist.init_process_group("gloo")
    results, efficiencies = [], []
    for settings in [*rules, *in_pods]:
        if len(results) == len(rules):
            plan.POD = plan.LEAST_POD = 1
        rule = PackRule(**settings, balance_length=50)
        batch = make_mini_batch(
            make_samples(dist.get_rank()), max_tokens=CAP, rule=rule, dp_group=dist.group.WORLD
        )
        found = {}
        for micro, samples in zip(batch.micro_batches, batch.samples, strict=True):
            for index, name in enumerate(micro.rollout_ids):
                own = micro.sequence_ids == index
                learned = own & micro.loss_mask
                found[name] = (
                    micro.tokens[own].tolist(),
                    samples[index].rollout.routed_experts.tolist(),
                    sorted(set(micro.advantages[learned].tolist())),
                    micro.rollout_logprobs[learned].tolist(),
                )
        results.append(
            (
                found,
                [m.num_tokens for m in batch.micro_batches],
                batch.num_responses,
                batch.num_response_tokens,
            )
        )
        efficiencies.append(batch.lockstep_efficiency)
    dist.destroy_process_group()
    return results, efficiencies


@pytest.fixture(scope="module")
def dealt():
    ranks = run_ranks(deal, 3, list(RULES.values()), [RULES[name] for name in IN_PODS])
    names = [*RULES, *(f"{name}, in pods" for name in IN_PODS)]
    assert ranks[0][1] == ranks[1][1] == ranks[2][1] and all(
        0.5 < each <= 1 for each in ranks[0][1]
    )
    return {name: [rank[0][index] for rank in ranks] for index, name in enumerate(names)}


@pytest.mark.parametrize("name", [*RULES, *(f"{name}, in pods" for name in IN_PODS)])
def test_every_sequence_is_on_one_rank_as_it_was(dealt, name):
    everyone = [sample for replica in range(3) for sample in make_samples(replica)]
    names = [rollout_id for found, *_ in dealt[name] for rollout_id in found]
    assert sorted(names) == sorted(sample.rollout.id for sample in everyone)
    together = {rollout_id: what for found, *_ in dealt[name] for rollout_id, what in found.items()}
    for sample in everyone:
        rollout = sample.rollout
        tokens, routes, advantages, logprobs = together[rollout.id]
        assert tokens == rollout.tokens.tolist() and routes == rollout.routed_experts.tolist()
        assert advantages == ([sample.advantage] if sample.in_loss else [])
        assert logprobs == (rollout.rollout_logprobs.tolist() if sample.in_loss else [])
    learned = [sample.rollout.response_length for sample in everyone if sample.in_loss]
    assert all(counts == [len(learned), sum(learned)] for _, _, *counts in dealt[name])


@pytest.mark.parametrize("name", [*RULES, *(f"{name}, in pods" for name in IN_PODS)])
def test_ranks_get_equal_work(dealt, name):
    sizes = [sizes for _, sizes, *_ in dealt[name]]
    assert len({len(mine) for mine in sizes}) == 1 and all(
        size <= CAP for mine in sizes for size in mine
    )
    assert len(sizes[0]) % RULES[name.removesuffix(", in pods")].get("count_multiple", 1) == 0
    if "equal_sizes" in RULES[name.removesuffix(", in pods")]:
        assert sizes[0] == sizes[1] == sizes[2]
    else:
        totals = [sum(mine) for mine in sizes]
        assert max(totals) <= 1.25 * min(totals), "before, rank 0 held four times as much as rank 2"
