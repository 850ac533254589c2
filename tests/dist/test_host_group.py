"""What ranks do on the host, without NCCL: they wait for one another, and a leader shares its
rollouts with its replica.

The default group is torch's "fake" backend here, as NCCL is on GPUs: whatever goes through it
returns immediately, without the other ranks' values.
"""

import hashlib
import os
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tests.dist.launch import run_ranks

SLOW_SECONDS = 1.5
MIB = 2**20
ROUTES = (16 * MIB // 384, 48, 8)  # of one rollout, 16 MiB
ROLLOUTS = 36


def start_without_nccl(**sizes):
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    from megatron_rl.config import ParallelConfig
    from megatron_rl.distributed import make_parallel

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, rank == 0
    )
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    return make_parallel(ParallelConfig(**sizes), device="cpu", timeout_minutes=1)


def wait_for_others(folder):
    """-> whether rank 1's sampling, rank 0's weight sync, rank 1's rewards had ended when this
    rank's waits for them returned.
    """
    import torch.distributed as dist

    from megatron_rl.distributed.ranks import Ranks
    from megatron_rl.launch.trace import OFF
    from megatron_rl.rollout.client.client import RolloutError
    from megatron_rl.rollout.inference import Inference, SamplingStopped
    from megatron_rl.trainer.live_rollouts import LiveRollouts
    from megatron_rl.weights.sync.push import WeightPushError

    parallel = start_without_nccl()
    sampled, rewarded = folder / "sampled", folder / "rewarded"

    class SlowClient:
        """Its sampling ends because it was stopped, which every rank must learn."""

        is_stopped, trace = False, OFF

        def fill(self, groups, sampling, *, keep, on_progress, commands):
            time.sleep(SLOW_SECONDS)
            self.is_stopped = True
            sampled.touch()
            raise RolloutError("stopped")

    def score(items, **_):
        if parallel.rank == 1:
            time.sleep(SLOW_SECONDS)
            rewarded.touch()
        return []

    inference = Inference(
        iter,
        SlowClient() if parallel.rank == 1 else None,
        None,
        None,
        ["url"],
        print,
        group=parallel.host_group,
    )
    dist.barrier(parallel.host_group)  # imports take long, on one rank more than on the other
    inference.start([SimpleNamespace()], temperature=1.0, max_tokens=1, stop_token_ids=[])
    with pytest.raises(SamplingStopped):
        inference.wait(0)
    has_waited = [sampled.exists()]
    pushed = folder / "pushed"
    ranks = Ranks.of(parallel)

    def push(export, version, **options):  # as WeightPusher.push waits for rank 0
        ranks.on_rank_0(lambda: (time.sleep(SLOW_SECONDS), pushed.touch()), WeightPushError)

    pusher = SimpleNamespace(set_urls=print, push=push)
    inference = Inference(
        lambda: iter(()), None, pusher, None, ["url"], print, group=parallel.host_group
    )
    inference.push(1)
    has_waited.append(pushed.exists())
    leader = SimpleNamespace(rewards=SimpleNamespace(score_episodes=score))
    rollouts = SimpleNamespace(leader=leader, tokenizer=None, parallel=parallel)
    rollouts._scored = partial(LiveRollouts._scored, rollouts)
    assert LiveRollouts.score(rollouts, [], for_training=True) == []
    return [*has_waited, rewarded.exists()]


def test_every_rank_waits_for_sampling_weight_syncs_and_rewards_on_the_host(tmp_path):
    assert run_ranks(wait_for_others, 2, tmp_path) == [[True] * 3] * 2


def lose_a_rank():
    import torch.distributed as dist

    from megatron_rl.launch.heartbeats import lost_peer
    from megatron_rl.rollout.inference import Inference

    parallel = start_without_nccl()
    inference = Inference(iter, None, None, None, ["url"], print, group=parallel.host_group)
    if parallel.rank == 1:
        time.sleep(SLOW_SECONDS / 3)
        dist.destroy_process_group()  # closes its connections, as the end of its process does
        time.sleep(SLOW_SECONDS)  # the store is alive, as torchrun's is
        return True
    inference.start([], temperature=1.0, max_tokens=1, stop_token_ids=[])
    with pytest.raises(RuntimeError) as error:
        inference.wait(0)
    return lost_peer(error.value)


def test_the_loss_of_a_rank_ends_the_wait_and_is_recognised():
    """The watchdog then names the rank."""
    assert run_ranks(lose_a_rank, 2) == [True, True]


# Sharing a step's rollouts ------------------------------------------------------------------------


