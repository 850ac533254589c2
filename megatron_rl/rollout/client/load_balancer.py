"""The choice of a server for every request: the one with the fewest outstanding tokens among those
whose circuit is closed.

Each server has a circuit breaker.  After FAILURES_TO_OPEN failures in a row it opens, and the
server gets no request for a time that doubles with every further failure.  Then one request may try
the server, and its success closes the circuit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

FAILURES_TO_OPEN = 3
# integers: a float would overflow when it is doubled without a limit
COOLDOWN_SECONDS, MAX_COOLDOWN_SECONDS = 5, 80

logger = logging.getLogger(__name__)


@dataclass
class ServerState:
    """Load and circuit of one server."""

    url: str
    tokens: int = 0
    """Upper bound of the prompt and response tokens that were requested and are not answered."""
    requests: int = 0
    """Number of requests that are not answered."""
    failures: int = 0
    """Number of failures in a row."""
    open_until: float = 0.0
    """Time before which an open circuit admits no request, in seconds of the balancer's clock."""

    @property
    def is_open(self) -> bool:
        return self.failures >= FAILURES_TO_OPEN


class LoadBalancer:
    """State of every server over all calls of a client.  `clock` returns seconds."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.servers: list[ServerState] = []
        self.set_urls(urls)

    def set_urls(self, urls: Sequence[str], *, replaced: bool = False) -> None:
        """Use these servers for all further requests; one that was in use keeps its state.

        replaced: some were replaced, perhaps at their URL: all circuits are closed.
        """
        if not urls:
            raise ValueError(
                "RolloutClient needs at least one server URL: set rollout.urls, or leave it out to"
                " let the run start its own servers"
            )
        known = {} if replaced else {server.url: server for server in self.servers}
        self.servers = [
            known.get(url) or ServerState(url) for url in (url.removesuffix("/") for url in urls)
        ]

    def pick(self, avoid: Collection[str] = (), prefer: str = "") -> ServerState:
        """Return the server for a request.

        avoid: URLs that failed this group before, used only where there is no other.
        prefer: the URL that has the beginning of the request in its prefix cache.

        If every circuit is open, it is the server that will be tried again soonest: the caller
        limits its retries.
        """
        now = self.clock()

        def order(server: ServerState) -> tuple[float, bool, bool, int]:
            # an open circuit is tried by one request at a time
            is_usable = not server.is_open or (now >= server.open_until and server.requests == 0)
            return (
                -math.inf if is_usable else server.open_until,
                server.url in avoid,
                server.url != prefer,  # a cached prefix counts before the load
                server.tokens,
            )

        return min(self.servers, key=order)

    def waiting_for(self) -> str:
        """Return the servers with requests that they have not answered, as text; "" for none."""
        return ", ".join(
            f"{server.url} ({server.requests} requests)"
            for server in self.servers
            if server.requests
        )

    def succeeded(self, server: ServerState) -> None:
        if server.is_open:
            logger.warning("rollout server %s answers again", server.url)
        server.failures = 0

    def failed(self, server: ServerState, why: str) -> bool:
        """Count a failure and return True if it opened the circuit, which is logged with the
        server's name.
        """
        now, was_open = self.clock(), server.is_open
        if was_open and now < server.open_until:  # the request was sent before the circuit opened
            return False
        server.failures += 1  # past the threshold every further one doubles the cooldown
        if not server.is_open:
            return False
        seconds = min(
            COOLDOWN_SECONDS * 2 ** (server.failures - FAILURES_TO_OPEN), MAX_COOLDOWN_SECONDS
        )
        server.open_until = now + seconds
        if not was_open:
            text = "rollout server %s failed %d times in a row (%s): it gets no request for %g s"
            logger.warning(text, server.url, server.failures, why, seconds)
        return not was_open
