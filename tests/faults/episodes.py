"""Trials of episodes: one of three environments fails once in a given way at a given point, or
sampling is interrupted there.

The result must be all episodes, every token and row of each as it was sampled; where agent.on_error
= drop, without a reward for the one that failed; where it is stop, an error that names it.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.agents.environment_process import EnvironmentProcesses
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.group_files import copied, find_groups, read_groups, write_groups
from tests.fake_model import END, TurnModel, assert_turn_fingerprints
from tests.fake_server import SPEC, FakeServer, wait_for
from tests.faults.environments import AT_RESET, BEHAVIOURS, DEADLY, ONLY_LATER, POINTS, TURNS
from tests.faults.trials import COUNTED, Counts
from tests.words import word_tokenizer

EPISODES, TURN_TOKENS, MAX_TOKENS = 3, 5, 60
STEP_SECONDS, HUNG_SECONDS = 20.0, 120.0
# the limit of a step that hangs; a longer one where others are as slow
HANGING_SECONDS = (1.0, 4.0, 16.0)
INTERRUPTIONS = ("server dies", "SIGTERM", "new weights", "context full", "turn limit")
POLICIES = ("retry", "drop", "stop")


@dataclass(frozen=True)
class EpisodeTrial:
    behaviour: str
    point: str
    policy: str = "retry"
    isolation: str = "thread"

    @property
    def place(self) -> int:
        """Turns before it happens."""
        return POINTS.index(self.point)

    @property
    def is_truncated(self) -> bool:
        """Whether its episode ends early, as truncated, instead of failing."""
        return self.behaviour in ("megabytes", "context full", "turn limit")


@dataclass(frozen=True, kw_only=True)
class EpisodeOutcome(Counts):
    """silent: episodes with a token or row that was not sampled so, or a failed one with a
    reward.
    """

    trial: EpisodeTrial
    ending: str  # recovered, dropped, stopped

    @property
    def is_as_expected(self) -> bool:
        trial = self.trial
        fails = trial.behaviour in BEHAVIOURS and not trial.is_truncated
        expected = (
            {"drop": "dropped", "stop": "stopped"}.get(trial.policy, "recovered")
            if fails
            else "recovered"
        )
        return self.ending == expected and self.is_clean


def episode_trials() -> Iterator[EpisodeTrial]:
    """behaviour x point x policy x isolation, of those that can be."""
    for behaviour in BEHAVIOURS:
        for point in POINTS:
            if (point == "reset" and behaviour not in AT_RESET) or (
                point == "last" and behaviour in ONLY_LATER
            ):
                continue
            for isolation in ("thread", "process"):
                if isolation == "process" or behaviour not in DEADLY:
                    for policy in POLICIES:
                        yield EpisodeTrial(behaviour, point, policy, isolation)
    for behaviour in INTERRUPTIONS:
        for point in POINTS:
            for isolation in ("thread", "process"):
                yield EpisodeTrial(behaviour, point, isolation=isolation)


@cache
def environment_processes() -> EnvironmentProcesses:
    """One for all trials: to import the environment takes seconds."""
    return EnvironmentProcesses("tests.faults.environments:Faulty")


def run_episode_trial(trial: EpisodeTrial) -> EpisodeOutcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome: list[EpisodeOutcome] = []

        def attempts() -> None:
            for limit in HANGING_SECONDS:
                (Path(folder) / str(limit)).mkdir()
                found = _run(trial, Path(folder) / str(limit), limit)
                # else another episode failed too
                if trial.behaviour != "hangs" or not found.uncounted:
                    break
            outcome.append(found)

        thread = threading.Thread(target=attempts, daemon=True)
        started = time.monotonic()
        thread.start()
        thread.join(HUNG_SECONDS)
        seconds = time.monotonic() - started
    if thread.is_alive():
        return EpisodeOutcome(trial=trial, ending="hung", hung=1, seconds=seconds)
    return outcome[0]


def _run(trial: EpisodeTrial, folder: Path, hanging_seconds: float) -> EpisodeOutcome:
    fault = (
        f"{trial.behaviour}@{trial.point} {folder / 'happened'}"
        if trial.behaviour in BEHAVIOURS
        else ""
    )
    texts = ["", fault, ""]
    prompts = [Prompt(f"q{i}", text, (3, 4, 5 + i), "") for i, text in enumerate(texts)]
    groups = [Group(prompt, 1) for prompt in prompts]
    agent = AgentConfig(
        environment="tests.faults.environments:Faulty",
        on_error=trial.policy,
        isolation=trial.isolation,
        step_timeout_seconds=hanging_seconds if trial.behaviour == "hangs" else STEP_SECONDS,
        max_turns=max(trial.place, 1) if trial.behaviour == "turn limit" else TURNS,
    )
    processes = environment_processes() if trial.isolation == "process" else None
    runner = EpisodeRunner(agent, word_tokenizer(), SPEC.vocab_size, 2, processes=processes)
    started = time.monotonic()
    counted, groups, error = INTERRUPTED.get(trial.behaviour, _undisturbed)(
        trial, runner, groups, folder
    )
    seconds = time.monotonic() - started
    found = [rollout for group in groups for rollout in group.rollouts.values()]
    dropped = [
        rollout
        for rollout in found
        if rollout.episode.reward is not None and np.isnan(rollout.episode.reward)
    ]
    ending = "stopped" if error else "dropped" if dropped else "recovered"
    return EpisodeOutcome(
        trial=trial,
        ending=ending,
        lost=0 if error else EPISODES - len(found),
        duplicated=len(found) - len({rollout.tokens.tobytes() for rollout in found}),
        silent=sum(not _is_sound(rollout, trial) for rollout in found),
        uncounted=int(not counted),
        seconds=seconds,
    )


def _client(server: FakeServer, *others: FakeServer, runner: EpisodeRunner) -> RolloutClient:
    cfg = RolloutConfig(max_retries=4, partial="resume", over_sample=0.5, max_staleness=1)
    urls = [each.url for each in (server, *others)]
    return RolloutClient(urls, cfg, SampleRules(SPEC, want_routes=True), episodes=runner)


def _fill(
    client: RolloutClient, groups: Sequence[Group], version: int, most: int = MAX_TOKENS
) -> str:
    """Why it stopped, "" where it did not."""
    try:
        client.fill(groups, Sampling(1.0, most, (END,), version))
    except (RolloutError, asyncio.CancelledError) as error:
        return str(error) or "cancelled"
    return ""


Result = tuple[bool, Sequence[Group], str]
"""(whether it was counted, the groups, the error that stopped it)."""


def _undisturbed(
    trial: EpisodeTrial, runner: EpisodeRunner, groups: Sequence[Group], folder: Path
) -> Result:
    """Only the environment fails, or its limits end it."""
    # full after as many turns, with the two observed tokens between them
    most = (
        max(trial.place, 1) * (TURN_TOKENS + 2) + 1
        if trial.behaviour == "context full"
        else MAX_TOKENS
    )
    with FakeServer("ok", source=TurnModel(version=3)) as server:
        client = _client(server, runner=runner)
        error = _fill(client, groups, 3, most)
    if trial.is_truncated:
        rollouts = [rollout for group in groups for rollout in group.rollouts.values()]
        ended = [
            r
            for r in rollouts
            if r.finish_reason == "length"
            or r.episode.metrics.get("is_done") == 0
            or len(r.episode.turns) == TURNS
        ]
        return bool(ended), groups, error
    names_it = not error or ("rollout q1/0" in error and "agent.environment" in error)
    return client.counters.failed_episodes == 1 and names_it, groups, error


def _server_dies(
    trial: EpisodeTrial, runner: EpisodeRunner, groups: Sequence[Group], folder: Path
) -> Result:
    model = TurnModel(version=3)
    answers = trial.place * EPISODES // 2
    with (
        FakeServer(*["ok"] * answers, "die", source=model) as bad,
        FakeServer("ok", source=model) as good,
    ):
        client = _client(bad, good, runner=runner)
        client.balancer.servers[0].tokens = -1_000_000  # it gets all requests
        error = _fill(client, groups, 3)
    return client.counters.failures.total() > 0, groups, error


def _interrupted(
    trial: EpisodeTrial, runner: EpisodeRunner, groups: Sequence[Group], folder: Path
) -> Result:
    """A signal after so many answers; the groups pass through a checkpoint, and another client
    continues, perhaps under new weights."""
    model = TurnModel(version=3)
    answers = min(trial.place * EPISODES, TURNS * EPISODES - 1)
    with FakeServer(*["ok"] * answers, "slow", source=model) as server:
        client = _client(server, runner=runner)

        def stop() -> None:
            wait_for(
                lambda: (
                    len(server.requests) - answers == EPISODES - sum(g.is_complete for g in groups)
                ),
                100,
            )
            client.stop(keep_parts=True)

        threading.Thread(target=stop).start()
        _fill(client, groups, 3)
        kept = [r for group in groups for r in (*group.rollouts.values(), *group.prefixes.values())]
        tokens = sum(rollout.response_length for rollout in kept)
        num_cut = sum(len(group.prefixes) for group in groups)
        write_groups(folder / "rollouts_00000.safetensors", copied(groups), range(EPISODES))
        prompts = [group.prompt for group in groups]
        groups = read_groups(find_groups(folder), prompts, range(EPISODES), slice(None))
        version = model.version = 3 + (trial.behaviour == "new weights")
        server.script, before = ["ok"], len(server.requests)
        again = _client(server, runner=runner)
        error = _fill(again, groups, version)
        asked = len(server.requests) - before
    counters = again.counters
    is_exact = tokens == answers * TURN_TOKENS + 2 * num_cut and asked == TURNS * EPISODES - answers
    counted = (
        client.counters.cut_samples
        == num_cut
        == counters.resumed_episodes
        > 0
        == counters.diverged_episodes
    )
    return counted and is_exact, groups, error


INTERRUPTED: dict[str, Callable[[EpisodeTrial, EpisodeRunner, Sequence[Group], Path], Result]] = {
    "server dies": _server_dies,
    "SIGTERM": _interrupted,
    "new weights": _interrupted,
}


def _is_sound(rollout: Rollout, trial: EpisodeTrial) -> bool:
    """Every number is that of the model, and the reward that of the turns; of a failed episode
    there is none.
    """
    try:
        assert_turn_fingerprints(rollout)
    except AssertionError:
        return False
    if rollout.episode.reward is None:
        return False
    if np.isnan(rollout.episode.reward):
        return trial.policy == "drop" and rollout.id == "q1/0"
    learned = rollout.tokens[rollout.sampled].sum()
    if rollout.id == "q1/0" and trial.behaviour == "megabytes":
        return len(rollout.episode.turns) == trial.place and rollout.finish_reason == "length"
    # the step of a turn that the context cut off gave its reward, too
    return rollout.episode.reward == learned


KINDS = {
    "raises": ("raises", "recurses", "sys_exit"),
    "hangs": ("hangs",),
    "its process ends": ("exits",),
    "garbage": (
        "garbage",
        "bytes",
        "number",
        "list_metrics",
        "text_metric",
        "unknown_id",
        "negative_id",
        "mixed",
    ),
    "wrong reward": ("nan_reward", "text_reward"),
    "wrong role": ("assistant", "no_role"),
    "megabytes": ("megabytes", "gigabyte"),
}


def episode_table(outcomes: Sequence[EpisodeOutcome]) -> list[str]:
    """Markdown rows, one per kind of fault."""
    rows = [
        (
            "| fault | trials | recovered | dropped | stopped | lost | duplicated | hung | silent |"
            " uncounted | median s | max s |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    everything = tuple({outcome.trial.behaviour for outcome in outcomes})
    for kind, behaviours in {
        **KINDS,
        **{name: (name,) for name in INTERRUPTIONS},
        "all": everything,
    }.items():
        if not (mine := [outcome for outcome in outcomes if outcome.trial.behaviour in behaviours]):
            continue
        endings = [
            sum(o.ending == ending for o in mine) for ending in ("recovered", "dropped", "stopped")
        ]
        counts = [sum(getattr(outcome, name) for outcome in mine) for name in COUNTED]
        seconds = [outcome.seconds for outcome in mine]
        cells = [
            kind,
            len(mine),
            *endings,
            *counts,
            f"{np.median(seconds):.2f}",
            f"{max(seconds):.2f}",
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows
