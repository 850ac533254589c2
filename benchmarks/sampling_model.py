"""A model of servers and of a workload, for simulations of what is sampled when (rollout_sim.py):
no server, nothing measured.

Servers decode all running requests in lockstep: a token of each takes base + per_request x (running
requests of a server) seconds.  Requests are divided evenly; those beyond the slots wait, first
come, first served.  A response that is continued first has its tokens computed again (prefill): a
server does nothing else meanwhile.  Prompts take no time.

Lengths are lognormal, a share of them at the cap; the share of a prompt's responses at the cap is
Beta-distributed.  A response has the same length whenever it is sampled, so that sampling again
does not shorten it.  The time of an update is proportional to its tokens; a weight sync takes
constant time, in which servers decode nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

Key = tuple[int, int]
"""(prompt, index of the response)."""


@dataclass(frozen=True)
class Workload:
    """The responses of a run: `prompts` x `group` per step."""

    prompts: int = 64
    group: int = 16
    steps: int = 50
    seed: int = 0
    median: float = 3000
    sigma: float = 0.8
    cap: int = 32_768
    cap_share: float = 0.12
    alike: float = 0.5
    """Concentration of the Beta distribution; if it is large, the responses of a prompt are
    independent.
    """
    update: float = 0.0
    """Seconds of an update per token."""
    sync: float = 3.0
    """Seconds of a weight sync."""

    @cached_property
    def lengths(self) -> Callable[[int], list[int]]:
        """Return number of a prompt -> the lengths of its responses."""

        @lru_cache(None)
        def lengths(prompt: int) -> list[int]:
            rng = np.random.default_rng([self.seed, prompt])
            drawn = rng.lognormal(np.log(self.median), self.sigma, self.group)
            at_cap = rng.beta(self.cap_share * self.alike, (1 - self.cap_share) * self.alike)
            drawn[rng.random(self.group) < at_cap] = self.cap
            return np.clip(drawn, 1, self.cap).astype(int).tolist()

        return lengths

    @cached_property
    def step_tokens(self) -> float:
        """Return the mean tokens of a step."""
        return (
            sum(sum(self.lengths(prompt)) for prompt in range(self.prompts * self.steps))
            / self.steps
        )


@dataclass(frozen=True)
class Speed:
    """The speed of `servers` servers with `slots` slots each."""

    servers: int = 8
    slots: int = 128
    base: float = 8e-3
    """Seconds of a token, without requests."""
    per_request: float = 6e-5
    """Additional seconds of a token per running request."""
    prefill: float = 2e-5
    """Seconds of a token that is computed again."""

    def token(self, running: float) -> float:
        """Return the seconds of a token of every running request."""
        return self.base + self.per_request * running / self.servers

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second with all slots taken."""
        return self.servers * self.slots / self.token(self.servers * self.slots)


@dataclass(eq=False)
class Response:
    """One sampling of a response."""

    key: Key
    length: int
    segments: list[tuple[int, float]] = field(default_factory=list)
    """(version, tokens) of the tokens so far, oldest first."""

    @property
    def done(self) -> float:
        return sum(tokens for _, tokens in self.segments)

    @property
    def oldest(self) -> int:
        return self.segments[0][0]


