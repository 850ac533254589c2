"""agent.isolation = process: every episode's environment in a process of its own, which is killed
with its children when the episode ends or a call takes too long (megatron_rl/workers).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents.environment_worker import fields_of_turn
from megatron_rl.rollout.agents.episode import EpisodeError, Observation, Step, Turn
from megatron_rl.workers.forks import ForkingProcess
from megatron_rl.workers.protocol import CallFailed, WorkerSpec
from megatron_rl.workers.worker_process import WorkerProcess

LOADER = "megatron_rl.rollout.agents.environment_worker:load_environment"


class EnvironmentProcesses(ForkingProcess):
    """A process per episode, forked from one that has imported the environment's class."""

    def __init__(self, name: str, memory_bytes: int = 0, hidden_env: Collection[str] = ()) -> None:
        """name: `package.module:Class`; memory_bytes, hidden_env: see WorkerSpec."""
        super().__init__(WorkerSpec(LOADER, (name,), memory_bytes, tuple(hidden_env)))

    def start(self) -> None:
        """Import the class.  Raises EpisodeError where that fails."""
        with import_errors():
            super().start()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[RemoteEnvironment]:
        """Yield the environment of one episode.  Raises EpisodeError where the class cannot be
        imported.
        """
        with import_errors():
            async with self.worker() as worker:
                yield RemoteEnvironment(worker)


@dataclass
class RemoteEnvironment:
    """An environment in its process: `reset` and `step` as awaitables."""

    worker: WorkerProcess

    async def constructor(self) -> None:
        with call_errors("constructor"):
            await self.worker.connect()

    async def reset(self, prompt: Prompt) -> Observation | None:
        with call_errors("reset"):
            return await self.worker.call("reset", asdict(prompt))

    async def step(self, turn: Turn) -> Step:
        with call_errors("step"):
            answer: Any = await self.worker.call("step", fields_of_turn(turn))
        if not isinstance(answer, dict) or set(answer) != {"step"}:
            raise EpisodeError(
                f"agent.environment: step returned {type(answer).__name__}, must be a Step"
            )
        return Step(**answer["step"])


@contextmanager
def import_errors() -> Iterator[None]:
    try:
        yield
    except CallFailed as error:
        raise EpisodeError(
            f"agent.environment cannot be imported in a process of its own: {error.why}"
        ) from error


@contextmanager
def call_errors(call: str) -> Iterator[None]:
    try:
        yield
    except CallFailed as error:
        # the frames of a lost process are not known
        is_lost = error.kind != "errors"
        text = f"{error.why} in {call}" if is_lost else f"{call} failed: {error}"
        raise EpisodeError(f"agent.environment: {text}") from error
