"""Runs a user's rollout function for every response of a group: G episodes of a prompt side by
side.

    EpisodeRunner   one per rollout client: the function, and what its sessions share
    EpisodeCall     one per fill() of the client: its groups, tries, failures and counters
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_rl.config import AgentConfig, Config
from megatron_rl.records import FinishReason, Prompt, Rollout
from megatron_rl.rollout.agents.chat import Chat
from megatron_rl.rollout.agents.endpoint import Endpoint
from megatron_rl.rollout.agents.environment_process import EnvironmentProcesses
from megatron_rl.rollout.agents.episode import ContextFull, EpisodeError, EpisodeStopped
from megatron_rl.rollout.agents.program_process import ProgramProcesses
from megatron_rl.rollout.agents.question import CONTEXT_FULL
from megatron_rl.rollout.agents.rollout_function import load_function, user_processes
from megatron_rl.rollout.agents.sequence_limit import sequence_limit
from megatron_rl.rollout.agents.session import Session, SessionSettings
from megatron_rl.rollout.client.call import Call, GroupCancelled, SampleTurn
from megatron_rl.rollout.client.request import RolloutError
from megatron_rl.rollout.client.sampling import Sampling
from megatron_rl.rollout.group import Group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JOINED_BYTES = 1 << 20
"""Expert ids of an episode that are joined in about a millisecond."""

logger = logging.getLogger(__name__)


def check_agent(cfg: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, naming the key, for [agent] that cannot start."""
    load_function(cfg)
    if cfg.renderer:
        Chat(cfg.renderer, tokenizer, cfg.history)


def make_runner(
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    server_tokens: int | None = None,
) -> EpisodeRunner | None:
    """Return the runner of [agent], None where a rollout is one response.

    server_tokens: the longest input that the servers take, None where it is not known.
    """
    if not cfg.agent.name:
        return None
    limit = sequence_limit(cfg, server_tokens)
    processes = user_processes(cfg.agent, cfg.key_variables)
    if processes is not None:  # they end with the trainer
        processes.start()
    return EpisodeRunner(
        cfg.agent,
        tokenizer,
        vocab_size,
        cfg.rollout.max_retries,
        limit,
        processes,
        cfg.key_variables,
    )


@dataclass
class EpisodeRunner:
    """The rollout function of [agent] and what its sessions need; one per rollout client."""

    cfg: AgentConfig
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_retries: int
    """Further tries of an episode that failed, under agent.on_error = retry."""
    sequence_limit: tuple[int, str] | None = None
    """(tokens, setting) of the longest sequence of a session."""
    processes: EnvironmentProcesses | ProgramProcesses | None = None
    """Processes from which those of episodes are forked (rollout_function.user_processes)."""
    hidden_env: Sequence[str] = ()
    """Environment variables with keys of servers."""

    def __post_init__(self) -> None:
        self.function = load_function(self.cfg, self.processes, self.hidden_env)
        longest = None if self.sequence_limit is None else self.sequence_limit[0]
        self.chat = (
            Chat(self.cfg.renderer, self.tokenizer, self.cfg.history, longest)
            if self.cfg.renderer
            else None
        )
        self.endpoint = Endpoint(self.cfg.endpoint_host)
        self.has_worked = False
        """Some episode of the last call did not fail."""

    def call(self, sampling: Sampling, sample: SampleTurn, call: Call) -> EpisodeCall:
        """Return the episodes of one fill() of the client, in its event loop."""
        return EpisodeCall(self, sampling, sample, call)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Run episodes inside; at the end, close the endpoint that they may have opened."""
        try:
            yield
        finally:
            await self.endpoint.close()

    def adapt(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with the tokens that end a turn in the model's chat format."""
        ends = [] if self.chat is None else self.chat.stop_token_ids
        stop_token_ids = list(dict.fromkeys([*sampling.stop_token_ids, *ends]))
        return replace(sampling, stop_token_ids=stop_token_ids)


RAISED = (Exception, EpisodeStopped, BaseExceptionGroup, SystemExit, asyncio.CancelledError)
"""Exceptions of a rollout function.  A TaskGroup puts what its tasks raise into a group."""


