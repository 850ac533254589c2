"""The simulator: identities of its model of time, the ledger that checks every run, and the order
of the real Scheduler.
"""

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import pytest

from benchmarks.rollout_sim import OVER, main
from benchmarks.rollout_speed import SlowServer
from benchmarks.sampling_model import Record, Response, Servers, Speed, Workload, bound
from benchmarks.sampling_modes import SimulatedInference, simulate, with_update_share
from benchmarks.sampling_peers import Slime, Verl
from megatron_rl.records import Prompt
from megatron_rl.rollout.group import Group
from tests.fake_server import wait_for

SMALL = Workload(prompts=8, group=4, steps=12, update=1e-3)
SPEED = Speed(servers=2, slots=16)  # all of a synchronous step
AHEAD = {
    f"{k} {update}": {"max_staleness": k, "weight_update": update}
    for k in (1, 2, 4) for update in ("drain", "abort", "in_place")
}  # fmt: skip


def tokens_of(workload: Workload, step: int) -> list[int]:
    numbers = range(step * workload.prompts, (step + 1) * workload.prompts)
    return [length for number in numbers for length in workload.lengths(number)]


def test_a_synchronous_step_takes_its_longest_response_the_others_share_and_its_update():
    """All start together: n requests run while the n longest are incomplete, so the sum over them
    is all tokens.
    """
    record = simulate(SMALL, SPEED, {})
    expected = 0.0
    for step in range(SMALL.steps):
        lengths = tokens_of(SMALL, step)
        sampling = SPEED.base * max(lengths) + SPEED.per_request * sum(lengths) / SPEED.servers
        expected += sampling + sum(lengths) * SMALL.update + SMALL.sync
    assert record.seconds == pytest.approx(expected)
    assert record.idle == pytest.approx(
        expected - record.tokens * SMALL.update - SMALL.steps * SMALL.sync
    )
    assert record.tokens == sum(sum(tokens_of(SMALL, step)) for step in range(SMALL.steps)), (
        "another workload"
    )
    assert record.mean_age == record.stale == record.dropped == 0


def test_with_servers_that_take_no_time_only_training_takes_time():
    fast = Speed(servers=1, slots=10**6, base=1e-9, per_request=0.0, prefill=0.0)
    for settings in AHEAD.values():
        record = simulate(SMALL, fast, settings)
        assert record.seconds == pytest.approx(
            record.tokens * SMALL.update + SMALL.steps * SMALL.sync, rel=1e-3
        )
        assert record.idle_share < 1e-3


def test_with_slow_servers_all_that_counts_is_the_tokens_they_make():
    """One slot, where waiting for a long response costs nothing: no mode is faster, and drain stops
    nothing that could run.
    """
    alone = Speed(servers=1, slots=1, per_request=0.0, prefill=0.0)
    workload = replace(SMALL, update=0.0, sync=0.0, steps=8)
    record = simulate(workload, alone, {"max_staleness": 2, "weight_update": "in_place"})
    assert record.seconds >= record.tokens * alone.base * (1 - 1e-9)
    assert record.seconds == pytest.approx(record.tokens * alone.base, rel=0.2), (
        "the last steps leave some unfinished"
    )


@pytest.mark.parametrize("settings", [*AHEAD.values(), *OVER.values()], ids=[*AHEAD, *OVER])
def test_each_prompt_is_trained_on_once_or_waits_and_no_token_is_too_old(settings):
    """`check`, of which another test shows that it fails, ran in `simulate`."""
    record = simulate(SMALL, SPEED, settings)
    again = simulate(SMALL, SPEED, settings)
    assert (record.seconds, record.trained, record.ages) == (
        again.seconds,
        again.trained,
        again.ages,
    )
    assert record.trained.total() == SMALL.steps * SMALL.prompts * SMALL.group and set(
        record.trained.values()
    ) == {1}
    assert max(record.oldest) <= settings.get("max_staleness", 0)
    assert sum(record.ages.values()) == pytest.approx(record.tokens, abs=SMALL.steps * 4 * 32)
    if (
        "drain" in settings.get("weight_update", "drain")
        and "max_staleness" in settings
        and "partial" not in settings
    ):
        assert record.stale == 0, "what is drained is complete, and taken in time"


def test_in_place_is_abort_that_computes_no_prefix_again_where_no_request_waits():
    wide = replace(SPEED, slots=1000)
    for k in (1, 2, 4):
        kept, cut, slower = (
            simulate(
                SMALL, replace(wide, prefill=prefill), {"max_staleness": k, "weight_update": update}
            )
            for update, prefill in (("in_place", 1e-2), ("abort", 0.0), ("abort", 1e-2))
        )
        assert kept.seconds == pytest.approx(cut.seconds) and kept.seconds < slower.seconds
        assert kept.ages == pytest.approx(cut.ages, abs=1) and kept.stale == cut.stale == 0


