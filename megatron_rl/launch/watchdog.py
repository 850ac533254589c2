"""Finds the rank that keeps the others waiting, and ends all ranks instead of letting them hang.

A thread of each rank writes a heartbeat to the job's store: a count, and the stage that the main
thread is in.  Rank 0 reads all heartbeats in one request (with thousands of ranks less often, until
one reports an error).  It writes a verdict when a rank has failed, is silent, or stays in a stage
for too long.  Every rank that reads the verdict (or finds rank 0 silent, or the store gone) prints
it, writes the stacks of its threads, and exits: the main thread waits in a collective that nothing
else can end.

A rank whose connection to another one broke waits a moment for the verdict.  The verdict names the
rank that is gone; the error does not.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import HashStore, Store

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.launch.exit_codes import STALLED
from megatron_rl.launch.heartbeats import (
    CUT_OFF,
    ENDED,
    FAILED,
    NOT_STARTED,
    Heartbeat,
    RankState,
    find_stalled,
    lost_peer,
    memory_in_use,
    stages_of_ranks,
)
from megatron_rl.launch.log_lines import LogLines, encodable
from megatron_rl.launch.status import names

HEARTBEAT_SECONDS = 2.0
READ_AT_ONCE = 1024
"""Ranks whose heartbeats rank 0 reads at every tick.  With k times as many ranks it reads all of
them at every k-th tick, which takes less than 1 % of its time.  Once a rank reports an error it
reads them at every tick.
"""
LOST_HEARTBEATS = 5
"""Number of missed heartbeats after which a rank counts as lost, once a connection broke."""
ALARM = "alarm"
"""A key of the store that exists once a rank is FAILED or CUT_OFF."""


@dataclass(frozen=True)
class WatchSettings:
    """Limits of a watchdog, and the folder for the stacks that it writes."""

    stage_seconds: float
    """Longest time in one stage."""
    silence_seconds: float
    """A rank without a heartbeat for so long counts as dead."""
    folder: Path
    agreed: tuple[type[Exception], ...] = ()
    """Exceptions with which all ranks end together; like an interrupt they are no failure of one
    rank."""


class Watchdog:
    """Watches this rank, and on rank 0 all of them.

    Use it as a context manager around the run, and call `enter` at every stage.  An exception that
    leaves it is reported to all ranks.  One that says that a connection broke may end the process
    there, as a verdict does.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        settings: WatchSettings,
        *,
        stop: Callable[[str], None] | None = None,
        lines: LogLines | None = None,
    ) -> None:
        """Send the first heartbeat.

        `store` is the job's; None means a world of one, which only watches its own stages.  `stop`
        is called with the verdict, in the thread; by default it ends the process.
        """
        self.rank, self.world_size = rank, world_size
        self._store = HashStore() if store is None else store
        self._stage_seconds = settings.stage_seconds
        self._silence_seconds = settings.silence_seconds
        self._folder = settings.folder
        self._agreed = settings.agreed
        self._stop = stop or self._exit
        self._lines = lines or LogLines()
        self._state = RankState(0, NOT_STARTED, -1, time.monotonic())
        self._count = 0
        self._last_seen: dict[int, tuple[int, float]] = {}
        """Rank -> its count of heartbeats, and when that changed."""
        self.waiting_for: Callable[[], str] = str
        """Names the servers whose answers this rank waits for; called in the thread."""
        self.on_heartbeats: Callable[[Mapping[int, Heartbeat]], None] = lambda beats: None
        """Called on rank 0, in the thread, with all heartbeats that were read; must not wait."""
        self.on_verdict: Callable[[str], None] = lambda verdict: None
        """Called with the verdict, in the thread, before the process ends."""
        self._rank_0: Heartbeat | None = None
        """Heartbeat of rank 0 as last read."""
        self._asked: float | None = None
        """Start of a request to the store that is not answered yet."""
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
        # an interrupt is no Exception: it is no failure of one rank
        if isinstance(error, Exception) and not isinstance(error, self._agreed):
            message = encodable(f"{self._state.where}: {type(error).__name__}: {error}")[:2000]
            error.add_note(f"in {self._state.where}")  # launch/errors.py prints it
            if lost_peer(error) and self.world_size > 1:
                self._await_verdict(message)
        self._done.set()
        # its last heartbeat must not overwrite the final state
        self._thread.join(2 * HEARTBEAT_SECONDS)
        self._state = self._state._replace(stage=FAILED if message else ENDED)
        try:
            # an interrupted rank 0 leaves at once: a rank that waits for it in a collective notices
            # its own interrupt only when the connection closes
            patience = LOST_HEARTBEATS if error is None or isinstance(error, Exception) else 1
            self._request(lambda: self._leave(message, patience * HEARTBEAT_SECONDS))
        except RuntimeError as gone:
            self._print(f"rank {self.rank}: the job's store is gone: {gone}")
        self._ended.set()

    def _await_verdict(self, message: str) -> None:
        """Send heartbeats as a rank that lost a peer, until rank 0 knows which one.

        The verdict ends the process.
        """
        self._print(f"rank {self.rank}: lost a connection in {message}; waiting for the cause")
        self._state = self._state._replace(stage=CUT_OFF)
        # rank 0 needs time to find the rank that missed LOST_HEARTBEATS, and this one to read that
        self._thread.join((2 * LOST_HEARTBEATS + 4) * HEARTBEAT_SECONDS)

    def _leave(self, message: str, patience: float) -> None:
        """Send the last heartbeat.

        Rank 0, whose process may have the store, waits `patience` seconds for the others: they read
        there why it fails.
        """
        self._beat(time.monotonic(), message)
        # the others may go: rank 0 alone may serve the store
        if self.rank != 0:
            return
        if message:
            self._store.set("verdict", f"rank 0 stopped in {message}")
        until = time.monotonic() + patience
        while time.monotonic() < until and any(
            b.stage not in (ENDED, FAILED) for b in self._read_all().values()
        ):
            time.sleep(HEARTBEAT_SECONDS / 20)

    def enter(self, stage: str, step: int = -1) -> None:
        """Begin a stage.  `step` counts from 0; -1 outside steps.  Called in the main thread."""
        # memory is read here: in the watchdog's thread CUDA would mean GPU 0, might raise the error
        # of a kernel, or wait for an allocation that hangs
        entered = self._state.entered + 1
        self._state = RankState(entered, stage, step, time.monotonic(), memory_in_use())

    def tick(self, now: float) -> str | None:
        """Send a heartbeat; return the verdict, if there is one."""
        try:
            return self._request(lambda: self._check(now))
        except RuntimeError as error:
            return f"the job's store cannot be reached, {self._store_node()} is down: {error}"

    def _check(self, now: float) -> str | None:
        self._beat(now, self.waiting_for())
        if self.rank == 0:
            # ceil(ranks / READ_AT_ONCE) ticks from one reading to the next
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
        """Return the result of `ask`, watched by the second thread.

        A node without power answers nothing, and the store's client waits forever.
        """
        self._asked = time.monotonic()
        try:
            return ask()
        finally:
            self._asked = None

    def _watch(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            verdict = self.tick(time.monotonic())
            # a run that has just ended needs no verdict
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
        """Name the node of the store: torchrun keeps it at rank 0."""
        beat = self._rank_0
        last = f" ({beat.host}, last in {beat.where})" if beat else ""
        return f"the node of rank 0{last}"

    def _patience(self, is_cut_off: bool) -> float:
        """Return the seconds of silence after which a rank counts as dead.

        They are fewer where a connection to some rank broke (`is_cut_off`).
        """
        if is_cut_off:
            return min(self._silence_seconds, LOST_HEARTBEATS * HEARTBEAT_SECONDS)
        return self._silence_seconds

    def _beat(self, now: float, message: str = "") -> None:
        self._count += 1
        state, host = self._state, socket.gethostname()
        stage = state.stage, state.where, round(now - state.since, 1)
        beat = Heartbeat(self._count, state.entered, *stage, message, host, state.memory)
        self._store.set(f"beat/{self.rank}", json.dumps([*vars(beat).values()]))
        if state.stage in (FAILED, CUT_OFF):
            self._store.set(ALARM, "1")

    def _read_all(self) -> dict[int, Heartbeat]:
        """Return the heartbeat of every rank, from one request and one text.

        A thousand requests would take a tenth of a second of this process.
        """
        beats = self._store.multi_get([f"beat/{rank}" for rank in range(self.world_size)])
        read = {
            rank: Heartbeat(*beat)
            for rank, beat in enumerate(json.loads(b"[" + b",".join(beats) + b"]"))
        }
        self.on_heartbeats(read)
        return read

    def _find_cause(self, beats: Mapping[int, Heartbeat], now: float) -> str | None:
        # an error explains silent and late ranks, so it comes first
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
        others = ""
        if len(silent) < len(beats):
            others = f".  The others: {stages_of_ranks(beats, silent)}"
        return (
            f"no heartbeat from {names(silent)} for {patience:.0f} s, dead or stopped:"
            f" {last}{others}"
        )

    def _silence(self, rank: int, beat: Heartbeat, now: float) -> float:
        """Return the seconds since the count of this rank last changed, by this process's clock."""
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
        """Print the verdict, write the stacks of all threads, and end the process.

        Servers and workers end with it.
        """
        stacks = RunFolder(self._folder).stalled(self.rank)
        try:
            stacks.parent.mkdir(exist_ok=True)
            with open(stacks, "w") as file:
                file.write(self._lines.redactor.text(verdict) + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            # a full or lost disk must not hide the stacks
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        self._print(f"megatron_rl watchdog, rank {self.rank}: {verdict}; stacks in {stacks}")
        os._exit(STALLED)  # sys.exit would only end this thread
