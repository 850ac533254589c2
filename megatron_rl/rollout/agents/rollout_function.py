"""agent.function, agent.environment or agent.command, loaded as a rollout function."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
from collections.abc import Awaitable, Callable, Collection

from megatron_rl.config import AgentConfig, ConfigError
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents.command import CommandRollout, passed_variables
from megatron_rl.rollout.agents.environment import EnvironmentRollout, check_environment_class
from megatron_rl.rollout.agents.environment_process import EnvironmentProcesses
from megatron_rl.rollout.agents.episode import Episode
from megatron_rl.rollout.agents.program_process import ProgramProcesses
from megatron_rl.rollout.agents.session import Session

RolloutFunction = Callable[[Session, Prompt], Awaitable[Episode]]


def user_processes(
    cfg: AgentConfig, hidden_env: Collection[str]
) -> EnvironmentProcesses | ProgramProcesses | None:
    """Return the processes from which those of episodes are forked, not started yet; None where
    there are none.
    """
    if cfg.preload:
        hidden = os.environ.keys() - passed_variables(cfg, hidden_env).keys()
        return ProgramProcesses(cfg, hidden)
    if cfg.isolation == "process":
        memory = int(cfg.process_memory_gib * 2**30)
        return EnvironmentProcesses(cfg.environment, memory, hidden_env)
    return None


def load_function(
    cfg: AgentConfig,
    processes: EnvironmentProcesses | ProgramProcesses | None = None,
    hidden_env: Collection[str] = (),
) -> RolloutFunction:
    """Return what [agent] names as a rollout function.  Raises ConfigError, naming the key, where
    it cannot be one.

    processes: those of user_processes.  hidden_env: the environment variables with keys of servers,
    which a command does not get.
    """
    if cfg.command:
        if shutil.which(cfg.command[0]) is None:
            raise ConfigError(
                f"{cfg.setting}: {cfg.command[0]!r} must be a program; it is not on PATH"
            )
        assert not isinstance(processes, EnvironmentProcesses)
        return CommandRollout(cfg, hidden_env, processes)
    module, _, attribute = cfg.name.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{cfg.setting} cannot be loaded: {error}; must be package.module:NAME; modules are"
            f" looked for in {os.getcwd()}, PYTHONPATH and installed packages"
        ) from error
    if cfg.environment:
        assert not isinstance(processes, ProgramProcesses)
        return EnvironmentRollout(check_environment_class(loaded, cfg.setting), cfg, processes)
    if not inspect.iscoroutinefunction(loaded):
        raise ConfigError(
            f"{cfg.setting} must be an async function: async def {attribute}(session, prompt) ->"
            " Episode"
        )
    try:
        inspect.signature(loaded).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{cfg.setting} must take (session, prompt): {error}") from error
    return loaded
