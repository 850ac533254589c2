"""[agent]: rollouts of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron_rl.config.base import AboveZero, Count, Positive, Section


class AgentConfig(Section):
    """Rollouts of several turns (docs/guides/agents.md); without function and environment a rollout is one response."""

    function: str = ""
    """package.module:function, `async def f(session, prompt) -> Episode`."""
    environment: str = ""
    """package.module:Class with reset and step, in place of function."""
    max_turns: Positive = 16
    """Turns of an episode of agent.environment."""
    max_episode_tokens: Count = 0
    """Tokens of all sequences of an episode, sampled and observed; 0 = no limit beyond rollout.max_response_tokens of each."""
    step_timeout_seconds: AboveZero = 60.0
    """Time of one reset or step of agent.environment."""
    episode_timeout_seconds: AboveZero = 1800.0
    """Total time of one episode, all turns and the function's own work; a longer one has failed."""
    on_error: Literal["stop", "retry"] = "stop"
    """What an episode that fails does: stop the run, or be counted and sampled again, at most rollout.max_retries times."""
    renderer: str = ""
    """Chat format of the model, with which a session observes messages: qwen3, glm-4.5, deepseek-v3, kimi-k2, gpt-oss and others
    of the `renderers` package."""

    @property
    def name(self) -> str:
        """What samples rollouts of several turns; "" where a rollout is one response."""
        return self.function or self.environment

    @property
    def setting(self) -> str:
        """The same with its key, for messages."""
        return f"agent.{'function' if self.function else 'environment'} = {self.name!r}"

    def problems(self) -> Iterator[str]:
        if self.function and self.environment:
            yield f"function = {self.function!r} and environment = {self.environment!r}: must be one of them; remove the other"