def test_a_request_that_waits_grows_old_in_place():
    """It is as old as the weights that it was sent to, though it has no token."""
    inference = SimulatedInference(
        replace(SMALL, group=1), Speed(servers=1, slots=1), concurrency=2
    )
    running, waiting = groups = [Group(Prompt(str(number), "", (0,), ""), 1) for number in range(2)]
    inference.start(groups, keep=None, is_open=True)
    inference.servers.advance(0.1)
    inference.servers.next_version()
    inference.renew(groups, 0)
    assert (
        [group.request_version for group in groups] == [0, 0]
        and waiting.has_oldest_version(0)
        and not waiting.has_oldest_version(1)
    )
    inference.servers.next_version()
    inference.renew(groups, 1)
    assert [group.request_version for group in groups] == [2, 2] and not (
        running.prefixes or waiting.prefixes
    )
    assert inference.client.counters.stale_samples == 1, "the other had no token"
    assert [response.done for response in inference.asked.values()] == [0, 0]


def test_the_idle_share_falls_with_k_in_the_mean_and_so_does_the_bound():
    mean = Counter()
    for seed in range(4):
        workload = with_update_share(replace(SMALL, seed=seed, steps=18), SPEED)
        for k in (0, 1, 2, 4):
            record = simulate(
                workload, SPEED, {"max_staleness": k, "weight_update": "in_place"} if k else {}
            )
            mean[k] += record.idle_share
            assert (
                bound(workload, SPEED, 0, drains=False).seconds
                >= bound(workload, SPEED, k, drains=False).seconds
            )
    assert mean[0] > mean[1] > mean[2] > mean[4]


def test_the_bounds():
    workload = with_update_share(replace(SMALL, steps=6), SPEED)
    update = workload.step_tokens * workload.update
    together = SPEED.base * workload.cap + SPEED.per_request * workload.step_tokens / SPEED.servers
    assert bound(workload, SPEED, 0, drains=False).seconds == pytest.approx(
        together + update + workload.sync
    )
    assert bound(workload, SPEED, 4, drains=True).longest == pytest.approx(
        max(together, update) + workload.sync
    )
    none = Speed(servers=1000, slots=1000, per_request=0.0)
    for k in (1, 2, 3):  # the k updates and k + 1 waits of a response's life are what it takes
        wait = bound(workload, none, k, drains=False).longest - update - workload.sync
        assert (k + 1) * wait + k * update == pytest.approx(
            max(workload.cap * none.base, k * update)
        )
    many = bound(workload, none, 100, drains=False)
    assert many.limit == "training" and many.idle_share == 0
    few = bound(workload, Speed(servers=1, slots=1), 100, drains=False)
    assert few.limit == "servers" and few.servers == pytest.approx(
        workload.step_tokens * (SPEED.base + SPEED.per_request) + workload.sync
    )


def test_requests_share_servers_wait_for_slots_and_continue_where_they_stopped():
    done = []
    servers = Servers(
        Speed(servers=1, slots=2, base=1.0, per_request=0.5, prefill=0.1), done.append
    )
    first, second, third = (
        Response((0, index), length) for index, length in enumerate((10, 30, 5))
    )
    for response in (first, second, third):
        servers.submit(response)
    servers.advance(is_enough=lambda: done == [first])
    assert servers.clock == pytest.approx(10 * 2.0) and list(servers.waiting) == []
    servers.advance(is_enough=lambda: third in done)
    assert servers.clock == pytest.approx(15 * 2.0)
    servers.version = 1
    servers.advance(until=servers.clock + 3 * 1.5)
    assert servers.stop() == [second] and not servers.running
    assert [version for version, _ in second.segments] == [1] and second.done == pytest.approx(18)
    began = servers.clock
    servers.submit(second)
    servers.advance(is_enough=lambda: second in done)
    assert servers.clock - began == pytest.approx(
        18 * 0.1 + 12 * 1.5
    ) and second.done == pytest.approx(30)


def test_one_request_can_be_aborted():
    done = []
    servers = Servers(
        Speed(servers=1, slots=1, base=1.0, per_request=0.0, prefill=0.0), done.append
    )
    running, waiting, last = (Response((0, index), 10) for index in range(3))
    for response in (running, waiting, last):
        servers.submit(response)
    servers.advance(until=4.0)
    servers.remove(waiting)
    servers.remove(running)
    assert (
        running.done == pytest.approx(4)
        and waiting.done == 0
        and servers.next_end == pytest.approx(14.0)
    )
    servers.advance(is_enough=lambda: done == [last])
    with pytest.raises(RuntimeError, match="nothing is sampled"):
        servers.advance()


