"""Continuous sampling on real ranks: two replicas of two ranks (tp = 2) with k = 2, over fake
servers.

Every number of the fake model is a fingerprint of the weights' version and the tokens, so that the
age of every token is known. All ranks check; what they trained on is compared here.
"""

import json
import zlib
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from tests.dist.launch import run_ranks

K, DP, SHARE, GROUP, STEPS = 2, 2, 2, 2, 7


@contextmanager
def replicas(*script: str, servers: int = 1, source=None, is_slow=None, **rollout):
    """On every rank: (Loop, the fake servers, which run on rank 0 and are [] elsewhere).

    One source for all servers: weights.
    """
    from megatron_rl.config import ParallelConfig, load_config
    from megatron_rl.distributed import from_rank_0, make_parallel
    from tests.fake_model import FakeModel
    from tests.sampling_loop import Loop, SlowOnSome

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel = make_parallel(ParallelConfig(tp=2), device="cpu", timeout_minutes=2)
    cfg = load_config(None, [], {
        "run": {"num_steps": 100, "prompts_per_step": DP * SHARE, "group_size": GROUP},
        "model": {"path": "unused"}, "data": {"train": "unused"}, "parallel": {"tp": 2},
        "rollout": {"max_response_tokens": 6, "max_retries": 1, "temperature": 0.7,
        "max_staleness": K} | rollout,
    })  # fmt: skip
    model = FakeModel() if source is None else source
    fakes = [
        SlowOnSome(*script, source=model) for _ in range(servers if dist.get_rank() == 0 else 0)
    ]
    for fake in fakes:
        fake.is_slow, fake.patience = is_slow or fake.is_slow, 0.3
        fake.__enter__()
    pool = SimpleNamespace(
        take=lambda: [fake.url for fake in fakes if not fake.is_dead],
        lost=lambda: [fake.url for fake in fakes if fake.is_dead],
        restarts=0,
    )
    urls = from_rank_0(pool.take)
    loop = Loop(
        cfg,
        urls,
        model,
        parallel,
        leads=parallel.is_replica_leader,
        server_pool=pool if fakes else None,
    )
    real = loop.serve

    def push(*given, **options):
        real(*given, **options)
        dist.barrier()

    loop.inference.pusher.push = push
    try:
        yield loop, fakes
    finally:
        loop.inference.stop()
        for fake in fakes:
            fake.__exit__()
        parallel.destroy()


class SameTokens:
    """A FakeModel whose tokens follow from the prompt and the place in the group, not from the
    request.
    """

    def __init__(self) -> None:
        self.version = 0

    def __call__(self, body, given, sample_id):
        from tests.fake_model import answer
        from tests.fake_server import SPEC

        rng = np.random.default_rng(zlib.crc32(bytes(given[:3]), int(sample_id.rpartition("_")[2])))
        new = rng.integers(2, SPEC.vocab_size, 6)[len(given) - 3 :]
        return answer(self.version, given, new, sample_id, {"type": "length", "length": len(new)})


def check_step(loop, sampled, step: int) -> set[int]:
    """Prompts, groups and queue of one step, on this rank; the ages of its tokens."""
    from tests.fake_model import assert_fingerprints
    from tests.sampling_loop import ages

    dp = loop.scheduler.parallel
    leads = loop.inference.client is not None
    assert [g.prompt for g in sampled.groups] == (
        sampled.prompts[dp.dp_rank :: DP] if leads else []
    )
    assert len(sampled.prompts) == DP * SHARE and len(loop.scheduler.queue) == K * DP * SHARE
    assert loop.inference.pending is None and len(loop.scheduler.groups) == (
        K * SHARE if leads else 0
    )
    for rollout in (rollout for group in sampled.groups for rollout in group.rollouts):
        assert_fingerprints(rollout)
    return ages(sampled, step)


# Order, ages --------------------------------------------------------------------------------------