def large_step():
    from megatron_rl.batch.codec import layer_major
    from megatron_rl.records import Prompt, Rollout, RolloutGroup

    rng = np.random.default_rng(0)
    length = ROUTES[0]
    rollouts = tuple(
        Rollout(
            id=f"p/{k}",
            tokens=rng.integers(0, 99, length + 1),
            prompt_length=1,
            rollout_logprobs=-rng.random(length).astype(np.float32),
            routed_experts=layer_major(rng.integers(0, 128, ROUTES, np.uint8)),
            finish_reason="stop",
            policy_versions=np.zeros(length, np.int32),
        )
        for k in range(ROLLOUTS)
    )
    prompt = Prompt("p", "", (1,), "")
    return prompt, [RolloutGroup(prompt, rollouts, np.arange(ROLLOUTS, dtype=np.float32))]


def memory(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the last reset."""
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(f"{name}:"))


def share_a_large_step():
    """-> (bytes beyond those that stay, a digest of what this rank holds)."""
    from megatron_rl.batch.codec import to_arrays
    from megatron_rl.batch.transfer import in_node_memory, share_groups
    from megatron_rl.records import Prompt

    parallel = start_without_nccl(tp=2)
    prompt, groups = (
        large_step() if parallel.is_replica_leader else (Prompt("p", "", (1,), ""), None)
    )
    if groups:  # the scheduler does this response by response
        rollouts = tuple(in_node_memory(one, parallel.node) for one in groups[0].rollouts)
        groups = [replace(groups[0], rollouts=rollouts)]
        del rollouts
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM
    before = memory("VmRSS")
    (shared,) = share_groups(groups, [prompt], parallel.node)
    peak = memory("VmHWM") - before
    digest = hashlib.sha256(shared.rewards.tobytes())
    received = 0
    for rollout in shared.rollouts:
        for array in to_arrays(rollout).values():
            received += array.nbytes
            digest.update(array.tobytes())
    return peak - (0 if groups else received), digest.hexdigest()


def test_sharing_a_step_takes_little_memory_beyond_what_arrives():
    """A step's routes reach tens of GiB: no rank holds a second copy of them."""
    (leader, its_digest), (receiver, digest) = run_ranks(share_a_large_step, 2)
    assert ROLLOUTS * np.prod(ROUTES) > 500 * MIB, "large enough to show a copy"
    assert digest == its_digest
    assert max(leader, receiver) < 256 * MIB, (leader / MIB, receiver / MIB)


# Connections --------------------------------------------------------------------------------------


def counted_store():
    """The job's store, and the requests of this rank to it."""
    import torch.distributed as dist

    class Counted(dist.Store):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.requests = inner, 0

        def counted(self, name, *arguments):
            self.requests += 1
            return getattr(self.inner, name)(*arguments)

        def set(self, *arguments):
            return self.counted("set", *arguments)

        def get(self, *arguments):
            return self.counted("get", *arguments)

        def wait(self, *arguments):
            return self.counted("wait", *arguments)

        def add(self, *arguments):
            return self.counted("add", *arguments)

        def check(self, *arguments):
            return self.counted("check", *arguments)

        def has_extended_api(self):
            return False

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return Counted(dist.TCPStore(*address, world_size, rank == 0))


def connect(lazy):
    """-> requests to the store until make_parallel has its groups, and until the ranks have
    exchanged something.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    from megatron_rl.config import ParallelConfig
    from megatron_rl.distributed import groups, make_parallel

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not lazy:
        os.environ[groups.LAZY_GLOO] = "0"
    store = counted_store()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    before = store.requests
    parallel = make_parallel(ParallelConfig(tp=2), device="cpu", timeout_minutes=1)
    assert os.environ.get(groups.LAZY_GLOO) == (None if lazy else "0")
    made = store.requests - before
    for group in (parallel.host_group, parallel.replica_group):
        ranks = dist.get_process_group_ranks(group)
        sent = torch.tensor([10 * rank + to for to in ranks])
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        assert got.tolist() == [10 * other + rank for other in ranks]
        values = [None] * len(ranks)
        dist.all_gather_object(values, rank, group=group)
        assert values == ranks
    return made, store.requests - before


def test_ranks_connect_when_they_first_send_to_one_another():
    """Else every rank asks the store for the address of every other before the run begins: at 4,096
    ranks for minutes.
    """
    (lazy, used), (eager, same) = (run_ranks(connect, 4, lazy)[0] for lazy in (True, False))
    print(f"requests of a rank with 4 ranks: {lazy}, in the end {used}; at once {eager}, {same}")
    assert lazy < used <= eager == same
