"""The simulator's bookkeeping: its own check finds what a scheduler could do wrong, and no mode does it."""

import importlib.util
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks/rollout_sim.py"
ARGS = Namespace(steps=12, prompts=8, group=4, over=2.0, alike=0.5, budget=1, update_share=0.2)


@pytest.fixture(scope="module")
def sim():
    spec = importlib.util.spec_from_file_location("rollout_sim", PATH)
    module = sys.modules["rollout_sim"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["rollout_sim"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_nothing_is_lost_trained_twice_or_too_old(sim, seed, budget):
    runs = sim.simulate(seed, Namespace(**{**vars(ARGS), "budget": budget}))
    assert runs == sim.simulate(seed, Namespace(**{**vars(ARGS), "budget": budget})), "not a function of the seed"
    for mode, run in runs.items():
        assert (run["lost"], run["duplicated"], run["too_old"]) == (0, 0, 0), mode
    assert runs["synchronous"]["mean_age"] == runs["synchronous"]["dropped"] == runs["over, resume"]["dropped"] == 0
    assert runs["overlapped"]["mean_age"] == (ARGS.steps - 1) / ARGS.steps
    assert runs["overlapped"]["tokens_per_s"] > runs["synchronous"]["tokens_per_s"]
    assert runs["over, drop"]["dropped"] > 0 and runs["over, resume"]["mean_age"] <= budget
    assert runs["overlapped, resume"]["dropped"] == 0 and runs["overlapped, resume"]["mean_age"] <= budget + 1


def test_a_synchronous_step_takes_as_long_as_its_longest_response(sim):
    servers = sim.Servers()
    for index, length in enumerate((100, 300)):
        servers.submit(sim.Response((0, index), length, 0))
    assert [servers.next_finished().length for _ in range(2)] == [100, 300]
    two, one = sim.BASE + sim.PER_REQUEST * 2 / sim.SERVERS, sim.BASE + sim.PER_REQUEST / sim.SERVERS
    assert servers.clock == pytest.approx(100 * two + 200 * one)


def test_a_stopped_response_continues_where_it_stopped(sim):
    servers = sim.Servers()
    for index, length in enumerate((100, 300)):
        servers.submit(sim.Response((0, index), length, 0))
    servers.next_finished()
    (rest,) = servers.stop()
    assert rest.done == pytest.approx(100) and not servers.running
    before = servers.clock
    servers.submit(rest)
    assert servers.next_finished() is rest
    assert servers.clock - before == pytest.approx(200 * (sim.BASE + sim.PER_REQUEST / sim.SERVERS))


@pytest.mark.parametrize("wrong", ["lost", "duplicated", "too_old"])
def test_a_broken_promise_stops_the_simulation(sim, wrong):
    key = (0, 0)
    ledger = sim.Ledger(started=Counter({key: 1}), trained=Counter({key: 1}), ages=Counter({1: 1}))
    assert not any(ledger.check([], budget=1).values())
    if wrong == "lost":
        ledger.started[(0, 1)] += 1
    elif wrong == "duplicated":
        ledger.started[key] += 1
        ledger.trained[key] += 1
    with pytest.raises(RuntimeError, match=f"'{wrong}': 1"):
        ledger.check([], budget=0 if wrong == "too_old" else 1)