class Servers:
    """The servers' clock.  `finished` is called with each response that is complete."""

    def __init__(self, speed: Speed, finished: Callable[[Response], None]) -> None:
        self.speed, self.finished = speed, finished
        self.clock = self.busy = 0.0  # busy: the integral of running requests over time
        self.version = 0
        self.tokens = self.debt = (
            0.0  # tokens each running request has made since the beginning; seconds of prefill due
        )
        self.running: list[
            tuple[float, Key, float, Response]
        ] = []  # heap: (tokens at its end, key, at its start, response)
        self.waiting: deque[Response] = deque()

    def submit(self, response: Response) -> None:
        self.waiting.append(response)
        self._admit()

    def advance(
        self, until: float = math.inf, is_enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Decode up to the time `until`, or until `is_enough`, which is asked first and after every
        response.
        """
        while not is_enough():
            if not self.running:
                if until == math.inf:
                    raise RuntimeError("nothing is sampled, and more is waited for")
                self.clock, self.debt = max(self.clock, until), 0.0
                return
            end, _, start, response = self.running[0]
            if (at := self.next_end) > until:
                left = max(0.0, until - self.clock)
                self.busy += len(self.running) * left
                self.tokens += max(0.0, left - self.debt) / self.speed.token(len(self.running))
                self.clock, self.debt = max(self.clock, until), max(0.0, self.debt - left)
                return
            self.busy += len(self.running) * (at - self.clock)
            self.clock, self.debt, self.tokens = at, 0.0, end
            heapq.heappop(self.running)
            self._extend(response, end - start)
            self._admit()
            self.finished(response)

    def pause(self, seconds: float) -> None:
        """Let `seconds` pass without decoding."""
        self.clock += seconds

    def next_version(self) -> None:
        """Sync weights without interrupting requests: the tokens so far belong to the previous
        version.
        """
        for _, _, start, response in self.running:
            self._extend(response, self.tokens - start)
        # still a heap
        self.running = [(end, key, self.tokens, response) for end, key, _, response in self.running]
        self.version += 1

    def stop(self) -> list[Response]:
        """Abort all requests, and return the partial responses in the order of their requests."""
        stopped = [response for _, _, _, response in sorted(self.running, key=lambda item: item[2])]
        for end, _, start, response in self.running:
            self._extend(response, min(end, self.tokens) - start)
        stopped += self.waiting
        self.running, self.waiting, self.debt = [], deque(), 0.0
        return stopped

    def remove(self, response: Response) -> None:
        """Abort one request."""
        if response in self.waiting:
            self.waiting.remove(response)
            return
        end, _, start, _ = item = next(item for item in self.running if item[3] is response)
        self.running.remove(item)
        heapq.heapify(self.running)
        self._extend(response, min(end, self.tokens) - start)
        self._admit()

    @property
    def next_end(self) -> float:
        """Return the time at which the next response is complete if nothing else happens."""
        if not self.running:
            return math.inf
        return (
            self.clock
            + self.debt
            + (self.running[0][0] - self.tokens) * self.speed.token(len(self.running))
        )

    def _extend(self, response: Response, tokens: float) -> None:
        if tokens > 0:
            response.segments.append((self.version, tokens))

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.speed.servers * self.speed.slots:
            response = self.waiting.popleft()
            done = response.done
            self.debt += done * self.speed.prefill / self.speed.servers
            heapq.heappush(
                self.running,
                (self.tokens + response.length - done, response.key, self.tokens, response),
            )


@dataclass
class Record:
    """The record of a simulated run.

    Shares and speeds are of the steps without the first and last sixth, in which queues fill and
    empty.
    """

    workload: Workload
    trained: Counter[Key] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    """Versions between sampling a token and training on it -> tokens."""
    oldest: Counter[int] = field(default_factory=Counter)
    """The same of a response's oldest token -> responses."""
    tokens: float = 0.0
    idle: float = 0.0
    """Seconds in which the trainer waited for responses, without weight syncs."""
    seconds: float = 0.0
    ends: list[tuple[float, float, float]] = field(default_factory=list)
    """(clock, idle, tokens) after each step."""
    stale: int = 0
    dropped: int = 0
    running: float = 0.0  # requests, mean

    def train(
        self, responses: Sequence[tuple[Key, Sequence[tuple[int, float]]]], version: int
    ) -> float:
        """Train on these (key, segments) from weights `version`, and return the seconds of the
        update.
        """
        tokens = 0.0
        for key, segments in responses:
            self.trained[key] += 1
            self.oldest[version - segments[0][0]] += 1
            for sampled, count in segments:
                self.ages[version - sampled] += round(count)
                tokens += count
        self.tokens += tokens
        return tokens * self.workload.update

    def step_done(self, clock: float) -> None:
        self.seconds = clock
        self.ends.append((clock, self.idle, self.tokens))

    def check(
        self, started: Iterable[int], waiting: Iterable[int], budget: float = math.inf
    ) -> None:
        """Check that every started prompt is trained on once, or dropped, or waiting.

        Raises RuntimeError if not, or for a response older than `budget`.
        """
        started, waiting, group = set(started), set(waiting), self.workload.group
        prompts = Counter(prompt for prompt, _ in self.trained)
        counts = {
            "lost": len(started - set(prompts) - waiting) - self.dropped,
            "unknown": len(set(prompts) - started) + len(waiting - started),
            "incomplete": sum(count != group for count in prompts.values()),
            "twice": sum(count - 1 for count in self.trained.values())
            + len(waiting & set(prompts)),
            "too_old": sum(count for age, count in self.oldest.items() if age > budget),
        }
        if any(counts.values()):
            raise RuntimeError(f"the scheduler broke its promise: {counts}")

    @property
    def middle(self) -> tuple[float, float, float]:
        """Return seconds, idle seconds and tokens of the steps in the middle."""
        edge = len(self.ends) // 6
        first, last = ((0.0, 0.0, 0.0), *self.ends)[edge], self.ends[-1 - edge]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]

    @property
    def idle_share(self) -> float:
        seconds, idle, _ = self.middle
        return idle / seconds

    @property
    def tokens_per_second(self) -> float:
        seconds, _, tokens = self.middle
        return tokens / seconds

    @property
    def all_idle_share(self) -> float:
        """Return the idle share of all steps."""
        return self.idle / self.seconds

    @property
    def mean_length(self) -> float:
        return self.tokens / self.trained.total()

    @property
    def mean_age(self) -> float:
        return sum(age * count for age, count in self.ages.items()) / self.ages.total()

    def age_quantile(self, share: float) -> int:
        """Return the age that this share of the tokens does not exceed."""
        total, seen = self.ages.total(), 0
        for age in sorted(self.ages):
            seen += self.ages[age]
            if seen >= share * total:
                return age
        raise ValueError("no token was trained on")