def is_full(error: BaseException) -> bool:
    """Return True where only a full context ended the function: also as clients of the endpoint
    raise it, and in a TaskGroup.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_full, error.exceptions))
    codes = [getattr(error, "code", None)]  # of OpenAI's client
    body = getattr(error, "body", None)  # of Anthropic's
    if isinstance(body, Mapping) and isinstance(details := body.get("error"), Mapping):
        codes.append(details.get("code"))
    return isinstance(error, ContextFull) or CONTEXT_FULL in codes


@dataclass
class EpisodeCall:
    """The episodes of one fill() of the client, at most agent.concurrency of them at a time."""

    runner: EpisodeRunner
    sampling: Sampling
    sample: SampleTurn
    call: Call
    """The client's call, which ends the tasks that run."""
    failures: list[RolloutError] = field(default_factory=list)
    """The errors of failed episodes."""
    done: list[Prompt] = field(default_factory=list)
    """The prompts of episodes that ended."""

    def __post_init__(self) -> None:
        self.counters = self.call.counters
        limit = self.runner.cfg.concurrency
        self._slots = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()

    async def fill(self, group: Group) -> None:
        """Play an episode for every response that `group` lacks.

        Raises RolloutError for one that failed (agent.on_error), and what `sample` raises; the
        other episodes continue, so that their turns can be kept.
        """
        tasks = [asyncio.create_task(self._in_turn(group, index)) for index in group.missing]
        self.call.episodes.update(tasks)
        for task in tasks:
            task.add_done_callback(self._ended)
        # GroupCancelled is raised when all tasks have ended; any other error at once
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
            # `fill` raises it, or that of an earlier task: asyncio need not report it
            task.exception()

    def check(self) -> None:
        """Raise RolloutError where all of several episodes failed: agent.on_error = drop would
        leave nothing to learn from.

        Where the function worked just before, a single prompt is no proof that it is broken:
        dynamic sampling may draw a single one.
        """
        if not (count := len(self.done)):
            return
        had_worked, self.runner.has_worked = self.runner.has_worked, len(self.failures) < count
        of_one_prompt = all(prompt is self.done[0] for prompt in self.done)
        if count > 1 and not self.runner.has_worked and not (of_one_prompt and had_worked):
            raise RolloutError(f"all {count} episodes failed, the last one: {self.failures[-1]}")

    async def _in_turn(self, group: Group, index: int) -> None:
        async with self._slots:  # agent.concurrency
            await self._episode(group, index, f"{self.sampling.id_prefix}{group.prompt.id}/{index}")
        self.done.append(group.prompt)

    async def _episode(self, group: Group, index: int, name: str) -> None:
        cfg = self.runner.cfg
        tries = 1 + self.runner.max_retries if cfg.on_error == "retry" else 1
        for attempt in range(1, tries + 1):
            if self.call.enough:  # it would be thrown away, with all that it does to the world
                raise GroupCancelled
            if cfg.resume == "restart" and group.prefixes.pop(index, None) is not None:
                self.counters.redrawn_samples += 1  # of a checkpoint, by a run that continued it
            session = self._session(group.prompt, name, group.prefixes.get(index))
            try:
                group.put(index, await self._run(session, group.prompt))
                session.release()
                return
            except (GroupCancelled, RolloutError, asyncio.CancelledError):
                self._keep(group, index, session)
                raise
            # an error of the user's function: counted, and raised where it may not be tried again
            except Exception as error:
                group.prefixes.pop(index, None)  # the recorded turns might lead to the error again
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

        async def sample_turn(turn: Group) -> None:
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
                # they are aborted, too: raising now would end them before they are answered
                await asyncio.wait(in_flight)
            raise EpisodeStopped

        if recorded is not None:
            self.counters.resumed_episodes += 1
        runner, sampling = self.runner, self.sampling
        settings = SessionSettings(
            tokenizer=runner.tokenizer,
            vocab_size=runner.vocab_size,
            chat=runner.chat,
            max_tokens=sampling.max_tokens,
            max_episode_tokens=runner.cfg.max_episode_tokens,
            sequence_limit=runner.sequence_limit,
        )
        open_endpoint = partial(
            runner.endpoint.open, temperature=sampling.temperature, truncation=sampling.truncation
        )
        session = Session(
            prompt,
            name,
            settings,
            call=self.call,
            sample=sample_turn,
            open_endpoint=open_endpoint,
            recorded=recorded,
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
                    # sys.exit, or a task that the function cancelled, must not end the run
                    raise EpisodeError(f"{type(error).__name__}: {error}") from error
                episode, is_cut = session.finish(), True
        finally:
            session.end()
            self.runner.endpoint.end(session)
        if session.stopped_by is not None:  # also where the function handled it
            raise session.stopped_by
        # The call cancelled this task, and the function ignored it.  Task.cancelling() would not
        # tell: a TaskGroup leaves it counted (Python 3.11).
        if self.call.is_over:
            raise asyncio.CancelledError
        if limit.expired():
            raise EpisodeError(
                f"it took longer than agent.episode_timeout_seconds = {seconds:g}, and ignored"
                " its end"
            )
        # tokens of another episode would be learned from twice
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
        if session.num_route_bytes > JOINED_BYTES:
            await asyncio.to_thread(lambda: episode.rollout)
        rollout = replace(episode.rollout, finish_reason=reason)
        return rollout.with_episode(reward=episode.reward, metrics=episode.metrics)

    def _keep(self, group: Group, index: int, session: Session) -> None:
        """Keep the turns of the session for the next run of the episode."""
        unfinished = session.unfinished()
        if unfinished is not None and self.runner.cfg.resume == "continue":
            group.put(index, unfinished)
        elif unfinished is not None:
            self.counters.redrawn_samples += 1

    def _count_unused(self, session: Session) -> None:
        """Count recorded turns that the resumed episode did not ask for."""
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
        """Return the rollout of a failed episode in its group: its turns, or one token where it has
        none.  It has no reward, so that it is never learned from.
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
