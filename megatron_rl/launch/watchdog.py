"""Finds which rank keeps the others waiting, and ends all ranks with their stacks instead of
letting them hang.

A thread of each rank writes a heartbeat to the job's store: a count, and the stage that the main
thread is in.  Rank 0 reads all of them, in one request (thousands of them less often, until one
reports an error), and writes a verdict when a rank has failed, is silent, or a stage takes too
long.  Every rank that reads the verdict (or finds rank 0 silent, or the store gone) prints it,
writes the stacks of its threads, and exits: the main thread waits in a collective that nothing else
can end.

A rank whose connection to another broke waits a moment for the verdict: it names the rank that is
gone, the error does not.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch.distributed import DistError, HashStore, Store

from megatron_rl.launch.exit_codes import STALLED
from megatron_rl.launch.log_lines import LogLines
from megatron_rl.launch.status import names

HEARTBEAT_SECONDS = 2.0
READ_AT_ONCE = 1024
"""Rank 0 reads all heartbeats once per as many ticks as there are parts of READ_AT_ONCE ranks:
under 1 % of its time. Where a rank reports an error it reads them at every tick."""
LOST_HEARTBEATS = 5
"""Once a connection broke, a rank that has missed this many is the one that was lost."""
NOT_STARTED, LOADING, ENDED, FAILED = "start-up", "loading", "ended", "failed"
CUT_OFF = "a collective that lost its peer"
ALARM = "alarm"
"""A key of the store that exists once a rank is FAILED or CUT_OFF."""


class RankState(NamedTuple):
    """Where the main thread is.  One attribute holds all of it: the watchdog's thread never sees
    half of a change.

    entered: stages entered so far, the same order on every rank; since: time.monotonic(); memory:
    bytes in use as it began.
    """

    entered: int
    stage: str
    step: int
    since: float
    memory: int = 0

    @property
    def where(self) -> str:
        return f"{self.stage} of step {self.step + 1}" if self.step >= 0 else self.stage


@dataclass(frozen=True)
class Heartbeat:
    """count: heartbeats of this rank so far; seconds: in this stage; message: the error of a rank
    that failed, or the servers that a running one waits for; memory: bytes, of its GPU (torch's
    allocator), else resident."""

    count: int
    entered: int
    stage: str
    where: str
    seconds: float
    message: str
    host: str
    memory: int = 0


class Watchdog:
    """Use as a context manager around the run; call `enter` at every stage.  An exception that
    leaves it reaches all ranks. One that says that a connection broke may end the process there, as
    a verdict does.

    store: the job's; None: a world of one, which only watches its own stages.
    stage_seconds: longest time in one stage; silence_seconds: a rank without a heartbeat for so
    long counts as dead.
    agreed: exceptions with which all ranks end together; like an interrupt they are no failure of
    one.
    stop: called with the verdict, in the thread; the default never returns.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        *,
        stage_seconds: float,
        silence_seconds: float,
        folder: Path,
        agreed: tuple[type[Exception], ...] = (),
        stop: Callable[[str], None] | None = None,
        lines: LogLines | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = HashStore() if store is None else store
        self._stage_seconds, self._silence_seconds = stage_seconds, silence_seconds
        self._folder = folder
        self._agreed = agreed
        self._stop = stop or self._exit
        self._lines = lines or LogLines()
        self._state = RankState(0, NOT_STARTED, -1, time.monotonic())
        self._count = 0
        # rank -> its count, and when that changed
        self._last_seen: dict[int, tuple[int, float]] = {}
        self.waiting_for: Callable[[], str] = str
        """Names the servers whose answers this rank waits for; called in the thread."""
        self.on_heartbeats: Callable[[Mapping[int, Heartbeat]], None] = lambda beats: None
        """On rank 0, in the thread: gets all ranks' heartbeats whenever they are read.

        Must not wait.
        """
        self.on_verdict: Callable[[str], None] = lambda verdict: None
        """On rank 0, in the thread: called with the verdict before the process ends."""
        self._rank_0: Heartbeat | None = None  # as last read
        self._asked: float | None = None  # since when a request to the store is unanswered
        self._done, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._store_thread = threading.Thread(
            target=self._watch_store, name="watchdog of the store", daemon=True
        )
        self._beat(time.monotonic())
        if rank == 0:
            self._store.set("verdict", "")  # get() of a missing key would wait for it

    def __enter__(self) -> Watchdog:
        self._thread.start()
        self._store_thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        message = ""
        if isinstance(error, Exception) and not isinstance(error, self._agreed):
            message = f"{self._state.where}: {type(error).__name__}: {error}"[:2000]
            error.add_note(f"in {self._state.where}")  # launch/errors.py prints it
            if lost_peer(error) and self.world_size > 1:
                self._await_verdict(message)
        self._done.set()
        # its last heartbeat must not overwrite the final state
        self._thread.join(2 * HEARTBEAT_SECONDS)
        self._state = self._state._replace(stage=FAILED if message else ENDED)
        try:
            self._request(lambda: self._leave(message))
        except RuntimeError as gone:
            self._print(f"rank {self.rank}: the job's store is gone: {gone}")
        self._ended.set()

    def _await_verdict(self, message: str) -> None:
        """Send heartbeats as a rank that lost a peer, until rank 0 knows which; the verdict ends
        the process.
        """
        self._print(f"rank {self.rank}: lost a connection in {message}; waiting for the cause")
        self._state = self._state._replace(stage=CUT_OFF)
        # time for rank 0 to find the rank that missed LOST_HEARTBEATS, and for this one to read the
        # verdict
        self._thread.join((2 * LOST_HEARTBEATS + 4) * HEARTBEAT_SECONDS)

    def _leave(self, message: str) -> None:
        """The last heartbeat.

        Rank 0, whose process may hold the store, waits for the others: they read there why it
        fails.
        """
        self._beat(time.monotonic(), message)
        if self.rank != 0:
            return
        if message:
            self._store.set("verdict", f"rank 0 stopped in {message}")
        until = time.monotonic() + LOST_HEARTBEATS * HEARTBEAT_SECONDS
        while time.monotonic() < until and any(
            b.stage not in (ENDED, FAILED) for b in self._read_all().values()
        ):
            time.sleep(HEARTBEAT_SECONDS / 20)

    def enter(self, stage: str, step: int = -1) -> None:
        """The main thread begins a stage; `step` from 0, -1 outside steps."""
        # here: in its own thread CUDA is that of GPU 0, may raise the error of a kernel, or wait
        # for an allocation that hangs
        self._state = RankState(
            self._state.entered + 1, stage, step, time.monotonic(), memory_in_use()
        )

    def tick(self, now: float) -> str | None:
        """Send a heartbeat; return the verdict, if there is one."""
        try:
            return self._request(lambda: self._check(now))
        except RuntimeError as error:
            return f"the job's store cannot be reached, {self._store_node()} is down: {error}"

    def _check(self, now: float) -> str | None:
        self._beat(now, self.waiting_for())
        if self.rank == 0:
            if self._count % -(-self.world_size // READ_AT_ONCE) and not self._store.check([ALARM]):
                return None
            verdict = self._find_cause(self._read_all(), now)
            if verdict:
                self._store.set("verdict", verdict)
            return verdict
        self._rank_0 = Heartbeat(*json.loads(self._store.get("beat/0")))
        if verdict := self._store.get("verdict").decode():
            self._state = self._state._replace(stage=ENDED)
            self._beat(now)  # rank 0 need not wait for this rank
            return verdict
        return self._find_silent(
            {0: self._rank_0}, self._patience(self._state.stage == CUT_OFF), now
        )

    def _request(self, ask: Callable[[], str | None]) -> str | None:
        """`ask`, watched by the second thread: a node without power answers nothing, and the
        store's client waits forever.
        """
        self._asked = time.monotonic()
        try:
            return ask()
        finally:
            self._asked = None

    def _watch(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            verdict = self.tick(time.monotonic())
            if verdict and not self._done.is_set():
                self.on_verdict(verdict)
                if self.rank == 0 and self.world_size > 1:
                    # the store may live in this process: let the others read
                    self._done.wait(3 * HEARTBEAT_SECONDS)
                self._stop(verdict)
                return

    def _watch_store(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            asked, patience = self._asked, self._patience(self._state.stage == CUT_OFF)
            if asked is not None and time.monotonic() - asked > patience:
                node = self._store_node()
                self._stop(
                    f"the job's store has not answered for {patience:.0f} s, {node} is down or"
                    " cut off"
                )
                return

    def _store_node(self) -> str:
        """torchrun keeps the store at rank 0."""
        beat = self._rank_0
        return (
            f"the node of rank 0 ({beat.host}, last in {beat.where})"
            if beat
            else "the node of rank 0"
        )

    def _patience(self, is_cut_off: bool) -> float:
        """Seconds of silence until a rank counts as dead; is_cut_off: a connection to some rank
        broke.
        """
        return (
            min(self._silence_seconds, LOST_HEARTBEATS * HEARTBEAT_SECONDS)
            if is_cut_off
            else self._silence_seconds
        )

    def _beat(self, now: float, message: str = "") -> None:
        self._count += 1
        state, host, seconds = self._state, socket.gethostname(), round(now - self._state.since, 1)
        beat = [
            self._count,
            state.entered,
            state.stage,
            state.where,
            seconds,
            message,
            host,
            state.memory,
        ]
        self._store.set(f"beat/{self.rank}", json.dumps(beat))
        if state.stage in (FAILED, CUT_OFF):
            self._store.set(ALARM, "1")

    def _read_all(self) -> dict[int, Heartbeat]:
        """By rank, in one request and one text: a thousand requests would take a tenth of a second
        of this process.
        """
        beats = self._store.multi_get([f"beat/{rank}" for rank in range(self.world_size)])
        read = {
            rank: Heartbeat(*beat)
            for rank, beat in enumerate(json.loads(b"[" + b",".join(beats) + b"]"))
        }
        self.on_heartbeats(read)
        return read

    def _find_cause(self, beats: Mapping[int, Heartbeat], now: float) -> str | None:
        failed = {rank: beat for rank, beat in beats.items() if beat.stage == FAILED}
        if failed:
            return "; ".join(
                f"rank {rank} stopped in {beat.message}" for rank, beat in failed.items()
            )
        patience = self._patience(any(beat.stage == CUT_OFF for beat in beats.values()))
        return self._find_silent(beats, patience, now) or find_stalled(beats, self._stage_seconds)

    def _find_silent(
        self, beats: Mapping[int, Heartbeat], patience: float, now: float
    ) -> str | None:
        silences = {rank: self._silence(rank, beat, now) for rank, beat in beats.items()}
        if max(silences.values()) <= patience:
            return None
        # half: the ranks of a node that is down sent their last heartbeats at different moments
        silent = [rank for rank, seconds in silences.items() if seconds > patience / 2]
        last = "; ".join(
            f"rank {rank} was last in {beats[rank].where} on {beats[rank].host}"
            for rank in silent[:8]
        )
        others = (
            f".  The others: {stages_of_ranks(beats, silent)}" if len(silent) < len(beats) else ""
        )
        return (
            f"no heartbeat from {names(silent)} for {patience:.0f} s, dead or stopped:"
            f" {last}{others}"
        )

    def _silence(self, rank: int, beat: Heartbeat, now: float) -> float:
        """Seconds since the count of this rank last changed, by this rank's clock."""
        if beat.stage in (ENDED, FAILED) or rank == self.rank:
            return 0.0
        count, since = self._last_seen.get(rank, (-1, now))
        if count != beat.count:
            self._last_seen[rank] = (beat.count, now)
            return 0.0
        return now - since

    def _print(self, text: str) -> None:
        self._lines.print_error(text, rank=self.rank)

    def _exit(self, verdict: str) -> None:
        """Print it, write the stacks of all threads, end the process: servers and workers end with
        it.
        """
        stacks = self._folder / f"stalled_rank{self.rank}.txt"
        try:
            with open(stacks, "w") as file:
                file.write(self._lines.redactor.text(verdict) + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        self._print(f"megatron_rl watchdog, rank {self.rank}: {verdict}; stacks in {stacks}")
        os._exit(STALLED)  # sys.exit would only end this thread


def memory_in_use() -> int:
    """Bytes that torch has allocated on this thread's GPU; without one the process's resident
    bytes.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def find_stalled(beats: Mapping[int, Heartbeat], stage_seconds: float) -> str | None:
    """Which ranks keep the others waiting, where one has been in a stage too long; ranks that have
    ended count as ahead.

    Loading weights has no limit: ranks that load are named only where others wait for them.
    """
    running = {
        rank: beat for rank, beat in beats.items() if beat.stage not in (ENDED, FAILED, CUT_OFF)
    }
    limited = [beat for beat in running.values() if beat.stage not in (NOT_STARTED, LOADING)]
    if not any(beat.seconds > stage_seconds for beat in limited):
        return None
    least = min(beat.entered for beat in running.values())
    late = {rank: beat for rank, beat in running.items() if beat.entered == least}
    where = next(iter(late.values())).where
    waits = "".join(
        f"; rank {rank} waits for {beat.message}" for rank, beat in late.items() if beat.message
    )
    if len(late) == len(beats):
        return (
            f"every rank has been in {where} for more than {stage_seconds:.0f} s: a call in it"
            f" hangs{waits}"
        )
    seconds = max(beat.seconds for beat in late.values())
    others = stages_of_ranks(beats, late)
    return (
        f"{names(late)} still in {where} after {seconds:.0f} s, and the others wait:"
        f" {others}{waits}"
    )


def lost_peer(error: BaseException) -> bool:
    """Whether a collective, or the job's store, reports that a connection broke or a peer did not
    answer.
    """
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and "/gloo/" in str(error)
    )


def stages_of_ranks(beats: Mapping[int, Heartbeat], without: Collection[int]) -> str:
    """Where the other ranks are: ranks by stage."""
    ranks_at: dict[str, list[int]] = {}
    for rank, beat in beats.items():
        if rank not in without:
            ranks_at.setdefault(beat.where, []).append(rank)
    return ", ".join(f"{names(ranks)} in {where}" for where, ranks in ranks_at.items())