@dataclass(frozen=True)
class Bound:
    """Seconds of a step that no scheduler can go below, by the part that limits it."""

    training: float
    """An update and a weight sync."""
    servers: float
    """The tokens of a step with every slot taken, and the pause of a weight sync."""
    longest: float
    """A response at the cap.

    drain: it must end between two weight syncs.  Else it must end before its first token is more
    than k versions old: if every step waits W, (k + 1) W + k updates pass from the beginning of the
    wait of step v to the end of that of step v + k.  It runs at the load that the tokens of a step
    need.
    """

    @property
    def seconds(self) -> float:
        return max(self.training, self.servers, self.longest)

    @property
    def idle_share(self) -> float:
        return 1 - self.training / self.seconds

    @property
    def limit(self) -> str:
        """Return the name of the part that limits; "training" is the ideal."""
        return max(
            ("training", "servers", "longest"),
            key=lambda name: (getattr(self, name), name == "training"),
        )


def bound(workload: Workload, speed: Speed, k: int, *, drains: bool) -> Bound:
    """Compute the bounds of max_staleness = k."""
    tokens = workload.step_tokens
    update, decoding = tokens * workload.update, tokens / speed.tokens_per_second
    # the integral of token() over a step whose responses all start together
    together = speed.base * workload.cap + speed.per_request * tokens / speed.servers
    servers = decoding + workload.sync + (0 if k else update)
    if k == 0:
        longest = together + update + workload.sync
    elif drains:
        longest = max(together, update) + workload.sync
    else:
        least = max(update, decoding)
        while (waits := _wait(workload, speed, k, update, tokens / least)) > least - update:
            least += max(1e-3 * least, 0.5 * (waits - (least - update)) / (k + 1))
        longest = update + waits + workload.sync
    return Bound(update + workload.sync, servers, longest)


def _wait(workload: Workload, speed: Speed, k: int, update: float, rate: float) -> float:
    """Return the wait of every step with which a response at the cap ends in time while servers
    make `rate` tokens per second.

    With n running requests on each server, rate = servers n / token and token = base + per_request
    n.
    """
    token = speed.base / (1 - speed.per_request * rate / speed.servers)
    return max(0.0, (workload.cap * token - k * update) / (k + 1))
