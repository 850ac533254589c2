"""agent.preload: every episode's program in a process that is forked from one which has imported
its modules (megatron_rl/workers).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_rl.config import AgentConfig
from megatron_rl.rollout.agents.episode import EpisodeError
from megatron_rl.workers.forks import ForkingProcess
from megatron_rl.workers.protocol import CallFailed, WorkerSpec

LOADER = "megatron_rl.workers.program:load_program"
ENDED = (
    "its process ended (os._exit, os.exec, a signal or memory), and what it wrote is lost; under"
    " agent.preload a program must end by its last line, sys.exit or an exception; or remove"
    " agent.preload"
)


class ProgramProcesses(ForkingProcess):
    """A process per episode, of the Python that agent.command names."""

    def __init__(self, cfg: AgentConfig, hidden_env: Collection[str] = ()) -> None:
        """hidden_env: variables of this process that no program gets."""
        memory = int(cfg.process_memory_gib * 2**30)
        python, *self.arguments = cfg.command
        super().__init__(WorkerSpec(LOADER, cfg.preload, memory, tuple(hidden_env), python))

    def start(self) -> None:
        """Import the modules.  Raises EpisodeError where that fails."""
        try:
            super().start()
        except CallFailed as error:
            raise EpisodeError(
                f"agent.preload = {list(self.spec.arguments)}: {self.spec.python} cannot import"
                f" them: {error.why}"
            ) from error

    async def run(self, env: Mapping[str, str], question: str) -> tuple[int, str, str]:
        """Run the program; returns (exit status, end of standard output, end of standard error)."""
        call = {"arguments": self.arguments, "env": dict(env), "input": question}
        try:
            async with self.worker() as worker:
                await worker.connect()
                answer: Any = await worker.call("run", call)
        except CallFailed as error:  # the process was lost: the program has no exit status
            return 1, "", ENDED if error.kind == "crashes" else str(error)
        return answer["status"], answer["output"], answer["errors"]
