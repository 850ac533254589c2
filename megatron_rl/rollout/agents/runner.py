"""Runs a user's rollout function for every response of a group: G episodes of a prompt side by
side.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import math
import shutil
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from megatron_rl.config import AgentConfig, Config
from megatron_rl.records import FinishReason, Prompt, Rollout
from megatron_rl.rollout.agents.chat import Chat
from megatron_rl.rollout.agents.command import CommandRollout
from megatron_rl.rollout.agents.endpoint import Endpoint
from megatron_rl.rollout.agents.environment import EnvironmentRollout, check_environment_class
from megatron_rl.rollout.agents.environment_process import EnvironmentProcesses
from megatron_rl.rollout.agents.episode import ContextFull, Episode, EpisodeError, EpisodeStopped
from megatron_rl.rollout.agents.session import Session
from megatron_rl.rollout.client.call import Call, GroupCancelled, SampleTurn
from megatron_rl.rollout.client.request import RolloutError
from megatron_rl.rollout.client.sampling import Sampling
from megatron_rl.rollout.partial import PartialGroup

RolloutFunction = Callable[[Session, Prompt], Awaitable[Episode]]

logger = logging.getLogger(__name__)


def load_function(
    cfg: AgentConfig, processes: EnvironmentProcesses | None = None, hidden_env: str = ""
) -> RolloutFunction:
    """agent.function, or agent.environment or agent.command as one.  Raises ValueError, naming the
    key, where it cannot be that.

    processes: those of agent.isolation = process.  hidden_env: the environment variable with the
    servers' key.
    """
    if cfg.command:
        if shutil.which(cfg.command[0]) is None:
            raise ValueError(
                f"{cfg.setting}: {cfg.command[0]!r} must be a program; it is not on PATH"
            )
        return CommandRollout(cfg, hidden_env)
    module, _, attribute = cfg.name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{cfg.setting} cannot be loaded: {error}; must be package.module:NAME"
        ) from error
    if cfg.environment:
        return EnvironmentRollout(check_environment_class(found, cfg.setting), cfg, processes)
    if not inspect.iscoroutinefunction(found):
        raise ValueError(
            f"{cfg.setting} must be an async function: async def {attribute}(session, prompt) ->"
            " Episode"
        )
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{cfg.setting} must take (session, prompt): {error}") from error
    return found


def check_agent(cfg: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, naming the key, for [agent] that cannot start."""
    load_function(cfg)
    if cfg.renderer:
        Chat(cfg.renderer, tokenizer, cfg.history)


def make_runner(
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    max_positions: int | None = None,
) -> EpisodeRunner | None:
    """None where a rollout is one response.  max_positions: of the model, where it is known."""
    if not cfg.agent.name:
        return None
    limit = sequence_limit(cfg, max_positions)
    hidden_env = cfg.rollout.api_key_env or ""
    processes = None
    if cfg.agent.isolation == "process":  # they end with the trainer
        memory = int(cfg.agent.process_memory_gib * 2**30)
        processes = EnvironmentProcesses(
            cfg.agent.environment, memory, hidden_env=cfg.rollout.api_key_env
        )
        processes.start()
    return EpisodeRunner(
        cfg.agent, tokenizer, vocab_size, cfg.rollout.max_retries, limit, processes, hidden_env
    )


SERVER_TOKENS = 6
"""Of its KV cache and of the model's positions SGLang leaves so many unused (tp_worker.py:
max_req_input_len).
"""


def sequence_limit(cfg: Config, max_positions: int | None) -> tuple[int, str]:
    """(tokens, setting) of the longest sequence, prompt and response, that the run's servers and
    its trainer take.
    """
    # a sequence above the cap of a micro-batch is one by itself: memory is planned for the longest
    # prompt and response
    rows, cache = cfg.run.max_tokens_per_micro_batch, cfg.rollout.max_total_tokens
    response = max(cfg.rollout.max_response_tokens, cfg.eval.max_response_tokens or 0)
    limits = [
        (
            max(rows, cfg.data.max_prompt_tokens + response),
            f"run.max_tokens_per_micro_batch = {rows}",
        )
    ]
    if not cfg.rollout.urls:
        limits.append((cache - SERVER_TOKENS, f"rollout.max_total_tokens = {cache}"))
        if max_positions is not None and not any(
            arg.startswith("--context") for arg in cfg.rollout.server_args
        ):
            limits.append(
                (
                    max_positions - SERVER_TOKENS,
                    f"the model's max_position_embeddings = {max_positions}",
                )
            )
    return min(limits)


@dataclass
class EpisodeRunner:
    """`cfg.function`, `cfg.environment` or `cfg.command`, and what its sessions need.

    One per rollout client.
    """

    cfg: AgentConfig
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_retries: int  # of an episode that failed
    sequence_limit: tuple[int, str] | None = None  # of a session
    processes: EnvironmentProcesses | None = None  # of agent.isolation = process
    hidden_env: str = ""  # variable with the servers' key

    def __post_init__(self) -> None:
        self.function = load_function(self.cfg, self.processes, self.hidden_env)
        longest = None if self.sequence_limit is None else self.sequence_limit[0]
        self.chat = (
            Chat(self.cfg.renderer, self.tokenizer, self.cfg.history, longest)
            if self.cfg.renderer
            else None
        )
        self.endpoint = Endpoint(self.cfg.endpoint_host)
        self.has_worked = False  # in some episode of the last call

    def call(self, sampling: Sampling, sample: SampleTurn, call: Call) -> EpisodeCall:
        """For one fill() of the client, in its event loop."""
        return EpisodeCall(self, sampling, sample, call)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Episodes run inside: it ends the endpoint that they may have opened in this event loop."""
        try:
            yield
        finally:
            await self.endpoint.close()

    def adapt(self, sampling: Sampling) -> Sampling:
        """`sampling` with what ends a turn in the model's chat format."""
        ends = [] if self.chat is None else self.chat.stop_token_ids
        return replace(
            sampling, stop_token_ids=list(dict.fromkeys([*sampling.stop_token_ids, *ends]))
        )


RAISED = (Exception, EpisodeStopped, BaseExceptionGroup, SystemExit, asyncio.CancelledError)
"""What a function may raise.  A TaskGroup puts what its tasks raise into a group."""


