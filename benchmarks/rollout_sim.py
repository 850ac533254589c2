"""Simulated: what over-provisioned and overlapped sampling gain over synchronous steps, and what becomes of every response.

    python benchmarks/rollout_sim.py [--steps 50] [--seeds 0 1 2] [--over 1.5] [--budget 1] [--alike 0.5] [--json]

A discrete-event simulation; no server, no model, nothing measured.  Servers decode all running requests in step: a token of
each takes BASE + PER_REQUEST x (running requests of a server) seconds, and what does not fit into their slots waits.
Lengths are lognormal, 12 % of them the cap: of a prompt's responses a Beta-distributed share, --alike its concentration.
A response has its length whenever it is sampled, so that asking again does not shorten it.  An update takes time in
proportion to its tokens (--update-share of a synchronous step), a push is constant.

The modes are those of rollout.over_sample, partial and max_staleness (docs/guides/servers.md):

synchronous          P groups are sampled, then trained on, then the weights are pushed.
over, drop           P x OVER groups are started; when P are whole the rest is thrown away, prompts and all.
over, resume         ... the rest goes on in the next step where it stopped, before new groups, with tokens of two policies in a
                     response.  What is older than --budget versions when it could be trained on is sampled anew, and then
                     waited for.
overlapped           the P groups of the next step are sampled while this one is trained on, and the push waits for both: all
                     of them one version old.
overlapped, resume   both, at --budget + 1 versions.

Every response is followed in a ledger: lost (started, and then neither trained on, nor dropped, nor waiting), duplicated
(trained on twice) and too old (beyond the budget) are counted from it, and must be 0 or the simulation stops.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import sys
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

MODES = ("synchronous", "over, drop", "over, resume", "overlapped", "overlapped, resume")
SERVERS, SLOTS = 8, 128  # slots of each
BASE, PER_REQUEST = 8e-3, 6e-5  # seconds per token
MEDIAN, SIGMA, CAP, CAP_SHARE = 3000, 0.8, 32_768, 0.12  # tokens
PUSH_SECONDS = 3.0

Key = tuple[int, int]
"""(group, index): one response that somebody waits for, however often it is sampled."""


@dataclass
class Response:
    """One sampling of a response; `done` tokens of `length` exist, the oldest of them of policy `version`."""

    key: Key
    length: int
    version: int
    done: float = 0.0


@dataclass
class Ledger:
    """What became of every response."""

    started: Counter[Key] = field(default_factory=Counter)  # samplings
    dropped: Counter[Key] = field(default_factory=Counter)  # samplings thrown away because the step was full
    stale: Counter[Key] = field(default_factory=Counter)  # samplings thrown away for their age
    trained: Counter[Key] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)  # versions between sampling and training, of the oldest token

    def check(self, waiting: Iterable[Key], budget: int) -> dict[str, int]:
        """Counts of what must not be; raises RuntimeError unless all are 0."""
        now = Counter(waiting)
        ends = self.dropped + self.stale + self.trained + now
        counts = {
            "lost": (self.started - ends).total(),
            "duplicated": (ends - self.started).total() + sum(n - 1 for n in self.trained.values() if n > 1),
            "too_old": sum(count for age, count in self.ages.items() if age > budget),
        }
        if any(counts.values()):
            raise RuntimeError(f"the scheduler broke its promise: {counts}")
        return counts


class Servers:
    """All running requests advance together: `tokens` counts those that each of them has made since the beginning."""

    def __init__(self) -> None:
        self.clock = self.tokens = 0.0
        self.running: list[tuple[float, Key, Response]] = []  # (tokens at which it ends, ...), a heap
        self.waiting: deque[Response] = deque()

    def submit(self, response: Response) -> None:
        self.waiting.append(response)
        self._admit()

    def next_finished(self) -> Response:
        """Let time pass until one response is whole."""
        end, _, response = self.running[0]
        self.clock += (end - self.tokens) * (BASE + PER_REQUEST * len(self.running) / SERVERS)
        self.tokens = end
        heapq.heappop(self.running)
        self._admit()
        response.done = response.length
        return response

    def stop(self) -> list[Response]:
        """Abort everything; responses as far as they got."""
        stopped = [response for _, _, response in self.running]
        for end, _, response in self.running:
            response.done = response.length - (end - self.tokens)
        stopped += self.waiting
        self.running, self.waiting = [], deque()
        return stopped

    def _admit(self) -> None:
        while self.waiting and len(self.running) < SERVERS * SLOTS:
            response = self.waiting.popleft()
            heapq.heappush(self.running, (self.tokens + response.length - response.done, response.key, response))


class Simulation:
    """`steps` steps in one mode; `result` afterwards."""

    def __init__(self, mode: str, seed: int, args: argparse.Namespace, seconds_per_token: float) -> None:
        self.mode, self.args, self.seconds_per_token = mode, args, seconds_per_token
        self.rng = np.random.default_rng(seed)
        self.lengths: dict[int, list[int]] = {}  # by group
        self.servers, self.ledger = Servers(), Ledger()
        self.is_ahead, self.resumes = mode.startswith("overlapped"), mode.endswith("resume")
        self.budget = int(self.is_ahead) + (args.budget if self.resumes else 0)
        self.kept: list[Response] = []  # finished, of groups that are not whole
        self.partial: list[Response] = []
        self.must: set[int] = set()  # groups that were sampled anew for their age: the next steps wait for them
        self.tokens, self.idle, self.whole_lengths = 0, 0.0, []

    def run(self) -> dict[str, float]:
        trainer_free = 0.0
        for step in range(self.args.steps):
            began = self.servers.clock
            version = max(0, step - 1) if self.is_ahead else step
            groups = self.sample(version, step)
            update = self.train(groups, step)
            if (
                self.is_ahead
            ):  # the weights of the update before are pushed; then the next step is sampled during this update
                self.idle += max(0.0, self.servers.clock - trainer_free)
                self.servers.clock = max(trainer_free, self.servers.clock) + (PUSH_SECONDS if step else 0.0)
                trainer_free = self.servers.clock + update
            else:
                self.idle += self.servers.clock - began
                self.servers.clock += update + PUSH_SECONDS
        seconds = trainer_free + PUSH_SECONDS if self.is_ahead else self.servers.clock
        waiting = [response.key for response in (*self.kept, *self.partial)]
        counts = self.ledger.check(waiting, self.budget)
        ages = self.ledger.ages
        return {
            "responses_per_s": self.ledger.trained.total() / seconds,
            "tokens_per_s": self.tokens / seconds,
            "mean_length": float(np.mean(self.whole_lengths)),
            "trainer_idle": self.idle / seconds,
            "dropped": self.ledger.dropped.total(),
            "stale": self.ledger.stale.total(),
            "mean_age": sum(age * count for age, count in ages.items()) / ages.total(),
            "rollout_seconds_per_token": (seconds - self.args.steps * PUSH_SECONDS) / self.tokens,
            **counts,
        }

    def sample(self, version: int, step: int) -> list[list[Response]]:
        """P whole groups, in the order of completion."""
        wanted = self.args.prompts
        members: dict[int, list[Response]] = {}
        self.refuse_old(step, version)
        for response in self.kept:
            members.setdefault(response.key[0], []).append(response)
        open_groups = {response.key[0] for response in (*self.kept, *self.partial)}
        for response in sorted(self.partial, key=lambda response: response.key):
            self.servers.submit(response)
        self.kept, self.partial = [], []
        count = wanted if self.mode in ("synchronous", "overlapped") else math.ceil(wanted * self.args.over)
        while len(open_groups) < count:
            group = len(self.lengths)
            open_groups.add(group)
            for index, _ in enumerate(self.lengths_of(group)):
                self.start((group, index), version)
        whole = [group for group, found in members.items() if len(found) == self.args.group]  # not needed the last time
        self.must &= open_groups
        while len(whole) < wanted or not self.must <= set(whole):
            response = self.servers.next_finished()
            of_group = members.setdefault(response.key[0], [])
            of_group.append(response)
            if len(of_group) == self.args.group:
                whole.append(response.key[0])
        whole.sort(key=lambda group: group not in self.must)  # those that were waited for are among the P
        self.put_back([group for group in members if group not in whole[:wanted]], members)
        self.must -= set(whole[:wanted])
        return [members[group] for group in whole[:wanted]]

    def put_back(self, groups: list[int], members: dict[int, list[Response]]) -> None:
        """What the step does not use: thrown away, or kept as far as it got."""
        partial, kept = self.servers.stop(), [response for group in groups for response in members[group]]
        if self.resumes:
            self.partial, self.kept = partial, kept
            return
        for response in (*kept, *partial):
            self.ledger.dropped[response.key] += 1

    def refuse_old(self, step: int, version: int) -> None:
        """Sample anew, from `version`, what would be older than the budget when this step trains on it."""
        old = [response for response in (*self.kept, *self.partial) if step - response.version > self.budget]
        keys = {response.key for response in old}
        self.kept = [response for response in self.kept if response.key not in keys]
        self.partial = [response for response in self.partial if response.key not in keys]
        for response in old:
            self.ledger.stale[response.key] += 1
            self.must.add(response.key[0])
            self.start(response.key, version)

    def start(self, key: Key, version: int) -> None:
        self.ledger.started[key] += 1
        self.servers.submit(Response(key, self.lengths_of(key[0])[key[1]], version))

    def lengths_of(self, group: int) -> list[int]:
        """The responses' lengths, drawn once."""
        if group not in self.lengths:
            drawn = self.rng.lognormal(np.log(MEDIAN), SIGMA, self.args.group)
            by_prompt = self.rng.beta(CAP_SHARE * self.args.alike, (1 - CAP_SHARE) * self.args.alike)
            drawn[self.rng.random(self.args.group) < by_prompt] = CAP
            self.lengths[group] = np.clip(drawn, 1, CAP).astype(int).tolist()
        return self.lengths[group]

    def train(self, groups: list[list[Response]], step: int) -> float:
        """Count what is trained on; seconds that it takes."""
        responses = [response for group in groups for response in group]
        for response in responses:
            self.ledger.trained[response.key] += 1
            self.ledger.ages[step - response.version] += 1
        lengths = [response.length for response in responses]
        self.tokens += sum(lengths)
        self.whole_lengths += lengths
        return sum(lengths) * self.seconds_per_token


