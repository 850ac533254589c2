"""Simulated: the share of input tokens that the prefix caches of several servers hold, and how
evenly agents load the servers.

    python benchmarks/agent_cache.py [--servers 4] [--agents 256] [--turns 20]

The choice of servers is the trainer's own: LoadBalancer, with the preference of a session for the
server that it asked last (rollout/agents/branch.py).  Time is simulated: a server computes
PREFILL tokens of input in a second, one request after another, and each of its requests gets
DECODE tokens in a second.  Caches are never full, and hold a request's tokens when it is answered.

An agent has a prompt, which the 8 agents of its group share after the system message of all
agents, and turns of random lengths.  One in four turns also opens a branch, a sub-agent that starts
with the tokens up to then and has three turns at the same time.  A weight sync empties all caches.

cached    share of input tokens that the cache of the asked server has
possible  share that some server's cache has: no choice of servers could find more
requests, tokens   the most that a server got, by the mean: answered requests, and tokens that were
          computed (input without the cached part, and sampled)
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.rollout.client.load_balancer import LoadBalancer, ServerState

PREFILL, DECODE = 20_000.0, 40.0
SYSTEM, PROMPT, SAMPLED, OBSERVED = 1500, (50, 500), (20, 600), (20, 2000)
GROUP, SUB_AGENT_TURNS, BRANCHES = 8, 3, 0.25
MAX_TOKENS = 32_768
"""Limit of a sequence, which the client takes for the load of a request."""

Tokens = tuple[tuple[int, int], ...]
"""A sequence: (number, length) of each piece, in order.  A number is one text."""


@dataclass
class Server:
    """A server with its cache."""

    cache: set[Tokens] = field(default_factory=set)
    free_at: float = 0.0
    """Time when it has computed the inputs that it has."""
    requests: int = 0
    tokens: int = 0

    def known(self, path: Tokens) -> int:
        """Return the number of tokens of the longest beginning that is cached."""
        ends = range(len(path), 0, -1)
        end = next((end for end in ends if path[:end] in self.cache), 0)
        return size(path[:end])


@dataclass
class Session:
    """An agent: the server that it asked last."""

    server: str = ""


def size(path: Tokens) -> int:
    return sum(length for _, length in path)


class Simulation:
    """Agents that ask servers, by a simulated clock."""

    def __init__(self, servers: int, seed: int) -> None:
        self.now, self.random = 0.0, random.Random(seed)
        urls = [f"http://{index}" for index in range(servers)]
        self.balancer = LoadBalancer(urls, lambda: self.now)
        self.servers = {url: Server() for url in urls}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.inputs = self.cached = self.possible = 0
        self.version = 0

    def piece(self, length: int) -> tuple[int, int]:
        return next(self._numbers), length

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def run(self) -> None:
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()

    def sync(self, every: float, until: int) -> None:
        """Empty the caches, and again after `every` seconds, until all agents have ended."""
        self.version += 1
        for server in self.servers.values():
            server.cache.clear()
        if self.version < until:
            self.at(every, lambda: self.sync(every, until))

    def turn(self, session: Session, preferred: str, path: Tokens, turns: int) -> None:
        """Ask for a turn after `path`, and for the further ones when it is answered."""
        state = self.balancer.pick(prefer=preferred)
        server = self.servers[state.url]
        load, sampled = MAX_TOKENS, self.piece(self._between(SAMPLED))
        state.tokens += load
        state.requests += 1
        known = server.known(path)
        self.inputs += size(path)
        self.cached += known
        self.possible += max(other.known(path) for other in self.servers.values())
        server.requests += 1
        server.tokens += size(path) - known + sampled[1]
        server.free_at = max(server.free_at, self.now) + (size(path) - known) / PREFILL
        version, seconds = self.version, server.free_at - self.now + sampled[1] / DECODE
        self.at(
            seconds,
            lambda: self._answered(session, state, load, (path, sampled), turns, version),
        )

    def _answered(
        self,
        session: Session,
        state: ServerState,
        load: int,
        answered: tuple[Tokens, tuple[int, int]],
        turns: int,
        version: int,
    ) -> None:
        state.tokens -= load
        state.requests -= 1
        path = (*answered[0], answered[1])
        if version == self.version:
            cache = self.servers[state.url].cache
            cache.update(path[:end] for end in range(1, len(path) + 1))
        session.server = state.url
        if turns <= 1:
            return
        after = (*path, self.piece(self._between(OBSERVED)))
        if turns > SUB_AGENT_TURNS and self.random.random() < BRANCHES:
            start = (*path, self.piece(self._between(OBSERVED)))
            self.turn(session, session.server, start, SUB_AGENT_TURNS)
        self.turn(session, state.url, after, turns - 1)

    def _between(self, bounds: tuple[int, int]) -> int:
        return self.random.randint(*bounds)


def simulate(servers: int, agents: int, turns: int, syncs: int, seed: int) -> str:
    """Return a row of the table."""
    simulation = Simulation(servers, seed)
    system = simulation.piece(SYSTEM)
    prompt = system
    for index in range(agents):
        if index % GROUP == 0:
            prompt = simulation.piece(simulation.random.randint(*PROMPT))
        simulation.turn(Session(), "", (system, prompt), turns)
    if syncs:
        simulation.at(60.0, lambda: simulation.sync(60.0, syncs))
    simulation.run()
    states = simulation.servers.values()
    cells = [
        max(values) / (sum(values) / len(values))
        for values in ([s.requests for s in states], [s.tokens for s in states])
    ]
    cached, possible = (n / simulation.inputs for n in (simulation.cached, simulation.possible))
    shares = f"{cached:.3f} | {possible:.3f} | {cached / possible:.3f}"
    return f"| {servers} | {agents} | {syncs} | {shares} | {cells[0]:.2f} | {cells[1]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    print("| simulated servers | agents | syncs | cached | possible | ratio | requests | tokens |")
    print("|---|---|---|---|---|---|---|---|")
    for syncs in (0, 1, 4):
        print(simulate(args.servers, args.agents, args.turns, syncs, seed=0), flush=True)


if __name__ == "__main__":
    main()