def train_on(settings):
    """[prompts of each step], the queue afterwards, ages, counters: of this rank."""
    with replicas("ok", is_slow=lambda number: number % 3 == 0, **settings) as (loop, _):
        trained, found = [], set()
        for step in range(STEPS):
            sampled = loop.step(step)
            found |= check_step(loop, sampled, step)
            trained.append([prompt.id for prompt in sampled.prompts])
        client = loop.inference.client
        lost = (
            0 if client is None else client.counters.lost_samples + client.counters.failures.total()
        )
        cut = 0 if client is None else client.counters.cut_samples
        waiting = [prompt.id for prompt in loop.scheduler.queue]
    return trained, waiting, found, lost, cut


@pytest.mark.parametrize("weight_update", ["drain", "abort"])
def test_every_prompt_is_trained_on_once_in_one_order_and_no_token_is_too_old(weight_update):
    found = run_ranks(train_on, DP * 2, {"weight_update": weight_update})
    trained, waiting, *_ = found[0]
    assert all((steps, queue) == (trained, waiting) for steps, queue, *_ in found), "ranks disagree"
    ids = Counter(name for step in trained for name in step)
    assert max(ids.values()) == 1 and not set(ids) & set(waiting)
    assert sorted([*ids, *waiting], key=int) == [str(i) for i in range((STEPS + K) * DP * SHARE)], (
        "a prompt was lost"
    )
    ages, lost, cut = zip(*((ages, lost, cut) for *_, ages, lost, cut in found), strict=True)
    assert max(set().union(*ages)) == K and sum(lost) == 0, "the budget was not used"
    assert [cut[rank] > 0 for rank in (0, 2)] == [weight_update == "abort"] * 2 and cut[1] == cut[
        3
    ] == 0


# Without staleness --------------------------------------------------------------------------------


def compare_with_one_call():
    """k = 0: a step's groups, and those of one synchronous call of the client for the same
    prompts.
    """
    from tests.sampling_loop import contents

    with replicas("ok", source=SameTokens(), max_staleness=0) as (loop, _):
        for step in range(3):
            sampled = loop.scheduler.take(step, step)
            assert loop.inference.pending is None and not loop.scheduler.queue
            mine = sampled.prompts[loop.scheduler.parallel.dp_rank :: DP]
            again = loop.inference.generate(
                mine, GROUP, temperature=0.7, max_tokens=6, stop_token_ids=[1]
            )
            assert contents(sampled.groups) == contents(again)
            assert [prompt.id for prompt in sampled.prompts] == [
                str(4 * step + i) for i in range(4)
            ]
            loop.push(step + 1)
            loop.scheduler.step_done()
        return len(sampled.groups)


def test_without_staleness_a_step_is_one_synchronous_call_bit_for_bit():
    assert run_ranks(compare_with_one_call, DP * 2) == [SHARE, 0, SHARE, 0]


# The open task ------------------------------------------------------------------------------------


def add_and_end():
    """An open task takes further groups; abort cuts them short, drain completes them.

    Ranks that lead none call the same.
    """
    from megatron_rl.rollout.group import Group
    from tests.fake_model import assert_fingerprints
    from tests.fake_server import wait_for

    with replicas("ok", is_slow=lambda number: number >= 4) as (loop, fakes):
        inference, parallel = loop.inference, loop.scheduler.parallel
        leads = inference.client is not None

        def groups(first: int) -> list[Group]:
            mine = loop.source.prompts[first : first + DP * SHARE][parallel.dp_rank :: DP]
            return [Group(prompt, GROUP) for prompt in mine] if leads else []

        def start(these) -> None:
            inference.start(these, is_open=True, temperature=0.7, max_tokens=6, stop_token_ids=[1])

        for fake in fakes:
            fake.patience = 60.0
        first, second, third = groups(0), groups(4), groups(8)
        start(first)
        inference.wait(0, is_enough=lambda: all(group.is_complete for group in first))
        assert inference.pending is not None, "an open task ends only at `end`"
        inference.add(second)
        asked = len(fakes) * DP * 2 * SHARE
        assert wait_for(lambda: sum(len(fake.requests) for fake in fakes) == asked, 30)
        dist.barrier()
        inference.end("abort")
        assert inference.pending is None and not any(group.is_complete for group in second)
        assert [len(group.prefixes) for group in second] == [GROUP] * len(second)
        loop.push(1)
        for fake in fakes:
            fake.patience = 0.3
        start(second)
        inference.add(third)
        inference.wait(1, is_enough=lambda: all(group.is_complete for group in second))
        inference.end("drain")
        for group in (*second, *third):
            for rollout in group.rollout_group().rollouts:
                assert_fingerprints(rollout)
                assert rollout.policy_versions.tolist() == (
                    [0, 0, 1, 1, 1, 1] if group in second else [1] * 6
                )
        return leads


