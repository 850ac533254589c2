"""agent.command: a program per episode, which talks to the model through an OpenAI client.

It gets OPENAI_BASE_URL and OPENAI_API_KEY, and on standard input one line of JSON: {"id", "text",
"label"} of the prompt.  The last line of its standard output may be {"reward": 1.0, "metrics":
{"calls": 2}}; without it, the reward function scores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

from megatron_rl.config import AgentConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents.episode import ContextFull, Episode, EpisodeError
from megatron_rl.rollout.agents.program_process import ProgramProcesses
from megatron_rl.rollout.agents.session import Session
from megatron_rl.workers.program import TAIL_BYTES

SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables that a program gets only by agent.pass_env."""
STDERR_LINES = 10
END_SECONDS = 5.0
"""Limit for the pipes of an ended program to close: a process that it started may hold them."""


@dataclass(frozen=True)
class CommandRollout:
    """`await rollout(session, prompt)` runs the program once."""

    cfg: AgentConfig
    hidden_env: Collection[str] = ()
    """Environment variables with keys of servers, which are never passed."""
    processes: ProgramProcesses | None = None
    """Forks that run the program under agent.preload; None: it is started for each episode."""

    async def __call__(self, session: Session, prompt: Prompt) -> Episode:
        access = await session.open_endpoint()
        env = passed_variables(self.cfg, self.hidden_env) | {
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_KEY": access.api_key,
            "ANTHROPIC_BASE_URL": access.root_url,
            "ANTHROPIC_API_KEY": access.api_key,
        }
        question = json.dumps({"id": prompt.id, "text": prompt.text, "label": prompt.label})
        if self.processes is None:
            ended = await run_program(self.cfg.command, env, question.encode() + b"\n")
        else:
            ended = await self.processes.run(env, question + "\n")
        code, output, errors = ended
        if code != 0:
            if session.is_full:  # the error of its last request
                raise ContextFull(f"exit status {code} with a full context")
            last = "\n".join(errors.splitlines()[-STDERR_LINES:])
            raise EpisodeError(
                f"the program ended with status {code}; its last lines on standard error:\n{last}"
            )
        return session.finish(*read_result(output))


def passed_variables(cfg: AgentConfig, hidden_env: Collection[str]) -> dict[str, str]:
    """Return this process's variables without those that look like a secret; requests to the
    endpoint use no proxy.
    """
    passed = {
        name: value
        for name, value in os.environ.items()
        if name not in hidden_env and (name in cfg.pass_env or not SECRET.search(name))
    }
    direct = passed.get("no_proxy") or passed.get("NO_PROXY") or ""
    if direct != "*":  # programs read either name
        direct = ",".join(filter(None, [direct, cfg.endpoint_host]))
    return passed | {"no_proxy": direct, "NO_PROXY": direct}


async def run_program(
    command: tuple[str, ...], env: Mapping[str, str], question: bytes
) -> tuple[int, str, str]:
    """Run the program; returns (exit status, end of standard output, end of standard error).

    Its process group is killed in every case.
    """
    pipe = asyncio.subprocess.PIPE
    # a session of its own, so that the whole process group can be killed
    transport, program = await asyncio.get_running_loop().subprocess_exec(
        Program, *command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
        stdin.write(question)
        stdin.close()  # when all of it is written
        await program.has_exited.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):  # also the processes that it started
            os.killpg(transport.get_pid(), signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await program.has_closed.wait()
        transport.close()
    code = transport.get_returncode()
    assert code is not None
    return code, program.tail(1), program.tail(2)


class Program(asyncio.SubprocessProtocol):
    """A running program, and the end of each of its outputs."""

    def __init__(self) -> None:
        self.has_exited = asyncio.Event()
        self.has_closed = asyncio.Event()
        """It exited, and no process holds one of its pipes."""
        self._tails = {1: b"", 2: b""}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._tails[fd] = (self._tails[fd] + data)[-TAIL_BYTES:]

    def process_exited(self) -> None:
        self.has_exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_closed.set()

    def tail(self, fd: int) -> str:
        return self._tails[fd].decode(errors="replace")


def read_result(output: str) -> tuple[float | None, Mapping[str, float]]:
    """Return (reward, metrics) of the last line that is not empty, where it is a JSON object;
    (None, {}) otherwise.  Raises EpisodeError for other keys.
    """
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    if not last.lstrip().startswith("{"):
        return None, {}
    try:
        result = json.loads(last)
    except (ValueError, RecursionError) as error:
        raise EpisodeError(
            f"the program's last line is no JSON object: {last[:200]!r}: {error}"
        ) from error
    unknown = set(result) - {"reward", "metrics"}
    metrics = result.get("metrics", {})
    if unknown or not isinstance(metrics, dict):
        raise EpisodeError(
            f'the program\'s last line {last[:200]!r}: must be {{"reward": NUMBER, "metrics":'
            " {NAME: NUMBER}}"
        )
    return result.get("reward"), metrics
