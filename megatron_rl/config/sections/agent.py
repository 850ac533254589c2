"""[agent]: rollouts of several turns."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Literal

from megatron_rl.config.base import AboveZero, Count, NotNegative, Positive, Section


class AgentConfig(Section):
    """Rollouts of several turns (docs/guides/agents.md); without function, environment and command
    a rollout is one response."""

    # the program of an episode
    function: str = ""
    """package.module:function, `async def f(session, prompt) -> Episode`."""
    environment: str = ""
    """package.module:Class with reset and step."""
    command: tuple[str, ...] = ()
    """Program with its arguments, started for every episode, which talks to the model through an
    OpenAI client (docs/guides/agents.md)."""
    preload: tuple[str, ...] = ()
    """Modules that the Python of agent.command imports once: each episode's process is forked from
    there.  Importing them must start no thread."""
    pass_env: tuple[str, ...] = ()
    """Environment variables that agent.command gets although their names look like secrets."""
    # the endpoint of agent.command
    endpoint_host: str = "127.0.0.1"
    """Address on which the OpenAI-compatible endpoint listens.  Other than a loopback address it
    is reached unencrypted, with the episode's key."""
    # limits of an episode
    max_turns: Positive = 16
    """Turns of an episode of agent.environment."""
    max_episode_tokens: Count = 0
    """Tokens of all sequences of an episode, sampled and observed; 0 = no limit beyond
    rollout.max_response_tokens of each."""
    isolation: Literal["thread", "process"] = "thread"
    """Place where an agent.environment runs: in the trainer's process, or each episode's in a
    process that can be killed (docs/guides/agents.md#an-environment)."""
    process_memory_gib: NotNegative = 0.0
    """Address space of such a process, or of one of agent.preload, in GiB; 0 = no limit."""
    step_timeout_seconds: AboveZero = 60.0
    """Time of one reset or step of agent.environment."""
    episode_timeout_seconds: AboveZero = 1800.0
    """Total time of one episode; a longer one has failed."""
    concurrency: Count = 0
    """Episodes at the same time per data-parallel replica; 0 = no limit beyond
    rollout.max_concurrency prompts."""
    # interruptions and failures
    resume: Literal["continue", "restart"] = "continue"
    """Treatment of an episode that was cut short: continue or restart
    (docs/guides/agents.md#episodes-that-are-interrupted)."""
    on_error: Literal["stop", "retry", "drop"] = "stop"
    """Treatment of an episode that fails: stop the run; sample it again, at most
    rollout.max_retries times; or leave it out of its group."""
    # chat format
    renderer: str = ""
    """Chat format of the model, which turns messages into tokens and back: qwen3, glm-4.5,
    deepseek-v3, kimi-k2, gpt-oss and others of the `renderers` package."""
    history: Literal["keep", "split"] = "keep"
    """Thinking of earlier turns, where the chat format drops it: keep it as it was sampled, or
    split: start a new sequence without it."""

    @property
    def name(self) -> str:
        """The program that samples episodes; "" where a rollout is one response."""
        return self.function or self.environment or " ".join(self.command)

    @property
    def setting(self) -> str:
        """The key of `name` with its value, for messages."""
        key = "function" if self.function else "environment" if self.environment else "command"
        return f"agent.{key} = {self.name!r}"

    def problems(self) -> Iterator[str]:
        programs: dict[str, object] = {"function": self.function, "environment": self.environment}
        programs["command"] = list(self.command)
        chosen = [f"{key} = {value!r}" for key, value in programs.items() if value]
        if len(chosen) > 1:
            yield f"{' and '.join(chosen)}: must be one of them; remove the other"
        if self.command and not self.renderer:
            yield (
                "command needs renderer, the format of the model's chat, in which the endpoint "
                "writes messages; set it"
            )
        for key, names in (("pass_env", self.pass_env), ("preload", self.preload)):
            if names and not self.command:
                yield f"{key} = {list(names)} has no effect without command; remove it"
        if self.preload and self.command and not is_python(self.command):
            yield (
                f"preload = {list(self.preload)} needs a command [PYTHON, FILE.py, ...] or [PYTHON,"
                f" '-m', MODULE, ...], got {list(self.command)}"
            )
        if self.history == "split" and not self.renderer:
            yield (
                "history = 'split' has no effect without renderer: there are no messages; set "
                "renderer, or remove it"
            )
        try:
            ipaddress.ip_address(self.endpoint_host)
        except ValueError:
            yield (
                f"endpoint_host = {self.endpoint_host!r}: must be an IP address of this machine, "
                "such as 127.0.0.1"
            )


def is_python(command: Sequence[str]) -> bool:
    """The command is a program that a running Python can run: FILE.py or -m MODULE."""
    match list(command):
        case [_, "-m", _, *_]:
            return True
        case [_, file, *_]:
            return file.endswith(".py")
    return False
