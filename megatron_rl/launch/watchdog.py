"""Nothing hangs unnamed: every rank says where it is, rank 0 says who keeps the others waiting, and all stop with their stacks.

A thread of each rank writes a beat to the job's store: a count, and the stage that the main thread is in.  Rank 0 reads all
of them and writes a verdict when a rank has stopped, has fallen silent, or a stage lasts too long; every rank that reads the
verdict (or finds rank 0 silent, or the store gone) prints it, writes the stacks of its threads, and exits: the main thread
sits in a collective that nothing else can end.  A beat costs one write and two reads, whatever the number of ranks; rank 0
reads all of them in one request.

A rank whose connection to another broke waits a moment for the verdict: it says who is gone, the broken connection does not.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from megatron_rl.launch.exit_codes import STALLED

HEARTBEAT_SECONDS = 2.0
LOST_HEARTBEATS = 5
"""A rank that has missed so many while others lost connections is what they lost."""
NOT_STARTED, LOADING, ENDED, FAILED = "start-up", "loading", "ended", "failed"
CUT_OFF = "a collective that lost its peer"


@dataclass(frozen=True)
class Heartbeat:
    """count: how often this rank has beaten; entered: how many stages it has entered, the same order on every rank."""

    count: int
    entered: int
    stage: str
    step: int
    seconds: float
    """In this stage."""
    words: str = ""
    """What a rank that failed said; of one that runs, the servers that it waits for."""
    host: str = ""

    @property
    def where(self) -> str:
        return f"{self.stage} of step {self.step + 1}" if self.step >= 0 else self.stage

    @property
    def last(self) -> str:
        return f"last in {self.where} on {self.host}"


class Watchdog:
    """Use as a context manager around the run; `enter` at every stage.  An exception that leaves it is told to all ranks.
    One that says that a connection broke may end the process there, as a verdict does.

    store: has set, get and multi_get of bytes (torch.distributed's); None: a world of one, which only watches its own stages.
    stage_seconds: longest time in one stage; silence_seconds: a rank not heard of for so long is taken for dead.
    agreed: exceptions with which all ranks end together; like an interrupt they are no failure of one.
    stop: called with the verdict, in the thread; the default never returns.
    """

    def __init__(
        self,
        store: Any | None,
        rank: int,
        world_size: int,
        *,
        stage_seconds: float,
        silence_seconds: float,
        folder: Path,
        agreed: tuple[type[Exception], ...] = (),
        stop: Callable[[str], None] | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._stage_seconds, self._silence_seconds = stage_seconds, silence_seconds
        self._folder = folder
        self._agreed = agreed
        self._stop = stop or self._exit
        self._state = (0, NOT_STARTED, -1, time.monotonic())
        self._count = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self.waiting_for: Callable[[], str] = str
        """Names the servers whose answers this rank waits for; called in the thread."""
        self._leader: Heartbeat | None = None  # rank 0, as last read
        self._asked: float | None = None  # since when the store owes an answer
        self._done, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._guard = threading.Thread(target=self._watch_store, name="watchdog of the store", daemon=True)
        if store is not None:
            self._beat(time.monotonic())
            if rank == 0:
                store.set("verdict", "")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        self._guard.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        failed = isinstance(error, Exception) and not isinstance(error, self._agreed)
        words = f"{self._where()}: {type(error).__name__}: {error}"[:2000] if failed else ""
        if failed and error is not None:
            error.add_note(f"in {self._where()}")
        if error is not None and failed and lost_peer(error) and self._store is not None:
            self._await_verdict(words)
        self._done.set()
        self._thread.join(2 * HEARTBEAT_SECONDS)
        self._state = (self._state[0], FAILED if failed else ENDED, self._state[2], time.monotonic())
        if self._store is not None:
            try:
                self._answered(lambda: self._leave(words))
            except RuntimeError as gone:
                print(f"rank {self.rank}: the job's store is gone: {gone}", file=sys.stderr)
        self._ended.set()

    def _await_verdict(self, words: str) -> None:
        """Go on beating, as one that lost a peer, until it is known which; the verdict ends the process."""
        print(f"rank {self.rank}: lost a connection in {words}; looking who is gone", file=sys.stderr, flush=True)
        self._state = (self._state[0], CUT_OFF, self._state[2], time.monotonic())
        self._thread.join((2 * LOST_HEARTBEATS + 4) * HEARTBEAT_SECONDS)

    def _leave(self, words: str) -> None:
        """The last beat.  Rank 0, whose process may hold the store, waits for the others', and lets them read why it fails."""
        self._beat(time.monotonic(), words)
        if self.rank != 0:
            return
        if words:
            self._job_store().set("verdict", f"rank 0 stopped in {words}")
        until = time.monotonic() + LOST_HEARTBEATS * HEARTBEAT_SECONDS
        while time.monotonic() < until and any(beat.stage not in (ENDED, FAILED) for beat in self._read_all()):
            time.sleep(HEARTBEAT_SECONDS / 20)

    def enter(self, stage: str, step: int = -1) -> None:
        """The main thread begins a stage; `step` from 0, -1 outside steps."""
        self._state = (self._state[0] + 1, stage, step, time.monotonic())

    def _where(self) -> str:
        entered, stage, step, _ = self._state
        return Heartbeat(0, entered, stage, step, 0.0).where

    def tick(self, now: float) -> str | None:
        """Beat once; the verdict, if there is one."""
        if self._store is None:
            return self._own_verdict(now)
        try:
            return self._answered(lambda: self._ask(now))
        except RuntimeError as error:
            return f"the job's store cannot be reached, {self._place_of_store()} is down: {error}"

    def _ask(self, now: float) -> str | None:
        self._beat(now, self.waiting_for())
        if self.rank == 0:
            verdict = self._judge(self._read_all(), now)
            if verdict:
                self._job_store().set("verdict", verdict)
            return verdict
        self._leader = self._read(0)
        if verdict := self._job_store().get("verdict").decode():
            self._state = (self._state[0], ENDED, self._state[2], self._state[3])
            self._beat(now)  # rank 0 need not wait for this rank
            return verdict
        return self._rank_0_silent(self._leader, now)

    def _answered(self, ask: Callable[[], str | None]) -> str | None:
        """`ask`, under the guard's eyes: a node without power answers nothing, and the store's client waits for ever."""
        self._asked = time.monotonic()
        try:
            return ask()
        finally:
            self._asked = None

    def _watch(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            verdict = self.tick(time.monotonic())
            if verdict and not self._done.is_set():
                if self.rank == 0 and self._store is not None:
                    self._done.wait(3 * HEARTBEAT_SECONDS)  # the store may live in this process: let the others read
                self._stop(verdict)
                return

    def _watch_store(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            asked, patience = self._asked, self._patience(self._state[1] == CUT_OFF)
            if asked is not None and time.monotonic() - asked > patience:
                self._stop(
                    f"the job's store has not answered for {patience:.0f} s, {self._place_of_store()} is down or cut off"
                )
                return

    def _place_of_store(self) -> str:
        """torchrun keeps it at rank 0."""
        return "the node of rank 0" + (f" ({self._leader.host}, {self._leader.last})" if self._leader else "")

    def _patience(self, is_lost: bool) -> float:
        """Seconds of silence until a rank is taken for dead; is_lost: connections to somebody have broken."""
        return min(self._silence_seconds, LOST_HEARTBEATS * HEARTBEAT_SECONDS) if is_lost else self._silence_seconds

    def _job_store(self) -> Any:
        assert self._store is not None, "a rank alone has no store to ask"
        return self._store

    def _beat(self, now: float, words: str = "") -> None:
        self._count += 1
        entered, stage, step, since = self._state
        beat = [self._count, entered, stage, step, round(now - since, 1), words, socket.gethostname()]
        self._job_store().set(f"beat/{self.rank}", json.dumps(beat))

    def _read(self, rank: int) -> Heartbeat:
        return Heartbeat(*json.loads(self._job_store().get(f"beat/{rank}")))

    def _read_all(self) -> list[Heartbeat]:
        """In one request: a thousand would take a tenth of a second of this process."""
        beats = self._job_store().multi_get([f"beat/{rank}" for rank in range(self.world_size)])
        return [Heartbeat(*json.loads(beat)) for beat in beats]

    def _judge(self, beats: Sequence[Heartbeat], now: float) -> str | None:
        failed = {rank: beat for rank, beat in enumerate(beats) if beat.stage == FAILED}
        if failed:
            return "; ".join(f"rank {rank} stopped in {beat.words}" for rank, beat in failed.items())
        patience = self._patience(any(beat.stage == CUT_OFF for beat in beats))
        silences = [self._silence(rank, beat, now) for rank, beat in enumerate(beats)]
        if max(silences) > patience:
            silent = [
                rank for rank, seconds in enumerate(silences) if seconds > patience / 2
            ]  # a node's ranks beat in turn
            last = "; ".join(f"rank {rank} was {beats[rank].last}" for rank in silent[:8])
            return (
                f"{names(silent)} not heard of for {patience:.0f} s, dead or stopped: {last}.  "
                f"The others: {summary(beats, set(silent))}"
            )
        return stalled(beats, self._stage_seconds)

    def _silence(self, rank: int, beat: Heartbeat, now: float) -> float:
        """Seconds since the count of this rank last changed, by this rank's clock."""
        if beat.stage in (ENDED, FAILED) or rank == self.rank:
            return 0.0
        count, since = self._heard.get(rank, (-1, now))
        if count != beat.count:
            self._heard[rank] = (beat.count, now)
            return 0.0
        return now - since

    def _rank_0_silent(self, beat: Heartbeat, now: float) -> str | None:
        patience = self._patience(self._state[1] == CUT_OFF)
        if self._silence(0, beat, now) > patience:
            return f"rank 0 not heard of for {patience:.0f} s, dead or stopped: {beat.last}"
        return None

    def _own_verdict(self, now: float) -> str | None:
        entered, stage, step, since = self._state
        return stalled([Heartbeat(0, entered, stage, step, now - since, self.waiting_for())], self._stage_seconds)

    def _exit(self, verdict: str) -> None:
        """Say it, write the stacks of all threads, end the process: servers and workers end with it."""
        stacks = self._folder / f"stalled_rank{self.rank}.txt"
        try:
            with open(stacks, "w") as file:
                file.write(verdict + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        print(f"megatron_rl watchdog, rank {self.rank}: {verdict}; stacks in {stacks}", file=sys.stderr, flush=True)
        os._exit(STALLED)


def stalled(beats: Sequence[Heartbeat], stage_seconds: float) -> str | None:
    """Who keeps the others waiting, where somebody has been in one stage too long; ranks that have ended count as ahead.

    Reading weights may take as long as it takes: those that load are named only where others wait for them.
    """
    running = {rank: beat for rank, beat in enumerate(beats) if beat.stage not in (ENDED, FAILED, CUT_OFF)}
    late = [
        rank
        for rank, beat in running.items()
        if beat.seconds > stage_seconds and beat.stage not in (NOT_STARTED, LOADING)
    ]
    if not late:
        return None
    least = min(beat.entered for beat in running.values())
    behind = [rank for rank, beat in running.items() if beat.entered == least]
    place = running[behind[0]]
    waits = "".join(f"; rank {rank} waits for {running[rank].words}" for rank in behind if running[rank].words)
    if len(behind) == len(beats):
        return (
            f"every rank has been in {place.where} for more than {stage_seconds:.0f} s: something inside hangs{waits}"
        )
    seconds = max(running[rank].seconds for rank in behind)
    others = summary(beats, set(behind))
    return f"{names(behind)} still in {place.where} after {seconds:.0f} s, and the others wait: {others}{waits}"


def lost_peer(error: BaseException) -> bool:
    """Whether a collective, or the job's store, says that a connection broke or a peer did not answer."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def summary(beats: Sequence[Heartbeat], without: set[int]) -> str:
    """Where the other ranks are: ranks by stage."""
    at: dict[str, list[int]] = {}
    for rank, beat in enumerate(beats):
        if rank not in without:
            at.setdefault(beat.where, []).append(rank)
    return ", ".join(f"{names(ranks)} in {where}" for where, ranks in at.items())


def names(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 3, 5 to 9"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(parts)}"