def simulate(seed: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Every mode on the same lengths."""
    rollout = Simulation("synchronous", seed, args, 0.0).run()["rollout_seconds_per_token"]
    seconds_per_token = rollout * args.update_share / (1 - args.update_share)
    return {mode: Simulation(mode, seed, args, seconds_per_token).run() for mode in MODES}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--over", type=float, default=1.5, help="groups started per group wanted")
    parser.add_argument(
        "--alike", type=float, default=0.5, help="small: a prompt's responses share the cap; 1000: do not"
    )
    parser.add_argument("--budget", type=int, default=1, help="versions that resuming may add to a token's age")
    parser.add_argument("--update-share", type=float, default=0.2, help="of a synchronous step without its push")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    runs = [simulate(seed, args) for seed in args.seeds]
    if args.json:
        print(json.dumps(dict(zip(map(str, args.seeds), runs, strict=True)), indent=1))
        return 0
    print(
        "| simulated | responses/s | tokens/s | mean length | trainer idle | dropped | stale | mean age | lost | duplicated |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for mode in MODES:
        print(row(mode, runs))
    return 0


def row(mode: str, runs: list[dict[str, dict[str, float]]]) -> str:
    """Means over the seeds; speeds as ratios to the synchronous run of the same seed, with their range."""

    def mean(name: str) -> float:
        return statistics.mean(run[mode][name] for run in runs)

    def ratio(name: str) -> str:
        ratios = [run[mode][name] / run["synchronous"][name] for run in runs]
        return f"{statistics.mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

    return (
        f"| {mode} | {ratio('responses_per_s')} | {ratio('tokens_per_s')} | {mean('mean_length'):.0f} | "
        f"{mean('trainer_idle'):.0%} | {mean('dropped'):.0f} | {mean('stale'):.0f} | {mean('mean_age'):.2f} | "
        f"{sum(run[mode]['lost'] for run in runs):.0f} | {sum(run[mode]['duplicated'] for run in runs):.0f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
