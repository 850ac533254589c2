"""Trials of the rollout client: one of two or three fake servers misbehaves once, in a given way at
a given point.

The result must be all samples, each of them exactly one that a server sent in a correct answer; or,
where a server refuses a request permanently, an immediate error.  With two turns a sample is an
episode, every turn of which was sent so.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.agents import Episode, Session
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.response import ExpectedSample, parse_sample
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from tests.fake_server import (
    ANSWERS,
    POINTS,
    ROUTE_FAULTS,
    SAMPLE_FAULTS,
    SPEC,
    TRANSPORT_FAULTS,
    VERSION,
    FakeServer,
)
from tests.words import word_tokenizer

OF_SEVERAL = ("reordered", "twice_the_first")
"""Faults of an answer with several samples; an episode's turn is a request for one."""
REFUSALS = ("http_400", "http_401", "http_413")
DEADLINE_SECONDS = 2.0
LONGEST_DEADLINE = 64.0
TIMEOUTS = {"hang": 1, "drip": 1}
"""Requests that pass a deadline, where it is not 0."""
HUNG_SECONDS = 60.0
NUM_PROMPTS, GROUP_SIZE = 4, 3
OBSERVED = (40, 41, 42)


@dataclass(frozen=True)
class Trial:
    behaviour: str
    point: str
    seed: int
    turns: int = 1

    @property
    def kind(self) -> str:
        """The row of the table."""
        if self.behaviour in TRANSPORT_FAULTS:
            return self.behaviour
        if self.behaviour in ANSWERS:
            return "refused (4xx)" if self.behaviour in REFUSALS else "wrong answer"
        return "bad routes" if self.behaviour in ROUTE_FAULTS else "bad sample"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What may not happen, each 0 where all is well, and the seconds of the whole call, in which
    others were sampled as well.

    uncounted: the fault left no trace.
    """

    lost: int = 0
    duplicated: int = 0
    hung: int = 0
    silent: int = 0
    uncounted: int = 0
    seconds: float

    @property
    def is_clean(self) -> bool:
        return not any(getattr(self, name) for name in COUNTED)


COUNTED = ("lost", "duplicated", "hung", "silent", "uncounted")


@dataclass(frozen=True, kw_only=True)
class Outcome(Counts):
    """The result of a trial.  silent: samples that were returned and that no server sent in a
    correct answer.

    deadline: of its requests, in seconds.
    """

    trial: Trial
    stopped: bool
    deadline: float = DEADLINE_SECONDS

    @property
    def is_as_expected(self) -> bool:
        return self.stopped == (self.trial.behaviour in REFUSALS) and self.is_clean


def all_trials(num_seeds: int, turns: int = 1) -> Iterator[Trial]:
    """behaviour x point x seed."""
    for seed in range(num_seeds):
        for behaviour in (*TRANSPORT_FAULTS, *ANSWERS, *SAMPLE_FAULTS):
            for point in POINTS:
                if turns == 1 or behaviour not in OF_SEVERAL:
                    yield Trial(behaviour, point, seed, turns)


def run_trial(trial: Trial) -> Outcome:
    """Where the machine was too slow for the deadlines, so that others passed too, again with
    longer ones.

    Raises AssertionError where the fault did not happen with the longest either.
    """
    deadline = DEADLINE_SECONDS
    while True:
        outcome, happened, timeouts = attempt(trial, deadline)
        is_last = deadline >= LONGEST_DEADLINE
        if (happened and timeouts <= TIMEOUTS.get(trial.behaviour, 0)) or is_last:
            assert happened, f"{trial} never happened"
            return outcome
        deadline *= 2


def attempt(trial: Trial, deadline: float) -> tuple[Outcome, bool, int]:
    """(outcome, whether the fault happened, how many requests passed a deadline)."""
    rng = np.random.default_rng(
        [trial.seed, zlib.crc32(f"{trial.behaviour}@{trial.point}".encode())]
    )
    before = 0 if trial.point == "connect" else int(rng.integers(2))  # honest answers first
    script = ["ok"] * before + [f"{trial.behaviour}@{trial.point}", "ok"]
    with ExitStack() as stack:
        servers = [stack.enter_context(FakeServer("ok")) for _ in range(1 + int(rng.integers(2)))]
        bad = stack.enter_context(FakeServer(*script))
        servers.insert(int(rng.integers(len(servers) + 1)), bad)
        deadlines = {f"{name}_timeout_seconds": deadline for name in ("connect", "idle", "request")}
        cfg = RolloutConfig(max_retries=4, **deadlines)
        agent = AgentConfig(function="tests.faults.trials:two_turns")
        runner = (
            EpisodeRunner(agent, word_tokenizer(), SPEC.vocab_size, cfg.max_retries)
            if trial.turns > 1
            else None
        )
        client = RolloutClient(
            [server.url for server in servers],
            cfg,
            SampleRules(SPEC, want_routes=True),
            episodes=runner,
        )
        # it gets the first requests
        client.balancer.servers[servers.index(bad)].tokens = -1_000_000
        started = time.monotonic()
        groups, error, hung = sample(client, 8 * trial.turns, max(HUNG_SECONDS, 10 * deadline))
        seconds = time.monotonic() - started
        honest = {
            turn.tokens.tobytes(): turn for server in servers for turn in correct_samples(server)
        }
    found = [fingerprint(rollout) for group in groups for rollout in group.rollouts]
    expected = [
        sent(rollout, honest, trial.turns) for group in groups for rollout in group.rollouts
    ]
    counted = (
        client.counters.failures.total() + client.counters.dropped.total() + (error is not None)
    )
    outcome = Outcome(
        trial=trial,
        deadline=deadline,
        stopped=error is not None,
        lost=0 if hung or error is not None else NUM_PROMPTS * GROUP_SIZE - len(found),
        duplicated=len(found) - len(set(found)),
        hung=int(hung),
        silent=sum(key != honestly for key, honestly in zip(found, expected, strict=True)),
        uncounted=int(not counted),
        seconds=seconds,
    )
    return outcome, len(bad.script) == 1, client.counters.failures["timeout"]


async def two_turns(session: Session, prompt: Prompt) -> Episode:
    await session.generate()
    session.observe(OBSERVED)
    await session.generate()
    return session.finish()


def sample(
    client: RolloutClient, max_tokens: int, hung_seconds: float
) -> tuple[list[RolloutGroup], RolloutError | None, bool]:
    """(groups, the error that stopped it, whether it hung)."""
    prompts = [
        Prompt(id=f"q{i}", text="", token_ids=(3, 4, 5 + i), label="") for i in range(NUM_PROMPTS)
    ]
    groups: list[RolloutGroup] = []
    errors: list[RolloutError] = []

    def call() -> None:
        try:
            settings = {
                "temperature": 1.0,
                "max_tokens": max_tokens,
                "stop_token_ids": (1,),
                "policy_version": VERSION,
            }
            groups.extend(client.generate(prompts, GROUP_SIZE, **settings))
        except RolloutError as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(hung_seconds)
    return groups, errors[0] if errors else None, thread.is_alive()


def correct_samples(server: FakeServer) -> Iterator[Rollout]:
    """Every sample the server sent in a correct answer: a response, or a turn with all that came
    before it as its prompt.
    """
    prompts = {
        f"{body['rid']}_{i}": ids
        for body in server.requests
        for i, ids in enumerate(body["input_ids"])
    }
    for name, content in server.served.items():
        expected = ExpectedSample(Prompt("", "", tuple(prompts[name]), ""), "")
        sampling, rules = Sampling(1.0, 8, (), VERSION), SampleRules(SPEC, want_routes=True)
        yield parse_sample(content, expected, sampling, rules)


def sent(
    rollout: Rollout, honest: dict[bytes, Rollout], turns: int
) -> tuple[bytes, bytes, bytes] | None:
    """The fingerprint that its turns, as servers sent them, have together; None where one was never
    sent.
    """
    ends = [*(start for start, _ in rollout.environment), len(rollout.tokens)]
    parts = [honest.get(rollout.tokens[:end].tobytes()) for end in ends]
    if len(parts) != turns or any(part is None for part in parts):
        return None
    rows = [0, *(end - 1 for end in ends)]  # a turn's last token has no row before the next turn
    routes = np.concatenate(
        [part.routed_experts[start:] for part, start in zip(parts, rows, strict=False)]
    )
    logprobs = np.concatenate([part.rollout_logprobs for part in parts])
    return rollout.tokens.tobytes(), logprobs.tobytes(), np.ascontiguousarray(routes).tobytes()


def fingerprint(rollout: Rollout) -> tuple[bytes, bytes, bytes]:
    return (
        rollout.tokens.tobytes(),
        rollout.rollout_logprobs.tobytes(),
        np.ascontiguousarray(rollout.routed_experts).tobytes(),
    )


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Markdown rows, one per kind of fault."""
    rows = [
        (
            "| fault | trials | recovered | stopped | lost | duplicated | hung | silent | uncounted"
            " | seconds, median | max |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    kinds = list(dict.fromkeys(outcome.trial.kind for outcome in outcomes))
    for kind in [*kinds, "all"]:
        mine = [outcome for outcome in outcomes if kind in ("all", outcome.trial.kind)]
        stopped = sum(outcome.stopped for outcome in mine)
        counts = [sum(getattr(outcome, name) for outcome in mine) for name in COUNTED]
        seconds = [outcome.seconds for outcome in mine]
        recovered = len(mine) - stopped - counts[2]
        cells = [
            kind,
            len(mine),
            recovered,
            stopped,
            *counts,
            f"{np.median(seconds):.2f}",
            f"{max(seconds):.2f}",
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows
