"""Runs a user's rollout function for every response of a group: G episodes of a prompt side by side."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from megatron_rl.config import AgentConfig, Config
from megatron_rl.records import FinishReason, Prompt, Rollout
from megatron_rl.rollout.agents.chat import Chat
from megatron_rl.rollout.agents.environment import EnvironmentRollout, check_environment
from megatron_rl.rollout.agents.session import ContextFull, Episode, EpisodeError, EpisodeStopped, SampleTurn, Session
from megatron_rl.rollout.client.call import GroupCancelled
from megatron_rl.rollout.client.counters import RolloutCounters
from megatron_rl.rollout.client.request import RolloutError, Sampling
from megatron_rl.rollout.partial import PartialGroup

RolloutFunction = Callable[[Session, Prompt], Awaitable[Episode]]

logger = logging.getLogger(__name__)


def load_function(cfg: AgentConfig) -> RolloutFunction:
    """agent.function, or agent.environment as one.  Raises ValueError, naming the key, where it cannot be that."""
    module, _, attribute = cfg.name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{cfg.setting} cannot be loaded: {error}; must be package.module:NAME") from error
    if cfg.environment:
        return EnvironmentRollout(check_environment(found, cfg.setting), cfg)
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"{cfg.setting} must be an async function: async def {attribute}(session, prompt) -> Episode")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{cfg.setting} must take (session, prompt): {error}") from error
    return found


def check_agent(cfg: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, naming the key, for [agent] that cannot start."""
    load_function(cfg)
    if cfg.renderer:
        Chat(cfg.renderer, tokenizer)


def make_runner(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int, max_positions: int | None = None
) -> EpisodeRunner | None:
    """None where a rollout is one response.  max_positions: of the model, where it is known."""
    if not cfg.agent.name:
        return None
    limit = sequence_limit(cfg, max_positions)
    return EpisodeRunner(cfg.agent, tokenizer, vocab_size, cfg.rollout.max_retries, limit)


SERVER_TOKENS = 6
"""Of its KV cache and of the model's positions SGLang leaves so many unused (tp_worker.py: max_req_input_len)."""


def sequence_limit(cfg: Config, max_positions: int | None) -> tuple[int, str]:
    """(tokens, setting) of the longest sequence, prompt and response, that the run's servers and its trainer take."""
    # a sequence above the cap of a micro-batch is one by itself: memory is planned for the longest prompt and response
    rows, cache = cfg.run.max_tokens_per_micro_batch, cfg.rollout.max_total_tokens
    response = max(cfg.rollout.max_response_tokens, cfg.eval.max_response_tokens or 0)
    limits = [(max(rows, cfg.data.max_prompt_tokens + response), f"run.max_tokens_per_micro_batch = {rows}")]
    if not cfg.rollout.urls:
        limits.append((cache - SERVER_TOKENS, f"rollout.max_total_tokens = {cache}"))
        if max_positions is not None and not any(arg.startswith("--context") for arg in cfg.rollout.server_args):
            limits.append((max_positions - SERVER_TOKENS, f"the model's max_position_embeddings = {max_positions}"))
    return min(limits)


@dataclass
class EpisodeRunner:
    """`cfg.function` or `cfg.environment`, and what its sessions need.  One per rollout client."""

    cfg: AgentConfig
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_retries: int  # of an episode that failed
    sequence_limit: tuple[int, str] | None = None  # of a session

    def __post_init__(self) -> None:
        self._function = load_function(self.cfg)
        self._chat = Chat(self.cfg.renderer, self.tokenizer) if self.cfg.renderer else None

    def adapt(self, sampling: Sampling) -> Sampling:
        """`sampling` with what ends a turn in the model's chat format."""
        ends = [] if self._chat is None else self._chat.stop_token_ids
        return replace(sampling, stop_token_ids=list(dict.fromkeys([*sampling.stop_token_ids, *ends])))

    async def fill(
        self, group: PartialGroup, sampling: Sampling, sample: SampleTurn, counters: RolloutCounters
    ) -> None:
        """An episode for every response that `group` lacks.

        Raises RolloutError for one that failed (agent.on_error), and what `sample` raises.
        """
        tasks = [
            asyncio.create_task(self._episode(group, index, sampling, sample, counters)) for index in group.missing
        ]
        try:
            await asyncio.gather(*tasks)
        finally:  # the first failure ends the others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _episode(
        self, group: PartialGroup, index: int, sampling: Sampling, sample: SampleTurn, counters: RolloutCounters
    ) -> None:
        name = f"{sampling.id_prefix}{group.prompt.id}/{index}"
        tries = 1 if self.cfg.on_error == "stop" else 1 + self.max_retries
        for attempt in range(1, tries + 1):
            try:
                group.put(index, await self._run(group.prompt, name, sampling, sample))
                return
            except (GroupCancelled, RolloutError):
                raise
            except Exception as error:  # of the user's function: counted, and raised where it may not be tried again
                counters.failed_episodes += 1
                counters.redrawn_samples += attempt < tries
                if attempt == tries:
                    raise RolloutError(
                        f"rollout {name}: {self.cfg.setting} failed ({type(error).__name__}: {error}), attempt "
                        f"{attempt} of {tries}; mend it, or set agent.on_error = retry\n"
                        f"{''.join(traceback.format_exception(error))}"
                    ) from error
                logger.warning(
                    "rollout %s: episode failed, sampled again: %s", name, f"{type(error).__name__}: {error}"
                )

    async def _run(self, prompt: Prompt, name: str, sampling: Sampling, sample: SampleTurn) -> Rollout:
        ended: list[GroupCancelled | RolloutError] = []

        async def sample_turn(turn: PartialGroup) -> None:
            if not ended:
                try:
                    return await sample(turn)
                except (GroupCancelled, RolloutError) as error:
                    ended.append(error)
            raise EpisodeStopped

        session = Session(
            prompt,
            name=name,
            max_tokens=sampling.max_tokens,
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            chat=self._chat,
            sample=sample_turn,
            max_episode_tokens=self.cfg.max_episode_tokens,
            sequence_limit=self.sequence_limit,
        )
        is_cut = False
        limit = asyncio.timeout(self.cfg.episode_timeout_seconds)
        try:
            async with limit:
                episode = await self._function(session, prompt)
        except ContextFull:
            episode, is_cut = session.finish(), True
        except TimeoutError as error:
            if not limit.expired():  # the function's own
                raise
            seconds = self.cfg.episode_timeout_seconds
            raise EpisodeError(f"it took longer than agent.episode_timeout_seconds = {seconds:g}") from error
        except EpisodeStopped:
            pass
        if ended:  # also where the function handled it
            raise ended[0]
        if not isinstance(episode, Episode):
            raise TypeError(f"returned {type(episode).__name__}, must be session.finish()")
        reason: FinishReason = "length" if is_cut or session.is_full else "stop"
        return replace(episode.rollout, finish_reason=reason, reward=episode.reward, metrics=episode.metrics)
