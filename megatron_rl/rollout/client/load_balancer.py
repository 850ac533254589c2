"""Which server gets the next request: the one with the least tokens outstanding among those that are not left alone.

A circuit per server: after FAILURES_TO_OPEN failures in a row it is open, and the server is left alone for a while that
doubles with every further failure; then one request may try it, whose success closes the circuit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

FAILURES_TO_OPEN = 3
COOLDOWN_SECONDS = 5.0
MAX_COOLDOWN_SECONDS = 80.0

logger = logging.getLogger(__name__)


@dataclass
class ServerState:
    """tokens: prompt and response tokens asked for and not answered yet, at most; failures: in a row."""

    url: str
    tokens: int = 0
    requests: int = 0
    failures: int = 0
    left_alone_until: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.failures >= FAILURES_TO_OPEN


class LoadBalancer:
    """Holds the state of every server over all calls of a client.  `clock` gives seconds."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.servers: list[ServerState] = []
        self.set_urls(urls)

    def set_urls(self, urls: Sequence[str]) -> None:
        """From now on these; a server that was among them before keeps its state."""
        if not urls:
            raise ValueError("RolloutClient needs at least one server URL (rollout.urls, or a server of its own)")
        known = {server.url: server for server in self.servers}
        self.servers = [known.get(url) or ServerState(url) for url in (url.rstrip("/") for url in urls)]

    def pick(self, avoid: Collection[str] = ()) -> ServerState:
        """The server for a request; `avoid`: URLs that failed this group before, taken only where there is no other.

        Never refuses: with every circuit open it is the server that will be tried again soonest, and the caller's bounded
        retries decide.
        """
        now = self.clock()

        def order(server: ServerState) -> tuple[bool, float, bool, int]:
            alone = not self._may_try(server, now)
            return alone, server.left_alone_until if alone else 0.0, server.url in avoid, server.tokens

        return min(self.servers, key=order)

    def waiting_for(self) -> str:
        """Servers with requests that they have not answered; "" for none."""
        return ", ".join(f"{server.url} ({server.requests} requests)" for server in self.servers if server.requests)

    def _may_try(self, server: ServerState, now: float) -> bool:
        """A server whose time alone is over is tried by one request at a time."""
        return not server.is_open or (now >= server.left_alone_until and server.requests == 0)

    def succeeded(self, server: ServerState) -> None:
        if server.is_open:
            logger.warning("rollout server %s answers again", server.url)
        server.failures, server.left_alone_until = 0, 0.0

    def failed(self, server: ServerState, why: str) -> bool:
        """Count a failure; True where it opened the circuit, which is logged with the server's name."""
        now, was_open = self.clock(), server.is_open
        if was_open and now < server.left_alone_until:  # of a request sent before: no news
            return False
        server.failures += 1
        if not server.is_open:
            return False
        doublings = server.failures - FAILURES_TO_OPEN
        seconds = min(COOLDOWN_SECONDS * 2 ** min(doublings, 10), MAX_COOLDOWN_SECONDS)
        server.left_alone_until = now + seconds
        if not was_open:
            logger.warning(
                "rollout server %s failed %d times in a row (%s): left alone for %g s",
                server.url,
                server.failures,
                why,
                seconds,
            )
        return not was_open
