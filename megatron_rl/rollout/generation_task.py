"""Sampling on a thread of a leader, while the main thread may train."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import Literal

from megatron_rl.rollout.client.call import Commands, Ending, NewWeights
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.counters import drop_older
from megatron_rl.rollout.client.sampling import Sampling
from megatron_rl.rollout.group import Group


@dataclass
class GenerationTask:
    """One call of RolloutClient.fill on a thread, which samples `groups`."""

    groups: Sequence[Group]
    sampling: Sampling
    keep: int | None = None
    """The call ends when this many groups are complete; None: all."""
    is_open: bool = False
    """The call takes further groups (`add`) and runs until `end`."""
    error: BaseException | None = None
    """The error that ended the call."""
    thread: Thread | None = None
    """The thread of the call; None before it starts and after its end was noticed."""
    events: SimpleQueue[Literal["complete", "renewed", "end"]] = field(default_factory=SimpleQueue)
    """From the call to the main thread: a group is complete; the new weights are taken over
    (`renew`); the call has ended."""
    commands: Commands = field(default_factory=SimpleQueue)
    """From the main thread to an open call: further groups, new weights, and how it ends."""

    def start(self, client: RolloutClient) -> None:
        """Start, or continue after an error with what is still missing."""
        self._mark(is_in_task=True)
        # new queues: the call before may have left events and commands
        self.error, self.events, self.commands = None, SimpleQueue(), SimpleQueue()
        self.thread = Thread(target=self._run, args=(client,), name="sampling", daemon=True)
        self.thread.start()

    def _run(self, client: RolloutClient) -> None:
        try:
            with client.trace.span("sampling", "sampling", groups=len(self.groups)):
                client.fill(
                    self.groups,
                    self.sampling,
                    keep=None if self.is_open else self.keep,
                    on_progress=lambda: self.events.put("complete"),
                    commands=self.commands if self.is_open else None,
                )
        except asyncio.CancelledError:
            self.error = RolloutError("sampling was stopped")
        # asyncio raises it through its loop, where it would end this rank without an error
        except SystemExit as error:
            self.error = RuntimeError(
                f"a task that agent.function started called sys.exit({error.code})"
            )
        except BaseException as error:  # raised in the thread that waits
            self.error = error
        finally:
            self.events.put("end")

    def add(self, groups: Sequence[Group]) -> None:
        """Sample these, too; only while the task is open."""
        for group in self.groups:
            group.is_in_task = not group.is_complete
        # complete groups are released: a step may have trained on them
        self.groups = [*(group for group in self.groups if group.is_in_task), *groups]
        self._mark(is_in_task=True)
        self.commands.put(groups)

    def wait(
        self,
        on_progress: Callable[[], None] = lambda: None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> RolloutError | None:
        """Wait for the end, or until `is_enough`; return the RolloutError that ended the call, if
        any.  Raises every other error.

        is_enough: called at first and after each complete group.
        """
        while not (self.is_open and is_enough()):
            if self.thread is None:  # the call ended before, or there is nothing to sample here
                break
            if self.events.get() == "end":  # not join(): an interrupt must reach the main thread
                self.join()
                self.thread = None
            else:
                on_progress()
        else:
            return None
        if self.error is not None and not isinstance(self.error, RolloutError):
            raise self.error
        return self.error

    def renew(
        self,
        groups: Sequence[Group],
        version: int,
        oldest: int,
        client: RolloutClient | None,
    ) -> None:
        """Continue after a push of the weights `version`: sample `groups`, all groups of the queue.

        On return none of their responses has a token older than `oldest`, except those whose
        requests are being aborted for it.
        """
        self.sampling, self.groups = replace(self.sampling, policy_version=version), list(groups)
        if self.thread is not None:
            self._mark(is_in_task=True)
            self.commands.put(
                NewWeights(version, oldest, groups, lambda: self.events.put("renewed"))
            )
            # wait for the answer; the next `wait` sees groups that complete meanwhile
            while (event := self.events.get()) == "complete":
                pass
            if event == "renewed":
                return
            self.join()
            self.thread = None
        if client is not None:  # the call ended with an error, which `wait` will return
            drop_older(groups, oldest, client.counters)

    def end(self, how: Ending) -> RolloutError | None:
        """End an open task and wait for its end, as `wait` does."""
        self.commands.put(how)
        return self.wait()

    def join(self) -> None:
        """Wait for the thread; nothing is in flight afterwards."""
        if self.thread is not None:
            self.thread.join()
            self._mark(is_in_task=False)

    def _mark(self, *, is_in_task: bool) -> None:
        for group in self.groups:
            group.is_in_task = is_in_task
