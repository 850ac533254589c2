"""agent.environment: an environment with `reset` and `step`, as a rollout function.

    class Guess:
        def reset(self, prompt: Prompt) -> Observation | None: ...
        def step(self, turn: Turn) -> Step: ...

One object per episode.  The model speaks first to the prompt, then to every observation, until `Step.done` or agent.max_turns.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

from megatron_rl.config import AgentConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents.session import Episode, EpisodeError, Observation, Session, Turn

Result = TypeVar("Result")


@dataclass(frozen=True)
class Step:
    """What the environment answers to a turn.  Rewards of an episode are added; metrics are those of its last step."""

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """`reset` may add an observation to the prompt.  Either method may be async; others run in a thread."""

    def reset(self, prompt: Prompt) -> Observation | None: ...

    def step(self, turn: Turn) -> Step: ...


@dataclass(frozen=True)
class EnvironmentRollout:
    """`await rollout(session, prompt)` is one episode in a new environment of `make`."""

    make: Callable[[], Environment]
    cfg: AgentConfig

    async def __call__(self, session: Session, prompt: Prompt) -> Episode:
        environment, reward, metrics, is_done = self.make(), 0.0, {}, False
        first = await self._call(environment.reset, prompt)
        if first:
            session.observe(first)
        while not is_done and len(session.turns) < self.cfg.max_turns:
            turn = await session.generate()
            step = await self._call(environment.step, turn)
            if not isinstance(step, Step):
                raise EpisodeError(f"agent.environment: step returned {type(step).__name__}, must be a Step")
            reward, metrics, is_done = reward + step.reward, dict(step.metrics), step.done
            if not is_done and not step.observation:
                raise EpisodeError(
                    "agent.environment: step returned no observation, which only the last may do: done = True"
                )
            if not is_done:
                session.observe(step.observation)
        return session.finish(reward, {**metrics, "is_done": float(is_done)})

    async def _call(self, method: Callable[..., Result], argument: Prompt | Turn) -> Result:
        """Within agent.step_timeout_seconds.  A thread that hangs cannot be ended, and stays."""
        async with asyncio.timeout(self.cfg.step_timeout_seconds):
            if inspect.iscoroutinefunction(method):
                return await method(argument)
            return await asyncio.to_thread(method, argument)


def check_environment(found: object, where: str) -> Callable[[], Environment]:
    """`found`, a class that can be an environment; ValueError, naming the key, where it cannot."""
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if not inspect.isclass(found) or missing:
        raise ValueError(f"{where} must be a class with the methods reset(prompt) and step(turn); missing: {missing}")
    return cast("Callable[[], Environment]", found)
