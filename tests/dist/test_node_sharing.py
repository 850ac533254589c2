"""Rollouts of a replica on real ranks whose nodes are pretended: one copy on each node."""

import os

import numpy as np
import pytest

from tests.dist.launch import run_ranks

RANKS = 4


def share_in_layouts(cases):
    """On a rank: for each (tp, node of every rank) return the fields of the rollouts that it has,
    and the file that has their routes.
    """
    import torch.distributed as dist

    from megatron_rl.batch.transfer import share_groups
    from megatron_rl.config import ParallelConfig
    from megatron_rl.distributed import groups, make_parallel
    from tests.unit.batch.rollouts import make_groups
    from tests.unit.batch.test_node_sharing import inode
    from tests.unit.batch.test_replicas import fields_of

    dist.init_process_group("gloo")  # kept for all layouts
    results = []
    for tp, nodes in cases:
        name = bytes([nodes[int(os.environ["RANK"])]] * 8)
        groups.node_name = lambda name=name: name
        parallel = make_parallel(ParallelConfig(tp=tp), device="cpu", timeout_minutes=5)
        of_replica = make_groups(2, 2)[parallel.dp_rank :: parallel.dp_size]
        prompts = [group.prompt for group in of_replica]
        shared = share_groups(
            of_replica if parallel.is_replica_leader else None, prompts, parallel.node
        )
        rollouts = [rollout for group in shared for rollout in group.rollouts]
        files = {inode(rollout.routed_experts) for rollout in rollouts}
        assert len(files) == 1
        results.append((repr([fields_of(r) for r in rollouts]), files.pop()))
        parallel.destroy()
    return results


@pytest.mark.filterwarnings("ignore")
def test_every_node_of_a_replica_has_one_copy():
    cases = [
        (4, (0, 0, 0, 0)),  # one node
        (4, (0, 0, 1, 1)),  # two nodes: one rank of each gets the bytes
        (4, (0, 1, 0, 1)),
        (4, (0, 1, 1, 2)),  # the leader is alone on its node
        (2, (0, 0, 0, 0)),  # two replicas on one node
        (2, (0, 0, 1, 1)),
        (2, (0, 1, 0, 1)),  # every rank of a replica on a node of its own
    ]
    ranks = run_ranks(share_in_layouts, RANKS, cases)
    for number, (tp, nodes) in enumerate(cases):
        fields, files = zip(*(results[number] for results in ranks), strict=True)
        replicas = np.arange(RANKS) // tp
        for a in range(RANKS):
            for b in range(a):
                is_one = replicas[a] == replicas[b]
                assert (fields[a] == fields[b]) == is_one, (number, a, b)
                # False: the leader's private memory
                maps_one = files[a] == files[b] is not False
                assert maps_one == (is_one and nodes[a] == nodes[b]), (number, a, b, files)
