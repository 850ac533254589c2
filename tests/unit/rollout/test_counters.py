"""Counts of a client add up: what happens twice is counted twice, in every counter that it
concerns.
"""

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.client import client as client_module
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.counters import CallStats
from megatron_rl.rollout.client.load_balancer import COOLDOWN_SECONDS
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from tests.fake_model import FakeModel
from tests.fake_server import SPEC, VERSION, FakeServer, send

PROMPTS = [Prompt(f"q{i}", "", (3, 4, 5 + i), "") for i in range(4)]
RESUME = {"over_sample": 0.5, "partial": "resume", "max_staleness": 1}


class Refusing(FakeServer):
    """Confirms no abort."""

    def route(self, handler, body) -> None:
        if handler.path == "/abort_request":
            send(handler, 500, b"")
        else:
            super().route(handler, body)


def fill(client, groups, keep=None, version=VERSION):
    client.fill(groups, Sampling(1.0, 6, (1,), version), keep=keep)
    return [group for group in groups if not group.is_complete]


def new(*numbers, size=2):
    return [Group(PROMPTS[number], size) for number in numbers]


def faults(client, server, clock):
    for fault in ("http_503", "html", "stale", "duplicate_route", "retracted"):
        server.script = [fault, "ok"]
        fill(client, new(0, 1))


def missing_routes(client, server, clock):
    server.script = ["gap_of_zeros", "gap_of_minus_one", "ok"]
    fill(client, new(0, 1))


def cancelled(client, server, clock):
    server.script = ["slow", "ok"]
    fill(client, new(0, 1), keep=1)


def cut_and_resumed(client, server, clock):
    for _ in range(2):
        server.script = ["slow", "ok"]
        left = fill(client, new(0, 1), keep=1)
        fill(client, left)


def lost(client, server, clock):
    server.script = ["hang", "ok"]
    fill(client, new(0, 1), keep=1)


def late(client, server, clock):
    server.script = ["slow", "ok"]
    server.late = lambda: clock.advance(client.cfg.request_timeout_seconds)
    fill(client, new(0))


def opened(client, server, clock):
    server.script = ["http_500"] * 3 + ["ok"]
    fill(client, new(0))
    clock.advance(COOLDOWN_SECONDS)
    fill(client, new(0))


ONCE = {  # scenario: settings, what it counts at least
    faults: ({}, {"failed_requests": 2, "dropped_samples": 2, "retracted_samples": 1,
    "redrawn_samples": 6, "retries": 4,
                  "dropped_tokens": 10, "retracted_tokens": 5, "faults_http": 1, "faults_stale": 1,
                  "faults_routes": 1}),
    missing_routes: ({"drop_missing_routes": True}, {"dropped_samples": 2, "faults_routes": 2}),
    cancelled: ({"over_sample": 0.5}, {"cancelled_groups": 1, "cancelled_samples": 2,
    "cancelled_tokens": 4}),
    cut_and_resumed: (RESUME, {"cut_samples": 4, "resumed_samples": 4}),
    lost: (RESUME, {"lost_samples": 2, "redrawn_samples": 2}),
    late: ({}, {"failed_requests": 1, "cut_samples": 2, "resumed_samples": 2, "faults_timeout": 1,
    "redrawn_samples": 0}),
    opened: ({}, {"circuits_opened": 1, "failed_requests": 3, "faults_http": 3}),
}  # fmt: skip
COUNTED = ("requests", "samples", "aborts", "aborts_failed")
"""Counters that are not metrics."""


def test_tokens_of_the_prefix_cache_are_counted_where_a_server_reports_both_numbers():
    """Else a server that reports one of them would look as if its cache were never, or always,
    hit.
    """
    stats = CallStats()
    reports = [
        (9, 0),
        (9, 9),
        (9, 4),
        (9, 10),
        (9, -1),
        (9, None),
        (None, 4),
        (True, False),
        ("9", "4"),
    ]
    samples = [
        {"meta_info": {"prompt_tokens": sent, "cached_tokens": cached}} for sent, cached in reports
    ]
    stats.answered(0.5, [*samples, "no sample", {"meta_info": None}])
    assert (stats.prompt_tokens, stats.cached_tokens, stats.request_seconds) == (27, 13, [0.5])
    assert vars(stats + stats) == vars(stats) | {
        "prompt_tokens": 54, "cached_tokens": 26, "request_seconds": [0.5, 0.5]
    }  # fmt: skip


@pytest.mark.parametrize("scenario", ONCE, ids=lambda scenario: scenario.__name__)
def test_what_happens_twice_is_counted_twice(scenario, clock, monkeypatch):
    monkeypatch.setattr(client_module, "RETURN_SECONDS", 0.3)
    settings, least = ONCE[scenario]
    drops = settings.get("drop_missing_routes", False)
    cfg = RolloutConfig(
        max_concurrency=4 if "over_sample" in settings else 1, **settings if not drops else {}
    )
    source = {"source": FakeModel(version=VERSION)} if scenario in (cut_and_resumed, late) else {}
    with (Refusing if scenario is lost else FakeServer)("ok", **source) as server:
        client = RolloutClient(
            [server.url], cfg, SampleRules(SPEC, want_routes=True, drop_missing_routes=drops)
        )
        client.balancer.clock = clock
        client.clock = clock if scenario is late else client.clock
        counts = []
        for _ in range(2):
            scenario(client, server, clock)
            counted = vars(client.counters)
            counts.append(client.counters.totals() | {name: counted[name] for name in COUNTED})
        stats = client.take_stats()
    once, twice = counts
    assert not once.keys() & {f"rollout/{name}_total" for name in (*COUNTED, "failures", "dropped")}
    assert {name: once[f"rollout/{name}_total"] for name in least} == least
    assert (once["aborts"] > 0) == (scenario in (cancelled, cut_and_resumed, lost, late))
    assert once["aborts_failed"] == (once["aborts"] if scenario is lost else 0)
    assert twice == {name: 2 * count for name, count in once.items()}
    assert stats.dropped_without_route == (4 if drops else 0)