@pytest.mark.parametrize("wrong", ["lost", "twice", "too_old", "incomplete", "unknown"])
def test_a_broken_promise_stops_the_simulation(wrong):
    record = Record(replace(SMALL, group=2))
    record.train([((0, index), [(3, 5.0)]) for index in range(2)], version=4)
    started, waiting, budget = [0, 1], [1], 1
    record.check(started, waiting, budget)
    if wrong == "lost":
        waiting = []
    elif wrong == "twice":
        waiting = [0, 1]
    elif wrong == "too_old":
        budget = 0
    elif wrong == "incomplete":
        del record.trained[0, 1]
    else:
        started = [1]
    with pytest.raises(RuntimeError, match=f"'{wrong}': {2 if wrong == 'too_old' else 1}"):
        record.check(started, waiting, budget)


@pytest.mark.parametrize("make", [Slime, Verl])
def test_a_peer_loses_nothing_and_has_no_bound_on_the_age(make):
    record = make(SMALL, SPEED).run()
    assert record.trained.total() == SMALL.steps * SMALL.prompts * SMALL.group
    assert record.idle > 0 and max(record.ages) > 1


def test_verl_starts_so_many_prompts_between_two_weight_syncs():
    """With threshold 0 it is synchronous, but for mini-batches."""
    synchronous = simulate(SMALL, SPEED, {})
    record = Verl(SMALL, SPEED, threshold=0.0, mini_batches=1).run()
    assert record.seconds == pytest.approx(synchronous.seconds) and record.mean_age == 0
    assert Verl(SMALL, SPEED, threshold=0.0).run().seconds < record.seconds
    fast = Speed(servers=4, slots=10**6, base=1e-9, per_request=0.0, prefill=0.0)
    for threshold in (0, 1, 3):  # that many steps wait in the queue
        ages = Verl(SMALL, fast, threshold=threshold).run().ages
        assert (
            sorted(ages) == list(range(threshold + 1))
            and ages[threshold] >= sum(ages.values()) / SMALL.steps
        )


def test_slime_continues_aborted_groups_or_starts_over():
    for starts_over in (False, True):
        slime, found = Slime(SMALL, SPEED, concurrency=16, starts_over=starts_over), []
        with patch.object(slime.record, "train", wraps=slime.record.train) as train:
            slime.run()
        for call in train.call_args_list:
            found += [segments for _, segments in call.args[0]]
        assert len(found) == SMALL.steps * SMALL.prompts * SMALL.group
        assert (max(map(len, found)) == 1) == starts_over


def test_the_slow_server_has_the_clock_of_the_simulation():
    """A response is complete after the seconds that `Servers` computes."""
    workload = replace(SMALL, cap=32, median=8)
    with SlowServer(workload, Speed(servers=1, slots=4, base=1e-3, per_request=0.0)) as server:
        body = {"rid": "a", "input_ids": [[3, 4, 4]] * 4}
        found = server.honest(body)
    assert [len(sample["output_ids"]) for sample in found.values()] == workload.lengths(0)
    assert server.servers.clock >= max(workload.lengths(0)) * 1e-3


def test_the_table(capsys):
    assert (
        main(
            [
                "--steps",
                "6",
                "--prompts",
                "4",
                "--group",
                "2",
                "--servers",
                "1",
                "--k",
                "0",
                "2",
                "--no-peers",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in rows[1:]] == [
        "| synchronous",
        "| k = 2, drain",
        "| k = 2, abort",
        "| k = 2, in_place",
    ]
    assert all(math.isfinite(float(line.split(" | ")[3])) for line in rows[1:])


def test_the_slow_server_aborts_one_response_of_a_request():
    workload = replace(SMALL, group=2, cap=64, median=20)
    with SlowServer(workload, Speed(servers=1, slots=4, base=0.05, per_request=0.0)) as server:
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(server.honest, {"rid": "a", "input_ids": [[3, 4, 4]] * 2})
            assert wait_for(lambda: len(server.by_id) == 2, 10)
            response, _ = server.by_id["a_0"]
            assert wait_for(lambda: server.servers.running or not server.live, 10)
            server.stop_response("a_0")
            first, second = (sample["meta_info"] for sample in answer.result(20).values())
    assert (
        first["finish_reason"]["type"] == "abort"
        and first["completion_tokens"] == int(response.done) < response.length
    )
    assert (
        second["finish_reason"]["type"] != "abort"
        and second["completion_tokens"] == workload.lengths(0)[1]
    )
