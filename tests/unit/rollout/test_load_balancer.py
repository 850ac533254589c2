"""Requests go to the server with the fewest outstanding tokens; one that keeps failing is logged,
then tried by one request.
"""

import logging

import pytest

from megatron_rl.rollout.client.load_balancer import (
    COOLDOWN_SECONDS,
    FAILURES_TO_OPEN,
    MAX_COOLDOWN_SECONDS,
    LoadBalancer,
)


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def balancer(now):
    return LoadBalancer(["http://a/", "http://b", "http://c"], clock=lambda: now[0])


def break_down(balancer, server):
    return [balancer.failed(server, "reset") for _ in range(FAILURES_TO_OPEN)]


def test_the_server_with_the_fewest_outstanding_tokens_is_next(balancer):
    a, b, c = balancer.servers
    a.tokens, b.tokens, c.tokens = 300, 100, 200
    assert balancer.pick() is b
    assert balancer.pick(avoid={"http://b"}) is c, (
        "a server that failed this group comes after the others"
    )
    assert balancer.pick(avoid={"http://a", "http://b", "http://c"}) is b


def test_failures_in_a_row_open_the_circuit_and_name_the_server(balancer, caplog):
    a, *_ = balancer.servers
    with caplog.at_level(logging.WARNING):
        assert break_down(balancer, a) == [False] * (FAILURES_TO_OPEN - 1) + [True]
    assert "http://a failed 3 times in a row (reset)" in caplog.text
    a.tokens = 0
    balancer.servers[1].tokens = balancer.servers[2].tokens = 10**9
    assert balancer.pick() is not a


def test_a_success_in_between_keeps_it_closed(balancer, caplog):
    a, *_ = balancer.servers
    for _ in range(3 * FAILURES_TO_OPEN):
        assert not balancer.failed(a, "timeout")
        balancer.succeeded(a)
    assert not a.is_open and not caplog.messages
    break_down(balancer, a)
    balancer.succeeded(a)
    assert caplog.messages[1:] == ["rollout server http://a answers again"]


def test_one_request_at_a_time_tries_an_open_circuit_and_its_cooldown_doubles(
    balancer, now, caplog
):
    a, b, _ = balancer.servers
    break_down(balancer, a)
    assert not balancer.failed(a, "reset") and a.open_until == now[0] + COOLDOWN_SECONDS, (
        "no news: sent before"
    )
    for doubling in range(1, 8):
        now[0] = a.open_until
        b.tokens = balancer.servers[2].tokens = 1
        assert balancer.pick() is a
        a.requests = 1
        assert balancer.pick() is not a
        a.requests = 0
        assert not balancer.failed(a, "reset") and len(caplog.messages) == 1, "reported once"
        assert a.open_until - now[0] == min(COOLDOWN_SECONDS * 2**doubling, MAX_COOLDOWN_SECONDS)
    now[0] = a.open_until
    balancer.succeeded(a)
    assert balancer.pick() is a and not a.is_open


def test_with_every_circuit_open_the_one_that_is_due_first_is_taken(balancer, now):
    for server in reversed(balancer.servers):
        break_down(balancer, server)
        now[0] += 1
    assert balancer.pick() is balancer.servers[2]


def test_no_server_at_all_is_an_error():
    with pytest.raises(ValueError, match=r"rollout\.urls"):
        LoadBalancer([])


def test_servers_that_stay_keep_their_circuits(balancer):
    a, _b, _ = balancer.servers
    break_down(balancer, a)
    balancer.set_urls(["http://d/", "http://a"])
    assert [server.url for server in balancer.servers] == ["http://d", "http://a"]
    assert balancer.servers[1] is a and a.is_open and not balancer.servers[0].is_open
