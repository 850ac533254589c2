"""The SGLang servers of a run: started together, watched, and restarted when they die.

A server serves only after a weight sync: `take()` returns those that answer now, and the caller
sends weights to exactly these and samples from them alone.  A server that dies is replaced in the
background, at most rollout.max_server_restarts times in all.  The first `take()` after its
replacement answers returns it; until then the replacement reports the weight version UNPUSHED (or
another one, where the checkpoint's own weights are to be sampled).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import httpx

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.server.ports import free_port
from megatron_rl.rollout.server.process import (
    Server,
    ServerOptions,
    options_on_gpus,
    start_server,
)
from megatron_rl.rollout.server.server_info import ServerError

UNPUSHED = "unpushed"
POLL_SECONDS = 0.2
NOTICE_SECONDS = 5.0
"""Longest time between a failed request and the exit of its server's process."""
ANSWER_SECONDS = 30.0
"""Time after which a server that does not answer /model_info hangs."""


@dataclass
class Slot:
    """The place of one server of the pool."""

    index: int
    """Number in the pool, which also determines the log file, port and GPUs."""
    server: Server
    """The server now in this place; a restart replaces it."""
    ready: bool = False


class ServerPool:
    """rollout.num_servers servers on checkpoint `model`, a context manager.

    log: prints one line.
    log_dir: folder of server.log, or of server_INDEX.log for more than one server; restarts are
    appended.

    A thread watches the servers and starts the replacements.  It lives as long as the pool: the
    kernel kills a child when the thread that started it ends.
    """

    def __init__(
        self,
        model: Path,
        rollout: RolloutConfig,
        *,
        log_dir: Path,
        log: Callable[[str], None],
        **options: Unpack[ServerOptions],
    ) -> None:
        self.model = model
        self.rollout = rollout
        self.log_dir = log_dir
        self.log = log
        self.options: ServerOptions = {"weight_version": UNPUSHED, **options}
        self.restarts = 0
        self.slots: list[Slot] = []
        self.taken: list[Server] = []
        self.failure: ServerError | None = None
        self.closing = threading.Event()
        self.watcher = threading.Thread(target=self._watch, name="server pool", daemon=True)

    def __enter__(self) -> ServerPool:
        """Start all servers and wait until every one answers.

        Raises ServerError with the last log lines.
        """
        want_routes = self.options.get("want_routes", True)
        chosen = options_on_gpus(self.rollout, self.options["device"], want_routes=want_routes)
        if chosen:
            self.log(f"servers start with {' '.join(chosen)}; rollout.server_args replaces them")
        try:
            for index in range(self.rollout.num_servers):
                # restarts append to the log, an earlier run's is deleted
                self.log_path(index).unlink(missing_ok=True)
                self.slots.append(Slot(index, self._start(index)))
            # all load their checkpoints at the same time
            for slot in self.slots:
                slot.server.wait_until_ready(self.log)
                slot.ready = True
        except BaseException:  # an interrupt, too, must not leave a server running
            self._stop_all()
            raise
        self.watcher.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.closing.set()
        self.watcher.join()
        self._stop_all()

    def take(self) -> list[str]:
        """Return the URLs of the servers that answer now, at least one: the caller sends weights to
        exactly these.

        Raises ServerError when a server has died more often than rollout.max_server_restarts, with
        its name and its last log lines, or when none answers within its start time and
        ANSWER_SECONDS, counted from the last restart.
        """
        restarts, patience = -1, self.rollout.start_seconds(self.options["device"]) + ANSWER_SECONDS
        while True:
            if self.failure is not None:
                raise self.failure
            self.taken = [slot.server for slot in self.slots if slot.ready]
            if self.taken:
                return [server.url for server in self.taken]
            if restarts != self.restarts:  # a replacement gets the same time again
                restarts, deadline = self.restarts, time.monotonic() + patience
            if time.monotonic() > deadline:
                raise ServerError(
                    f"no server answers, {patience:g} s after the last start:"
                    f" {', '.join(self.not_ready())}; see the logs in {self.log_dir}"
                )
            time.sleep(POLL_SECONDS)

    def index(self, url: str) -> int:
        """Return the index of the server that listens at `url`."""
        return next(slot.index for slot in self.slots if slot.server.url == url)

    def not_ready(self) -> list[str]:
        """Return the URLs of the servers that do not answer, or not yet."""
        return [slot.server.url for slot in self.slots if not slot.ready]

    def lost(self) -> list[str]:
        """Return the URLs of the last take() that do not answer any more, after a failed request.

        The exit of a process may be seen a moment after its connections broke, so this method waits
        for it.  A server whose process lives but does not answer /model_info is killed, and counts
        as lost.
        """
        self._kill_hanging()
        deadline = time.monotonic() + NOTICE_SECONDS
        while True:
            ready = [slot.server for slot in self.slots if slot.ready]
            gone = [server.url for server in self.taken if server not in ready]
            if gone or time.monotonic() > deadline:
                return gone
            time.sleep(POLL_SECONDS)

    def log_path(self, index: int) -> Path:
        is_alone = self.rollout.num_servers == 1
        return self.log_dir / ("server.log" if is_alone else f"server_{index}.log")

    def _start(self, index: int) -> Server:
        # 0 without rollout.gpus: a server then sees all GPUs of this process
        num_gpus = len(self.rollout.gpus) // self.rollout.num_servers
        # with the same seed two servers would sample the same responses
        seed = self.options["seed"] + index + self.rollout.num_servers * self.restarts
        options: ServerOptions = {**self.options, "seed": seed}
        gpus = self.rollout.gpus[index * num_gpus : (index + 1) * num_gpus]
        return start_server(
            self.model,
            self.rollout,
            log_path=self.log_path(index),
            port=self._port(index),
            gpus=gpus,
            **options,
        )

    def _port(self, index: int) -> int:
        """Return rollout.port + index, or a free port that no other server of the pool has, which
        may not listen yet.
        """
        if self.rollout.port:
            return self.rollout.port + index
        taken = {slot.server.url.rpartition(":")[2] for slot in self.slots}
        while str(port := free_port(self.rollout.host)) in taken:
            pass
        return port

    def _watch(self) -> None:
        while not self.closing.wait(POLL_SECONDS):
            try:
                for slot in self.slots:
                    self._check(slot)
            except ServerError as error:
                self.failure = error
                break
            # any error: the run must not continue as if its servers were watched
            except Exception as error:
                self.failure = ServerError(f"watching the SGLang servers failed: {error!r}")
                self.failure.__cause__ = error
                break
        self.closing.wait()  # servers that this thread has started die with it

    def _check(self, slot: Slot) -> None:
        """Replace a dead server, and note when a replacement answers."""
        try:
            if slot.ready:
                slot.server.check_alive()
            elif slot.server.is_ready():
                self.log(
                    f"server {slot.server.url} answers; it serves after the next push of weights"
                )
                slot.ready = True
        except ServerError as error:
            slot.ready = False
            slot.server.stop()  # the remaining processes of its session
            self._replace(slot, error)

    def _replace(self, slot: Slot, error: ServerError) -> None:
        most = self.rollout.max_server_restarts
        if self.restarts >= most:
            raise ServerError(
                f"{error}\nrollout.max_server_restarts = {most} restarts are spent: the run stops;"
                " the log lines above show why servers die"
            )
        self.restarts += 1  # before the start: the replacement's seed depends on it
        dead = slot.server.url
        slot.server = self._start(slot.index)
        cause = str(error).partition(";")[0]
        self.log(
            f"{cause}; restart {self.restarts} of at most {most} of server {dead} as"
            f" {slot.server.url}, log in {slot.server.log_path}"
        )

    def _kill_hanging(self) -> None:
        for server in self.taken:
            try:
                server.ping(ANSWER_SECONDS)
            except httpx.TimeoutException:
                self.log(f"server {server.url} does not answer within {ANSWER_SECONDS:g} s: killed")
                server.process.kill()
            except httpx.TransportError:  # it exited: the watcher replaces it
                pass

    def _stop_all(self) -> None:
        # an ExitStack stops all servers even if stopping one of them fails
        with contextlib.ExitStack() as stack:
            for slot in self.slots:
                # all get the signal first, so that they exit at the same time
                slot.server.process.terminate()
                stack.callback(slot.server.stop)
