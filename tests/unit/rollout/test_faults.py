"""A slice of `make faults`: one seed at one point of every kind, and a few hundred damaged
payloads.  The rest: `make faults`.
"""

from dataclasses import replace

import psutil
import pytest

from tests.fake_server import POINTS, wait_for
from tests.faults import trials as of_servers
from tests.faults.environments import BEHAVIOURS
from tests.faults.episodes import (
    INTERRUPTIONS,
    EpisodeOutcome,
    EpisodeTrial,
    environment_processes,
    episode_table,
    episode_trials,
    run_episode_trial,
)
from tests.faults.payloads import (
    SPECS,
    damage_payloads,
    damage_samples,
    refuse_good,
    routes_of,
    verdict,
)
from tests.faults.samples import encode
from tests.faults.trials import Outcome, Trial, all_trials, run_trial, table

SLICE = [
    Trial("die", "connect", 0),
    Trial("reset", "in_headers", 0),
    Trial("close", "end", 1),
    Trial("drip", "mid_body", 0),
    Trial("http_503", "before_headers", 0),
    Trial("http_413", "end", 0),
    Trial("deep_json", "mid_body", 0),
    Trial("reordered", "connect", 1),
    Trial("other_id", "in_headers", 0),
    Trial("duplicate_route", "mid_body", 1),
    Trial("reset", "mid_body", 0, turns=2),
    Trial("http_400", "connect", 0, turns=2),
    Trial("other_id", "end", 1, turns=2),
]


EPISODES = [
    EpisodeTrial("raises", "first", "retry"),
    EpisodeTrial("raises", "reset", "drop"),
    EpisodeTrial("hangs", "middle", "drop", "process"),
    EpisodeTrial("exits", "last", "retry", "process"),
    EpisodeTrial("gigabyte", "first", "stop", "process"),
    EpisodeTrial("sys_exit", "reset", "stop", "process"),
    EpisodeTrial("garbage", "last", "stop"),
    EpisodeTrial("text_reward", "middle", "drop"),
    EpisodeTrial("assistant", "first", "drop"),
    EpisodeTrial("megabytes", "middle", "stop"),
    EpisodeTrial("server dies", "middle"),
    EpisodeTrial("SIGTERM", "last", isolation="process"),
    EpisodeTrial("new weights", "first"),
    EpisodeTrial("context full", "middle"),
    EpisodeTrial("turn limit", "last"),
]


@pytest.mark.parametrize("trial", EPISODES, ids=lambda trial: f"{trial.behaviour}@{trial.point}")
def test_a_fault_of_an_episode_ends_as_expected(trial):
    outcome = run_episode_trial(trial)
    assert outcome.is_as_expected, outcome
    if trial.isolation == "process":
        processes = environment_processes()
        assert wait_for(lambda: not children(processes._process.pid), 10), (
            "a process of an episode is left"
        )


def children(pid):
    found = psutil.Process(pid).children(recursive=True)
    return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]


def test_an_unexpected_outcome_of_an_episode_is_reported():
    good = EpisodeOutcome(
        trial=EpisodeTrial("raises", "first", "drop"), ending="dropped", seconds=0.1
    )
    assert good.is_as_expected and episode_table([good])[-1].startswith(
        "| all | 1 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 0 |"
    )
    for change in (
        {"ending": "recovered"},
        {"lost": 1},
        {"duplicated": 1},
        {"hung": 1},
        {"silent": 1},
        {"uncounted": 1},
    ):
        assert not replace(good, **change).is_as_expected
    assert {trial.behaviour for trial in episode_trials()} == {*BEHAVIOURS, *INTERRUPTIONS}


@pytest.mark.parametrize(
    "trial", SLICE, ids=lambda trial: f"{trial.behaviour}@{trial.point}x{trial.turns}"
)
def test_a_fault_ends_as_expected(trial):
    outcome = run_trial(trial)
    assert outcome.is_as_expected, outcome


@pytest.mark.parametrize("trial", [Trial("huge_id", "connect", 0), Trial("hang", "end", 0)])
def test_a_trial_does_not_depend_on_the_speed_of_the_machine(trial, monkeypatch):
    """With a deadline that no request can meet the fault may never happen, and honest answers are
    late.
    """
    deadlines, attempt = [], of_servers.attempt

    def watched(trial, deadline):
        deadlines.append(deadline)
        return attempt(trial, deadline if len(deadlines) > 1 else 1e-3)

    monkeypatch.setattr(of_servers, "attempt", watched)
    outcome = run_trial(trial)
    assert outcome.is_as_expected, outcome
    assert len(deadlines) > 1 and outcome.deadline == deadlines[-1] > deadlines[0]


def test_the_table_covers_every_behaviour_at_every_point():
    trials = list(all_trials(2))
    assert len(set(trials)) == len(trials) >= 240
    assert {(trial.behaviour, trial.point) for trial in trials} >= {
        (t.behaviour, point) for t in SLICE for point in POINTS
    }


def test_an_unexpected_outcome_is_reported():
    good = Outcome(trial=Trial("reset", "end", 0), stopped=False, seconds=0.5)
    refused = Outcome(trial=Trial("http_400", "end", 0), stopped=True, seconds=0.1)
    assert good.is_as_expected and refused.is_as_expected
    for broken in (
        Outcome(trial=good.trial, stopped=True, seconds=0.5),
        Outcome(trial=refused.trial, stopped=False, seconds=0.5),
        Outcome(trial=good.trial, stopped=False, lost=1, seconds=0.5),
        Outcome(trial=good.trial, stopped=False, silent=1, seconds=0.5),
    ):
        assert not broken.is_as_expected
    assert table([good, refused])[-1].startswith("| all | 2 | 1 | 1 | 0 | 0 | 0 | 0 | 0 |")


def test_no_damaged_payload_is_misread_and_no_valid_one_is_refused():
    verdicts = damage_payloads(1200, seed=1)
    verdicts["samples"] = damage_samples(300, seed=1)
    for kind, counts in verdicts.items():
        assert counts["wrong"] == counts["crash"] == 0, (kind, counts)
    assert all(
        verdicts[kind]["refused"]
        for kind in ("text", "bytes", "dtype", "shape", "values", "samples")
    )
    assert refuse_good(150, seed=1) == {"same": 150}


def test_the_oracle_catches_what_a_lax_decoder_accepts(monkeypatch):
    """Break the decoder's check for duplicate ids: the verdict must be wrong."""
    import numpy as np

    ids = routes_of(np.random.default_rng(0), SPECS[0], 5)
    assert verdict(encode(ids), ids, SPECS[0]) == "same"
    ids[2, 1] = ids[2, 1, 0]
    assert verdict(encode(ids), ids, SPECS[0]) == "refused"
    monkeypatch.setattr("megatron_rl.rollout.client.routed_experts.check_distinct", lambda *_: None)
    assert verdict(encode(ids), ids, SPECS[0]) == "wrong"