def test_groups_are_added_to_an_open_task_which_a_drain_or_an_abort_ends():
    assert run_ranks(add_and_end, DP * 2) == [True, False, True, False]


# A server that dies -------------------------------------------------------------------------------


def lose_a_server():
    """The second of two servers dies on a request of the open task, whose group then fails for good
    (max_retries = 0).
    """
    with replicas("ok", servers=2, max_retries=0) as (loop, fakes):
        trained, found = [], set()
        for step in range(STEPS):
            if step == 2 and fakes:
                fakes[1].script[:] = ["ok", "die"]
            sampled = loop.step(step)
            found |= check_step(loop, sampled, step)
            trained.append([prompt.id for prompt in sampled.prompts])
        assert loop.inference.urls == [loop.inference.urls[0]], "the dead server is not pushed to"
        return trained, found, [fake.is_dead for fake in fakes]


def test_a_server_that_dies_with_an_open_call_costs_no_prompt():
    found = run_ranks(lose_a_server, DP * 2)
    assert found[0][2] == [False, True] and all(trained == found[0][0] for trained, _, _ in found)
    ids = [name for step in found[0][0] for name in step]
    assert (
        len(set(ids)) == len(ids) == STEPS * DP * SHARE
        and max(set().union(*(ages for _, ages, _ in found))) <= K
    )


# Resume -------------------------------------------------------------------------------------------


def resume(folder):
    """Six steps; and the last three again from the checkpoint of the third, which holds the groups
    of steps 4 and 5.
    """
    from tests.fake_server import wait_for
    from tests.sampling_loop import contents

    def step_of(loop, step):
        """Every group is complete at the weight sync, so that versions do not depend on timing."""
        sampled = loop.scheduler.take(step, step)
        assert wait_for(lambda: all(group.is_complete for group in loop.scheduler.groups), 30)
        dist.barrier()
        loop.push(step + 1)
        loop.scheduler.step_done()
        check_step(loop, sampled, step)
        return [prompt.id for prompt in sampled.prompts], contents(sampled.groups)

    with replicas("ok", source=SameTokens(), max_concurrency=1) as (loop, _):
        for step in range(3):
            step_of(loop, step)
        for name, write in loop.scheduler.files(is_step_done=True).items():
            write(folder / name)
        state = json.loads(json.dumps(loop.scheduler.prompts_state()))
        complete = [step_of(loop, step) for step in (3, 4, 5)]
    dist.barrier()
    with replicas("ok", source=SameTokens(), max_concurrency=1) as (loop, fakes):
        loop.source.load_state_dict(state)
        loop.push(3)
        loop.scheduler.restore(folder, [])
        again = [step_of(loop, step) for step in (3, 4, 5)]
        asked = {request["input_ids"][0][1] - 4 for fake in fakes for request in fake.requests}
    assert again == complete, "resumed, the run trains on other batches"
    return asked, [prompts for prompts, _ in complete]


def test_a_checkpoint_that_holds_the_queue_resumes_with_the_same_batches(tmp_path):
    found = run_ranks(resume, DP * 2, tmp_path)
    prompts = [[str(12 + 4 * step + i) for i in range(4)] for step in range(3)]
    assert [trained for _, trained in found] == [prompts] * (DP * 2)
    assert found[0][0] == set(range(20, 32)), "what the checkpoint holds was sampled again"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"rollouts_{rank:05d}.safetensors" for rank in range(DP)
    ]
