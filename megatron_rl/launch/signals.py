"""SIGTERM and SIGUSR1: save and stop between two stages of a step, within checkpoint.grace_seconds.

A separate thread notices the signal, also while the main thread waits in a collective.  No rank
decides alone: the ranks agree at the places where they can stop (`Trainer.stop_if_signalled`).
When the grace period is over, for instance because a peer hangs, the process exits immediately; a
restart continues from the last complete checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from megatron_rl.config.device_limits import GRACE_SECONDS, Device, seconds
from megatron_rl.launch.exit_codes import REQUEUE

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent dies
LAUNCHER = "MEGATRON_RL_LAUNCHER"
"""Environment variable that `megatron-rl launch` sets for its ranks, which it lets save."""


class StoppedBySignal(RuntimeError):
    """A signal ended the run, which is saved; main exits with REQUEUE."""


class StopSignal:
    """Notes the first signal; use it as a context manager in the main thread.

    Until `hold` there is nothing to save: a signal interrupts the main thread, and the context
    raises StoppedBySignal.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.name: str | None = None
        """Name of the first signal received."""
        self._is_held = self._has_interrupted = False
        self._on_signal: Callable[[], None] = lambda: None
        self._done = threading.Event()
        self._read, self._write = os.pipe()

    def __enter__(self) -> StopSignal:
        # a handler must never wait
        os.set_blocking(self._write, False)
        # Python runs handlers in the main thread only; the descriptor is written even while that
        # thread waits in C
        self._old_descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._thread = threading.Thread(target=self._watch, daemon=True, name="stop-signal")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_descriptor)
        self._done.set()
        os.close(self._write)  # ends the thread
        self._thread.join()
        os.close(self._read)
        if kind is KeyboardInterrupt and self._has_interrupted:
            raise StoppedBySignal(
                "stopped by a signal before the first step: nothing had been trained"
            ) from None

    def hold(self, on_signal: Callable[[], None] = lambda: None) -> None:
        """Let a signal only set `name` from now on.

        `on_signal` is then called once, on another thread, to cancel what may exceed the grace
        period.
        """
        self._on_signal = on_signal
        self._is_held = True

    def _handle(self, number: int, frame: object) -> None:
        if not self._is_held:
            self._has_interrupted = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Read the numbers of signals, which the interpreter's wakeup descriptor writes.

        Runs in the thread.
        """
        while numbers := os.read(self._read, 64):
            received = [signal.Signals(number) for number in numbers if number in SIGNALS]
            if received and self.name is None:
                self.name = received[0].name
                threading.Thread(target=self._end_after_grace, daemon=True, name="grace").start()
                self._on_signal()  # after the timer has started: it may take long or fail

    def _end_after_grace(self) -> None:
        started = time.monotonic()
        if not self._done.wait(self.grace_seconds):
            print(
                f"rank {os.environ.get('RANK', 0)}: {self.name}: not saved"
                f" {time.monotonic() - started:.0f} s after the signal (checkpoint.grace_seconds);"
                " a restart continues from the last complete checkpoint",
                file=sys.stderr,
                flush=True,
            )
            os._exit(REQUEUE)  # the main thread may never return from its collective


def grace_period(setting: float | Literal["auto"], device: Device) -> float:
    """Return checkpoint.grace_seconds in seconds.

    auto: plain torchrun kills its ranks after 30 s, which is enough on the CPU only.
    """
    is_killed_early = "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ
    return seconds(setting, GRACE_SECONDS, "cpu" if is_killed_early else device)


def follow_launcher() -> None:
    """Under torchrun, get SIGTERM when it dies, even by SIGKILL.

    Orphaned ranks would keep their GPUs.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