def is_full(error: BaseException) -> bool:
    """Whether only a full context ended the function: also as an OpenAI client raises it, and in a
    TaskGroup.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_full, error.exceptions))
    return (
        isinstance(error, ContextFull) or getattr(error, "code", None) == "context_length_exceeded"
    )


@dataclass
class EpisodeCall:
    """The episodes of one fill() of the client, at most agent.concurrency of them at a time.

    call: the client's, which ends the tasks that run.  failures: what each failed episode failed
    with; done: the prompts of those that ended.
    """

    runner: EpisodeRunner
    sampling: Sampling
    sample: SampleTurn
    call: Call
    failures: list[RolloutError] = field(default_factory=list)
    done: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counters = self.call.counters
        limit = self.runner.cfg.concurrency
        self._slots = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()

    async def fill(self, group: PartialGroup) -> None:
        """An episode for every response that `group` lacks.

        Raises RolloutError for one that failed (agent.on_error), and what `sample` raises; the
        others run on, so that what they have can be kept.
        """
        tasks = [asyncio.create_task(self._in_turn(group, index)) for index in group.missing]
        self.call.episodes.update(tasks)
        for task in tasks:
            task.add_done_callback(self._ended)
        waiting, cancelled = set(tasks), False
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for task in [task for task in tasks if task in done]:
                try:
                    task.result()
                except GroupCancelled:
                    cancelled = True
        if cancelled:
            raise GroupCancelled

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.call.episodes.discard(task)  # an open call has episodes without end
        if not task.cancelled():
            task.exception()  # raised by `fill`, or after another one's: asyncio need not name it

    def check(self) -> None:
        """Raise RolloutError where all of several episodes failed: agent.on_error = drop would
        leave nothing to learn from.

        Those of one prompt say nothing of a function that worked just before: dynamic sampling may
        draw a single one.
        """
        if not (count := len(self.done)):
            return
        had_worked, self.runner.has_worked = self.runner.has_worked, len(self.failures) < count
        of_one_prompt = all(prompt is self.done[0] for prompt in self.done)
        if count > 1 and not self.runner.has_worked and not (of_one_prompt and had_worked):
            raise RolloutError(f"all {count} episodes failed, the last one: {self.failures[-1]}")

    async def _in_turn(self, group: PartialGroup, index: int) -> None:
        async with self._slots:
            await self._episode(group, index, f"{self.sampling.id_prefix}{group.prompt.id}/{index}")
        self.done.append(group.prompt)

    async def _episode(self, group: PartialGroup, index: int, name: str) -> None:
        cfg = self.runner.cfg
        tries = 1 + self.runner.max_retries if cfg.on_error == "retry" else 1
        for attempt in range(1, tries + 1):
            session = self._session(group.prompt, name, group.prefixes.get(index))
            try:
                group.put(index, await self._run(session, group.prompt))
                return
            except (GroupCancelled, RolloutError, asyncio.CancelledError):
                self._keep(group, index, session)
                raise
            # of the user's function: counted, and raised where it may not be tried again
            except Exception as error:
                group.prefixes.pop(index, None)  # it might lead there again
                self.counters.failed_episodes += 1
                self.counters.redrawn_samples += attempt < tries
                why = f"{type(error).__name__}: {error}"
                if attempt < tries:
                    logger.warning("rollout %s: episode failed, sampled again: %s", name, why)
                    continue
                failure = RolloutError(
                    f"rollout {name}: {cfg.setting} failed ({why}), attempt {attempt} of {tries};"
                    " mend it, or set agent.on_error = retry or"
                    f" drop\n{''.join(traceback.format_exception(error))}"
                )
                if cfg.on_error != "drop":
                    raise failure from error
                self.failures.append(failure)
                self.counters.dropped_episodes += 1
                logger.warning("rollout %s: episode failed, left out of its group: %s", name, why)
                group.put(index, await self._dropped(session, group.prompt, name))

    def _session(self, prompt: Prompt, name: str, recorded: Rollout | None) -> Session:
        in_flight: set[asyncio.Future[None]] = set()

        async def sample_turn(turn: PartialGroup) -> None:
            if session.stopped_by is None:
                in_flight.add(answered := asyncio.get_running_loop().create_future())
                try:
                    return await self.sample(turn)
                except (GroupCancelled, RolloutError) as error:
                    session.stopped_by = error
                finally:
                    in_flight.discard(answered)
                    answered.set_result(None)
            if in_flight and isinstance(session.stopped_by, GroupCancelled):
                await asyncio.wait(
                    in_flight
                )  # aborted, too: the end of this turn would end them before they are answered
            raise EpisodeStopped

        if recorded is not None:
            self.counters.resumed_episodes += 1
        runner = self.runner
        session = Session(
            prompt,
            name=name,
            max_tokens=self.sampling.max_tokens,
            vocab_size=runner.vocab_size,
            tokenizer=runner.tokenizer,
            chat=runner.chat,
            sample=sample_turn,
            max_episode_tokens=runner.cfg.max_episode_tokens,
            sequence_limit=runner.sequence_limit,
            recorded=recorded,
            counters=self.counters,
            trace=self.call.trace,
            open_endpoint=partial(
                runner.endpoint.open,
                temperature=self.sampling.temperature,
                truncation=self.sampling.truncation,
            ),
            is_over=lambda: self.call.is_over,
        )
        return session

    async def _run(self, session: Session, prompt: Prompt) -> Rollout:
        episode, is_cut, seconds = None, False, self.runner.cfg.episode_timeout_seconds
        limit, started = asyncio.timeout(seconds), time.monotonic()
        try:
            with session.span("episode", "episode"):
                async with limit:
                    episode = await self.runner.function(session, prompt)
        except RAISED as error:
            if not session.is_stopped:
                if limit.expired():
                    raise EpisodeError(
                        f"it took longer than agent.episode_timeout_seconds = {seconds:g}"
                    ) from error
                if not is_full(error):
                    if isinstance(error, Exception):
                        raise
                    # sys.exit, or a task that the function itself cancelled: else it would end the
                    # run
                    raise EpisodeError(f"{type(error).__name__}: {error}") from error
                episode, is_cut = session.finish(), True
        finally:
            session.end()
            self.runner.endpoint.end(session)
        if session.stopped_by is not None:  # also where the function handled it
            raise session.stopped_by
        # cancelled for it; not cancelling(): a TaskGroup leaves that counted (Python 3.11)
        if self.call.is_over:
            raise asyncio.CancelledError
        if limit.expired():
            raise EpisodeError(
                f"it took longer than agent.episode_timeout_seconds = {seconds:g}, and ignored"
                " its end"
            )
        # another one's tokens would be learned from twice
        if episode is None or episode is not session.episode:
            raise TypeError(
                f"returned {type(episode).__name__}, must be session.finish() of this session,"
                " unchanged"
            )
        self.call.stats.environment_seconds.append(
            time.monotonic() - started - session.sampling_seconds
        )
        self._count_unused(session)
        reason: FinishReason = "length" if is_cut or session.is_full else "stop"
        rollout = replace(episode.rollout, finish_reason=reason)
        return rollout.with_episode(reward=episode.reward, metrics=episode.metrics)

    def _keep(self, group: PartialGroup, index: int, session: Session) -> None:
        """What the session has, for the next run of the episode."""
        found = session.unfinished()
        if found is not None and self.runner.cfg.resume == "continue":
            group.put(index, found)
        elif found is not None:
            self.counters.redrawn_samples += 1

    def _count_unused(self, session: Session) -> None:
        """A record that the episode did not follow to its end."""
        if tokens := session.recorded.tokens_left:
            self.counters.diverged_episodes += 1
            self.counters.diverged_tokens += tokens
            logger.warning(
                "rollout %s: resumed, it asked for other turns than before the interruption: %d"
                " recorded tokens dropped; an environment that cannot be repeated needs"
                " agent.resume = restart",
                session.name,
                tokens,
            )

    async def _dropped(self, session: Session, prompt: Prompt, name: str) -> Rollout:
        """Stands for a failed episode in its group: what it sampled, or else one token; without a
        reward, never learned from.
        """
        try:
            rollout = session.finish().rollout
        except EpisodeError:  # it failed before its first turn
            session = self._session(prompt, name, None)
            try:
                await session.generate(max_tokens=1)
            except EpisodeStopped:
                raise session.stopped_by or GroupCancelled from None
            rollout = session.finish().rollout
        rollout = replace(rollout, finish_reason="stop")
        return rollout.with_episode(reward=math.nan, metrics={})
