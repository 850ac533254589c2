"""Simulated: the gain of over-provisioned and overlapped sampling over synchronous steps, and the fate of every response.

    python benchmarks/rollout_sim.py [--steps 50] [--seeds 0 1 2] [--over 1.5] [--budget 1] [--alike 0.5] [--json]

A discrete-event simulation; no server, no model, nothing measured.  Servers decode all running requests in lockstep: a token of
each takes BASE + PER_REQUEST x (running requests of a server) seconds.  Requests beyond the slots wait.  Lengths are lognormal,
12 % of them at the cap; the share of a prompt's responses at the cap is Beta-distributed, with concentration --alike.  A
response has the same length whenever it is sampled, so sampling again does not shorten it.  The time of an update is
proportional to its tokens (--update-share of a synchronous step); a weight sync takes constant time.

The modes are those of rollout.over_sample, partial and max_staleness (docs/guides/sampling.md):

synchronous          P groups are sampled, then trained on, then the weights are sent.
over, drop           P x OVER groups are started; when P are complete the others are dropped, prompts included.
over, resume         ... the others continue in the next step, before new groups, so a response has tokens of two policies.
                     A response that would be older than --budget versions when trained on is sampled again, and waited for.
overlapped           the P groups of the next step are sampled while this one is trained on, and the weight sync waits for
                     both: all of them are one version old.
overlapped, resume   both, at --budget + 1 versions.

A ledger follows every response.  It counts lost (started, but neither trained on, nor dropped, nor waiting), duplicated (trained
on twice) and too old (beyond the budget) responses.  All must be 0, or the simulation stops.
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
SYNC_SECONDS = 3.0

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
        """Advance the time until one response is complete."""
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
        self.kept: list[Response] = []  # finished, of incomplete groups
        self.partial: list[Response] = []
        self.required: set[int] = set()  # groups sampled again for their age: the next steps wait for them
        self.tokens, self.idle, self.trained_lengths = 0, 0.0, []

    def run(self) -> dict[str, float]:
        trainer_free = 0.0
        for step in range(self.args.steps):
            began = self.servers.clock
            version = max(0, step - 1) if self.is_ahead else step
            groups = self.sample(version, step)
            update = self.train(groups, step)
            if self.is_ahead:  # send the weights of the last update; then sample the next step during this update
                self.idle += max(0.0, self.servers.clock - trainer_free)
                self.servers.clock = max(trainer_free, self.servers.clock) + (SYNC_SECONDS if step else 0.0)
                trainer_free = self.servers.clock + update
            else:
                self.idle += self.servers.clock - began
                self.servers.clock += update + SYNC_SECONDS
        seconds = trainer_free + SYNC_SECONDS if self.is_ahead else self.servers.clock
        waiting = [response.key for response in (*self.kept, *self.partial)]
        counts = self.ledger.check(waiting, self.budget)
        ages = self.ledger.ages
        return {
            "responses_per_s": self.ledger.trained.total() / seconds,
            "tokens_per_s": self.tokens / seconds,
            "mean_length": float(np.mean(self.trained_lengths)),
            "trainer_idle": self.idle / seconds,
            "dropped": self.ledger.dropped.total(),
            "stale": self.ledger.stale.total(),
            "mean_age": sum(age * count for age, count in ages.items()) / ages.total(),
            "rollout_seconds_per_token": (seconds - self.args.steps * SYNC_SECONDS) / self.tokens,
            **counts,
        }

    def sample(self, version: int, step: int) -> list[list[Response]]:
        """P complete groups, in the order of completion."""
        needed = self.args.prompts
        members: dict[int, list[Response]] = {}
        self.refuse_old(step, version)
        for response in self.kept:
            members.setdefault(response.key[0], []).append(response)
        open_groups = {response.key[0] for response in (*self.kept, *self.partial)}
        for response in sorted(self.partial, key=lambda response: response.key):
            self.servers.submit(response)
        self.kept, self.partial = [], []
        count = needed if self.mode in ("synchronous", "overlapped") else math.ceil(needed * self.args.over)
        while len(open_groups) < count:
            group = len(self.lengths)
            open_groups.add(group)
            for index, _ in enumerate(self.lengths_of(group)):
                self.start((group, index), version)
        complete = [
            group for group, found in members.items() if len(found) == self.args.group
        ]  # left over from the last step
        self.required &= open_groups
        while len(complete) < needed or not self.required <= set(complete):
            response = self.servers.next_finished()
            of_group = members.setdefault(response.key[0], [])
            of_group.append(response)
            if len(of_group) == self.args.group:
                complete.append(response.key[0])
        complete.sort(key=lambda group: group not in self.required)  # required groups are among the P
        self.put_back([group for group in members if group not in complete[:needed]], members)
        self.required -= set(complete[:needed])
        return [members[group] for group in complete[:needed]]

    def put_back(self, groups: list[int], members: dict[int, list[Response]]) -> None:
        """Drop the groups that the step does not use, or keep their unfinished responses."""
        partial, kept = self.servers.stop(), [response for group in groups for response in members[group]]
        if self.resumes:
            self.partial, self.kept = partial, kept
            return
        for response in (*kept, *partial):
            self.ledger.dropped[response.key] += 1

    def refuse_old(self, step: int, version: int) -> None:
        """Sample again, from `version`, responses that would be older than the budget when this step trains."""
        old = [response for response in (*self.kept, *self.partial) if step - response.version > self.budget]
        keys = {response.key for response in old}
        self.kept = [response for response in self.kept if response.key not in keys]
        self.partial = [response for response in self.partial if response.key not in keys]
        for response in old:
            self.ledger.stale[response.key] += 1
            self.required.add(response.key[0])
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
        """Count the responses; returns the seconds of the update."""
        responses = [response for group in groups for response in group]
        for response in responses:
            self.ledger.trained[response.key] += 1
            self.ledger.ages[step - response.version] += 1
        lengths = [response.length for response in responses]
        self.tokens += sum(lengths)
        self.trained_lengths += lengths
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
    parser.add_argument("--over", type=float, default=1.5, help="groups started per group needed")
    parser.add_argument(
        "--alike", type=float, default=0.5, help="small: a prompt's responses share the cap; 1000: do not"
    )
    parser.add_argument("--budget", type=int, default=1, help="versions that resuming may add to a token's age")
    parser.add_argument("--update-share", type=float, default=0.2, help="of a synchronous step without its weight sync")
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
