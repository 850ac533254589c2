"""agent.environment: an environment with `reset` and `step`, as a rollout function.

    class Guess:
        def reset(self, prompt: Prompt) -> Observation | None: ...
        def step(self, turn: Turn) -> Step: ...

One object per episode.  The model speaks first to the prompt, then to every observation, until
`Step.done`, agent.max_turns or the end of its context.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from megatron_rl.config import AgentConfig, ConfigError
from megatron_rl.records import Prompt
from megatron_rl.reward.function import is_finite
from megatron_rl.rollout.agents.environment_process import EnvironmentProcesses, RemoteEnvironment
from megatron_rl.rollout.agents.episode import ContextFull, Environment, Episode, EpisodeError, Step
from megatron_rl.rollout.agents.session import Session
from megatron_rl.rollout.agents.threads import called


@dataclass(frozen=True)
class EnvironmentRollout:
    """`await rollout(session, prompt)` plays one episode in a new environment."""

    make: Callable[[], Environment]
    cfg: AgentConfig
    processes: EnvironmentProcesses | None = None
    """The processes of environments, made by `make`; None: they run in this process."""

    async def __call__(self, session: Session, prompt: Prompt) -> Episode:
        async with self._environment(session) as environment:
            return await self._episode(session, prompt, environment)

    async def _episode(
        self, session: Session, prompt: Prompt, environment: Environment | RemoteEnvironment
    ) -> Episode:
        reward, metrics, is_done = 0.0, {}, False
        # the model speaks first to the prompt, unless `reset` adds an observation
        if not is_nothing(first := await self._call(session, "reset", environment.reset, prompt)):
            session.observe(first)
        while not is_done and len(session.turns) < self.cfg.max_turns:
            try:
                turn = await session.generate()
            except ContextFull:  # the episode ends here, with the rewards so far
                break
            step = checked_step(await self._call(session, "step", environment.step, turn))
            session.reward_turn(step.reward)
            reward, metrics, is_done = reward + step.reward, dict(step.metrics), step.done
            if not is_done:  # no turn follows the last observation
                session.observe(step.observation)
        return session.finish(reward, {**metrics, "is_done": float(is_done)})

    @asynccontextmanager
    async def _environment(
        self, session: Session
    ) -> AsyncIterator[Environment | RemoteEnvironment]:
        # a constructor may take long, so that it has the time limit of a step in both cases
        if self.processes is None:
            yield await self._call(session, "constructor", self.make)
            return
        async with self.processes.episode() as environment:
            await self._call(session, "constructor", environment.constructor)
            yield environment

    async def _call(
        self, session: Session, name: str, method: Callable[..., Any], *arguments: object
    ) -> Any:
        limit = asyncio.timeout(self.cfg.step_timeout_seconds)
        late = EpisodeError(
            f"{name} took longer than agent.step_timeout_seconds ="
            f" {self.cfg.step_timeout_seconds:g}"
        )
        try:
            with session.span(name, "environment"):
                async with limit:
                    answer = await called(method, *arguments)
        except TimeoutError as error:
            if not limit.expired():  # the environment raised it
                raise
            raise late from error
        if limit.expired():  # it ignored its cancellation
            raise late
        return answer


def checked_step(step: object) -> Step:
    """Return the Step that `step` returned.

    Raises EpisodeError for another type, and for a Step with a field of a wrong type.
    """
    if not isinstance(step, Step):
        raise EpisodeError(
            f"agent.environment: step returned {type(step).__name__}, must be a Step"
        )
    if not isinstance(step.metrics, Mapping):
        raise EpisodeError(
            f"agent.environment: Step.metrics = {step.metrics!r:.80}: must be a mapping"
        )
    metrics = {name: without_numpy(value) for name, value in step.metrics.items()}
    step = replace(step, reward=without_numpy(step.reward), metrics=metrics)
    for name, value in {"reward": step.reward, **step.metrics}.items():
        if not is_finite(value):
            raise EpisodeError(
                f"agent.environment: {name} = {value!r:.80} of a Step: must be a finite number of"
                " float32"
            )
    if not step.done and is_nothing(step.observation):
        raise EpisodeError(
            "agent.environment: step returned no observation, which only the last may do: done ="
            " True"
        )
    return step


def without_numpy(value: Any) -> Any:
    """Return a truth value of numpy, which is no number, as Python's."""
    return bool(value) if isinstance(value, np.bool_) else value


def is_nothing(observation: object) -> bool:
    return observation is None or (isinstance(observation, Sized) and len(observation) == 0)


def check_environment_class(loaded: object, where: str) -> Callable[[], Environment]:
    """Return `loaded`, a class of environments.  Raises ConfigError, naming the key, where it
    cannot be one.
    """
    calls = {"reset": (None, None), "step": (None, None)}  # with self
    missing = [name for name in calls if not callable(getattr(loaded, name, None))]
    if not inspect.isclass(loaded) or missing:
        raise ConfigError(
            f"{where} must be a class with the methods reset(prompt) and step(turn); missing:"
            f" {missing}"
        )
    try:
        inspect.signature(loaded).bind()
        for name, arguments in calls.items():
            inspect.signature(getattr(loaded, name)).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{where} must be made without arguments, and have reset(prompt) and step(turn):"
            f" {error}"
        ) from error
    return cast("Callable[[], Environment]", loaded)
